"""Tests of --profile-iterations in real runs, and of traces that cannot be written."""

import gzip
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from training.runs import Runner

from megatron.extras.watch.profiler import Profiler

SUFFIX = ".pt.trace.json.gz"


def read_events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return list(json.load(file)["traceEvents"])


def list_steps(path: Path) -> list[int]:
    """Return the numbers of the iterations of a trace, in order."""
    steps = [
        event
        for event in read_events(path)
        if event["name"].startswith("ProfilerStep#") and event["cat"] == "user_annotation"
    ]
    steps.sort(key=lambda event: event["ts"])
    return [int(event["name"].partition("#")[2]) for event in steps]


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 2 --num-layers 2 --checkpoint-activations",
        pytest.param("--zero-stage 3", marks=pytest.mark.full),
        pytest.param("--deepspeed --zero-stage 1", marks=pytest.mark.full),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.full),
    ],
)
def test_chosen_ranks_write_chosen_iterations(flags: str, run: Runner, other: Runner) -> None:
    if "--deepspeed" in flags:
        pytest.importorskip("deepspeed")
    shared = f"{flags} --train-iters 5 --hidden-dropout 0.1"
    run(f"{shared} --profile-iterations 3-4 --profile-ranks 1", ranks=2)
    folder = run.folder / "profile"
    assert list_names(folder) == [f"iterations-3-4.rank-1{SUFFIX}"]
    path = folder / list_names(folder)[0]
    assert list_steps(path) == [3, 4]
    # The trace has the operators of both passes.
    names = {event["name"] for event in read_events(path)}
    assert {"aten::mm", "aten::embedding_dense_backward"} & names
    assert any("Backward" in name for name in names)
    other(shared, ranks=2)
    assert run.losses() == other.losses()
    assert not (other.folder / "profile").exists()


def test_a_run_that_resumes_in_the_range(run: Runner, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    flags = f"--profile-iterations 2-5 --profile-dir {traces} --profile-ranks -1"
    assert "the trace of iterations 2-3" in run(f"{flags} --exit-interval 3")
    first = f"iterations-2-3.rank-0{SUFFIX}"
    assert list_names(traces) == [first]
    run(f"{flags} --train-iters 6")
    second = f"iterations-4-5.rank-0{SUFFIX}"
    assert list_names(traces) == [first, second]
    assert list_steps(traces / first) == [2, 3]
    assert list_steps(traces / second) == [4, 5]
    before = [os.stat(traces / name).st_mtime_ns for name in (first, second)]
    # The range is over.
    output = run(f"{flags} --train-iters 8")
    assert "the trace" not in output
    assert [os.stat(traces / name).st_mtime_ns for name in (first, second)] == before


def test_a_range_that_ends_in_a_skipped_one(run: Runner) -> None:
    run("--profile-iterations 2-4 --skip-train-iteration-range 3-6 --train-iters 8")
    assert list_names(run.folder / "profile") == [f"iterations-2-2.rank-0{SUFFIX}"]


def test_a_folder_that_cannot_be_written_is_a_warning(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = run(f"--profile-iterations 2-3 --profile-dir {tmp_path}/file/folder --train-iters 5")
    assert "warning: the trace" in output
    assert run.losses_of_training() == [1, 2, 3, 4, 5]


def test_memory_snapshots_without_cuda_are_a_warning(run: Runner) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA memory")
    output = run("--memory-snapshot --memory-snapshot-iterations 2 --train-iters 3")
    assert "no CUDA memory" in output
    assert run.losses_of_training() == [1, 2, 3]
    assert not (run.folder / "profile").exists()


def profile_one_iteration(folder: Path) -> list[str]:
    lines: list[str] = []
    with Profiler(folder, (1, 1), rank=0, log=lines.append) as profiler, profiler.record(1):
        torch.ones(4).sum()
    return lines


def test_a_trace_without_a_file_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, PyTorch's exporter may leave no file, and it raises no error."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *arguments: None)
    (line,) = profile_one_iteration(tmp_path)
    assert "only 0 bytes could be written" in line
    assert list_names(tmp_path) == []


def test_an_incomplete_trace_is_not_kept(tmp_path: Path) -> None:
    """PyTorch's exporter does not report that only a part of the text could be written.

    The kernel's limit on a file's size truncates the text, as a full disk does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        (line,) = profile_one_iteration(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "only 1000 bytes could be written" in line
    assert list_names(tmp_path) == []


def test_a_full_disk_at_the_end_keeps_the_old_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_one_iteration(tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    (line,) = profile_one_iteration(tmp_path)
    assert "No space left on device" in line
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_an_error_in_an_iteration_writes_nothing_and_stops(tmp_path: Path) -> None:
    lines: list[str] = []
    with (
        pytest.raises(ValueError, match="of training"),
        Profiler(tmp_path, (1, 3), rank=0, log=lines.append) as profiler,
        profiler.record(1),
    ):
        raise ValueError("of training")
    assert lines == []
    assert list_names(tmp_path) == []
    # PyTorch's profiler can start only if no other one runs.
    assert len(profile_one_iteration(tmp_path)) == 1
    assert len(list_names(tmp_path)) == 1
