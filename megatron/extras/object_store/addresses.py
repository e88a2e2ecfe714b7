"""Addresses in the commands that take a run's folder: they work on a temporary mirror.

A mirror has the small files. Tensors are downloaded when a command needs them: the blocks that a
rank loads, all weights for a conversion, or complete files for a verification.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.base.errors import CheckpointError, MegatronError
from megatron.base.outside_file import POINTER_BYTES, load_text
from megatron.base.plain_text import print_to_stderr
from megatron.checkpoint.folder import parse_iteration
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import INDEX, is_plain_name
from megatron.extras.object_store.mirror import MARKER, Mirror
from megatron.extras.object_store.objects import (
    PART,
    ObjectFolder,
    find_address,
    raise_as_checkpoint_error,
)
from megatron.extras.object_store.ranges import FetchedCheckpoint, fetch_blocks, fetch_index
from megatron.extras.object_store.writer import RootObject, StoreLease


@dataclass(frozen=True)
class CheckpointSource:
    """A folder that a command reads: the given one, or the mirror of an address."""

    folder: Path
    """Folder of a run or of a checkpoint."""
    root: Path
    """Folder of the run, or `folder` if it is not known."""
    _address: str | None = None
    """Address of the run that it mirrors. None if it is no mirror."""

    @property
    def is_mirror(self) -> bool:
        """Whether it mirrors an address."""
        return self._address is not None

    def show(self, text: str) -> str:
        """Return a text that names the address of the run, and not its mirror."""
        if self._address is None:
            return text
        return text.replace(str(self.root), self._address)

    def open(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint that downloads what its `load_into` needs.

        Raises:
            DamagedError: Its index is missing or altered.
        """
        if not self.is_mirror:
            return checkpoint
        objects = _find_objects(checkpoint.folder)
        fetch_index(objects, checkpoint, checkpoint.folder)
        return FetchedCheckpoint.of(checkpoint, objects, checkpoint.folder)

    def fetch_weights(self, checkpoint: Checkpoint) -> None:
        """Download all weights of a checkpoint, without the states of the optimizer.

        Raises:
            DamagedError: A stored file is missing or altered.
            CheckpointError: One cannot be read.
        """
        if not self.is_mirror:
            return
        objects = _find_objects(checkpoint.folder)
        index = fetch_index(objects, checkpoint, checkpoint.folder)
        slices = [
            (name, ((0,) * len(tensor["shape"]), tuple(tensor["shape"])))
            for name, tensor in index.tensors.items()
            if name.startswith("weight/")
        ]
        fetch_blocks(objects, checkpoint, index, slices, checkpoint.folder)

    def fetch_files(self, folder: Path, *, complete: bool) -> None:
        """Download the index of a checkpoint, or with `complete` all of its files, unchecked.

        Raises:
            CheckpointError: One cannot be read, or the temporary folder has no room.
        """
        if not self.is_mirror:
            return
        objects = _find_objects(folder)
        with raise_as_checkpoint_error():
            for name, size in objects.list().items():
                # Somebody may have copied other files there, also a marker.
                is_other = not is_plain_name(name) or name == MARKER
                if name == INDEX or (complete and not is_other):
                    download_object(objects, name, size, folder / name)


@contextlib.contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[CheckpointSource]:
    """Open a folder, or download the small files of an address to a temporary folder.

    The temporary folder is removed at the end.

    Args:
        path: A folder, or an address of a run or of one of its checkpoints.

    Raises:
        ConfigError: The address has a mistake.
        CheckpointError: The store cannot be read, or has no such run.
    """
    address = find_address(path)
    if address is None:
        yield CheckpointSource(Path(path), Path(path))
        return
    run, _, last = address.rpartition("/")
    is_checkpoint = parse_iteration(last) is not None
    if not is_checkpoint:
        run = address
    with tempfile.TemporaryDirectory(prefix="megatron-mirror-") as temporary:
        root = Path(temporary, "run")
        objects = ObjectFolder(run)
        with raise_as_checkpoint_error():
            record = RootObject(objects).read()
            # A misspelt address is an empty run, because stores have no folders.
            if record.latest is None and not record.folders:
                raise CheckpointError(
                    f"{run} has no checkpoint; give the --save address of a run that has saved"
                )
            Mirror(objects, root).pull(record, print_to_stderr)
        source = CheckpointSource(root / last if is_checkpoint else root, root, run)
        try:
            yield source
        except MegatronError as error:
            # Users do not know the temporary folder.
            error.args = (source.show(str(error)),)
            raise


@contextlib.contextmanager
def open_for_change(
    address: str, log: Callable[[str], None], *, dry_run: bool
) -> Iterator[tuple[Path, Lease | None]]:
    """Return a mirror of a run with its records, and publish its changes if nothing has failed.

    With `dry_run`, no lease is taken and nothing is published.

    Raises:
        ConfigError, CheckpointError: See `open_source`, or a run writes there.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-mirror-") as temporary:
        objects = ObjectFolder(address)
        mirror = Mirror(objects, Path(temporary), with_indices=True)
        root = RootObject(objects)
        lease: StoreLease | None = None
        with contextlib.ExitStack() as closing, raise_as_checkpoint_error():
            record = root.read()
            if not dry_run:
                lease = StoreLease.acquire_both(mirror.root, objects, record.generation, log)
                closing.callback(lease.release)
                record = root.seize(lease.generation)
            mirror.pull(record, log)
            mirror.pull_records(record.generation, record.generation, log)
            yield mirror.root, lease
            if lease is not None:
                # The rollback may have taken longer than the lease lives without a renewal.
                lease.confirm()
                root.publish(mirror.collect(root.record))
                mirror.push_records(exact=True)


def download_object(objects: ObjectFolder, name: str, size: int, path: Path) -> None:
    """Download a complete object to a file, without checking it.

    Raises:
        OSError: It cannot be read or written.
    """
    with open(path, "wb") as file:
        begins = range(0, size, PART)
        for body in objects.run_parallel(lambda x: objects.read(name, x, x + PART), begins):
            file.write(body)


def _find_objects(folder: Path) -> ObjectFolder:
    """Return the objects of a checkpoint in a mirror."""
    return ObjectFolder(load_text(folder / MARKER, POINTER_BYTES).strip())
