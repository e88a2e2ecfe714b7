"""A gated delta net in place of attention, sharded by heads over the tensor-parallel ranks.

The layer of Gated DeltaNet (https://arxiv.org/abs/2412.06464, section 3.4) as Qwen3-Next has it:

    q, k, v = SiLU(conv(X W_q)), SiLU(conv(X W_k)), SiLU(conv(X W_v))     q, k with the length 1
    beta = sigmoid(X W_beta)       log a = -exp(A_log) softplus(X W_alpha + dt_bias)
    out = (RMSNorm(delta rule(q / sqrt(d_k), k, v, a, beta)) * SiLU(X W_gate)) W_out

Context-parallel ranks exchange the positions of all heads for all positions of some heads, for each
--cp-comm-type. The convolution and the state then read the tokens in order.

s: sequence, b: micro-batch, h: hidden, n: heads of queries and keys, m: heads of values, t:
tensor-parallel size, c: context-parallel size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.model.delta_rule import apply_delta_rule, convolve
from megatron.model.dropout import Dropout
from megatron.model.fused_operators import FusedOperators
from megatron.model.layer_parts import ATTENTIONS
from megatron.model.positions import Positions
from megatron.model.shape import LayerDescription, ModelShape
from megatron.parallel.context import gather_positions, return_heads
from megatron.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    apply_column_parallel,
    make_replicated_inside_region,
    make_sharded,
    split_evenly,
)
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.padding import trim_columns
from megatron.parallel.parameter_spec import ParameterSpec

_LENGTH_EPSILON = 1e-6
"""Added to the square of the length of a query or key, as in Qwen3-Next."""


def normalise_length(x: Tensor) -> Tensor:
    """Divide the vectors of the last dimension by their lengths."""
    return x * (x.square().sum(-1, keepdim=True) + _LENGTH_EPSILON).rsqrt()


class GatedRMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight * SiLU(gate), for each head."""

    def __init__(self, weight: ParameterSpec, eps: float, tp: TensorParallel) -> None:
        """Create the weight, which all heads share.

        Args:
            weight: Its spec.
            eps: Added to the mean of the squares.
            tp: The tensor-parallel ranks.
        """
        super().__init__()
        self.eps = eps
        # A rank's gradient covers its heads only.
        self.weight = make_replicated_inside_region(weight, tp)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map [..., d_v] in fp32 to [..., d_v] in the dtype of the gate."""
        rstd = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (x * rstd * self.weight * F.silu(gate.to(x.dtype))).to(gate.dtype)


class GatedDeltaNet(nn.Module):
    """Projections, convolution, delta rule, gated norm, and output projection."""

    def __init__(
        self, shape: ModelShape, layer: LayerDescription, dropout: Dropout, tp: TensorParallel
    ) -> None:
        """Create the parameters of this rank's heads.

        Args:
            shape: Sizes of the model.
            layer: The settings that differ between layers.
            dropout: Dropout on attention probabilities, which this layer does not have.
            tp: The tensor-parallel ranks.
        """
        super().__init__()
        config = shape.config
        self.tp = tp
        self.number = layer.number
        self.key_heads = split_evenly(config.linear_num_key_heads, tp)
        self.value_heads = split_evenly(config.linear_num_value_heads, tp)
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.beta_factor = 1.0 + config.linear_allow_neg_eigval
        """2 if the state may change its sign."""
        specs = ATTENTIONS.require("gated_delta_net").list_parameters(shape, tp.size, tp.rank)
        self.query = ColumnParallelLinear(specs, "query", tp)
        self.key = ColumnParallelLinear(specs, "key", tp)
        self.value = ColumnParallelLinear(specs, "value", tp)
        self.gate = ColumnParallelLinear(specs, "gate", tp)
        self.beta = ColumnParallelLinear(specs, "beta", tp)
        self.alpha = ColumnParallelLinear(specs, "alpha", tp)
        self.query_convolution = make_sharded(specs["query_convolution"], tp)
        self.key_convolution = make_sharded(specs["key_convolution"], tp)
        self.value_convolution = make_sharded(specs["value_convolution"], tp)
        # Every value head has a decay of its own.
        self.A_log = make_sharded(specs["A_log"], tp)
        self.dt_bias = make_sharded(specs["dt_bias"], tp)
        eps = config.linear_norm_epsilon or config.layernorm_epsilon
        self.norm = GatedRMSNorm(specs["norm.weight"], eps, tp)
        self.out = RowParallelLinear(specs, "out", tp)
        self.recompute_core = False
        """Whether the backward pass computes convolution and delta rule again."""
        self.kernels: tuple[str, ...] = ()
        """The kernels of attention, which this layer does not have."""
        self.operators = FusedOperators()
        """The kernels that take the place of PyTorch's operators."""

    def forward(self, x: Tensor, positions: Positions, dropout_key: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]. With sequence parallelism both are [s/t, b, h]."""
        wide = self.query, self.key, self.value, self.gate
        rates = self.beta, self.alpha
        # Decays are exponentials of the rates, so these stay out of float8.
        groups = [wide + rates] if self.query.products is None else [wide, rates]
        query, key, value, gate, beta, alpha = (
            trim_columns(out, each.weight.shape[0])
            for layers in groups
            for out, each in zip(apply_column_parallel(x, *layers), layers, strict=True)
        )
        arguments = query, key, value, beta, alpha, positions
        if self.recompute_core and torch.is_grad_enabled():
            mixed = checkpoint(self._mix, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._mix(*arguments)
        gate = gate.unflatten(2, (self.value_heads, self.value_dim))
        return self.out(self.norm(mixed, gate).flatten(2))

    def find_largest_logit(self, x: Tensor, positions: Positions) -> Tensor:
        """Return 0: the layer has no attention logits."""
        return torch.zeros((), dtype=torch.float32, device=x.device)

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        alpha: Tensor,
        positions: Positions,
    ) -> Tensor:
        """Compute convolution and delta rule of this rank's positions.

        Args:
            query: [s/c, b, n d_k / t].
            key: Same shape.
            value: [s/c, b, m d_v / t].
            beta: [s/c, b, m/t], before the sigmoid.
            alpha: Same shape.
            positions: The documents, the context-parallel ranks, and the cache.

        Returns:
            [s/c, b, m/t, d_v] in fp32.
        """
        context = positions.context
        # In a message, the parts of a head are neighbours.
        parts = [
            part.unflatten(2, (self.key_heads, -1)) for part in (query, key, value, beta, alpha)
        ]
        if context.size > 1:
            widths = [part.shape[3] for part in parts]
            # Neighbouring key heads go to one rank, with their value heads, betas and decays.
            sent = torch.cat(parts, 3).permute(1, 2, 0, 3).unflatten(1, (context.size, -1))
            arrived = gather_positions(sent, context).permute(2, 0, 1, 3)
            parts = list(arrived.split(widths, 3))
        wide = torch.promote_types(query.dtype, torch.float32)
        convolutions = self.query_convolution, self.key_convolution, self.value_convolution
        # The rows of this context-parallel rank's heads.
        *weights, rate, bias = (
            each.chunk(context.size)[context.rank]
            for each in (*convolutions, self.A_log, self.dt_bias)
        )
        # One convolution for all channels. A rank has all parts of its heads.
        joined = torch.cat([part.flatten(2) for part in parts[:3]], 2)
        cache = positions.cache
        before: Tensor | None = None
        state: Tensor | None = None
        # A prompt begins with nothing, and a later token with what its sequence has kept.
        if cache is not None and (kept := cache.read_state(self.number)) is not None:
            before, state = kept[0].transpose(0, 1), kept[1]
        found, tail = convolve(joined, torch.cat(weights), positions.documents, before)
        divided = F.silu(found).split([weight.shape[0] for weight in weights], 2)
        # [b, heads, s, d].
        query, key, value = (
            part.unflatten(2, (-1, width)).permute(1, 2, 0, 3)
            for part, width in zip(
                divided, (self.key_dim, self.key_dim, self.value_dim), strict=True
            )
        )
        # exp(A_log) and the step are large and small numbers, so 16 bits would lose digits of both.
        beta, alpha = (part.flatten(2).permute(1, 2, 0).to(wide) for part in parts[3:])
        # The step is above 0, so each decay is below 1.
        step = F.softplus(alpha + bias.to(wide).unsqueeze(1))
        mixed, state = (self.operators.delta_rule or apply_delta_rule)(
            normalise_length(query) * self.key_dim**-0.5,
            normalise_length(key),
            value,
            -rate.to(wide).exp().unsqueeze(1) * step,
            beta.sigmoid() * self.beta_factor,
            positions.documents,
            state,
        )
        if cache is not None:
            cache.write_state(self.number, (tail.transpose(0, 1), state))
        if context.size > 1:
            mixed = return_heads(mixed, context)
        return mixed.permute(2, 0, 1, 3)
