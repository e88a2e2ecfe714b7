"""Inputs of a forward pass apart from the residual stream.

b: micro-batch, s: sequence length.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.parallel.context import take_own
from megatron.parallel.mesh import ContextParallel

START = torch.zeros(3, dtype=torch.int64)

Documents = tuple[tuple[int, ...], ...]
"""Bounds of each sample's documents, 0 first and s last.

Document i of a sample is [bounds[i], bounds[i + 1]).
"""


@dataclass
class SampleLikelihoods:
    """How likely the labels of each sample of a microbatch are.

    The caller puts an empty one into the inputs, and the last stage fills it.
    """

    log_likelihood: Tensor | None = None
    """float64[b], in nats. Sum over the positions that count."""
    greedy: Tensor | None = None
    """bool[b], whether each label that counts is the most likely token."""
    of_positions: Tensor | None = None
    """float64[s, b], the log-likelihood of each label, 0 where a position does not count."""


@dataclass(frozen=True)
class Inputs:
    """A microbatch. It is the same for every stage of a pipeline, and each uses what it needs."""

    tokens: Tensor
    """[b, s]."""
    labels: Tensor | None = None
    """[b, s], the next token at each position. The loss needs them."""
    loss_mask: Tensor | None = None
    """[b, s], 1 where a position counts. None means that all positions count."""
    position_ids: Tensor | None = None
    """[b, s]. None means 0 to s - 1 in every sample."""
    documents: Documents | None = None
    """If given, attention stays within a document."""
    dropout_key: Tensor = START
    """int64[3]: the seed of the run, the 1-based iteration, and the number of the first sample in
    the global batch. The samples of a microbatch are neighbours there. Only dropout reads it."""
    likelihoods: SampleLikelihoods | None = None
    """If given, the last stage fills it. The mask must be given as well."""
    loss_divisor: Tensor | None = None
    """What the sum of the losses is divided by, a scalar in fp32. None: the number of positions
    that count in this microbatch."""
    loss_factor: float = 1.0
    """The factor on the loss before its backward pass. Auxiliary losses of experts get it too."""

    def take_own(self, context: ContextParallel) -> "Inputs":
        """Return the inputs with the positions of one context-parallel rank, [b, s/c].

        The documents stay those of the complete samples.
        """
        if context.size == 1:
            return self

        def take(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else take_own(tensor, context, 1)

        return replace(
            self,
            tokens=take_own(self.tokens, context, 1),
            labels=take(self.labels),
            loss_mask=take(self.loss_mask),
            position_ids=take(self.position_ids),
        )

    def to(self, device: torch.device) -> "Inputs":
        """Return the inputs with their tensors on `device`. The host does not wait for copies."""

        def copy(tensor: Tensor) -> Tensor:
            # The host would wait for a copy from memory that is not pinned. torch keeps pinned
            # memory and uses it again when the copy is done.
            if device.type == "cuda" and not tensor.is_cuda:
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        def move(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return copy(tensor)

        return Inputs(
            copy(self.tokens),
            move(self.labels),
            move(self.loss_mask),
            move(self.position_ids),
            self.documents,
            copy(self.dropout_key),
            self.likelihoods,
            self.loss_divisor,
            self.loss_factor,
        )
