"""Tests that tools/sample_idxs_to_text.py prints the text that training reads."""

import json
import re
import shlex
from pathlib import Path

import pytest
from data.source_requests import open_sources
from saved_checkpoint import save_checkpoint

from megatron.checkpoint.save import CheckpointContents
from megatron.commands import sample_idxs_to_text as tool
from megatron.config.yaml_file import dump_yaml
from megatron.extras.interop.translators.translator import load_config
from megatron.run.state import TrainState

CORPUS = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"


@pytest.fixture
def run(tmp_path) -> list[str]:
    """Return the arguments of a run over the first 100 documents."""
    return shlex.split(
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
        "--micro-batch-size 1 --train-samples 96 --lr 1e-3 "
        "--global-batch-size 4 --rampup-batch-size 2 2 8 --split 90,8,2 "
        f"--vocab-file {CORPUS}/gpt2-tiny-vocab.json --merge-file {CORPUS}/gpt2-tiny-merges.txt "
        f"--data-path {CORPUS}/meg-gpt2-openwebtext_text_document "
        f"--data-cache-path {tmp_path}/cache --skip-train-iteration-range 9-10"
    )


def show(capsys, *argv: str) -> list[tuple[str, str]]:
    """Run the tool and return its output as [(heading, text)]."""
    assert tool.main(list(argv)) == 0
    blocks = re.split(r"^=== ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    return [(block.partition("\n")[0], block.partition("\n")[2][:-1]) for block in blocks]


def run_with_error(capsys, *argv: str) -> str:
    """Run the tool, which must exit with 2, and return its message."""
    assert tool.main(list(argv)) == 2
    return capsys.readouterr().err


def match_start(pattern: str, text: str) -> re.Match[str]:
    found = re.match(pattern, text)
    assert found is not None, text
    return found


def save(root: Path, run: list[str], consumed: int, iteration: int) -> None:
    """Save the checkpoint that a run would have saved at this iteration."""
    config = load_config(run).config
    length = config.model.seq_length
    sources = open_sources(config.data, 96, seq_length=length, seed=config.batch.seed)
    assert sources.train is not None
    sources.train.advance(consumed)
    state = TrainState(iteration=iteration, consumed_samples=consumed, data=sources.state())
    save_checkpoint(
        root, CheckpointContents(iteration, None, state.to_json(), dump_yaml(config)), []
    )


def test_sample_text_is_that_of_its_document(capsys, run):
    lines = (CORPUS / "openwebtext-100.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    shown = show(capsys, "--samples", "0-20", "--", *run)
    samples = [match_start(r"sample (\d+):", heading)[1] for heading, _ in shown]
    assert [int(sample) for sample in samples] == list(range(21))
    checked = 0
    for heading, text in shown:
        match = re.search(r"token \d+ of document (\d+)$", heading)
        if match:
            assert text.strip("�") in documents[int(match[1])] + "<|endoftext|>"
            checked += 1
    assert checked > 10


def test_iterations_follow_the_ramp_up(capsys, run):
    """The first 4 iterations have batches of 2, until 8 samples are consumed. Later ones have 4."""
    shown = show(capsys, "--iterations", "4-6", "9", "--", *run)
    headings = [
        match_start(r"sample (\d+) \(iteration (\d+)(.*?)\)", heading).groups()
        for heading, _ in shown
    ]
    expected = {4: range(6, 8), 5: range(8, 12), 6: range(12, 16), 9: range(24, 28)}
    assert [(int(sample), int(iteration)) for sample, iteration, _ in headings] == [
        (sample, iteration) for iteration, samples in expected.items() for sample in samples
    ]
    remarks = {remark for _, iteration, remark in headings if iteration == "9"}
    assert len(remarks) == 1
    assert "skipped" in remarks.pop()
    by_sample = show(capsys, "--samples", "6-7", "--", *run)
    assert [text for _, text in by_sample] == [text for _, text in shown[:2]]


def test_samples_of_a_checkpoint_equal_those_of_its_arguments(capsys, run, tmp_path):
    save(tmp_path / "save", run, consumed=16, iteration=6)
    expected = show(capsys, "--samples", "3", "50", "--", *run)
    for folder in ("save", "save/global_step6"):
        shown = show(capsys, "--samples", "3", "50", "--checkpoint", str(tmp_path / folder))
        assert shown == expected


def test_a_new_seed_changes_only_samples_after_the_checkpoint(capsys, run, tmp_path):
    save(tmp_path / "save", run, consumed=16, iteration=6)
    before = show(capsys, "--samples", "0-20", "--", *run)
    after = show(
        capsys, "--samples", "0-20", "--", *run, "--seed", "7", "--load", str(tmp_path / "save")
    )
    assert after[:16] == before[:16]
    assert after[16:] != before[16:]


def test_a_batch_size_that_changed_during_the_run_is_an_error(capsys, run, tmp_path):
    save(tmp_path / "save", run, consumed=15, iteration=6)
    message = run_with_error(capsys, "--iterations", "3", "--checkpoint", str(tmp_path / "save"))
    assert "16 samples are consumed after iteration 6" in message
    assert "records 15" in message


def test_bare_batch_size_thresholds_of_a_checkpoint_are_samples(capsys, run, tmp_path):
    """Earlier versions stored thresholds without a unit and read them as samples."""
    at = run.index("--rampup-batch-size")
    steps = [*run[:at], "--step-batch-size-schedule", "0:2 8:4", *run[at + 4 :]]
    save(tmp_path / "save", steps, consumed=16, iteration=6)
    assert tool.main(["--iterations", "5", "--checkpoint", str(tmp_path / "save")]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("=== ") == 4
    assert "'0:2 8:4' is read as '0:2 8samples:4'" in printed.err


def test_errors_name_the_rule_and_the_value(capsys, run, tmp_path):
    assert "no samples are requested" in run_with_error(capsys, "--", *run)
    for word in ("3-1", "x", "0-3"):
        message = run_with_error(capsys, "--iterations", word, "--", *run)
        assert f"--iterations {word} must be" in message
    assert "sample 9999999 is not among the" in run_with_error(
        capsys, "--samples", "9999999", "--", *run
    )
    assert "no run has saved here yet; give the --save folder" in run_with_error(
        capsys, "--samples", "1", "--checkpoint", str(tmp_path)
    )
    at = run.index("--global-batch-size")
    batch_flags = ["--global-batch-size", "4", "--rampup-batch-size", "2", "2", "8"]
    without_batch = [*run[:at], *run[at + len(batch_flags) :]]
    assert "give --world-size" in run_with_error(capsys, "--iterations", "1", "--", *without_batch)
    without_samples = [word for word in run if word not in ("--train-samples", "96")]
    assert "the run trains on no sample" in run_with_error(
        capsys, "--samples", "1", "--", *without_samples
    )
    assert "does not exist" in run_with_error(
        capsys, "--samples", "1", "--", *run, "--data-path", str(tmp_path / "nowhere")
    )
