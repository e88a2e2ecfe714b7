"""Perplexity, bits per byte and next-token accuracy of evaluations, on all layouts."""

import json
import math
from pathlib import Path

import pytest
from process_pool import pretrain, succeed
from tiny_corpus import MERGES, VOCAB
from training.runs import Runner

FLAGS = "--eval-iters 2 --split 8,1,1 --num-layers 2"
TOKENIZER = f"--vocab-file {VOCAB} --merge-file {MERGES}"


def with_tokenizer(argv: list[str]) -> list[str]:
    """Return a command line with the tokenizer's files instead of --vocab-size."""
    at = argv.index("--vocab-size")
    return [*argv[:at], *argv[at + 2 :], *TOKENIZER.split()]


def read_measures(file: Path) -> list[dict]:
    """Return the evaluations in a metrics file."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == "validation"]


@pytest.fixture(scope="module")
def reference(pool, corpus, tmp_path_factory) -> Runner:
    """Return a run of 3 iterations with its evaluations at the end, in one process."""
    run = Runner(pool, corpus, tmp_path_factory.mktemp("measures"))
    succeed(run.pool.run(1, pretrain, with_tokenizer(run.argv(f"{FLAGS} --train-iters 3"))))
    return run


def test_measures_of_a_run(reference: Runner) -> None:
    validation, test = read_measures(reference.folder / "metrics.jsonl")
    assert (validation["name"], test["name"]) == ("validation", "test")
    for entry in (validation, test):
        positions = 2 * 4 * 32
        assert entry["accuracy"] * positions == pytest.approx(round(entry["accuracy"] * positions))
        # An English text has 3 to 5 bytes for each of these tokens.
        bytes_per_token = entry["lm_loss"] / math.log(2) / entry["bits_per_byte"]
        assert 2.5 < bytes_per_token < 5


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--zero-stage 3"),
        pytest.param(
            4,
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
            marks=pytest.mark.full,
        ),
        (2, "--deepspeed --zero-stage 1"),
        (2, "--deepspeed --zero-stage 0 --pipeline-model-parallel-size 2"),
    ],
)
def test_measures_are_the_same_on_every_layout(
    reference: Runner, tmp_path: Path, ranks: int, layout: str
) -> None:
    if "deepspeed" in layout:
        pytest.importorskip("deepspeed")
    file = tmp_path / "metrics.jsonl"
    argv = with_tokenizer(reference.argv(f"{FLAGS} {layout} --eval-only --metrics-file {file}"))
    succeed(reference.pool.run(ranks, pretrain, argv))
    expected = read_measures(reference.folder / "metrics.jsonl")
    found = read_measures(file)
    assert [entry["name"] for entry in found] == ["validation", "test"]
    for one, other in zip(found, expected, strict=True):
        assert one["accuracy"] == other["accuracy"]
        assert one["bits_per_byte"] == pytest.approx(other["bits_per_byte"], rel=1e-5)


def test_masked_positions_do_not_count(reference: Runner, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    flags = f"{FLAGS} --eval-only --eod-mask-loss --metrics-file {file}"
    succeed(reference.pool.run(1, pretrain, with_tokenizer(reference.argv(flags))))
    plain = read_measures(reference.folder / "metrics.jsonl")
    masked = read_measures(file)
    assert [entry["bits_per_byte"] for entry in plain] != [e["bits_per_byte"] for e in masked]
    for entry in masked:
        assert 2.5 < entry["lm_loss"] / math.log(2) / entry["bits_per_byte"] < 5


@pytest.mark.parametrize("flags", ["", "--mock-data"])
def test_without_text_only_the_bits_per_byte_are_missing(run: Runner, flags: str) -> None:
    argv = run.argv(f"{FLAGS} --train-iters 1 {flags}")
    if flags:
        at = argv.index("--data-path")
        argv = argv[:at] + argv[at + 2 :]
    output = succeed(run.pool.run(1, pretrain, argv))
    assert output.count("bits per byte are left out") == 1
    assert output.count("next-token accuracy") == 2
    for entry in read_measures(run.folder / "metrics.jsonl"):
        assert "bits_per_byte" not in entry
        assert 0 <= entry["accuracy"] <= 1
