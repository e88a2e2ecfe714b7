"""Watch disks and raise an alert before a run cannot save. Run it from cron, every hour.

The same as the command `megatron-fs-watchdog`.
See `megatron/extras/operations/commands/fs_watchdog.py`.
"""

import sys

from megatron.extras.operations.commands.fs_watchdog import main

if __name__ == "__main__":
    sys.exit(main())
