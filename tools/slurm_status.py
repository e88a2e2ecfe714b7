"""Write the state of a run's jobs into its main log and raise alerts.

The same as the command `megatron-slurm-status`.
See `megatron/extras/operations/commands/slurm_status.py`.
"""

import sys

from megatron.extras.operations.commands.slurm_status import main

if __name__ == "__main__":
    sys.exit(main())
