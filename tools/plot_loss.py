"""Draw a run's loss curve with training loss, validation losses and learning rate.

The same as the command `megatron-plot-loss`.
See `megatron/commands/plot_loss.py`.
"""

import sys

from megatron.commands.plot_loss import main

if __name__ == "__main__":
    sys.exit(main())
