"""What failures, saves, energy and carbon cost a run.

The interval of saves is that of Young (https://doi.org/10.1145/361147.361115) and Daly
(https://doi.org/10.1016/j.future.2004.11.016). The rate of failures is that of a large research
cluster (https://arxiv.org/abs/2410.21680).
"""

import math
from dataclasses import dataclass

from megatron.base.errors import ConfigError
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


def estimate_footprint(
    hardware: Hardware,
    devices: int,
    hours: float,
    *,
    utilisation: float,
    pue: float,
    grams_per_kilowatt_hour: float,
) -> Footprint:
    """Estimate energy and carbon of a run.

    Args:
        hardware: The devices.
        devices: Number of devices.
        hours: Wall hours.
        utilisation: Power of a device relative to its limit while it trains.
        pue: Energy of the data centre relative to that of the nodes.
        grams_per_kilowatt_hour: Carbon intensity of the electricity.
    """
    # The host draws its power whether or not the device is busy.
    watts = utilisation * hardware.watts + hardware.host_watts
    kilowatt_hours = devices * hours * watts * pue / 1000
    return Footprint(
        devices * hours,
        kilowatt_hours / 1000,
        kilowatt_hours * grams_per_kilowatt_hour / 1e6,
    )
