"""Tokenize text into indexed data sets PREFIX_{key}_document.bin and .idx.

The same as the command `megatron-preprocess`.
See `megatron/extras/preparation/commands/preprocess.py`.
"""

import sys

from megatron.extras.preparation.commands.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
