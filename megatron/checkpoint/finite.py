"""Search for numbers that are not finite, before they are stored and after they were loaded.

Invariant: no checkpoint with NaN or an infinity is written, and no run starts from one. Such a
state cannot be trained, because each step from it is dropped. Its checkpoints would push valid ones
out of --keep-latest-checkpoints.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError
from megatron.checkpoint.load import Checkpoint
from megatron.parallel.ranks import Ranks
from megatron.parallel.shard import TensorShard

_PIECE = 1 << 22
"""Elements that are counted at a time.

Counting needs some bytes for each element, and the device's memory may be almost full.
"""
_SHOWN = 8
"""Number of tensors that a message names."""


def describe_not_finite(shards: Sequence[TensorShard]) -> list[str]:
    """Return a line for each tensor that holds NaN or an infinity.

    Each tensor is read once. A sum is finite unless an element is not finite or the sum overflows.
    Elements are counted only if the sum is not finite.
    """
    sums = _read_numbers([shard.tensor.detach().sum() for shard in shards])
    suspects = [
        shard for shard, total in zip(shards, sums, strict=True) if not math.isfinite(total)
    ]
    lines = []
    for shard in suspects:
        nan, inf = count_not_finite(shard.tensor)
        # Both are 0 if finite numbers have overflowed in the sum.
        if nan or inf:
            lines.append(
                f"{shard.name} ({shard.kind}): {counts_text(nan, inf)} of "
                f"{shard.tensor.numel():,} numbers"
            )
    return lines


def _read_numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of scalars. The host waits once for each of their devices."""
    numbers = [0.0] * len(scalars)
    # With offload, weights are on the GPU and moments in host memory.
    for device in {scalar.device for scalar in scalars}:
        places = [at for at, scalar in enumerate(scalars) if scalar.device == device]
        together = torch.stack([scalars[at].double() for at in places])
        for at, number in zip(places, together.tolist(), strict=True):
            numbers[at] = number
    return numbers


def gather_not_finite(
    own_lines: Sequence[str], records: Mapping[str, Any], ranks: Ranks
) -> list[str]:
    """Return the lines of all ranks, each with its rank and host, on every rank.

    At most 8 lines are returned, and a last one that reports that there are more.

    Args:
        own_lines: Lines of `describe_not_finite` for the tensors of this rank.
        records: Name -> nested JSON, whose numbers are looked at too. They are equal on all ranks,
            so rank 0 alone reports them.
        ranks: The ranks that save or load together.
    """
    own = [*own_lines]
    if ranks.rank == 0:
        for name, record in records.items():
            own += [f"{key} is {value}" for key, value in values_not_finite(record, name)]
    here = f"rank {ranks.rank} on {os.uname().nodename}"
    # One line more than is shown, so that "and more" is right even if only this rank has lines.
    everyone = ranks.gather([f"{here}: {line}" for line in own[: _SHOWN + 1]])
    found = [line for lines in everyone for line in lines]
    if len(found) <= _SHOWN:
        return found
    return [*found[:_SHOWN], "and more"]


def refuse_not_finite(checkpoint: Checkpoint, own_lines: Sequence[str], ranks: Ranks) -> None:
    """Raise if a checkpoint that was loaded holds numbers that are not finite.

    It is not renamed as a damaged one is, because its bytes are what a version without this check
    wrote. The operator decides which older checkpoint to take, and which data to skip from there.

    Args:
        checkpoint: The checkpoint.
        own_lines: Lines of `describe_not_finite` for the tensors that this rank has loaded.
        ranks: The ranks that load together.

    Raises:
        CheckpointError: On every rank, if any rank has such a number.
    """
    records = {"optimizer": checkpoint.optimizer, "state": checkpoint.state}
    if found := gather_not_finite(own_lines, records, ranks):
        raise CheckpointError(
            f"{checkpoint.folder} holds numbers that are not finite. Each step from it would be "
            "dropped:\n  " + "\n  ".join(found) + "\nGo back to an older checkpoint with: python "
            f"tools/rollback.py {checkpoint.folder.parent} --to ITERATION. "
            "tools/inspect_checkpoint.py --verify reports whether that one is finite. If only "
            "the optimizer's states are not finite, which are all kinds but weight, "
            "--no-load-optim resumes with new ones"
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
    """Return the counts that are not 0 as text, such as "3 NaN and 1 infinite"."""
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
