"""Measure what a run that looks after itself calls in each iteration, against the time of a step.

    python benchmarks/run_care.py

The calls are those of the spike guard, the watchdog's heartbeat, the report of slow ranks, the
chronicle, the goodput and a tracker. The step is that of benchmarks/step_time.py: its smallest
GPT-2 shape in fp32, in this process. Each row is the median over rounds. The wall time counts for
the total, because a call that waits for a disk delays the step as well.

A tracker's feed is a process of its own. Its CPU time is in another table, because training does
not wait for it. It counts only where all cores are busy.
"""

import contextlib
import io
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from step_time import Arguments as StepArguments
from step_time import build_trainer, command_line
from worlds import one_iteration

from megatron.config.spike_guard import SpikeGuardConfig
from megatron.engine.base import StepOutcome, StepResult
from megatron.extras.guard.spike_guard import SpikeGuard
from megatron.extras.operations.chronicle.goodput_meter import GoodputMeter
from megatron.extras.stragglers.stragglers import MEASURED_STEPS, StragglerWatch
from megatron.extras.trackers.process import TrackerProcess
from megatron.extras.trackers.trackers import TRACKERS
from megatron.extras.translators.translator import load_config
from megatron.extras.watchdog.watchdog import TICK_SECONDS, Watchdog
from megatron.observe.chronicle import CHRONICLE, Chronicle
from megatron.observe.metrics import MetricsFile
from megatron.observe.report import LaunchStart, StepTimes
from megatron.parallel.rank_progress import RankProgress, Stopwatch
from megatron.parallel.rendezvous import choose_device
from megatron.parallel.time_limit import TimeLimit
from megatron.run.run import Run

CALLS = 2000
"""Calls in a round. The windows of the guard are full after the first round."""
FEED_ITERATIONS = 5000
_RANKS = 1024
"""Ranks whose times are compared."""
_HEARTBEATS_PER_SECOND = 4 / 3
_PHASES = {"forward-backward": 0.9, "optimizer": 0.1, "save": 0.0}


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    rounds: int = 7
    """Rounds of each measurement, after one of warm-up."""
    steps: int = 3
    """Training steps in a round."""
    save_interval: int = 100
    """Iterations between two events of the chronicle."""


@dataclass(frozen=True)
class Cost:
    """The cost of one kind of call."""

    name: str
    seconds: float
    """Wall seconds of a call."""
    per_iteration: float
    """Calls in an iteration, for those whose number does not depend on the time of a step."""
    per_second: float = 0.0
    """Calls in a second, for those of a thread with a clock of its own."""

    def compute_seconds(self, step_seconds: float) -> float:
        """Return the seconds of all calls in an iteration."""
        return self.seconds * (self.per_iteration + self.per_second * step_seconds)


def measure(call: Callable[[], object], rounds: int, calls: int = CALLS) -> float:
    """Return the median over rounds of the seconds of a call."""
    seconds = []
    for round_number in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        # Round 0 warms up and is not counted.
        if round_number:
            seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def measure_guard(rounds: int) -> list[Cost]:
    """Measure the decision about a step, and the update of the estimates."""
    guard = SpikeGuard(SpikeGuardConfig(spike_guard="skip-step"), {})
    noise = random.Random(0)
    results = [
        StepResult(
            loss=2 + 0.01 * noise.random(),
            grad_norm=0.3 + 0.01 * noise.random(),
            outcome=StepOutcome.APPLIED,
        )
        for _ in range(997)
    ]
    iteration = 0

    def call() -> None:
        nonlocal iteration
        iteration += 1
        result = results[iteration % len(results)]
        guard.accepts(result.loss, result.grad_norm)
        guard.observe(result, iteration)

    return [Cost("spike guard, decision and estimates", measure(call, rounds), 1)]


def measure_watchdog(rounds: int) -> list[Cost]:
    """Measure the changes of the phase, and the calls of the watchdog's two threads."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    progress = RankProgress()
    watchdog = Watchdog(
        store,
        0,
        ["rank 0"],
        TimeLimit(10.0),
        progress=progress,
        hang_timeout=100.0,
        folder=None,
        report=lambda error, message: None,
    )
    stopwatch = Stopwatch(progress, 100.0, TICK_SECONDS)
    change = measure(lambda: progress.begin_step("training iteration", 5), rounds)
    look = measure(lambda: stopwatch.exceeds_limit(time.monotonic()), rounds)
    beat = measure(lambda: watchdog.beat(store), rounds)
    return [
        Cost("watchdog, change of the phase", change, 1),
        Cost("watchdog, look at the phase", look, 0, per_second=1 / TICK_SECONDS),
        Cost("watchdog, heartbeat", beat, 0, per_second=_HEARTBEATS_PER_SECOND),
    ]


def measure_chronicle(rounds: int, save_interval: int, folder: Path) -> list[Cost]:
    """Measure an event, which is on the disk afterwards."""
    chronicle = Chronicle(folder / CHRONICLE)
    seconds = measure(lambda: chronicle.record("save", 1, {}), rounds, calls=50)
    return [Cost("chronicle, event of a save", seconds, 1 / save_interval)]


def measure_goodput(rounds: int, folder: Path) -> list[Cost]:
    """Measure the sums of a step, and the share for the metrics file."""
    meter = GoodputMeter(folder, folder / "metrics.jsonl", print, is_first=False)
    meter.write(LaunchStart(0))
    until = time.monotonic() + 60
    while meter.compute() is None and time.monotonic() < until:
        time.sleep(0.01)

    def call() -> None:
        meter.write(StepTimes(_PHASES, 1.0))
        meter.compute()

    return [Cost("goodput, sums and share", measure(call, rounds), 1)]


def measure_tracker(rounds: int, folder: Path) -> list[Cost]:
    """Measure what the training process does for a tracker."""
    tracker = TrackerProcess(
        "wandb", "benchmark", folder=folder, metrics=folder / "metrics.jsonl", log=print
    )
    return [Cost("tracker, look for messages", measure(tracker.poll, rounds), 1)]


def measure_feed(tracker: str, home: Path) -> float:
    """Return the CPU seconds of a tracker's feed for an iteration, without its start."""
    cpu = []
    for iterations in (10, FEED_ITERATIONS):
        folder = home / f"{tracker}-{iterations}"
        folder.mkdir()
        metrics = MetricsFile(folder / "metrics.jsonl")
        feed = TrackerProcess(
            tracker, "benchmark", folder=folder, metrics=folder / "metrics.jsonl", log=print
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        feed.start(0)
        metrics.write(LaunchStart(0))
        line = {"kind": "train", "lm_loss": 2.0, "grad_norm": 0.3, "seconds": 1.0}
        line |= {f"value_{number}": number / 7 for number in range(20)}
        with open(folder / "metrics.jsonl", "a") as file:
            for iteration in range(1, iterations + 1):
                file.write(json.dumps(line | {"iteration": iteration}) + "\n")
        metrics.close()
        feed.request_end()
        feed.close()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # The difference leaves out imports and the start of a run.
    return (cpu[1] - cpu[0]) / (FEED_ITERATIONS - 10)


def measure_stragglers(run: Run, rounds: int) -> list[Cost]:
    """Measure the hooks and the clock of the steps before a comparison, and the comparison."""
    blocks = run.timers.blocks
    interval = run.plan.config.parallel.straggler_interval
    # With this interval, every step is measured.
    watch = StragglerWatch(run.engine.stages, blocks, MEASURED_STEPS, 1.5)

    def call() -> None:
        for iteration in range(1, MEASURED_STEPS + 1):
            with watch.measure(iteration):
                for _ in range(run.plan.config.model.num_layers):
                    blocks.enter_block()
                    blocks.leave_block()
        own = watch.take_report(0, MEASURED_STEPS)
        assert own is not None, "the interval is over"
        watch.compare([own] * _RANKS)

    seconds = measure(call, rounds, calls=50)
    return [Cost("slow ranks, a comparison", seconds, 1 / interval)]


def measure_step(arguments: Arguments, folder: Path) -> tuple[Run, float]:
    """Return a run, and the median seconds of its training step."""
    steps = StepArguments(shape=("gpt2",), precision=("fp32",))
    loaded = load_config(command_line(steps, "gpt2", "fp32", str(folder)))
    # The start of a run prints its plan.
    with contextlib.redirect_stdout(io.StringIO()):
        run = build_trainer(loaded, choose_device(0))
    seconds = measure(lambda: one_iteration(run), arguments.rounds, calls=arguments.steps)
    run.reporter.close()
    return run, seconds


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    rounds = arguments.rounds
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, step = measure_step(arguments, folder)
        # Each row of the table has a function here.
        costs = [
            *measure_guard(rounds),
            *measure_watchdog(rounds),
            *measure_stragglers(run, rounds),
            *measure_chronicle(rounds, arguments.save_interval, folder),
            *measure_goodput(rounds, folder),
            *measure_tracker(rounds, folder),
        ]
        print_costs(costs, step)
        # The trackers must not write into the stores of the user.
        os.environ.update(HOME=name, TRACKIO_DIR=f"{name}/trackio", WANDB_MODE="offline")
        for tracker in TRACKERS:
            if find_spec(tracker) is not None:
                cpu = measure_feed(tracker, folder)
                print(f"feed of {tracker}: {cpu * 1e6:.0f} us of CPU an iteration")
    return 0


def print_costs(costs: list[Cost], step: float) -> None:
    """Print the costs, their share of a step, and for which steps it is 1 %."""
    print(f"{'call':38} {'us a call':>10} {'us a step':>10} {'share':>9}")
    for cost in costs:
        seconds = cost.compute_seconds(step)
        print(
            f"{cost.name:38} {cost.seconds * 1e6:10.1f} {seconds * 1e6:10.1f} {seconds / step:9.4%}"
        )
    total = sum(cost.compute_seconds(step) for cost in costs)
    print(f"{'together':38} {'':10} {total * 1e6:10.1f} {total / step:9.4%}")
    print(f"a step takes {step * 1e3:.0f} ms")
    # A part of the costs grows with the step: fixed + rate x step = 1 % of the step.
    fixed = sum(cost.seconds * cost.per_iteration for cost in costs)
    rate = sum(cost.seconds * cost.per_second for cost in costs)
    print(f"1 % of a step of {fixed / (0.01 - rate) * 1e3:.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
