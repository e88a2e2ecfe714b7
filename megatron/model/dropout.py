"""Dropout whose mask depends only on the element (see `megatron/parallel/rng.py`)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.model.fused_operators import Drop
from megatron.parallel.context import locate_rows
from megatron.parallel.mesh import ContextParallel, TensorParallel
from megatron.parallel.rng import LANES, STEPS, MaskPlace, draw_mask, draw_mask_in_graph


class Dropout(nn.Module):
    """Zero each element with probability p and scale the others by 1 / (1 - p).

    Source: https://jmlr.org/papers/v15/srivastava14a.html. p is rounded to a multiple of 2^-16.
    """

    def __init__(
        self, p: float, site: int, width: int, tp: TensorParallel, context: ContextParallel | None
    ) -> None:
        """Store where the dropout is.

        Args:
            p: Probability that an element is zeroed.
            site: Number of this dropout in the complete model.
            width: Columns of a row, see `megatron/parallel/rng.py`.
            tp: The tensor-parallel ranks.
            context: The context-parallel ranks. None: one.
        """
        super().__init__()
        self.p = p
        self.width = width
        self.tp = tp
        self.kernel: Drop | None = None
        """Computes dropout and the addition. None: PyTorch's operators."""
        self.by_attention_kernel = False
        """Attention kernels draw masks of their own, which depend on the layout."""
        # Blocks may be built on the meta device, whose tensors have no values.
        self._site = torch.tensor(site, device="cpu")
        self._context = context or ContextParallel()

    @property
    def is_on(self) -> bool:
        """Whether something is zeroed. It is not in evaluation."""
        return self.training and self.p > 0

    def forward(self, x: Tensor, dropout_key: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return residual + dropout(x). In evaluation nothing is dropped.

        Args:
            x: [s, b, h], or [s/t, b, h] with sequence parallelism. With context parallelism, read
                s/c for s.
            dropout_key: See `Inputs`.
            residual: Same shape. None: 0.
        """
        if self.is_on:
            rows = locate_rows(x.shape[0], self.tp, self._context)
            return self.drop(x, residual, dropout_key, *rows)
        return x if residual is None else residual + x

    def drop(self, x: Tensor, residual: Tensor | None, dropout_key: Tensor, *place: int) -> Tensor:
        """Return residual + dropout(x) for a part of the elements.

        Args:
            x: [rows, samples, columns], or [samples, heads, queries, keys].
            residual: Same shape. None: 0.
            dropout_key: See `Inputs`.
            place: A `MaskPlace` without its first number.
        """
        threshold = round(self.p * STEPS)
        where = [*MaskPlace(-(-self.width // LANES), *place)]
        compiling = torch.compiler.is_compiling()
        # A compiled graph fuses the addition itself, and only needs the mask.
        if self.kernel is not None and not compiling:
            return self.kernel(x, residual, dropout_key, self._site, threshold, where)
        draw = draw_mask_in_graph if compiling else draw_mask
        kept = draw(dropout_key, self._site, threshold, list(x.shape), where)
        factor = STEPS / (STEPS - threshold)
        # A product of both factors in 16 bits would round 1 / (1 - p).
        once = factor if x.dtype == torch.float32 else 1.0
        # It multiplies by a mask and a number in one kernel.
        out = torch.ops.aten.native_dropout_backward(x, kept, once)
        if once != factor:
            out = out * factor
        return out if residual is None else residual + out


@dataclass(frozen=True)
class WeightDropout:
    """The dropout of a part of the attention weights."""

    dropout: Dropout
    dropout_key: Tensor
    head: int
    """The first head, counted in the complete model."""
    sample: int = 0
    """The first sample, counted in the microbatch."""
    query: int = 0
    """Index of the first query in its sample."""
    key: int = 0
    """Index of the first key in its sample."""

    def __call__(self, weights: Tensor, query: int) -> Tensor:
        """Apply dropout to weights [b, n, queries, keys], with `query` queries before them."""
        width = self.dropout.width
        first = self.head * width + self.query + query
        place = first, width, weights.shape[2], self.key, self.sample
        return self.dropout.drop(weights, None, self.dropout_key, *place)
