"""Tests of tools/plot_loss.py on metrics and logs."""

import math
from pathlib import Path

import pytest
from observe.reports import make_report

from megatron.base.errors import DataError
from megatron.commands import plot_loss
from megatron.observe.log_line import format_training_line, format_validation_line
from megatron.observe.metrics import MetricsFile

# Iterations 4 and 5 are trained twice: the run was resumed from 3.
TRAINED = [(1, 6.0), (2, 5.0), (3, 4.0), (4, 9.0), (5, 9.0), (4, 3.5), (5, 3.25)]


@pytest.fixture(params=["metrics.jsonl", "main_log.txt"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / request.param
    reports = [make_report(iteration=iteration, lm_loss=loss) for iteration, loss in TRAINED]
    if path.suffix == ".jsonl":
        metrics = MetricsFile(path)
        for report in reports:
            metrics.write_training(report)
            if report.iteration in (3, 5):
                metrics.write_validation(report.iteration, report.lm_loss or 0.0)
        metrics.close()
    else:
        lines = []
        for report in reports:
            lines.append(f"[default3]:{format_training_line(report)}\n")
            if report.iteration in (3, 5):
                line = format_validation_line(report.iteration, report.lm_loss or 0.0)
                lines.append(f"[default3]:{line}\n")
        path.write_text("loading\n" + "".join(lines))
    return path


def test_iterations_before_a_resume_are_replaced(source: Path) -> None:
    curves = plot_loss.read_curves(source)
    assert curves.train == ([1, 2, 3, 4, 5], [6.0, 5.0, 4.0, 3.5, 3.25])
    assert curves.validation == {"validation": ([3, 5], [4.0, 3.25])}
    assert curves.learning_rate == ([1, 2, 3, 4, 5], [1e-3] * 5)


def test_the_folder_of_a_run_has_its_metrics(source: Path, tmp_path: Path) -> None:
    if source.suffix == ".jsonl":
        assert plot_loss.read_curves(tmp_path) == plot_loss.read_curves(source)
    else:
        with pytest.raises(DataError, match=r"metrics.jsonl is not a file; give the --save folder"):
            plot_loss.read_curves(tmp_path)


def test_output_is_a_png(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "pictures" / "loss.png"
    assert plot_loss.main([str(source), "--output", str(output), "--unigram-entropy", "6.2"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_a_source_without_a_loss_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot_loss.main([str(tmp_path / "absent.jsonl")]) == 2
    assert "is not a file" in capsys.readouterr().err
    (tmp_path / "empty.log").write_text("nothing\n")
    assert plot_loss.main([str(tmp_path / "empty.log")]) == 2
    assert "has no loss" in capsys.readouterr().err


def test_no_line_is_drawn_over_a_skipped_range() -> None:
    iterations, values = plot_loss.insert_gaps([1, 2, 3, 8, 9], [5.0, 4.0, 3.0, 2.0, 1.0])
    assert iterations == [1, 2, 3, 4, 8, 9]
    assert [i for i, value in zip(iterations, values, strict=True) if math.isnan(value)] == [4]
    # Only every tenth iteration is logged here, so no iteration is missing.
    regular = ([10, 20, 30], [3.0, 2.0, 1.0])
    assert plot_loss.insert_gaps(*regular) == regular
