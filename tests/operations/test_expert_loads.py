"""Tests of the loads of experts in the report of a run."""

import json
import math
from pathlib import Path

import pytest

from megatron.extras.operations.chronicle.history import read_history
from megatron.extras.operations.chronicle.page import build_page, draw_loads


def write_metrics(folder: Path, *lines: dict[str, object]) -> None:
    time = {"time": "2026-01-31T12:00:00+00:00"}
    text = "".join(json.dumps({"kind": "train", **line, **time}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def test_the_page_shows_the_last_loads(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        {"iteration": 1, "lm_loss": 9.0, "expert_loads": [[1.0, 1.0], [0.5, 1.5]]},
        {"iteration": 2, "lm_loss": 8.0, "largest_expert_load": 2.0},
        {"iteration": 3, "lm_loss": 7.0, "expert_loads": [[2.0, 0.0], [1.0, 1.0]]},
        {"iteration": 4, "lm_loss": 6.0},
    )
    page = build_page([read_history(tmp_path)])
    assert "Loads of the experts at iteration 3" in page
    assert "1 experts without a token" in page
    assert page.count("times the mean</title>") == 4
    assert "layer 1 of those with experts, expert 1: 0.00 times the mean" in page
    assert "largest load of an expert" in page


def test_loads_that_were_undone_are_not_shown(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        {"iteration": 1, "lm_loss": 9.0},
        {"iteration": 2, "lm_loss": 8.0, "expert_loads": [[2.0, 0.0]]},
        # A later launch has trained this iteration again.
        {"iteration": 2, "lm_loss": 8.0},
    )
    assert read_history(tmp_path).expert_loads is None


@pytest.mark.parametrize("loads", [[], [[]], [[1.0], [1.0, 2.0]], "x", [["a"]], 3, [[None]]])
def test_what_is_no_table_of_loads_is_left_out(tmp_path: Path, loads: object) -> None:
    write_metrics(tmp_path, {"iteration": 1, "lm_loss": 9.0, "expert_loads": loads})
    assert draw_loads(read_history(tmp_path).expert_loads) == ""


def test_a_number_that_is_not_finite_is_no_load(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"iteration": 1, "lm_loss": 9.0, "expert_loads": [[math.inf]]})
    assert read_history(tmp_path).expert_loads is None


def test_more_experts_than_a_page_can_draw_have_numbers_only(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"iteration": 1, "lm_loss": 9.0, "expert_loads": [[1.0] * 300] * 300})
    text = draw_loads(read_history(tmp_path).expert_loads)
    assert "would have 90,000 cells" in text
    assert "<rect" not in text
