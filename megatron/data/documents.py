"""Where documents begin and end in samples, and what follows: positions that restart, predictions that do not count.

Invariant: a document ends with its end-of-document token, which belongs to it. A sample that begins amid a document begins with
the rest of it; an end-of-document token at a sample's end opens nothing there. Source of the three flags: Megatron-LM
(--reset-position-ids, --reset-attention-mask, --eod-mask-loss).

Legend: b micro-batch, s sequence length, n documents of a sample.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.data.batches import Microbatch
from megatron.data.indexed import IndexedDataset
from megatron.errors import DataError

_CHECKED_DOCUMENTS = 1000  # of each data set at the start


@dataclasses.dataclass(frozen=True)
class DocumentRules:
    """What a run asked for, and the id that ends a document."""

    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool

    @classmethod
    def from_config(cls, data: DataConfig, eod: int) -> "DocumentRules":
        return cls(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)

    def apply(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with what follows from its documents, at whatever length it has been cut to."""
        tokens = microbatch.tokens
        return dataclasses.replace(
            microbatch,
            loss_mask=make_loss_mask(tokens, self.eod) if self.eod_mask_loss else None,
            position_ids=make_position_ids(tokens, self.eod) if self.reset_position_ids else None,
            documents=find_document_bounds(tokens, self.eod) if self.reset_attention_mask else None,
        )


def needs_documents(data: DataConfig) -> bool:
    """Whether a flag needs to know where documents end."""
    return data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss


def find_document_bounds(tokens: Tensor, eod: int) -> tuple[tuple[int, ...], ...]:
    """For each sample of tokens [b, s], s >= 1, its n + 1 bounds, 0 first and s last: document i is [bounds[i], bounds[i + 1])."""
    length = tokens.shape[1]
    samples: list[list[int]] = [[0] for _ in tokens]
    for sample, place in torch.nonzero(
        tokens[:, :-1] == eod
    ).tolist():  # in the order of rows, then of columns
        samples[sample].append(place + 1)
    return tuple((*starts, length) for starts in samples)


def make_position_ids(tokens: Tensor, eod: int) -> torch.LongTensor:
    """[b, s]: each token's place in its document, as far as the sample holds it."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    begins = torch.zeros_like(places)
    begins[:, 1:] = torch.where(tokens[:, :-1] == eod, places[:, 1:], 0)
    return places - begins.cummax(dim=1).values  # type: ignore[return-value]


def make_loss_mask(tokens: Tensor, eod: int) -> torch.FloatTensor:
    """[b, s]: 0 where the input is an end of document, whose successor is another text's beginning; 1 elsewhere."""
    return (tokens != eod).float()  # type: ignore[return-value]


def check_documents_end(indexed: IndexedDataset, eod: int) -> None:
    """Raises DataError where no document that is looked at ends with `eod`: bounds would be found nowhere, and nobody be told."""
    lasts = indexed.document_offsets[1 : _CHECKED_DOCUMENTS + 1] - 1
    lasts = lasts[(lasts >= 0) & (indexed.sizes[lasts] > 0)]
    ends = indexed.pointers[lasts] // indexed.dtype.itemsize + indexed.sizes[lasts] - 1
    if len(ends) and not np.any(indexed.tokens[ends] == eod):
        raise DataError(
            f"{indexed.prefix}: none of the first {len(ends)} documents ends with the tokenizer's end-of-document id {eod}, so "
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss would change nothing; give the tokenizer that the "
            "data was made with, preprocess it with --append-eod, or leave these flags out."
        )
