"""What failures, saves, energy and carbon cost a run.

`estimate_goodput` has the formula for failures that only cost a restart. The interval of saves is
that of Young (https://doi.org/10.1145/361147.361115) and Daly
(https://doi.org/10.1016/j.future.2004.11.016). The rate of failures is that of a large research
cluster (https://arxiv.org/abs/2410.21680).

In a replay, nodes are also lost and repaired. Failures are drawn from published counts, or taken
from a trace. `replay` goes through the failures of a time, and a `Policy` says what follows from
each.

Invariant: the seconds of all causes of a `Replayed` sum to the time that was replayed.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_json
from megatron.extras.planner.cost.hardware import Hardware

FAILURES_PER_1000_NODE_DAYS = 6.5
"""Failures that end a run, for each 1,000 days of a node."""
_MOST_MEANS = 100.0
"""A segment and a restart that are longer than so many mean times to failure never succeed."""


@dataclass(frozen=True)
class CostOptions:
    """What a prediction of cost assumes about the cluster, apart from its hardware."""

    failures_per_1000_node_days: float = FAILURES_PER_1000_NODE_DAYS
    """Failures that end the run, for each 1,000 days of a node."""
    detection_minutes: float = 0.0
    """Minutes until a failure is noticed. They come before --restart-minutes."""
    restart_minutes: float = 10.0
    """Minutes from a failure to the first new step."""
    failures: str | None = None
    """Replay failures: llama3 for published counts by cause, or a JSON file with counts or with a
    recorded trace (docs/planner.md)."""
    spare_nodes: int | None = None
    """Spare nodes of the replay. Default: a lost node is replaced at once."""
    fewer_nodes: int | None = None
    """Fewest nodes with which the run of the replay goes on. Default: it waits for all its
    nodes."""
    save_gb_per_second: float = 2.0
    """GB per second at which each node writes a checkpoint while training waits."""
    store_gb_per_second: float = 1.0
    """GB per second at which each node exchanges files with the store of an address in --save."""
    store_price: float = 0.023
    """Dollars for a GB and month on this store. Default: the list price of S3 in us-east-1."""
    store_write_price: float = 0.005
    """Dollars for 1,000 requests that write. An upload has one for every 16 MiB."""
    pue: float = 1.2
    """Energy of the data centre relative to that of the nodes."""
    carbon_intensity: float = 300.0
    """Grams of CO2 equivalents of a kilowatt-hour."""


@dataclass(frozen=True)
class Reliability:
    """How often a run fails, and what a failure and a save cost."""

    mean_hours_to_failure: float
    restart_seconds: float
    """Time from a failure to the first new step: detection, queue, start and load."""
    save_seconds: float
    """Time for which a save stops the steps."""


@dataclass(frozen=True)
class PlannedGoodput:
    """The share of the time that is useful, and where the rest goes."""

    save_interval_seconds: float
    useful: float
    saves: float
    lost_steps: float
    restarts: float


def estimate_mean_hours_to_failure(
    devices: int, ranks_per_node: int, rate: float = FAILURES_PER_1000_NODE_DAYS
) -> float:
    """Return the mean hours between failures of a run. Nodes fail independently.

    Args:
        devices: Devices of the run.
        ranks_per_node: Devices of a node.
        rate: Failures for each 1,000 days of a node.
    """
    # A device that fails takes its node out of the run, so nodes are counted.
    nodes = -(-devices // ranks_per_node)
    return 24 * 1000 / (rate * nodes)


def choose_save_interval(save_seconds: float, mean_seconds_to_failure: float) -> float:
    """Return the seconds of steps between two saves that lose least time, after Daly.

    For saves that are short it is Young's sqrt(2 x save x time to failure), less the save.
    """
    # Beyond this point the series does not hold. Saves then take most of the time anyway.
    if save_seconds >= 2 * mean_seconds_to_failure:
        return mean_seconds_to_failure
    ratio = save_seconds / (2 * mean_seconds_to_failure)
    young = math.sqrt(2 * save_seconds * mean_seconds_to_failure)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def estimate_goodput(reliability: Reliability, interval: float | None = None) -> PlannedGoodput:
    """Return the goodput of a run that saves every `interval` seconds of steps.

    Args:
        reliability: Failures, restarts and saves.
        interval: Seconds of steps between two saves. Default: the best one.

    Raises:
        ConfigError: The run fails so often that it makes no progress.
    """
    mean = 3600 * reliability.mean_hours_to_failure
    save = reliability.save_seconds
    if interval is None:
        interval = choose_save_interval(save, mean)
    if reliability.restart_seconds + interval + save > _MOST_MEANS * mean:
        raise ConfigError(
            f"a run with a failure every {mean:.3g} s, saves of {save:.3g} s and restarts of "
            f"{reliability.restart_seconds:.3g} s makes no progress; check "
            "--failures-per-1000-node-days, --save-gb-per-second, --restart-minutes and the number "
            "of devices."
        )
    # Expected wall time of a segment (interval and save) with exponential failures, each of which
    # costs a restart (Daly, equation 13).
    segment = interval + save
    wall = mean * math.exp(reliability.restart_seconds / mean) * math.expm1(segment / mean)
    # Failures are also possible during restarts, so they follow from the wall time.
    failures = wall / mean
    restarts = failures * reliability.restart_seconds
    lost = max(0.0, wall - segment - restarts)
    return PlannedGoodput(interval, interval / wall, save / wall, lost / wall, restarts / wall)


@dataclass(frozen=True)
class Footprint:
    """Energy and carbon of a run."""

    device_hours: float
    megawatt_hours: float
    tonnes: float
    """Tonnes of CO2 equivalents."""


_UTILISATION = 0.85
"""Power of a device that trains, relative to its limit."""


def estimate_footprint(
    hardware: Hardware, devices: int, hours: float, options: CostOptions
) -> Footprint:
    """Estimate energy and carbon of a run.

    Args:
        hardware: The devices.
        devices: Number of devices.
        hours: Wall hours.
        options: The data centre and its electricity.
    """
    # The host draws its power whether or not the device is busy.
    watts = _UTILISATION * hardware.watts + hardware.host_watts
    kilowatt_hours = devices * hours * watts * options.pue / 1000
    tonnes = kilowatt_hours * options.carbon_intensity / 1e6
    return Footprint(devices * hours, kilowatt_hours / 1000, tonnes)


_DAY = 86400.0
_REPAIR_HOURS = (20.4, 1.94)
"""Hours until a node returns: the median, and the standard deviation of the logarithm. The median
is that of 584 faults of 400 nodes (https://arxiv.org/abs/2502.03885). With this deviation the mean
is theirs too, 133 hours."""


@dataclass(frozen=True)
class Failure:
    """A failure of a node of the cluster."""

    time: float
    """Seconds after the start of the run."""
    node: int
    """Number of the node, from 0. The spare nodes of a run have the last numbers."""
    repair: float
    """Seconds until the node can be used again. 0: it is not lost."""
    cause: str


@dataclass(frozen=True)
class Policy:
    """The nodes of a run, and what it does after a failure. Times are in seconds."""

    nodes: int
    """Nodes that the run trains on."""
    interval: float
    """Steps between two saves."""
    save: float
    """Time for which a save stops the steps."""
    detection: float
    """Time from a failure to the restart."""
    restart: float
    """Time from there to the first new step."""
    spares: int | None = None
    """Spare nodes. None: a lost node is replaced at once."""
    fewer: int | None = None
    """Fewest nodes that the run goes on with. Its speed is then in proportion to its nodes, and it
    takes back a node at the first save after the repair. None: it waits for all its nodes."""

    @property
    def pool(self) -> int:
        """Nodes of the run and its spares."""
        return self.nodes + (self.spares or 0)


@dataclass
class Replayed:
    """Where the time of a replay went, in seconds."""

    useful: float = 0.0
    """Steps that are kept, in the time that they take on all nodes."""
    saves: float = 0.0
    repeated_steps: float = 0.0
    detection: float = 0.0
    restarts: float = 0.0
    waiting: float = 0.0
    """No steps, because too few nodes are good."""
    missing_nodes: float = 0.0
    """How much less time the kept steps would have taken on all nodes."""
    interruptions: Counter[str] = field(default_factory=Counter)
    """Cause -> how often the run was interrupted by it."""

    def list_shares(self) -> dict[str, float]:
        """Return the share of each cause in the time, 0 to 1."""
        seconds = {name: value for name, value in vars(self).items() if name != "interruptions"}
        total = sum(seconds.values())
        return {name: value / total for name, value in seconds.items()}


@dataclass(frozen=True)
class FailureSource:
    """Failures that were published or recorded. It has either counts or faults."""

    name: str
    days: float
    """Days in which the failures happened."""
    nodes: int
    """Nodes on which they happened."""
    devices: int = 0
    """Devices of these nodes. 0: not known."""
    counts: tuple[tuple[str, str, int], ...] = ()
    """Kind, cause and number of the failures of each cause."""
    faults: tuple[Failure, ...] = ()


_KINDS = {"device": True, "node": True, "software": False}
"""Kind of a cause -> whether the node is lost. Failures of devices are proportional to the number
of devices, all others to the number of nodes."""


def load_failures(name: str) -> FailureSource:
    """Load published counts by their name, or a file.

    Args:
        name: "llama3" (Llama 3, table 5, https://arxiv.org/abs/2407.21783), or a JSON file with
            `days`, `nodes`, and either `devices` and `counts` ({kind: {cause: number}}) or `faults`
            ([[node, first day, last day, cause], ...]). The kinds are "device", "node" and
            "software".

    Raises:
        ConfigError: There is no such file, or it has other values.
    """
    path = Path(name)
    # A name without a suffix is no file of the user.
    if "/" not in name and not path.suffix:
        path = Path(__file__).with_name(f"{name}_failures.json")
    try:
        return _parse(name, load_json(path))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = getattr(error, "strerror", None) or repr(error)
        raise ConfigError(
            f"--failures {name}: {text}; give llama3, or a JSON file with days, nodes, and either "
            'devices and counts ({"device": {cause: number}, "node": ..., "software": ...}) or '
            "faults ([[node, first day, last day, cause], ...])."
        ) from error


def _parse(name: str, values: dict[str, Any]) -> FailureSource:
    # Rates are divided by both.
    days, nodes = float(values["days"]), int(values["nodes"])
    if not 0 < days < math.inf or nodes < 1:
        raise ValueError(f"{days:g} days and {nodes} nodes must be above 0")
    if "counts" in values:
        counts = tuple(
            (kind, str(cause), int(number))
            for kind, causes in values["counts"].items()
            for cause, number in causes.items()
        )
        devices = int(values["devices"])
        if devices < nodes or not {kind for kind, _, _ in counts} <= set(_KINDS):
            raise ValueError(f"{devices} devices of {nodes} nodes, or a kind of a cause")
        # Without a failure, no time between two of them is known.
        numbers = [number for _, _, number in counts]
        if min(numbers, default=0) < 0 or not sum(numbers):
            raise ValueError("the numbers of failures must be at least 0, and one above it")
        return FailureSource(name, days, nodes, devices, counts)
    faults = []
    for node, first, last, cause in values["faults"]:
        if not (0 <= int(node) < nodes and 0 <= first <= last <= days):
            raise ValueError(f"the fault {[node, first, last, cause]} is outside of the file")
        faults.append(Failure(_DAY * first, int(node), _DAY * (last - first), str(cause)))
    if not faults:
        raise ValueError("it has no faults")
    return FailureSource(name, days, nodes, faults=tuple(faults))


def count_daily_failures(source: FailureSource, pool: int, ranks_per_node: int) -> float:
    """Return the mean number of failures of a day of a cluster."""
    if source.faults:
        return len(source.faults) * pool / (source.nodes * source.days)
    return _DAY * sum(rate for _, _, rate in _list_rates(source, pool, ranks_per_node))


def draw_failures(
    source: FailureSource, pool: int, ranks_per_node: int, seconds: float, seed: int
) -> list[Failure]:
    """Return failures of a cluster, in the order of their times.

    Counts give independent failures: a Poisson process for each cause. A trace is repeated, each
    time from another of its days on, with other nodes of it. For a cluster with more nodes than the
    trace, several such copies run at the same time.

    Args:
        source: Where the failures come from.
        pool: Nodes of the run and its spares.
        ranks_per_node: Devices of a node.
        seconds: Length of the time.
        seed: Another number gives other failures.
    """
    # The numbers of a plan must not change from call to call.
    chance = random.Random(seed)
    if source.faults:
        found = list(_sample_trace(source, pool, seconds, chance))
    else:
        found = list(_draw_from_counts(source, pool, ranks_per_node, seconds, chance))
    return sorted(found, key=lambda failure: failure.time)


def _list_rates(
    source: FailureSource, pool: int, ranks_per_node: int
) -> Iterator[tuple[str, str, float]]:
    """Yield the kind, the cause and the failures of a second."""
    for kind, cause, number in source.counts:
        scale = pool / source.nodes
        if kind == "device":
            scale = pool * ranks_per_node / source.devices
        yield kind, cause, number * scale / (_DAY * source.days)


def _draw_from_counts(
    source: FailureSource, pool: int, ranks_per_node: int, seconds: float, chance: random.Random
) -> Iterator[Failure]:
    median, deviation = _REPAIR_HOURS
    for kind, cause, rate in _list_rates(source, pool, ranks_per_node):
        time = 0.0
        # A cause may have no failures.
        while rate:
            time += chance.expovariate(rate)
            if time >= seconds:
                break
            repair = 0.0
            if _KINDS[kind]:
                repair = 3600 * chance.lognormvariate(math.log(median), deviation)
            yield Failure(time, chance.randrange(pool), repair, cause)


def _sample_trace(
    source: FailureSource, pool: int, seconds: float, chance: random.Random
) -> Iterator[Failure]:
    length = _DAY * source.days
    # Other nodes each time, because some nodes fail much more often than others.
    for number in range(math.ceil(seconds / length)):
        for first in range(0, pool, source.nodes):
            drawn = chance.sample(range(source.nodes), min(source.nodes, pool - first))
            numbers = {node: first + index for index, node in enumerate(drawn)}
            begin = chance.uniform(0, length)
            for fault in source.faults:
                time = number * length + (fault.time - begin) % length
                if fault.node in numbers and time < seconds:
                    yield replace(fault, time=time, node=numbers[fault.node])


def replay(failures: Sequence[Failure], policy: Policy, seconds: float) -> Replayed:
    """Return where the time goes if these failures hit a run.

    The run has its first step at time 0, and has saved there. A failure of a spare node does not
    interrupt it.

    Args:
        failures: The failures, in the order of their times. Those of nodes from `policy.pool` on
            are left out.
        policy: The nodes of the run, and what follows from a failure.
        seconds: Length of the time.
    """
    return _Replay(failures, policy, seconds).run()


_FAILED, _REPAIRED, _GROW = range(3)


class _Replay:
    """The state of a run at the time `_since`, since when nothing has changed."""

    def __init__(self, failures: Sequence[Failure], policy: Policy, seconds: float) -> None:
        self._policy = policy
        self._seconds = seconds
        self._totals = Replayed()
        self._down: Counter[int] = Counter()
        # The nodes that the run trains on. It is empty while the run waits.
        self._used = set(range(policy.nodes))
        self._idle = set(range(policy.nodes, policy.pool))
        self._since = 0.0
        self._detection = 0.0
        self._restart = 0.0
        # Events at the same time have the order of the kinds.
        self._events: list[tuple[float, int, int]] = []
        self._failures = failures
        self._starts = 0
        for number, failure in enumerate(failures):
            # The same failures are replayed with different numbers of spares.
            if failure.node < policy.pool:
                self._push(failure.time, _FAILED, number)

    def _push(self, time: float, kind: int, number: int) -> None:
        """Add an event. `number` is that of the failure, or of the start that wants to grow."""
        if time < self._seconds:
            heapq.heappush(self._events, (time, kind, number))

    def run(self) -> Replayed:
        """Return where the time goes."""
        while self._events:
            time, kind, number = heapq.heappop(self._events)
            if kind == _FAILED:
                self._fail(time, number)
            elif kind == _REPAIRED:
                self._repair(time, self._failures[number].node)
            # A failure may have come before the save at which the run wanted to grow, also one of
            # the repaired node.
            elif number == self._starts and self._idle:
                self._leave(time, is_saved=True)
                self._choose_nodes(time, 0.0)
        self._leave(self._seconds, is_saved=True)
        return self._totals

    def _fail(self, time: float, number: int) -> None:
        policy = self._policy
        failure = self._failures[number]
        is_used = failure.node in self._used
        # A spare node that fails interrupts nothing.
        if is_used:
            self._totals.interruptions[failure.cause] += 1
            self._leave(time, is_saved=False)
        if failure.repair and policy.spares is not None:
            self._down[failure.node] += 1
            self._used.discard(failure.node)
            self._idle.discard(failure.node)
            self._push(time + failure.repair, _REPAIRED, number)
        if is_used:
            self._choose_nodes(time, policy.detection)

    def _repair(self, time: float, node: int) -> None:
        self._down[node] -= 1
        if not self._down[node]:
            self._idle.add(node)
        # The run starts once with all nodes that return at the same time.
        if self._events and self._events[0][:2] == (time, _REPAIRED):
            return
        if not self._used:
            self._leave(time, is_saved=False)
            self._choose_nodes(time, max(0.0, self._since + self._detection - time))
        elif self._idle and len(self._used) < self._policy.nodes:
            # The first save that ends after this time.
            ready = self._since + self._detection + self._restart
            cycle = self._policy.interval + self._policy.save
            saves = max(1, math.ceil((time - ready) / cycle))
            self._push(ready + saves * cycle, _GROW, self._starts)

    def _choose_nodes(self, time: float, detection: float) -> None:
        """Start on the nodes of before and idle ones, or wait."""
        policy = self._policy
        added = sorted(self._idle)[: policy.nodes - len(self._used)]
        self._used.update(added)
        self._idle.difference_update(added)
        if len(self._used) < (policy.fewer or policy.nodes):
            self._idle |= self._used
            self._used = set()
        # A save at which the start before wanted to grow is void.
        self._since, self._detection, self._restart = time, detection, policy.restart
        self._starts += 1

    def _leave(self, time: float, *, is_saved: bool) -> None:
        """Add up the time from `_since` to `time`.

        Args:
            time: The end, in seconds.
            is_saved: Whether steps without a save are kept.
        """
        left = time - self._since
        policy, totals = self._policy, self._totals
        detection = min(left, self._detection)
        totals.detection += detection
        left -= detection
        if not self._used:
            totals.waiting += left
            return
        restart = min(left, self._restart)
        totals.restarts += restart
        left -= restart
        # The last save may be incomplete.
        cycles, rest = divmod(left, policy.interval + policy.save)
        unsaved = min(rest, policy.interval)
        totals.saves += cycles * policy.save + rest - unsaved
        kept = cycles * policy.interval
        if is_saved:
            kept += unsaved
        else:
            totals.repeated_steps += unsaved
        speed = len(self._used) / policy.nodes
        totals.useful += speed * kept
        totals.missing_nodes += (1 - speed) * kept


def find_best_interval(failures: Sequence[Failure], policy: Policy, seconds: float) -> float:
    """Return the interval of saves with the highest goodput under these failures, in seconds.

    It is one of 25 around that of the policy, each 1.41 times the one before.
    """
    intervals = [policy.interval * 2 ** (power / 2) for power in range(-12, 13)]
    return max(
        intervals,
        key=lambda interval: replay(failures, replace(policy, interval=interval), seconds).useful,
    )
