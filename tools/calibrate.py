"""Write a hardware file for tools/plan.py, from a micro-benchmark or from measured runs.

The same as the command `megatron-calibrate`.
See `megatron/extras/planner/commands/calibrate.py`.
"""

import sys

from megatron.extras.planner.commands.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
