"""Train small models, fit a law to their losses, and foretell the loss of a large one.

The same as the command `megatron-ladder`.
See `megatron/extras/planner/commands/ladder.py`.
"""

import sys

from megatron.extras.planner.commands.ladder import main

if __name__ == "__main__":
    sys.exit(main())
