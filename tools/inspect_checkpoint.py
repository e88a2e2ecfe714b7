"""Show what a checkpoint holds, verify it, or compare it with another one.

The same as the command `megatron-inspect-checkpoint`.
See `megatron/extras/interop/commands/inspect_checkpoint.py`.
"""

import sys

from megatron.extras.interop.commands.inspect_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
