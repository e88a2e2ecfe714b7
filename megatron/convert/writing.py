"""Writer of imported checkpoints, tensor by tensor.

Invariant: the folder gets its name after everything in it was written. A kill before that leaves a
folder whose name ends in `.unfinished`.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.contents import CheckpointContents, write_small_files
from megatron.checkpoint.folder import UNFINISHED, point_to, put_in_place, step_folder
from megatron.checkpoint.shard_file import WrittenFile, select_own_shards, write_shard_file
from megatron.durable import sync_folder
from megatron.errors import CheckpointError, ConfigError
from megatron.parallel.shard import ADAM_KINDS, Kind, TensorShard

FILE_BYTES = 5 * 10**8
"""Largest size of a tensor file, unless one tensor is larger."""
_PART_NUMBERS = 1 << 20
_ITEM = 4
"""Bytes of an fp32 number."""


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of the checkpoint, which is read when its file is written."""

    kind: Kind
    name: str
    """The parameter's name in the complete model."""
    shape: tuple[int, ...]
    source: str
    """Where it comes from, for messages."""
    read: Callable[[], Tensor]
    """Returns the tensor, in any dtype."""


def check_is_new(out: Path) -> None:
    """Check that the folder to write does not exist.

    Raises:
        ConfigError: it does.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; give another folder, or remove it")


def choose_states(
    steps: int | None, say: Callable[[str], None]
) -> tuple[tuple[Kind, ...], dict[str, Any] | None]:
    """Return the kinds of tensors of an imported run, and the scalars of its optimizer.

    Args:
        steps: Steps of the optimizer's states. None if only the weights are imported.
        say: Receives a line if only the weights are imported.
    """
    if steps is None:
        say(
            "the optimizer's states are not imported; continue with --no-load-optim, or start a "
            "new run from the weights with --finetune"
        )
        return ("weight",), None
    return ("weight", *ADAM_KINDS), {"optimizer_step": steps}


def write_checkpoint(
    out: Path,
    tensors: Sequence[TensorToWrite],
    contents: CheckpointContents,
    write_others: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a checkpoint in the new folder `out`. Few tensors are in memory at a time.

    Args:
        out: The folder. It must not exist.
        tensors: The tensors of the checkpoint.
        contents: Its other contents.
        write_others: Writes further files into the folder that it is given. The folder is renamed
            to `out` afterwards.

    Raises:
        ConfigError: `out` exists.
        CheckpointError: a tensor has a wrong shape, or a number that is not finite.
        OSError: a file cannot be written.
    """
    check_is_new(out)
    root = out.with_name(out.name + UNFINISHED)
    # An import that was killed has left it.
    shutil.rmtree(root, ignore_errors=True)
    final = step_folder(root, contents.iteration)
    unfinished = final.with_name(final.name + UNFINISHED)
    unfinished.mkdir(parents=True)
    try:
        files = [
            _write_file(unfinished, number, part) for number, part in enumerate(_divide(tensors))
        ]
        write_small_files(unfinished, contents, files, (), keep=False)
        put_in_place(unfinished, final)
        point_to(root, contents.iteration)
        write_others(root)
        os.rename(root, out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _divide(tensors: Iterable[TensorToWrite]) -> Iterator[list[TensorToWrite]]:
    """Yield the tensors in parts of limited size."""
    part: list[TensorToWrite] = []
    used = 0
    for tensor in tensors:
        size = _ITEM * torch.Size(tensor.shape).numel()
        if part and used + size > FILE_BYTES:
            yield part
            part = []
            used = 0
        part.append(tensor)
        used += size
    yield part


def _write_file(folder: Path, number: int, tensors: Sequence[TensorToWrite]) -> WrittenFile:
    shards = []
    for each in tensors:
        tensor = each.read().float()
        if tuple(tensor.shape) != each.shape:
            raise CheckpointError(
                f"{each.source} has the shape {tuple(tensor.shape)}, and {each.name} must have "
                f"{each.shape}"
            )
        # In parts, because the test of a whole tensor needs twice its memory.
        parts = tensor.reshape(-1).split(_PART_NUMBERS)
        if not all(torch.isfinite(part).all() for part in parts):
            raise CheckpointError(f"{each.source} has numbers that are not finite")
        zeros = (0,) * tensor.dim()
        shards.append(
            TensorShard(each.kind, each.name, each.shape, zeros, tensor.contiguous(), owner=True)
        )
    own = select_own_shards(shards)
    return write_shard_file(folder, number, own, {key: each.tensor for key, each in own.items()})
