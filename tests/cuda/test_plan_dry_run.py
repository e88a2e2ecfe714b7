"""`tools/plan.py --dry-run`: its report, and its errors."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import GPT, Case, plan_case, run_case
from process_states import has_ended

from megatron.commands import plan
from megatron.extras.planner.commands.plan_dry_run import format_dry_run
from megatron.extras.planner.dry_run.process import choose_microbatches, list_rank_kinds

ROOT = Path(__file__).resolve().parents[2]
ONE_STAGE = shlex.split(GPT + "--num-layers 4 --bf16 --global-batch-size 32")
SMALL = [*ONE_STAGE, "--pipeline-model-parallel-size", "2"]
VIRTUAL = "--num-layers 8 --num-layers-per-virtual-pipeline-stage 1"
PP4 = "--num-layers 4 --pipeline-model-parallel-size 4 --global-batch-size 256"
INTERLEAVED = ["--num-layers-per-virtual-pipeline-stage", "1"]


def test_the_report_has_what_each_rank_did(on_fake_gpu: Call, capsys):
    # The fixture only skips the test if there is no compiler.
    code = plan.main(["--dry-run", "--world-size", "1", "--json", "--", *ONE_STAGE])
    (report,) = json.loads(capsys.readouterr().out)["dry_run"]
    assert code == 0
    assert report["rank"] == 0
    assert report["microbatches"] == 2
    assert report["peak_bytes"]["weights"] == report["kept_bytes"]["weights"] > 0
    assert report["collectives"] == []
    assert [each["count"] for each in report["synchronisations"]] == [1]


@pytest.mark.full
def test_two_stages_are_run_by_processes_of_their_own(on_fake_gpu: Call, capsys):
    code = plan.main(["--dry-run", "--world-size", "2", "--json", "--", *SMALL])
    reports = json.loads(capsys.readouterr().out)["dry_run"]
    assert code == 0
    assert [report["coordinate"][:10] for report in reports] == ["pipeline 0", "pipeline 1"]
    for report in reports:
        assert {each["kind"] for each in report["collectives"]} == {"all_reduce", "send", "receive"}


@pytest.mark.parametrize(
    ("flags", "world_size", "ranks"),
    [
        ("", 1, [0]),
        ("--tensor-model-parallel-size 2 --global-batch-size 64", 64, [0, 62]),
        # Of 4 stages with 8 data-parallel ranks each: first, middle and last.
        (PP4, 32, [0, 7, 16, 23, 24, 31]),
    ],
)
def test_a_rank_of_each_kind_is_run(flags, world_size, ranks):
    assert list_rank_kinds(plan_case(Case(flags, world_size))) == ranks


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--global-batch-size 64", 2),
        ("--global-batch-size 2", 1),
        ("--global-batch-size 64 --zero-stage 2", 3),
        (PP4, 5),
        (f"{PP4} {VIRTUAL}", 8),
        # 9 microbatches are no multiple of 4 stages, so all forward passes come first.
        (f"{PP4} {VIRTUAL} --global-batch-size 144", 9),
    ],
)
def test_a_step_is_as_long_as_needed(flags, expected):
    world_size = 32 if PP4 in flags else 1
    assert choose_microbatches(plan_case(Case(flags, world_size))) == expected


def test_the_text_has_tables(on_fake_gpu: Call):
    case = Case("--bf16 --deepspeed --tensor-model-parallel-size 2 --global-batch-size 4", 2, 1)
    text = "\n".join(format_dry_run(plan_case(case), [on_fake_gpu(run_case, case)]))
    assert "rank 1 of 2 (pipeline 0, data 0, tensor 1), 2 of 2 microbatches" in text
    assert "communication" in text
    assert re.search(r"all_reduce +tensor +2 +bfloat16 +8.19 kB +default +20", text)
    assert "blocking copy to the host" in text
    assert "This is the step of the native engine" in text


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
    assert list((tmp_path / "cache" / "megatron-3d").iterdir()) == []


OWNER = """
import os
import time

from megatron.extras.planner.dry_run.process import open_pool

if __name__ == "__main__":
    print(open_pool(1).submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_processes_end_with_a_dry_run_that_is_killed(on_fake_gpu: Call, tmp_path: Path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, env=environment
    ) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        os.kill(worker, 0)
        owner.kill()
    until = time.monotonic() + 20
    while not has_ended(worker):
        assert time.monotonic() < until, f"process {worker} is still there"
        time.sleep(0.05)


def write_compiler(path: Path) -> Path:
    """Write a compiler whose libraries are text."""
    # The library is the argument after -o.
    path.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n')
    path.chmod(0o755)
    return path


def test_a_damaged_guard_is_named(monkeypatch, tmp_path: Path, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "compiler")))
    assert plan.main(["--dry-run", "--world-size", "1", *ONE_STAGE]) == 2
    printed = capfd.readouterr().err
    assert str(tmp_path / "cache" / "megatron-3d" / "cuda_guard-") in printed
    assert "file may be damaged" in printed
    assert "Traceback" not in printed


def test_a_home_that_cannot_be_written_leaves_no_folder(tmp_path: Path):
    """A user without a home compiles into a folder that is removed at the end."""
    compiler = write_compiler(tmp_path / "compiler")
    (tmp_path / "temporary").mkdir()
    code = (
        "import tempfile; from megatron.extras.planner.dry_run.process import build_guard; "
        "path = build_guard(); print(path, path.read_text(), tempfile.gettempdir())"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CXX": str(compiler),
        "XDG_CACHE_HOME": "/proc/none",
        "TMPDIR": str(tmp_path / "temporary"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "temporary" / "megatron-3d-") in done.stdout
    assert "library" in done.stdout
    assert list((tmp_path / "temporary").iterdir()) == []
