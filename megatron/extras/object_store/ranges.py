"""Downloads the blocks of a checkpoint's files that hold the needed parts of tensors.

They go into files that have no content elsewhere. The loader reads them from there, and compares
each block with its digest. `name_damage` then names the object. A copy is only a cache. What is
damaged there is downloaded again. An error names an object only if the object itself is damaged.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, DamagedError
from megatron.checkpoint.digest import BLOCK, Digester
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import INDEX, TensorIndex, collect_digests, read_index
from megatron.checkpoint.tensor_file import TensorReader, TensorSlice
from megatron.config.model import ModelConfig
from megatron.extras.object_store.objects import PART, ObjectFolder, raise_as_checkpoint_error
from megatron.parallel.shard import TensorShard

Blocks = dict[str, set[int]]
"""File -> the numbers of its blocks."""
Needed = tuple[str, TensorSlice]
"""Kind and name of a tensor, and a slice of it."""


class _BlockCollector(TensorReader):
    """Collects the blocks that a reader would read."""

    def __init__(self) -> None:
        super().__init__(Path(), {})
        self.blocks: Blocks = {}

    def _read_run(self, target: Tensor, dtype: torch.dtype, file: str, begin: int) -> None:
        # As in `TensorReader._read_run`, which reads what is collected here.
        end = begin + dtype.itemsize * target.numel()
        self.blocks.setdefault(file, set()).update(range(begin // BLOCK, -(-end // BLOCK)))


@dataclass(frozen=True)
class FetchedCheckpoint(Checkpoint):
    """A checkpoint whose blocks are downloaded to its folder when they are loaded."""

    objects: ObjectFolder

    @classmethod
    def of(cls, checkpoint: Checkpoint, objects: ObjectFolder, folder: Path) -> "FetchedCheckpoint":
        """Return a checkpoint that downloads from these objects to a folder."""
        return cls(folder, checkpoint.manifest, checkpoint.config_yaml, objects)

    def load_into(
        self,
        shards: Sequence[TensorShard],
        model: ModelConfig | None = None,
        *,
        finetune: bool = False,
    ) -> int:
        """Download the blocks that these shards need, and load them. See `Checkpoint`.

        If only the copy is damaged, it is downloaded once more.

        Raises:
            DamagedError: An object is missing or altered.
            CheckpointError: See `Checkpoint.load_into`, or the copy is damaged again.
        """
        for is_last in (False, True):
            try:
                with raise_as_checkpoint_error(), name_damage(self.objects):
                    index = fetch_index(self.objects, self, self.folder)
                    needed = list_slices(index, shards)
                    fetch_blocks(self.objects, self, index, needed, self.folder)
                    return super().load_into(shards, model, finetune=finetune)
            except DamagedError as damage:
                if self._is_stored_damage(damage):
                    raise
                if is_last:
                    raise CheckpointError(
                        f"{self.folder / damage.file} has other bytes than the intact object "
                        f"{self.objects.name(damage.file)}, also after a second download; check "
                        "the disk and the memory of this host, or choose another folder "
                        "(--save-staging in a run, TMPDIR for a tool)"
                    ) from damage
        raise AssertionError("the second pass returns or raises")

    def _is_stored_damage(self, damage: DamagedError) -> bool:
        """Return whether the object is damaged, and not only its copy on this host."""
        facts = self.manifest.files.get(damage.file)
        if facts is None:
            return True
        try:
            verify_object(self.objects, damage.file, facts["bytes"], facts["xxh128"])
        except DamagedError:
            return True
        return False


@contextlib.contextmanager
def name_damage(objects: ObjectFolder) -> Iterator[None]:
    """Add the address to the damage that a loader finds in a copy of objects."""
    try:
        yield
    except DamagedError as damage:
        text = str(damage)
        if objects.address not in text:
            text = f"{objects.address}/{text}"
        raise DamagedError(text, damage.file) from damage


def find_blocks(index: TensorIndex, needed: Iterable[Needed]) -> Blocks:
    """Return the blocks that hold slices of tensors.

    Args:
        index: The index of the checkpoint.
        needed: The slices.
    """
    collector = _BlockCollector()
    for name, part in needed:
        # The loader reports a tensor that is missing or has another shape.
        if name not in index.tensors:
            continue
        # A tensor on the meta device has shape and strides, which is all that `read_into` needs.
        target = torch.empty(part[1], device="meta")
        collector.read_into(target, part, index.tensors[name], name)
    return collector.blocks


def list_slices(index: TensorIndex, shards: Iterable[TensorShard]) -> Iterator[Needed]:
    """Yield what a rank reads for its shards: the tensor and the slice of it."""
    for shard in shards:
        name = f"{shard.kind}/{shard.name}"
        stored = index.tensors.get(name)
        if stored is None:
            continue
        shape = tuple(stored["shape"])
        if shape == shard.global_shape:
            yield name, (shard.offset, tuple(shard.tensor.shape))
        elif shape[1:] == shard.global_shape[1:]:
            # Missing rows are filled with the mean of all rows, so all rows are needed.
            yield name, ((0,) * len(shape), shape)


def fetch_index(objects: ObjectFolder, checkpoint: Checkpoint, folder: Path) -> TensorIndex:
    """Download the index of a checkpoint to a folder, and return it.

    Raises:
        DamagedError: It is missing or altered.
        CheckpointError: It cannot be read.
    """
    body = _read(objects, INDEX)
    (folder / INDEX).write_bytes(body)
    return read_index(folder, checkpoint.manifest)


def fetch_blocks(
    objects: ObjectFolder,
    checkpoint: Checkpoint,
    index: TensorIndex,
    needed: Iterable[Needed],
    folder: Path,
) -> None:
    """Download the blocks that hold slices of tensors to files of a folder, at the same time.

    Args:
        objects: The objects of the checkpoint.
        checkpoint: The checkpoint.
        index: Its index.
        needed: The slices.
        folder: The folder. Files that exist there are only extended.

    Raises:
        DamagedError: An object is missing. The message names it.
        CheckpointError: One cannot be read, or the folder has no room.
    """
    blocks = find_blocks(index, needed)
    digests = collect_digests(checkpoint.manifest, index)
    opened: dict[str, int] = {}

    def fetch(run: tuple[str, int, int]) -> None:
        file, first, last = run
        begin = first * BLOCK
        # Bytes that an object does not have stay zero, and the loader finds them.
        body = memoryview(_read(objects, file, begin, last * BLOCK + BLOCK))
        while body:
            # A write may take a part only, for example when the disk becomes full.
            written = os.pwrite(opened[file], body, begin)
            body, begin = body[written:], begin + written

    try:
        for file in blocks:
            opened[file] = os.open(folder / file, os.O_WRONLY | os.O_CREAT, 0o666)
            # Each block is then at its place, and blocks that are not needed take no space.
            os.ftruncate(opened[file], digests[file].bytes)
        for _ in objects.run_parallel(fetch, _find_runs(blocks)):
            pass
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error}; free space there, or choose another folder "
            "(--save-staging in a run, TMPDIR for a tool)"
        ) from error
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def verify_object(objects: ObjectFolder, name: str, size: int, xxh128: str) -> None:
    """Read an object completely, and compare it with its digest.

    Raises:
        DamagedError: It is missing or altered.
        CheckpointError: It cannot be read.
    """
    digester = Digester()
    begins = range(0, size, PART)
    for body in objects.run_parallel(lambda x: _read(objects, name, x, x + PART), begins):
        digester.update(body)
    # The parts end at `size`, so the listing shows whether more bytes follow.
    found = digester.digest()
    if (found.bytes, found.xxh128) != (size, xxh128) or objects.list(name).get(name) != size:
        raise DamagedError(f"{objects.name(name)} is not what was written", name)


def _find_runs(blocks: Mapping[str, set[int]]) -> Iterator[tuple[str, int, int]]:
    """Yield (file, first block, last block) of neighbouring blocks, of at most PART bytes."""
    for file, numbers in blocks.items():
        # Neighbouring blocks share a request, because each request has a delay.
        run: list[int] = []
        for number in sorted(numbers):
            if run and (number != run[-1] + 1 or len(run) == PART // BLOCK):
                yield file, run[0], run[-1]
                run = []
            run.append(number)
        if run:
            yield file, run[0], run[-1]


def _read(objects: ObjectFolder, name: str, *span: Any) -> bytes:
    """Read an object or a range of it.

    Raises:
        DamagedError: It does not exist.
        CheckpointError: It cannot be read.
    """
    try:
        return objects.read(name, *span)
    except FileNotFoundError as missing:
        raise DamagedError(
            f"{missing}. Restore the object from a version or a copy, or load an older checkpoint",
            name,
        ) from missing
    except OSError as error:
        raise CheckpointError(str(error)) from error
