"""Report what an indexed data set holds and what is suspicious in it.

The same as the command `megatron-inspect-dataset`.
See `megatron/extras/preparation/commands/inspect_dataset.py`.
"""

import sys

from megatron.extras.preparation.commands.inspect_dataset import main

if __name__ == "__main__":
    sys.exit(main())
