"""Check the nodes of a job. Each rank multiplies matrices, fills memory and writes to disk.

The same as the command `megatron-node-check`.
See `megatron/extras/operations/commands/node_check.py`.
"""

import sys

from megatron.extras.operations.commands.node_check import main

if __name__ == "__main__":
    sys.exit(main())
