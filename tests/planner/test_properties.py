"""What holds for each layout: flags of a search, sums of parts, and the direction of changes."""

import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
from planner.published import estimate_memory, make_gpt

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_cost import list_breakdown
from megatron.extras.planner.commands.plan_search import (
    format_flags,
    predict_explained,
    search_plan,
)
from megatron.extras.planner.cost.hardware import list_hardware, load_hardware
from megatron.extras.planner.cost.layout import TRAINER, RankLayout, StepJob
from megatron.extras.planner.cost.search import SearchSpace, list_divisors, search_layouts
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.prediction import predict_plan
from megatron.extras.step.engines import choose_engine
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

BASE = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--vocab-size 50257 --bf16 --train-iters 100 --lr 1e-4 --micro-batch-size 1 "
)


def make_plan(flags: str, world_size: int) -> Plan:
    loaded = load_config(shlex.split(BASE + flags))
    plan = resolve(loaded.config, world_size, loaded.origin)
    assert plan.errors == ()
    return plan


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--global-batch-size 64", 8),
        # The padding of the vocabulary depends on the tensor-parallel size.
        ("--global-batch-size 16 --make-vocab-size-divisible-by 1 --hidden-size 4096", 16),
        ("--global-batch-size 32 --vocab-size 2 --make-vocab-size-divisible-by 1", 32),
        # No tensor-parallel ranks can share this sequence.
        ("--global-batch-size 16 --seq-length 1001", 16),
        ("--global-batch-size 16 --num-query-groups 2 --optimizer muon", 16),
        (
            "--global-batch-size 16 --num-query-groups 1 --qk-norm full --normalization RMSNorm",
            16,
        ),
        # Each size of a ramp-up must fit.
        ("--global-batch-size 64 --rampup-batch-size 8 8 1000", 8),
        ("--global-batch-size 32 --deepspeed --num-layers 48 --hidden-size 6144", 32),
        # The flags of a layout undo those of the command.
        ("--global-batch-size 64 --checkpoint-activations --checkpoint-fraction 1/3", 16),
        (
            "--global-batch-size 16 --pipeline-model-parallel-size 4 --recompute-attention-core "
            "--pp-partition-method parameters --hidden-size 4096",
            8,
        ),
        (
            "--global-batch-size 64 --tensor-model-parallel-size 2 --sharding-strategy fsdp "
            "--partition-activations",
            8,
        ),
        (
            "--global-batch-size 32 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 3",
            8,
        ),
    ],
)
def test_a_plan_with_the_flags_of_a_layout_has_its_prediction(flags, world_size):
    hardware = load_hardware("a100-40g")
    plan = make_plan(flags, world_size)
    found = search_plan(plan, hardware)
    assert found.result.fastest
    for prediction in (*found.result.fastest, found.configured):
        chosen = format_flags(plan, prediction.job.layout)
        changed = make_plan(f"{flags} {chosen}", world_size)
        assert choose_engine(changed.config).list_unsupported(changed) == []
        again = predict_plan(changed, hardware)
        assert again.job.layout.describe() == prediction.job.layout.describe()
        assert again.seconds == prediction.seconds
        assert again.peak_bytes == prediction.peak_bytes


def test_the_fastest_layout_loses_nothing_when_it_is_explained():
    hardware = load_hardware("a100-40g")
    plan = make_plan("--global-batch-size 64", 8)
    best = search_plan(plan, hardware).result.fastest[0]
    layout = best.job.layout
    text = (
        f"tp={layout.tensor},pp={layout.pipeline},micro-batch={layout.micro_batch},"
        f"virtual={layout.virtual},zero={layout.zero_stage},recompute={layout.recompute}"
    )
    assert predict_explained(text, plan, hardware).seconds == best.seconds


def iterate_jobs(count: int) -> Iterator[StepJob]:
    """Yield steps of random models in random layouts on random hardware."""
    draw = random.Random(0)
    while count:
        heads = draw.choice([8, 16, 32])
        layers = draw.choice([4, 8, 12, 31])
        shape = make_gpt(
            heads * draw.choice([64, 128]),
            layers,
            heads,
            draw.choice([128, 2048, 8192]),
            draw.choice([1024, 51200, 250880]),
        )
        tensor, pipeline = draw.choice([1, 1, 2, 8]), draw.choice([1, 1, 2, 4])
        virtual = 1
        if pipeline > 1 and layers % pipeline == 0:
            virtual = draw.choice(list_divisors(layers // pipeline))
        layout = RankLayout(
            tensor=tensor,
            pipeline=pipeline,
            data=draw.choice([1, 2, 8, 64]),
            micro_batch=draw.choice([1, 2, 4]),
            virtual=virtual,
            recompute=draw.choice(["none", "full"]),
            recomputed_share=draw.choice([Fraction(1), Fraction(1, 3)]),
            sequence_parallel=tensor > 1 and draw.random() < 0.7,
            zero_stage=draw.choice([0, 1, 2, 3]),
        )
        microbatches = draw.choice([1, pipeline, 3 * pipeline + 1, 40])
        batch = layout.data * layout.micro_batch * microbatches
        yield StepJob(shape, layout, batch, TRAINER, load_hardware(draw.choice(list_hardware())))
        count -= 1


def test_the_parts_of_a_step_are_the_step():
    for job in iterate_jobs(60):
        step = StepPrediction(job)
        assert sum(seconds for _, seconds in list_breakdown(step)) == pytest.approx(step.seconds)
        assert step.lower_bound <= step.seconds * (1 + 1e-9)
        assert step.peak_bytes == max(rank.total for rank in step.memory)
        assert all(size >= 0 for rank in step.memory for size in vars(rank).values())
        for causal in (False, True):
            tflops = step.compute_tflops(hardware=True, causal=causal)
            assert 0 < tflops < job.hardware.peak_tflops
        trace = step.build_trace()
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        end = max(span["ts"] + span["dur"] for span in spans)
        assert end / 1e6 == pytest.approx(step.seconds, rel=1e-3)


def test_the_fullest_rank_is_found_where_shares_of_the_layers_are_recomputed():
    """Stages of as many layers recompute different numbers of them. All keep 3 microbatches."""
    shape = make_gpt(4096, 70, 32, 2048, 51200)
    for share in (Fraction(1, 3), Fraction(2, 3)):
        for pipeline in (8, 12, 16, 32):
            layout = RankLayout(pipeline=pipeline, data=2, recompute="full", recomputed_share=share)
            step = StepPrediction(StepJob(shape, layout, 6, TRAINER, load_hardware("h100")))
            assert step.peak_bytes == max(rank.total for rank in step.memory)


@pytest.mark.parametrize(
    ("field", "factor"),
    [
        ("peak_tflops", 2),
        ("memory_tb_per_second", 2),
        ("node_gb_per_second", 2),
        ("network_gb_per_second", 2),
        ("hop_seconds", 0.5),
    ],
)
def test_better_hardware_is_never_slower(field, factor):
    for job in iterate_jobs(40):
        better = replace(job.hardware, **{field: factor * getattr(job.hardware, field)})
        after = StepPrediction(replace(job, hardware=better))
        assert after.seconds <= StepPrediction(job).seconds * (1 + 1e-9)


def test_more_samples_take_longer_in_total_and_less_for_each():
    for job in iterate_jobs(60):
        layout = job.layout
        before = StepPrediction(job)
        for more in (
            replace(job, batch_size=2 * job.batch_size),
            replace(
                job,
                batch_size=2 * job.batch_size,
                layout=replace(layout, micro_batch=2 * layout.micro_batch),
            ),
        ):
            after = StepPrediction(more)
            assert before.seconds <= after.seconds * (1 + 1e-9)
            assert after.seconds <= 2 * before.seconds * (1 + 1e-9)
        # Larger microbatches have larger activations.
        assert after.peak_bytes >= before.peak_bytes


def test_more_memory_never_makes_the_fastest_layout_slower():
    shape = make_gpt(4096, 24, 32, 2048, 51200)
    best = []
    for gib in (24, 160):
        hardware = replace(load_hardware("a100-80g"), memory_gib=gib)
        found = search_layouts(SearchSpace(shape, 64, 16, hardware, TRAINER), count=1)
        assert all(each.peak_bytes <= gib * 2**30 for each in found.fitting)
        best.append(found.fastest[0].seconds)
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]


def test_a_short_step_on_one_device_needs_its_gradients():
    """One sample of 256 tokens: 13.34 GB were recorded on a fake GPU, as with recomputation."""
    plan = make_plan(
        "--hidden-size 2048 --seq-length 256 --vocab-size 32000 --global-batch-size 1 --swiglu "
        "--normalization rmsnorm --position-embedding-type rotary --disable-bias-linear "
        "--hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights",
        1,
    )
    job = predict_plan(plan, load_hardware("a100-80g")).job
    for recompute in ("none", "full"):
        layout = replace(job.layout, recompute=recompute)
        (rank,) = estimate_memory(job.shape, layout, job.software, 1)
        assert (rank.total - rank.fixed) / 1e9 == pytest.approx(13.34, rel=0.05)
