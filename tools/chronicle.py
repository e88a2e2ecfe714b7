"""Report what happened to a run, as text or as a page, or add a note to its chronicle.

The same as the command `megatron-chronicle`.
See `megatron/commands/chronicle.py`.
"""

import sys

from megatron.commands.chronicle import main

if __name__ == "__main__":
    sys.exit(main())
