"""Peak memory on the fake GPU against formulas that were derived by hand (docs/dry_run.md)."""

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import PLAIN, Case, run_case

H, FFN, HEADS, S, VOCAB, LAYERS = 1024, 2816, 16, 1024, 32000, 3
LLAMA = (
    f"--num-layers {LAYERS} --hidden-size {H} --num-attention-heads {HEADS} --seq-length {S} "
    f"--ffn-hidden-size {FFN} --vocab-size {VOCAB} --micro-batch-size 1 --bf16 "
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--no-add-bias-linear --untie-embeddings-and-output-weights "
)
PARAMETERS = 2 * VOCAB * H + LAYERS * (4 * H * H + 3 * H * FFN + 2 * H) + H
OF_LAYER = 2 * S * (10 * H + 4 * FFN) + 4 * S * HEADS
"""In bf16: two inputs of norms, their outputs, and the input of the output projection (5 h).
Queries, keys and values (3 h), and rotated queries and keys (2 h). The gate, its activation, the
other half and their product (4 f). In fp32: a number for each query and head."""
OF_HEAD = VOCAB * H * (4 + 2 + 2) + 2 * S * 3 * H
"""The gradient of the matrix in fp32, and in bf16 for this microbatch and as its last part. The
residual stream, the output of the norm, and its gradient."""


def test_one_gpu_needs_18_bytes_a_parameter_and_the_activations(on_fake_gpu: Call):
    # With a second microbatch, all gradients are there when the activations are.
    report = on_fake_gpu(run_case, Case(LLAMA + PLAIN + "--global-batch-size 2"))
    peak = report.step.peak
    assert peak["weights"] == 2 * PARAMETERS
    assert peak["gradients"] == 4 * PARAMETERS
    # The fp32 masters and Adam's two moments.
    assert peak["optimizer"] == 12 * PARAMETERS
    assert peak["activations"] == pytest.approx(LAYERS * OF_LAYER + OF_HEAD, rel=0.01)
    assert peak["communication"] == 0
    rounded = f"{LLAMA} {PLAIN} --global-batch-size 2 --exp-avg-dtype bf16"
    assert on_fake_gpu(run_case, Case(rounded)).step.peak["optimizer"] == 10 * PARAMETERS


def test_zero_3_keeps_an_eighth(on_fake_gpu: Call):
    case = Case(LLAMA + "--zero-stage 3 --global-batch-size 16", 8, 3)
    report = on_fake_gpu(run_case, case)
    assert report.step.kept["weights"] == 4 * PARAMETERS // 8
    assert report.step.kept["optimizer"] == pytest.approx(8 * PARAMETERS // 8, rel=1e-5)
    # FSDP2 has at most two layers at once, and the rest of the model, gathered in bf16 or as
    # gradients in fp32.
    layer = 4 * H * H + 3 * H * FFN + 2 * H
    rest = 2 * VOCAB * H + H
    assert report.step.peak["communication"] <= 2 * 4 * (layer + rest)


def test_the_last_stage_keeps_inputs_of_microbatches_in_flight_only(on_fake_gpu: Call):
    flags = LLAMA + "--pipeline-model-parallel-size 2 --global-batch-size "
    few, many = (on_fake_gpu(run_case, Case(f"{flags}{number}", 2, 1)) for number in (4, 8))
    # Only tokens and labels of int64, and a loss of some bytes, are there for each microbatch.
    grown = many.step.peak_bytes - few.step.peak_bytes
    assert grown == pytest.approx((8 - 4) * 2 * 8 * S, rel=0.01)
