"""The goodput of a planned run: a formula, and a replay of failures with other policies."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron.base.errors import ConfigError
from megatron.extras.planner.cost.failures import (
    Policy,
    Replayed,
    count_daily_failures,
    draw_failures,
    find_best_interval,
    load_failures,
    replay,
)
from megatron.extras.planner.cost.goodput import (
    CostOptions,
    PlannedGoodput,
    Reliability,
    estimate_goodput,
    estimate_mean_hours_to_failure,
)
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.plan.run_plan import Plan
from megatron.run.start.launch import count_checkpoint_bytes
from megatron.schedule.clock import parse_duration

_MOST_MORE_TIME = 0.02
"""How much longer than with the best interval of saves a run may take without a warning."""
_LEAST_USEFUL = 1e-3
"""Smallest goodput of a run that ends. With less, hardly a save comes before the next failure."""
_REPLAYED = 1000
"""Failures of a replay. Fewer would give other numbers with other draws."""
_MOST_NODES = 1_000_000
_SHOWN_CAUSES = 5


@dataclass(frozen=True)
class GoodputForecast:
    """The goodput with the run's own interval of saves, and with the best one."""

    own: PlannedGoodput | None
    """The best one, if the run has no interval. None: with its interval, the run does not end."""
    best: PlannedGoodput
    interval: float | None
    """Seconds of steps between two saves of the run. None: it has no interval."""
    reliability: Reliability

    @property
    def more_time(self) -> float:
        """How much longer than with the best interval the run takes. 0.02 is 2 %."""
        if self.own is None:
            return math.inf
        return self.best.useful / self.own.useful - 1


def predict_goodput(
    plan: Plan, hardware: Hardware, options: CostOptions, step_seconds: float
) -> GoodputForecast:
    """Predict the goodput of the plan's number of devices.

    Args:
        plan: The plan.
        hardware: The devices.
        options: What is assumed about the cluster.
        step_seconds: Seconds of an iteration, from which the time between two saves follows.

    Raises:
        ConfigError: The run fails so often that it makes no progress with any interval.
    """
    nodes = _count_nodes(plan, hardware)
    hours = estimate_mean_hours_to_failure(
        plan.world_size, hardware.ranks_per_node, options.failures_per_1000_node_days
    )
    if options.failures is not None:
        # The formula and the replay have the same rate.
        source = load_failures(options.failures)
        hours = 24 / count_daily_failures(source, nodes, hardware.ranks_per_node)
    # All nodes write their shards at the same time.
    save = count_checkpoint_bytes(plan) / (nodes * options.save_gb_per_second * 1e9)
    restart = 60 * (options.detection_minutes + options.restart_minutes)
    reliability = Reliability(hours, restart, save)
    best = estimate_goodput(reliability)
    interval = _find_save_seconds(plan, step_seconds)
    own = best
    if interval is not None:
        try:
            own = estimate_goodput(reliability, interval)
        except ConfigError:
            return GoodputForecast(None, best, interval, reliability)
    # An interval that is nearly the best one is not what keeps the run from its end.
    if own.useful < _LEAST_USEFUL * best.useful:
        return GoodputForecast(None, best, interval, reliability)
    return GoodputForecast(own, best, interval, reliability)


def _count_nodes(plan: Plan, hardware: Hardware) -> int:
    return -(-plan.world_size // hardware.ranks_per_node)


def _find_save_seconds(plan: Plan, step_seconds: float) -> float | None:
    """Return the seconds of steps between two saves. None: the run has no interval of saves."""
    checkpoint = plan.config.checkpoint
    found = []
    if checkpoint.save_interval:
        # A run that is shorter than its interval saves at its end.
        steps = min(checkpoint.save_interval, max(1, plan.train_iters))
        found.append(steps * step_seconds)
    if checkpoint.save_interval_time is not None:
        found.append(parse_duration(checkpoint.save_interval_time))
    return min(found, default=None)


@dataclass(frozen=True)
class GoodputReplay:
    """Failures that were replayed, and what another policy would have changed."""

    days: float
    replayed: Replayed
    best_interval: float
    """Seconds of steps between two saves that give the highest goodput."""
    policies: dict[str, float]
    """Another policy in words -> its goodput, 0 to 1."""


def replay_failures(
    plan: Plan, hardware: Hardware, options: CostOptions, forecast: GoodputForecast
) -> GoodputReplay | None:
    """Replay the failures of --failures on the nodes of a plan. None without the option.

    Args:
        plan: The plan.
        hardware: The devices.
        options: The failures, and what follows from them.
        forecast: The interval of saves, the time of a save, and the rate of failures.

    Raises:
        ConfigError: The file is wrong, or the nodes are.
    """
    nodes = _count_nodes(plan, hardware)
    spares, fewer = options.spare_nodes, options.fewer_nodes
    if options.failures is None:
        if spares is not None or fewer is not None:
            raise ConfigError("--spare-nodes and --fewer-nodes need --failures, as in llama3.")
        return None
    if fewer is not None and (fewer > nodes or spares is None):
        raise ConfigError(
            f"--fewer-nodes {fewer} must be at most the {nodes} nodes of the run, and needs "
            "--spare-nodes: without it, a lost node is replaced at once."
        )
    # Some policies have one more spare node.
    pool = nodes + (spares or 0) + 1
    if pool > _MOST_NODES:
        raise ConfigError(f"--spare-nodes {spares}: at most {_MOST_NODES:,} nodes are replayed.")
    source = load_failures(options.failures)
    # A fixed time would have too few failures on a small cluster.
    seconds = 86400 * _REPLAYED / count_daily_failures(source, pool, hardware.ranks_per_node)
    failures = draw_failures(source, pool, hardware.ranks_per_node, seconds, seed=0)
    best = forecast.best.save_interval_seconds
    policy = Policy(
        nodes=nodes,
        interval=forecast.interval or best,
        save=forecast.reliability.save_seconds,
        detection=60 * options.detection_minutes,
        restart=60 * options.restart_minutes,
        spares=spares,
        fewer=fewer,
    )
    # The run's own interval may be far from the best one, around which it is searched.
    best = find_best_interval(failures, replace(policy, interval=best), seconds)
    others = {
        text: replay(failures, other, seconds).list_shares()["useful"]
        for text, other in _list_policies(policy, best)
    }
    return GoodputReplay(seconds / 86400, replay(failures, policy, seconds), best, others)


def _list_policies(policy: Policy, best_interval: float) -> Iterator[tuple[str, Policy]]:
    """Yield what could be changed, one at a time."""
    yield "best interval", replace(policy, interval=best_interval)
    yield "restart in half", replace(policy, restart=policy.restart / 2)
    if policy.detection:
        yield "detection in half", replace(policy, detection=policy.detection / 2)
    # A cluster that replaces each lost node at once has no number of spares.
    if policy.spares is None:
        yield "no spare node", replace(policy, spares=0)
        return
    yield "one more spare", replace(policy, spares=policy.spares + 1)
    if policy.fewer is None and policy.nodes > 1:
        yield "fewer nodes", replace(policy, fewer=max(1, policy.nodes // 2))


def build_replay_json(found: GoodputReplay | None) -> dict[str, Any] | None:
    """Return a replay as plain data."""
    if found is None:
        return None
    return {
        "days": found.days,
        "shares": found.replayed.list_shares(),
        "interruptions": dict(found.replayed.interruptions.most_common()),
        "best_interval_seconds": found.best_interval,
        "other_policies": found.policies,
    }


def list_goodput_rows(
    prediction: StepPrediction, forecast: GoodputForecast, found: GoodputReplay | None
) -> list[tuple[str, str]]:
    """Return the name and the text of the rows about goodput."""
    best = _describe_interval(forecast.best.save_interval_seconds, prediction)
    own = best
    if forecast.interval is not None:
        own = _describe_interval(forecast.interval, prediction)
    useful = 0.0
    if forecast.own is not None:
        useful = forecast.own.useful
    hours = format_number(forecast.reliability.mean_hours_to_failure)
    text = f"{100 * useful:.1f} % with a failure every {hours} hours; save every {own}"
    if best != own:
        text += f"; at best {100 * forecast.best.useful:.1f} %, with a save every {best}"
    rows = [("goodput", text)]
    if forecast.more_time > _MOST_MORE_TIME:
        steps = _count_steps(forecast.best.save_interval_seconds, prediction)
        takes = f"takes {100 * forecast.more_time:.1f} % more time than the best one"
        if forecast.own is None:
            takes = "is so long that hardly a save comes before a failure, and the run does not end"
        text = f"this interval of saves {takes}. Give --save-interval {steps:,}"
        rows.append(("  warning", text))
    if found is not None:
        rows += _list_replay_rows(prediction, found)
    return rows


def _list_replay_rows(
    prediction: StepPrediction, found: GoodputReplay
) -> Iterator[tuple[str, str]]:
    shares = found.replayed.list_shares()
    useful = shares.pop("useful")
    lost = ", ".join(
        f"{name.replace('_', ' ')} {100 * share:.1f}" for name, share in shares.items() if share
    )
    total = found.replayed.interruptions.total()
    text = f"{total:,} interruptions in {found.days:,.0f} days"
    yield "  replayed", f"{100 * useful:.1f} % with {text}; lost: {lost} %"
    causes = found.replayed.interruptions.most_common(_SHOWN_CAUSES)
    yield "  causes", ", ".join(f"{cause} {100 * each / total:.0f} %" for cause, each in causes)
    for name, share in found.policies.items():
        text = f"{100 * share:.1f} %"
        if name == "best interval":
            text += f", with a save every {_describe_interval(found.best_interval, prediction)}"
        yield f"  {name}", text


def _count_steps(interval: float, prediction: StepPrediction) -> int:
    """Return the iterations between two saves. People set --save-interval in iterations."""
    return max(1, round(interval / prediction.seconds))


def _describe_interval(interval: float, prediction: StepPrediction) -> str:
    return f"{_count_steps(interval, prediction):,} iterations ({interval / 60:,.0f} minutes)"


def format_number(value: float) -> str:
    """Return a number with three digits, or a whole number from 1,000 on."""
    if value < 999.5:
        return f"{value:.3g}"
    return f"{value:,.0f}"
