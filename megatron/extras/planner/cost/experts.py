"""Memory and time of a layer with experts on one rank, in place of those of an MLP.

`megatron.model.experts` has the operators. n tokens are routed by a rank, N = n k rows are sent,
and m are received.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron.config.table import Table
from megatron.extras.planner.cost.communication import estimate_all_to_all_seconds
from megatron.extras.planner.cost.float8 import list_attention_linears
from megatron.extras.planner.cost.kernels import (
    Gemm,
    estimate_gemm_seconds,
    estimate_memory_seconds,
)
from megatron.extras.planner.cost.layers import LayerTimes, Passes, Seconds
from megatron.extras.planner.cost.parameters import count_message_bytes, count_rows
from megatron.extras.planner.cost.tensors import LayerTensors

_ROUTER_KERNELS = 40
"""Small kernels of a forward pass of router and dispatch, counted in `megatron.model.experts`."""
_ROUTER_BYTES = 30
"""Bytes of both passes for each element of the router's input: casts to fp32 and back, and products
of a few columns, which read and write their inputs."""
_ROW_COPIES = 12
"""Numbers that both passes read or write for an element of a row that is sent: copies to the
experts' order and back, and sums with weights."""
_RECEIVED_COPIES = 8
"""The same for a row that came from another rank."""
_EXPERT_GATE = 8
"""The same for an inner element of a gated expert."""


class MixtureTimes(LayerTimes):
    """The times of layers with experts.

    n tokens are routed by a rank, N = n k rows are sent, and m are received by the fullest rank.
    All ranks wait for that rank, so its rows decide.
    """

    @property
    def _mlp_width(self) -> int:
        """Width of the shared expert, which is an MLP. 0 without one."""
        return self._shape.config.moe_shared_expert_intermediate_size or 0

    def estimate_layer(self, window: int | None = None) -> Passes:
        """See `LayerTimes`."""
        return super().estimate_layer(window) + self._estimate_experts()

    def _list_projections(self) -> list[Gemm]:
        h = self._shape.config.hidden_size
        number = len(list_attention_linears(self._shape, self._layout.tensor))
        attention = super()._list_projections()[:number]
        if not self._f:
            return attention
        return [*attention, self._make_gemm(self._mlp_in, h), self._make_gemm(h, self._f)]

    def _estimate_tensor_parallel(self) -> Passes:
        """Estimate the messages of attention, and those that divide and join tokens."""
        if self._layout.tensor == 1:
            return Passes(Seconds(), Seconds())
        size = self._value * self._tokens * self._shape.config.hidden_size
        # Attention has an all-reduce in each pass, or two messages of the same bytes. The shared
        # expert has as many.
        forward = self._time_attention_messages(size)
        if self._f:
            forward += self._time_collective(size, passes=2)
        if not self._layout.sequence_parallel:
            forward += self._time_collective(size, passes=1)
        return Passes(Seconds(tensor=forward), Seconds(tensor=forward))

    def _estimate_experts(self) -> Passes:
        """Estimate the router, the messages and the products of the experts."""
        config = self._shape.config
        h = config.hidden_size
        f = self._shape.expert_width
        layout = self._layout
        own, sent, received = count_rows(self._shape, layout, self._length)
        experts = (config.num_experts or 0) // (layout.expert or 1)
        rows = math.ceil(received / experts)
        # Each expert has rows of its own, so few rows are multiplied at a lower speed.
        entry = Gemm(rows, f, h, experts, self._value)
        entries = [entry, entry] if self._gated else [entry]
        products = [*entries, Gemm(rows, h, f, experts, self._value)]
        gradients = [each for product in products for each in product.derive_backward()]
        exchanged = (layout.expert or 1) > 1
        # The sums of the gradients of gate and up are of received rows.
        copied = _ROW_COPIES * sent * h + 4 * own * h + len(entries) * received * h
        copied += _RECEIVED_COPIES * exchanged * received * h + _EXPERT_GATE * received * f
        traffic = self._software.pointwise * (self._value * copied + _ROUTER_BYTES * own * h)
        forward, backward = (
            estimate_memory_seconds(share * traffic, self._hardware, kernels)
            for share, kernels in ((1 / 3, _ROUTER_KERNELS), (2 / 3, _ROUTER_KERNELS // 2))
        )
        size = self._count_message_bytes()
        # There and back in each pass.
        messages = 2 * estimate_all_to_all_seconds(size, layout.expert or 1, self._hardware)
        return Passes(
            Seconds(gemm=self._time_products(products), pointwise=forward, experts=messages),
            Seconds(gemm=self._time_products(gradients), pointwise=backward, experts=messages),
        )

    def _count_message_bytes(self) -> float:
        return count_message_bytes(self._shape, self._layout, self._value, self._length)

    def _time_products(self, products: list[Gemm]) -> float:
        """Return the seconds of products in which each expert has a matrix of its own."""
        if self._software.half and self._hardware.has_grouped_products:
            return self._time_gemms(products)
        # A product for each expert.
        return sum(
            each.batch
            * estimate_gemm_seconds(Gemm(each.m, each.n, each.k, 1, each.value), self._hardware)
            for each in products
        )


class MixtureTensors(LayerTensors):
    """The tensors of a layer with experts. `megatron.model.experts` has its operators.

    n tokens are routed by this rank, N = n k rows are sent and m are received.
    """

    has_experts = True

    @cached_property
    def _rows(self) -> tuple[float, float, float]:
        """Bytes of the hidden states of n, N and m rows."""
        n, sent, received = count_rows(self._shape, self._layout)
        h = self.value * self._config.hidden_size
        return h * n, h * sent, h * received

    @property
    def _inner(self) -> float:
        """Bytes of the inner activations of m rows."""
        return self._rows[2] / self._config.hidden_size * self._shape.expert_width

    @property
    def _travels(self) -> bool:
        """Whether rows travel to other ranks."""
        return (self._layout.expert or 1) > 1

    @property
    def _router(self) -> float:
        """What router and dispatch keep.

        In fp32 these are the router's input and weight, and about two tensors of scores. Places of
        rows are int64.
        """
        n, sent, received = count_rows(self._shape, self._layout)
        number = self._config.num_experts or 0
        h = self._config.hidden_size * self._software.half
        places = 3 * sent + 2 * received * self._travels
        return 4 * (n * h + number * h + 2 * n * number) + 8 * places

    @property
    def _matrix(self) -> float:
        """Bytes of the gradient of one of the matrices of all experts of the rank."""
        experts = (self._config.num_experts or 0) // (self._layout.expert or 1)
        return self.value * self._config.hidden_size * self._shape.expert_width * experts

    @property
    def _shared_inner(self) -> float:
        """Bytes of the inner activations of the shared expert. 0 without one."""
        width = self._config.moe_shared_expert_intermediate_size or 0
        return self.value * self._tokens * width / self._layout.tensor

    @property
    def _kept_inner(self) -> int:
        """Tensors of the inner width that an expert keeps."""
        return round(self._mlp / self._f)

    @cached_property
    def _feed_forward(self) -> float:
        """See `LayerTensors`. The input of the half is kept for the shared expert only."""
        _, sent, received = self._rows
        size = self._router + received + sent
        size += self._kept_inner * self._inner
        if self._shared_inner:
            size += self._entered + self._kept_inner * self._shared_inner
        return size

    @cached_property
    def _weights(self) -> tuple[float, float, float, float]:
        """See `LayerTensors`. The last two are those of the experts."""
        qkv, out, _, _ = super()._weights
        return qkv, out, self._halves * self._matrix, self._matrix

    @cached_property
    def pending_gradients(self) -> float:
        """See `LayerTensors`. Those of experts are accumulated before the others."""
        if not self._case.holds:
            return 0.0
        return sum(self._weights[:2]) * self.gradient_value / self.value

    def _compute_experts(self) -> tuple[float, float]:
        """Return what the gradient of one matrix of all experts allocates, and what is freed."""
        size = self._matrix
        if self._case.holds_outside:
            return size, 0.0
        converted = 2 * size if self._software.half else 0.0
        return size + converted, size + converted

    def _list_feed_forward_steps(self) -> Iterable[tuple[float, float]]:
        """See `LayerTensors`."""
        if self._shared_inner:
            # The shared expert is computed last, so its backward pass comes first.
            more = self._kept_inner * self._shared_inner
            yield 3 * self._shared_inner, 3 * self._shared_inner + more
            yield self.whole, 0.0
        dropped = self._dropped
        yield dropped, self._mask
        routed, sent, rows = self._rows
        # Each row's gradient, in two orders, and from the ranks of the experts.
        yield sent, sent
        yield sent, sent
        if self._travels:
            yield rows, sent
            yield rows, rows
        allocated, freed = self._compute_experts()
        inner = self._inner
        yield inner + allocated, rows + freed + inner
        left = self._kept_inner - 1
        if self._halves == 2:
            yield 2 * inner, inner + left * inner
            yield rows + allocated, freed + inner
            yield rows + allocated, freed + inner + rows
        else:
            yield inner, inner + left * inner
            yield rows + allocated, freed + inner
        # The rows that the experts read are not needed any more.
        yield rows, 2 * rows
        if self._travels:
            yield sent, rows
        yield sent, sent
        yield routed, sent
        # The router's gradient is in fp32, and is converted before it is added.
        both = routed * 4 / self.value + routed
        yield both, both + self._router
        if self._layout.tensor > 1 and not self._layout.sequence_parallel:
            yield self.whole, routed
        if self._shared_inner:
            yield 0.0, self.whole + self._entered
        yield 0.0, dropped


@dataclass(frozen=True)
class LayerCost:
    """What a layer needs."""

    times: type[LayerTimes]
    tensors: type[LayerTensors]


LAYERS = Table(
    "MLP",
    {
        "dense": LayerCost(LayerTimes, LayerTensors),
        "experts": LayerCost(MixtureTimes, MixtureTensors),
    },
)
"""Kind of MLP -> what a layer with attention and it needs."""
