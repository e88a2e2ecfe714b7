"""Runs with moments in bf16: exact resumes in several layouts, checkpoints, a changed precision."""

import pytest
from training.runs import Runner

from megatron.checkpoint.load import open_checkpoint
from megatron.extras.interop.inspection.comparison import compare
from megatron.extras.interop.inspection.verification import verify

BF16 = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95 --clip-grad 0.1"
UNTIED = "--untie-embeddings-and-output-weights --num-layers 4"
LAYOUTS = {
    # 4 layers on 3 stages are uneven. The run resumes twice.
    "stages": (3, f"{UNTIED} --pipeline-model-parallel-size 3 --optimizer muon --async-save"),
    "shards": (4, "--tensor-model-parallel-size 2 --zero-stage 3 --optimizer ademamix --fp16"),
    "copies": (4, "--sharding-strategy hsdp --hsdp-shard-size 2 --bf16 --micro-batch-size 1"),
}


@pytest.mark.parametrize(
    "layout", ["stages", pytest.param("shards", marks=pytest.mark.full), "copies"]
)
def test_a_resumed_run_has_the_same_bits(layout: str, run: Runner, other: Runner) -> None:
    ranks, flags = LAYOUTS[layout]
    flags = f"{flags} {BF16} --train-iters 5"
    output = run(f"{flags} --save-interval 2", ranks)
    assert "moments in bf16" in output
    other(f"{flags} --load {run.folder} --load-iteration 2 --exit-interval 4", ranks)
    if layout == "stages":
        other(flags, ranks)
    last = 5 if layout == "stages" else 4
    straight = open_checkpoint(run.folder, last)
    resumed = open_checkpoint(other.folder, last)
    found = compare(straight, resumed)
    assert found.tensors
    assert [each.tensor for each in found.tensors if each.different] == []
    assert found.only_in_first == found.only_in_second == []
    assert resumed.manifest.format == 4
    tensors = resumed.read_index().tensors
    stored = {key.partition("/")[0] for key, tensor in tensors.items() if "dtype" in tensor}
    assert stored == ({"momentum"} if layout == "stages" else set()) | {"exp_avg", "exp_avg_sq"}
    assert verify(resumed.folder).damage == ()


def test_moments_are_converted_if_their_precision_changes(run: Runner, other: Runner) -> None:
    fp32 = "--adam-beta2 0.95 --clip-grad 0.1"
    run(f"{fp32} --exit-interval 3")
    assert open_checkpoint(run.folder, 3).manifest.format == 3
    output = run(f"{BF16} --exit-interval 4", 2)
    assert "accumulation in fp32, moments in bf16" in output
    words = [line.split() for line in output.splitlines()]
    assert ["--exp-avg-dtype", '"fp32"', '"bf16"'] in words
    assert ["--exp-avg-sq-dtype", '"fp32"', '"bf16"'] in words
    assert open_checkpoint(run.folder, 4).manifest.format == 4
    run(f"{fp32} --exit-interval 5")
    assert open_checkpoint(run.folder, 5).manifest.format == 3
    other(f"{fp32} --exit-interval 5")
    # Rounding has changed two steps by less than a step of another batch would.
    assert run.losses()[5] == pytest.approx(other.losses()[5], abs=5e-3)


def test_deepspeed_and_rates_near_one_are_refused(run: Runner) -> None:
    error = run.error("--exp-avg-sq-dtype bf16")
    assert "--adam-beta2 0.999 (default) with --exp-avg-sq-dtype bf16" in error
    assert "must be at most 0.99609375" in error
    error = run.error(f"{BF16} --optimizer muon --muon-momentum 0.999")
    assert "--muon-momentum 0.999 with --exp-avg-dtype bf16" in error
    error = run.error("--exp-avg-dtype bf16 --deepspeed")
    assert "--exp-avg-dtype bf16: DeepSpeed's ZeRO keeps moments in fp32" in error
