"""What a forward pass is given beside the residual stream: the microbatch, and where in the run it stands.

Legend: b micro-batch, s sequence length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel.rng import DropoutKey

START = DropoutKey(0, 0)

Documents = tuple[tuple[int, ...], ...]
"""For each sample the bounds of its documents, 0 first and s last: document i is [bounds[i], bounds[i + 1])."""


@dataclass(frozen=True)
class Inputs:
    """A microbatch, the same for every stage of a pipeline; each takes of it what it needs."""

    tokens: Tensor
    """[b, s]"""
    labels: Tensor | None = None
    """[b, s], the token after each one; needed for the loss."""
    loss_mask: Tensor | None = None
    """[b, s], 1 where a position counts; None: all do."""
    position_ids: Tensor | None = None
    """[b, s]; None: 0 to s - 1 in every sample."""
    documents: Documents | None = None
    """Given: attention stays within a document."""
    dropout_key: DropoutKey = START
    """Seeds dropout."""

    def to(self, device: torch.device) -> "Inputs":
        """Its tensors on `device`."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return Inputs(
            self.tokens.to(device, non_blocking=True),
            move(self.labels),
            move(self.loss_mask),
            move(self.position_ids),
            self.documents,
            self.dropout_key,
        )
