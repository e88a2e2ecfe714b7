"""A transformer layer: norm, attention, residual; norm, MLP, residual (pre-norm, as GPT-2)."""

from torch import Tensor, nn

from megatron.model.attention import SelfAttention
from megatron.model.dropout import Dropout
from megatron.model.mlp import MLP
from megatron.model.norm import build_norm
from megatron.model.positions import Positions
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.rng import RandomStreams

_SITES_PER_BLOCK = 3


class Block(nn.Module):
    """Layer number `index` of the whole model, whichever stage it lies in."""

    def __init__(self, shape: ModelShape, index: int, tp: TensorParallel, streams: RandomStreams) -> None:
        super().__init__()
        config = shape.config
        site = 1 + _SITES_PER_BLOCK * index  # site 0 is the embedding's
        residual_is_cut = tp.sequence_parallel
        self.input_norm = build_norm(config, tp)
        self.attention = SelfAttention(shape, Dropout(config.attention_dropout, site, streams, cut=True), tp)
        self.attention_dropout = Dropout(config.hidden_dropout, site + 1, streams, cut=residual_is_cut)
        self.post_attention_norm = build_norm(config, tp)
        self.mlp = MLP(shape, tp)
        self.mlp_dropout = Dropout(config.hidden_dropout, site + 2, streams, cut=residual_is_cut)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """[s, b, h] -> [s, b, h] ([s/t, b, h] both with sequence parallelism)"""
        x = x + self.attention_dropout(self.attention(self.input_norm(x), positions))
        return x + self.mlp_dropout(self.mlp(self.post_attention_norm(x)))
