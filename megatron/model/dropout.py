"""Dropout whose mask is derived from the step and the site (see `megatron/parallel/rng.py`)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.rng import DropoutKey, RandomStreams


class Dropout(nn.Module):
    """Zero each element with probability p and scale the others by 1 / (1 - p).

    Source: https://jmlr.org/papers/v15/srivastava14a.html. In a compiled graph the seed is not part
    of the graph. The caller of the graph must seed before it, for the first dropout in it.
    """

    def __init__(self, p: float, site: int, streams: RandomStreams, *, sharded: bool) -> None:
        """Store the site and the generators.

        Args:
            p: Probability that an element is zeroed.
            site: Number of this dropout in the complete model.
            streams: The generators for dropout.
            sharded: The activation differs between tensor-parallel ranks, so their masks must
                differ as well.
        """
        super().__init__()
        self.p = p
        self._site = site
        self._streams = streams
        self._sharded = sharded

    def seed(self, dropout_key: DropoutKey) -> float:
        """Seed the generator for this site.

        Returns:
            The probability that applies. It is 0 in evaluation.
        """
        if not self.training or self.p == 0.0:
            return 0.0
        # A seed inside of a graph would be traced as a constant, or break the graph.
        if not torch.compiler.is_compiling():
            self._streams.seed(dropout_key, self._site, sharded=self._sharded)
        return self.p

    def forward(self, x: Tensor, dropout_key: DropoutKey) -> Tensor:
        """Return `x` with dropout applied, and `x` itself in evaluation."""
        p = self.seed(dropout_key)
        if p and self._streams.shares_sequence:
            return x * self._streams.draw_own_rows(
                x, p, dropout_key, self._site, sharded=self._sharded
            )
        if p:
            return F.dropout(x, p)
        return x
