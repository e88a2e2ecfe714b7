"""Worlds of benchmarks whose phases are measured with events, as on a GPU."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from process_pool import ProcessPool, succeed

from megatron.observe.timers import Timers

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 5120 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 100 --lr 1e-3 --eval-iters 0 "
    "--hidden-dropout 0 --attention-dropout 0"
)


class ClockEvent:
    """Stand-in for a CUDA event, with the time of the host."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """There is no device to wait for."""

    def elapsed_time(self, end: "ClockEvent") -> float:
        return 1e3 * (end._seconds - self._seconds)


def import_benchmark(name: str) -> Any:
    """Return a benchmark's module, as the script imports it."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return __import__(name)


def make_timers(world: Any) -> Timers:
    """Return timers with stand-ins for CUDA events."""
    return Timers(make_event=ClockEvent)


def serve_with_events(argv: list[str]) -> Any:
    """Return a rank of a benchmark whose timers have events."""
    worlds = import_benchmark("worlds")
    worlds.build_timers = make_timers
    return worlds.Rank(argv)


class WorldInThisProcess:
    """A world of one rank that needs no further process."""

    def __init__(self, case: Any, folder: str, serve: Any) -> None:
        """Build the rank."""
        files = ["--data-path", str(case.data), "--data-cache-path", f"{folder}/cache"]
        self._rank = serve([*case.flags.split(), *files])

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Return the answer of the rank."""
        return [getattr(self._rank, command)(*arguments)]

    def close(self) -> None:
        """There is nothing to end."""


def measure_steps(flags: str, data: str, folder: str) -> list[tuple[float, float]]:
    """Return the seconds of steps, and those of their phase, by numbers of microbatches."""
    worlds = import_benchmark("worlds")
    files = ["--data-path", data, "--data-cache-path", f"{folder}/cache"]
    with mock.patch.object(worlds, "build_timers", make_timers):
        rank = worlds.Rank([*f"{SIZES} {flags}".split(), *files])
        commands = ((1, 2), (1, 32), (1, 2), (2, 32))
        measured = [rank.steps(*command) for command in commands]
    return [(each.seconds, each.forward_backward) for each in measured]


@pytest.mark.parametrize("world_size", [1, 2])
def test_events_belong_to_the_steps_that_were_asked_for(
    world_size: int, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    flags = "--pipeline-model-parallel-size 2" if world_size == 2 else ""
    outcomes = pool.run(world_size, measure_steps, flags, corpus, str(tmp_path))
    succeed(outcomes)
    measured = outcomes[0].value
    # The phases are those of these steps, not those of the steps before. The first step of a run
    # has no events of an earlier one.
    for seconds, inside in measured:
        assert 0 < inside < seconds
    _, many, few, mean = (inside for _, inside in measured)
    assert few < min(many, mean)


def run_large_model(folder: str) -> None:
    """Run the quick form of large_model.py with events, in this process."""
    large_model = import_benchmark("large_model")
    worlds = import_benchmark("worlds")
    arguments = replace(large_model.Arguments(), quick=True, steps=2, microbatches=(1, 2))
    data = Path(folder) / "random"
    worlds.write_random_tokens(data, 512, 20_000)
    with (
        mock.patch.object(worlds, "build_timers", make_timers),
        mock.patch.object(large_model, "LaunchedWorld", WorldInThisProcess),
    ):
        large_model.run_variant(arguments, "defaults", data, folder, [])


def test_a_large_model_is_measured_with_events(pool: ProcessPool, tmp_path: Path) -> None:
    printed = succeed(pool.run(1, run_large_model, str(tmp_path)))
    assert "FAILED" not in printed
    assert "microbatches 1, seconds " in printed
    assert "microbatches 2, seconds " in printed
    # The step that is traced.
    assert "aten::" in printed


@pytest.mark.full
def test_layouts_are_measured_with_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    layouts = import_benchmark("layouts")
    launched = layouts.LaunchedWorld
    monkeypatch.setattr(
        layouts, "LaunchedWorld", lambda case, folder, serve: launched(case, folder, serve)
    )
    monkeypatch.setattr(layouts.worlds_of.__wrapped__, "__defaults__", (serve_with_events,))
    layouts.measure_bubble(layouts.Arguments(rounds=1, quick=True), str(tmp_path))
    shown = capfd.readouterr().out
    assert "| 1F1B | 2 |" in shown
    assert "| interleaved, v = 2 | 4 |" in shown
