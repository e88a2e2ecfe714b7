"""The end of a run's files and threads, in a limited time.

A file system that hangs also hangs what closes files on it, and nothing can interrupt that. So it
is done in a thread, after the error that ended the run was printed. The process ends without that
thread if it does not return.
"""

import sys
import threading
from contextlib import ExitStack

CLOSING_SECONDS = 30.0
"""Longest time that a process waits for its files and threads at its end."""


def close_within_limit(closing: ExitStack) -> bool:
    """Close everything that was registered in `closing`.

    Returns:
        Whether it was closed within CLOSING_SECONDS. Otherwise a warning was printed, and the
        process must be ended with `os._exit`, because Python waits for threads at its exit.

    Raises:
        Exception: Whatever the closing raised.
    """
    failures: list[Exception] = []

    def close() -> None:
        try:
            closing.close()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=close, name="closing", daemon=True)
    thread.start()
    thread.join(CLOSING_SECONDS)
    if thread.is_alive():
        print(
            f"warning: the files of this run could not be closed in {CLOSING_SECONDS:g} s. The "
            "process ends without that. Check the file systems of --save, --data-path and "
            "--tensorboard-dir",
            file=sys.stderr,
            flush=True,
        )
        return False
    if failures:
        raise failures[0]
    return True
