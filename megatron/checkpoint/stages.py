"""The stages of a save: what each one does on one rank, what it needs, and what it returns.

A stage runs in a thread. It must not use a collective, because the main thread uses the same group
meanwhile. `save.py` starts the stages, and agrees with the other ranks on how each one ended.

The shards of a rank go from `SaveInProgress.shards` through the stage WRITE into the file of this
rank, see `shard_file.py`. Its description, `WrittenFile`, goes to rank 0, and a summary of it to
all ranks. It is in `SaveInProgress.files` from then on.

A `Publisher` gives a written checkpoint its final name, and then moves the pointers to it. Only
rank 0 does this. Invariants:

- A kill at any time leaves the pointers at one complete checkpoint, the old or the new one.
- Nothing is renamed or removed unless this run still holds the lease of the folder.
- Nothing is removed before the pointers name the new checkpoint.
"""

import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from megatron.base.outside_file import POINTER_BYTES, load_text
from megatron.base.plain_text import format_bytes, is_url
from megatron.checkpoint.contents import CheckpointContents, write_small_files
from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.folder import (
    LATEST,
    point_to,
    put_in_place,
    remove,
    remove_interrupted_leftovers,
    remove_started_marker,
    step_folder,
)
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import (
    UNPUBLISHED_FILE,
    Lineage,
    LineageEntry,
    is_entry_on_disk,
    make_entry,
    read_lineage,
    record_unpublished,
    select_removable_entries,
    write_lineage,
)
from megatron.checkpoint.manifest import CONFIG, INDEX, MANIFEST, Manifest, verify_file
from megatron.checkpoint.shard_file import (
    HostBuffer,
    ShardsByKey,
    WrittenFile,
    copy_to_host,
    write_shard_file,
)
from megatron.checkpoint.store import NO_STORE, Store
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.ranks import Ranks, Work

SMALL_FILES = 1 << 20
"""Bytes that must be free in addition to the tensors, for index, manifest and metadata."""


@dataclass(frozen=True)
class Published:
    """A saved checkpoint that the pointers name."""

    iteration: int
    lineage: Lineage
    """Checkpoints that the run came through, this one last, without those that were removed."""
    lines: list[str]
    """Messages and warnings to log."""


class Publisher:
    """Publishes the checkpoints of a run."""

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        lease: Lease | None,
        in_use: Callable[[], Collection[int]] = tuple,
        rollback_distance: int | None = None,
        store: Store = NO_STORE,
    ) -> None:
        """Create a publisher without an unfinished attempt.

        Args:
            root: Folder of the run's checkpoints.
            config: The flags of retention.
            lease: The lease of `root`. None in tests and tools.
            in_use: Returns the iterations of checkpoints that must stay for now. It is called from
                any thread.
            rollback_distance: See `select_removable_entries`.
            store: Where checkpoints are kept besides `root`. Default: nowhere.
        """
        self._store = store
        self._root = root
        self._rollback_distance = rollback_distance
        self._config = config
        self._lease = lease
        self._in_use = in_use
        self._interrupted: Manifest | None = None
        """The checkpoint that `publish` could not finish because of an I/O error.

        It may have its final name already, and the pointers do not name it. `publish_earlier` takes
        it up again.
        """

    def confirm_lease(self) -> None:
        """Raise CheckpointError if another run has taken the folder over.

        Call it before each rename or removal. The process may have been suspended since the last
        call, and another run may own the folder now.
        """
        if self._lease is not None:
            self._lease.confirm()

    def publish(self, manifest: Manifest, fresh: Path | None) -> Published:
        """Rename the folder, move the pointers to it and clean up.

        After an I/O error, the state of the disk decides. The save has succeeded if `latest` names
        the checkpoint. Otherwise it has failed. In that case a checkpoint that has its final name
        stays, and the next attempt moves the pointers to it first.

        Args:
            manifest: The manifest of the checkpoint.
            fresh: The folder to rename. None if it has its final name already.

        Raises:
            OSError: If `latest` does not name the checkpoint.
            CheckpointError: If another run took the folder over.
        """
        # Set before the first rename, so that no error below can lose track of the checkpoint.
        self._interrupted = manifest
        problem = self._move_into_place(manifest, fresh)
        self._interrupted = None
        lineage = read_lineage(manifest)
        if problem is None:
            return self._clean_up(manifest.iteration, lineage)
        warning = (
            f"warning: global_step{manifest.iteration} is saved in spite of an error: {problem}; "
            "nothing is removed before the next save"
        )
        return Published(manifest.iteration, lineage, [warning])

    def _move_into_place(self, manifest: Manifest, fresh: Path | None) -> str | None:
        """Rename the folder and move the pointers to it. See `publish` for arguments and errors.

        Returns:
            The text of an I/O error in spite of which `latest` names the checkpoint, or None.
        """
        iteration = manifest.iteration
        # The order of the writes below matters. The pointers move last. Otherwise a kill could
        # leave them at a folder without its final name, or without the copy of its lineage.
        try:
            if fresh is not None:
                # Otherwise a start after an interruption below could not distinguish the checkpoint
                # from one that was rolled back, and retention would never remove it.
                record_unpublished(self._root, manifest, self.confirm_lease)
                put_in_place(fresh, step_folder(self._root, iteration))
            write_lineage(self._root, manifest, self.confirm_lease)
            point_to(self._root, iteration, self.confirm_lease)
            self.confirm_lease()
            self._store.publish()
        except OSError as error:
            if not self._is_in_place(manifest):
                raise
            if not self._is_pointed_to(iteration):
                by_hand = f". You can also write global_step{iteration} there by hand"
                where = str(self._root / LATEST)
                if is_url(save := self._config.save or ""):
                    # Nobody can write the pointer of an address with an editor.
                    by_hand, where = "", save
                raise OSError(
                    f"{error}; global_step{iteration} is complete and stays, but {where} does not "
                    f"name it. The next attempt first moves the pointers to it{by_hand}"
                ) from error
            return str(error)
        return None

    def publish_earlier(self) -> Published | None:
        """Move the pointers to the checkpoint that an earlier attempt left without them.

        Returns:
            The checkpoint, or None if no attempt left one.

        Raises:
            OSError: See `publish`.
            CheckpointError: See `publish`.
        """
        manifest = self._interrupted
        if manifest is None:
            return None
        self.confirm_lease()
        # An operator may have removed or replaced it meanwhile.
        if not is_entry_on_disk(self._root, make_entry(manifest)):
            self._interrupted = None
            return None
        return self.publish(manifest, None)

    def _is_in_place(self, manifest: Manifest) -> bool:
        """Return whether the checkpoint has its final name. False if that cannot be read."""
        try:
            return is_entry_on_disk(self._root, make_entry(manifest))
        except OSError:
            return False

    def _is_pointed_to(self, iteration: int) -> bool:
        """Return whether `latest` names the iteration. False if that cannot be read."""
        if not self._store.has_published(iteration):
            return False
        try:
            text = load_text(self._root / LATEST, POINTER_BYTES, decoding="replace")
        except OSError:
            return False
        return text.strip() == f"global_step{iteration}"

    def _clean_up(self, iteration: int, lineage: Lineage) -> Published:
        """Remove what the checkpoint of `iteration`, the last of `lineage`, makes superfluous.

        A failure here does not harm the checkpoint and does not stop the next removal. The next
        save tries again.
        """
        messages = [f"warning: {trouble}" for trouble in remove_interrupted_leftovers(self._root)]
        try:
            remove_started_marker(self._root)
            (self._root / UNPUBLISHED_FILE).unlink(missing_ok=True)
        except OSError as error:
            messages.append(f"warning: {error}; the next save tries again to remove it")
        removed: list[LineageEntry] = []
        gone: list[int] = []

        def is_on_disk(entry: LineageEntry) -> bool:
            try:
                return entry == lineage[-1] or is_entry_on_disk(self._root, entry)
            except OSError:
                # A checkpoint that cannot be read may be lost. It does not count, so one more of
                # the others stays.
                return False

        in_use = self._in_use()
        for entry in select_removable_entries(
            lineage, self._config, is_on_disk, self._rollback_distance
        ):
            # It stays in the lineage, so a later save removes it.
            if entry.iteration in in_use:
                continue
            try:
                # The folder may hold a checkpoint of another lineage, which is not ours to remove.
                if is_entry_on_disk(self._root, entry):
                    remove(step_folder(self._root, entry.iteration))
                    gone.append(entry.iteration)
                    messages.append(
                        f"removed by --keep-latest-checkpoints: global_step{entry.iteration}"
                    )
                removed.append(entry)
            except OSError as error:
                messages.append(
                    f"warning: global_step{entry.iteration} could not be removed: {error}"
                )
        messages += self._store.clean_up(gone)
        remaining = tuple(entry for entry in lineage if entry not in removed)
        return Published(iteration, remaining, messages)


class SaveStage(Enum):
    """The stages of a save, in their order. All ranks are in the same one."""

    FINISH_EARLIER = "finish an earlier attempt"
    """Rank 0 moves the pointers to a complete checkpoint that an earlier attempt left."""
    PREPARE = "prepare the folder"
    """Rank 0 checks lease and free space, and makes the empty folder."""
    WRITE = "copy and write"
    """Each rank copies its shards to the host (--async-save), and writes its file."""
    READ_BACK = "read back"
    """Each rank compares the file of the next rank with its digest.

    Only with --keep-latest-checkpoints.
    """
    PUBLISH = "publish"
    """Rank 0 writes the small files, renames the folder, moves the pointers, and cleans up."""


@dataclass
class SaveInProgress:
    """The state of one save on one rank.

    Only the main thread changes it, and only while no stage of this rank runs.
    """

    contents: CheckpointContents
    folder: Path
    """The folder that the ranks write into, with the suffix `.unfinished`."""
    total_bytes: int
    """Size of the shards of all ranks."""
    shards: ShardsByKey
    """The shards that this rank writes. Empty once they are written."""
    ready: "torch.cuda.Event | None"
    """Event of the device that completes when the shards are up to date. See `copy_to_host`."""
    copy_first: bool
    """Copy the shards to the host first, so that training continues during the write."""
    keep: bool
    """Whether --keep-latest-checkpoints must never remove this checkpoint."""
    lineage: Lineage
    """The checkpoints that the run came through before this one."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when the shards may change again: they were copied or written, or the write failed."""
    files: tuple[WrittenFile, ...] = ()
    """The files of all ranks. Empty until they are written.

    Only rank 0 has their slices and the digests of their blocks.
    """
    stage: SaveStage = field(init=False)
    """The present stage, or the last one that ended."""
    work: Work["StageResult"] = field(init=False)
    """This rank's part of `stage`."""


@dataclass(frozen=True)
class StageResult:
    """What a stage returned on one rank. Empty for PREPARE and READ_BACK."""

    written: WrittenFile | None = None
    """The file that this rank wrote in WRITE. None if the rank owns no shard."""
    published: Published | None = None
    """The checkpoint that is safe after FINISH_EARLIER or PUBLISH. Only on rank 0."""
    warning: str | None = None
    """What made WRITE slower on this rank than it should be."""

    def summarise(self) -> "StageResult":
        """Return the result with a summary of the file. See `WrittenFile.summarise`."""
        if self.written is None:
            return self
        return StageResult(self.written.summarise(), self.published, self.warning)


@dataclass(frozen=True)
class StageOutcome:
    """How a stage ended on one rank. The ranks exchange it, and all of them decide by it."""

    result: StageResult
    """Empty after a failure."""
    failure: str | None = None
    """A failure after which the save may be tried again, with the rank and its host."""
    fatal: str | None = None
    """A failure that ends the run."""


class SaveStages:
    """The work of this rank in each stage."""

    def __init__(self, root: Path, ranks: Ranks, publisher: Publisher, store: Store) -> None:
        """Create the stages of a run's saves.

        Args:
            root: Folder of the run's checkpoints.
            ranks: The ranks that save together.
            publisher: The publisher of `root`. Only rank 0 uses it.
            store: Where files go when they are written.
        """
        self._store = store
        self._root = root
        self._rank = ranks.rank
        self._size = ranks.size
        self._publisher = publisher
        self._buffer = HostBuffer()
        """The copies of this rank's shards, kept from save to save."""

    def run(self, stage: SaveStage, save: SaveInProgress) -> StageResult:
        """Do this rank's part of a stage.

        Raises:
            OSError: A file cannot be written. The save can be tried again.
            DamagedError: The disk holds other bytes than were written. It can be tried again.
            CheckpointError: Another run took the folder over.
        """
        match stage:
            case SaveStage.FINISH_EARLIER:
                return StageResult(published=self._finish_earlier())
            case SaveStage.PREPARE:
                self._prepare(save)
            case SaveStage.WRITE:
                written = self._write(save)
                return StageResult(written=written, warning=self._describe_slow_copy())
            case SaveStage.READ_BACK:
                self._read_back(save)
            case SaveStage.PUBLISH:
                return StageResult(published=self._publish(save))
        return StageResult()

    def _finish_earlier(self) -> Published | None:
        """Publish what an earlier attempt left. Return None if none left a checkpoint."""
        if self._rank != 0:
            return None
        return self._publisher.publish_earlier()

    def _prepare(self, save: SaveInProgress) -> None:
        """Check lease and free space, and make the empty folder of a save."""
        if self._rank != 0:
            return
        self._publisher.confirm_lease()
        staging = self._store.choose_staging(self._root)
        needed = self._store.count_staged(save.total_bytes)
        free = free_bytes(staging)
        if free < needed + SMALL_FILES:
            raise OSError(
                f"the checkpoint needs {format_bytes(needed)}, and {staging} has "
                f"{format_bytes(free)} free; make room"
            )
        remove(save.folder)
        # The parents are not created. If the file system was unmounted, this would write the
        # checkpoint onto the local disk under the mount point.
        save.folder.mkdir()

    def _write(self, save: SaveInProgress) -> WrittenFile | None:
        """Write the shards of this rank to its file. Return None if it owns none."""
        try:
            # First, because all ranks must call it, also one that has no memory for the copies.
            folder = self._store.stage(save.folder)
            tensors = {key: shard.tensor for key, shard in save.shards.items()}
            if save.copy_first:
                tensors = copy_to_host(tensors, self._buffer, save.ready)
                save.copied.set()
            if not save.shards:
                return None
            written = write_shard_file(folder, self._rank, save.shards, tensors)
            # The file is complete, so the tensors may change during an upload.
            save.copied.set()
            self._store.upload(folder, written.file, written.digest.xxh128)
            return written
        except OSError:
            # The next attempt needs the space.
            self._store.discard_staged()
            raise
        finally:
            # Also after a failure. Otherwise `wait_for_copy` would block the training loop forever.
            save.copied.set()

    def _describe_slow_copy(self) -> str | None:
        """Return a warning if this rank's copies to the host make it wait for the GPU."""
        if self._buffer.refusal is None:
            return None
        return (
            f"rank {self._rank} on {os.uname().nodename} copies its part of a checkpoint to memory "
            f"that is not pinned, because CUDA does not pin it ({self._buffer.refusal}). Copies "
            "are slower, and the checkpoint is the same"
        )

    def _read_back(self, save: SaveInProgress) -> None:
        """Read the next rank's file back from the disk and compare it with its digest.

        The next rank is often on the same host, so `verify_file` drops the page cache first.
        """
        # The stride distributes the files evenly if there are fewer files than ranks.
        for written in save.files[(self._rank + 1) % self._size :: self._size]:
            digest = written.digest
            self._store.verify(save.folder, written.file, digest.bytes, digest.xxh128)

    def _publish(self, save: SaveInProgress) -> Published | None:
        """Write the small files, rename the folder, move the pointers, and clean up."""
        if self._rank != 0:
            return None
        # The new checkpoint replaces an earlier one of the same iteration, so that entry is left
        # out.
        before = tuple(
            entry for entry in save.lineage if entry.iteration != save.contents.iteration
        )
        manifest = write_small_files(save.folder, save.contents, save.files, before, keep=save.keep)
        # Read back before the pointers move, because older checkpoints are removed after that.
        read_small_files_back(save.folder, manifest)
        self._store.complete(save.folder, manifest)
        self._publisher.confirm_lease()
        return self._publisher.publish(manifest, save.folder)


def read_small_files_back(folder: Path, manifest: Manifest) -> None:
    """Read index, configuration and manifest back from the disk and compare them.

    Raises:
        DamagedError: If one differs or is missing.
        OSError: If one cannot be read.
    """
    for name in (INDEX, CONFIG):
        verify_file(folder, name, manifest.files[name]["bytes"], manifest.files[name]["xxh128"])
    text = manifest.dump_json()
    verify_file(folder, MANIFEST, len(text.encode()), digest_of_text(text))


def free_bytes(root: Path) -> int:
    """Return the free bytes of the file system that this user may still write."""
    # `f_bavail` leaves out the blocks reserved for root, which `f_bfree` would count.
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize
