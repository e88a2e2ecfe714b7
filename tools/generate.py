"""Continue a text with a checkpoint's model.

The same as the command `megatron-generate`.
See `megatron/extras/inference/commands/generate.py`.
"""

import sys

from megatron.extras.inference.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
