"""Concatenate several indexed data sets.

The same as the command `megatron-merge-datasets`.
See `megatron/commands/merge_datasets.py`.
"""

import sys

from megatron.commands.merge_datasets import main

if __name__ == "__main__":
    sys.exit(main())
