"""Saving: every rank writes the boxes that it owns into a fresh folder; the folder gets its name, then the pointers move.

Invariants: a kill at any instant leaves the pointers at a whole checkpoint, the old or the new one, never at a mixture; nothing is
removed before a newer checkpoint was read back from the disk; all ranks agree on what became of a
save; nothing that is not finite is stored.

A save is a sequence of phases, each the work of all ranks at once: copy and write, read back, finish. A phase runs in a thread; the
ranks' threads never talk to each other. The loop asks once an iteration (`poll`) whether all ranks are through, and starts the next
one. A save that is not asynchronous waits for each phase at once: one path for both.
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
from megatron.checkpoint.folder import (
    LATEST,
    UNFINISHED,
    point_to,
    put_in_place,
    remove,
    remove_interrupted_leftovers,
    step_folder,
    unmark_begun,
)
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import (
    Lineage,
    LineageEntry,
    is_entry_on_disk,
    make_entry,
    read_lineage,
    select_removable_entries,
    write_lineage,
)
from megatron.checkpoint.manifest import CONFIG, INDEX, MANIFEST, Manifest, TensorIndex, verify_file
from megatron.checkpoint.ranks import Ranks, Work
from megatron.checkpoint.tensor_file import write_tensors
from megatron.config.checkpoint import CheckpointConfig
from megatron.durable import replace_file, sync_folder, write_file
from megatron.errors import CheckpointError, DamagedError, TrainingError
from megatron.parallel.shard import TensorShard

_ITEM = 4  # bytes of an fp32
SMALL_FILES = 1 << 20
"""Bytes that are kept free beside the tensors, for index, manifest and the file system's own."""


@dataclass(frozen=True)
class CheckpointContents:
    """What a checkpoint is made of, apart from its tensors."""

    iteration: int
    scalars: dict[str, Any] | None
    """The optimizer's; None leaves the optimizer's state out."""
    state: dict[str, Any]
    config_yaml: str
    version: str = ""
    layout: str = ""


@dataclass(frozen=True)
class WrittenFile:
    """What one rank wrote."""

    file: str
    digest: FileDigest
    boxes: list[dict[str, Any]]

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "WrittenFile":
        """Return the part that `asdict` described on another rank."""
        return cls(record["file"], FileDigest(**record["digest"]), record["boxes"])


@dataclass(frozen=True)
class Published:
    """A checkpoint that the pointers name."""

    iteration: int
    lineage: Lineage
    """That led to it, itself last; without what was removed."""
    lines: list[str]
    """What there is to say."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Published":
        """Return what `asdict` described on rank 0."""
        lineage = tuple(LineageEntry(**entry) for entry in record["lineage"])
        return cls(record["iteration"], lineage, record["lines"])


@dataclass
class _PendingSave:
    """One that is under way."""

    contents: CheckpointContents
    fresh: Path
    work: Work
    copied: threading.Event
    phases: list[Callable[[list[WrittenFile]], Any]]
    """Those still to come; each is given what all ranks wrote."""
    keep: bool
    parts: list[WrittenFile] | None = None


class Saver:
    """Writes the checkpoints of a run; all ranks call each method together, in the same order.

    `saved` is told of each iteration whose checkpoint is safe, `say` what else people must know at once. `lease` is rank 0's; None
    for who needs none (tests, tools). `lineage`: the checkpoints in this folder that the run came through so far.
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
        self._root, self._config = root, config or CheckpointConfig()
        self._ranks, self._lease, self._say, self._saved = ranks or Ranks(), lease, say, saved
        self._save: _PendingSave | None = None
        self._buffers: dict[str, Tensor] = {}
        self._failures = 0
        self._retry_at: int | None = None
        self.saved_iteration: int | None = None
        """The newest checkpoint that this process has written and that is safe."""
        self._lineage = lineage
        self._unpointed: Manifest | None = None
        """Rank 0: a checkpoint that may have its name, and that the pointers do not name, because
        of an I/O error."""
        self._keep = False
        self._ending = False

    @property
    def in_flight(self) -> bool:
        return self._save is not None

    def describe(self, shards: Sequence[TensorShard]) -> tuple[str, str]:
        """For the table at start: what a save of these costs, and how many there is room for."""
        size = self._count_total_bytes(shards)
        free = self._ranks.work(
            lambda: free_bytes(self._root), f"looking at {self._root}", self._say
        )
        room = int(free // (size + SMALL_FILES))
        how = (
            "written while training goes on"
            if self._config.async_save
            else "training waits for them"
        )
        keep = self._config.keep_latest_checkpoints
        kept = "all are kept" if keep is None else f"the newest {keep} are kept"
        enough = "" if room > 0 else "; THERE IS NO ROOM: saves will fail"
        return (
            f"{format_gigabytes(size)} each",
            f"{how}, {kept}; {format_gigabytes(free)} free, for {room} of them{enough}",
        )

    def _count_total_bytes(self, shards: Sequence[TensorShard]) -> int:
        """Of all ranks' tensors."""
        return sum(
            self._ranks.gather(sum(_ITEM * shard.tensor.numel() for shard in shards if shard.owner))
        )

    def is_due(self, before: int, after: int) -> bool:
        """Whether a step or jump from iteration `before` to `after` passed an iteration after which to save."""
        interval, named, kept = (
            self._config.save_interval,
            self._config.save_at,
            self._config.keep_every,
        )
        passed = any(before < at <= after for at in named)
        if passed or (kept is not None and after // kept > before // kept):
            self._keep = (
                True  # until one is safe: the first save behind that iteration is the one to keep
            )
        if self._retry_at is not None and after >= self._retry_at:
            return True
        return passed or bool(interval and after // interval > before // interval)

    def end_of_run(self) -> None:
        """No further iteration will come: whoever calls tries a save that failed again at once."""
        self._ending = True

    def begin(self, contents: CheckpointContents, shards: Sequence[TensorShard]) -> None:
        """Start a save. When this returns, what `shards` hold may be read but must not change before `wait_for_copy`.

        Raises:
            TrainingError: on every rank; a number that would be stored is not finite. Nothing was
                written.
            CheckpointError: this was the last failure in a row that is allowed; or another run took the folder over.
        """
        if self._save is not None:
            self._say(
                f"the save of iteration {self._save.contents.iteration} is still being written; iteration "
                f"{contents.iteration}'s waits for it. Is --save-interval too short for this file system?"
            )
            self.complete()
        self._refuse_not_finite(contents, shards)
        own = {_format_key(shard): shard for shard in shards if shard.owner}
        size = self._count_total_bytes(shards)
        fresh = step_folder(self._root, contents.iteration)
        fresh = fresh.with_name(fresh.name + UNFINISHED)
        self._retry_at = None
        finished = Work(
            lambda: self._finish_earlier() if self._ranks.rank == 0 else None, in_thread=True
        )
        self._wait_for(finished, contents)
        earlier = self._gather_outcome(finished, contents, fresh)
        if earlier is None:
            return
        if earlier[0] is not None:
            self._succeed(Published.from_json(earlier[0]))
            if self.saved_iteration == contents.iteration:
                self._keep = False
                return
        prepared = Work(
            lambda: self._prepare(fresh, size) if self._ranks.rank == 0 else None, in_thread=True
        )
        self._wait_for(prepared, contents)
        if self._gather_outcome(prepared, contents, fresh) is None:
            return
        copied, ready, copy = threading.Event(), _record_event(own), self._config.async_save
        work = Work(lambda: self._write(fresh, own, copied, ready, copy=copy), in_thread=True)
        keep, self._keep = self._keep, False
        phases: list[Callable[[list[WrittenFile]], Any]] = [
            lambda parts: self._finish(fresh, contents, parts, keep=keep)
        ]
        if self._config.keep_latest_checkpoints is not None:
            phases.insert(0, lambda parts: self._read_back(fresh, parts))
        self._set(_PendingSave(contents, fresh, work, copied, phases, keep))

    def _refuse_not_finite(
        self, contents: CheckpointContents, shards: Sequence[TensorShard]
    ) -> None:
        """
        Raises:
            TrainingError: on every rank; names what is not finite, its rank, and how many numbers.
        """
        mine = describe_not_finite(shards)
        if self._ranks.rank == 0:  # the others have the same counters
            for name, record in (("optimizer", contents.scalars), ("state", contents.state)):
                mine += [f"{key} is {value}" for key, value in values_not_finite(record, name)]
        found = gather_not_finite(mine, self._ranks)
        if not found:
            return
        raise TrainingError(
            f"after iteration {contents.iteration}, the state of this run holds numbers that are "
            "not finite:\n  " + "\n  ".join(found) + "\nno step from here can be right, so the run "
            f"ends, and no checkpoint of it is written to {self._root}. Older ones are untouched, "
            f"the last: {self._last()}. Start again with the same command to go on from that one; "
            "if it happens again, skip the data with --skip-train-iteration-range or lower --lr"
        )

    def _last(self) -> str:
        return f"global_step{self._lineage[-1].iteration}" if self._lineage else "there is none"

    def _set(self, save: _PendingSave | None) -> None:
        self._save = save
        if self._lease is not None:
            self._lease.busy = save is not None

    def wait_for_copy(self) -> None:
        """Before the optimizer's step, or anything else that changes the state."""
        if self._save is not None:
            self._save.copied.wait()

    def poll(self) -> None:
        """Once an iteration: go on with a save as far as all ranks are. On rank 0 also: is the folder still ours?

        Raises:
            CheckpointError: see `begin`.
        """
        if self._lease is not None and self._lease.lost is not None:
            raise CheckpointError(self._lease.lost)
        if self._save is not None and self._ranks.all(self._save.work.done):
            self._advance()

    def complete(self) -> None:
        """Wait until the save under way is safe, or has failed.

        Raises:
            CheckpointError: see `begin`.
        """
        while self._save is not None:
            self._wait_for(self._save.work, self._save.contents)
            self._advance()

    def _wait_for(self, work: Work, contents: CheckpointContents) -> None:
        """Wait until all ranks are through with a phase, however long the slowest one's file system takes."""
        self._ranks.wait_for(work, f"saving iteration {contents.iteration}", self._say)

    def _advance(self) -> None:
        """The present phase is through on all ranks: the next one, or the end."""
        save = self._save
        assert save is not None
        self._set(None)
        results = self._gather_outcome(save.work, save.contents, save.fresh)
        if results is None:
            self._keep |= save.keep
            return
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
        self._failures = 0
        self.saved_iteration = published.iteration
        self._saved(published.iteration)
        self._lineage = published.lineage
        for line in published.lines:
            self._say(line)

    def _gather_outcome(
        self, work: Work, contents: CheckpointContents, fresh: Path
    ) -> list[Any] | None:
        """All ranks' results, or None after a failure that the run may survive.

        Raises:
            CheckpointError: it may not.
        """
        fatal = None
        failure = None
        if isinstance(work.error, OSError | DamagedError):
            failure = f"rank {self._ranks.rank} on {os.uname().nodename}: {work.error}"
        elif isinstance(work.error, CheckpointError):
            fatal = str(work.error)
        elif work.error is not None:
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
        """Make room, on rank 0. Return what went wrong."""
        try:
            if self._ranks.rank == 0 and fresh.exists():
                remove(fresh)
        except OSError as error:
            return [f"{fresh} could not be removed: {error}"]
        return []

    def _count_failure(
        self, iteration: int, failures: list[str], cause: BaseException | None
    ) -> None:
        """`cause`: what failed on this rank; None where it was another rank."""
        self._failures += 1
        allowed = self._config.max_save_failures
        last = f"it is {self._last()}" if self._lineage else "there is none"
        head = f"saving iteration {iteration} to {self._root} failed ({self._failures} of {allowed} in a row):"
        told = "\n  ".join([head, *failures])
        if self._failures >= allowed:
            raise CheckpointError(
                f"{told}\nthe run ends here, so as not to train what cannot be kept; its last checkpoint is untouched: {last}. "
                "Make room or mend the file system, and start again with the same command"
            ) from cause
        self._retry_at = iteration + self._config.save_retry_interval
        again = "at once" if self._ending else f"after iteration {self._retry_at}"
        self._say(f"warning: {told}\nolder checkpoints are untouched; tried again {again}")

    # -- the phases; each runs in a thread of its own, and returns what can be sent as JSON ----------------------------------------

    def _prepare(self, fresh: Path, size: int) -> None:
        self._confirm_lease()
        free = free_bytes(self._root)
        if free < size + SMALL_FILES:
            raise OSError(
                f"the checkpoint has {format_gigabytes(size)}, and {self._root} has {format_gigabytes(free)} free; make room"
            )
        remove(fresh)
        fresh.mkdir()  # not its parents: a file system that is gone must not be written beside

    def _write(
        self,
        fresh: Path,
        own: dict[str, TensorShard],
        copied: threading.Event,
        ready: "torch.cuda.Event | None",
        *,
        copy: bool,
    ) -> dict[str, Any] | None:
        try:
            tensors = {key: shard.tensor for key, shard in own.items()}
            if copy:
                tensors = self._copy(tensors, ready)
                copied.set()
            if not own:
                return None
            name = f"rank_{self._ranks.rank:05d}.safetensors"
            written = write_tensors(fresh / name, tensors)
        finally:
            copied.set()
        return asdict(
            WrittenFile(
                name,
                written.digest,
                [_describe(shard, name, written.begins[key]) for key, shard in own.items()],
            )
        )

    def _copy(
        self, tensors: dict[str, Tensor], ready: "torch.cuda.Event | None"
    ) -> dict[str, Tensor]:
        """On the host; its memory is kept for the next save."""
        copies = {}
        for key, tensor in tensors.items():
            buffer = self._buffers.get(key)
            if buffer is None:
                buffer = self._buffers[key] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            copies[key] = buffer
        if ready is None:
            for key, tensor in tensors.items():
                copies[key].copy_(tensor.detach())
            return copies
        device = next(iter(tensors.values())).device
        stream = torch.cuda.Stream(
            device
        )  # beside the computation, and behind what was under way when the save began
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            for key, tensor in tensors.items():
                copies[key].copy_(tensor.detach(), non_blocking=True)
        stream.synchronize()
        return copies

    def _read_back(self, fresh: Path, parts: list[WrittenFile]) -> None:
        """Compare what the disk holds with what was meant: each rank its neighbour's file, past this machine's memory."""
        for part in parts[(self._ranks.rank + 1) % self._ranks.size :: self._ranks.size]:
            verify_file(fresh, part.file, part.digest.bytes, part.digest.xxh128)

    def _finish(
        self, fresh: Path, contents: CheckpointContents, parts: list[WrittenFile], *, keep: bool
    ) -> dict[str, Any] | None:
        """Rank 0: write the small files, name the folder, move the pointers, and remove what is
        superfluous. Return the `Published` checkpoint."""
        if self._ranks.rank != 0:
            return None
        before = tuple(entry for entry in self._lineage if entry.iteration != contents.iteration)
        manifest = write_small_files(fresh, contents, parts, before, keep=keep)
        for name in (INDEX, CONFIG):
            verify_file(fresh, name, manifest.files[name]["bytes"], manifest.files[name]["xxh128"])
        text = manifest.dump_json()
        verify_file(fresh, MANIFEST, len(text.encode()), digest_of_text(text))
        self._confirm_lease()
        return asdict(self._publish(manifest, fresh))

    def _finish_earlier(self) -> dict[str, Any] | None:
        """Rank 0: move the pointers to the checkpoint that an earlier attempt has left without
        them; None where there is none."""
        manifest = self._unpointed
        if manifest is None:
            return None
        self._confirm_lease()
        if not is_entry_on_disk(self._root, make_entry(manifest)):
            self._unpointed = None
            return None
        return asdict(self._publish(manifest, None))

    def _publish(self, manifest: Manifest, fresh: Path | None) -> Published:
        """Name the folder `fresh` (None: it has its name) and move the pointers.

        After an I/O error, what is on the disk decides. The save has succeeded if `latest` names
        the checkpoint. Else it has failed; the checkpoint stays if it has its name, and the next
        attempt begins with its pointers.

        Raises:
            OSError: `latest` does not name the checkpoint. CheckpointError: another run took the
                folder over.
        """
        iteration, lineage = manifest.iteration, read_lineage(manifest)
        self._unpointed = manifest
        try:
            if fresh is not None:
                put_in_place(fresh, step_folder(self._root, iteration))
            write_lineage(self._root, manifest, self._confirm_lease)
            point_to(self._root, iteration, self._confirm_lease)
            self._confirm_lease()
        except OSError as error:
            if not self._is_there(manifest):
                raise
            if not self._is_pointed_to(iteration):
                raise OSError(
                    f"{error}; global_step{iteration} is whole and stays, but "
                    f"{self._root / LATEST} does not name it: the next attempt begins with that, or "
                    f"write global_step{iteration} there by hand"
                ) from error
            self._unpointed = None
            said = f"global_step{iteration} is saved, although: {error}"
            return Published(
                iteration, lineage, [f"warning: {said}; nothing is removed before the next save"]
            )
        self._unpointed = None
        return self._clean_up(iteration, lineage)

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether the checkpoint has its name; False where that cannot be read."""
        try:
            return is_entry_on_disk(self._root, make_entry(manifest))
        except OSError:
            return False

    def _is_pointed_to(self, iteration: int) -> bool:
        """Whether `latest` names the iteration; False where that cannot be read."""
        try:
            text = (self._root / LATEST).read_text(errors="replace")
        except OSError:
            return False
        return text.strip() == f"global_step{iteration}"

    def _confirm_lease(self) -> None:
        """Before each act that others would suffer from: this process may have stood still since the one before."""
        if self._lease is not None:
            self._lease.confirm()

    def _clean_up(self, iteration: int, lineage: Lineage) -> Published:
        """Remove what the checkpoint of `iteration`, the last of `lineage`, makes superfluous.

        A failure here does not harm the checkpoint, and does not stop the next removal; the next
        save tries again.
        """
        said = [f"warning: {trouble}" for trouble in remove_interrupted_leftovers(self._root)]
        try:
            unmark_begun(self._root)
        except OSError as error:
            said.append(f"warning: {error}; the next save tries again to remove it")
        gone: list[LineageEntry] = []

        def there(entry: LineageEntry) -> bool:
            try:
                return entry == lineage[-1] or is_entry_on_disk(self._root, entry)
            except OSError:
                return False  # it is not counted, so one more of the others stays

        for entry in select_removable_entries(lineage, self._config, there):
            try:
                if is_entry_on_disk(self._root, entry):
                    remove(step_folder(self._root, entry.iteration))
                    said.append(
                        f"removed by --keep-latest-checkpoints: global_step{entry.iteration}"
                    )
                gone.append(entry)
            except OSError as error:
                said.append(f"warning: global_step{entry.iteration} could not be removed: {error}")
        return Published(iteration, tuple(entry for entry in lineage if entry not in gone), said)


def save_checkpoint(
    root: Path, contents: CheckpointContents, shards: Sequence[TensorShard]
) -> Path:
    """By one process, at once. Returns the checkpoint's folder.

    Raises:
        CheckpointError: it could not be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    saver = Saver(root, CheckpointConfig(max_save_failures=1))
    saver.begin(contents, shards)
    saver.complete()
    return step_folder(root, contents.iteration)


def write_small_files(
    fresh: Path,
    contents: CheckpointContents,
    parts: Sequence[WrittenFile],
    lineage: Lineage,
    *,
    keep: bool,
) -> Manifest:
    """Index, configuration, and the manifest that has their digests."""
    index = TensorIndex({}, {part.file: part.digest.blocks for part in parts})
    for part in parts:
        for box in part.boxes:
            entry = index.tensors.setdefault(
                box["tensor"], {"shape": box["global_shape"], "boxes": []}
            )
            entry["boxes"].append({key: box[key] for key in ("file", "begin", "offset", "shape")})
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
    """Write and remove a file in the folder that checkpoints will go to, before anything is trained.

    Raises:
        CheckpointError: it cannot be made or written.
    """
    probe = root / f".writable.{uuid.uuid4().hex}"  # several may start at once
    try:
        root.mkdir(parents=True, exist_ok=True)
        replace_file(probe, "")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"--save {root} cannot be written: {error}; give another folder, or make room"
        ) from error


def free_bytes(root: Path) -> int:
    """That this user may still write."""
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize


def format_gigabytes(size: int) -> str:
    """For people."""
    return f"{size / 1e9:,.3f} GB"


def _format_key(shard: TensorShard) -> str:
    return f"{shard.kind}/{shard.name}@{','.join(map(str, shard.offset))}"


def _describe(shard: TensorShard, file: str, begin: int) -> dict[str, Any]:
    return {
        "tensor": f"{shard.kind}/{shard.name}",
        "global_shape": shard.global_shape,
        "file": file,
        "begin": begin,
        "offset": shard.offset,
        "shape": tuple(shard.tensor.shape),
    }


def _record_event(own: dict[str, TensorShard]) -> "torch.cuda.Event | None":
    """When the device will be through with what it was given so far; None where there is no device."""
    if not any(shard.tensor.is_cuda for shard in own.values()):
        return None
    event = torch.cuda.Event()
    event.record()
    return event
