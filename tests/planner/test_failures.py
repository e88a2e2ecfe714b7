"""Replays of failures: against a simulation second by second, the formula, and published runs."""

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.extras.planner.cost.goodput import (
    Failure,
    Policy,
    Reliability,
    Replayed,
    choose_save_interval,
    count_daily_failures,
    draw_failures,
    estimate_goodput,
    find_best_interval,
    load_failures,
    replay,
)

TRACE = Path(__file__).resolve().parents[1] / "fixtures" / "infinitehbd_trace.json"
DAY = 86400.0


class Simulation:
    """A run that is followed second by second. All times must be whole seconds."""

    def __init__(self, failures: list[Failure], policy: Policy) -> None:
        self.failures = {int(failure.time): failure for failure in failures}
        self.policy = policy
        self.found = Replayed()
        self.repaired: dict[int, float] = {}
        self.used = list(range(policy.nodes))
        self.queue: list[str] = []
        self.unsaved = 0

    def good(self, now: int) -> list[int]:
        return [node for node in range(self.policy.pool) if self.repaired.get(node, 0) <= now]

    def start(self, now: int, detection: float) -> None:
        policy = self.policy
        good = self.good(now)
        used = [node for node in self.used if node in good]
        used += [node for node in good if node not in used][: policy.nodes - len(used)]
        self.used = used if len(used) >= (policy.fewer or policy.nodes) else []
        self.unsaved = 0
        self.queue = ["detection"] * int(detection)
        if self.used:
            self.queue += ["restarts"] * int(policy.restart)

    def keep(self) -> None:
        speed = len(self.used) / self.policy.nodes
        self.found.useful += speed * self.unsaved
        self.found.missing_nodes += (1 - speed) * self.unsaved
        self.unsaved = 0

    def fail(self, failure: Failure) -> None:
        node = failure.node
        if node >= self.policy.pool:
            return
        if self.policy.spares is not None:
            end = failure.time + failure.repair
            self.repaired[node] = max(self.repaired.get(node, 0), end)
        if node in self.used:
            self.found.interruptions[failure.cause] += 1
            self.found.repeated_steps += self.unsaved
            self.start(int(failure.time), self.policy.detection)

    def follow(self, now: int) -> None:
        has_saved = not self.queue and self.unsaved > 0
        if has_saved:
            self.keep()
        if not self.used and now in self.repaired.values():
            self.start(now, self.queue.count("detection"))
        if now in self.failures:
            self.fail(self.failures[now])
        can_grow = len(self.used) < min(self.policy.nodes, len(self.good(now)))
        if has_saved and not self.queue and can_grow:
            self.start(now, 0)
        if not self.queue and self.used:
            steps = ["step"] * int(self.policy.interval)
            self.queue = steps + ["saves"] * int(self.policy.save)
        doing = self.queue.pop(0) if self.queue else "waiting"
        if doing == "step":
            self.unsaved += 1
        else:
            setattr(self.found, doing, getattr(self.found, doing) + 1)

    def run(self, seconds: int) -> Replayed:
        for now in range(seconds):
            self.follow(now)
        self.keep()
        return self.found


@pytest.mark.parametrize("seed", range(40))
def test_replay_equals_a_simulation_by_seconds(seed: int) -> None:
    """Failures come at odd seconds and repairs end at even ones, so that no two are the same."""
    chance = random.Random(seed)
    nodes = chance.randint(1, 5)
    spares = chance.choice((None, 0, 1, 3))
    policy = Policy(
        nodes=nodes,
        interval=2 * chance.randint(3, 40),
        save=2 * chance.randint(0, 3),
        detection=2 * chance.randint(0, 4),
        restart=2 * chance.randint(0, 10),
        spares=spares,
        fewer=chance.choice((None, max(1, nodes - 2))),
    )
    times = sorted(chance.sample(range(1, 2000, 2), chance.randint(0, 60)))
    failures = [
        Failure(
            time,
            # The last node is not one of the run.
            chance.randrange(policy.pool + 1),
            chance.choice((0, 2 * chance.randint(0, 20) + 1, 2 * chance.randint(0, 200) + 1)),
            chance.choice("ab"),
        )
        for time in times
    ]
    found = replay(failures, policy, 2000.0)
    expected = Simulation(failures, policy).run(2000)
    assert found.interruptions == expected.interruptions
    assert found.list_shares() == pytest.approx(expected.list_shares(), abs=1e-9)
    assert sum(found.list_shares().values()) == pytest.approx(1)


@pytest.mark.parametrize("interval", [60.0, 800.0, 7200.0])
def test_replay_of_drawn_failures_agrees_with_the_formula(interval: float) -> None:
    """The formula has Poisson failures, each of which costs a restart."""
    source = load_failures("llama3")
    nodes = 2048
    hours = 24 / count_daily_failures(source, nodes, 8)
    assert hours == pytest.approx(24 * 54 / 419)
    seconds = 3000 * 3600 * hours
    failures = draw_failures(source, nodes, 8, seconds, seed=1)
    policy = Policy(nodes, interval, 20.0, 60.0, 540.0)
    shares = replay(failures, policy, seconds).list_shares()
    formula = estimate_goodput(Reliability(hours, 600.0, 20.0), interval)
    assert shares["useful"] == pytest.approx(formula.useful, abs=0.01)
    assert shares["repeated_steps"] == pytest.approx(formula.lost_steps, abs=0.01)
    assert shares["restarts"] + shares["detection"] == pytest.approx(formula.restarts, abs=0.01)


def test_goodput_of_16384_devices_beside_the_published_one() -> None:
    """Llama 3 405B reports 419 interruptions in 54 days and more than 90 % of effective time."""
    source = load_failures("llama3")
    draws = [draw_failures(source, 2048, 8, 54 * DAY, seed) for seed in range(20)]
    assert sum(map(len, draws)) / 20 == pytest.approx(419, rel=0.05)
    # 405 billion parameters of 12 bytes, at 2 GB/s of each node.
    save = 405e9 * 12 / (2048 * 2e9)
    best = choose_save_interval(save, 54 * DAY / 419)
    policy = Policy(2048, best, save, 0.0, 600.0)
    shares = [replay(each, policy, 54 * DAY).list_shares()["useful"] for each in draws]
    assert 0.92 < min(shares) < max(shares) < 0.95
    causes = replay(draws[0], policy, 54 * DAY).interruptions
    assert causes["faulty GPU"] == pytest.approx(148, rel=0.25)


def test_failures_scale_with_devices_and_nodes() -> None:
    source = load_failures("llama3")
    per_day = count_daily_failures(source, 2048, 8)
    assert count_daily_failures(source, 64, 8) == pytest.approx(per_day / 32)
    # 268 of the 419 failures are those of devices.
    fewer = count_daily_failures(source, 2048, 4)
    assert fewer == pytest.approx(per_day * (419 - 268 / 2) / 419)


def test_drawn_repairs_are_those_of_the_recorded_trace() -> None:
    """Failures of software need no repair."""
    source = load_failures("llama3")
    drawn = draw_failures(source, 2048, 8, 20 * 54 * DAY, seed=1)
    repairs = [failure.repair for failure in drawn if failure.repair]
    recorded = [fault.repair for fault in load_failures(str(TRACE)).faults]
    assert statistics.median(repairs) == pytest.approx(statistics.median(recorded), rel=0.05)
    assert statistics.mean(repairs) == pytest.approx(statistics.mean(recorded), rel=0.15)
    # Of 419 failures, 63 are those of software.
    assert len(repairs) / len(drawn) == pytest.approx(356 / 419, rel=0.02)


def test_recorded_trace() -> None:
    source = load_failures(str(TRACE))
    assert (len(source.faults), source.nodes, source.days) == (584, 400, 349)
    assert len({fault.node for fault in source.faults}) == 231
    complete = draw_failures(source, 400, 8, 349 * DAY, seed=0)
    assert sorted(fault.repair for fault in complete) == sorted(
        fault.repair for fault in source.faults
    )
    # Another seed begins at another of its days.
    other = draw_failures(source, 400, 8, 349 * DAY, seed=1)
    assert {fault.time for fault in other} != {fault.time for fault in complete}
    # 800 nodes have two copies of the trace, here for two of its lengths.
    assert len(draw_failures(source, 800, 8, 698 * DAY, seed=0)) == 4 * 584
    few = draw_failures(source, 10, 8, 20 * 349 * DAY, seed=0)
    assert len(few) == pytest.approx(20 * 584 / 40, rel=0.3)
    assert {fault.node for fault in few} <= set(range(10))


def test_policies_on_the_recorded_trace() -> None:
    """Spares shorten the wait for nodes, and so do fewer nodes. Both repeat less than nothing."""
    source = load_failures(str(TRACE))
    failures = draw_failures(source, 36, 8, 698 * DAY, seed=0)
    policy = Policy(32, 1800.0, 20.0, 60.0, 540.0, spares=0)

    def share(other: Policy) -> float:
        return replay(failures, other, 698 * DAY).list_shares()["useful"]

    none, two, four = (share(replace(policy, spares=spares)) for spares in (0, 2, 4))
    assert none < two < four < share(replace(policy, spares=None))
    fewer = share(replace(policy, spares=2, fewer=16))
    assert two < fewer
    assert replay(failures, replace(policy, fewer=16), 698 * DAY).missing_nodes > 0
    best = find_best_interval(failures, replace(policy, spares=4), 698 * DAY)
    assert share(replace(policy, spares=4, interval=best)) >= four


@pytest.mark.parametrize(
    "values",
    [
        {"days": 0, "nodes": 1, "faults": [[0, 0, 0, "x"]]},
        {"days": 1, "nodes": 1, "faults": []},
        {"days": 1, "nodes": 1, "faults": [[1, 0, 0, "x"]]},
        {"days": 1, "nodes": 1, "faults": [[0, 0.5, 0.25, "x"]]},
        {"days": 1, "nodes": 1, "faults": [[0, 0.5]]},
        {"days": 1, "nodes": 1, "devices": 8, "counts": {"disk": {"x": 1}}},
        {"days": 1, "nodes": 1, "devices": 8, "counts": {"node": {"x": 0}}},
        {"days": 1, "nodes": 1, "counts": {"node": {"x": 1}}},
        {"nodes": 1},
        [],
        "text",
    ],
)
def test_other_files_are_refused(values: object, tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    path.write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match=r"--failures .*failures.json: .*; give llama3, or a JSON"
    ):
        load_failures(str(path))


@pytest.mark.parametrize("name", ["llama4", "/nowhere/failures.json", "../llama3", "tests"])
def test_names_that_are_not_known_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="give llama3"):
        load_failures(name)
