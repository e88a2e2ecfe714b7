"""A transformer layer: norm, attention, residual; norm, MLP, residual (pre-norm, as GPT-2)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.model.attention import SelfAttention
from megatron.model.dropout import Dropout
from megatron.model.execution import Execution
from megatron.model.mlp import MLP
from megatron.model.norm import build_norm
from megatron.model.positions import Positions
from megatron.model.recompute import Recomputation
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.rng import Moment, RandomStreams

_SITES_PER_BLOCK = 3

Half = Callable[..., Tensor]


class Block(nn.Module):
    """Layer number `index` of the whole model, whichever stage it lies in."""

    def __init__(
        self, shape: ModelShape, index: int, tp: TensorParallel, streams: RandomStreams, execution: Execution | None = None
    ) -> None:
        super().__init__()
        config, execution = shape.config, execution or Execution()
        site = 1 + _SITES_PER_BLOCK * index  # site 0 is the embedding's
        residual_is_cut = tp.sequence_parallel
        self.input_norm = build_norm(config, tp)
        core_dropout = Dropout(config.attention_dropout, site, streams, cut=True)
        self.attention = SelfAttention(shape, core_dropout, tp, recompute_core=execution.recompute_attention_core)
        self.attention_dropout = Dropout(config.hidden_dropout, site + 1, streams, cut=residual_is_cut)
        self.post_attention_norm = build_norm(config, tp)
        self.mlp = MLP(shape, tp)
        self.mlp_dropout = Dropout(config.hidden_dropout, site + 2, streams, cut=residual_is_cut)
        self._recompute: Recomputation | None = None
        if execution.recomputes(index):
            self._recompute = Recomputation(tp, partition=execution.partition_activations, in_cpu=execution.checkpoint_in_cpu)
        self._first_half: Half = Block._attend
        self._second_half: Half = Block._feed_forward
        if execution.compile:
            # The functions, not the module: FSDP2's hooks and the recomputation stay outside, and all blocks share the graphs.
            # A break of a graph would only be slow, so it is made an error.
            self._first_half = torch.compile(Block._attend, fullgraph=True, dynamic=execution.dynamic_shapes)
            self._second_half = torch.compile(Block._feed_forward, fullgraph=True, dynamic=execution.dynamic_shapes)

    def forward(self, x: Tensor, positions: Positions, moment: Moment) -> Tensor:
        """[s, b, h] -> [s, b, h] ([s/t, b, h] both with sequence parallelism)"""
        if self._recompute is not None and torch.is_grad_enabled():
            return self._recompute(self._compute, x, positions, moment)
        return self._compute(x, positions, moment)

    def _compute(self, x: Tensor, positions: Positions, moment: Moment) -> Tensor:
        """Dropouts of one half all differ between tensor-parallel ranks or all agree: a seed before each is enough for a graph."""
        self.attention.dropout.seed(moment)
        # Every batch has other documents: a graph for each would never end.
        attend = self._first_half if positions.documents is None else Block._attend
        attended = attend(self, x, positions, moment)
        self.attention_dropout.seed(moment)
        return self._second_half(self, x, attended, moment)

    def _attend(self, x: Tensor, positions: Positions, moment: Moment) -> Tensor:
        return self.attention(self.input_norm(x), positions, moment)

    def _feed_forward(self, x: Tensor, attended: Tensor, moment: Moment) -> Tensor:
        x = x + self.attention_dropout(attended, moment)
        return x + self.mlp_dropout(self.mlp(self.post_attention_norm(x)), moment)
