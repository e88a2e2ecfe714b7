"""The planner's memory traffic of weights and gradients against steps on fake GPUs."""

import shlex

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import PLAIN, Case, count_parameter_bytes, plan_case

from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.parameters import (
    count_gather_bytes,
    count_product_bytes,
    count_sum_bytes,
)
from megatron.extras.planner.prediction import predict_plan
from megatron.model import flops

LLAMA = (
    "--num-layers 1 --num-attention-heads 2 --micro-batch-size 3 --seq-length 40 "
    "--ffn-hidden-size 320 --swiglu --normalization rmsnorm --disable-bias-linear "
    "--position-embedding-type rotary "
    "--vocab-size 704 --make-vocab-size-divisible-by 8 --untie-embeddings-and-output-weights "
)
FUSED = "--gradient-accumulation-fusion"
# Flags, number of ranks, microbatches of a rank.
CASES = [
    ("--bf16", 1, 1),
    ("--bf16", 1, 3),
    ("", 1, 3),
    (f"--bf16 {FUSED}", 1, 3),
    (f"--bf16 {FUSED}", 1, 1),
    ("--bf16 --tensor-model-parallel-size 2 --sequence-parallel", 2, 2),
    ("--bf16 --zero-stage 0", 2, 2),
    ("--bf16 --zero-stage 1", 2, 1),
    ("--fp16 --zero-stage 1", 2, 3),
    ("--bf16 --zero-stage 2", 2, 3),
    ("--bf16 --zero-stage 3", 2, 3),
    ("--zero-stage 1", 2, 3),
    ("--zero-stage 3", 2, 3),
    (f"--bf16 --zero-stage 1 {FUSED}", 2, 3),
    (f"--bf16 --zero-stage 3 {FUSED}", 2, 3),
]


@pytest.mark.parametrize(("flags", "ranks", "microbatches"), CASES)
def test_the_bytes_are_those_of_a_step(
    flags: str, ranks: int, microbatches: int, on_fake_gpu: Call
) -> None:
    data = 1 if "tensor" in flags else ranks
    flags = f"{LLAMA} {PLAIN} {flags} --global-batch-size {3 * data * microbatches}"
    measured = on_fake_gpu(count_parameter_bytes, flags, ranks)
    prediction = predict_plan(plan_case(Case(flags, ranks)), load_hardware("a100-80g"))
    job = prediction.job
    (stage,) = prediction.stages
    assert job.schedule.microbatches == microbatches
    assert count_sum_bytes(job, stage) == measured.sums
    assert count_gather_bytes(job, stage) == measured.gathers
    matrices = len(stage.layers) * flops.count_layer_matrix_parameters(job.shape)
    products = count_product_bytes(job.layout, job.software, microbatches) * matrices * microbatches
    assert measured.fused == (products if FUSED in shlex.split(flags) else 0)
