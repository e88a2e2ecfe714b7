"""Follow a run's log over a Hugging Face Hub, like `tail -f`.

The same as the command `megatron-follow-log`.
See `megatron/extras/operations/commands/follow_log.py`.
"""

import sys

from megatron.extras.operations.commands.follow_log import run_command

if __name__ == "__main__":
    sys.exit(run_command())
