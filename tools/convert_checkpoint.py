"""Convert checkpoints to and from the format of Hugging Face.

The same as the command `megatron-convert-checkpoint`.
See `megatron/extras/interop/commands/convert_checkpoint.py`.
"""

import sys

from megatron.extras.interop.commands.convert_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
