"""Concatenate several indexed data sets.

The same as the command `megatron-merge-datasets`.
See `megatron/extras/preparation/commands/merge_datasets.py`.
"""

import sys

from megatron.extras.preparation.commands.merge_datasets import main

if __name__ == "__main__":
    sys.exit(main())
