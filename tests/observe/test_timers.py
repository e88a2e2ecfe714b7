"""Timers of phases: sums, nesting, and device events with a simulated clock."""

import time

import pytest

from megatron.observe.timers import Timers, compute_seconds


class FakeEvent:
    """Simulate a device event. The time advances by 10 ms at each record."""

    now_ms = 0.0
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.at_ms = -1.0
        self.waited = False

    def record(self) -> None:
        type(self).now_ms += 10.0
        self.at_ms = self.now_ms
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.waited, "read before it was reached"
        return end.at_ms - self.at_ms


def test_wall_clock_adds_up_and_take_resets() -> None:
    timers = Timers()
    for _ in range(2):
        with timers("data-wait"):
            time.sleep(0.01)
    timers.add("communication", 0.5)
    timers.add("communication", 0.25)
    taken = timers.take()
    assert list(taken) == ["data-wait", "communication"]
    assert 0.02 <= taken["data-wait"] < 0.2
    assert taken["communication"] == 0.75
    assert timers.take() == {"data-wait": 0.0, "communication": 0.0}


def test_collectives_of_a_pause_are_not_timed() -> None:
    timers = Timers(make_event=FakeEvent)
    for _ in range(3):
        with timers.time_collective():
            pass
        with timers.pause(), timers.time_collective(), timers.time_collective():
            pass
        taken = timers.take()
    # The seconds are those of the time between the two calls before.
    assert taken["communication"] == pytest.approx(0.01)


def test_phase_nested_in_itself_counts_once() -> None:
    timers = Timers()
    start = time.perf_counter()
    with timers("save"), timers("save"):
        time.sleep(0.02)
    assert 0.02 <= timers.take()["save"] <= time.perf_counter() - start


def test_phase_that_raises_is_counted_and_closed() -> None:
    timers = Timers()
    with pytest.raises(KeyError), timers("save"):
        raise KeyError("disk")
    assert timers.take()["save"] > 0
    with timers("save"):
        pass
    assert timers.take()["save"] < 0.01


def test_device_events_are_read_an_iteration_later_and_reused() -> None:
    FakeEvent.made = 0
    timers = Timers(make_event=FakeEvent)
    with timers("communication"):
        pass
    timers.forget()
    for iteration in range(4):
        with timers("forward-backward"), timers("communication"):
            pass
        with timers("optimizer"), timers("optimizer"):
            pass
        with timers("data-wait"):
            pass
        if iteration == 2:
            with timers("communication"):
                pass
        taken = timers.take()
        assert taken.pop("data-wait") < 0.005  # the host's clock
        if iteration == 0:
            assert taken == {}
            continue
        assert taken["forward-backward"] == pytest.approx(0.030)
        assert taken["communication"] == pytest.approx(0.020 if iteration == 3 else 0.010)
        assert taken["optimizer"] == pytest.approx(0.020)
    assert FakeEvent.made == 2 + 2 * 6 + 2
    timers.add("communication", 1.0)
    assert timers.take()["communication"] == pytest.approx(1.010)


def test_the_timer_of_blocks_waits_for_its_events() -> None:
    timer = Timers(make_event=FakeEvent)._make_timer()
    for _ in range(2):
        with timer:
            pass
        assert timer.take() == pytest.approx(0.010)


def test_entering_a_phase_is_cheap() -> None:
    timers = Timers()
    start = time.perf_counter()
    for _ in range(10_000):
        with timers("communication"):
            pass
    # All entries take about 5 ms. An iteration has about a hundred of them.
    assert time.perf_counter() - start < 0.5


def test_compute_seconds_exclude_communication() -> None:
    phases = {"forward-backward": 2.0, "optimizer": 1.0, "communication": 0.5, "data-wait": 9.0}
    assert compute_seconds(phases) == 2.5
    assert compute_seconds({"forward-backward": 1.0, "communication": 3.0}) == 0.0
    assert compute_seconds({}) == 0.0
