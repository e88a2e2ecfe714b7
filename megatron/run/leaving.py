"""Ends the process after an error, and closes the files and threads of a run within a time limit.

This module does not import torch, because it also reports errors from before torch is imported.

If a file system does not respond, closing a file on it blocks, and nothing can interrupt that. So a
thread closes the files, after the error that ended the run was printed. If the thread does not
return in time, the process ends without it.
"""

import contextlib
import json
import os
import platform
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from megatron.base import exit_codes
from megatron.base.durable import replace_file
from megatron.base.error_report import (
    FOLDER_VARIABLE,
    build_report,
    host_io_error,
    parse_rank,
    write_report,
)
from megatron.base.errors import HungRanksError, LostRanksError, MegatronError
from megatron.base.plain_text import make_plain_lines, print_to_stderr

CLOSING_SECONDS = 30.0
"""Longest time that a process waits for its files and threads at its end."""


STOPPED_SECONDS = 3.0
"""The same after a signal to stop, because a launcher kills the process soon."""


def close_within_limit(closing: ExitStack, *, stopped: bool = False) -> bool:
    """Close everything that was registered in `closing`.

    Args:
        closing: What must be closed.
        stopped: Whether the run was stopped by a signal.

    Returns:
        Whether everything was closed within CLOSING_SECONDS or STOPPED_SECONDS. If not, a warning
        was printed, and the caller must end the process with `os._exit`, because a normal exit
        would wait for threads.

    Raises:
        Exception: Whatever the closing raised.
    """
    failures: list[Exception] = []

    def close() -> None:
        try:
            closing.close()
        except Exception as error:
            # An error in a thread would only be printed, and the caller would not notice it.
            failures.append(error)

    # The interpreter waits at its end for every thread that is no daemon.
    thread = threading.Thread(target=close, name="closing", daemon=True)
    thread.start()
    seconds = STOPPED_SECONDS if stopped else CLOSING_SECONDS
    thread.join(seconds)
    if thread.is_alive():
        print_to_stderr(
            f"warning: the files of this run could not be closed in {seconds:g} s. The "
            "process ends without closing them. Check the file systems of --save, --data-path and "
            "--tensorboard-dir"
        )
        return False
    if failures:
        raise failures[0]
    return True


def leave_with_error(error: MegatronError, closing: ExitStack | None = None) -> NoReturn:
    """Report the error, print its message, close the run's files, and end the process.

    Ranks that wait for this one in a collective must not wait long.

    Args:
        error: The error.
        closing: What must be closed, if there is a run already. Closing may hang with the file
            system, so the error is printed first.
    """
    if isinstance(error, LostRanksError):
        leave_after_lost_ranks(error, closing)
    rank = parse_rank(os.environ.get("RANK"))
    prefix = ""
    if rank > 0:
        prefix = f"rank {rank} on {platform.node()}: "
    message = make_plain_lines(f"{prefix}{type(error).__name__}: {error}")
    # Reported before the wait below, because the launcher may end this process during the wait.
    report_error(error, message)
    if rank > 0:
        # Most errors occur on every rank, and rank 0 prints its message first. If the error is the
        # same here, the launcher ends this process during the wait and it is printed only once.
        time.sleep(3)
    print_to_stderr(message)
    close_after_error(closing)
    if rank == 0 and FOLDER_VARIABLE in os.environ:
        # srun ends all ranks when this one ends. The others need the time to write their reports.
        time.sleep(1)
    # sys.exit would destroy the process group. That can hang if other ranks are in a collective.
    os._exit(exit_codes.USER_ERROR)


def report_error(error: BaseException, message: str) -> None:
    """Write the error to the file in which the launcher looks for it.

    torchrun reads one file for each rank. The array task reads one folder for all ranks.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = os.environ.get(FOLDER_VARIABLE)
    try:
        if path:
            # The format is that of torch.distributed.elastic, which prints this message in its
            # summary of the failure.
            record = {
                "message": message,
                "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))},
            }
            replace_file(Path(path), json.dumps({"message": record}))
        if folder:
            write_report(Path(folder), build_report(error))
    except OSError as trouble:
        # The error itself is still printed. An error of this report must not hide it.
        print_to_stderr(f"warning: the error could not be reported to the launcher: {trouble}")


def leave_after_lost_ranks(error: LostRanksError, closing: ExitStack | None) -> NoReturn:
    """End the process after ranks were lost. See `leave_with_error`.

    The exit code is 1, because no flag is wrong and the same command may succeed.
    """
    print_to_stderr(f"{type(error).__name__}: {error}")
    close_after_error(closing)
    # Nothing is reported to the launcher. A report means an error that a person must correct.
    os._exit(exit_codes.FOUND)


def report_hang(error: HungRanksError, message: str) -> None:
    """Report a hang to the launcher, and print a message. The watchdog then ends the process."""
    report_error(error, f"{type(error).__name__}: {error}")
    print_to_stderr(f"{type(error).__name__}: {message}")


def leave_after_crash(error: Exception, closing: ExitStack) -> NoReturn:
    """End the process after an error that is not one of `MegatronError`. The exit code is 1.

    See `leave_with_error`.
    """
    if isinstance(error, OSError) and host_io_error(error) is not None:
        # A fault of this host, though not one that has its own message.
        report_error(error, f"{type(error).__name__}: {error}")
    # PyTorch's hook begins each line with the rank.
    sys.excepthook(type(error), error, error.__traceback__)
    close_after_error(closing)
    os._exit(exit_codes.FOUND)


def close_after_error(closing: ExitStack | None) -> None:
    """Close the run's files. An error in closing is not printed, because it is not the cause."""
    if closing is not None:
        with contextlib.suppress(Exception):
            close_within_limit(closing)
    sys.stdout.flush()
