"""Pretrain a GPT on this rank.

On one device:
    megatron-pretrain --num-layers 12 ...
On four devices of one node:
    torchrun --nproc-per-node 4 -m megatron.commands.pretrain --tensor-model-parallel-size 2 ...
Every flag, with its unit and source:
    megatron-pretrain --help

In a checkout, `pretrain_gpt.py` does the same. The work of a rank is in
`megatron/run/pretrain.py`.
"""

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import MutableMapping

from megatron.base import exit_codes
from megatron.base.errors import ConfigError, MegatronError, describe_os_error
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.commands.parts import choose_parts, load_command_line
from megatron.config.presets import wants_preset_list
from megatron.console.preset_table import format_preset_table
from megatron.console.standard_streams import end_without_reader, protect_standard_streams
from megatron.parallel.launcher import die_with_launcher
from megatron.run.leaving import leave_with_error
from megatron.run.start.launch import Launch, check_before_torch, import_training, read_launch


def main(argv: list[str] | None = None) -> None:
    """Run a command line.

    The exit code is 0 if training is done, or stopped and saved. It is 2 after an error whose
    message explains how to fix it. It is 1 after a crash of this rank, or of another one without
    which this rank cannot continue. It is 130 after Ctrl-C before training, as in a shell, and
    after a signal during --eval-only.
    """
    # Before the slow import. A launcher that is killed during it must not leave this process.
    die_with_launcher()
    words = sys.argv[1:] if argv is None else argv
    try:
        if wants_preset_list(words):
            with end_without_reader():
                print_line(format_preset_table())
            return
        if {"-h", "--help"} & set(words):
            with end_without_reader():
                _read_launch(words)
        _train(words)
    except MegatronError as error:
        leave_with_error(error)
    except KeyboardInterrupt as stop:
        # A signal before training. A traceback would look like a crash. The process does not wait
        # for other ranks, because they may be in a collective.
        print_to_stderr("interrupted before training started or went on; nothing new was saved")
        sys.stdout.flush()
        # Only Ctrl-C has no arguments.
        is_key = signal.SIGINT in (stop.args or [signal.SIGINT])
        os._exit(exit_codes.INTERRUPTED if is_key else 0)


def _train(argv: list[str]) -> None:
    """Load the configuration and train.

    Raises:
        MegatronError: The configuration is wrong, or the run cannot go on.
    """
    # Before libraries keep references to the streams.
    protect_standard_streams()
    # After a signal such as SIGBUS or SIGSEGV, the log then shows where each thread was.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.enable()
    launch = _read_launch(argv)
    _choose_allocator(os.environ)
    # This imports torch, which takes seconds. Neither --help nor an error above needs it.
    import_training(launch.config.parallel, launch.world.size)
    from megatron.run.pretrain import run_launch

    try:
        run_launch(launch)
    except KeyboardInterrupt as stop:
        if launch.config.batch.eval_only:
            # There is no result, and no later start completes it. The exit code is that of Ctrl-C.
            raise KeyboardInterrupt from stop
        raise


def _choose_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch's allocator of GPU memory use memory that was freed in another size.

    torch reads the variable when it is imported. A user who sets any of its variables decides
    alone.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _read_launch(argv: list[str]) -> Launch:
    """Return the launch of this rank, after all checks that need no torch.

    --help prints its text and exits.

    Raises:
        MegatronError: The configuration is wrong, or a file that it names cannot be read.
    """
    try:
        loaded = load_command_line(argv, "pretrain_gpt.py")
        return check_before_torch(read_launch(loaded, choose_parts(loaded.config)))
    except BrokenPipeError:
        # The reader of --help has ended.
        raise
    except OSError as error:
        raise ConfigError(
            f"a file of the command line cannot be read: {describe_os_error(error)}"
        ) from error


if __name__ == "__main__":
    main()
