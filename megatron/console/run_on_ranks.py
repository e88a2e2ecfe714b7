"""The frame of a tool that several ranks run together. Each rank is a process."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack

from megatron.base import exit_codes
from megatron.base.errors import ConfigError, MegatronError, describe_os_error
from megatron.console.run_tool import prepare_output, run_tool
from megatron.parallel.launcher import die_with_launcher, read_launcher_world
from megatron.run.leaving import leave_after_crash, leave_with_error


def run_on_ranks(work: Callable[[], None]) -> int:
    """Do the work of a tool on this rank and return its exit code.

    A process alone has the messages and exit codes of `run_tool`. One of several ranks ends the
    process after an error, because the interpreter's exit could wait for ranks in a collective.
    The exit code is 2 for an error that a user can fix, 1 after a crash or the loss of another
    rank, and 141 for a closed pipe at standard output. A signal ends a rank immediately.

    Args:
        work: The function that does the work.
    """

    def work_alone() -> int:
        work()
        return 0

    if not _is_one_of_several():
        return run_tool(work_alone)
    die_with_launcher()
    # Python's handler runs only between Python's instructions, and not while a rank waits in a
    # collective. A shell starts background jobs with SIGINT ignored, which stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    prepare_output()
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(exit_codes.CLOSED_PIPE)
    except MegatronError as error:
        leave_with_error(error)
    except OSError as error:
        leave_with_error(ConfigError(describe_os_error(error)))
    except Exception as error:
        leave_after_crash(error, ExitStack())
    return 0


def _is_one_of_several() -> bool:
    """Return whether the launcher has started several ranks."""
    try:
        return read_launcher_world().size > 1
    except MegatronError:
        # The work reads it again, and its error is reported.
        return False
