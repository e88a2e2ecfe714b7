"""Where the checkpoints of a run are kept besides the run's folder.

`Store` keeps them nowhere else, so the folder is all. An extra derives from it for stores of
objects: the folder then holds the small files, and tensor files only while they are written.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.checkpoint.lease import Lease
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import Manifest, verify_file
from megatron.parallel.shard import TensorShard


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

    def choose_staging(self, root: Path) -> Path:
        """Return the folder that needs room for a checkpoint."""
        return root

    def count_staged(self, size: int) -> int:
        """Return how many of the `size` bytes of a checkpoint need room there, on this host."""
        return size

    def stage(self, folder: Path) -> Path:
        """Return the folder for this rank's tensor file of a save. Call it once in each save.

        Args:
            folder: The folder of the save, with the suffix `.unfinished`.
        """
        return folder

    def discard_staged(self) -> None:
        """Remove what this rank has put into its folder of a save that failed."""

    def upload(self, staged: Path, name: str, xxh128: str) -> None:
        """Store the tensor file of this rank, which is complete and has this digest.

        Raises:
            OSError: It cannot be stored, or it has changed since it was written.
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

    def publish_rollback(self) -> None:
        """Make visible at once what a rollback has recorded or changed. All ranks call it.

        Raises:
            CheckpointError: Another run has become the writer.
        """

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


NO_STORE = Store()
