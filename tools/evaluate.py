"""Evaluate a checkpoint: tasks of lm-evaluation-harness, and the loss of text files.

The same as the command `megatron-evaluate`.
See `megatron/extras/inference/commands/evaluate.py`.
"""

import sys

from megatron.extras.inference.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
