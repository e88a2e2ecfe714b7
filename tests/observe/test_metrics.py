"""The metrics file across kills, resumes and rollbacks."""

import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from observe.reports import full_report, make_evaluation

from megatron.observe.metrics import MetricsFile, read_metrics
from megatron.observe.report import IterationReport, LaunchStart, NamedNumbers


def report(iteration: int, loss: float = 1.0) -> IterationReport:
    return replace(full_report(), iteration=iteration, lm_loss=loss)


def losses(path: Path) -> dict[int, float]:
    return {record["iteration"]: record["lm_loss"] for record in read_metrics(path)}


def test_line_has_every_number_and_is_written_immediately(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = MetricsFile(path)
    phases = {"data-wait": 0.1, "forward-backward": 2.0, "optimizer": 0.5, "communication": 0.75}
    metrics.write(replace(report(1), phase_seconds=phases, mfu=0.5))
    line = json.loads(path.read_text())
    assert line["data_wait_seconds"] == 0.1
    assert line["communication_seconds"] == 0.75
    assert line["compute_seconds"] == 1.75
    assert line["iteration"] == 1
    assert line["lm_loss"] == 1.0
    assert line["mfu"] == 0.5
    assert line["tokens_per_second"] == 16384.0
    assert line["time"].endswith("+00:00")


def test_nan_and_infinity_are_stored_as_strings(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).write(
        replace(
            report(1, math.nan),
            grad_norm=-math.inf,
            params_norm=math.inf,
            layer_statistics={"layer_grad_norm": [1.5, math.inf, math.nan], "output_logit": 2.0},
        )
    )
    strict = json.loads(
        path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON")
    )
    assert strict["lm_loss"] == "NaN"
    assert strict["grad_norm"] == "-Infinity"
    assert strict["params_norm"] == "Infinity"
    assert strict["layer_grad_norm"] == [1.5, "Infinity", "NaN"]
    assert strict["output_logit"] == 2.0
    (record,) = read_metrics(path)
    assert math.isnan(record["lm_loss"])
    assert record["grad_norm"] == -math.inf
    assert record["params_norm"] == math.inf
    assert record["layer_grad_norm"] == [1.5, math.inf, pytest.approx(math.nan, nan_ok=True)]


def test_torn_last_line_is_skipped_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write(report(1))
    first.write(report(2))
    os.truncate(path, path.stat().st_size - 20)
    assert losses(path) == {1: 1.0}
    second = MetricsFile(path)
    second.write(LaunchStart(1))
    second.write(report(2, 5.0))
    assert losses(path) == {1: 1.0, 2: 5.0}


def test_iterations_undone_by_a_rollback_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write(LaunchStart(0))
    for iteration in range(1, 9):
        first.write(report(iteration))
    first.write(make_evaluation(8, 7.0))
    second = MetricsFile(path)
    second.write(LaunchStart(4))
    assert losses(path) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    second.write(report(7, 2.0))  # 5 and 6 were skipped
    second.write(make_evaluation(7, 9.0, name="wiki"))
    assert losses(path) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 7: 2.0}
    assert read_metrics(path)[-1]["validation"] == {"wiki": 9.0}
    assert len(path.read_text().splitlines()) == 13


def test_repeated_iteration_undoes_later_ones_without_a_start_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for iteration, loss in [(1, 1.0), (2, 1.0), (3, 1.0), (2, 2.0)]:
        metrics.write(report(iteration, loss))
    assert losses(path) == {1: 1.0, 2: 2.0}


def test_evaluation_without_an_iteration_and_before_its_iteration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(make_evaluation(1, 3.0))
    metrics.write(report(1))
    metrics.write(make_evaluation(5, 4.0))
    records = read_metrics(path)
    assert records[0]["lm_loss"] == 1.0
    assert records[0]["validation"] == {"validation": 3.0}
    assert records[1] == {"iteration": 5, "validation": {"validation": 4.0}}


def test_filters_belong_to_their_iteration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for iteration in (1, 2):
        metrics.write(report(iteration))
        for name in ("web", "code"):
            counts = {"documents": 10 * iteration}
            metrics.write(NamedNumbers("filters", iteration, name, counts))
    metrics.write(LaunchStart(1))
    with path.open("a") as file:
        file.write('{"kind": "filters", "iteration": 1, "name": "without counts"}\n')
    (entry,) = read_metrics(path)
    assert entry["filters"] == {"web": {"documents": 10}, "code": {"documents": 10}}


def test_failed_writes_are_reported_once_and_never_fatal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    messages: list[str] = []
    metrics = MetricsFile(tmp_path / "file" / "metrics.jsonl", log=messages.append)
    metrics.write(report(1))
    metrics.write(report(2))
    assert len(messages) == 1
    assert "cannot write metrics to" in messages[0]
    (tmp_path / "file").unlink()  # now the folder can be made, as after a disk is freed
    metrics.write(report(3))
    assert list(losses(tmp_path / "file" / "metrics.jsonl")) == [3]
    assert len(messages) == 2
    assert "again; 2 lines were lost" in messages[1]
    metrics.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    messages: list[str] = []
    metrics = MetricsFile(tmp_path / "metrics.jsonl", log=messages.append)
    metrics.write(report(1))
    metrics.write(report(2))
    assert len(messages) == 1
    assert "No space left" in messages[0]


def test_partly_written_line_counts_as_lost(tmp_path: Path) -> None:
    """A line that is written only in part is counted as lost.

    The kernel's limit on a file's size truncates a line, as a disk that is nearly full does.
    """
    messages: list[str] = []
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, log=messages.append)
    metrics.write(report(1))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, limit[1]))
    try:
        metrics.write(report(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    metrics.write(report(3))
    assert losses(path) == {1: 1.0, 3: 1.0}
    assert len(messages) == 2
    assert "again; 1 lines were lost" in messages[1]
