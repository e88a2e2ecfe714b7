"""Multi-head latent attention, sharded by heads over the tensor-parallel ranks.

The layer of DeepSeek-V2 (https://arxiv.org/abs/2405.04434, section 2.1) and its successors:

    q^R, q = norm(X W_query_down) W_query         or X W_query without a latent of queries
    c, k^R = X W_latent_down                      one rotary key for all heads
    k, v = norm(c) W_latent_up
    softmax((rotate(q^R) rotate(k^R) + q k) m / sqrt(d)) v

m is `ModelShape.latent_logit_factor`. The rotary channels of a query and of a key come first, in
the two halves that `rotate` pairs. Files of `transformers` have them last, as neighbours.

The matrices that write the latent vectors are outside of the tensor-parallel region: a rank has
all of them, and with sequence parallelism some of the tokens. The heads of all ranks read the
latent vectors and the rotary key, so their gradients are added up where they enter the region.

s: sequence, b: micro-batch, h: hidden, n: heads, d: width of a query, t: tensor-parallel size.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.model.attention import Attention
from megatron.model.dropout import Dropout
from megatron.model.key_value_cache import attend_with_new_token
from megatron.model.layer_parts import ATTENTIONS
from megatron.model.norm import Norm, build_norm
from megatron.model.positions import Positions, rotate
from megatron.model.shape import LayerDescription, ModelShape
from megatron.parallel.collectives import enter_tensor_parallel
from megatron.parallel.layers import ColumnParallelLinear, ReplicatedLinear, split_evenly
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.padding import trim_columns


class LatentAttention(Attention):
    """Projections to and from latent vectors, attention, and output projection."""

    def __init__(
        self, shape: ModelShape, layer: LayerDescription, dropout: Dropout, tp: TensorParallel
    ) -> None:
        """Create the projections to the latent vectors, and those of this rank's heads.

        Args:
            shape: Sizes of the model.
            layer: The settings that differ between layers.
            dropout: Dropout on the attention probabilities.
            tp: The tensor-parallel ranks.
        """
        super().__init__(shape, layer, dropout)
        config = shape.config
        self.tp = tp
        self.heads = split_evenly(config.num_attention_heads, tp)
        self.head_dim = shape.head_dim
        self.value_dim = shape.value_dim
        self.latent_dim = config.kv_lora_rank
        self.plain_dim = config.qk_head_dim
        self.rotary_dim = config.qk_pos_emb_head_dim
        self.logit_factor = shape.latent_logit_factor
        specs = ATTENTIONS.require("latent").list_parameters(shape, tp.size, tp.rank)
        self.query_down: nn.Module = nn.Identity()
        self.query_norm: nn.Module = nn.Identity()
        if config.q_lora_rank is not None:
            self.query_down = ReplicatedLinear(specs, "query_down", tp)
            self.query_norm = _build_latent_norm(config, config.q_lora_rank, tp)
        self.query = ColumnParallelLinear(specs, "query", tp)
        self.latent_down = ReplicatedLinear(specs, "latent_down", tp)
        self.latent_norm = _build_latent_norm(config, config.kv_lora_rank, tp)
        self.latent_up = ColumnParallelLinear(specs, "latent_up", tp)
        self._add_output(specs, tp)

    def forward(self, x: Tensor, positions: Positions, dropout_key: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]. With sequence parallelism both are [s/t, b, h].

        A cache has the latent vectors and the rotary keys only.
        """
        if positions.cache is None:
            return super().forward(x, positions, dropout_key)
        query, shared, latent = self._compress(x, positions)
        new = torch.cat((shared, latent), dim=2).transpose(0, 1).unsqueeze(1)
        # For prompts, the cache returns what it was given.
        (stored,) = positions.cache.append(self.number, new)
        if stored is not new:
            found = self._attend_to_latents(query, stored, self._select_bias(positions))
        else:
            # A prompt has many queries, for which expanded keys take fewer products.
            key, value = self._expand(shared, latent)
            alone = replace(positions, cache=None)
            found = self._compute_core(query, key, value, alone, dropout_key)
        return self.out(found.permute(2, 0, 1, 3).flatten(2))

    def _project(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        query, shared, latent = self._compress(x, positions)
        return query, *self._expand(shared, latent)

    def _compress(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, the rotated key of all heads, and the latent vectors.

        Returns:
            Queries [b, n/t, s, d], keys [s, b, rotary] and latent vectors [s, b, latent]. Latent
            vectors are outside of the tensor-parallel region: [s/t, ...] with sequence parallelism.
        """
        query = self.query(self.query_norm(self.query_down(x)))
        query = trim_columns(query, self.heads * self.head_dim).unflatten(2, (1, self.heads, -1))
        latent, shared = self.latent_down(x).split((self.latent_dim, self.rotary_dim), dim=2)
        # Each rank's gradient of this key is of its own heads only.
        shared = enter_tensor_parallel(shared, self.tp)[:, :, None, None]  # [s, b, 1, 1, rotary]
        if self.rotary:
            assert positions.cos is not None, "a rotary layer needs tables"
            assert positions.sin is not None, "a rotary layer needs tables"
            # The other channels of a query come after the rotary ones, and pass unchanged.
            query = rotate(query, positions.cos, positions.sin)
            shared = rotate(shared, positions.cos, positions.sin)
        # Kernels divide by the square root of the width only.
        if self.logit_factor != 1.0:
            query = query * self.logit_factor
        return query.squeeze(2).permute(1, 2, 0, 3), shared.flatten(2), self.latent_norm(latent)

    def _expand(self, shared: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [b, n/t, s, d] and values [b, n/t, s, width of a value].

        The arguments are what `_compress` returns.
        """
        width = self.heads * (self.plain_dim + self.value_dim)
        pairs = trim_columns(self.latent_up(latent), width).unflatten(2, (self.heads, -1))
        key, value = pairs.split((self.plain_dim, self.value_dim), dim=3)
        key = torch.cat((shared.unsqueeze(2).expand(-1, -1, self.heads, -1), key), dim=3)
        return key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)

    def _attend_to_latents(self, query: Tensor, stored: Tensor, bias: Tensor | None) -> Tensor:
        """Compute attention of the newest tokens without keys and values.

        With key = W_k c and value = W_v c, a logit is q W_k c = (W_k^T q) c, and the sum of
        weighted values is W_v times that of latent vectors. So the queries of all heads attend to
        one key, the stored vector (2405.04434, section 2.1.2).

        Args:
            query: [b, n/t, 1, d].
            stored: Rotary keys and latent vectors of all tokens, [b, 1, c, rotary + latent].
            bias: See `_select_bias`.

        Returns:
            [b, n/t, 1, width of a value].
        """
        # Rows of a head are neighbours: those of its key, and those of its value.
        up = self.latent_up.weight.unflatten(0, (self.heads, -1))
        to_key, to_value = up.split((self.plain_dim, self.value_dim), dim=1)
        rotary, plain = query.split((self.rotary_dim, self.plain_dim), dim=3)
        query = torch.cat((rotary, torch.einsum("bnsc,ncl->bnsl", plain, to_key)), dim=3)
        latent = stored[..., self.rotary_dim :]
        found = attend_with_new_token(query, stored, latent, bias, self.head_dim**-0.5)
        return torch.einsum("bnsl,nvl->bnsv", found, to_value)


def _build_latent_norm(config: ModelConfig, size: int, tp: TensorParallel) -> Norm:
    """Build the norm of a latent vector."""
    return build_norm(config, tp, size, config.latent_norm_epsilon)
