"""--hang-timeout auto: a rank that stops is named at the limit, and the run ends at twice."""

import functools
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from faults.launches import NewJob
from faults.test_hang_phases import FIRST_READ, INDEX, WRITE, Site, break_rank, name_case
from faults.test_hangs import COORDINATES, GRID, find_line, wait_for_verdict

from megatron.parallel.rank_progress import RankProgress

FULL = pytest.mark.full
WATCH = "megatron.extras.watch.watchdog.stopwatch."
PART_SECONDS = 2.0
PHASE_SECONDS = 5.0
BEAT_SECONDS = 0.4
CONSTANTS = {
    f"{WATCH}PART_SECONDS": PART_SECONDS,
    f"{WATCH}PHASE_SECONDS": PHASE_SECONDS,
    "megatron.extras.watch.watchdog.watchdog.BEAT_SECONDS": BEAT_SECONDS,
    "megatron.parallel.roll_call.BEAT_SECONDS": BEAT_SECONDS,
}
FLAGS = f"{GRID} --train-iters 1000000"
STARTED = "the fault begins"
WARNING = "of --hang-timeout auto is"


def stop_in(method: str, phase: str, rank: int) -> None:
    """Let rank 3 stop in a method of `RankProgress` for a phase, when it is no longer the first."""
    original = getattr(RankProgress, method)

    def begin(progress: RankProgress, what: Any) -> Any:
        result = original(progress, what)
        is_part = method == "begin_part" and "microbatch" in what
        is_found = phase in str(what) or (is_part and phase in progress.phase.name)
        if rank == 3 and is_found and progress.iteration >= 5:
            time.sleep(2.2 * BEAT_SECONDS)
            print(STARTED)
            os.kill(os.getpid(), signal.SIGSTOP)
        return result

    setattr(RankProgress, method, begin)


def stop_in_forward(rank: int) -> None:
    stop_in("begin_part", "training iteration", rank)


def stop_in_evaluation(rank: int) -> None:
    stop_in("begin_part", "evaluation batch", rank)


def stop_in_save(rank: int) -> None:
    stop_in("_change", "saving", rank)


@pytest.mark.parametrize(
    ("prepare", "limit"),
    [
        (stop_in_forward, PART_SECONDS),
        pytest.param(stop_in_evaluation, PART_SECONDS, marks=FULL),
        pytest.param(stop_in_save, PHASE_SECONDS, marks=FULL),
    ],
)
def test_stopped_rank_is_named_at_the_limit(
    prepare: Callable[[int], None], limit: float, new_job: NewJob
) -> None:
    flags = f"{FLAGS} --eval-interval 2 --eval-iters 1 --split 9,1,0 --save-interval 2"
    launch = new_job("job", flags, 4).launch(constants=CONSTANTS, prepare=prepare)
    launch.wait_for(lambda: STARTED in launch.output(3), "the fault")
    start = time.monotonic()
    launch.wait_for(lambda: WARNING in launch.all_output(), "the warning")
    warned = time.monotonic() - start
    output = wait_for_verdict(launch, 3, 2 * limit, start)
    assert warned < limit + 3, output
    warning = output[output.index("warning: ") :]
    assert f"rank 3 on {os.uname().nodename} ({COORDINATES[3]}) does not answer" in warning
    assert re.search(r"; \d+ s ago, it was at \S+\.py:\d+ \S+ in ", find_line(output, 3)), output


@FULL
@pytest.mark.parametrize("fault", ["stopped", "file"])
@pytest.mark.parametrize("site", [INDEX, WRITE, FIRST_READ], ids=name_case)
def test_first_of_a_kind_in_which_no_rank_works_is_named(
    site: Site, fault: str, new_job: NewJob
) -> None:
    """Nothing shows how long it takes, but no rank runs on a processor, or one is silent."""
    launch = new_job("job", f"{FLAGS} --save-interval 2", 4).launch(
        constants=CONSTANTS, prepare=functools.partial(break_rank, 3, site, fault)
    )
    launch.wait_for(lambda: STARTED in launch.output(3), "the fault")
    start = time.monotonic()
    launch.wait_for(lambda: WARNING in launch.all_output(), "the warning")
    assert time.monotonic() - start < PHASE_SECONDS + 4, launch.all_output()
    victim = 3 if fault == "stopped" else -1
    output = wait_for_verdict(launch, victim, 2 * PHASE_SECONDS + 4, start)
    expected = "does not answer" if fault == "stopped" else f"is at {site.line}"
    assert expected in find_line(output, 3), output


def work_slowly(rank: int) -> None:
    """Let the first index and the first save of rank 1 take more than twice PHASE_SECONDS."""
    from megatron.checkpoint import shard_file
    from megatron.data import indexed_source

    if rank == 1:
        delay(indexed_source.IndexedSource, "prepare", [60.0])
        delay(shard_file, "write_tensors", [60.0])


@FULL
def test_first_of_a_kind_that_works_is_no_hang(new_job: NewJob) -> None:
    flags = "--train-iters 4 --num-layers 2 --micro-batch-size 1 --save-interval 2"
    launch = new_job("job", flags, 2).launch(constants=CONSTANTS, prepare=work_slowly)
    assert launch.codes() == [0, 0], launch.all_output()
    assert WARNING not in launch.all_output()


def compile_slowly(rank: int) -> None:
    """Let rank 1 compile in the optimizer, after the first steps."""
    # The watchdog knows a compilation by the file of a function.
    source = "import time\ndef convert(): time.sleep(7.5)"
    names: dict[str, Any] = {}
    exec(compile(source, "/torch/_dynamo/convert_frame.py", "exec"), names)
    slow_down(rank, {(3, "optimizer"): names["convert"]})


def compute_and_write_slowly(rank: int) -> None:
    """Let rank 1 be slow in a microbatch, and between two steps, as when a log is written."""
    slow_down(
        rank,
        {
            (3, ""): functools.partial(time.sleep, 8.0),
            (4, "microbatch 1"): functools.partial(time.sleep, 2.5),
            (5, "microbatch 2"): functools.partial(time.sleep, 9.0),
        },
    )


def slow_down(rank: int, places: dict[tuple[int, str], Callable[[], None]]) -> None:
    original = RankProgress.begin_part

    def begin(progress: RankProgress, part: str) -> None:
        original(progress, part)
        act = places.get((progress.iteration, part))
        if act is not None and rank == 1 and progress.phase.is_step:
            act()

    RankProgress.begin_part = begin  # type: ignore[assignment, method-assign]


SCALE = float(os.environ.get("HANG_SCALE", 0.2))
"""Limits and waits of the long run without a hang, as a part of the real ones, with 20 min."""
SLOW_PLACES = {
    # Each part is below 3 times the slowest one before and 20 s. On a busy machine it takes longer.
    (3, "microbatch 1"): 8.0,
    (4, "microbatch 2"): 35.0,
    (5, "reduction of gradients"): 100.0,
    # A log on a file system that does not answer, and another rank waits in its part.
    (6, ""): 250.0,
    (8, "optimizer"): 8.0,
}


def be_slow_everywhere(rank: int) -> None:
    """Let rank 1 be slow in steps, in evaluations, in a save, and in the index of the data."""
    from megatron.checkpoint import shard_file
    from megatron.data import indexed_source

    slow_down(
        rank, {place: functools.partial(be_slow, seconds) for place, seconds in SLOW_PLACES.items()}
    )
    if rank == 1:
        delay(indexed_source.IndexedSource, "prepare", [60.0])
        delay(shard_file, "write_tensors", [90.0, 200.0])
        delay(RankProgress, "begin_step", [40.0, 100.0], "evaluation")


def be_slow(seconds: float) -> None:
    """Wait for a time in which the process runs. That of one long sleep passes while it is frozen.

    Args:
        seconds: The time with the real limits.
    """
    for _ in range(20):
        time.sleep(SCALE * seconds / 20)


def delay(owner: Any, name: str, times: list[float], kind: str = "") -> None:
    """Wait after the first calls of a function, or after those for a kind of step."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if times and kind in str(arguments[1:2]):
            be_slow(times.pop(0))
        return result

    setattr(owner, name, call)


@FULL
def test_long_run_without_a_hang_has_no_warning(new_job: NewJob) -> None:
    constants = {
        f"{WATCH}PART_SECONDS": SCALE * 20.0,
        f"{WATCH}PHASE_SECONDS": SCALE * 300.0,
        f"{WATCH}FIRST_SECONDS": SCALE * 1800.0,
    }
    flags = "--train-iters 10 --num-layers 2 --micro-batch-size 1 --log-interval 1"
    flags += " --eval-interval 5 --eval-iters 2 --split 8,2,0 --save-interval 5"
    launch = new_job("job", flags, 2).launch(constants=constants, prepare=be_slow_everywhere)
    for iteration in (2, 7):
        line = f"iteration        {iteration}/"
        end = time.monotonic() + SCALE * 1200.0 + 60.0
        while line not in launch.output() and launch.running():
            assert time.monotonic() < end, launch.all_output()
            time.sleep(0.1)
        with launch.frozen():
            time.sleep(SCALE * 120.0)
    end = time.monotonic() + SCALE * 1200.0 + 60.0
    while launch.running() and time.monotonic() < end:
        time.sleep(0.1)
    assert launch.codes() == [0, 0], launch.all_output()
    assert WARNING not in launch.all_output()


@pytest.mark.parametrize(
    "prepare", [compile_slowly, pytest.param(compute_and_write_slowly, marks=FULL)]
)
def test_healthy_slow_run_and_suspended_machine_are_no_hang(
    prepare: Callable[[int], None], new_job: NewJob
) -> None:
    # Each of these takes longer than twice PART_SECONDS, or than three times the slowest before.
    constants = {f"{WATCH}PART_SECONDS": 3.0, f"{WATCH}PHASE_SECONDS": 12.0}
    flags = "--train-iters 6 --num-layers 2 --micro-batch-size 1 --log-interval 1"
    launch = new_job("job", flags, 2).launch(constants=constants, prepare=prepare)
    launch.wait_for_line("iteration        2/")
    with launch.frozen():
        time.sleep(7)
    assert launch.codes() == [0, 0], launch.all_output()
    assert WARNING not in launch.all_output()
    assert "the end at twice" in launch.output()
