"""The time of one kernel, by the roofline of a device.

A kernel takes as long as its computation or its memory traffic, whichever is longer, and at least
the time of a launch. Matrix products also lose time at the edges of their tiles and in the last
wave of tiles (NVIDIA, "Matrix Multiplication Background User's Guide").
"""

import math
from dataclasses import dataclass
from functools import cache

from megatron.extras.planner.cost.hardware import Hardware

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.78), (64, 128, 0.78))
"""Rows and columns of a tile, and its speed relative to the largest. Small tiles reuse less."""
_ALIGNED = 64
"""Elements of 2 bytes in a cache line of 128 bytes."""
_EVEN = 0.35
_ODD = 0.155
"""Part of full speed with sizes that are even but no multiple of 8, and with odd ones. Measured on
an H200: 0.31 to 0.37 with 2,730 columns, and 0.13 to 0.18 with 50,257."""
_EXACT_SUMS = 1.15
"""Time of a product in float8 relative to one that adds up with fewer bits. Measured on training
shapes: 1.1 to 1.2 (https://github.com/pytorch/ao/issues/2377)."""
_HEAD = 16
_CUDNN_HEAD = 64
"""Width of a head that takes as long as what a kernel of attention does apart from it. That of
cuDNN's was measured on an H200."""
_WAVE_LOSS = 0.5
"""Part of the idle time in the last wave that is not filled by splitting tiles along k."""


@dataclass(frozen=True)
class Gemm:
    """`batch` products of an m x k and a k x n matrix."""

    m: int
    n: int
    k: int
    batch: int = 1
    value: int = 2
    """Bytes of an element: 1 in float8, 2 in half precision, and 4 in fp32."""
    result: float | None = None
    """Bytes that are read and written for an element of the result. Default: `value`."""
    exact: bool = True
    """Whether a product in float8 adds up in fp32. Otherwise it adds up with fewer bits, which is
    faster."""

    @property
    def flops(self) -> int:
        """FLOPs. A multiply-add counts as 2."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """Bytes that are read and written at least once."""
        factors = self.value * (self.m * self.k + self.k * self.n)
        result = self.value if self.result is None else self.result
        return self.batch * (factors + result * self.m * self.n)

    def derive_backward(self, gradient: float | None = None) -> "tuple[Gemm, Gemm]":
        """Return the products of the backward pass, for the input and for the weight.

        Args:
            gradient: Bytes that are read and written for an element of the weight's gradient.
                Default: `value`.
        """
        return (
            Gemm(self.m, self.k, self.n, self.batch, self.value),
            Gemm(self.k, self.n, self.m, self.batch, self.value, gradient),
        )


@cache
def compute_gemm_utilisation(
    gemm: Gemm, multiprocessors: int, depth: int = 192, splits: int = 1, aligned: int = _ALIGNED
) -> float:
    """Return the speed of a matrix product relative to a very large one, above 0 and at most 1.

    The library chooses the best tile. Tiles at the edges are computed completely, and so is the
    last wave, in which some multiprocessors have no tile. The last four arguments are those of
    `Hardware`.
    """
    # Filling takes the same time in float8, in which a multiprocessor computes twice as much.
    if gemm.value == 1:
        depth *= 2
    best = 0.0
    for rows, columns, speed in _TILES:
        # Tiles at the edges are padded.
        down = math.ceil(gemm.m / rows)
        across = math.ceil(gemm.n / columns)
        edges = gemm.m * gemm.n / (down * rows * across * columns)
        for parts in (1, 2, 4)[:splits]:
            waves = gemm.batch * down * across * parts / multiprocessors
            quantised = float(math.ceil(waves))
            # With less than a wave, multiprocessors stay idle.
            if quantised > 1:
                quantised = waves + _WAVE_LOSS * (quantised - waves)
            inner = gemm.k / parts
            # The fastest tile is the one that cuBLAS chooses, or nearly so.
            best = max(best, speed * edges * waves / quantised * inner / (inner + depth))
    return best * _measure_alignment(gemm, aligned)


def _measure_alignment(gemm: Gemm, aligned: int) -> float:
    """Return the part of full speed at which the rows of the matrices are read."""
    if gemm.value == 4:
        # Without Tensor Cores the computation takes much longer than the reads.
        return 1.0
    if gemm.value == 1:
        # Operands are padded, and stored by their inner dimension.
        return _rate_alignment(max(16, math.gcd(gemm.k, 2 * _ALIGNED)) // 2, aligned)
    divisor = min(math.gcd(size, _ALIGNED) for size in (gemm.n, gemm.k))
    return _rate_alignment(divisor, aligned)


def _rate_alignment(divisor: int, aligned: int) -> float:
    """Return the part of full speed for a divisor of the sizes, in units of 2 bytes."""
    if divisor >= aligned:
        return 1.0
    # Tensor Cores need multiples of 8 elements, which are 16 bytes. Below that they are not used
    # well at all. In between, each row crosses more cache lines than it fills.
    if divisor < 8:
        return _ODD if divisor == 1 else _EVEN
    return 0.55 + 0.45 * math.log2(divisor / 8) / 3


def estimate_gemm_seconds(gemm: Gemm, hardware: Hardware) -> float:
    """Return the seconds of a matrix product."""
    if gemm.value == 1:
        # It reaches the share of the peak that a product in bf16 reaches. Measured on an H100 with
        # 500 W: 1.88 to 2.09 times the speed of bf16 (https://github.com/pytorch/FBGEMM/pull/2546).
        peak = hardware.get_float8_peak() / (_EXACT_SUMS if gemm.exact else 1)
    else:
        peak = hardware.get_peak(half=gemm.value == 2)
    utilisation = compute_gemm_utilisation(
        gemm,
        hardware.multiprocessors,
        hardware.gemm_depth,
        hardware.gemm_splits,
        hardware.gemm_aligned,
    )
    rate = peak * hardware.gemm_share * utilisation
    # Tensors that fit in the cache are read faster. This matters for small kernels only.
    memory = gemm.bytes / hardware.memory_rate
    return max(gemm.flops / rate, memory, hardware.launch_seconds)


def estimate_memory_seconds(traffic: float, hardware: Hardware, kernels: int = 1) -> float:
    """Return the seconds of `kernels` pointwise kernels that move `traffic` bytes together."""
    return max(traffic / hardware.memory_rate, kernels * hardware.launch_seconds)


def estimate_flash_seconds(
    flops: float,
    head_dim: int,
    hardware: Hardware,
    *,
    half: bool = True,
    keys: float = math.inf,
    cudnn: bool = False,
) -> float:
    """Return the seconds of an attention kernel that keeps no scores in memory.

    Args:
        flops: FLOPs that it computes. Of a causal mask, they are half of the square.
        head_dim: Width of a head. Narrow heads have short products, which are slower.
        hardware: The device.
        half: Whether it computes in half precision.
        keys: Tokens that a query may see at most.
        cudnn: Whether it is cuDNN's kernel, if the hardware has a share for it.
    """
    share = hardware.attention_share
    filled = _HEAD
    if cudnn and hardware.cudnn_attention_share is not None:
        share = hardware.cudnn_attention_share
        filled = _CUDNN_HEAD
    # A head of 128 has the share of the hardware file, and narrower ones less.
    width = min(1.0, head_dim / (head_dim + filled) * (128 + filled) / 128)
    rate = hardware.get_peak(half=half) * share * width
    seconds = flops / rate * (1 + (hardware.attention_fill or 0.0) / keys)
    return max(seconds, hardware.launch_seconds)
