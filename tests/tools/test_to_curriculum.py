"""Tests of tools/to_curriculum.py, run with command lines.

The expected numbers of the 104B run are those that its authors changed it to.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.commands import to_curriculum
from megatron.extras.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "tests" / "fixtures" / "published_runs"
SMALL = shlex.split(
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --vocab-size 1000"
)
RAMP = [*SMALL, *shlex.split("--train-samples 4000 --rampup-batch-size 4 4 400")]


def read_arguments(run: str) -> list[str]:
    return list(json.loads((RUNS / f"{run}.json").read_text())["arguments"])


def parse_output(output: str) -> dict[str, list[str]]:
    """Return the lines of the tool's output by title."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in output.splitlines():
        if line and line[0] not in " -{}":
            title = line
        elif line.startswith(("  -", "- ")):
            found.setdefault(title, []).append(line.strip())
    return found


def run_tool(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, list[str]]:
    assert to_curriculum.main(list(argv)) == 0
    return parse_output(capsys.readouterr().out)


def plan_with_changes(old: list[str], found: dict[str, list[str]]) -> Plan:
    """Return the plan of the old command line with the reported changes applied to it."""
    argv = list(old)
    for line in found["remove"]:
        flag, *values = line.partition(" (")[0].split()
        at = argv.index(flag)
        assert [word.replace("_", "") for word in argv[at + 1 : at + 1 + len(values)]] == values
        del argv[at : at + 1 + len(values)]
    changes = [line.partition("->")[2].strip() for line in found.get("change", [])]
    for line in [*changes, *found["add"]]:
        argv += line.split()  # if a flag is given twice, the last value wins
    plan = resolve(load_config(argv).config, 1)
    assert plan.errors == ()
    return plan


def test_changes_of_tr8_are_those_of_the_published_run(capsys):
    found = run_tool(capsys, "--train-tokens", "300_000_000_000", "--", *read_arguments("tr8-104B"))
    assert found["remove"] == [
        "--rampup-batch-size 16 16 6000000",
        "--lr-decay-samples 126953125",
    ]
    assert found["change"] == ["--train-samples 300000000  ->  --train-samples 600_000_000"]
    assert found["add"] == [
        "--train-tokens 300_000_000_000",
        "--lr-decay-tokens 260_000_000_000",
        "--curriculum-schedule-type fixed_linear",
        "--curriculum-min-difficulty 64",
        "--curriculum-total-step 35_762",  # the run used 36000
        "--curriculum-difficulty-step 8",
    ]
    remarks = "\n".join(found["consequences"])
    assert "one lasts 144 iterations" in remarks  # the run evaluated every 150 iterations
    # The log of the run has 216,960 samples after iteration 6502 of the ramp-up.
    assert "the warm-up's 216,320 samples are 106 iterations" in remarks
    assert "instead of 6,494 iterations" in remarks


def test_train_tokens_default_to_the_tokens_of_the_samples(capsys):
    found = run_tool(
        capsys,
        "--total-step",
        "40000",
        "--min-difficulty=128",
        "--",
        *read_arguments("tr11-176B-ml"),
    )
    assert f"--train-tokens {220_000_000 * 2048:_}" in found["add"]
    assert f"--lr-decay-tokens {200_000_000 * 2048:_}" in found["add"]
    assert "--curriculum-total-step 40_000" in found["add"]
    assert "--curriculum-min-difficulty 128" in found["add"]


def test_the_new_command_line_ends_at_its_tokens(capsys):
    found = run_tool(capsys, "--", *RAMP)
    plan = plan_with_changes(RAMP, found)
    assert plan.curriculum is not None
    assert plan.warnings == ()
    assert plan.curriculum.total_curriculum_step == 4000 // 16 // 2
    assert plan.config.batch.train_tokens == 4000 * 128
    assert plan.lr_schedule.decay_tokens == 4000 * 128
    end = plan.forecast().find_iteration_reaching_tokens(4000 * 128, plan.train_iters)
    assert end < plan.train_iters
    assert any(
        line.startswith(f"- the run ends at iteration {end:,} ") for line in found["consequences"]
    )


def test_the_printed_deepspeed_block_gives_the_same_curriculum(capsys, tmp_path):
    assert to_curriculum.main(["--", *RAMP]) == 0
    output = capsys.readouterr().out
    path = tmp_path / "ds_config.json"
    path.write_text(output[output.index("\n{") : output.index("\n}") + 2])
    tokens = ["--train-tokens", "512_000", "--lr-decay-tokens", "512_000"]
    deepspeed = ["--deepspeed", "--deepspeed_config", str(path)]
    argv = [*SMALL, "--train-samples", "8000", *tokens, *deepspeed]
    plan = resolve(load_config(argv).config, 1)
    assert plan.curriculum == plan_with_changes(RAMP, parse_output(output)).curriculum


def test_a_schedule_in_iterations_is_converted(capsys):
    """Iterations of warm-up and decay have the final batch size. 100 of them are 1,600 samples."""
    old = [
        *SMALL,
        *shlex.split(
            "--train-iters 300 --rampup-batch-size 8 8 80 "
            "--lr-decay-iters 100 --lr-warmup-fraction 0.1"
        ),
    ]
    found = run_tool(capsys, "--", *old)
    assert found["remove"] == [
        "--rampup-batch-size 8 8 80",
        "--lr-decay-iters 100",
        "--lr-warmup-fraction 0.1",
    ]
    assert found["change"] == ["--train-iters 300  ->  --train-iters 600"]
    assert f"--lr-decay-tokens {1600 * 128:_}" in found["add"]
    assert "--lr-warmup-iters 10" in found["add"]
    plan_with_changes(old, found)


def test_a_warmup_fraction_becomes_samples(capsys):
    found = run_tool(capsys, "--", *RAMP, "--lr-warmup-fraction", "0.01")
    assert "--lr-warmup-samples 40" in found["add"]


def test_a_warmup_in_tokens_becomes_samples(capsys):
    found = run_tool(capsys, "--", *RAMP, "--lr-warmup-tokens", "1280")
    assert "--lr-warmup-tokens 1280" in found["remove"]
    # A sample of the old run has 128 tokens.
    assert "--lr-warmup-samples 10" in found["add"]


def test_samples_are_more_than_doubled_if_the_tokens_need_them(capsys):
    old = [*SMALL, "--train-samples", "1600"]
    found = run_tool(capsys, "--train-tokens", "2_000_000", "--", *old)
    found["remove"] = []
    plan = plan_with_changes(old, found)
    assert plan.train_samples > 2 * 1600
    assert not any("ends the run before" in warning for warning in plan.warnings)


def test_a_step_batch_size_schedule_is_removed(capsys):
    old = [word for word in SMALL if word not in ("--global-batch-size", "16")]
    old += ["--train-samples", "4000", "--step-batch-size-schedule", "0:8 1000samples:16"]
    found = run_tool(capsys, "--", *old)
    assert found["remove"] == ["--step-batch-size-schedule 0:8 1000samples:16"]
    assert "--global-batch-size 16" in found["add"]


def test_slurm_scripts_and_yaml_files_are_read(capsys, tmp_path: Path):
    script = tmp_path / "old.slurm"
    script.write_text(
        "#SBATCH --nodes=2\n"
        "TOTAL=4000\n"
        f"python pretrain_gpt.py {shlex.join(SMALL)} --train-samples $TOTAL\n"
    )
    found = run_tool(capsys, "--min-difficulty", "16", str(script))
    assert "--train-samples 4000  ->  --train-samples 8_000" in found["change"]
    later = run_tool(capsys, "--", str(script), "--rampup-batch-size", "4", "4", "400")
    assert later["remove"] == ["--rampup-batch-size 4 4 400"]
    file = tmp_path / "old.yaml"
    file.write_text("batch:\n  rampup_batch_size: [4, 4, 400]\n")
    found = run_tool(capsys, str(file), *SMALL, "--train-samples", "4000")
    assert found["remove"] == [f"--rampup-batch-size 4 4 400 ({file}:2)"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--", *RAMP, "--lr-decay-style", "WSD", "--lr-wsd-decay-samples", "5"],
            "--lr-decay-style WSD counts samples",
        ),
        (
            ["--", *RAMP, "--lr-decay-style", "inverse-square-root"],
            "--lr-decay-style inverse-square-root counts samples",
        ),
        (["--", *RAMP, "--curriculum-schedule-type", "fixed_linear"], "has a curriculum already"),
        (["--", *RAMP[:-6]], "--train-iters or --train-samples"),
        (["--", *RAMP, "--global-batch-size", "None"], "--global-batch-size is not given"),
        (["--", *SMALL, "--eval-only", "--load", "x"], "the old command line gives no end"),
        (["--", *RAMP, "--unknown"], "unknown flag --unknown"),
        (["--", *RAMP, "--rampup-batch-size", "4", "5", "400"], "INCREMENT must divide"),
        (
            ["--min-difficulty", "256", "--", *RAMP],
            "min_difficulty 256 must be",
        ),
        (["--total-step", "0", "--", *RAMP], "--curriculum-total-step 0 must be at least 1"),
        (["--train-tokens", "0", "--", *RAMP], "--train-tokens 0 must be at least 1"),
        (
            [
                "--difficulty-step",
                "2",
                "--",
                *RAMP,
                "--sequence-parallel",
                "--tensor-model-parallel-size",
                "4",
            ],
            "must divide every sequence length",
        ),
        (["absent.slurm"], "absent.slurm cannot be read"),
    ],
)
def test_a_command_line_that_cannot_be_converted_is_an_error(capsys, argv: list[str], message: str):
    assert to_curriculum.main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_to_curriculum_runs_as_a_script():
    def run_script(*argv: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        command = [sys.executable, "tools/to_curriculum.py", *argv]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
        )
        return done.stdout

    assert "--train-tokens / B / S / 2" in run_script("--help")
    assert "remove" in run_script("--", *RAMP)
