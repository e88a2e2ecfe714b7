"""Translate a command line from batch-size ramp-up to curriculum learning.

The same as the command `megatron-to-curriculum`.
See `megatron/commands/to_curriculum.py`.
"""

import sys

from megatron.commands.to_curriculum import main

if __name__ == "__main__":
    sys.exit(main())
