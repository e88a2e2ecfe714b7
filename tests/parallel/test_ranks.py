"""Waiting for work on files in one process. tests/faults covers several ranks."""

import threading
import time

import pytest

from megatron.base.errors import CheckpointError
from megatron.parallel import ranks
from megatron.parallel.ranks import Ranks, Work


def test_a_single_process_waits_until_the_work_is_done() -> None:
    def act() -> str:
        time.sleep(0.05)
        return "done"

    work = Work(act, in_thread=True)
    Ranks().wait_for(work, "saving iteration 3")
    assert work.done
    assert work.result == "done"


def test_a_single_process_reports_a_long_wait_and_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_ROUND_SECONDS", 0.01)
    monkeypatch.setattr(ranks, "_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "PATIENCE_SECONDS", 0.3)
    released = threading.Event()
    messages: list[str] = []
    work = Work(lambda: released.wait(30), in_thread=True)
    try:
        with pytest.raises(CheckpointError, match="is not done on rank 0"):
            Ranks().wait_for(work, "saving iteration 3", messages.append)
    finally:
        released.set()
    assert messages
    assert "saving iteration 3 has taken" in messages[0]
