"""Report what happened to a run, as text or as a page, or add a note to its chronicle.

The same as the command `megatron-chronicle`.
See `megatron/extras/operations/commands/chronicle.py`.
"""

import sys

from megatron.extras.operations.commands.chronicle import main

if __name__ == "__main__":
    sys.exit(main())
