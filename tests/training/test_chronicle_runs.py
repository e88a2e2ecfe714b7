"""Tests of the chronicle that a run writes, with a skipped range, a stop, a resume and an error."""

from pathlib import Path

import pytest
from training.runs import Runner

from megatron.extras.operations.chronicle.records import read_events
from megatron.extras.operations.commands import rollback
from megatron.observe.chronicle import CHRONICLE, Chronicle, append_event


def test_launches_record_their_start_saves_and_stop(run: Runner) -> None:
    run("--exit-interval 4 --save-interval 2 --skip-train-iteration-range 2-3")
    run("--global-batch-size 8 --train-iters 6")
    events = read_events(run.folder / CHRONICLE)
    assert [(event.kind, event.iteration) for event in events] == [
        ("start", 0),
        ("skip", 3),
        ("save", 3),
        ("save", 4),
        ("stop", 4),
        ("start", 4),
        ("save", 6),
        ("stop", 6),
    ]
    assert events[1].details == {"first": 2, "last": 3}
    assert events[4].details["reason"] == "interval"
    assert events[7].details["reason"] == "complete"
    assert events[7].details["save_seconds"] > 0
    first = events[0].details
    second = events[5].details
    assert first["layers"] == 1
    assert first["parameters"] == second["parameters"] > 0
    assert first["settings"]["--global-batch-size"] == "4"
    assert second["settings"]["--global-batch-size"] == "8"
    assert "--weight-decay" not in first["settings"]


def test_stop_by_an_error_has_its_message(run: Runner) -> None:
    run.error("--max-nan-iterations 1 --lr 1e30 --clip-grad 0")
    *_, stop = read_events(run.folder / CHRONICLE)
    assert stop.kind == "stop"
    assert stop.details["reason"] == "error"
    assert "TrainingError" in stop.details["error"]


def test_rollback_leaves_the_chronicle_complete(run: Runner) -> None:
    run("--save-interval 2 --train-iters 6")
    before = (run.folder / CHRONICLE).read_bytes()
    assert rollback.main([str(run.folder), "--to", "2", "--reason", "test"]) == 0
    assert (run.folder / CHRONICLE).read_bytes() == before


def test_full_disk_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "no-folder-yet"
    path.write_text("a file where the folder should be")
    chronicle = Chronicle(path / CHRONICLE, log=said.append)
    chronicle.record("save", 1, {})
    chronicle.record("save", 2, {})
    path.unlink()
    chronicle.record("save", 3, {})
    assert ["cannot write the chronicle" in line for line in said] == [True, False]
    assert "2 events were lost" in said[1]
    assert [event.iteration for event in read_events(path / CHRONICLE)] == [3]


@pytest.mark.parametrize("torn", [b'{"time": "2026', b"\xff\x00", b"[1]", b"[" * 5000])
def test_torn_line_spoils_no_other_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / CHRONICLE
    append_event(path, "save", 1, {})
    with open(path, "ab") as file:
        file.write(torn)
    append_event(path, "save", 2, {})
    assert [event.iteration for event in read_events(path)] == [1, 2]
