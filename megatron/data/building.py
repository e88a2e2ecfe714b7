"""How processes that need the same file build it: one at a time where locks work, without harm to
each other where they do not.

Invariants: a temporary name belongs to one process; only what is provably abandoned is removed; no
link is followed; nobody waits without a message or a limit. A lock may be unknown to other hosts
(Lustre's `localflock`), so that it only saves work: whoever builds without knowing of another one
writes the same bytes under a name of its own, and the last rename wins.
"""

import contextlib
import errno
import fcntl
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
from types import TracebackType

from megatron.errors import DataError

Say = Callable[[str], None]

SAY_AFTER_SECONDS = 5.0
"""A message comes when a build, or the wait for one, takes longer than this."""
_SAY_AGAIN_SECONDS = 60.0
_POLL_SECONDS = 0.1
_TOUCH_SECONDS = 30.0
"""A build shows that it is alive by touching its files this often."""
ABANDONED_SECONDS = 3600.0
"""A temporary file that was not touched for so long, by the file system's clock, has no builder any
more."""
_TEMPORARY = re.compile(r"[a-z]+-[0-9a-f]{24}(-\w+\.npy|\.json)\.(?P<rest>.+)\.partial")
_HOLDER_BYTES = 1024


class Temporaries:
    """The temporary files of one build in one folder; leaving the context removes those that got no
    name of their own."""

    def __init__(self, folder: Path, say: Callable[[], None] = lambda: None) -> None:
        """`say` is called once when the build takes longer than SAY_AFTER_SECONDS."""
        self._folder = folder
        self._say = say
        self._paths: list[Path] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show_life, name="index build", daemon=True)

    def __enter__(self) -> "Temporaries":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def create(self, name: str) -> Path:
        """Create an empty file that will become `name`, under a name that no other process has or
        will have."""
        unique = f"{socket.gethostname()}.{os.getpid()}.{_process_space()}-{uuid.uuid4().hex[:12]}"
        path = self._folder / f"{name}.{unique}.partial"
        os.close(
            os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
            )
        )
        self._paths.append(path)
        return path

    def _show_life(self) -> None:
        if self._over.wait(SAY_AFTER_SECONDS):
            return
        self._say()
        while not self._over.wait(_TOUCH_SECONDS):
            for path in self._paths:
                with contextlib.suppress(OSError):  # renamed meanwhile
                    os.utime(path, follow_symlinks=False)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of builders that are gone, of index caches and digests only.

    Two things prove it: the process is gone and was one that this process would see; or the file
    was not touched for ABANDONED_SECONDS. A builder that stood still for longer than that finds its
    file missing, and starts again.
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
    """Whether the process that a temporary name belongs to would be visible here, and is not
    there."""
    match = _TEMPORARY.fullmatch(name)
    assert match is not None, f"{name} is not a temporary name"
    parts = re.fullmatch(r".*\.(\d+)\.([0-9a-f]+)-[0-9a-f]{12}", match["rest"])
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
    """Identify the processes that this one can see: one start of one kernel, one namespace of
    process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        seen = boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        seen = uuid.uuid4().hex  # never equal to another one
    return hashlib.blake2b(seen.encode(), digest_size=6).hexdigest()


def _clock_of(folder: Path) -> float:
    """Return the time by the clock that stamps the folder's files; hosts' clocks may differ from
    it."""
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
    path: Path, what: str, *, limit_seconds: float, say: Say, note: Say
) -> Iterator[None]:
    """Hold the lock file `path` while entered. Where there are no locks, note it and go on without.

    Args:
        path: The lock file; it is removed at the end.
        what: What is built, for messages.
        limit_seconds: The longest time to wait for another holder.
        say: Takes what must be known while waiting.
        note: Takes what may be known later.

    Raises:
        DataError: another process held it for longer than the limit.
    """
    try:
        descriptor = _locked(path, what, limit_seconds, say)
    except OSError as error:
        reason = error.strerror or str(error)
        note(
            f"{path.parent} has no file locks ({path.name}: {reason}); several processes may build the same index cache"
        )
        yield
        return
    try:
        _write_holder(descriptor)
        yield
    finally:
        with contextlib.suppress(OSError):
            if _is_at(descriptor, path):
                path.unlink()
        os.close(descriptor)


def _locked(path: Path, what: str, limit_seconds: float, say: Say) -> int:
    """Return the descriptor of the lock file once it is ours."""
    started = time.monotonic()
    say_at = started + SAY_AFTER_SECONDS
    while True:
        descriptor = _open_lock(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                os.close(descriptor)
                raise
            holder = _read_holder(descriptor)
        else:
            holder = (
                "nobody"  # the last holder removed the file; the next attempt makes another one
            )
        os.close(descriptor)
        waited = time.monotonic() - started
        if waited > limit_seconds:
            raise DataError(
                f"{what} is locked by {holder} for more than {waited:.0f} s (lock file {path}), and the limit is "
                f"--distributed-timeout-minutes. End that process if it hangs; raise the limit if it is still building; or give "
                "another --data-cache-path."
            )
        if time.monotonic() > say_at:
            say_at += _SAY_AGAIN_SECONDS
            say(
                f"waiting for {what}, which {holder} builds, for {waited:.0f} s so far and {limit_seconds:.0f} s at most"
            )
        time.sleep(_POLL_SECONDS)


def _open_lock(path: Path) -> int:
    """Open or create the lock file, and change nothing in it; a link or a folder in its place is an
    OSError."""
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev)


def _write_holder(descriptor: int) -> None:
    """Write into the lock file who holds it, unless it is somebody's data under a second name."""
    found = os.fstat(descriptor)
    if found.st_nlink != 1 or (found.st_size > 0 and _holder(descriptor) is None):
        return
    record = {"host": socket.gethostname(), "pid": os.getpid()}
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(record) + "\n").encode(), 0)


def _read_holder(descriptor: int) -> str:
    """Say who holds the lock file."""
    return _holder(descriptor) or "a process that did not write its name"


def _holder(descriptor: int) -> str | None:
    """Return the holder that a lock file names, or None where it holds something else."""
    try:
        record = json.loads(os.pread(descriptor, _HOLDER_BYTES, 0))
        return f"process {int(record['pid'])} on {str(record['host'])[:100]!r}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
