"""Which samples a rank takes, and the microbatches made of them.

Invariant: a rank's samples are a function of (consumed samples, batch size, data-parallel rank and size, micro-batch size); the
ranks' samples together are the same whatever their number. Legend: b micro-batch size, s sequence length, m microbatches.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """What a rank takes through the model at once; CPU tensors."""

    tokens: torch.LongTensor
    """[b, s]"""
    labels: torch.LongTensor
    """[b, s], the token after each one."""
    loss_mask: torch.FloatTensor | None = None
    """[b, s]; None counts every token."""
    position_ids: torch.LongTensor | None = None
    """[b, s]; None: each sample counts from 0."""
    documents: tuple[tuple[int, ...], ...] | None = None
    """For each sample the bounds of its documents, 0 first and s last, where attention must stay within them."""


def compute_sample_positions(
    consumed: int, batch_size: int, dp_rank: int, dp_size: int, micro_batch_size: int
) -> NDArray[np.int64]:
    """[m, b]: microbatch m takes the samples [consumed + (m x dp_size + dp_rank) x b, + b)."""
    span = micro_batch_size * dp_size
    assert batch_size % span == 0, (
        f"batch size {batch_size} is no multiple of micro-batch size x data-parallel size = {span}"
    )
    first = consumed + dp_rank * micro_batch_size
    return (
        first
        + np.arange(0, batch_size, span, dtype=np.int64)[:, None]
        + np.arange(micro_batch_size, dtype=np.int64)
    )


def split_microbatches(samples: NDArray[np.int64], micro_batch_size: int) -> list[Microbatch]:
    """Samples [m x b, s + 1] -> m microbatches of [b, s]; tokens and labels are contiguous."""
    rows = torch.from_numpy(samples)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return [
        Microbatch(tokens[at : at + micro_batch_size], labels[at : at + micro_batch_size])  # type: ignore[arg-type]
        for at in range(0, len(rows), micro_batch_size)
    ]
