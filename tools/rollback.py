"""Roll a run back to one of its checkpoints.

The same as the command `megatron-rollback`.
See `megatron/extras/operations/commands/rollback.py`.
"""

import sys

from megatron.extras.operations.commands.rollback import main

if __name__ == "__main__":
    sys.exit(main())
