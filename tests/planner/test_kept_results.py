"""Results that a recomputed layer keeps, and gradients in fp32, by hand.

`tests/cuda/test_predicted_memory.py` compares their sums with steps on fake GPUs.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from planner.published import estimate_memory, make_gpt, make_llama

from megatron.extras.planner.cost.layout import TRAINER, RankLayout, Software
from megatron.extras.planner.cost.tensors import TensorCase, TensorSizes, measure_tensors
from megatron.model import flops
from megatron.model.shape import ModelShape

H, F, TOKENS, HEADS = 4096, 11008, 2048, 32
BOTH = ("matmul", "attention")


def make_shape(groups: int = HEADS, dropout: float = 0.0) -> ModelShape:
    shape = make_llama(H, 4, HEADS, groups, F, TOKENS, 32000)
    config = replace(shape.config, hidden_dropout=dropout, attention_dropout=0.0)
    return replace(shape, config=config)


def measure(
    shape: ModelShape,
    layout: RankLayout | None = None,
    *,
    holds: bool = False,
    windowed: bool = False,
    **software: Any,
) -> TensorSizes:
    chosen: Software = replace(TRAINER, **software)
    layout = layout or RankLayout()
    return measure_tensors(TensorCase(shape, layout, chosen, holds, holds, windowed))


@pytest.mark.parametrize(
    ("kept", "bytes_of_a_token"),
    [
        ((), 0),
        # Queries, keys, values, gate, up, and the results of the output projection and of down.
        (("matmul",), 2 * (3 * H + 2 * F + 2 * H)),
        # The result, and an fp32 number of each head.
        (("attention",), 2 * H + 4 * HEADS),
        (BOTH, 2 * (6 * H + 2 * F) + 4 * HEADS),
    ],
)
def test_results_that_a_layer_keeps(kept, bytes_of_a_token):
    found = measure(make_shape(), kept_operators=kept)
    assert found.recomputed_layer == (2 * H + bytes_of_a_token) * TOKENS


def test_tensor_parallel_ranks_keep_complete_partial_sums():
    layout = RankLayout(tensor=4, sequence_parallel=True)
    found = measure(make_shape(), layout, kept_operators=("matmul",))
    # Its input is sharded.
    assert found.recomputed_layer == 2 * (H / 4 + 3 * H / 4 + 2 * F / 4 + 2 * H) * TOKENS


def test_attention_without_a_kernel_is_two_products():
    """A bias and grouped queries have no kernel, so torch multiplies in fp32."""
    shape = make_shape(groups=8)
    products = 2 * (H + 2 * H / 4 + 2 * F + 2 * H) * TOKENS
    core = 4 * HEADS * TOKENS * TOKENS + 4 * H * TOKENS

    def count(*kept: str, windowed: bool = True) -> float:
        found = measure(shape, kept_operators=kept, windowed=windowed)
        return found.recomputed_layer - 2 * H * TOKENS

    assert count(*BOTH) == count("matmul") == products + core
    assert count("attention") == 0
    assert count("matmul", windowed=False) == products


@pytest.mark.parametrize(
    ("dropout", "software", "size"),
    [
        (0.0, {"kept_operators": ("matmul",)}, 2 * H * TOKENS),
        (0.0, {"kept_operators": ("attention",)}, 0),
        # Dropout keeps a mask, so the recomputation reads the product before it.
        (0.1, {"kept_operators": ("matmul",)}, 0),
        (0.0, {"kept_operators": ("matmul",), "fused_gradients": True}, 0),
    ],
)
def test_the_last_product_may_stay_unread(dropout, software, size):
    assert measure(make_shape(dropout=dropout), **software).unread_result == size


def test_only_recomputed_layers_keep_results():
    shape = make_gpt(1024, 8, 16, 1024, 32000)
    software = replace(TRAINER, kept_operators=BOTH)
    plain = RankLayout(data=8)
    assert estimate_memory(shape, plain, software, 64) == estimate_memory(shape, plain, TRAINER, 64)
    half, full = (
        estimate_memory(shape, layout, software, 64)[0].total
        - estimate_memory(shape, layout, TRAINER, 64)[0].total
        for layout in (
            RankLayout(data=8, recompute="full", recomputed_share=Fraction(1, 2)),
            RankLayout(data=8, recompute="full"),
        )
    )
    assert 0 < half < full


def test_fsdp_holds_fused_gradients_in_fp32_if_it_sends_them():
    shape = make_shape()
    matrices = flops.count_layer_matrix_parameters(shape)
    plain, fused = (measure(shape, holds=True, fused_gradients=each) for each in (False, True))
    assert plain.after_backward == 2 * plain.stream + 2 * matrices
    assert fused.after_backward == 2 * plain.stream + 4 * matrices
    # That of the output matrix is not fused.
    assert plain.loss_gradient == fused.loss_gradient == 2 * 32000 * H


def test_fused_gradients_need_no_memory_of_their_own_if_sums_are_kept():
    plain, fused = (measure(make_shape(), fused_gradients=each) for each in (False, True))
    assert plain.after_backward == fused.after_backward == 2 * plain.stream
    assert fused.in_backward < plain.in_backward
    # The gradient of the output matrix is as without the flag.
    assert fused.loss_backward == plain.loss_backward
    assert fused.loss_kept == plain.loss_kept
