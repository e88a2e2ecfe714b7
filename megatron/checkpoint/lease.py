"""The lease of a checkpoint folder, which ensures that a folder has one writer.

The lease is a file that names the writer. Its modification time is the writer's heartbeat.

A run that starts while another one is alive in its folder is refused. A run that starts after
another one was killed takes the folder over. It does so immediately if the kernel shows that the
process is gone, or if Slurm or the array task has ended the earlier start of the same job.
Otherwise it waits until the heartbeat has not changed for STALE_SECONDS, measured by its own clock.
Clocks of different hosts are never compared. A file that names no writer, because it is empty or
damaged, may still have a heartbeat. `may_take_over` is this policy. The lease of an object store
follows it too.
"""

import contextlib
import errno
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron.base.errors import CheckpointError
from megatron.base.file_lock import read_process_space
from megatron.base.outside_file import SETTINGS_BYTES, load_json, load_text, open_regular

FILE = "lease.json"
BEAT_SECONDS = 10.0
"""Seconds between two heartbeats."""
RESTART_VARIABLE = "MEGATRON_RESTART"
"""Environment variable with the number of earlier starts in this Slurm job since its last requeue.

The array task sets it. It starts the training again only after the earlier step has ended.
"""
STALE_SECONDS = 60.0
"""Seconds without a heartbeat after which the holder is taken for dead.

Six heartbeats, so that a few late ones do not lose the lease.
"""
_TEMPORARY = re.compile(re.escape(FILE) + r"\.[0-9a-f]{32}")
"""Pattern of the names of temporary files, which `_create` and `_take_over` make."""


@dataclass(frozen=True)
class LeaseHolder:
    """A process, described so that no other process can be mistaken for it."""

    host: str
    boot: str
    """ID of the host's boot, and its PID namespace. PIDs are comparable only if both are equal."""
    pid: int
    started: str
    """Start time of the process in clock ticks since the boot. A PID may be used again."""
    job: str
    """Slurm's job ID, as in 7 or 7_2 for a task of an array, or empty outside Slurm."""
    restart: int
    """Slurm's restart count of the job, or 0 outside Slurm."""
    token: str
    """Random ID of this acquisition."""
    step: int = 0
    """Number of earlier starts in the job since its last requeue. See `RESTART_VARIABLE`."""

    def describe(self) -> str:
        """Return process, host and job for messages."""
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


def _make_own_holder() -> LeaseHolder:
    pid = os.getpid()
    return LeaseHolder(
        os.uname().nodename,
        read_process_space(),
        pid,
        _read_own_start_time(),
        _find_job(),
        _read_count("SLURM_RESTART_COUNT"),
        uuid.uuid4().hex,
        _read_count(RESTART_VARIABLE),
    )


def _find_job() -> str:
    """Return Slurm's ID of this job for messages and commands, or an empty text outside Slurm.

    The job number of an array task is not used, because that of the last task is the array's own.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    # A job outside of an array has no such variable.
    if array:
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return os.environ.get("SLURM_JOB_ID", "")


def _read_count(name: str) -> int:
    """Return the number in an environment variable, or 0."""
    text = os.environ.get(name, "")
    if text.isdecimal():
        return int(text)
    return 0


def _read_start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks, or None if it is a zombie.

    A zombie counts as ended, because it writes nothing.

    Raises:
        OSError: The process does not exist, or its start time cannot be read.
    """
    # The second field is the name of the program in parentheses, which may hold spaces and
    # parentheses. Only what follows the last one can be split. Field 0 is then the state
    # and field 19 the start time, see proc(5).
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return fields[19]


def _read_own_start_time() -> str:
    """Return the start time of this process, or an empty string if /proc cannot be read."""
    try:
        return _read_start_time(os.getpid()) or ""
    except OSError:
        return ""


class Lease:
    """The lease of a folder, held from `acquire` to `release`. A thread keeps the heartbeat."""

    def __init__(self, path: Path, holder: LeaseHolder) -> None:
        """Start the heartbeat of a lease whose file was created. Use `acquire` instead."""
        self._path = path
        self._holder = holder
        self.lost: str | None = None
        """Message that another run has taken the folder over. None while the lease is held."""
        self.busy = False
        """A thread is writing to the folder. It may continue after `release` was called."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_heartbeat, name="lease", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, root: Path, log: Callable[[str], None]) -> "Lease":
        """Become the writer of a folder.

        It waits up to STALE_SECONDS if only the heartbeat shows whether another writer is alive.

        Args:
            root: Folder of the checkpoints.
            log: Called with messages for people.

        Raises:
            CheckpointError: If another run writes to the folder.
            OSError: If the folder cannot be written.
        """
        path = root / FILE
        me = _make_own_holder()
        # A loop, because several runs may try to take over the same folder. Only creating the file
        # decides which of them gets it.
        while not _create(path, me):
            _end_other_lease(path, me, log)
        _remove_leftovers(root, me)
        return cls(path, me)

    def confirm(self) -> None:
        """Check that this process is still the writer.

        Call it before anything in the folder is renamed or removed.

        Raises:
            CheckpointError: If another run has taken the folder over.
            OSError: If the folder cannot be read or written.
        """
        other = _read(self._path)
        if other is None:
            # An operator removed the file. If another run creates its own first, ours is not
            # created, so the file is read again.
            _create(self._path, self._holder)
            other = _read(self._path)
        if other is not None and other.token != self._holder.token:
            self.lost = (
                f"{self._path.parent} was taken over by {other.describe()}, because this process "
                f"had no heartbeat for {STALE_SECONDS:g} s; it ends without writing there"
            )
            raise CheckpointError(self.lost)

    def release(self) -> None:
        """Stop the heartbeat and remove the file, so that the next run can start immediately.

        If a thread is still writing, the file stays. The next run then takes the folder over when
        this process has ended. A second call has no effect.
        """
        self._over.set()
        self._thread.join()
        if self.busy:
            return
        # Only our own file. Another run may have taken the folder over.
        with contextlib.suppress(OSError):
            other = _read(self._path)
            if other is not None and other.token == self._holder.token:
                self._path.unlink()

    def _keep_heartbeat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                # Without this check, the heartbeat would keep another run's lease alive.
                self.confirm()
                # Changing the time works on a full disk, where writing the file would fail.
                os.utime(self._path)
            except CheckpointError:
                return
            except OSError:
                # It may be temporary. If it lasts, the next save reports it.
                continue


def read_holder(root: Path) -> LeaseHolder | None:
    """Return who holds or held the folder. None if there is no valid file. For tools."""
    return _read(root / FILE)


def is_alive(holder: LeaseHolder) -> bool | None:
    """Return whether a process is alive, without waiting. For tools.

    None if only its heartbeat could show that, because the process is on another host.
    """
    return _is_alive(holder, _make_own_holder())


def get_heartbeat_age(root: Path) -> float:
    """Return the seconds between the last heartbeat and now. For tools.

    The file server's clock gives the first time and this host's clock the second. They may differ.
    """
    return time.time() - _read_change_time(root / FILE) / 1e9


@dataclass(frozen=True)
class LeasePlace:
    """What a lease is for and where it is stored, in the words of messages."""

    name: str
    """The file or the object that names the writer."""
    place: str
    """The folder or the address."""
    kind: Literal["folder", "address"]
    sign: str
    """What shows that a writer is alive: its heartbeat, or a renewal."""
    harm: str
    """What two runs do there."""


Look = Literal["same", "alive", "gone", "again"]
"""What a look at a lease shows: nothing has changed, its writer is alive, it is gone, or it names
another writer, so that the decision starts again."""


def may_take_over(
    place: LeasePlace,
    other: LeaseHolder | None,
    me: LeaseHolder,
    look: Callable[[], Look],
    log: Callable[[str], None],
) -> bool:
    """Return whether the writer of a lease is gone. If not, the caller reads the lease again.

    Args:
        place: What the lease is for.
        other: The writer that it names. None if it names none.
        me: This process.
        look: Looks for a sign of life since the lease was read.
        log: Called with messages for people.

    Raises:
        CheckpointError: The writer is alive.
        OSError: The lease cannot be read.
    """
    who = "an unknown process" if other is None else other.describe()
    alive = None if other is None else _is_alive(other, me)
    if alive is None:
        log(
            f"{place.name} names {who}; waiting up to {STALE_SECONDS:g} s for {place.sign}. If "
            f"there is none, this run takes the {place.kind} over"
        )
        end = time.monotonic() + STALE_SECONDS
        found: Look = "same"
        while found == "same" and time.monotonic() < end:
            time.sleep(min(1.0, STALE_SECONDS / 10))
            found = look()
        if found == "again":
            return False
        alive = found == "alive"
    if alive:
        raise CheckpointError(
            f"{place.place} is being written to by {who}; two runs {place.harm} each other's "
            "checkpoints: end that one, or give another --save"
        )
    log(f"{place.name} was left by {who}, which is gone; this run takes the {place.kind} over")
    return True


def _end_other_lease(path: Path, me: LeaseHolder, log: Callable[[str], None]) -> None:
    """Remove the file of a process that is gone. Nothing is done if the file has changed meanwhile.

    Raises:
        CheckpointError: If the other process is alive.
        OSError: If the file cannot be read or removed.
    """
    other = _read(path)
    if other is None and not path.exists():
        # Another process removed it after `_create` failed.
        return
    first = _read_change_time(path)

    def look() -> Look:
        changed = _read_change_time(path)
        if changed == 0:
            return "gone"
        if changed == first and _read(path) == other:
            return "same"
        if other is None and _read(path) is not None:
            # Its writer has finished the file in the meantime, so the holder is known now.
            return "again"
        # Another holder means that another run was faster and has taken the folder over.
        return "alive"

    folder = LeasePlace(
        str(path), str(path.parent), "folder", "its heartbeat", "in one folder would destroy"
    )
    if may_take_over(folder, other, me, look, log):
        _take_over(path, other)


def _create(path: Path, holder: LeaseHolder) -> bool:
    """Create the lease file. Return False if one exists.

    Raises:
        OSError: If it cannot be written.
    """
    # The complete text is written under another name and linked. So no reader sees a part of it,
    # unless `_link` has to copy. The link fails if the file exists, where a rename would replace
    # another run's file.
    fresh = path.with_name(f"{path.name}.{holder.token}")
    try:
        fresh.write_text(json.dumps(asdict(holder)) + "\n")
        _link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _link(source: Path, path: Path) -> None:
    """Give a file a second name, or copy it if the file system has no hard links.

    Raises:
        FileExistsError: If `path` exists.
        OSError: If it cannot be written.
    """
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        text = load_text(source, SETTINGS_BYTES)
        # Mode "x" fails as well if the file exists.
        with open(path, "x") as file:
            file.write(text)


def _read(path: Path) -> LeaseHolder | None:
    """Return the holder that the file names. None if it does not exist or is not valid.

    Raises:
        OSError: If it cannot be read.
    """
    try:
        record = load_json(path, SETTINGS_BYTES)
    except (FileNotFoundError, ValueError):
        return None
    return parse_holder(record)


def parse_holder(record: object) -> LeaseHolder | None:
    """Return the holder that a record in JSON describes, or None if it is not valid."""
    if not isinstance(record, Mapping):
        return None
    # A later version may have added fields. They are ignored, and the known ones are used.
    known: dict[str, Any] = {field.name: record.get(field.name) for field in fields(LeaseHolder)}
    if "step" not in record:
        # An earlier version has written the file.
        known["step"] = 0
    # A dataclass does not check types. A number instead of a text would fail later, in the
    # comparison of processes.
    for field in fields(LeaseHolder):
        if not isinstance(known[field.name], field.type):  # type: ignore[arg-type]
            return None
    return LeaseHolder(**known)


def _is_alive(other: LeaseHolder, me: LeaseHolder) -> bool | None:
    """Return whether a holder's process is alive. None if that cannot be known from this host."""
    if other.boot and other.boot == me.boot:
        return _is_process_alive(other.pid, other.started)
    # Slurm starts a requeued job only after the earlier start of the same job has ended. The array
    # task does the same with the steps of a job.
    if me.job and other.job == me.job and (other.restart, other.step) < (me.restart, me.step):
        return False
    return None


def _is_process_alive(pid: int, started: str) -> bool | None:
    """Return whether a process of this host is alive. None if that cannot be known.

    Args:
        pid: The ID of the process. Another process may have the same ID now.
        started: The start time of the process in clock ticks since the boot. Empty if unknown.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # The process exists and belongs to another user.
        pass
    try:
        found = _read_start_time(pid)
    except ProcessLookupError:
        return False
    except OSError:
        # /proc may be mounted with `hidepid`, which hides the processes of other users.
        return None
    if found is None:
        return False
    if not started:
        return None
    return found == started


def _read_change_time(path: Path) -> int:
    """Return the modification time in nanoseconds. 0 if the file does not exist."""
    # NFS asks the server again when a file is opened. `os.stat` may answer from the client's cache.
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _take_over(path: Path, other: LeaseHolder | None) -> None:
    """Remove the lease of a dead run.

    Args:
        path: The lease file.
        other: The dead holder. None if the file was not valid.
    """
    # A rename is atomic, so only one of several runs gets the file. If it turns out to be the new
    # lease of a faster run, it is put back.
    gone = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    found = _read(gone)
    if found is not None and (other is None or found.token != other.token):
        with contextlib.suppress(FileExistsError):
            _link(gone, path)
    # Another run may have removed it as a leftover.
    gone.unlink(missing_ok=True)


def _remove_leftovers(root: Path, me: LeaseHolder) -> None:
    """Remove the temporary files of runs that were killed while they took a lease.

    The caller holds the lease. A temporary file may belong to a run that is starting now. So a file
    is removed only if its process has ended, or if it has not changed for STALE_SECONDS.
    """
    # An error here must not end the run. The next start tries again.
    with contextlib.suppress(OSError):
        # The lease was written just now, so its change time is the file system's current time.
        now = os.stat(root / FILE).st_ctime
        for path in root.iterdir():
            if not _TEMPORARY.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError):
                holder = _read(path)
                ended = holder is not None and _is_alive(holder, me) is False
                if ended or now - path.lstat().st_ctime > STALE_SECONDS:
                    path.unlink()
