"""Causal self-attention, cut by heads over the tensor-parallel ranks.

s: sequence, b: micro-batch, h: hidden, g: query groups, n: heads, d: head width, t: tensor-parallel size.

Queries, keys and values are one matrix whose rows are ordered by group: for each group its n/g query heads, its key, its value. So
a rank's part (whole groups) is a box of it, for multi-head (n/g = 1) and grouped-query attention alike
(https://arxiv.org/abs/2305.13245).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.dropout import Dropout
from megatron.model.positions import Positions, rotate
from megatron.model.shape import ModelShape
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear, split_evenly
from megatron.parallel.mesh import TensorParallel


class SelfAttention(nn.Module):
    def __init__(self, shape: ModelShape, dropout: Dropout, tp: TensorParallel) -> None:
        super().__init__()
        config = shape.config
        self.head_dim = shape.head_dim
        self.groups = split_evenly(shape.query_groups, tp)
        self.heads_per_group = config.num_attention_heads // shape.query_groups
        rows = shape.query_groups * (self.heads_per_group + 2) * shape.head_dim
        self.qkv = ColumnParallelLinear(config.hidden_size, rows, bias=config.add_bias_linear, tp=tp)
        self.out = RowParallelLinear(
            config.num_attention_heads * shape.head_dim, config.hidden_size, bias=config.add_bias_linear, tp=tp
        )
        self.dropout = dropout

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """[s, b, h] -> [s, b, h] ([s/t, b, h] both with sequence parallelism)"""
        qkv = self.qkv(x)
        s, b, _ = qkv.shape
        n = self.heads_per_group
        qkv = qkv.view(s, b, self.groups, n + 2, self.head_dim)  # [s, b, g/t, n/g + 2, d]
        query_key, value = qkv[..., : n + 1, :], qkv[..., n + 1, :]
        if positions.cos is not None and positions.sin is not None:
            query_key = rotate(query_key, positions.cos, positions.sin)
        query = query_key[..., :n, :].flatten(2, 3).permute(1, 2, 0, 3)  # [b, n/t, s, d]
        key = query_key[..., n, :].permute(1, 2, 0, 3)  # [b, g/t, s, d]
        context = F.scaled_dot_product_attention(
            query,
            key,
            value.permute(1, 2, 0, 3),
            attn_mask=positions.bias,
            dropout_p=self.dropout.seed(),
            is_causal=positions.bias is None,
            enable_gqa=n > 1,
        )
        return self.out(context.permute(2, 0, 1, 3).reshape(s, b, -1))  # [s, b, n d/t]
