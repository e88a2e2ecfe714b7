"""Print the text of training samples, given by sample or by iteration.

The same as the command `megatron-sample-idxs-to-text`.
See `megatron/commands/sample_idxs_to_text.py`.
"""

import sys

from megatron.commands.sample_idxs_to_text import main

if __name__ == "__main__":
    sys.exit(main())
