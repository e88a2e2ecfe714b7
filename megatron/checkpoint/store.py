"""Where the checkpoints of a run are kept besides the run's folder.

`Store` keeps them nowhere else, so the folder is all. An extra derives from it for stores of
objects: the folder then holds the small files, and tensor files only while they are written.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.base.plain_text import format_bytes
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import Manifest, verify_file
from megatron.parallel.shard import TensorShard

SMALL_FILES = 1 << 20
"""Bytes that must be free in addition to the tensors, for index, manifest and metadata."""


class Store:
    """The folder alone. All ranks have one."""

    def open(self) -> None:
        """Make the folders show what is stored. All ranks call it, before the run looks for them.

        Raises:
            CheckpointError: On every rank. The store cannot be used.
        """

    def acquire(self, root: Path, log: Callable[[str], None]) -> Lease:
        """Become the writer of the run's checkpoints, on rank 0. See `Lease.acquire`."""
        return Lease.acquire(root, log)

    def meet(self) -> None:
        """Share what rank 0 has acquired. All ranks call it."""

    def describe_room(self, root: Path, size: int) -> str:
        """Return how many checkpoints of `size` bytes fit, for the table at start."""
        free = free_bytes(root)
        room = int(free // (size + SMALL_FILES))
        shortage = "" if room > 0 else "; THERE IS NO ROOM: saves will fail"
        return f"{format_bytes(free)} free, enough for {room}{shortage}"

    def check_room(self, root: Path, size: int) -> None:
        """Check on rank 0 that a checkpoint of `size` bytes can be written.

        Raises:
            OSError: It cannot.
        """
        free = free_bytes(root)
        if free < size + SMALL_FILES:
            raise OSError(
                f"the checkpoint needs {format_bytes(size)}, and {root} has "
                f"{format_bytes(free)} free; make room"
            )

    def stage(self, folder: Path) -> Path:
        """Return the folder for this rank's tensor file of a save. Call it once in each save.

        Args:
            folder: The folder of the save, with the suffix `.unfinished`.
        """
        return folder

    def upload(self, staged: Path, name: str) -> None:
        """Store the tensor file of this rank, which is complete.

        Raises:
            OSError: It cannot be stored.
        """

    def complete(self, folder: Path, manifest: Manifest) -> None:
        """Store the small files on rank 0, after all tensor files.

        Raises:
            OSError: One cannot be stored.
        """

    def verify(self, folder: Path, name: str, size: int, xxh128: str) -> None:
        """Read a stored file back and compare it with its digest. See `verify_file`."""
        verify_file(folder, name, size, xxh128)

    def publish(self) -> None:
        """Make visible what the pointers in the folder name, on rank 0.

        Raises:
            OSError: It is not visible.
            CheckpointError: Another run has become the writer.
        """

    def has_published(self, iteration: int) -> bool:
        """Return whether the store names the checkpoint of an iteration as the newest one."""
        return True

    def clean_up(self, removed: Sequence[int]) -> list[str]:
        """Remove checkpoints that were removed from the folder. Return warnings.

        Args:
            removed: Their iterations.
        """
        return []

    @contextlib.contextmanager
    def fetch(self, checkpoint: Checkpoint, shards: Sequence[TensorShard]) -> Iterator[Checkpoint]:
        """Return a checkpoint in whose folder the bytes of these shards are. All ranks call it.

        Raises:
            DamagedError: A stored file is missing or altered.
            CheckpointError: One cannot be read.
        """
        yield checkpoint


def free_bytes(root: Path) -> int:
    """Return the free bytes of the file system that this user may still write."""
    # `f_bavail` leaves out the blocks reserved for root, which `f_bfree` would count.
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize
