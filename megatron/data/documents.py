"""Where documents begin and end in samples: restarting positions, attention bounds, loss masks.

Invariant: a document ends with its end-of-document token, which belongs to it. A sample that begins
inside a document begins with the rest of this document. An end-of-document token at the end of a
sample starts no further document in it.

Source: Megatron-LM's flags --reset-position-ids, --reset-attention-mask, --eod-mask-loss.

Legend: b micro-batch size, s sequence length, n documents of a sample.
"""

import dataclasses

import torch
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.data.batches import Microbatch


@dataclasses.dataclass(frozen=True)
class DocumentRules:
    """The flags that need document borders, and the id that ends a document."""

    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool

    @classmethod
    def from_config(cls, data: DataConfig, eod: int) -> "DocumentRules":
        """Return the rules that the configuration requests, with the tokenizer's id."""
        return cls(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)

    def apply(self, microbatch: Microbatch) -> Microbatch:
        """Return the microbatch with the fields that follow from its documents.

        Works at any sequence length, since the bounds are computed from the tokens.
        """
        tokens = microbatch.tokens
        return dataclasses.replace(
            microbatch,
            loss_mask=make_loss_mask(tokens, self.eod) if self.eod_mask_loss else None,
            position_ids=make_position_ids(tokens, self.eod) if self.reset_position_ids else None,
            documents=find_document_bounds(tokens, self.eod) if self.reset_attention_mask else None,
        )


def find_document_bounds(tokens: Tensor, eod: int) -> tuple[tuple[int, ...], ...]:
    """Return the bounds of the documents in each sample.

    Args:
        tokens: [b, s], s >= 1.
        eod: The id that ends a document.

    Returns:
        n + 1 bounds for each sample, first 0 and last s. Document i is [bounds[i], bounds[i + 1]).
    """
    length = tokens.shape[1]
    samples: list[list[int]] = [[0] for _ in tokens]
    # The last column is left out. A document that ends there would add an empty one after it.
    # nonzero lists rows in order, and columns in order within a row, so the bounds are sorted.
    for sample, place in torch.nonzero(tokens[:, :-1] == eod).tolist():
        samples[sample].append(place + 1)
    return tuple((*starts, length) for starts in samples)


def make_position_ids(tokens: Tensor, eod: int) -> Tensor:
    """Return int64[b, s]: the position of each token in its document.

    If a document began in an earlier sample, its positions count from the start of this sample.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    # cummax carries the begin of a document on to all its tokens without a loop.
    begins = torch.zeros_like(places)
    begins[:, 1:] = torch.where(tokens[:, :-1] == eod, places[:, 1:], 0)
    return places - begins.cummax(dim=1).values


def make_loss_mask(tokens: Tensor, eod: int) -> Tensor:
    """Return float32[b, s]: 0 at each end-of-document token, 1 elsewhere.

    The token after the end of a document is the first one of another text. It cannot be predicted.
    """
    return (tokens != eod).float()
