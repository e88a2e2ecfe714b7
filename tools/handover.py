"""Rehearse a change of a run against its own record.

The same as the command `megatron-handover`.
See `megatron/commands/handover.py`.
"""

import sys

from megatron.commands.handover import main

if __name__ == "__main__":
    sys.exit(main())
