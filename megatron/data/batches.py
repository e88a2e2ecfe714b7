"""Choice of the samples that a rank takes, and the microbatches made of them.

Invariant: the samples of a rank are a function of (consumed samples, batch size, data-parallel rank
and size, micro-batch size). All ranks together take the same samples whatever their number.

Also the marks of data sets whose sequences are packed into samples, and not cut. `Packing`
(`indexed.py`) is the interface of what packs them. A token that does not count in the loss is
stored as the complement of its id, which is negative. The first token of a sequence never counts,
because nothing predicts it. So the sign of the first token tells such data from documents, and no
other program trains on the file by mistake. In the tokens of a sample, `START` is subtracted from
the first token of each sequence, and from the first one of the padding.

Legend: b micro-batch size, s sequence length, m number of microbatches, k samples that are read at
once.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

DIGESTS = 1 << 32
"""Number of digests of a batch. Sums over a million ranks are exact in fp64."""


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


def compute_digest(
    microbatches: Sequence[Microbatch], consumed: int, dp_rank: int, dp_size: int
) -> int:
    """Return a digest of the tokens of a rank's samples and of their numbers, below 2^32.

    The sum of all ranks' digests, modulo 2^32, does not depend on the number of ranks and the
    micro-batch size. See `compute_sample_positions` for the arguments.
    """
    size = len(microbatches[0].tokens)
    samples = len(microbatches) * size * dp_size
    positions = compute_sample_positions(consumed, samples, dp_rank, dp_size, size)
    total = 0
    for microbatch, numbers in zip(microbatches, positions.tolist(), strict=True):
        # The last label is no token of the sample.
        ends = microbatch.labels[:, -1].tolist()
        for row, end, number in zip(microbatch.tokens.numpy(), ends, numbers, strict=True):
            total += xxhash.xxh3_64_intdigest(row, seed=number) ^ end
    return total % DIGESTS


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


START = 1 << 40


@dataclasses.dataclass(frozen=True)
class SampleMarks:
    """Where sequences begin in samples, and which tokens count."""

    starts: torch.Tensor
    """bool[k, s + 1]: whether a sequence or the padding begins."""
    counted: torch.Tensor
    """bool[k, s + 1]: whether a token counts when it is a label."""

    def select(self, first: int, last: int) -> "SampleMarks":
        """Return the marks of some samples."""
        return SampleMarks(self.starts[first:last], self.counted[first:last])


def take_marks(samples: NDArray[np.int64]) -> SampleMarks | None:
    """Return the marks of samples [k, s + 1], and leave the ids in `samples`.

    None if no sample has any.
    """
    limit = -(START >> 1)
    packed = samples[:, 0] < limit
    if not packed.any():
        return None
    # An id has at most 26 bits, so both marks can be told apart.
    starts = samples < limit
    samples[starts] += START
    counted = samples >= 0
    # A negative id of a document stays, and is an error.
    np.copyto(samples, ~samples, where=~counted & packed[:, None])
    return SampleMarks(torch.from_numpy(starts), torch.from_numpy(counted))


def apply_marks(microbatch: Microbatch, marks: SampleMarks) -> Microbatch:
    """Return the microbatch with masks, positions and bounds of its marks.

    Samples of documents keep what `DocumentRules` gave them.
    """
    assert microbatch.loss_mask is not None, "`Packing.check` demands all three flags"
    assert microbatch.position_ids is not None
    assert microbatch.documents is not None
    length = microbatch.tokens.shape[1]
    documents = list(microbatch.documents)
    pairs = zip(marks.starts, marks.counted, strict=True)
    for sample, (starts, counted) in enumerate(pairs):
        if not starts[0]:
            continue
        microbatch.loss_mask[sample] = counted[1:].float()
        begins = starts[:length].nonzero().squeeze(1).tolist()
        documents[sample] = (*begins, length)
        for begin in begins:
            microbatch.position_ids[sample, begin:] = torch.arange(length - begin)
    return dataclasses.replace(microbatch, documents=tuple(documents))
