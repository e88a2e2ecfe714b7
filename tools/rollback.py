"""Roll a run back to one of its checkpoints.

The same as the command `megatron-rollback`.
See `megatron/commands/rollback.py`.
"""

import sys

from megatron.commands.rollback import main

if __name__ == "__main__":
    sys.exit(main())
