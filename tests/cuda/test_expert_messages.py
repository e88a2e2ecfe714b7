"""Messages and loads of experts in dry runs, beside the planner's formulas."""

import shlex
from dataclasses import replace

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import count_collectives, run_loads

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.parameters import count_message_bytes, count_rows
from megatron.extras.planner.prediction import describe_layout, predict_plan
from megatron.plan.resolve import resolve

FLAGS = (
    "--preset olmoe-1b-7b --num-layers 3 --moe-layer-freq [1,0,1] --seq-length 512 "
    "--micro-batch-size 2 --global-batch-size 64 --train-iters 10 --lr 1e-4 --bf16 "
    "--moe-aux-loss-coeff 0.01 --zero-stage 1 "
)
LAYOUTS = {
    "EP 8 over 16 ranks": ("--expert-model-parallel-size 8", 16, 1, 1.0),
    "EP 4 over TP 2": ("--expert-model-parallel-size 4 --tensor-model-parallel-size 2", 8, 1, 2.5),
    # A recomputation sends the tokens there and back once more.
    "recomputed": ("--expert-model-parallel-size 8 --checkpoint-activations", 8, 2, 1.5),
}
"""Name -> further flags, ranks, forward passes of a microbatch, and the load of the rank."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_messages_have_the_bytes_of_the_formula(name: str, on_fake_gpu: Call) -> None:
    more, world, forwards, imbalance = LAYOUTS[name]
    report = on_fake_gpu(run_loads, FLAGS + more, world, imbalance)
    plan = resolve(load_config(shlex.split(FLAGS + more)).config, world)
    layout = replace(describe_layout(plan), imbalance=imbalance)
    size = count_message_bytes(plan.shape, layout, 2)
    messages = count_collectives(report.step, "all_to_all", "experts")
    # Two layers have experts. A pass has a message to them and one back.
    number = report.microbatches * 2 * 2 * (forwards + 1)
    assert messages == {("bfloat16", size): number}
    own, sent, received = count_rows(plan.shape, layout)
    assert sent == own * 8
    assert received == imbalance * sent


def test_no_load_needs_more_memory_than_all_tokens(on_fake_gpu: Call) -> None:
    more, world, *_ = LAYOUTS["EP 8 over 16 ranks"]
    peaks = [
        on_fake_gpu(run_loads, FLAGS + more, world, imbalance).step.peak_bytes
        for imbalance in (1.0, 8.0, 100.0)
    ]
    assert peaks[0] < peaks[1] == peaks[2]
    hardware = replace(load_hardware("h100"), expert_imbalance=8.0)
    plan = resolve(load_config(shlex.split(FLAGS + more)).config, world)
    (memory,) = predict_plan(plan, hardware).memory
    assert memory.tensors == pytest.approx(peaks[1], rel=0.02)
