"""Dropout whose mask is derived from the step and the site (see `parallel/rng.py`)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.rng import DropoutKey, RandomStreams


class Dropout(nn.Module):
    """Zero each element with probability p and scale the rest by 1 / (1 - p) (https://jmlr.org/papers/v15/srivastava14a.html).

    `sharded`: the activation differs between tensor-parallel ranks, so the masks must, too. In a compiled graph the seed is no part of
    the graph: who calls the graph seeds before it, for its first dropout.
    """

    def __init__(self, p: float, site: int, streams: RandomStreams, *, sharded: bool) -> None:
        super().__init__()
        self.p = p
        self._site = site
        self._streams = streams
        self._sharded = sharded

    def seed(self, dropout_key: DropoutKey) -> float:
        """Seed the generator for this site; returns the probability in force (0 in evaluation)."""
        if not self.training or self.p == 0.0:
            return 0.0
        if not torch.compiler.is_compiling():
            self._streams.seed(dropout_key, self._site, sharded=self._sharded)
        return self.p

    def forward(self, x: Tensor, dropout_key: DropoutKey) -> Tensor:
        p = self.seed(dropout_key)
        return F.dropout(x, p) if p else x
