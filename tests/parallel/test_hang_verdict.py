"""Tests of the limits of phases, and of the comparison of the ranks after a hang."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megatron.extras.watch.watchdog.hang_verdict import describe_states, find_odd_ranks
from megatron.extras.watch.watchdog.watchdog import (
    _LONGEST_WINDOW_SECONDS,
    _WRITE_SECONDS,
    Stopwatch,
    find_last_collectives,
)
from megatron.parallel.rank_progress import (
    FIRST_SECONDS,
    LONG_FACTOR,
    PHASE_SECONDS,
    Phase,
    RankProgress,
    RankState,
    TimeLimit,
)
from megatron.parallel.ranks import Ranks, Work

LIMIT = 10.0
TICK = 0.25


def make_state(
    at: str = "loop.py:1 train", phase: str = "training iteration 5", **other: Any
) -> RankState:
    return RankState(at=at, waits=other.pop("waits", True), phase=phase, sequence=7, **other)


def exceeds_limit(stopwatch: Stopwatch, now: float) -> bool:
    stopwatch.tick(now)
    return stopwatch.seconds > stopwatch.limit


def run_until_exceeded(stopwatch: Stopwatch, act: Callable[[int], None], seconds: float) -> float:
    """Return the time at which the limit is exceeded, or infinity."""
    for tick in range(int(seconds / TICK)):
        act(tick)
        if exceeds_limit(stopwatch, tick * TICK):
            return tick * TICK
    return float("inf")


def ignore(tick: int) -> None:
    """Make no progress."""


def test_repeated_step_has_the_limit_and_the_first_one_ten_times_as_long() -> None:
    progress = RankProgress()
    progress.begin_step("training iteration", 1)
    first = run_until_exceeded(Stopwatch(progress, LIMIT, TICK), ignore, 200)
    progress.begin_step("training iteration", 2)
    second = run_until_exceeded(Stopwatch(progress, LIMIT, TICK), ignore, 200)
    progress.begin_step("evaluation batch", 1)
    other = run_until_exceeded(Stopwatch(progress, LIMIT, TICK), ignore, 200)
    assert first == other == LONG_FACTOR * LIMIT + TICK
    assert second == LIMIT + TICK


def test_start_after_a_rollback_may_take_long_again() -> None:
    progress = RankProgress()
    for iteration in (1, 2):
        progress.begin_step("training iteration", iteration)
    progress.begin_start()
    for _ in range(2):
        found = run_until_exceeded(Stopwatch(progress, LIMIT, TICK), ignore, 200)
        assert found == pytest.approx(LIMIT * LONG_FACTOR, abs=2 * TICK)
        # The first step after the start may compile again.
        progress.begin_step("training iteration", 1)
    progress.begin_step("training iteration", 2)
    found = run_until_exceeded(Stopwatch(progress, LIMIT, TICK), ignore, 200)
    assert found == pytest.approx(LIMIT, abs=2 * TICK)


def test_step_that_follows_in_time_exceeds_no_limit() -> None:
    progress = RankProgress()

    def begin_now_and_then(tick: int) -> None:
        if tick % 20 == 0:
            progress.begin_step("training iteration", tick)

    stopwatch = Stopwatch(progress, LIMIT, TICK)
    assert run_until_exceeded(stopwatch, begin_now_and_then, 500) == float("inf")


def test_time_of_an_outer_phase_starts_again_after_an_inner_one() -> None:
    progress = RankProgress()
    for number in (1, 2):
        progress.begin_step("training iteration", number)
    stopwatch = Stopwatch(progress, LIMIT, TICK)
    assert run_until_exceeded(stopwatch, ignore, LIMIT) == float("inf")
    with progress.enter(Phase("saving iteration 2")):
        assert progress.phase.factor == LONG_FACTOR
        assert not exceeds_limit(stopwatch, LIMIT)
    assert progress.phase.name == "training iteration 2"
    assert not exceeds_limit(stopwatch, LIMIT + TICK)
    assert stopwatch.seconds == 0


def test_time_in_which_the_process_was_suspended_does_not_count() -> None:
    progress = RankProgress()
    for number in (1, 2):
        progress.begin_step("training iteration", number)
    stopwatch = Stopwatch(progress, LIMIT, TICK)
    for now in (0.0, TICK, 3600.0, 3600.0 + TICK):
        assert not exceeds_limit(stopwatch, now)
    assert stopwatch.seconds <= 2


def test_phase_without_a_limit_is_never_exceeded() -> None:
    progress = RankProgress()
    with progress.enter(Phase("the export", is_limited=False)):
        assert run_until_exceeded(Stopwatch(progress, LIMIT, TICK), ignore, 5000) == float("inf")


@pytest.mark.parametrize(
    ("odd", "others", "reason"),
    [
        (make_state(waits=False), make_state(), "in no collective"),
        # It is ahead in one group because it skipped a collective of another one.
        (
            make_state(collectives={"0": [17, "sum [4]"], "1": [9, "max [1]"]}),
            make_state(collectives={"0": [18, "sum [4]"], "1": [8, "max [1]"]}),
            "started 17 collectives of group 0, and others 18",
        ),
        (make_state(phase="training iteration 6"), make_state(), "another phase"),
        (
            make_state(collectives={"0": [18, "max [1]"]}),
            make_state(collectives={"0": [18, "sum [4]"]}),
            "max [1]",
        ),
        (make_state(at="evaluate.py:3 run"), make_state(), "another line"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_odd_rank_is_found(odd: RankState, others: RankState, reason: str, rank: int) -> None:
    states = {each: odd if each == rank else others for each in range(4)}
    found = find_odd_ranks(states)
    assert list(found) == [rank]
    assert reason in found[rank]
    lines = describe_states(states, [f"rank {each} on a" for each in range(4)], with_odd=True)
    assert lines[0].startswith(f"rank {rank} on a is at {odd.at} in {odd.phase}")
    assert "3 of the other ranks" in lines[1]


def test_rank_that_left_out_a_collective_is_found_although_others_went_on() -> None:
    """gloo mixed the messages number 18. Some ranks have returned from it, and others have not."""
    behind = make_state(
        collectives={"0": [18, "sum [4]"]}, recent={"0": {"17": "max [1]", "18": "sum [4]"}}
    )
    ahead = make_state(
        collectives={"0": [19, "max [3]"]},
        recent={"0": {"17": "max [1]", "18": "sum [4]", "19": "max [3]"}},
    )
    culprit = make_state(
        collectives={"0": [18, "max [3]"]}, recent={"0": {"17": "max [1]", "18": "max [3]"}}
    )
    found = find_odd_ranks({0: behind, 1: ahead, 2: behind, 3: culprit})
    assert list(found) == [3]
    assert "number 18 of group 0 is max [3]" in found[3]


def test_every_rank_is_described_if_no_sign_shows_the_cause() -> None:
    assert sorted(find_odd_ranks({0: make_state(), 1: make_state()})) == [0, 1]


def test_ranks_of_a_large_run_are_not_all_listed() -> None:
    states = {rank: make_state(waits=rank > 99) for rank in range(1000)}
    lines = describe_states(states, [f"rank {rank}" for rank in states], with_odd=True)
    assert len(lines) == 10
    assert "and 92 more" in lines


def test_messages_between_two_ranks_are_left_out_of_the_collectives() -> None:
    def make_entry(number: int, group: str, *, is_p2p: bool = False) -> dict[str, Any]:
        return {
            "is_p2p": is_p2p,
            "process_group": [group, ""],
            "collective_seq_id": number,
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[4]],
        }

    entries = [make_entry(1, "0"), make_entry(1, "1"), make_entry(2, "0")]
    found, last = find_last_collectives([*entries, make_entry(3, "0", is_p2p=True)])
    operation = "gloo:all_reduce [4]"
    assert found == {"0": {1: operation, 2: operation}, "1": {1: operation}}
    assert "number 2 of group 0" in last


PHASES = [
    Phase("a step", is_repeated=True),
    Phase("the first step"),
    Phase("a save", in_threads=True),
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
@pytest.mark.parametrize(
    ("minutes", "seconds"), [(10.0, 5.0), (10.0, 120.0), (10.0, 900.0), (1.0, 30.0), (600.0, 60.0)]
)
def test_every_phase_ends_before_a_collective_times_out(
    phase: Phase, minutes: float, seconds: float
) -> None:
    """A rank that waits in a collective since the begin of the phase calls the roll first."""
    limit = TimeLimit(minutes, seconds)
    collective = limit.collective.total_seconds()
    assert collective >= TimeLimit(minutes).collective.total_seconds()
    progress = RankProgress()
    stopwatch = Stopwatch(progress, seconds, TICK)
    with progress.enter(phase):
        exceeded = run_until_exceeded(stopwatch, ignore, collective)
    # The watchdog waits twice for answers, and a second for its files.
    assert exceeded + 2 * _LONGEST_WINDOW_SECONDS + _WRITE_SECONDS < collective


def test_start_is_one_of_the_phases() -> None:
    assert RankProgress().phase.factor == max(phase.factor for phase in PHASES) == LONG_FACTOR


def run_part(stopwatch: Stopwatch, progress: RankProgress, part: str, seconds: float) -> float:
    """Let a part last for a time, and return the limit that it had."""
    progress.begin_part(part)
    start = 0.0 if stopwatch._last is None else stopwatch._last
    for tick in range(1, int(seconds / TICK) + 2):
        stopwatch.tick(start + tick * TICK)
    return stopwatch.limit


def test_limit_follows_the_slowest_part_of_the_last_100_steps() -> None:
    progress = RankProgress()
    stopwatch = Stopwatch(progress, None, TICK)
    seconds = {1: 300.0, 2: 5.0, 3: 9.0}
    limits = {}
    for iteration in range(1, 140):
        progress.iteration = iteration
        progress.begin_step("training iteration", iteration)
        for number in (1, 2):
            wanted = seconds.get(iteration, 4.0)
            limits[iteration] = run_part(stopwatch, progress, f"microbatch {number}", wanted)
        # All parts share their slowest time, in this step too.
        optimizer = run_part(stopwatch, progress, "optimizer", 1.0)
        assert optimizer >= limits[iteration] or iteration < 6
    assert limits[1] == 1800
    # A compilation of the first step counts only until there are other steps.
    assert limits[2] == pytest.approx(920, abs=3 * TICK)
    assert limits[10] == pytest.approx(47, abs=3 * TICK)
    assert limits[101] == limits[10]
    assert limits[139] == pytest.approx(32, abs=3 * TICK)


def test_limit_of_a_save_follows_the_slowest_one_so_far() -> None:
    progress = RankProgress()
    stopwatch = Stopwatch(progress, None, TICK)
    now = 0.0
    limits = []
    for number, seconds in enumerate((30, 10, 10)):
        with progress.enter(Phase(f"saving iteration {number}", in_threads=True)):
            for _ in range(int(seconds / TICK)):
                now += TICK
                stopwatch.tick(now)
            limits.append(stopwatch.limit)
    assert limits[0] == 1800
    assert limits[1] == limits[2] == pytest.approx(390, abs=3 * TICK)


def test_stages_of_a_save_and_asynchronous_writes_have_their_own_limits() -> None:
    """A short stage says nothing about a long one, and an asynchronous write began before."""
    ranks = Ranks()
    limits = []

    def save(iteration: int) -> None:
        for stage, seconds in (("WRITE", 0.3), ("PUBLISH", 0.0)):
            work = Work(functools.partial(time.sleep, seconds), in_thread=True)
            # Training goes on meanwhile, and does not wait long for the rest.
            work.wait()
            ranks.wait_for(work, f"saving iteration {iteration}", stage=stage)
            phase = Phase(f"saving iteration {iteration}", stage=stage)
            with ranks.progress.enter(phase):
                limits.append(Stopwatch(ranks.progress, None, TICK).limit)

    with ranks.progress.enter(Phase("saving iteration 1", stage="WRITE")):
        assert Stopwatch(ranks.progress, None, TICK).limit == FIRST_SECONDS
    with ranks.progress.enter(Phase("saving iteration 1", stage="PUBLISH")):
        assert Stopwatch(ranks.progress, None, TICK).limit == FIRST_SECONDS
    save(1)
    assert limits[0] == pytest.approx(PHASE_SECONDS + 0.9, abs=0.5)
    assert limits[1] < limits[0]


def test_larger_step_may_take_as_long_as_a_first_one() -> None:
    progress = RankProgress()
    limits = []
    for number, tokens in enumerate((100, 100, 1600, 1600, 100, 3200)):
        progress.begin_step("training iteration", number, tokens)
        progress.begin_part("microbatch 1")
        limits.append(Stopwatch(progress, None, TICK).limit)
    assert [limit == FIRST_SECONDS for limit in limits] == [True, False, True, False, False, True]


def test_phase_without_a_limit_has_none() -> None:
    progress = RankProgress()
    with progress.enter(Phase("the export", is_limited=False)):
        for hang_timeout in (None, LIMIT):
            assert Stopwatch(progress, hang_timeout, TICK).limit == float("inf")


def test_longer_limit_of_another_rank_holds_for_the_present_part_only() -> None:
    progress = RankProgress()
    progress.begin_step("training iteration", 1)
    progress.begin_step("training iteration", 2)
    stopwatch = Stopwatch(progress, None, TICK)
    stopwatch.tick(0.0)
    # A rank that publishes nothing does not get the time of a slow file system.
    assert (stopwatch.limit, stopwatch.silent_limit) == (300, 20)
    assert stopwatch.change_limit(stopwatch.number, 1800.0)
    assert stopwatch.limit == 1800
    progress.begin_part("microbatch 1")
    stopwatch.tick(TICK)
    assert stopwatch.limit == 20
    assert not stopwatch.change_limit(stopwatch.number - 1, 1800.0)


def test_first_of_a_kind_may_lose_its_time() -> None:
    """What lasts longer without work has the limit of a phase. Others keep what they have."""
    progress = RankProgress()
    progress.begin_step("training iteration", 1)
    stopwatch = Stopwatch(progress, None, TICK)
    assert (stopwatch.limit, stopwatch.silent_limit) == (FIRST_SECONDS, PHASE_SECONDS)
    assert stopwatch.change_limit(stopwatch.number, PHASE_SECONDS)
    assert stopwatch.limit == PHASE_SECONDS
    assert stopwatch.change_limit(stopwatch.number, FIRST_SECONDS)
    assert stopwatch.limit == FIRST_SECONDS
    progress.begin_step("training iteration", 2)
    stopwatch.tick(0.0)
    assert stopwatch.change_limit(stopwatch.number, 1.0)
    assert stopwatch.limit == PHASE_SECONDS


@pytest.mark.parametrize(
    ("times", "children", "idle"),
    [
        (["5 1 2"], "", True),
        (["5 1 2", "6 1 3"], "", False),
        (["5 1 2"], "77 ", False),
        ([None], "", False),
        ([], "", True),
    ],
)
def test_rank_is_idle_if_no_thread_has_run(
    times: list[str | None],
    children: str,
    idle: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread waits, works or has ended, or the rank has a process of its own, or no thread."""
    monkeypatch.setattr(f"{Stopwatch.__module__}._THREADS", tmp_path)
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "children").write_text(children)
    progress = RankProgress()
    progress.begin_step("training iteration", 1)
    stopwatch = Stopwatch(progress, None, TICK)
    threads = [Thread() for _ in times[:1]]
    for thread in threads:
        thread._native_id = 12  # type: ignore[attr-defined]
    found = []
    for number in range(1, 16):
        stopwatch.seconds = 20.0 * number
        ran = (times or [None])[number % max(1, len(times))]
        if ran is not None:
            (tmp_path / "12" / "schedstat").write_text(ran)
        found.append(stopwatch.is_idle(threads))
    assert found[-1] == idle
    assert not any(found[:12])
