"""Folders that are written completely or not at all, and the writer of imported checkpoints.

Invariant: the folder gets its name after everything in it was written. A kill before that leaves a
folder whose name ends in `.unfinished`.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.durable import sync_folder
from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.file_lock import LockResult, try_lock
from megatron.checkpoint.contents import CheckpointContents, write_small_files
from megatron.checkpoint.folder import UNFINISHED, point_to, put_in_place, step_folder
from megatron.checkpoint.shard_file import WrittenFile, select_own_shards, write_shard_file
from megatron.extras.interop.convert.tensors import divide_by_size
from megatron.parallel.shard import ADAM_KINDS, Kind, TensorShard

FILE_BYTES = 5 * 10**8
"""Largest size of a tensor file, unless one tensor is larger."""
_PART_NUMBERS = 1 << 20
_ITEM = 4
"""Bytes of an fp32 number."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights. Others need a scale, or are no weights."""


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
    # A link to nothing exists as well.
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; give another folder, or remove it")


def choose_states(
    steps: int | None, log: Callable[[str], None]
) -> tuple[tuple[Kind, ...], dict[str, Any] | None]:
    """Return the kinds of tensors of an imported run, and the scalars of its optimizer.

    Args:
        steps: Steps of the optimizer's states. None if only the weights are imported.
        log: Receives a line if only the weights are imported.
    """
    if steps is None:
        log(
            "the optimizer's states are not imported; continue with --no-load-optim, or start a "
            "new run from the weights with --finetune"
        )
        return ("weight",), None
    return ("weight", *ADAM_KINDS), {"optimizer_step": steps}


@contextmanager
def write_folder(out: Path) -> Iterator[Path]:
    """Return a context with an empty folder, which gets the name `out` if the context succeeds.

    What a killed process has left of the folder is removed. After an error, nothing is left.

    Raises:
        ConfigError: `out` exists, or another process writes it.
        OSError: a file or folder cannot be written.
    """
    check_is_new(out)
    unfinished = out.with_name(out.name + UNFINISHED)
    descriptor = _open_locked(unfinished)
    try:
        # The process that held the lock before may have finished the folder.
        check_is_new(out)
        _remove_contents(unfinished)
        yield unfinished
        os.rename(unfinished, out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _open_locked(folder: Path) -> int:
    """Create a folder if it does not exist, and return its descriptor, with a lock.

    Raises:
        ConfigError: another process has the lock.
        OSError: it is not a folder, or it cannot be created.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        # Its contents are removed, so it must not be a link to another folder.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            result = try_lock(descriptor, folder)
        except OSError:
            # Some file systems have no locks.
            return descriptor
        if result == LockResult.HELD:
            return descriptor
        os.close(descriptor)
        if result == LockResult.TAKEN:
            raise ConfigError(
                f"another process is writing {folder}; wait until it has ended, or give another "
                "folder"
            )


def _remove_contents(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


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
        ConfigError: `out` exists, or another process writes it.
        CheckpointError: a tensor has a wrong shape or dtype, or a number that is not finite.
        OSError: a file or folder cannot be written.
    """
    with write_folder(out) as root:
        final = step_folder(root, contents.iteration)
        unfinished = final.with_name(final.name + UNFINISHED)
        unfinished.mkdir()
        sizes = ((each, _ITEM * torch.Size(each.shape).numel()) for each in tensors)
        parts = divide_by_size(sizes, FILE_BYTES)
        files = [_write_file(unfinished, number, part) for number, part in enumerate(parts)]
        write_small_files(unfinished, contents, files, (), keep=False)
        put_in_place(unfinished, final)
        point_to(root, contents.iteration)
        write_others(root)


def _write_file(folder: Path, number: int, tensors: Sequence[TensorToWrite]) -> WrittenFile:
    shards = []
    for each in tensors:
        tensor = each.read()
        if tensor.dtype not in _DTYPES:
            allowed = ", ".join(map(str, _DTYPES))
            raise CheckpointError(f"{each.source} is {tensor.dtype}, and must be one of {allowed}")
        tensor = tensor.float()
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
