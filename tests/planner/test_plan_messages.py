"""What the planner prints: short, beside the result that it is about, in the words of the user."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron.base import exit_codes
from megatron.commands import plan
from megatron.data.epochs import DatasetUse, warn_about_many_epochs

TINY = shlex.split(
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --train-iters 100"
)
MOCK = ["--mock-data", "--vocab-size", "256"]
SEVEN = shlex.split("--preset llama2-7b --zero-stage 3 --micro-batch-size 1 --lr 3e-4")


def report(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert plan.main(list(words)) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_many_missing_files_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mixture = [word for n in range(1, 114) for word in (f"0.0{n}", f"{tmp_path}/data/part-{n}")]
    text = report(
        capsys, "--world-size", "1", *TINY, "--vocab-size", "256", "--data-path", *mixture
    )
    (line,) = [line for line in text.splitlines() if "not on this machine" in line]
    assert line.count(".idx") == 3
    assert line.endswith("part-3.idx and 110 more are not on this machine.")
    assert len(text) < 6000
    # A wrong weight does not repeat the mixture either.
    mixture[::2] = ["none"] * 113
    text = report(capsys, "--world-size", "1", *TINY, *MOCK, "--data-path", *mixture, code=2)
    assert "'none', 'none', 'none' and 110 more must be a weight" in text
    assert "(226 values)" in text
    assert len(text) < 6000


def test_many_phases_of_missing_data_are_short(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mixture = [word for n in range(50) for word in ("0.5", f"data/part-{n}")]
    phases = tmp_path / "phases.yaml"
    phases.write_text(yaml.safe_dump([{"data_path": mixture}]))
    words = ["--world-size", "1", *TINY, "--vocab-size", "256", "--data-phases", str(phases)]
    text = report(capsys, *words)
    assert "part-2.idx and 47 more are not on this machine." in text
    assert text.count("part-49.idx") == 0


def test_stray_words_are_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys, *TINY, "--seed", "1", *map(str, range(100)), code=2)
    assert "'0', '1', '2' and 97 more after --seed 1 belongs to no flag." in text


def test_data_that_are_read_often_are_one_warning() -> None:
    uses = [DatasetUse(f"data/{n}", 10, 50.0 + n) for n in range(100)]
    (warning,) = warn_about_many_epochs(uses)
    assert warning.startswith("100 data sets with many epochs: data/99 has 10 tokens for training")
    assert "data/97 has" in warning
    assert "which is 14.7 epochs and 97 more. More than 4 epochs" in warning


def test_what_is_assumed_stands_beside_the_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path"]
    text = report(capsys, *TINY, "--mock-data", *absent, "gpt2")
    lines = text.splitlines()
    vocabulary = "a vocabulary of 50,257 (--vocab-size); 1 process, one replica of the model"
    assert vocabulary in lines[0]
    verdict = next(number for number, line in enumerate(lines) if "  peak memory" in line)
    assert vocabulary in lines[verdict + 1]
    found = json.loads(report(capsys, "--json", *TINY, "--mock-data", *absent, "gpt2"))
    assert found["assumed"][0] == "a vocabulary of 50,257 (--vocab-size)"
    # What a missing file would set is assumed too.
    missing = ["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")]
    text = report(capsys, "--world-size", "1", *TINY, *MOCK, *missing)
    assert f"no precision and no sequence lengths in {missing[-1]}" in text.splitlines()[0]
    # Nothing is assumed about a complete command.
    assert "assumed " not in report(capsys, "--world-size", "1", *TINY, *MOCK)
    # A size that nobody knows is an error.
    text = report(capsys, "--world-size", "1", *TINY, "--mock-data", *absent, "/of/my/own", code=2)
    assert "/of/my/own does not exist on this machine, so the size of the vocabulary" in text


@pytest.mark.parametrize(
    ("flags", "expected", "rate"),
    [
        ("--lr-decay-style cosine", "0.001 to 0.0001, cosine", 1e-4),
        ("--lr-decay-iters 200", "0.00055 at the last iteration; 0.001 to 0.0001, linear", 5.5e-4),
        # Skipped iterations do not change the rate.
        ("--skip-train-iteration-range 1-50", "0.00055 at the last iteration; ", 5.5e-4),
        ("--lr-warmup-iters 200 --lr-decay-iters 400", "0.0005 at the last iteration; ", 5e-4),
        ("--lr-decay-style constant", "0.001, constant, warm-up 0 samples", 1e-3),
        ("--train-tokens 3200", "0.00055 at the last iteration; ", 5.5e-4),
        ("--lr-decay-tokens 12800", "0.00055 at the last iteration; ", 5.5e-4),
        # The decay begins after 10 iterations of 64 tokens, 640 tokens, and has 5,760 of 12,160.
        (
            "--lr-decay-tokens 12800 --lr-warmup-tokens 600 --lr-decay-style linear",
            "0.000574 at the last iteration; ",
            1e-4 + 9e-4 * (1 - 5760 / 12160),
        ),
    ],
)
def test_the_rate_of_the_last_iteration(
    capsys: pytest.CaptureFixture[str], flags: str, expected: str, rate: float
) -> None:
    words = ["--world-size", "1", *TINY, *MOCK, *flags.split()]
    assert f"learning rate         {expected}" in report(capsys, *words)
    found = json.loads(report(capsys, "--json", "--at", "100", *words))
    assert found["last_lr"] == pytest.approx(rate)
    # It is the rate of the forecast, unless tokens end the run earlier.
    if "--train-tokens" not in flags:
        assert found["last_lr"] == pytest.approx(found["at"][0]["lr"])


def test_a_grid_that_does_not_fit_names_the_flag_of_the_planner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*TINY, *MOCK, "--tensor-model-parallel-size", "2"]
    text = report(capsys, "--world-size", "1", *words, code=2)
    assert "must divide the number of processes, 1; use --world-size 2, or other sizes." in text


@pytest.mark.parametrize("flag", ["--eval-global-batch-size", "--eval-micro-batch-size"])
def test_a_batch_size_of_evaluations_is_not_that_of_training(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    text = report(capsys, *TINY, *MOCK, flag, "4", code=2)
    assert f"{flag} 4 is not possible here: an evaluation has the batch sizes of training" in text


@pytest.mark.parametrize("flag", ["--valid-global-batch-size", "--test-micro-batch-size"])
def test_no_hint_leads_from_an_evaluation_to_the_training(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    text = report(capsys, *TINY, *MOCK, flag, "4", code=2)
    assert f"unknown flag {flag}; --help lists all flags." in text


def test_no_hint_of_a_file_leads_from_an_evaluation_to_the_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch: {eval_global_batch_size: 4}\n")
    text = report(capsys, *TINY, *MOCK, "--config", str(file), code=2)
    assert "has an unknown key 'batch.eval_global_batch_size'; --help lists" in text


@pytest.mark.parametrize(
    ("flags", "hardware", "expected"),
    [
        ("", "a100-80g", r"fp32\. With --bf16, a step would take [\d.]+ s, and [\d.]+ instead of"),
        ("", "v100-32g", r"fp32\. With --fp16, a step would take"),
        ("--bf16", "a100-80g", None),
        ("--fp16", "a100-80g", None),
        ("", "cpu", None),
    ],
)
def test_fp32_on_a_gpu_names_the_faster_precision(
    capsys: pytest.CaptureFixture[str], flags: str, hardware: str, expected: str | None
) -> None:
    words = ["--hardware", hardware, "--world-size", "1", *TINY, *MOCK, *flags.split()]
    text = report(capsys, *words)
    if expected is None:
        assert "  precision" not in text
    else:
        assert re.search(rf"^  precision +{expected}", text, re.MULTILINE)


def test_a_model_that_is_too_large_in_fp32_names_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world-size", "8", *SEVEN, *MOCK, "--train-iters", "10", "--lr-warmup-iters", "2"]
    words += ["--device-memory-gib", "2"]
    text = report(capsys, *words, code=exit_codes.DOES_NOT_FIT)
    assert "none fits in memory: use --bf16, more tensor or pipeline ranks" in text
    text = report(capsys, *words, "--bf16", code=exit_codes.DOES_NOT_FIT)
    assert "none fits in memory: use more tensor or pipeline ranks" in text


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ("--train-iters 100000", True),
        ("--train-samples 25600000 --global-batch-size 256 --lr-decay-style constant", True),
        # Few iterations of large batches are a long run too.
        ("--train-iters 4000 --global-batch-size 1024", True),
        ("--train-iters 100000 --lr-warmup-iters 2000", False),
        ("--train-iters 100000 --lr-warmup-fraction 0.01", False),
        ("--train-iters 100", False),
        ("--train-time 30min", False),
    ],
)
def test_a_long_run_without_a_warm_up_is_warned_about(
    capsys: pytest.CaptureFixture[str], flags: str, warned: bool
) -> None:
    words = ["--json", "--world-size", "8", *SEVEN, *MOCK, "--bf16", *flags.split()]
    warnings = json.loads(report(capsys, *words))["warnings"]
    assert any("--lr 0.0003 applies from the first" in text for text in warnings) == warned
