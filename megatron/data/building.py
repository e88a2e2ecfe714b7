"""How processes that need the same file build it.

Where file locks work, one process builds at a time. Where they do not work, several processes may
build at the same time without harm.

Invariants:

- A temporary name belongs to one process.
- Only files that are provably abandoned are removed.
- No link is followed when a file is created, written or removed.
- No process waits without a message or without a limit.

A lock may be invisible to other hosts (Lustre's `localflock`). It therefore only saves work. A
process that does not see another builder writes the same bytes under a temporary name of its own.
The last rename wins.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.base.errors import DataError
from megatron.base.file_lock import LockResult, is_at, read_process_space, try_lock

Log = Callable[[str], None]
"""Receives a line of text for the user."""


SAY_AFTER_SECONDS = 5.0
"""A message is printed when a build, or the wait for one, takes longer than this."""
_SAY_AGAIN_SECONDS = 60.0
_POLL_SECONDS = 0.1
_TOUCH_SECONDS = 30.0
"""A builder touches its files this often, which shows that it is alive."""
ABANDONED_SECONDS = 3600.0
"""A temporary file that was not touched for so long has no builder any more.

The time is measured by the clock of the file system.
"""
# Exactly the names that `Temporaries.create` makes for index caches and digests. The folder may
# hold files of other programs, and those must not be removed.
_TEMPORARY = re.compile(r"[a-z]+-[0-9a-f]{24}(-\w+\.npy|\.json)\.(?P<rest>.+)\.partial")
_HOLDER_BYTES = 1024


class Temporaries:
    """The temporary files of one build in one folder.

    Leaving the context removes those that were not renamed.
    """

    def __init__(self, folder: Path, log: Callable[[], None] = lambda: None) -> None:
        """Create a build without files.

        Args:
            folder: Where the files are created.
            log: Called once if the build takes longer than SAY_AFTER_SECONDS.
        """
        self._folder = folder
        self._log = log
        self._paths: list[Path] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show_life, name="index build", daemon=True)

    def __enter__(self) -> "Temporaries":
        """Start the thread that touches the files."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread and remove the files that still have a temporary name."""
        self._over.set()
        self._thread.join()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def create(self, name: str) -> Path:
        """Create an empty file that will become `name`, under a name that no other process uses."""
        # _builder_is_gone parses this name. The random part keeps two builds of one process apart.
        unique = f"{socket.gethostname()}.{os.getpid()}.{_process_space()}-{uuid.uuid4().hex[:12]}"
        path = self._folder / f"{name}.{unique}.partial"
        # O_EXCL and O_NOFOLLOW: an existing file or link is an error and is never written through.
        os.close(
            os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
            )
        )
        self._paths.append(path)
        return path

    def _show_life(self) -> None:
        """Report a long build once, and touch its files until it is over."""
        if self._over.wait(SAY_AFTER_SECONDS):
            return
        self._log()
        while not self._over.wait(_TOUCH_SECONDS):
            for path in self._paths:
                # The file may have been renamed meanwhile.
                with contextlib.suppress(OSError):
                    os.utime(path, follow_symlinks=False)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of index caches and digests whose builders ended.

    One of two things proves that a builder ended. Either its process does not exist, although this
    process would see it. Or the file was not touched for ABANDONED_SECONDS. A builder that was
    suspended for longer than that finds its file missing, and starts again.
    """
    found = [path for path in folder.glob("*.partial") if _TEMPORARY.fullmatch(path.name)]
    if not found:
        return
    now = _clock_of(folder)
    for path in found:
        with contextlib.suppress(OSError):
            if _builder_is_gone(path.name) or now - path.lstat().st_mtime > ABANDONED_SECONDS:
                path.unlink()


def _builder_is_gone(name: str) -> bool:
    """Return whether the process of a temporary name would be visible here and does not exist."""
    match = _TEMPORARY.fullmatch(name)
    assert match is not None, f"{name} is not a temporary name"
    parts = re.fullmatch(r".*\.(\d+)\.([0-9a-f]+)-[0-9a-f]{12}", match["rest"])
    # The same process id on another host, or in another container, is another process.
    if parts is None or parts[2] != _process_space():
        return False
    try:
        os.kill(int(parts[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _process_space() -> str:
    """Return an identifier of the processes that this one can see.

    Two processes have the same one if they run in the same process-id namespace of the same boot of
    a kernel.
    """
    # A random value is never equal to another one, so no process counts as ended.
    seen = read_process_space() or uuid.uuid4().hex
    return hashlib.blake2b(seen.encode(), digest_size=6).hexdigest()


def _clock_of(folder: Path) -> float:
    """Return the time of the clock that sets the folder's file times.

    On a network file system it is the server's clock, which may differ from this host's.
    """
    probe = folder / f".clock.{uuid.uuid4().hex}"
    descriptor = os.open(
        probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def only_builder(
    path: Path, what: str, *, limit_seconds: float, log: Log, note: Log
) -> Iterator[None]:
    """Hold the lock file `path` inside the context. Without file locks, note it and continue.

    Args:
        path: The lock file. It is removed at the end.
        what: What is built, for messages.
        limit_seconds: Longest time to wait for another holder.
        log: Receives urgent messages while waiting.
        note: Receives messages that may be read later.

    Raises:
        DataError: another process held it for longer than the limit.
    """
    try:
        descriptor = _locked(path, what, limit_seconds, log)
    except OSError as error:
        reason = error.strerror or str(error)
        note(
            f"{path.parent} has no file locks ({path.name}: {reason}); several processes may build "
            "the same index cache"
        )
        yield
        return
    try:
        _write_holder(descriptor)
        yield
    finally:
        # Removed while it is locked, and only if the name still means this file. Otherwise the lock
        # file of another process could be removed.
        with contextlib.suppress(OSError):
            if is_at(descriptor, path):
                path.unlink()
        os.close(descriptor)


def _locked(path: Path, what: str, limit_seconds: float, log: Log) -> int:
    """Return the descriptor of the lock file after it was locked.

    Raises:
        OSError: the file cannot be opened, or the file system has no locks.
        DataError: another process held the lock for longer than the limit.
    """
    started = time.monotonic()
    say_at = started + SAY_AFTER_SECONDS
    while True:
        descriptor = _open_lock(path)
        try:
            result = try_lock(descriptor, path)
        except OSError:
            os.close(descriptor)
            raise
        if result is LockResult.HELD:
            return descriptor
        holder = "a process that has just ended its build"
        if result is LockResult.TAKEN:
            holder = _read_holder(descriptor)
        os.close(descriptor)
        waited = time.monotonic() - started
        if waited > limit_seconds:
            raise DataError(
                f"{what} has been locked by {holder} for more than {waited:.0f} s (lock file "
                f"{path}), and the limit is {limit_seconds:.0f} s. End that process if it hangs. "
                "If it is still building, start again when it is done, or give another "
                "--data-cache-path."
            )
        if time.monotonic() > say_at:
            say_at += _SAY_AGAIN_SECONDS
            log(
                f"waiting for {what}, which {holder} is building: {waited:.0f} s so far, "
                f"{limit_seconds:.0f} s at most"
            )
        time.sleep(_POLL_SECONDS)


def _open_lock(path: Path) -> int:
    """Open or create the lock file without changing its content.

    Raises:
        OSError: it cannot be opened, or a link, a folder or a pipe has its name.
    """
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def _write_holder(descriptor: int) -> None:
    """Write into the lock file who holds it.

    A file with a second name or with other content may be a user's data. It is not changed.
    """
    found = os.fstat(descriptor)
    if found.st_nlink != 1 or (found.st_size > 0 and _holder(descriptor) is None):
        return
    record = {"host": socket.gethostname(), "pid": os.getpid()}
    # The disk may be full. The lock holds without this text.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(record) + "\n").encode(), 0)


def _read_holder(descriptor: int) -> str:
    """Return a description of the process that holds the lock file."""
    return _holder(descriptor) or "a process that did not write its name"


def _holder(descriptor: int) -> str | None:
    """Return the holder that a lock file names, or None if it holds something else."""
    try:
        record = json.loads(os.pread(descriptor, _HOLDER_BYTES, 0))
        return f"process {int(record['pid'])} on {str(record['host'])[:100]!r}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
