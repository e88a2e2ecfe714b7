"""Closes a run's files and threads within a time limit.

If a file system does not respond, closing a file on it blocks, and nothing can interrupt that. So a
thread closes the files, after the error that ended the run was printed. If the thread does not
return in time, the process ends without it.
"""

import threading
from contextlib import ExitStack

from megatron.base.plain_text import print_to_stderr

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
