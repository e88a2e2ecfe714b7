"""The stages of a save: what each one does on one rank, what it needs, and what it returns.

A stage runs in a thread. It must not use a collective, because the main thread uses the same group
meanwhile. `save.py` starts the stages, and agrees with the other ranks on how each one ended.

The shards of a rank go from `SaveInProgress.shards` through the stage WRITE into the file of this
rank, see `shard_file.py`. Its description, `WrittenFile`, goes to rank 0, and a summary of it to
all ranks. It is in `SaveInProgress.files` from then on.
"""

import os
import threading
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from megatron.base.plain_text import format_bytes
from megatron.checkpoint.contents import CheckpointContents, write_small_files
from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.folder import remove
from megatron.checkpoint.lineage import Lineage
from megatron.checkpoint.manifest import CONFIG, INDEX, MANIFEST, Manifest, verify_file
from megatron.checkpoint.publish import Published, Publisher
from megatron.checkpoint.shard_file import (
    HostBuffer,
    ShardsByKey,
    WrittenFile,
    copy_to_host,
    write_shard_file,
)
from megatron.checkpoint.store import Store
from megatron.parallel.ranks import Ranks, Work

SMALL_FILES = 1 << 20
"""Bytes that must be free in addition to the tensors, for index, manifest and metadata."""


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
