"""Keep a Hugging Face Hub repository in sync with a run's events, emissions, logs and checkpoints.

The same as the command `megatron-hub-sync`.
See `megatron/extras/operations/commands/hub_sync.py`.
"""

import sys

from megatron.extras.operations.commands.hub_sync import run_command

if __name__ == "__main__":
    sys.exit(run_command())
