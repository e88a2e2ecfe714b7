"""Restarts within a job on a real Slurm: killed and hanging ranks, bad and lost nodes, the budget.

`test_array_task.py` has a killed rank in the short suite.
"""

# ruff: noqa: F811 (fixtures are imported by their names)

import os
import signal
import time
from datetime import datetime

import pytest
from slurm.test_array_task import SAVED, TinyRun, tiny  # noqa: F401

from megatron.observe.chronicle import CHRONICLE, Event, read_events
from megatron.observe.metrics import read_metrics
from megatron.operations.chronicle.history import read_history

pytestmark = pytest.mark.full

HANG_SECONDS = 8
AGAIN = "starts the training again"


def read_chronicle(tiny: TinyRun, kind: str) -> list[Event]:
    """Return the events of one kind."""
    return [event for event in read_events(tiny.checkpoints / CHRONICLE) if event.kind == kind]


def check_records(tiny: TinyRun, iterations: int) -> None:
    """Check that each iteration is in the records of the run once."""
    expected = list(range(1, iterations + 1))
    metrics = tiny.folder / "tiny-logs" / "logs" / "metrics.jsonl"
    assert [entry["iteration"] for entry in read_metrics(metrics)] == expected
    history = read_history(tiny.checkpoints)
    assert list(history.columns["iteration"][history.kept]) == expected
    saves = [event.iteration for event in read_chronicle(tiny, "save")]
    assert len(saves) == len(set(saves))


def kill_rank(tiny: TinyRun, job: str, node: str, number: int = signal.SIGKILL) -> None:
    os.kill(tiny.pids(job, node)[0], number)


def test_restart_is_about_as_fast_as_a_start(tiny: TinyRun) -> None:
    """A rank is killed twice. Each time the next step comes within 1.5 times a plain start."""
    job = tiny.submit(TRAIN_SAMPLES="1600", EXIT_INTERVAL="100000")
    seconds = []
    for number in (1, 2):
        tiny.wait_for_line(SAVED, 2 * number)
        killed = time.time()
        kill_rank(tiny, job, "n2")
        tiny.wait_for_line("successfully loaded checkpoint", number)
        tiny.wait_for_line(SAVED, 2 * number + 1)
        metrics = tiny.folder / "tiny-logs" / "logs" / "metrics.jsonl"
        times = [
            datetime.fromisoformat(entry["time"]).timestamp() for entry in read_metrics(metrics)
        ]
        seconds.append(min(moment for moment in times if moment > killed + 0.5) - killed)
    tiny.wait_for_end(job)
    start, *_ = tiny.attempts()
    first = datetime.fromisoformat(read_metrics(metrics)[0]["time"]).timestamp() - start["began"]
    print(f"plain start {first:.1f} s, from the kill to the next step {seconds}")
    assert max(seconds) < 1.5 * first
    check_records(tiny, 104)
    assert [attempt["is_restart"] for attempt in tiny.attempts()] == [False, True, True]
    assert len(read_chronicle(tiny, "restart")) == 2
