"""Tests that the bytes that the planner expects of a checkpoint are those of the saved files."""

from pathlib import Path

import pytest
from training.runs import Runner

from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.run.start.launch import count_checkpoint_bytes

# 4 layers on 3 stages are uneven. Muon has no second moment for the matrices of the layers.
STAGES = (
    "--untie-embeddings-and-output-weights --num-layers 4 --pipeline-model-parallel-size 3 "
    "--glu-activation swiglu --ffn-hidden-size 80 --optimizer muon"
)
BF16_MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
PADDING = 120 * 32
"""Parameters of the embedding that pad 5,000 words to 5,120. They are not saved."""


def measure_tensors(folder: Path) -> int:
    """Return the bytes of the tensors of a checkpoint's files, without the headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        total += path.stat().st_size - 8 - header
    return total


@pytest.mark.parametrize(
    ("flags", "ranks", "bytes_per_parameter"),
    [
        ("--bf16", 1, 12),
        ("", 1, 12),
        (f"--bf16 {BF16_MOMENTS}", 1, 8),
        ("--fp16 --optimizer ademamix --zero-stage 1", 2, 16),
        ("--bf16 --no-save-optim", 1, 4),
    ],
)
def test_a_checkpoint_has_the_planned_size(
    flags: str, ranks: int, bytes_per_parameter: int, run: Runner
) -> None:
    flags = f"{flags} --train-iters 1"
    run(flags, ranks)
    plan = resolve(load_config(run.argv(flags)).config, ranks)
    saved = plan.parameters - PADDING
    assert measure_tensors(run.folder / "global_step1") == bytes_per_parameter * saved
    assert count_checkpoint_bytes(plan) == bytes_per_parameter * plan.parameters


def test_a_checkpoint_of_stages_with_muon_has_the_planned_size(run: Runner) -> None:
    flags = f"--bf16 {STAGES} --train-iters 1"
    run(flags, 3)
    plan = resolve(load_config(run.argv(flags)).config, 3)
    planned = count_checkpoint_bytes(plan)
    assert 8 * plan.parameters < planned < 12 * plan.parameters
    # Embedding and output matrix are updated by Adam.
    assert measure_tensors(run.folder / "global_step1") == planned - 12 * 2 * PADDING
