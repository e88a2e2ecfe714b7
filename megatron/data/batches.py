"""Choice of the samples that a rank takes, and the microbatches made of them.

Invariant: the samples of a rank are a function of (consumed samples, batch size, data-parallel rank
and size, micro-batch size). All ranks together take the same samples whatever their number.

Legend: b micro-batch size, s sequence length, m number of microbatches.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Input of the model for one forward pass. All tensors are on the CPU."""

    tokens: torch.Tensor
    """int64[b, s]."""
    labels: torch.Tensor
    """int64[b, s]: the token that follows each one."""
    loss_mask: torch.Tensor | None = None
    """float32[b, s]: 0 for tokens that do not count. None counts every token."""
    position_ids: torch.Tensor | None = None
    """int64[b, s]. None lets each sample count from 0."""
    documents: tuple[tuple[int, ...], ...] | None = None
    """Bounds of the documents in each sample, first 0 and last s.

    Attention stays within them. None allows attention over the complete sample.
    """


def compute_sample_positions(
    consumed: int, batch_size: int, dp_rank: int, dp_size: int, micro_batch_size: int
) -> NDArray[np.int64]:
    """Return the samples that a rank takes, [m, b].

    Microbatch m takes b samples from consumed + (m x dp_size + dp_rank) x b on.

    Args:
        consumed: Samples of all ranks that come before this batch.
        batch_size: Samples of all ranks. It is a multiple of micro_batch_size x dp_size.
        dp_rank: Data-parallel rank.
        dp_size: Data-parallel size.
        micro_batch_size: b.
    """
    span = micro_batch_size * dp_size
    assert batch_size % span == 0, (
        f"batch size {batch_size} is no multiple of micro-batch size x data-parallel size = {span}"
    )
    # Ranks take turns with each microbatch. This gives the same global batch for each dp_size.
    first = consumed + dp_rank * micro_batch_size
    return (
        first
        + np.arange(0, batch_size, span, dtype=np.int64)[:, None]
        + np.arange(micro_batch_size, dtype=np.int64)
    )


def split_microbatches(samples: NDArray[np.int64], micro_batch_size: int) -> list[Microbatch]:
    """Return m microbatches of [b, s], made of samples [m x b, s + 1]."""
    rows = torch.from_numpy(samples)
    # A slice of rows with s + 1 tokens is strided, and operations that use `view` would reject it.
    tokens = rows[:, :-1].contiguous()
    labels = rows[:, 1:].contiguous()
    return [
        Microbatch(
            tokens[at : at + micro_batch_size],
            labels[at : at + micro_batch_size],
        )
        for at in range(0, len(rows), micro_batch_size)
    ]
