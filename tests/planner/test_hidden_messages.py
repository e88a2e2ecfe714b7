"""Messages that overlap with matrix products, and with attention of context-parallel ranks."""

from dataclasses import replace

import pytest
from planner.published import make_llama

from megatron.extras.planner.cost.communication import (
    estimate_added_seconds,
    estimate_collective_seconds,
    estimate_message_seconds,
)
from megatron.extras.planner.cost.hardware import Hardware, load_hardware
from megatron.extras.planner.cost.kernels import Gemm, estimate_gemm_seconds
from megatron.extras.planner.cost.layers import LayerTimes
from megatron.extras.planner.cost.layout import TRAINER, RankLayout, Software

SHAPE = make_llama(8192, 48, 64, 8, 22016, 4096, 32000)
A100 = load_hardware("a100-80g")
FAST = replace(A100, node_gb_per_second=1e9, hop_seconds=0.0)
SLOW = replace(A100, node_gb_per_second=1e-3)
FREE = replace(TRAINER, contention=0.0)
"""Hidden communication costs nothing."""


def count_messages(
    sequence_parallel: bool, hardware: Hardware = FAST, software: Software = FREE
) -> tuple[float, float]:
    """Return what a layer waits for in both passes, in messages of one pass around the ring."""
    layout = RankLayout(tensor=8, sequence_parallel=sequence_parallel)
    layer = LayerTimes(SHAPE, layout, software, hardware).estimate_layer()
    once = estimate_collective_seconds(2 * 4096 * 8192, 8, hardware)
    return layer.forward.tensor / once, layer.backward.tensor / once


def test_products_hide_four_of_ten_messages() -> None:
    # An all-reduce is two passes around the ring. Both of the backward pass are hidden here.
    assert count_messages(sequence_parallel=True) == pytest.approx((4, 2))
    assert count_messages(sequence_parallel=False) == pytest.approx((4, 0))
    # Nothing hides messages that take much longer than the products.
    assert count_messages(sequence_parallel=True, hardware=SLOW) == pytest.approx((4, 6), rel=1e-3)
    assert count_messages(sequence_parallel=False, hardware=SLOW) == pytest.approx((4, 4), rel=1e-3)


def test_each_message_is_hidden_by_its_own_product() -> None:
    """The products of a layer together are longer than all messages, but one of them is not."""
    narrow = make_llama(8192, 48, 64, 8, 512, 4096, 32000)
    layout = RankLayout(tensor=8)
    hardware = replace(A100, node_gb_per_second=2 * A100.node_gb_per_second)
    layer = LayerTimes(narrow, layout, FREE, hardware).estimate_layer()
    reduced = estimate_collective_seconds(2 * 4096 * 8192, 8, hardware, passes=2)
    # Queries, keys and values: 64 + 2 x 8 heads of 128. The MLP has two matrices of 512 columns.
    products = [Gemm(8192, columns // 8, 4096) for columns in (80 * 128, 2 * 512)]
    seconds = [estimate_gemm_seconds(each, A100) for each in products]
    assert seconds[1] < reduced < seconds[0]
    assert layer.backward.tensor == pytest.approx(reduced - seconds[1])


def test_hidden_messages_slow_the_computation() -> None:
    assert estimate_added_seconds(3.0, 2.0, 0.0) == 1.0
    assert estimate_added_seconds(2.0, 3.0, 0.0) == 0.0
    assert estimate_added_seconds(2.0, 3.0, 0.15) == pytest.approx(0.3)
    _, hidden = count_messages(sequence_parallel=True, software=TRAINER)
    assert hidden == pytest.approx(2 + 4 * TRAINER.contention)


def test_half_of_the_keys_travel_during_attention_of_the_early_part() -> None:
    layout = RankLayout(context=4)
    # Keys and values of 8 groups of 128, in 16 bits.
    size = 2 * 2 * 8 * 128 * SHAPE.config.seq_length

    def count(hardware: Hardware, layout: RankLayout = layout) -> tuple[float, float]:
        layer = LayerTimes(SHAPE, layout, FREE, hardware).estimate_layer()
        half = estimate_collective_seconds(size / 2, 4, hardware)
        return layer.forward.tensor / half, layer.backward.tensor / half

    assert count(FAST) == pytest.approx((1, 1))
    # The first of eight parts has a sixteenth of its rank's work, which takes less time.
    assert count(SLOW) == pytest.approx((2, 2), rel=1e-3)
    core = LayerTimes(SHAPE, layout, FREE, A100).estimate_layer().forward.attention
    medium = replace(A100, node_gb_per_second=A100.node_gb_per_second / 64)
    half = estimate_collective_seconds(size / 2, 4, medium)
    assert core / 16 < half
    assert count(medium)[0] == pytest.approx(2 - core / 16 / half)
    # Heads are exchanged before attention begins.
    exchanged = LayerTimes(SHAPE, replace(layout, exchange_heads=True), FREE, FAST)
    assert exchanged.estimate_layer().forward.tensor == pytest.approx(
        estimate_collective_seconds(exchanged.count_context_bytes(), 4, FAST)
    )


@pytest.mark.parametrize(("stride", "is_inside"), [(1, True), (7, True), (8, False), (64, False)])
def test_messages_stay_in_a_node_of_eight_up_to_a_stride_of_seven(
    stride: int, is_inside: bool
) -> None:
    network = A100.network
    bandwidth = network.node_bandwidth if is_inside else network.network_bandwidth
    seconds = estimate_message_seconds(1e9, stride, A100)
    assert seconds == pytest.approx(1e9 / bandwidth + network.hop_seconds)
