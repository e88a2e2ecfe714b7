"""Data sets whose sequences are packed into samples, and not cut: the interface, and their marks.

A token that does not count in the loss is stored as the complement of its id, which is negative.
The first token of a sequence never counts, because nothing predicts it. So the sign of the first
token tells such data from documents, and no other program trains on the file by mistake.

In the tokens of a sample, `START` is subtracted from the first token of each sequence, and from the
first one of the padding.

Legend: s sequence length, k samples that are read at once.
"""

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.data.batches import Microbatch

if TYPE_CHECKING:
    from megatron.data.cache import IndexCache
    from megatron.data.documents import DocumentRules
    from megatron.data.gpt_dataset import GPTDataset
    from megatron.data.indexed import IndexedDataset

START = 1 << 40


class Packing(Protocol):
    """How the sequences of a data set become samples."""

    def check(
        self, indexed: "IndexedDataset", seq_length: int, rules: "DocumentRules | None"
    ) -> None:
        """Check a data set, before an index is built.

        Raises:
            DataError: A flag is missing, or a sequence does not fit into a sample.
        """

    def count_samples(
        self, indexed: "IndexedDataset", documents: tuple[int, int], seq_length: int
    ) -> int:
        """Return the samples of the sequences [first, last), at least 1."""

    def open(
        self,
        indexed: "IndexedDataset",
        documents: tuple[int, int],
        seq_length: int,
        seed: int,
        num_samples: int,
        cache: "IndexCache",
    ) -> "GPTDataset":
        """Return the samples. See `GPTDataset`."""


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
