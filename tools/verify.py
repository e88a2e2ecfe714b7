"""Verify a layout before it runs.

The same as the command `megatron-verify`.
See `megatron/commands/verify.py`.
"""

import sys

from megatron.commands.verify import main

if __name__ == "__main__":
    sys.exit(main())
