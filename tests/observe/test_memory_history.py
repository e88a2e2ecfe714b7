"""Tests of memory snapshots. PyTorch's recorder needs CUDA, so substitutes stand for it here."""

import pickle
from pathlib import Path

import pytest
import torch

from megatron.extras.watch.profiler import MemoryHistory


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Substitute PyTorch's recorder, and return the history lengths that it was started with."""
    started: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda *, max_entries: started.append(max_entries),
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
    return started


def run_iterations(history: MemoryHistory, error: Exception | None = None) -> None:
    for iteration in range(1, 5):
        with history.record(iteration):
            if error is not None and iteration == 3:
                raise error


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_snapshots_of_chosen_iterations(recorded: list[int], tmp_path: Path) -> None:
    lines: list[str] = []
    run_iterations(MemoryHistory(tmp_path / "new", (2, 4, 9), rank=3, log=lines.append))
    assert len(recorded) == 1
    names = ["iteration-2.rank-3.pickle", "iteration-4.rank-3.pickle"]
    assert list_names(tmp_path / "new") == names
    assert pickle.loads((tmp_path / "new" / names[0]).read_bytes()) == {"segments": []}
    assert all(any(name in line for line in lines) for name in names)


def test_a_snapshot_when_memory_runs_out(recorded: list[int], tmp_path: Path) -> None:
    history = MemoryHistory(tmp_path, (), rank=0, log=print)
    with pytest.raises(torch.OutOfMemoryError):
        run_iterations(history, torch.OutOfMemoryError("full"))
    assert list_names(tmp_path) == ["out-of-memory-3.rank-0.pickle"]


def test_a_failed_snapshot_does_not_hide_that_memory_ran_out(
    recorded: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no history")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fail)
    lines: list[str] = []
    history = MemoryHistory(tmp_path, (), rank=0, log=lines.append)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        run_iterations(history, torch.OutOfMemoryError("full"))
    assert "no history" in lines[0]
    assert list_names(tmp_path) == []


def test_other_errors_write_no_snapshot(recorded: list[int], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run_iterations(MemoryHistory(tmp_path, (), rank=0, log=print), RuntimeError("other"))
    assert list_names(tmp_path) == []


def test_a_failed_write_is_a_warning(recorded: list[int], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    run_iterations(MemoryHistory(tmp_path / "file" / "folder", (2,), rank=0, log=lines.append))
    assert len(lines) == 1
    assert "warning: the memory snapshot" in lines[0]


def test_nothing_is_recorded_on_other_ranks(recorded: list[int]) -> None:
    run_iterations(MemoryHistory(None, (2,), rank=1, log=print))
    assert recorded == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA memory")
def test_without_cuda_there_is_one_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    run_iterations(MemoryHistory(tmp_path / "new", (2,), rank=0, log=lines.append))
    assert len(lines) == 1
    assert "no CUDA memory" in lines[0]
    assert not (tmp_path / "new").exists()
