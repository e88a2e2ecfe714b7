"""Import files of token ids as an indexed data set.

The same as the command `megatron-import-tokens`.
See `megatron/extras/preparation/commands/import_tokens.py`.
"""

import sys

from megatron.extras.preparation.commands.import_tokens import main

if __name__ == "__main__":
    sys.exit(main())
