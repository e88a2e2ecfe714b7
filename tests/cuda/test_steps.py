"""Steps on the fake GPU: what the host waits for, and every message against a formula."""

from collections import Counter
from dataclasses import replace

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import Case, run_case
from cuda.formulas import Layout, Messages, predict

from megatron.dry_run.record import RankReport

BF16 = "--bf16 "
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--no-add-bias-linear --untie-embeddings-and-output-weights "
)
FORMULAS = {
    "one GPU": (Case(BF16 + "--global-batch-size 8"), Layout(m=4)),
    "TP": (
        Case(BF16 + "--tensor-model-parallel-size 2 --global-batch-size 4", 2, 1),
        Layout(t=2),
    ),
    "TP 4, fp32": (
        Case("--tensor-model-parallel-size 4 --global-batch-size 4", 4, 3),
        Layout(t=4, dtype="float32"),
    ),
    "TP, recomputed": (
        Case(
            BF16 + "--tensor-model-parallel-size 2 --checkpoint-activations --global-batch-size 4",
            2,
        ),
        Layout(t=2, recomputed=True),
    ),
    "SP, ZeRO 1, fp16": (
        Case(
            "--fp16 --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 "
            "--hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 16",
            8,
            5,
        ),
        Layout(t=2, d=4, sequence=True, dtype="float16"),
    ),
    "ZeRO 1 over 3 ranks": (
        Case(BF16 + "--zero-stage 1 --global-batch-size 18", 3, 2),
        Layout(d=3, m=3),
    ),
    "ZeRO 2": (
        Case(BF16 + "--zero-stage 2 --global-batch-size 24", 4, 3),
        Layout(d=4, m=3, zero=2),
    ),
    "ZeRO 3, TP": (
        Case(
            BF16 + "--zero-stage 3 --tensor-model-parallel-size 2 --global-batch-size 16",
            8,
            7,
        ),
        Layout(t=2, d=4, zero=3),
    ),
    "HSDP, 4 copies": (
        Case(BF16 + "--sharding-strategy hsdp --global-batch-size 48", 8, 6, ranks_per_node=2),
        # This strategy is ZeRO 3 inside of a copy.
        Layout(d=8, m=3, copies=4, group="shards", zero=3),
    ),
    "DDP": (
        Case(BF16 + "--sharding-strategy ddp --global-batch-size 16", 4, 1),
        Layout(d=4, copies=4),
    ),
}
PIPELINE = (
    BF16 + "--num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
    "--checkpoint-activations --global-batch-size 64"
)
FORMULAS |= {
    f"1F1B, stage {stage}": (
        Case(PIPELINE, 32, rank),
        Layout(t=2, d=4, p=4, m=8, layers=1, first=stage == 0, last=stage == 3, recomputed=True),
    )
    for stage, rank in ((0, 0), (1, 13), (3, 31))
}
FORMULAS |= {
    "1,024 ranks": (
        Case(
            BF16 + "--num-layers 4 --num-attention-heads 8 --tensor-model-parallel-size 8 "
            "--pipeline-model-parallel-size 4 --sequence-parallel --zero-stage 1 "
            "--global-batch-size 256",
            1024,
            1023,
        ),
        Layout(t=8, d=32, p=4, m=4, layers=1, first=False, sequence=True),
    ),
}
OTHERS = {
    "interleaved": Case(
        BF16 + "--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 32 "
        "--num-layers-per-virtual-pipeline-stage 1",
        8,
        5,
    ),
    "Llama, GQA, ZeRO 3": Case(
        BF16 + LLAMA + "--num-query-groups 2 --zero-stage 3 --global-batch-size 16", 4, 2
    ),
    "ALiBi": Case(BF16 + "--position-embedding-type alibi --global-batch-size 8"),
    "ALiBi, documents": Case(
        BF16 + "--position-embedding-type alibi --global-batch-size 4", documents=True
    ),
    "rotary, documents, fp32": Case(
        LLAMA + "--global-batch-size 4 --log-num-zeros-in-grad", documents=True
    ),
    "input kept in host memory": Case(
        "--fp16 --tensor-model-parallel-size 2 --checkpoint-activations --partition-activations "
        "--checkpoint-in-cpu --hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 4",
        2,
        1,
    ),
    "Muon": Case(
        BF16 + LLAMA + "--optimizer muon --tensor-model-parallel-size 2 --global-batch-size 8", 4, 3
    ),
}


def count_messages(report: RankReport) -> Messages:
    """Return the messages of a step, whatever stream they were on."""
    found: Messages = Counter()
    for each, count in report.step.collectives.items():
        found[each.kind, each.group, each.dtype, each.size] += count
    return found


def check_waits(report: RankReport) -> None:
    """Check that the host waits once, for the loss and the norm, however many microbatches."""
    waits = report.step.synchronisations
    assert sum(waits.values()) == 1, waits
    (wait,) = waits
    assert wait.cause == "blocking copy to the host"
    assert wait.line.startswith("engine/native.py")
    blocking = [each for each in report.step.copies if each.blocking]
    assert [each.direction for each in blocking] == ["to the host"], blocking


@pytest.mark.parametrize("name", FORMULAS)
def test_messages_are_those_of_the_formula_and_the_host_waits_once(name, on_fake_gpu: Call):
    case, layout = FORMULAS[name]
    report = on_fake_gpu(run_case, case)
    assert report.microbatches == layout.m
    assert count_messages(report) == predict(layout)
    check_waits(report)


@pytest.mark.parametrize("name", ["one GPU", "1F1B, stage 1"])
def test_only_token_ids_and_labels_are_copied_to_the_gpu(name, on_fake_gpu: Call):
    case, layout = FORMULAS[name]
    copies = on_fake_gpu(run_case, case).step.copies
    # int64[b, s] with b = 2 and s = 32, for the ids and for the labels of each microbatch.
    assert {
        (each.size, each.blocking): count
        for each, count in copies.items()
        if each.direction == "to the GPU"
    } == {(8 * 2 * 32, False): 2 * layout.m}


@pytest.mark.parametrize("name", OTHERS)
def test_the_host_waits_once_a_step(name, on_fake_gpu: Call):
    # The first step builds the tables of positions.
    check_waits(on_fake_gpu(run_case, replace(OTHERS[name], steps=2)))
