"""Memory and time of a gated delta net on one rank, in place of those of attention.

The counts are those of PyTorch's operators (`megatron.model.gated_delta_net`) in 16 bits, which
compute convolution, delta rule and output norm in fp32. Kernels of fla-core move and keep less.

n: heads of queries and keys, m: heads of values, C: tokens of a chunk. Widths are d_k and d_v.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.config.table import Table
from megatron.extras.planner.cost.experts import (
    LAYERS,
    LayerCost,
    MixtureTensors,
    MixtureTimes,
)
from megatron.extras.planner.cost.kernels import (
    Gemm,
    estimate_gemm_seconds,
    estimate_memory_seconds,
)
from megatron.extras.planner.cost.layers import LayerTimes, Passes, Seconds
from megatron.extras.planner.cost.tensors import LayerTensors
from megatron.model.shape import ModelShape

_CHUNK = 64
"""C, as in `megatron.model.delta_rule`."""
_Counts = tuple[int, int, int, int, int, int]
"""Bytes for each n d_k, m d_k, m d_v, m C, m d_k d_v / C and n C of a token."""
KEPT: _Counts = (52, 16, 54, 16, 8, 8)
"""Bytes that the backward pass needs, without the layer's input."""
FORWARD: _Counts = (307, 49, 246, 52, 38, 17)
"""Bytes that the operators of a forward pass read and write, without the linear layers."""
BACKWARD: _Counts = (715, 142, 485, 166, 56, 0)
"""Bytes that those of a backward pass read and write."""
_NORM = 22
"""Bytes of `KEPT` for each m d_v that the output norm and the next product keep."""
_KERNELS = ((85, 5), (160, 11))
"""Kernels of the forward and of the backward pass: for any length, and for each chunk."""


@dataclass(frozen=True)
class DeltaNetSizes:
    """The sizes of a layer on one tensor-parallel rank."""

    keys: int
    """n."""
    values: int
    """m."""
    key_dim: int
    value_dim: int

    @property
    def parts(self) -> tuple[int, ...]:
        """Outputs of the six matrices that read the layer's input."""
        key, value = self.keys * self.key_dim, self.values * self.value_dim
        return key, key, value, value, self.values, self.values

    def count(self, counts: _Counts) -> float:
        """Return the bytes of a token."""
        n, m = self.keys, self.values
        units = (
            *(n * self.key_dim, m * self.key_dim, m * self.value_dim, m * _CHUNK),
            *(m * self.key_dim * self.value_dim / _CHUNK, n * _CHUNK),
        )
        return sum(each * unit for each, unit in zip(counts, units, strict=True))

    def list_products(self, chunks: int) -> list[Gemm]:
        """Return the products of matrices of the delta rule, which are in fp32."""
        pairs = Gemm(_CHUNK, _CHUNK, self.key_dim, self.keys * chunks, 4)
        of_state = Gemm(_CHUNK, self.value_dim, self.key_dim, self.values * chunks, 4)
        written = Gemm(self.key_dim, self.value_dim, _CHUNK, self.values * chunks, 4)
        scored = Gemm(_CHUNK, self.value_dim, _CHUNK, self.values * chunks, 4)
        # The system is solved for values and keys. Half of its matrix is zero.
        solved = Gemm(_CHUNK, self.value_dim + self.key_dim, _CHUNK // 2, scored.batch, 4)
        return [pairs, pairs, solved, of_state, written, of_state, scored]


def get_sizes(shape: ModelShape, tensor: int) -> DeltaNetSizes:
    """Return the sizes of a layer on one of `tensor` ranks."""
    config = shape.config
    return DeltaNetSizes(
        config.linear_num_key_heads // tensor,
        config.linear_num_value_heads // tensor,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


class _DeltaNetTimes(LayerTimes):
    """The times of a layer with a gated delta net."""

    def __init__(self, *arguments: Any) -> None:
        """Take what determines the times. See `LayerTimes`."""
        super().__init__(*arguments)
        # A rank has complete heads.
        self._sizes = get_sizes(self._shape, self._layout.tensor)
        # No norms, rotations and copies of queries and keys.
        self._q = self._k = self._v = 0

    def _list_projections(self) -> list[Gemm]:
        """See `LayerTimes`. Those of attention come first."""
        h = self._shape.config.hidden_size
        entries = [self._make_gemm(part, h) for part in self._sizes.parts]
        return [
            *entries,
            self._make_gemm(h, self._sizes.parts[2]),
            *super()._list_projections()[2:],
        ]

    def _list_entries(self) -> list[list[Gemm]]:
        """See `LayerTimes`."""
        products = self._list_projections()
        # The last product leaves the MLP. Layers with experts have times of their own for entries.
        number = len(self._sizes.parts)
        return [products[:number], products[number + 1 : -1]]

    def _estimate_core(self, window: int | None) -> Passes:
        """Estimate convolution, delta rule and output norm."""
        # The state passes through the chunks of a sample one after the other.
        chunks = -(-self._length // _CHUNK)
        products = self._sizes.list_products(self._tokens // _CHUNK or 1)
        gradients = [each for product in products for each in product.derive_backward()]
        seconds = []
        for each, counts, kernels in (
            (products, FORWARD, _KERNELS[0]),
            (gradients, BACKWARD, _KERNELS[1]),
        ):
            # The bytes of the products are among those that were counted.
            computed = sum(
                max(0.0, estimate_gemm_seconds(one, self._hardware) - self._read(one))
                for one in each
            )
            moved = estimate_memory_seconds(
                self._tokens * self._sizes.count(counts),
                self._hardware,
                kernels[0] + kernels[1] * chunks,
            )
            seconds.append(Seconds(attention=computed + moved))
        return Passes(*seconds)

    def _read(self, product: Gemm) -> float:
        return product.bytes / self._hardware.memory_rate

    def count_context_bytes(self) -> float:
        """Count the bytes of an exchange of heads: what is convolved, both rates, and results."""
        key, _, value, _, heads, _ = self._sizes.parts
        return self._tokens * (self._value * (2 * key + value + 2 * heads) + 4 * value)


class _DeltaNetMixtureTimes(_DeltaNetTimes, MixtureTimes):
    """The same with experts."""


class _DeltaNetTensors(LayerTensors):
    """The tensors of a layer with a gated delta net."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        """Take what determines the sizes. See `LayerTensors`."""
        super().__init__(*arguments, **others)
        self._sizes = get_sizes(self._shape, self._layout.tensor)
        self._gate = 0.0
        # The formulas of attention for matrices and entries hold with these two sizes: the input of
        # the output projection, and the results of all others together, which are q + 2 k there.
        bytes_of = self.value * self._tokens
        self._q = float(bytes_of * self._sizes.parts[2])
        self._k = self._v = (bytes_of * sum(self._sizes.parts) - self._q) / 2
        self._qkv = self._q + 2 * self._k
        self._result = self._q

    @property
    def _projected(self) -> float:
        """What a recomputed core reads: all projections but the gate."""
        return 2 * self._k * self._selective

    @cached_property
    def _core(self) -> float:
        """What convolution and delta rule keep."""
        return self._tokens * self._sizes.count(KEPT) - self._context_copies

    @cached_property
    def _context_copies(self) -> float:
        """What the output norm and the output projection keep."""
        return self._tokens * _NORM * self._sizes.parts[2]

    def _list_output_steps(self) -> Iterable[tuple[float, float]]:
        """Yield the steps of the output projection and of the output norm."""
        weight = self._compute_weight(self._weights[1], fused=self._software.fused_gradients)
        yield self._dropped + self._gathered, self._mask
        yield self._q, 0.0
        yield weight[0], weight[1] + self._dropped + self._gathered
        # The norm is computed in fp32, and its result is rounded for the product.
        # The gradients of the norm's input and of the gate are in fp32.
        wide = 4 * self._q / self.value
        yield 2 * wide, self._context_copies + self._q
        yield self._q, wide

    def _list_core_steps(self) -> Iterable[tuple[float, float]]:
        """Yield the steps from the gradient of the delta rule's result to the projections."""
        if self._selective:
            # What was dropped is computed again.
            yield self._core, 0.0
        # The gradients of scores and states exist beside them for a while.
        yield self._core / 3, self._core / 3
        # The gradient of the result is in fp32, and those of the projections are not.
        wide = 4 * self._q / self.value
        yield 2 * self._k, self._core + self._projected + wide


class _DeltaNetMixtureTensors(_DeltaNetTensors, MixtureTensors):
    """The same with experts."""


# Latent attention has other widths than attention, which the same classes read from the model.
LAYERS_BY_ATTENTION = Table(
    "attention",
    {
        "dot_product": LAYERS,
        "latent": LAYERS,
        "gated_delta_net": Table(
            "MLP",
            {
                "dense": LayerCost(_DeltaNetTimes, _DeltaNetTensors),
                "experts": LayerCost(_DeltaNetMixtureTimes, _DeltaNetMixtureTensors),
            },
        ),
    },
)
"""Kind of attention -> kind of MLP -> what a layer needs."""
