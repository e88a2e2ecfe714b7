"""The time that each --sharding-strategy needs for communication, and the one to use.

The formulas are those of `megatron/extras/planner/cost/communication.py`. docs/sharding.md explains
them. They are estimates: the padding of rows is left out. The step and its memory are those of
`megatron/extras/planner/cost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.extras.planner.cost.communication import CommunicationTime
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.memory import Verdict
from megatron.extras.planner.cost.step_prediction import (
    StepPrediction,
    estimate_data_parallel_time,
)
from megatron.extras.planner.prediction import predict_plan
from megatron.plan.run_plan import Plan


@dataclass(frozen=True)
class StrategyEstimate:
    """What one way to shard needs."""

    name: str
    flags: str
    """The flags that choose it."""
    communication: CommunicationTime
    memory: int
    """Bytes of the rank that needs most: parameters and activations."""
    verdict: Verdict
    """Whether the strategy fits in the memory of a device."""
    step_seconds: float
    """Predicted seconds of a step. Communication that does not overlap is included."""


def estimate_compute_seconds(plan: Plan, hardware: Hardware) -> float:
    """Estimate the seconds of computation in a step on the busiest rank.

    The idle time of the pipeline is left out. Tensor-parallel communication is included, because
    the computation waits for it.
    """
    return max(rank.total for rank in predict_plan(plan, hardware).rank_seconds)


def estimate_strategies(plan: Plan, hardware: Hardware) -> list[StrategyEstimate]:
    """Return an estimate for each strategy. The plan's own choice is added if it is another one.

    hsdp is left out if its groups do not divide the ranks, or if one group has all of them.
    """
    parallel = plan.config.parallel
    data = plan.weight_ranks
    tensor = max(1, parallel.tensor_model_parallel_size)
    node = max(1, hardware.ranks_per_node // tensor)
    if plan.copies > 1 and plan.shard_size > 1 and plan.zero_stage == 3:
        node = plan.shard_size
    ways = [("fsdp", "--sharding-strategy fsdp", 3, data)]
    if 1 < node < data and data % node == 0:
        flags = f"--sharding-strategy hsdp --hsdp-shard-size {node}"
        ways.append((f"hsdp {node}", flags, 3, node))
    ways.append(("ddp", "--sharding-strategy ddp", 0, 1))
    ways.append(("ZeRO 1", "--zero-stage 1", 1, data))
    if (plan.zero_stage, plan.shard_size) not in {(stage, size) for _, _, stage, size in ways}:
        name = f"ZeRO {plan.zero_stage}"
        flags = f"--zero-stage {plan.zero_stage}"
        if plan.copies > 1:
            name += f" on {plan.shard_size}"
            flags += f" --hsdp-shard-size {plan.shard_size}"
        ways.append((name, flags, plan.zero_stage, plan.shard_size))
    return [_estimate(plan, hardware, *way) for way in ways]


def choose_strategy(estimates: Sequence[StrategyEstimate]) -> StrategyEstimate | None:
    """Return the strategy that fits in memory and has the shortest step.

    If none fits, it is one that may fit. None if none of them may fit.
    """
    for verdict in (Verdict.FITS, Verdict.MAY_FIT):
        fitting = [each for each in estimates if each.verdict is verdict]
        if fitting:
            return min(fitting, key=lambda each: each.step_seconds)
    return None


def _estimate(
    plan: Plan, hardware: Hardware, name: str, flags: str, stage: int, size: int
) -> StrategyEstimate:
    prediction = predict_plan(plan, hardware)
    layout = replace(prediction.job.layout, zero_stage=stage, shard=size)
    job = replace(prediction.job, layout=layout)
    # The rank with most parameters sends most.
    fullest = plan.stage_parameters.index(max(plan.stage_parameters))
    time = estimate_data_parallel_time(job, plan.stages, fullest)
    changed = StepPrediction(job)
    memory = round(changed.peak_bytes)
    return StrategyEstimate(name, flags, time, memory, changed.verdict, changed.seconds)
