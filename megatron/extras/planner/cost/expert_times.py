"""The time of a layer with experts on one rank. The notation is that of `cost.layers`.

n tokens are routed by a rank, N = n k rows are sent, and m are received by the fullest rank. All
ranks wait for that rank, so its rows decide.
"""

import math

from megatron.extras.planner.cost.collectives import estimate_all_to_all_seconds
from megatron.extras.planner.cost.experts import count_message_bytes, count_rows
from megatron.extras.planner.cost.kernels import (
    Gemm,
    estimate_gemm_seconds,
    estimate_memory_seconds,
)
from megatron.extras.planner.cost.layers import LayerTimes, Passes, Seconds

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
_GATE = 8
"""The same for an inner element of a gated expert, as in `cost.layers`."""


class MixtureTimes(LayerTimes):
    """The times of layers with experts."""

    @property
    def _mlp_width(self) -> int:
        """Width of the shared expert, which is an MLP. 0 without one."""
        return self._shape.config.moe_shared_expert_intermediate_size or 0

    def estimate_layer(self, window: int | None = None) -> Passes:
        """See `LayerTimes`."""
        return super().estimate_layer(window) + self._estimate_experts()

    def _list_projections(self) -> list[Gemm]:
        h = self._shape.config.hidden_size
        attention = super()._list_projections()[:2]
        if not self._f:
            return attention
        return [*attention, self._make_gemm(self._mlp_in, h), self._make_gemm(h, self._f)]

    def _estimate_tensor_parallel(self) -> Passes:
        """Estimate the messages of attention, and those that divide and join tokens."""
        if self._layout.tensor == 1:
            return Passes(Seconds(), Seconds())
        size = self._value * self._tokens * self._shape.config.hidden_size
        waiting = 1 - self._software.hidden_tensor
        # Attention has an all-reduce in each pass, or two messages of the same bytes. The shared
        # expert has as many.
        halves = 2 if self._f else 1
        forward = halves * self._time_collective(size, passes=2)
        if not self._layout.sequence_parallel:
            forward += self._time_collective(size, passes=1)
        return Passes(Seconds(tensor=forward * waiting), Seconds(tensor=forward * waiting))

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
        copied += _RECEIVED_COPIES * exchanged * received * h + _GATE * received * f
        traffic = self._software.pointwise * (self._value * copied + _ROUTER_BYTES * own * h)
        forward, backward = (
            estimate_memory_seconds(share * traffic, self._hardware, kernels)
            for share, kernels in ((1 / 3, _ROUTER_KERNELS), (2 / 3, _ROUTER_KERNELS // 2))
        )
        size = count_message_bytes(self._shape, layout, self._value, self._length)
        if self._software.sends_token_once:
            ranks = layout.expert or 1
            # Of a token's k experts, some are on the same rank.
            k = config.moe_router_topk
            size *= ranks / k * (1 - (1 - 1 / ranks) ** k)
        # There and back in each pass.
        messages = 2 * estimate_all_to_all_seconds(size, layout.expert or 1, self._hardware)
        return Passes(
            Seconds(gemm=self._time_products(products), pointwise=forward, experts=messages),
            Seconds(gemm=self._time_products(gradients), pointwise=backward, experts=messages),
        )

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
