"""Report what a training command would do before any machine is allocated.

The same as the command `megatron-plan`.
See `megatron/commands/plan.py`.
"""

import sys

from megatron.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
