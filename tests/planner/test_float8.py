"""The cost of products in float8: speeds by shape, rounding, messages, layers that are left out."""

from dataclasses import replace

import pytest
from planner.other_trainers import OtherRounding
from planner.published import make_llama

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_search import format_flags, search_plan
from megatron.extras.planner.cost.float8 import (
    count_rounding,
    count_step_rounding,
    list_float8_linears,
    list_scale_messages,
)
from megatron.extras.planner.cost.hardware import list_hardware, load_hardware
from megatron.extras.planner.cost.kernels import Gemm, estimate_gemm_seconds
from megatron.extras.planner.cost.layers import LayerTimes, Passes
from megatron.extras.planner.cost.layout import TRAINER, Float8, RankLayout, StepJob
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.prediction import (
    describe_layout,
    describe_software,
    predict_plan,
)
from megatron.extras.step.float8.kind import warn_of_small_layers
from megatron.model.shape import ModelShape
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

H100 = load_hardware("h100")
LLAMA = make_llama(4096, 32, 32, 8, 14336, 8192, 128256)
OLD = OtherRounding()
"""PyTorch's operators, which rounded before this trainer had kernels."""
TENSORWISE = replace(TRAINER, float8=Float8(rounding=OLD))
ROWWISE = replace(TRAINER, float8=Float8(rowwise=True, rounding=OLD))
FUSED = replace(TRAINER, float8=Float8(rounding=OtherRounding(fused=True)))


@pytest.mark.parametrize(
    ("sizes", "bf16", "float8"),
    [
        ((8192, 8192, 8192), 585.23, 1125.51),
        ((65536, 8192, 7168), 575.12, 1082.75),
        ((65536, 3584, 8192), 546.31, 1141.38),
    ],
)
def test_products_are_faster_by_the_measured_factor(sizes, bf16, float8):
    """Measured on an H100 with 500 W (https://github.com/pytorch/FBGEMM/pull/2546)."""
    plain = Gemm(*sizes)
    seconds = estimate_gemm_seconds(plain, H100)
    fast = estimate_gemm_seconds(replace(plain, value=1, result=2, exact=False), H100)
    assert seconds / fast == pytest.approx(float8 / bf16, rel=0.07)
    exact = estimate_gemm_seconds(replace(plain, value=1, result=2), H100)
    assert 1.1 < exact / fast < 1.2


def test_short_inner_dimensions_gain_less():
    """Filling a tile's pipeline takes as long as in bf16."""
    gains = []
    for inner in (256, 1024, 4096, 16384):
        plain = Gemm(8192, 8192, inner)
        fast = replace(plain, value=1, result=2, exact=False)
        gains.append(estimate_gemm_seconds(plain, H100) / estimate_gemm_seconds(fast, H100))
    assert gains == sorted(gains)
    assert gains[0] < 1.6
    assert 1.95 < gains[-1] < 2


def test_devices_have_float8_at_twice_the_speed_of_bf16_or_not_at_all():
    found = {name for name in list_hardware() if load_hardware(name).float8_tflops is not None}
    assert found == {
        *("h100", "h100-96g", "h100-pcie", "h200", "gh200", "b200", "l40s", "rtx-4090")
    }
    for name in found:
        hardware = load_hardware(name)
        ratio = hardware.get_float8_peak() / hardware.get_peak(half=True)
        assert ratio == pytest.approx(2, rel=0.02), name
    with pytest.raises(ConfigError, match="a100-80g has no float8_tflops"):
        load_hardware("a100-80g").get_float8_peak()


def estimate(software, shape: ModelShape = LLAMA, layout: RankLayout | None = None) -> Passes:
    return LayerTimes(shape, layout or RankLayout(), software, H100).estimate_layer()


def test_a_layer_in_float8_has_shorter_products_and_rounds():
    plain, tensorwise, rowwise = map(estimate, (TRAINER, TENSORWISE, ROWWISE))
    assert plain.backward.rounding == plain.forward.scales == 0
    for one, two in ((plain.forward, tensorwise.forward), (plain.backward, tensorwise.backward)):
        assert 1.5 < one.gemm / two.gemm < 2
        assert (one.attention, one.pointwise) == (two.attention, two.pointwise)
        assert two.rounding > 0
        assert two.scales == 0
    # The product for a weight's gradient is in bf16, and its operands are not rounded.
    assert tensorwise.forward.gemm == rowwise.forward.gemm
    assert tensorwise.backward.gemm < rowwise.backward.gemm < plain.backward.gemm
    assert rowwise.backward.rounding < tensorwise.backward.rounding
    # A compiler makes one kernel of two, and the kernels of the scales stay.
    assert estimate(FUSED).forward.rounding < 0.7 * tensorwise.forward.rounding


def test_a_layer_whose_complete_size_is_no_multiple_of_16_is_not_rounded():
    odd = replace(LLAMA, config=replace(LLAMA.config, ffn_hidden_size=14344))
    assert [each.complete for each in list_float8_linears(odd, 1)] == [(6144, 4096), (4096, 4096)]
    # The shard of a size that is a multiple may be odd.
    even = replace(LLAMA, config=replace(LLAMA.config, ffn_hidden_size=14352))
    assert len(list_float8_linears(even, 2)) == 4


def count(layout: RankLayout, float8: Float8, shape: ModelShape = LLAMA) -> tuple[int, int]:
    tokens = 8192 // layout.context
    forward, backward = list_scale_messages(shape, layout, float8, tokens)
    return len(forward), len(backward)


def test_messages_of_scales():
    tensorwise, rowwise = Float8(), Float8(rowwise=True)
    assert count(RankLayout(), tensorwise) == (0, 0)
    assert count(RankLayout(tensor=8), tensorwise) == (2, 2)
    assert count(RankLayout(tensor=8), rowwise) == (2, 2)
    # Each activation.
    assert count(RankLayout(context=2), tensorwise) == (4, 4)
    assert count(RankLayout(context=2), rowwise) == (0, 0)
    assert count(RankLayout(tensor=2, context=2), tensorwise) == (6, 6)
    # Ranks that share query groups add up gradients of keys and values.
    assert count(RankLayout(tensor=16), tensorwise) == (2, 3)
    forward, _ = list_scale_messages(LLAMA, RankLayout(tensor=8), rowwise, 8192)
    assert {each.bytes for each in forward} == {4 * 8192}
    layer = estimate(TENSORWISE, layout=RankLayout(tensor=8))
    # Trees have a latency of 2 log2(8) hops of 5 microseconds.
    assert layer.forward.scales == pytest.approx(2 * 6 * 5e-6, rel=1e-3)


def predict_with_layers(layers: range | None, **more) -> StepPrediction:
    software = replace(TRAINER, float8=Float8(layers=layers, rounding=OLD))
    return StepPrediction(StepJob(LLAMA, RankLayout(**more), 64, software, H100))


@pytest.mark.parametrize(
    "more",
    [{}, {"recompute": "full"}, {"pipeline": 4, "zero_stage": 1, "data": 2}],
    ids=["one rank", "recomputed", "pipeline"],
)
def test_layers_that_are_left_out(more):
    """The step with all layers but two is between those with all and with none."""
    every = predict_with_layers(None, **more)
    none = StepPrediction(replace(every.job, software=TRAINER))
    assert predict_with_layers(range(32), **more).seconds == pytest.approx(every.seconds)
    nothing = predict_with_layers(range(0), **more)
    for rank, (left, right) in enumerate(zip(nothing.rank_seconds, none.rank_seconds, strict=True)):
        assert left.total == pytest.approx(right.total), rank
    most = predict_with_layers(range(1, 31), **more)
    sums = [sum(each.gemm for each in step.rank_seconds) for step in (every, most, none)]
    assert sums[1] - sums[0] == pytest.approx((sums[2] - sums[0]) * 2 / 32)
    # Layers without float8 keep larger inputs, and those with it need memory to round.
    low, high = sorted((every.peak_bytes, none.peak_bytes))
    assert 0.99 * low <= most.peak_bytes <= 1.01 * high


FLOAT8 = "--fp8-format hybrid --fp8-recipe tensorwise"
RUN = (
    "--preset llama3-8b --bf16 --global-batch-size 4 --micro-batch-size 1 --train-iters 10 "
    "--lr 1e-4 --vocab-size 128256 --num-layers 4 "
)


def make_plan(flags: str) -> Plan:
    loaded = load_config((RUN + flags).split())
    plan = resolve(loaded.config, 2, loaded.origin)
    plan.raise_on_errors()
    return plan


def test_the_search_proposes_float8_only_if_it_is_allowed():
    plan = make_plan("")
    found = search_plan(plan, H100)
    every = (*found.result.fitting, *found.result.uncertain, found.configured)
    assert all(each.job.software.float8 is None for each in every)
    both = search_plan(plan, H100, allow_fp8=True).result
    assert len(both.fitting) > len(found.result.fitting)
    for wanted in (False, True):
        best = next(
            each for each in both.fitting if (each.job.software.float8 is not None) == wanted
        )
        flags = format_flags(plan, best.job.layout, float8=wanted)
        again = predict_plan(make_plan(flags), H100)
        assert (again.seconds, again.peak_bytes) == (best.seconds, best.peak_bytes)
        assert ("--fp8-recipe tensorwise" in flags) == wanted


@pytest.mark.parametrize(
    ("flags", "hardware", "reason"),
    [
        ("", "a100-80g", "a100-80g has no float8 products"),
        (
            "--experimental-attention-variant gated_delta_net --linear-attention-freq 2",
            "h100",
            "the model of costs has no float8 for gated delta nets; leave it out.$",
        ),
        ("--fp16 --no-bf16", "h100", "cannot be combined with --fp16"),
    ],
)
def test_the_search_says_why_it_cannot_propose_float8(flags, hardware, reason):
    with pytest.raises(ConfigError, match=reason):
        search_plan(make_plan(flags), load_hardware(hardware), allow_fp8=True)


def test_gradients_that_are_added_in_fp32_may_be_in_float8():
    found = search_plan(make_plan("--gradient-accumulation-fusion"), H100, allow_fp8=True).result
    recipes = {each.job.software.float8 for each in found.fitting}
    assert recipes == {None, Float8()}


def make_small(hidden: int, layers: int, inner: int) -> ModelShape:
    return make_llama(hidden, layers, hidden // 64, hidden // 64, inner, 2048, 50304)


@pytest.mark.parametrize(
    ("shape", "tokens", "milliseconds"),
    [
        (make_llama(4096, 32, 32, 8, 14336, 4096, 128256), 4096, (31.8, 15.0, 24.8, 8.5)),
        (make_small(2048, 24, 5504), 8192, (14.9, 9.5, 10.1, 4.9)),
        (make_small(768, 12, 2048), 16384, (4.8, 3.4, 3.0, 1.7)),
    ],
    ids=["8B", "1.3B", "125M"],
)
def test_kernels_round_a_microbatch_in_the_time_of_their_bytes(shape, tokens, milliseconds):
    """At 4.24 TB/s, which an H200 copies with. The page has the numbers (docs/float8.md)."""
    linears = list_float8_linears(shape, 1)

    def count_milliseconds(float8: Float8, layout: RankLayout) -> float:
        passes = count_rounding(linears, tokens, float8, 8, layout)
        of_masters = count_step_rounding(linears, 1, layout.shard_size).bytes / 8
        size = sum(each.bytes for each in passes) + of_masters
        return shape.config.num_layers * size / 4.24e12 * 1e3

    # Before, nothing was kept, and other kernels transposed. A compiler fused two kernels.
    found = [
        count_milliseconds(Float8(rowwise=rowwise, rounding=rounding), RankLayout())
        for rowwise in (False, True)
        for rounding in (OtherRounding(fused=True), None)
    ]
    assert found == pytest.approx(milliseconds, abs=0.05)
    if tokens == 4096:
        # With ZeRO 3, weights are rounded for each pass.
        sharded = RankLayout(data=8, zero_stage=3)
        assert count_milliseconds(Float8(), sharded) == pytest.approx(22.9, abs=0.1)
        assert count_milliseconds(Float8(rounding=OLD), RankLayout()) == pytest.approx(
            56.9, abs=0.1
        )


@pytest.mark.parametrize(
    ("flags", "rowwise", "tokens_per_second", "error"),
    [
        ("--no-gradient-accumulation-fusion", False, 9051, -0.07),
        ("--gradient-accumulation-fusion", True, 9152, -0.11),
    ],
)
def test_the_old_rounding_and_the_measured_steps(flags, rowwise, tokens_per_second, error):
    """A measured time of the old kernels explains most of two steps of 8B on an H200, not all.

    Rounding 8,192 x 4,096 values took 0.167 ms (docs/gpu_results.md). One kernel found the largest
    value, one multiplied by the scale, and one converted, which moved 9 bytes a value. Kernels on
    single numbers take the rest. Nothing is fitted on the two steps.
    """
    h200 = load_hardware("h200")
    moved = 9 * 8192 * 4096 / h200.memory_rate
    slowness = (0.167e-3 - 13 * h200.launch_seconds) / moved
    assert slowness == pytest.approx(1.61, abs=0.01)
    run = (
        "--preset llama3-8b --bf16 --train-iters 9 --lr 1e-4 --seq-length 4096 "
        "--micro-batch-size 1 --global-batch-size 8 --use-torch-compile "
        "--cross-entropy-loss-fusion --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
        f"--adam-beta2 0.95 --no-adamw-fusion {flags}"
    )
    loaded = load_config(run.split())
    plan = resolve(loaded.config, 1, loaded.origin)
    plan.raise_on_errors()
    float8 = Float8(rowwise=rowwise, rounding=OLD)
    software = replace(describe_software(plan, h200), float8=float8)
    layout = describe_layout(plan)
    step = StepPrediction(StepJob(plan.shape, layout, 8, software, h200))
    linears = list_float8_linears(plan.shape, 1)
    size = sum(each.bytes for each in count_rounding(linears, 4096, float8, 8, layout))
    slow = (slowness - 1) * 8 * 32 * size / h200.memory_rate
    measured = 8 * 4096 / tokens_per_second
    assert (step.seconds + slow) / measured - 1 == pytest.approx(error, abs=0.005)


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ("--hidden-size 768 --num-attention-heads 12 --num-query-groups 12", True),
        ("--hidden-size 768 --num-attention-heads 12 --num-query-groups 12 --fp8-emulate", False),
        ("", False),
    ],
)
def test_layers_that_hardly_gain_get_a_warning(flags, warns):
    found = list(warn_of_small_layers(make_plan(f"{FLOAT8} {flags}")))
    assert ["9 % of a layer" in each.text for each in found] == [True] * warns


def test_layers_from_which_float8_pays():
    """Below the limit of the warning, the predicted gain of a layer is less than 9 %."""
    gains = []
    for hidden, inner in ((768, 2048), (1024, 2816), (2048, 5632), (4096, 14336)):
        shape = make_llama(hidden, 12, hidden // 64, hidden // 64, inner, 4096, 50304)
        # The default kernels of an H200.
        fused = replace(
            TRAINER, fused_gradients=True, fused_gate=True, fused_rotation=True, cudnn=True
        )
        float8 = replace(fused, float8=Float8())
        layout = RankLayout(micro_batch=2)
        plain, rounded = (
            LayerTimes(shape, layout, each, load_hardware("h200"), microbatches=8).estimate_layer()
            for each in (fused, float8)
        )
        seconds = [each.forward.total + each.backward.total for each in (plain, rounded)]
        gains.append(seconds[0] / seconds[1])
    assert gains == sorted(gains)
    assert gains[0] < 1.09 < gains[2]
    assert gains[-1] > 1.3
