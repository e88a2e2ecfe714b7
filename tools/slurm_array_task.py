"""Run one array task of a Slurm job array. Check nodes, train, and act on how the training ended.

The same as the command `megatron-slurm-array-task`.
See `megatron/extras/operations/commands/slurm_array_task.py`.
"""

import sys

from megatron.extras.operations.commands.slurm_array_task import run_command

if __name__ == "__main__":
    sys.exit(run_command())
