"""Saving of checkpoints.

Every rank writes the shards that it owns into a new folder `global_stepN.unfinished`. Then rank 0
renames the folder to `global_stepN` and moves the pointers to it (the files `latest` and
`latest_checkpointed_iteration.txt`), see `publish.py`. The checkpoint is called safe from then on.

Invariants:

- A kill at any time leaves the pointers at one complete checkpoint, the old or the new one.
- Nothing is removed before a newer checkpoint was read back from the disk.
- All ranks agree on the outcome of a save.
- Only finite numbers are stored.

A save has three phases: copy and write, read back, finish. The second one is left out unless older
checkpoints are removed (--keep-latest-checkpoints). All ranks work on the same phase. A phase runs
in a thread, and the threads of different ranks never communicate. The training loop calls `poll`
once an iteration. It starts the next phase when all ranks have finished the present one. A
synchronous save runs the same phases and waits for each of them.
"""

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.digest import FileDigest, digest_of_text
from megatron.checkpoint.finite import describe_not_finite, gather_not_finite, values_not_finite
from megatron.checkpoint.folder import UNFINISHED, remove, step_folder
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import Lineage
from megatron.checkpoint.manifest import CONFIG, INDEX, MANIFEST, Manifest, TensorIndex, verify_file
from megatron.checkpoint.publish import Published, Publisher
from megatron.checkpoint.ranks import Ranks, Work
from megatron.checkpoint.tensor_file import write_tensors
from megatron.config.checkpoint import CheckpointConfig
from megatron.durable import replace_file, sync_folder, write_file
from megatron.errors import CheckpointError, DamagedError, TrainingError
from megatron.parallel.shard import TensorShard

_ITEM = 4
"""Bytes of an fp32 number."""
SMALL_FILES = 1 << 20
"""Bytes that must be free in addition to the tensors, for index, manifest and metadata."""


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a checkpoint, except its tensors."""

    iteration: int
    scalars: dict[str, Any] | None
    """The optimizer's step count and loss scale. None if its state is not saved."""
    state: dict[str, Any]
    """`TrainState` as JSON."""
    config_yaml: str
    """The resolved configuration."""
    version: str = ""
    """Version of the code that writes the checkpoint."""
    layout: str = ""
    """Parallel layout of the run, for people. Loading ignores it."""


@dataclass(frozen=True)
class WrittenFile:
    """The tensor file that one rank wrote."""

    file: str
    digest: FileDigest
    slices: list[dict[str, Any]]
    """One record for each shard in the file, as `_describe` returns it."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "WrittenFile":
        """Return the file that `asdict` described on another rank."""
        return cls(record["file"], FileDigest(**record["digest"]), record["slices"])


@dataclass
class _PendingSave:
    """A save in progress."""

    contents: CheckpointContents
    fresh: Path
    """The folder that the ranks write into, with the suffix `.unfinished`."""
    work: Work
    """The present phase."""
    copied: threading.Event
    """Set when the shards may change again: they were copied or written, or the write failed."""
    phases: list[Callable[[list[WrittenFile]], Any]]
    """The phases still to run. Each receives the files of all ranks."""
    keep: bool
    """Whether --keep-latest-checkpoints must never remove this checkpoint."""
    parts: list[WrittenFile] | None = None
    """The files of all ranks. None until the first phase is finished."""


class Saver:
    """Writes the checkpoints of a run.

    All ranks call each method together and in the same order, because most methods communicate.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig | None = None,
        ranks: Ranks | None = None,
        *,
        lease: Lease | None = None,
        say: Callable[[str], None] = lambda line: None,
        saved: Callable[[int], None] = lambda iteration: None,
        lineage: Lineage = (),
    ) -> None:
        """Create a saver without a save in progress.

        Args:
            root: Folder of the run's checkpoints.
            config: The flags that determine when to save and which checkpoints to keep.
            ranks: The ranks that save together. Default: this process alone.
            lease: The lease of `root` on rank 0. None on the other ranks, and in tests and tools.
            say: Called with each message and warning that people must see immediately.
            saved: Called with the iteration of each checkpoint as soon as it is safe.
            lineage: The checkpoints in `root` that the run came through so far.
        """
        self._root = root
        self._config = config or CheckpointConfig()
        self._ranks = ranks or Ranks()
        self._lease = lease
        self._say = say
        self._saved = saved
        self._save: _PendingSave | None = None
        self._buffers: dict[str, Tensor] = {}
        self._failures = 0
        self._retry_at: int | None = None
        self.saved_iteration: int | None = None
        """Iteration of the newest checkpoint that this process has written and that is safe."""
        self.lineage = lineage
        """Checkpoints that the run came through, the newest last, without those removed."""
        self._publisher = Publisher(root, self._config, lease)
        self._keep = False
        """Whether the next checkpoint must be kept permanently."""
        self._ending = False
        """Whether the run has no further iteration."""

    @property
    def in_flight(self) -> bool:
        """Whether a save is in progress."""
        return self._save is not None

    def describe(self, shards: Sequence[TensorShard]) -> tuple[str, str]:
        """Return two cells of the table at start: the size of a checkpoint, and when it is written.

        The second cell also has the retention and the number of checkpoints that fit on the disk.
        """
        size = self._count_total_bytes(shards)
        # A call of a network file system can hang. `work` then names this rank.
        free = self._ranks.work(
            lambda: free_bytes(self._root), f"reading the free space of {self._root}", self._say
        )
        room = int(free // (size + SMALL_FILES))
        if self._config.async_save:
            how = "written while training continues"
        else:
            how = "training waits for them"
        keep = self._config.keep_latest_checkpoints
        if keep is None:
            kept = "all are kept"
        else:
            kept = f"the newest {keep} are kept"
        if room > 0:
            shortage = ""
        else:
            shortage = "; THERE IS NO ROOM: saves will fail"
        return (
            f"{format_gigabytes(size)} each",
            f"{how}, {kept}; {format_gigabytes(free)} free, enough for {room}{shortage}",
        )

    def _count_total_bytes(self, shards: Sequence[TensorShard]) -> int:
        """Return the bytes of the shards that all ranks own. All ranks must call it."""
        return sum(
            self._ranks.gather(sum(_ITEM * shard.tensor.numel() for shard in shards if shard.owner))
        )

    def is_due(self, before: int, after: int) -> bool:
        """Return whether a save is due after a step or jump from iteration `before` to `after`.

        A jump over several iterations (skipped data) counts each iteration that it passes.
        """
        interval = self._config.save_interval
        named = self._config.save_at
        kept = self._config.keep_every
        passed = any(before < at <= after for at in named)
        if passed or (kept is not None and after // kept > before // kept):
            # If a save fails, this is still True or is set again. The next checkpoint that is saved
            # is then the one to keep.
            self._keep = True
        if self._retry_at is not None and after >= self._retry_at:
            return True
        return passed or bool(interval and after // interval > before // interval)

    def mark_end_of_run(self) -> None:
        """Record that no further iteration follows.

        The caller then tries a failed save again immediately, and the messages say so.
        """
        self._ending = True

    def begin(self, contents: CheckpointContents, shards: Sequence[TensorShard]) -> None:
        """Start a save.

        When this method has returned, a thread may still read the tensors of `shards`. They must
        not change until `wait_for_copy` has returned.

        Args:
            contents: The contents of the checkpoint, except its tensors.
            shards: The shards of this rank. Only those with `owner` are written.

        Raises:
            TrainingError: On every rank, if a number that would be stored is not finite. Nothing
                was written.
            CheckpointError: If this was the last failure in a row that is allowed, or another run
                took the folder over.
        """
        # One save at a time. A second one would overwrite the host buffers that the first one is
        # still written from.
        if self._save is not None:
            self._say(
                f"the save of iteration {self._save.contents.iteration} is still in progress, so "
                f"the save of iteration {contents.iteration} waits for it. Is --save-interval too "
                "short for this file system?"
            )
            self.complete()
        self._refuse_not_finite(contents, shards)
        own = {_format_key(shard): shard for shard in shards if shard.owner}
        size = self._count_total_bytes(shards)
        fresh = step_folder(self._root, contents.iteration)
        fresh = fresh.with_name(fresh.name + UNFINISHED)
        self._retry_at = None
        # An earlier attempt may have left a complete checkpoint that no pointer names. The pointers
        # move to it first. Otherwise the next start would not find it if this save is killed.
        finished = Work(
            lambda: self._publish_earlier() if self._ranks.rank == 0 else None, in_thread=True
        )
        self._wait_for(finished, contents)
        earlier = self._gather_outcome(finished, contents, fresh)
        if earlier is None:
            return
        if earlier[0] is not None:
            self._succeed(Published.from_json(earlier[0]))
            if self.saved_iteration == contents.iteration:
                # This call was another attempt for the same iteration, which is safe now.
                self._keep = False
                return
        # The folder must exist before any rank writes into it, so all ranks wait for rank 0 here.
        prepared = Work(
            lambda: self._prepare(fresh, size) if self._ranks.rank == 0 else None, in_thread=True
        )
        self._wait_for(prepared, contents)
        if self._gather_outcome(prepared, contents, fresh) is None:
            return
        copied = threading.Event()
        ready = _record_event(own)
        copy = self._config.async_save
        work = Work(lambda: self._write(fresh, own, copied, ready, copy=copy), in_thread=True)
        keep = self._keep
        self._keep = False
        phases: list[Callable[[list[WrittenFile]], Any]] = [
            lambda parts: self._finish(fresh, contents, parts, keep=keep)
        ]
        if self._config.keep_latest_checkpoints is not None:
            # Reading back costs time. It is only needed if older checkpoints are removed later.
            phases.insert(0, lambda parts: self._read_back(fresh, parts))
        self._set(_PendingSave(contents, fresh, work, copied, phases, keep))

    def _refuse_not_finite(
        self, contents: CheckpointContents, shards: Sequence[TensorShard]
    ) -> None:
        """Raise if a number that would be stored is not finite.

        Raises:
            TrainingError: On every rank. The message names each tensor, its rank, and the number of
                such values.
        """
        mine = describe_not_finite(shards)
        # The counters and scalars are equal on all ranks, so one rank reports them.
        if self._ranks.rank == 0:
            for name, record in (("optimizer", contents.scalars), ("state", contents.state)):
                mine += [f"{key} is {value}" for key, value in values_not_finite(record, name)]
        found = gather_not_finite(mine, self._ranks)
        if not found:
            return
        raise TrainingError(
            f"after iteration {contents.iteration}, the state of this run holds numbers that are "
            "not finite:\n  " + "\n  ".join(found) + "\nAll further steps would be wrong. So the "
            f"run ends, and no checkpoint of this state is written to {self._root}. Older "
            f"checkpoints are untouched, the newest: {self._newest()}. Start again with the same "
            "command to resume from it. If it happens again, skip the data with "
            "--skip-train-iteration-range or lower --lr"
        )

    def _newest(self) -> str:
        """Return the name of the newest checkpoint of this lineage, for messages."""
        if self.lineage:
            return f"global_step{self.lineage[-1].iteration}"
        return "none"

    def _set(self, save: _PendingSave | None) -> None:
        self._save = save
        # While a thread writes, the lease must not be released. Otherwise another run could take
        # the folder over and write into it at the same time.
        if self._lease is not None:
            self._lease.busy = save is not None

    def wait_for_copy(self) -> None:
        """Wait until the tensors that are being saved may change.

        Call it before the optimizer's step, and before anything else that changes the state.
        """
        if self._save is not None:
            self._save.copied.wait()

    def poll(self) -> None:
        """Start the next phase of a save if all ranks have finished the present one.

        Call it once an iteration. On rank 0 it also checks that the lease is still held.

        Raises:
            CheckpointError: See `begin`.
        """
        if self._lease is not None and self._lease.lost is not None:
            raise CheckpointError(self._lease.lost)
        # All ranks decide together. A rank that alone went on would wait in a collective that the
        # others never enter.
        if self._save is not None and self._ranks.all(self._save.work.done):
            self._advance()

    def complete(self) -> None:
        """Wait until the save in progress is safe or has failed.

        Raises:
            CheckpointError: See `begin`.
        """
        while self._save is not None:
            self._wait_for(self._save.work, self._save.contents)
            self._advance()

    def _wait_for(self, work: Work, contents: CheckpointContents) -> None:
        """Wait until all ranks have finished a phase, as long as `Ranks.wait_for` allows."""
        self._ranks.wait_for(work, f"saving iteration {contents.iteration}", self._say)

    def _advance(self) -> None:
        """Start the next phase, or end the save, after all ranks finished the present phase."""
        save = self._save
        assert save is not None
        # First, because no save may appear to be in progress if `_gather_outcome` raises.
        self._set(None)
        results = self._gather_outcome(save.work, save.contents, save.fresh)
        if results is None:
            # The save failed. The next one that succeeds must be kept instead.
            self._keep |= save.keep
            return
        # The results of the first phase are the files. Those of later phases are not, so the files
        # are remembered. A rank that owns nothing wrote no file.
        if save.parts is None:
            save.parts = [WrittenFile.from_json(record) for record in results if record is not None]
        parts = save.parts
        if save.phases:
            phase = save.phases.pop(0)
            save.work = Work(lambda: phase(parts), in_thread=True)
            self._set(save)
            return
        self._succeed(Published.from_json(results[0]))

    def _succeed(self, published: Published) -> None:
        """Record a checkpoint that is safe, and log its messages."""
        self._failures = 0
        self.saved_iteration = published.iteration
        self._saved(published.iteration)
        self.lineage = published.lineage
        for line in published.lines:
            self._say(line)

    def _gather_outcome(
        self, work: Work, contents: CheckpointContents, fresh: Path
    ) -> list[Any] | None:
        """Return all ranks' results, or None after a failure that does not end the run.

        Raises:
            CheckpointError: On every rank, if the failure ends the run.
        """
        fatal = None
        failure = None
        # The order of the branches matters, because DamagedError is a CheckpointError. A file that
        # is read back wrong can be written again. Any other CheckpointError means a lost lease.
        if isinstance(work.error, OSError | DamagedError):
            failure = f"rank {self._ranks.rank} on {os.uname().nodename}: {work.error}"
        elif isinstance(work.error, CheckpointError):
            fatal = str(work.error)
        elif work.error is not None:
            # A mistake in this package. The other ranks wait in `gather` until this process has
            # ended. Their connection is lost then, and `RollCall` reports this error.
            raise work.error
        outcomes = self._ranks.gather([work.result, failure, fatal])
        for _, _, reason in outcomes:
            if reason is not None:
                raise CheckpointError(reason) from work.error
        failures = [failed for _, failed, _ in outcomes if failed]
        if not failures:
            return [result for result, _, _ in outcomes]
        failures += self._ranks.work(lambda: self._remove(fresh), f"removing {fresh}", self._say)
        self._count_failure(contents.iteration, failures, work.error)
        return None

    def _remove(self, fresh: Path) -> list[str]:
        """Remove the unfinished folder on rank 0 to free its space. Return what went wrong."""
        try:
            if self._ranks.rank == 0 and fresh.exists():
                remove(fresh)
        except OSError as error:
            return [f"{fresh} could not be removed: {error}"]
        return []

    def _count_failure(
        self, iteration: int, failures: list[str], cause: BaseException | None
    ) -> None:
        """Log a failed save and schedule the next attempt.

        Args:
            iteration: The iteration that was not saved.
            failures: One line for each failure, of all ranks.
            cause: The error on this rank. None if only other ranks failed.

        Raises:
            CheckpointError: If no further failure in a row is allowed.
        """
        self._failures += 1
        allowed = self._config.max_save_failures
        head = (
            f"saving iteration {iteration} to {self._root} failed "
            f"({self._failures} of {allowed} in a row):"
        )
        problem = "\n  ".join([head, *failures])
        if self._failures >= allowed:
            # `from cause` keeps the errno. `error_report` needs it to find a host with a bad disk.
            raise CheckpointError(
                f"{problem}\nthe run ends here, because further training could not be saved. Older "
                f"checkpoints are untouched, the newest: {self._newest()}. "
                "Make room or fix the file system, and start again with the same command"
            ) from cause
        self._retry_at = iteration + self._config.save_retry_interval
        if self._ending:
            retry = "immediately"
        else:
            retry = f"after iteration {self._retry_at}"
        self._say(
            f"warning: {problem}\nolder checkpoints are untouched; the save is tried again {retry}"
        )

    # The phases follow. Each runs in its own thread and returns JSON, which `gather` can send.
    # A phase must not use a collective, because the main thread uses the same group meanwhile.

    def _prepare(self, fresh: Path, size: int) -> None:
        """Check lease and free space, and make the empty folder of a save. Rank 0 only."""
        self._publisher.confirm_lease()
        free = free_bytes(self._root)
        if free < size + SMALL_FILES:
            raise OSError(
                f"the checkpoint needs {format_gigabytes(size)}, and {self._root} has "
                f"{format_gigabytes(free)} free; make room"
            )
        remove(fresh)
        # The parents are not created. If the file system was unmounted, this would write the
        # checkpoint onto the local disk under the mount point.
        fresh.mkdir()

    def _write(
        self,
        fresh: Path,
        own: dict[str, TensorShard],
        copied: threading.Event,
        ready: "torch.cuda.Event | None",
        *,
        copy: bool,
    ) -> dict[str, Any] | None:
        """Write this rank's shards to its file, and return the `WrittenFile` as JSON.

        Args:
            fresh: The folder to write into.
            own: Key in the file -> a shard that this rank owns.
            copied: Event to set when the shards may change again.
            ready: Event of the device, see `copy_to_host`.
            copy: Copy the shards to the host first, so that training continues during the write.
        """
        try:
            tensors = {key: shard.tensor for key, shard in own.items()}
            if copy:
                tensors = copy_to_host(tensors, self._buffers, ready)
                copied.set()
            if not own:
                return None
            name = f"rank_{self._ranks.rank:05d}.safetensors"
            written = write_tensors(fresh / name, tensors)
        finally:
            # Also after a failure. Otherwise `wait_for_copy` would block the training loop forever.
            copied.set()
        return asdict(
            WrittenFile(
                name,
                written.digest,
                [_describe(shard, name, written.begins[key]) for key, shard in own.items()],
            )
        )

    def _read_back(self, fresh: Path, parts: list[WrittenFile]) -> None:
        """Read the next rank's file back from the disk and compare it with its digest.

        The next rank is often on the same host, so `verify_file` drops the page cache first.
        """
        # The stride distributes the files evenly if there are fewer files than ranks.
        for part in parts[(self._ranks.rank + 1) % self._ranks.size :: self._ranks.size]:
            verify_file(fresh, part.file, part.digest.bytes, part.digest.xxh128)

    def _finish(
        self, fresh: Path, contents: CheckpointContents, parts: list[WrittenFile], *, keep: bool
    ) -> dict[str, Any] | None:
        """Finish a save on rank 0, and return the `Published` checkpoint as JSON.

        It writes the small files, renames the folder, moves the pointers and removes superfluous
        checkpoints. Other ranks return None.
        """
        if self._ranks.rank != 0:
            return None
        # The new checkpoint replaces an earlier one of the same iteration, so that entry is left
        # out.
        before = tuple(entry for entry in self.lineage if entry.iteration != contents.iteration)
        manifest = write_small_files(fresh, contents, parts, before, keep=keep)
        # Read back before the pointers move, because older checkpoints are removed after that.
        for name in (INDEX, CONFIG):
            verify_file(fresh, name, manifest.files[name]["bytes"], manifest.files[name]["xxh128"])
        text = manifest.dump_json()
        verify_file(fresh, MANIFEST, len(text.encode()), digest_of_text(text))
        self._publisher.confirm_lease()
        return asdict(self._publisher.publish(manifest, fresh))

    def _publish_earlier(self) -> dict[str, Any] | None:
        """Publish what an earlier attempt left, and return the `Published` checkpoint as JSON.

        Return None if no attempt left one. Only rank 0 calls it.
        """
        published = self._publisher.publish_earlier()
        if published is None:
            return None
        return asdict(published)


def save_checkpoint(
    root: Path, contents: CheckpointContents, shards: Sequence[TensorShard]
) -> Path:
    """Save a checkpoint from one process, and return its folder when it is safe.

    Args:
        root: Folder of the checkpoints. It is made if it does not exist.
        contents: The contents of the checkpoint, except its tensors.
        shards: All tensors.

    Raises:
        CheckpointError: If it could not be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    saver = Saver(root, CheckpointConfig(max_save_failures=1))
    saver.begin(contents, shards)
    saver.complete()
    return step_folder(root, contents.iteration)


def copy_to_host(
    tensors: dict[str, Tensor], buffers: dict[str, Tensor], ready: "torch.cuda.Event | None"
) -> dict[str, Tensor]:
    """Copy tensors to host buffers, which are kept for the next save.

    Args:
        tensors: Key -> a tensor on the host or the device.
        buffers: Key -> the buffer of an earlier save. New buffers are added.
        ready: CUDA event that was recorded when the save started. None if no tensor is on a GPU.
    """
    copies = {}
    for key, tensor in tensors.items():
        buffer = buffers.get(key)
        if buffer is None:
            buffer = buffers[key] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        copies[key] = buffer
    if ready is None:
        for key, tensor in tensors.items():
            copies[key].copy_(tensor.detach())
        return copies
    device = next(iter(tensors.values())).device
    # A separate stream overlaps the copy with the next forward and backward pass. It waits for
    # `ready`, because the optimizer's step before the save may still be running on the device.
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        for key, tensor in tensors.items():
            copies[key].copy_(tensor.detach(), non_blocking=True)
    # Without this, the file would be written from buffers that are not filled yet.
    stream.synchronize()
    return copies


def write_small_files(
    fresh: Path,
    contents: CheckpointContents,
    parts: Sequence[WrittenFile],
    lineage: Lineage,
    *,
    keep: bool,
) -> Manifest:
    """Write index, configuration and manifest, and return the manifest.

    The manifest is written last, because it holds the digests of the other files. A folder without
    a manifest is not a checkpoint.

    Args:
        fresh: The folder of the tensor files.
        contents: The contents of the checkpoint, except its tensors.
        parts: The tensor files of all ranks.
        lineage: The checkpoints that the run came through before this one.
        keep: Whether --keep-latest-checkpoints must never remove this checkpoint.
    """
    index = TensorIndex({}, {part.file: part.digest.blocks for part in parts})
    for part in parts:
        for stored in part.slices:
            entry = index.tensors.setdefault(
                stored["tensor"], {"shape": stored["global_shape"], "boxes": []}
            )
            entry["boxes"].append(
                {key: stored[key] for key in ("file", "begin", "offset", "shape")}
            )
    files: dict[str, dict[str, Any]] = {
        part.file: {"bytes": part.digest.bytes, "xxh128": part.digest.xxh128} for part in parts
    }
    for name, text in ((INDEX, index.dump_json()), (CONFIG, contents.config_yaml)):
        write_file(fresh / name, text)
        files[name] = {"bytes": len(text.encode()), "xxh128": digest_of_text(text)}
    entries = [[entry.iteration, entry.digest, entry.keep, entry.applied] for entry in lineage]
    manifest = Manifest(
        contents.iteration,
        contents.version,
        contents.layout,
        contents.state,
        contents.scalars,
        files,
        entries,
        keep,
    )
    write_file(fresh / MANIFEST, manifest.dump_json())
    sync_folder(fresh)
    return manifest


def check_writable(root: Path) -> None:
    """Check that checkpoints can be written to a folder, by writing and removing a file there.

    Call it before training starts. Otherwise the first save would find a wrong path hours later.

    Raises:
        CheckpointError: If the folder cannot be made or written.
    """
    # A unique name, because several runs may start at the same time.
    probe = root / f".writable.{uuid.uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        replace_file(probe, "")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"--save {root} cannot be written: {error}; give another folder, or make room"
        ) from error


def free_bytes(root: Path) -> int:
    """Return the free bytes of the file system that this user may still write."""
    # `f_bavail` leaves out the blocks reserved for root, which `f_bfree` would count.
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize


def format_gigabytes(size: int) -> str:
    """Return a number of bytes as text for people, such as "1.250 GB"."""
    return f"{size / 1e9:,.3f} GB"


def _format_key(shard: TensorShard) -> str:
    """Return the name of a shard in its file, such as `weight/blocks.3.mlp.up.weight@0,512`."""
    return f"{shard.kind}/{shard.name}@{','.join(map(str, shard.offset))}"


def _describe(shard: TensorShard, file: str, begin: int) -> dict[str, Any]:
    """Return the record of a shard whose bytes begin at byte `begin` of `file`."""
    return {
        "tensor": f"{shard.kind}/{shard.name}",
        "global_shape": shard.global_shape,
        "file": file,
        "begin": begin,
        "offset": shard.offset,
        "shape": tuple(shard.tensor.shape),
    }


def _record_event(own: dict[str, TensorShard]) -> "torch.cuda.Event | None":
    """Return an event that completes after the work that the device has queued so far.

    None if no shard is on a device.
    """
    if not any(shard.tensor.is_cuda for shard in own.values()):
        return None
    event = torch.cuda.Event()
    event.record()
    return event
