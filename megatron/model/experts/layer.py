"""The feed-forward half of a block with experts.

    y = sum over a token's experts of weight x expert(x), + shared expert(x)

Experts are whole on a rank, and ranks divide their number. The weights of all experts of a rank are
one matrix, with one expert below the other. The shared expert is an MLP, sharded like any other.

s: sequence, b: micro-batch, h: hidden size, f: inner width of an expert, E: experts, m: rows of all
experts of this rank. Sources: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2401.06066.
"""

import torch
from torch import Tensor, nn

from megatron.config.loss import LossConfig
from megatron.model.experts.dispatch import (
    find_own_rows,
    join_parts,
    plan_dispatch,
    take_part,
)
from megatron.model.experts.grouped import multiply_by_expert
from megatron.model.experts.routing import Router, Routing, add_loss
from megatron.model.fused_operators import FusedOperators
from megatron.model.layer_parts import MLPS, list_expert_parameters
from megatron.model.mlp import MLP, build_activation
from megatron.model.shape import ModelShape
from megatron.parallel.layers import make_parameter, make_replicated_outside_region
from megatron.parallel.mesh import ContextParallel, ExpertParallel, TensorParallel


class Experts(nn.Module):
    """The experts of this rank. They are one unit of ZeRO, which other ranks than a block share."""

    def __init__(self, shape: ModelShape, tp: TensorParallel, ranks: ExpertParallel) -> None:
        """Create the matrices."""
        super().__init__()
        config = shape.config
        assert config.num_experts is not None, "the layer has experts"
        self._number = config.num_experts // ranks.size
        self.activation = build_activation(config, tp)
        self._activation_name = config.activation_name
        self.operators = FusedOperators()
        """The kernels that take the place of PyTorch's operators."""

        made = {
            name: make_parameter(spec.compute_local_shape(tp.size, ranks.size), spec)
            for name, spec in list_expert_parameters(shape).items()
        }
        self.up = made["up"]
        self.gate = made.get("gate")
        self.down = made["down"]
        self.up_bias = made.get("up_bias")
        self.gate_bias = made.get("gate_bias")
        self.down_bias = made.get("down_bias")

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Map rows sorted by expert, [m, h], to [m, h].

        Args:
            x: The rows.
            ends: int32[E of this rank], the end of each expert's rows.
        """
        number = None
        if self.up_bias is not None:
            rows = torch.arange(len(x), device=x.device)
            number = torch.searchsorted(ends, rows, right=True)
        activate = self.activation
        # A kernel cannot be launched for no rows.
        if len(x):
            activate = self.operators.activations.get(self._activation_name, activate)
        up = self._multiply(x, self.up, self.up_bias, ends, number)
        if self.gate is None:
            inner = activate(up)
        else:
            gate = self._multiply(x, self.gate, self.gate_bias, ends, number)
            inner = activate(gate, up)
        return self._multiply(inner, self.down, self.down_bias, ends, number)

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Tensor,
        number: Tensor | None,
    ) -> Tensor:
        """Return the rows' products, plus the bias of the expert `number` of each row."""
        out = multiply_by_expert(x, weight, ends)
        if bias is None or number is None:
            return out
        return out + nn.functional.embedding(number, bias.view(self._number, -1))


class MixtureMLP(nn.Module):
    """Map [s, b, h] to [s, b, h] by the experts that a router chooses for each token."""

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        loss: LossConfig,
        tp: TensorParallel,
        context: ContextParallel,
        ranks: ExpertParallel,
    ) -> None:
        """Create the router, this rank's experts, and the shared expert.

        Args:
            shape: Sizes of the model.
            layer: Number of the layer in the complete model.
            loss: The auxiliary losses.
            tp: The tensor-parallel ranks.
            context: The context-parallel ranks.
            ranks: The ranks that divide the experts.
        """
        super().__init__()
        config = shape.config
        assert config.num_experts is not None, "the layer has experts"
        self._tp = tp
        self._ranks = ranks
        self._number = config.num_experts
        self.router = Router(shape, layer, loss, tp, context, ranks)
        self.experts = Experts(shape, tp, ranks)
        self.shared: MLP | None = None
        self.shared_gate: nn.Parameter | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared = MLP(shape, tp, config.moe_shared_expert_intermediate_size)
            if config.moe_shared_expert_gate:
                spec = MLPS.require("experts").list_parameters(shape)["shared_gate"]
                self.shared_gate = make_replicated_outside_region(spec, tp)

    @property
    def operators(self) -> FusedOperators:
        """The kernels that take the place of PyTorch's operators."""
        return self.experts.operators

    def use_operators(self, operators: FusedOperators) -> None:
        """Let experts and shared expert use kernels."""
        self.experts.operators = operators
        if self.shared is not None:
            self.shared.operators = operators

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Map [s, b, h] to [s, b, h]. With sequence parallelism both are [s/t, b, h]."""
        out = self._mix(x, routing)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * nn.functional.linear(x, self.shared_gate).sigmoid()
        return out + shared

    def _mix(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the sum of the outputs of each token's experts, with the shape of `x`."""
        tokens = x.flatten(0, 1)
        rows = len(tokens)
        # Without sequence parallelism, all tensor-parallel ranks have the same tokens.
        divided = self._tp.size > 1 and not self._tp.sequence_parallel
        first = 0
        total = rows
        if divided:
            first = find_own_rows(rows, self._tp).start
            tokens = take_part(tokens, self._tp)
        elif self._tp.sequence_parallel:
            first = rows * self._tp.rank
            total = rows * self._tp.size
        choice = self.router(tokens, first, total, routing)
        dispatch = plan_dispatch(choice.experts, self._number, self._ranks)
        outputs = dispatch.send_back(self.experts(dispatch.send(tokens), dispatch.ends))
        mixed = _weigh(outputs, choice.weights)
        mixed = add_loss(mixed, choice.loss, routing.factor)
        if divided:
            mixed = join_parts(mixed, rows, self._tp)
        return mixed.view_as(x)


def _weigh(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of each token's outputs times its weights, [n, h].

    Args:
        outputs: [n, k, h], in the order of the experts.
        weights: fp32[n, k].
    """
    return torch.bmm(weights.to(outputs.dtype).unsqueeze(1), outputs).squeeze(1)
