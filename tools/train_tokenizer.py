"""Train a byte-level BPE tokenizer and write its vocab.json and merges.txt.

The same as the command `megatron-train-tokenizer`.
See `megatron/extras/preparation/commands/train_tokenizer.py`.
"""

import sys

from megatron.extras.preparation.commands.train_tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
