"""Graphs on a GPU have the bits of eager passes, with kernels that repeat their bits.

`tests/engine/test_cuda_graph.py` has the same events with a recorder on CPUs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.test_cuda_graph import HISTORY, LLAMA, NANOCHAT, History, compare, start
from process_pool import ProcessPool, succeed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDE = (
    f"{LLAMA} --hidden-size 512 --num-attention-heads 4 --num-query-groups 4 --seq-length 512 "
    "--ffn-hidden-size 1376 --bf16 --sliding-window 512"
)
"""Heads of 128 and the kernels of a 7B, in two layers."""
FLOAT8 = "--fp8-format hybrid --fp8-recipe tensorwise"
SHAPES = {
    "gpt2-bf16": "--hidden-size 256 --seq-length 128 --bf16",
    "gpt2-fp32": "--hidden-size 256 --seq-length 128",
    "nanochat-bf16": f"{NANOCHAT} --hidden-size 256 --seq-length 128 --bf16",
    "7b-like": WIDE,
    "7b-like-compiled": f"{WIDE} --use-torch-compile",
    "7b-like-recomputed": f"{WIDE} --checkpoint-activations",
    "fp16": f"{WIDE.replace('--bf16', '')} --fp16 --initial-loss-scale 16777216",
    "float8-tensorwise": f"{WIDE} {FLOAT8}",
    "float8-rowwise": f"{WIDE} --fp8-format e4m3 --fp8-recipe rowwise --fp8-start-iteration 4",
}


def run_on_gpu(flags: str) -> dict[str, Any]:
    """Run the history eagerly and with graphs. Return the first difference, and a few counts."""
    from megatron.plan.kernel_choice import KernelDevice, apply_kernel_choice, choose_kernels
    from megatron.run.start.meet import choose_deterministic_kernels

    choose_deterministic_kernels()
    plan, mesh = start(f"{flags} --attention-backend flash efficient unfused")
    choice = choose_kernels(plan, KernelDevice("9.0"))
    assert choice.kernels.cuda_graph == "on"
    plans = [
        apply_kernel_choice(
            plan, replace(choice, kernels=replace(choice.kernels, cuda_graph=value))
        )
        for value in ("off", "on")
    ]
    eager, captured = (History(each, mesh) for each in plans)
    for event in HISTORY:
        if difference := compare(eager, captured, event):
            return {"difference": difference, "has_graphs": None}
    runner = captured.engine.runner
    return {"difference": "", "has_graphs": runner.has_graphs}


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_have_the_bits_of_eager_passes(shape: str, pool: ProcessPool) -> None:
    outcomes = pool.run(1, run_on_gpu, SHAPES[shape])
    succeed(outcomes)
    found = outcomes[0].value
    assert found["difference"] == ""
    assert found["has_graphs"], outcomes[0].output


def record_a_wait() -> tuple[str, float]:
    """Return the message of a recording that fails, and what the device computes afterwards."""
    from megatron.extras.step.cuda_graph import CudaGraphRecorder, RecordingError

    device = torch.device("cuda", 0)
    recorder = CudaGraphRecorder(device)
    x = torch.ones(4, device=device)

    def wait() -> None:
        (x * 2).sum().item()

    message = ""
    try:
        recorder.record(wait)
    except RecordingError as error:
        message = str(error)

    def add() -> None:
        x.add_(1)

    recorder.record(add)()
    with recorder.share_memory():
        total = x.sum()
    return message, float(total)


@needs_gpu
@pytest.mark.gpu_core
def test_a_failed_recording_names_the_operator_and_leaves_a_usable_device(
    pool: ProcessPool,
) -> None:
    outcomes = pool.run(1, record_a_wait)
    succeed(outcomes)
    message, total = outcomes[0].value
    assert "_local_scalar_dense" in message
    assert total == 8.0


@needs_gpu
@pytest.mark.gpu_core
def test_kernels_for_many_weights_have_the_bits_of_pytorch() -> None:
    from engine.test_float8_kernels import compare_all_weights

    assert compare_all_weights("cuda") == []
