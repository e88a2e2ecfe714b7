"""Tests of --verification: a run keeps the report, and the chronicle shows it."""

import json
from pathlib import Path

import pytest
from process_pool import ProcessPool, pretrain, succeed

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.operations.commands import chronicle
from megatron.extras.planner.verify.report import (
    COPIED,
    keep_verification,
    list_differences,
    read_report,
)

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 1 --mock-data "
    "--eval-iters 0"
)
CONFIGURATION = {
    "--num-layers": 2,
    "--hidden-size": 16,
    "--num-attention-heads": 2,
    "--seq-length": 16,
    "--micro-batch-size": 1,
    "--global-batch-size": 2,
    "--lr": 2e-3,
    "--train-iters": 1,
    "--eval-iters": 0,
}


def write(path: Path, **values: object) -> Path:
    report = {"verified": True, "failed": None, "world_size": 1, "configuration": CONFIGURATION}
    path.write_text(json.dumps({**report, **values}))
    return path


def test_a_run_keeps_its_report(
    pool: ProcessPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = write(tmp_path / "report.json")
    folder = tmp_path / "run"
    argv = [*FLAGS.split(), "--save", str(folder), "--verification", str(report)]
    output = succeed(pool.run(1, pretrain, argv))
    assert f"warning: --verification {report} was made with other values of --lr\n" in output
    assert json.loads((folder / COPIED).read_text()) == json.loads(report.read_text())
    assert chronicle.main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "the reduced copy equals one process, with other values of --lr" in shown


def test_a_failed_verification_is_a_warning(tmp_path: Path) -> None:
    report = write(tmp_path / "report.json", verified=False, failed="gradient norm")
    config = load_config([*FLAGS.split(), "--lr", "2e-3", "--verification", str(report)]).config
    lines: list[str] = []
    recorded = keep_verification(config, 1, lines.append)
    assert lines == [f"warning: --verification {report}: the verification failed at gradient norm"]
    assert recorded["verification"]["other_settings"] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"configuration": 3}'])
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"not a report of megatron-verify"):
        read_report(str(path))
    with pytest.raises(ConfigError, match=r"--verification"):
        read_report(str(tmp_path / "absent.json"))


def test_another_number_of_processes_is_a_difference(tmp_path: Path) -> None:
    config = load_config(FLAGS.split()).config
    report = read_report(str(write(tmp_path / "report.json")))
    assert list_differences(report, config, 2) == ["the number of processes", "--lr"]


def test_emulated_float8_is_no_difference(tmp_path: Path) -> None:
    """The copy of a verification emulates float8, whatever the run does."""
    float8 = "--lr 2e-3 --fp8-format e4m3 --fp8-recipe rowwise --fp8-emulate"
    config = load_config([*FLAGS.split(), *float8.split()]).config
    verified = {**CONFIGURATION, "--fp8-format": "e4m3", "--fp8-recipe": "tensorwise"}
    report = read_report(str(write(tmp_path / "report.json", configuration=verified)))
    assert list_differences(report, config, 1) == ["--fp8-recipe"]
