"""tools/sample_idxs_to_text.py: the text is the corpus's own, at the place that training reads."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron.checkpoint.save import CheckpointContents, save_checkpoint
from megatron.config.cli import dump_yaml, load_config
from megatron.data.source import BatchSlice, build_sources
from megatron.training.state import TrainState
from tools import sample_idxs_to_text as tool

CORPUS = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"


@pytest.fixture
def run(tmp_path) -> list[str]:
    """A run's arguments over the first 100 documents."""
    return shlex.split(
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 --train-samples 96 "
        f"--lr 1e-3 --global-batch-size 4 --rampup-batch-size 2 2 8 --split 90,8,2 --vocab-file {CORPUS}/gpt2-tiny-vocab.json "
        f"--merge-file {CORPUS}/gpt2-tiny-merges.txt --data-path {CORPUS}/meg-gpt2-openwebtext_text_document "
        f"--data-cache-path {tmp_path}/cache --skip-train-iteration-range 9-10"
    )


def show(capsys, *argv: str) -> list[tuple[str, str]]:
    """[(heading, text)]"""
    assert tool.main(list(argv)) == 0
    blocks = re.split(r"^=== ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    return [(block.partition("\n")[0], block.partition("\n")[2][:-1]) for block in blocks]


def fails(capsys, *argv: str) -> str:
    assert tool.main(list(argv)) == 2
    return capsys.readouterr().err


def save(root: Path, run: list[str], consumed: int, iteration: int) -> None:
    """What a run leaves behind."""
    config = load_config(run).config
    sources = build_sources(
        config.data,
        seq_length=32,
        seed=config.batch.seed,
        train_samples=96,
        valid_samples=0,
        test_samples=0,
        batch_slice=BatchSlice(1),
    )
    sources.train.advance(consumed)
    state = TrainState(iteration=iteration, consumed_samples=consumed, data=sources.state())
    save_checkpoint(
        root, CheckpointContents(iteration, None, state.to_json(), dump_yaml(config)), []
    )


def test_the_text_is_the_documents(capsys, run):
    lines = (CORPUS / "openwebtext-100.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    shown = show(capsys, "--samples", "0-20", "--", *run)
    assert [int(re.match(r"sample (\d+):", heading)[1]) for heading, _ in shown] == list(range(21))
    checked = 0
    for heading, text in shown:
        if place := re.search(r"token \d+ of document (\d+)$", heading):
            assert text.strip("�") in documents[int(place[1])] + "<|endoftext|>"
            checked += 1
    assert checked > 10


def test_iterations_follow_the_ramp(capsys, run):
    """Batches of 2 until 8 samples are consumed (4 iterations), then of 4."""
    shown = show(capsys, "--iterations", "4-6", "9", "--", *run)
    headings = [
        re.match(r"sample (\d+) \(iteration (\d+)(.*?)\)", heading).groups() for heading, _ in shown
    ]
    expected = {4: range(6, 8), 5: range(8, 12), 6: range(12, 16), 9: range(24, 28)}
    assert [(int(sample), int(iteration)) for sample, iteration, _ in headings] == [
        (sample, iteration) for iteration, samples in expected.items() for sample in samples
    ]
    assert {remark for _, iteration, remark in headings if iteration == "9"} == {
        ", skipped: not trained on"
    }
    by_sample = show(capsys, "--samples", "6-7", "--", *run)
    assert [text for _, text in by_sample] == [text for _, text in shown[:2]]


def test_from_a_checkpoint(capsys, run, tmp_path):
    save(tmp_path / "save", run, consumed=16, iteration=6)
    expected = show(capsys, "--samples", "3", "50", "--", *run)
    for where in ("save", "save/global_step6"):
        assert (
            show(capsys, "--samples", "3", "50", "--checkpoint", str(tmp_path / where)) == expected
        )


def test_after_a_new_seed_the_past_stays_as_it_was(capsys, run, tmp_path):
    save(tmp_path / "save", run, consumed=16, iteration=6)
    before = show(capsys, "--samples", "0-20", "--", *run)
    after = show(
        capsys, "--samples", "0-20", "--", *run, "--seed", "7", "--load", str(tmp_path / "save")
    )
    assert after[:16] == before[:16]
    assert after[16:] != before[16:]


def test_a_batch_size_that_changed_in_mid_run(capsys, run, tmp_path):
    save(tmp_path / "save", run, consumed=15, iteration=6)
    said = fails(capsys, "--iterations", "3", "--checkpoint", str(tmp_path / "save"))
    assert "16 samples are consumed after iteration 6" in said
    assert "records 15" in said


def test_a_run_with_bare_thresholds_of_the_batch_size(capsys, run, tmp_path):
    """Its checkpoint stored them as earlier versions did, which read samples."""
    at = run.index("--rampup-batch-size")
    steps = [*run[:at], "--step-batch-size-schedule", "0:2 8:4", *run[at + 4 :]]
    save(tmp_path / "save", steps, consumed=16, iteration=6)
    assert tool.main(["--iterations", "5", "--checkpoint", str(tmp_path / "save")]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("=== ") == 4
    assert "'0:2 8:4' is read as '0:2 8samples:4'" in printed.err


def test_mistakes(capsys, run, tmp_path):
    assert "nothing is asked for" in fails(capsys, "--", *run)
    for word in ("3-1", "x", "0-3"):
        assert f"--iterations {word} must be a number from 1 on" in fails(
            capsys, "--iterations", word, "--", *run
        )
    assert "sample 9999999 is not among the" in fails(capsys, "--samples", "9999999", "--", *run)
    assert "has no pointer latest to a checkpoint" in fails(
        capsys, "--samples", "1", "--checkpoint", str(tmp_path)
    )
    at = run.index("--global-batch-size")
    without = [
        *run[:at],
        *run[at + len(["--global-batch-size", "4", "--rampup-batch-size", "2", "2", "8"]) :],
    ]
    assert "give --world-size" in fails(capsys, "--iterations", "1", "--", *without)
    endless = [word for word in run if word not in ("--train-samples", "96")]
    assert "the run trains on no sample" in fails(capsys, "--samples", "1", "--", *endless)
    assert "does not exist" in fails(
        capsys, "--samples", "1", "--", *run, "--data-path", str(tmp_path / "nowhere")
    )
