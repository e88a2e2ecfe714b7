"""Tests of examples/curriculum_learning: the numbers of its page, and its script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.extras.interop.translators.translator import load_config
from megatron.observe.log_line import parse_log_line
from megatron.observe.metrics import read_metrics
from megatron.plan.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "curriculum_learning"
FIXTURE = ROOT / "tests" / "fixtures" / "openwebtext-100"


def test_the_page_shows_the_numbers_of_the_configuration() -> None:
    plan = resolve(
        load_config(
            ["--config", str(EXAMPLE / "curriculum.yaml"), "--vocab-size", "5000", "--save", "x"]
        ).config,
        1,
    )
    assert plan.errors == ()
    assert plan.warnings == ()
    page = (EXAMPLE / "README.md").read_text()
    shown = [entry for entry in map(parse_log_line, page.splitlines()) if entry is not None]
    assert len(shown) == 3
    expected = plan.forecast().predict(int(entry["iteration"]) for entry in shown)
    for entry, progress in zip(shown, expected, strict=True):
        assert entry["train_iters"] == plan.train_iters
        assert entry["curriculum_seqlen"] == progress.seq_length
        assert entry["consumed_samples"] == progress.consumed_samples
        assert entry["consumed_tokens"] == progress.consumed_tokens
    assert plan.config.batch.train_tokens is not None
    end = plan.forecast().find_iteration_reaching_tokens(
        plan.config.batch.train_tokens, plan.train_iters
    )
    assert f"ends at iteration {end}," in page


@pytest.mark.full
def test_the_script_trains_and_resumes(tmp_path: Path) -> None:
    work = tmp_path / "quick start"
    (work / "tokenizer").mkdir(parents=True)
    for suffix in ("bin", "idx"):
        shutil.copy(
            FIXTURE / f"meg-gpt2-openwebtext_text_document.{suffix}",
            work / f"stdlib_text_document.{suffix}",
        )
    shutil.copy(FIXTURE / "gpt2-tiny-vocab.json", work / "tokenizer" / "vocab.json")
    shutil.copy(FIXTURE / "gpt2-tiny-merges.txt", work / "tokenizer" / "merges.txt")
    environment = os.environ | {"QUICKSTART_DIR": str(work), "VIRTUAL_ENV": sys.prefix}
    command = ["bash", str(EXAMPLE / "run.sh")]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "successfully loaded checkpoint from" in result.stdout
    entries = read_metrics(work / "curriculum" / "metrics.jsonl")
    assert [entry["iteration"] for entry in entries] == list(range(1, 124))
    validation = [entry["validation"]["validation"] for entry in entries if "validation" in entry]
    assert validation[-1] < validation[0]
    shutil.rmtree(work)
    empty = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert empty.returncode == 1
    assert "Run 'bash examples/quickstart.sh' first" in empty.stderr
