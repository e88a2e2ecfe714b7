"""Twenty changes of layout that must pass, and twelve errors that must be named."""

import json
from pathlib import Path

import pytest
from convert.other_trainers import (
    NANOGPT_CONFIG,
    build_nanogpt,
    build_nanogpt_optimizer,
    fill_states,
    save_nanogpt,
)
from operations.handover_errors import ERRORS, pretrain_with_error
from operations.rehearsing import SIZES, Handover
from operations.run_folder import digest_folder
from process_pool import ProcessPool

from megatron.extras.interop.commands import convert_checkpoint

pytestmark = pytest.mark.full

FP32 = ""
RAMP = "--rampup-batch-size 4 2 12 --global-batch-size 8"
BF16 = "--bf16"
FP16 = "--fp16 --initial-loss-scale 65536"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
EXPERTS += "--moe-aux-loss-coeff 0.01 --swiglu --disable-bias-linear"
SKIPS = "--skip-train-iteration-range 6-6"
CURRICULUM = "--curriculum-schedule-type fixed_linear --curriculum-min-difficulty 8 "
CURRICULUM += "--curriculum-total-step 8 --train-tokens 100000 --lr-decay-tokens 100000"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2"

TRIALS: list[tuple[str, str, int, str, int]] = [
    # flags of the run, layout and ranks of the run, layout and ranks of the rehearsal
    (FP32, PP2, 4, TP2, 2),
    (f"{FP32} {NO_DROPOUT}", PP2, 4, CP2, 2),
    (FP32, PP2, 4, "", 1),
    (FP32, PP2, 4, PP2, 4),
    (FP32, TP2, 4, f"{PP2} {TP2}", 4),
    (f"{RAMP}", "", 2, TP2, 2),
    (f"{SKIPS}", "", 1, PP2, 2),
    (f"{CURRICULUM} {NO_DROPOUT}", "", 2, TP2, 4),
    (f"{RAMP} {SKIPS}", PP2, 2, "--zero-stage 3", 4),
    (f"{EXPERTS}", "", 2, TP2, 2),
    (f"{EXPERTS} {NO_DROPOUT}", "--expert-model-parallel-size 2", 2, "", 1),
    (f"{EXPERTS} {BF16}", "", 1, PP2, 2),
    (BF16, PP2, 4, TP2, 2),
    (BF16, PP2, 4, "", 1),
    (f"{BF16} {RAMP}", "", 2, PP2, 4),
    (f"{BF16} {NO_DROPOUT}", "", 1, CP2, 2),
    (BF16, TP2, 2, TP2, 2),
    (FP16, PP2, 4, TP2, 2),
    (f"{FP16} {SKIPS}", "", 1, "", 2),
    ("--zero-stage 3", "", 2, "--zero-stage 1 --micro-batch-size 2", 1),
]


@pytest.mark.parametrize("trial", range(len(TRIALS)))
def test_a_healthy_change_is_go(pool: ProcessPool, corpus: str, tmp_path: Path, trial: int) -> None:
    settings, before, ranks, after, ranks_after = TRIALS[trial]
    run = Handover(pool, corpus, tmp_path / "run", f"{SIZES} {settings}")
    run.train(before, ranks)
    code, answer, _ = run.rehearse("--from 4 --steps 5", after, ranks_after)
    worst = max(each["difference"] for each in answer["quantities"])
    print(json.dumps([trial, answer["verdict"], worst, answer["drift"]]))
    assert (code, answer["verdict"]) == (0, "go"), answer["quantities"]
    if (before, ranks) == (after, ranks_after):
        assert worst == 0.0


FOUND = {
    "seed of dropout": (5, "loss"),
    "data order": (5, "tokens of the batch"),
    "blend weight": (5, "tokens of the batch"),
    "beta2": (6, "loss"),
    "epsilon": (6, "loss"),
    "weight decay": (6, "loss"),
    "learning-rate schedule": (5, "learning rate"),
    "wrong import": (5, "loss"),
    "another tokenizer": (5, "tokens of the batch"),
    "epsilon of norms": (5, "loss"),
    "loss mask off": (6, "loss"),
    "bf16 for fp32": (5, "loss"),
}
"""Error -> the first iteration and quantity that show it."""


def test_errors_in_the_code_are_found(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    """The records of both starts are equal."""
    folder = Path(corpus).parent
    tokenizer = (
        f"--vocab-file {folder}/gpt2-tiny-vocab.json --merge-file {folder}/gpt2-tiny-merges.txt"
    )
    sizes = SIZES.replace("--vocab-size 5000", tokenizer)
    blend = f"0.5 {corpus} 0.5 {corpus}"
    run = Handover(pool, blend, tmp_path / "run", f"{sizes} --eod-mask-loss")
    run.train()
    found = {}
    for name in ERRORS:
        code, answer, _ = run.rehearse("--from 4 --steps 5", "", 1, pretrain_with_error, [name])
        assert answer["changes"] == {}
        found[name] = answer["verdict"]
        print(name, code, answer["verdict"])
    expected = {name: f"no go: iteration {at}, {what}" for name, (at, what) in FOUND.items()}
    assert found == expected


def test_the_drift_of_a_perturbed_rehearsal(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    """It is measured if a number in 16 bits is above one rounding error."""
    run = Handover(pool, corpus, tmp_path / "run", f"{SIZES} --bf16")
    run.train()
    metrics = run.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if (line["kind"], line["iteration"]) == ("train", 6):
            line["lm_loss"] *= 1.005
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, answer, trained = run.rehearse("--from 4 --steps 4", TP2, 2)
    assert (code, answer["verdict"]) == (1, "no go: iteration 6, loss")
    assert [words[words.index("--rehearsal") + 1] for words in trained] == ["exact", "perturbed"]
    print(answer["drift"])
    assert 0 < answer["drift"] < 0.01


FLAGS = {
    "--seed 77": "--seed",
    "--split 900,50,50": "--split",
    "--data-path 0.2 {corpus} 0.8 {corpus}": "--data-path",
    "--adam-beta2 0.95": "--adam-beta2",
    "--adam-eps 1e-5": "--adam-eps",
    "--weight-decay 0.1": "--weight-decay",
    "--override-lr-scheduler --min-lr 2e-4": "--min-lr",
    "--layernorm-epsilon 1e-4": "--layernorm-epsilon",
    "--no-eod-mask-loss": "--eod-mask-loss",
    "--bf16": "--bf16",
    "--vocab-file {other}": "--vocab-file",
}
"""Changed flags -> the flag that the answer names, as a change or in the error of the command."""


def test_changed_flags_are_named(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    folder = Path(corpus).parent
    vocabulary = json.loads((folder / "gpt2-tiny-vocab.json").read_text())
    first, second = list(vocabulary)[1000:1002]
    swapped = {**vocabulary, first: vocabulary[second], second: vocabulary[first]}
    other = tmp_path / "vocab.json"
    other.write_text(json.dumps(swapped))
    tokenizer = f"--vocab-file {folder}/gpt2-tiny-vocab.json"
    tokenizer += f" --merge-file {folder}/gpt2-tiny-merges.txt"
    sizes = SIZES.replace("--vocab-size 5000", tokenizer)
    run = Handover(pool, f"0.5 {corpus} 0.5 {corpus}", tmp_path / "run", f"{sizes} --eod-mask-loss")
    run.train()
    missed = {}
    for flags, named in FLAGS.items():
        given = flags.format(corpus=corpus, other=other)
        code, answer, _ = run.rehearse("--from 4 --steps 5", given)
        print(flags, code, answer["verdict"][:200], answer["changes"])
        if not (named in answer["changes"] or named in answer["verdict"]):
            missed[flags] = answer
    assert not missed


def test_an_imported_checkpoint(pool: ProcessPool, tmp_path: Path) -> None:
    """Its folder has no record of steps. They come from the events of its trainer."""
    model = build_nanogpt(NANOGPT_CONFIG, 64)
    optimizer = build_nanogpt_optimizer(model, NANOGPT_CONFIG)
    fill_states(model, optimizer, 7)
    save_nanogpt(tmp_path / "ckpt.pt", model, optimizer, NANOGPT_CONFIG, 7)
    run = Handover(pool, "", tmp_path / "imported")
    command = ["from-nanogpt", "--load", str(tmp_path / "ckpt.pt"), "--out", str(run.folder)]
    assert convert_checkpoint.main(command) == 0
    config = run.folder / "global_step7" / "config.yaml"
    run.flags = f"--config {config} --mock-data --log-interval 1 --load {run.folder}".split()
    events = tmp_path / "events"
    # A training stands in for the other trainer.
    run.train(f"--save {tmp_path}/new --tensorboard-dir {events} --exit-interval 10")
    before = digest_folder(run.folder)
    options = f"--steps 3 --log {events}"
    code, answer, _ = run.rehearse(options)
    assert (code, answer["verdict"], answer["from"]) == (0, "go", 7)
    assert {each["name"] for each in answer["quantities"]} == {
        *("number of samples", "learning rate", "loss", "gradient norm"),
    }
    code, answer, _ = run.rehearse(options, "--lr 9e-3 --override-lr-scheduler")
    assert (code, answer["verdict"]) == (1, "no go: iteration 8, learning rate")
    assert run.rehearse("--steps 3")[0] == 3
    assert digest_folder(run.folder) == before
