"""The frame of every tool, which turns errors into messages and exit codes."""

import io
import os
import sys
from collections.abc import Callable

from megatron.base import exit_codes
from megatron.base.errors import MegatronError, describe_os_error
from megatron.base.plain_text import print_to_stderr


def prepare_output() -> None:
    """Make standard output accept each character, and exist.

    A file name or a text may have characters that the encoding lacks. They are printed as escapes.
    """
    # It is None if the file descriptor is closed. What is printed is then lost.
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run_tool(work: Callable[[], int]) -> int:
    """Do the work of a tool and return its exit code.

    An error that a user can fix is printed without a traceback and gives 2. That includes every
    `OSError`, such as a wrong path, a missing permission or a full disk. As in a
    shell, Ctrl-C gives 130, and a closed pipe at standard output gives 141.

    Args:
        work: The function that does the work and returns the exit code.
    """
    prepare_output()
    try:
        code = work()
        # Otherwise an error in writing the last lines would appear only at the interpreter's exit.
        sys.stdout.flush()
        return code
    except MegatronError as error:
        message = str(error)
    except BrokenPipeError:
        # The interpreter flushes standard output at its exit. That would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.CLOSED_PIPE
    except OSError as error:
        message = describe_os_error(error)
    except KeyboardInterrupt:
        print_to_stderr("interrupted")
        return exit_codes.INTERRUPTED
    print_to_stderr(f"error: {message}")
    return exit_codes.USER_ERROR
