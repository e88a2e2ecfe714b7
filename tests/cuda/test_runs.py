"""Everything around a step on the fake GPU: a complete training, evaluation, checks."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import (
    Case,
    check_replicas,
    evaluate,
    pin_buffers,
    train,
    train_and_list_attention,
    train_without_pinning,
)
from cuda.test_steps import BF16

from megatron.extras.planner.dry_run.process import call_in_pool, open_pool
from megatron.extras.planner.dry_run.record import StepTrace

LATE_READING = "extras/step/late_reading.py"
"""Where the host waits for the numbers of a step, which the GPU has copied to pinned memory."""


def make_arguments(corpus: str, folder: Path, *flags: str) -> list[str]:
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16"
    length = "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --vocab-size 5000"
    often = "--train-iters 6 --log-interval 1 --save-interval 2 --eval-iters 1 --eval-interval 2"
    return [
        *f"{shape} {length} {often} --split 90,10,0".split(),
        *("--data-path", corpus, "--save", str(folder)),
        *flags,
    ]


def count_waits(step: StepTrace, file: str) -> int:
    """Return how often the host waits at a file."""
    return sum(n for wait, n in step.synchronisations.items() if wait.line.startswith(file))


def sum_copies(step: StepTrace, file: str, *, blocking: bool) -> int:
    """Return the bytes that a file copies to the host."""
    return sum(
        each.size * count
        for each, count in step.copies.items()
        if each.direction == "to the host"
        and each.line.startswith(file)
        and each.blocking == blocking
    )


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--attention-backend auto", marks=pytest.mark.full),
        "--attention-backend by-gpu",
        pytest.param("--use-torch-compile", marks=pytest.mark.full),
    ],
)
def test_deterministic_attention_is_flash(flags: str, on_fake_gpu: Call, corpus, tmp_path):
    """The fake GPU is an H200, where by-gpu otherwise means cuDNN's kernel."""
    # The masks of attention dropout need scores, which fused kernels do not keep.
    own = (*flags.split(), "--attention-dropout", "0", "--exit-interval", "2")
    arguments = make_arguments(corpus, tmp_path, *own)
    found, compiled = on_fake_gpu(train_and_list_attention, [*arguments, "--deterministic-mode"])
    kernel = "_scaled_dot_product_flash_attention"
    assert found == {(kernel, True), (f"{kernel}_backward", True)}
    assert compiled == ("compile" in flags)


H = 64
LAYER = 12 * H * H + 13 * H
STATE_BYTES = 3 * 4 * (5000 * H + 32 * H + 2 * LAYER + 2 * H)
"""Weights and two moments of the model in fp32, without the padding of the vocabulary.

They are those of the words, the positions, two layers and the last norm.
"""


def test_a_training_saves_loads_and_evaluates(on_fake_gpu: Call, corpus, tmp_path):
    first = on_fake_gpu(train, make_arguments(corpus, tmp_path, "--exit-interval", "2"))
    assert (tmp_path / "latest").read_text().strip() == "global_step2"
    # Without --async-save, the training waits for each tensor.
    assert sum_copies(first, "checkpoint/tensor_file.py", blocking=True) == STATE_BYTES
    assert sum_copies(first, "checkpoint/", blocking=False) == 0
    # The host waits once for the numbers of each of two steps, and once for the evaluation.
    assert count_waits(first, LATE_READING) == 2
    assert count_waits(first, "engine/native.py") == 1
    # The timers read events that are over since the read of the next step.
    assert count_waits(first, "observe/timers.py") == 0
    second = on_fake_gpu(
        train,
        make_arguments(corpus, tmp_path, "--load", str(tmp_path), "--async-save"),
    )
    loaded = {
        each: count
        for each, count in second.copies.items()
        if each.direction == "to the GPU" and each.line.startswith("checkpoint/")
    }
    assert sum(each.size * count for each, count in loaded.items()) == STATE_BYTES
    # Two asynchronous saves copy to pinned memory, and only their threads wait.
    for file in ("checkpoint/tensor_file.py", "checkpoint/shard_file.py"):
        assert sum_copies(second, file, blocking=True) == 0
    assert sum_copies(second, "checkpoint/shard_file.py", blocking=False) == 2 * STATE_BYTES
    assert count_waits(second, "checkpoint/shard_file.py") == 2
    # Both use the same memory. Each shard has a multiple of 64 bytes, so no byte is added.
    assert list(second.registered.values()) == [STATE_BYTES]


def test_a_gpu_that_does_not_pin_memory_gets_the_same_checkpoint(
    on_fake_gpu: Call, corpus, tmp_path
):
    arguments = make_arguments(corpus, tmp_path, "--async-save", "--exit-interval", "4")
    step, log = on_fake_gpu(train_without_pinning, arguments)
    assert (tmp_path / "latest").read_text().strip() == "global_step4"
    assert step.registered == {}
    assert sum_copies(step, "checkpoint/", blocking=False) == 0
    assert sum_copies(step, "checkpoint/shard_file.py", blocking=True) == 2 * STATE_BYTES
    # One line for both saves.
    lines = [line for line in log.splitlines() if "not pinned" in line]
    assert len(lines) == 1, log
    assert "warning: rank 0 on " in lines[0]
    assert "(out of memory)" in lines[0]


def test_pinned_memory_has_the_size_of_the_shards_and_grows_with_them(on_fake_gpu: Call):
    first, again, larger, dropped = on_fake_gpu(pin_buffers)
    # The shards have 4, 100, 0 and 260 bytes. Each begins at a multiple of 64 bytes.
    small = 64 + 128 + 0 + 320
    assert first == (small, small, None)
    # Fewer shards use the same memory.
    assert again == (small, small, None)
    # More shards get new memory, and the old memory is no longer pinned.
    large = small + 4032
    assert larger == (small + large, large, None)
    # A buffer that is dropped leaves nothing pinned.
    assert dropped == (small + large, 0, None)


@pytest.mark.full
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_trains_on_one_process(corpus, tmp_path):
    # A process of its own, because DeepSpeed keeps its process group.
    with open_pool(1) as pool:
        arguments = make_arguments(corpus, tmp_path, "--deepspeed", "--exit-interval", "2")
        step = call_in_pool(pool, train, arguments)
    assert (tmp_path / "latest").read_text().strip() == "global_step2"
    records = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, records) if each["kind"] == "train"]
    # A dropped update has no loss. What is read from a fake GPU is 2.
    assert [each["lm_loss"] for each in steps] == [2.0, 2.0]
    # It waits more than once a step. The native engine does not.
    assert count_waits(step, "extras/step/deepspeed/deepspeed.py") > 2


@pytest.mark.parametrize(
    "case",
    [
        Case(BF16 + "--tensor-model-parallel-size 2 --zero-stage 3 --global-batch-size 8", 4, 3),
        Case(BF16 + "--pipeline-model-parallel-size 2 --global-batch-size 8", 4, 2),
    ],
    ids=["TP, ZeRO 3", "PP"],
)
def test_an_evaluation_reads_one_number_and_scores_one_tensor(case, on_fake_gpu: Call):
    loss, likelihoods, evaluated, scored = on_fake_gpu(evaluate, case)
    # What is read from a fake GPU is 2.
    assert loss == 2.0
    assert sum(evaluated.synchronisations.values()) == 1
    assert evaluated.peak["gradients"] == 0
    # Two data-parallel ranks with four microbatches of two samples each.
    assert len(likelihoods) == 2 * 4 * 2
    # The second wait is for the loss, which an evaluation has as well. The rank with the loss also
    # waits in each microbatch for the number of positions that count.
    of_masks = count_waits(scored, "model/loss.py")
    assert of_masks == 4
    assert sum(scored.synchronisations.values()) == 2 + of_masks


def test_the_check_of_replicas_reads_one_tensor_for_each_group(on_fake_gpu: Call):
    case = Case(
        BF16 + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--sharding-strategy ddp --global-batch-size 8",
        8,
        7,
    )
    repaired, norm, step = on_fake_gpu(check_replicas, case)
    assert repaired == []
    assert norm == pytest.approx(2**0.5)
    # Replicas, tensor-parallel ranks, and both ends of the pipeline.
    assert count_waits(step, "engine/invariants.py") == 3
    assert {each.group for each in step.collectives if each.kind == "all_gather"} >= {
        "replicas",
        "tensor",
        "ends",
    }
