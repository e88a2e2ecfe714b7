"""Pretrain a GPT on this rank.

On one device:
    megatron-pretrain --num-layers 12 ...
On four devices of one node:
    torchrun --nproc-per-node 4 -m megatron.commands.pretrain --tensor-model-parallel-size 2 ...
Every flag, with its unit and source:
    megatron-pretrain --help

In a checkout, `pretrain_gpt.py` does the same. The work of a rank is in
`megatron/training/pretrain.py`.
"""

import contextlib
import faulthandler
import os
import signal
import sys

from megatron.standard_streams import protect_standard_streams
from megatron.training.orphans import die_with_launcher


def main(argv: list[str] | None = None) -> None:
    """Run a command line.

    The exit code is 0 if training is done, or stopped and saved. It is 2 after an error whose
    message explains how to fix it. It is 1 after a crash of this rank, or of another one without
    which this rank cannot continue. It is 130 after Ctrl-C before training, as in a shell.
    """
    # Before the slow imports. A launcher that is killed during them must not leave this process.
    die_with_launcher()
    # Before libraries keep references to the streams.
    protect_standard_streams()
    # After a signal such as SIGBUS or SIGSEGV, the last lines show where each thread was.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.enable()
    try:
        from megatron.training.pretrain import run_command_line

        run_command_line(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        # Ctrl-C before the training, which has its own handler. A traceback would look like a
        # crash. The other ranks may be in a collective, so nothing is waited for.
        print("interrupted before training started; nothing was saved", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
