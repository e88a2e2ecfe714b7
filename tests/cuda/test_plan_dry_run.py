"""`tools/plan.py --dry-run`: its report, and its errors."""

import json
import shlex

import pytest
from cuda.conftest import Call

from megatron.commands import plan

SMALL = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--vocab-size 101 --train-iters 10 --lr 1e-3 --bf16 --pipeline-model-parallel-size 2 "
    "--global-batch-size 32"
)
INTERLEAVED = ["--num-layers-per-virtual-pipeline-stage", "1"]


def test_a_rank_of_each_kind_is_reported(on_fake_gpu: Call, capsys):
    # The fixture only skips the test if there is no compiler.
    code = plan.main(["--dry-run", "--world-size", "4", "--json", "--", *SMALL])
    reports = json.loads(capsys.readouterr().out)["dry_run"]
    assert code == 0
    # Two stages, and two data-parallel ranks.
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    for report in reports:
        assert report["microbatches"] == 3
        assert report["peak_bytes"]["weights"] == report["kept_bytes"]["weights"] > 0
        kinds = {each["kind"] for each in report["collectives"]}
        assert kinds == {"all_gather", "reduce_scatter", "all_reduce", "send", "receive"}
        assert [each["count"] for each in report["synchronisations"]] == [1]


def test_the_report_has_tables(on_fake_gpu: Call, capsys):
    code = plan.main(["--dry-run", "--world-size", "2", "--deepspeed", *SMALL])
    printed = capsys.readouterr().out
    assert code == 0
    assert "rank 1 of 2 (pipeline 1, data 0, tensor 0), 3 of 16 microbatches" in printed
    assert "communication" in printed
    assert "blocking copy to the host" in printed
    assert "This is the step of the native engine" in printed


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        (["--dry-run-microbatches", "0"], "--dry-run-microbatches 0 must be at least 1"),
        (["--dry-run-microbatches", "3", *INTERLEAVED], "must be a multiple of"),
    ],
)
def test_a_wrong_number_of_microbatches_is_refused(flags, phrase, capsys):
    assert plan.main(["--dry-run", "--world-size", "2", *flags, *SMALL]) == 2
    assert phrase in capsys.readouterr().err


def test_a_plan_with_errors_is_not_run(capsys):
    code = plan.main(["--dry-run", "--world-size", "3", "--json", *SMALL])
    result = json.loads(capsys.readouterr().out)
    assert code == 2
    assert result["errors"]
    assert result["dry_run"] == []


def test_one_line_says_that_there_is_no_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert plan.main(["--dry-run", "--world-size", "2", *SMALL]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "needs a C++ compiler" in errors[0]


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path, capsys):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho unknown option -std=c++20 >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    assert plan.main(["--dry-run", "--world-size", "2", *SMALL]) == 2
    assert "unknown option -std=c++20" in capsys.readouterr().err
    # Nothing half-written is left that a later run would load.
    assert list((tmp_path / "cache").rglob("*.so")) == []
