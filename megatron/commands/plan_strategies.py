"""The time that each --sharding-strategy needs for communication, and the one to use.

The formulas are those of `megatron/schedule/communication.py`. docs/sharding.md explains them. They
are estimates: the bandwidths are 80 % of the nominal ones, and the padding of rows is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.commands.plan_estimates import (
    choose_final_schedule,
    compute_flops,
    estimate_activations,
    get_recomputed_share,
)
from megatron.model import flops
from megatron.model.partition import count_layers_per_rank
from megatron.plan import Plan
from megatron.schedule.communication import (
    CommunicationTime,
    Network,
    count_traffic,
    estimate_time,
)

_REACHED = 0.8
"""Part of a nominal bandwidth that collectives reach."""
_HOP = 5e-6
USABLE = 0.9
"""Part of a device's memory that parameters and activations may take."""
_NEAR = 1.05
"""Steps whose times differ by less than this factor count as equally fast."""


@dataclass(frozen=True)
class Hardware:
    """A kind of device in its usual cluster."""

    flops: float
    """FLOPs per second in bf16 that training reaches."""
    memory: float
    """Bytes of memory of a device."""
    network: Network


HARDWARE = {
    # NVLink 3, and a network card of 200 Gb/s for each device.
    "a100": Hardware(0.5 * 312e12, 80e9, Network(8, _REACHED * 300e9, _REACHED * 25e9, _HOP)),
    # NVLink 4, and 400 Gb/s.
    "h100": Hardware(0.4 * 989e12, 80e9, Network(8, _REACHED * 450e9, _REACHED * 50e9, _HOP)),
    # Four devices on a node, and 200 Gb/s (Slingshot 11).
    "gh200": Hardware(0.4 * 989e12, 96e9, Network(4, _REACHED * 450e9, _REACHED * 25e9, _HOP)),
}


def choose_hardware(name: str, memory_gib: float | None) -> Hardware:
    """Return a kind of device of `HARDWARE`, with another memory if one is given."""
    if memory_gib is None:
        return HARDWARE[name]
    return replace(HARDWARE[name], memory=memory_gib * (1 << 30))


@dataclass(frozen=True)
class StrategyEstimate:
    """What one way to shard needs."""

    name: str
    flags: str
    """The flags that choose it."""
    communication: CommunicationTime
    memory: int
    """Bytes of the rank that needs most: parameters and activations."""
    fits: bool
    """Whether the strategy fits in the memory of a device."""

    def compute_step_seconds(self, compute: float) -> float:
        """Return the time of a step whose communication overlaps with its computation."""
        return max(self.communication.total, compute)


def estimate_compute_seconds(plan: Plan, hardware: Hardware) -> float:
    """Estimate the seconds of computation in a step, without the pipeline's idle time."""
    iteration = compute_flops(plan)["hardware_per_iteration"]
    assert iteration is not None, "an iteration has a known number of FLOPs"
    return iteration / (plan.world_size * hardware.flops)


def estimate_strategies(plan: Plan, hardware: Hardware) -> list[StrategyEstimate]:
    """Return an estimate for each strategy. The plan's own choice is added if it is another one.

    hsdp is left out if its groups do not divide the ranks, or if one group has all of them.
    """
    parallel = plan.config.parallel
    data = plan.data_parallel_size
    tensor = max(1, parallel.tensor_model_parallel_size)
    node = max(1, hardware.network.ranks_per_node // tensor)
    if plan.copies > 1 and plan.shard_size > 1 and parallel.zero_stage == 3:
        node = plan.shard_size
    ways = [("fsdp", "--sharding-strategy fsdp", 3, data)]
    if 1 < node < data and data % node == 0:
        flags = f"--sharding-strategy hsdp --hsdp-shard-size {node}"
        ways.append((f"hsdp {node}", flags, 3, node))
    ways.append(("ddp", "--sharding-strategy ddp", 0, 1))
    if (parallel.zero_stage, plan.shard_size) not in {(stage, size) for _, _, stage, size in ways}:
        name = f"ZeRO {parallel.zero_stage}"
        flags = f"--zero-stage {parallel.zero_stage}"
        if plan.copies > 1:
            name += f" on {plan.shard_size}"
            flags += f" --hsdp-shard-size {plan.shard_size}"
        ways.append((name, flags, parallel.zero_stage, plan.shard_size))
    return [_estimate(plan, hardware, *way) for way in ways]


def choose_strategy(
    estimates: Sequence[StrategyEstimate], compute: float
) -> StrategyEstimate | None:
    """Return the fastest strategy that fits in memory. None if none fits.

    Among those that are about equally fast, it is the one that needs least memory.

    Args:
        estimates: The strategies.
        compute: Seconds of computation in a step.
    """
    fitting = [each for each in estimates if each.fits]
    if not fitting:
        return None
    best = min(each.compute_step_seconds(compute) for each in fitting)
    near = [each for each in fitting if each.compute_step_seconds(compute) <= _NEAR * best]
    return min(near, key=lambda each: each.memory)


def _estimate(
    plan: Plan, hardware: Hardware, name: str, flags: str, stage: int, size: int
) -> StrategyEstimate:
    config = plan.config
    tensor = max(1, config.parallel.tensor_model_parallel_size)
    half = config.precision.bf16 or config.precision.fp16
    copies = plan.data_parallel_size // size
    layers = count_layers_per_rank(plan.stages, plan.pipeline_size)
    of_layer = flops.count_layer_parameters(plan.shape, tensor)
    # The rank with most parameters sends most.
    fullest = plan.stage_parameters.index(max(plan.stage_parameters))
    traffic = count_traffic(
        [of_layer] * layers[fullest],
        plan.stage_parameters[fullest] - layers[fullest] * of_layer,
        shard_size=size,
        copies=copies,
        zero_stage=stage,
        microbatches=choose_final_schedule(plan).microbatches,
        weight_bytes=2 if half else 4,
        gradient_bytes=2 if config.parallel.grad_reduce_in_bf16 else 4,
    )
    matrices = flops.count_layer_matrix_parameters(plan.shape, tensor)
    share = get_recomputed_share(plan)
    memory = max(
        flops.estimate_parameter_memory_per_rank(
            parameters,
            half=half,
            data_parallel_size=plan.data_parallel_size,
            shard_size=size,
            zero_stage=stage,
            state_bytes=flops.count_state_bytes(
                config.optimizer.optimizer, parameters, layers[rank] * matrices
            ),
        ).total
        + estimate_activations(plan, rank, share)
        for rank, parameters in enumerate(plan.stage_parameters)
    )
    time = estimate_time(
        traffic, hardware.network, shard_size=size, copies=copies, inner_ranks=tensor
    )
    return StrategyEstimate(name, flags, time, memory, memory <= USABLE * hardware.memory)
