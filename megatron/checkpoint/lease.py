"""One writer for each folder: a file that says who, and whose time of change is its heartbeat.

A run that starts while another one lives in its folder is refused; one that starts after another was killed takes the folder over:
at once where the kernel can tell that the process is gone, or Slurm that the job was requeued, else after the heartbeat has not
moved for STALE_SECONDS by the newcomer's own clock (clocks of different hosts are never compared).
"""

import contextlib
import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron.errors import CheckpointError

FILE = "lease.json"
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


@dataclass(frozen=True)
class LeaseHolder:
    """A process, so that nothing else can be taken for it."""

    host: str
    boot: str
    """Of the host, and its namespace of processes: numbers are only comparable where both are the same."""
    pid: int
    started: str
    """In clock ticks since the boot."""
    job: str
    restart: int
    """Slurm's, 0 outside of it."""
    token: str

    def describe(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


def _make_own_holder() -> LeaseHolder:
    job = os.environ.get("SLURM_JOB_ID", "")
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    pid = os.getpid()
    return LeaseHolder(
        os.uname().nodename,
        _read_boot_id(),
        pid,
        _read_start_time(pid) or "",
        job,
        int(restart) if restart.isdigit() else 0,
        uuid.uuid4().hex,
    )


def _read_boot_id() -> str:
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + "/"
            + os.readlink("/proc/self/ns/pid")
        )
    except OSError:
        return ""


def _read_start_time(pid: int) -> str | None:
    """None: no such process, or it is a zombie."""
    try:
        # The second field is the program's name, in brackets, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


class Lease:
    """Held from `acquire` to `release`; a thread keeps the heartbeat."""

    def __init__(self, path: Path, holder: LeaseHolder) -> None:
        self._path, self._holder = path, holder
        self.lost: str | None = None
        """Who has taken the folder over, and what that means; None while it is ours."""
        self.busy = False
        """A thread is writing: it may not end with whoever holds the lease."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_heartbeat, name="lease", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, root: Path, say: Callable[[str], None]) -> "Lease":
        """Become the folder's writer; waits where only time can tell whether another one is alive.

        Raises:
            CheckpointError: another run writes to the folder. OSError: the folder cannot be written.
        """
        path, me = root / FILE, _make_own_holder()
        while not _create(path, me):
            other = _read(path)
            if other is None:
                _take_over(path, None)
                continue
            alive = _is_alive(other, me)
            if alive is None:
                say(
                    f"{path} was left by {other.describe()}; waiting up to {STALE_SECONDS:g} s for a sign of life of it "
                    "before this run takes the folder over"
                )
                alive = _watch_heartbeat(path, other)
            if alive:
                raise CheckpointError(
                    f"{root} is being written to by {other.describe()}; two runs in one folder would destroy each other's "
                    "checkpoints: end that one, or give another --save"
                )
            say(
                f"{path} was left by {other.describe()}, which is gone; this run takes the folder over"
            )
            _take_over(path, other)
        return cls(path, me)

    def confirm(self) -> None:
        """Still the writer? To be asked before anything in the folder is renamed or removed.

        Raises:
            CheckpointError: another run has taken the folder over. OSError: the folder cannot be read or written.
        """
        other = _read(self._path)
        if other is None:
            _create(self._path, self._holder)  # an operator removed it
            other = _read(self._path)
        if other is not None and other.token != self._holder.token:
            self.lost = (
                f"{self._path.parent} was taken over by {other.describe()}: this process gave no sign of life for "
                f"{STALE_SECONDS:g} s; it ends without writing there"
            )
            raise CheckpointError(self.lost)

    def release(self) -> None:
        """Let the next one in at once; where a thread is still writing, only when this process has ended. Releasing twice is
        harmless."""
        self._over.set()
        self._thread.join()
        if self.busy:
            return
        with contextlib.suppress(OSError):
            other = _read(self._path)
            if other is not None and other.token == self._holder.token:
                self._path.unlink()

    def _keep_heartbeat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self.confirm()  # another run's heartbeat is not ours to keep
                os.utime(self._path)  # a full disk still takes this
            except CheckpointError:
                return
            except OSError:
                continue  # shows at the next save, if it lasts


def read_holder(root: Path) -> LeaseHolder | None:
    """Who holds or held the folder; None: nobody, or the file is garbage. For tools."""
    return _read(root / FILE)


def is_alive(holder: LeaseHolder) -> bool | None:
    """Whether that process runs; None: cannot be told from here without watching its heartbeat. For tools; never waits."""
    return _is_alive(holder, _make_own_holder())


def get_heartbeat_age(root: Path) -> float:
    """Seconds since the heartbeat, by the clock of the file's host. For tools."""
    return time.time() - _read_change_time(root / FILE) / 1e9


def _create(path: Path, holder: LeaseHolder) -> bool:
    """False: there is one already."""
    fresh, text = path.with_name(f"{path.name}.{holder.token}"), json.dumps(asdict(holder)) + "\n"
    try:
        fresh.write_text(text)
        try:
            os.link(fresh, path)  # whole, or not at all
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            with open(path, "x") as file:  # a file system without hard links
                file.write(text)
    except FileExistsError:
        return False
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _read(path: Path) -> LeaseHolder | None:
    try:
        record = json.loads(path.read_text())
        holder = LeaseHolder(**record) if isinstance(record, Mapping) else None
        right = holder is not None and all(
            isinstance(getattr(holder, field.name), field.type)  # type: ignore[arg-type]
            for field in fields(LeaseHolder)
        )
        return holder if right else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return None


def _is_alive(other: LeaseHolder, me: LeaseHolder) -> bool | None:
    """None: cannot be told from here."""
    if other.boot and other.boot == me.boot:
        return _read_start_time(other.pid) == other.started
    if me.job and other.job == me.job and other.restart < me.restart:
        return False
    return None


def _watch_heartbeat(path: Path, other: LeaseHolder) -> bool:
    """Watch for a heartbeat."""
    end, first = time.monotonic() + STALE_SECONDS, _read_change_time(path)
    while time.monotonic() < end:
        time.sleep(min(1.0, STALE_SECONDS / 10))
        holder = _read(path)
        if holder is None:
            return False
        if holder.token != other.token or _read_change_time(path) != first:
            return True
    return False


def _read_change_time(path: Path) -> int:
    # Opening makes network file systems ask the server anew.
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _take_over(path: Path, other: LeaseHolder | None) -> None:
    """Remove a dead run's lease; if somebody else was faster, theirs is put back."""
    gone = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    found = _read(gone)
    if found is not None and (other is None or found.token != other.token):
        with contextlib.suppress(FileExistsError):
            os.link(gone, path)
    gone.unlink()
