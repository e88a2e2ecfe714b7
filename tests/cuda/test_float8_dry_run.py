"""Steps in float8 on the fake GPU: dtypes, messages and bytes, as the planner counts them.

The model is the one of `fake_ranks.GPT`: h = 64, s = 32, b = 2. A step has two microbatches.
"""

from collections import Counter
from dataclasses import replace

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import PLAIN, Case, count_rounding_bytes, plan_case, run_case

from megatron.extras.planner.cost.float8 import (
    count_rounding,
    count_step_rounding,
    count_weight_scales,
    list_float8_linears,
    list_scale_messages,
)
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.dry_run.record import Collective, Product
from megatron.extras.planner.prediction import describe_layout, describe_software

LLAMA = "--glu-activation swiglu --no-add-bias-linear --ffn-hidden-size 96 --num-query-groups 2"
TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
ROWWISE = "--bf16 --fp8-format e4m3 --fp8-recipe rowwise"
LAST_IN_BF16 = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 0"
RUNS = {
    "tensor, rowwise, recomputed": Case(
        f"{ROWWISE} {LLAMA} --tensor-model-parallel-size 2 --checkpoint-activations", 2
    ),
    "tensor and context, shared groups, last layer in bf16": Case(
        f"{TENSORWISE} {LLAMA} --context-parallel-size 2 --tensor-model-parallel-size 4 "
        "--sequence-parallel "
        f"--num-layers 3 {LAST_IN_BF16}",
        8,
        7,
    ),
}
TOKENS = 64
MICROBATCHES = 2


@pytest.mark.parametrize("name", RUNS)
def test_messages_of_scales_are_those_that_the_planner_counts(name: str, on_fake_gpu: Call):
    case = replace(RUNS[name], flags=f"{RUNS[name].flags} --global-batch-size 4")
    plan = plan_case(case)
    layout = describe_layout(plan)
    float8 = describe_software(plan, load_hardware("h100")).float8
    assert float8 is not None
    layers = sum(map(float8.covers, range(plan.config.model.num_layers)))
    tokens = TOKENS // layout.context
    forward, backward = list_scale_messages(plan.shape, layout, float8, tokens)
    if layout.recompute == "full":
        forward *= 2
    ranks = {"tensor": layout.tensor, "context": layout.context}
    expected: Counter[tuple[int, int]] = Counter()
    for message in (*forward, *backward):
        expected[ranks[message.axis], message.bytes] += layers * MICROBATCHES
    numbers = count_weight_scales(list_float8_linears(plan.shape, layout.tensor), layers, float8)
    expected[case.world_size, 4 * numbers] += 1
    found = count_all_reduces(on_fake_gpu(run_case, case).step.collectives)
    found.subtract(
        count_all_reduces(on_fake_gpu(run_case, leave_out_float8(case)).step.collectives)
    )
    assert {key: count for key, count in found.items() if count} == expected


def leave_out_float8(case: Case) -> Case:
    flags = case.flags.replace(LAST_IN_BF16, "")
    for recipe in (TENSORWISE, ROWWISE):
        flags = flags.replace(recipe, "--bf16")
    return replace(case, flags=flags)


def count_all_reduces(collectives: dict[Collective, int]) -> Counter[tuple[int, int]]:
    """Return how often there are messages by their ranks and bytes."""
    found: Counter[tuple[int, int]] = Counter()
    for each, count in collectives.items():
        if each.kind == "all_reduce":
            found[each.ranks, each.size] += count
    return found


@pytest.mark.parametrize(
    ("flags", "ranks", "in_float8"),
    [
        (f"{TENSORWISE} --gradient-accumulation-fusion", 1, 3),
        (f"{TENSORWISE} --zero-stage 1", 2, 3),
        pytest.param(f"{TENSORWISE} --use-torch-compile", 1, 3, marks=pytest.mark.full),
        pytest.param(f"{TENSORWISE} --zero-stage 3", 2, 3, marks=pytest.mark.full),
        (f"{ROWWISE} --tensor-model-parallel-size 2", 2, 2),
        (f"{TENSORWISE} --tensor-model-parallel-size 2 --sequence-parallel", 2, 3),
    ],
)
def test_kernels_move_the_bytes_that_the_planner_counts(
    flags: str, ranks: int, in_float8: int, on_fake_gpu: Call
):
    """Each layer has five matrices, each with three products. There are two microbatches."""
    case = Case(f"{PLAIN} {flags} {LLAMA} --global-batch-size {4 * ranks}", ranks)
    plan = plan_case(case)
    layout = describe_layout(plan)
    microbatches = plan.get_num_microbatches(plan.batch_size.final)
    float8 = describe_software(plan, load_hardware("h100")).float8
    assert float8 is not None
    linears = list_float8_linears(plan.shape, layout.tensor)
    layers = plan.config.model.num_layers
    rounded = count_rounding(linears, TOKENS, float8, microbatches, layout)
    of_masters = count_step_rounding(linears, layers, layout.shard_size)
    moved, products = on_fake_gpu(count_rounding_bytes, case)
    sums = moved.pop("sums", 0)
    copies = moved.pop("copies", 0)
    expected = microbatches * layers * sum(each.bytes for each in rounded) + of_masters.bytes
    # Scales of tokens and of rows are left out.
    assert sum(moved.values()) == pytest.approx(expected, rel=0.05)
    # Scales of columns are repeated for torch's operator.
    assert copies < 0.05 * expected
    weights = layers * sum(each.weights for each in linears)
    # The first product becomes the sum: 2 bytes are read and 4 are written. Others are added to it.
    assert sums == ("fusion" in flags and (6 + 10 * (microbatches - 1)) * weights)
    counts: Counter[str] = Counter()
    for product, count in products.items():
        counts[product.left.partition("_")[0]] += count
    # The output layer has three products in bf16 or fp32.
    assert counts["float8"] == microbatches * layers * 5 * in_float8
    assert Product("float8_e4m3fn", "float8_e4m3fn", "bfloat16") in products
