"""Find numbers that are not finite, before they are stored and after they were loaded.

Invariant: no checkpoint is written with NaN or an infinity in it, and no run starts from one. Such
a state cannot be trained: each step from it is dropped. A checkpoint of it would push good ones out
of --keep-latest-checkpoints.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.ranks import Ranks
from megatron.errors import CheckpointError
from megatron.parallel.shard import TensorShard

_PIECE = 1 << 22
"""Elements that are counted at a time: counting needs some bytes for each, and a device may be
almost full."""
_SHOWN = 8
"""Tensors that a message names."""


def describe_not_finite(chunks: Sequence[TensorShard]) -> list[str]:
    """Return a line for each tensor that holds NaN or an infinity; no line if all numbers are
    finite.

    Reads each tensor once. A sum is finite unless an element is not finite or the sum overflows.
    Elements are counted only where the sum is not finite. All sums are queued on the device before
    the first one is read.
    """
    sums = [chunk.tensor.detach().sum() for chunk in chunks]
    suspects = [
        chunk for chunk, total in zip(chunks, sums, strict=True) if not math.isfinite(float(total))
    ]
    lines = []
    for chunk in suspects:
        nan, inf = count_not_finite(chunk.tensor)
        if nan or inf:
            lines.append(
                f"{chunk.name} ({chunk.kind}): {counts_text(nan, inf)} of "
                f"{chunk.tensor.numel():,} numbers"
            )
    return lines


def gather_not_finite(mine: Sequence[str], ranks: Ranks) -> list[str]:
    """Return the lines of all ranks, each with its rank and host, on every rank. Long lists are cut
    off."""
    here = f"rank {ranks.rank} on {os.uname().nodename}"
    everyone = ranks.gather([f"{here}: {line}" for line in mine[: _SHOWN + 1]])
    found = [line for lines in everyone for line in lines]
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], "and more"]


def refuse_not_finite(checkpoint: Checkpoint, mine: Sequence[str], ranks: Ranks) -> None:
    """Refuse a checkpoint that was loaded, where it holds numbers that are not finite.

    It is not set aside as a damaged one: it is what was written, by a version that did not look.
    Which older checkpoint to take, and which data to skip from there, is the operator's decision.

    Args:
        mine: Lines of `describe_not_finite` for what this rank has loaded.

    Raises:
        CheckpointError: on every rank.
    """
    records = {"optimizer": checkpoint.optimizer, "state": checkpoint.state}
    scalars = [
        f"{key} is {value}"
        for name, record in records.items()
        for key, value in values_not_finite(record, name)
    ]
    found = gather_not_finite([*mine, *(scalars if ranks.rank == 0 else ())], ranks)
    if found:
        raise CheckpointError(
            f"{checkpoint.folder} holds numbers that are not finite; each step from it would be "
            "dropped:\n  " + "\n  ".join(found) + "\ngo back to an older one: python "
            f"tools/rollback.py {checkpoint.folder.parent} --to ITERATION; "
            "tools/inspect_checkpoint.py --verify says whether that one is finite. If only exp_avg "
            "and exp_avg_sq are not, --no-load-optim goes on with fresh moments"
        )


def count_not_finite(tensor: Tensor) -> tuple[int, int]:
    """Return how many elements are NaN and how many are infinite."""
    nan = 0
    inf = 0
    for piece in tensor.detach().reshape(-1).split(_PIECE):
        nan += int(torch.isnan(piece).sum())
        inf += int(torch.isinf(piece).sum())
    return nan, inf


def counts_text(nan: int, inf: int) -> str:
    """Return "3 NaN and 1 infinite"."""
    return " and ".join(
        f"{count:,} {what}" for count, what in ((nan, "NaN"), (inf, "infinite")) if count
    )


def values_not_finite(record: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield (dotted name, value) of each number in nested JSON that is not finite."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            yield from values_not_finite(value, f"{name}.{key}")
    elif isinstance(record, Sequence) and not isinstance(record, str):
        for index, value in enumerate(record):
            yield from values_not_finite(value, f"{name}[{index}]")
    elif isinstance(record, float) and not math.isfinite(record):
        yield name, record
