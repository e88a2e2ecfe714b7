"""Estimates of a plan beside its step: memory, FLOPs, communication and goodput.

The bytes of parameters are those of `cost.memory`. The activations are those of Korthikanti et al.
2022, https://arxiv.org/abs/2205.05198, which do not know how this trainer allocates. The plan
prints them beside the peak, because people compare them with other trainers. The notation is that
of `megatron.model.flops`.

The time of communication is estimated for each --sharding-strategy, to name the one to use. The
padding of rows is left out. docs/sharding.md explains the formulas.

The goodput follows from a formula, and from a replay of failures with other policies.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from megatron.base.errors import ConfigError
from megatron.extras.planner.cost.communication import CommunicationTime
from megatron.extras.planner.cost.goodput import (
    CostOptions,
    PlannedGoodput,
    Policy,
    Reliability,
    Replayed,
    count_daily_failures,
    draw_failures,
    estimate_goodput,
    estimate_mean_hours_to_failure,
    find_best_interval,
    load_failures,
    replay,
)
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.memory import (
    ParameterMemory,
    Verdict,
    estimate_parameter_memory,
    estimate_stage_memory,
)
from megatron.extras.planner.cost.parameters import get_widths
from megatron.extras.planner.cost.step_prediction import (
    StepPrediction,
    estimate_data_parallel_time,
)
from megatron.extras.planner.prediction import describe_layout, get_recomputed_share, predict_plan
from megatron.model import flops
from megatron.model.partition import select_stages_of_rank
from megatron.model.shape import ModelShape
from megatron.plan.run_plan import Plan
from megatron.run.start.launch import count_checkpoint_bytes
from megatron.schedule.clock import parse_duration
from megatron.schedule.pipeline_schedule import PipelineSchedule, choose_schedule


def estimate_memory(plan: Plan) -> dict[str, Any]:
    """Estimate memory in bytes for the model and for the pipeline rank that needs most.

    The memory of parameters is listed by part and follows a rule of bytes per parameter.
    "activations" is the estimate for the configuration. "activations_kept" assumes no recomputation
    of layers, and "activations_recomputed" assumes that of all layers. "activations_with_scores"
    adds the attention scores to "activations_kept", unless --recompute-attention-core is given. A
    model with experts has no estimate of activations.
    """
    share = get_recomputed_share(plan)
    config = plan.config
    ranks = range(plan.pipeline_size)
    parts = [_compute_parameter_memory(plan, rank) for rank in ranks]
    # The first pipeline ranks hold more microbatches in flight, and the last one holds the logits.
    # So any rank may need most.
    needed = [parts[rank].total + estimate_activations(plan, rank, share) for rank in ranks]
    fullest = needed.index(max(needed))
    matrices = flops.count_matrix_parameters(plan.shape)
    states = flops.count_state_bytes(config.optimizer, plan.parameters, matrices)
    model = estimate_parameter_memory(plan.parameters, half=_is_half(plan), state_bytes=states)
    memory = {
        "model": {**vars(model), "total": model.total},
        "pipeline_rank": fullest,
        "rank": {**vars(parts[fullest]), "total": parts[fullest].total},
    }
    if plan.shape.expert_layers:
        return memory
    return {
        **memory,
        "activations": estimate_activations(plan, fullest, share),
        "activations_kept": estimate_activations(plan, fullest, Fraction(0)),
        "activations_with_scores": estimate_activations(
            plan, fullest, Fraction(0), scores_kept=not config.recompute.recompute_attention_core
        ),
        "activations_recomputed": estimate_activations(plan, fullest, Fraction(1)),
    }


def _is_half(plan: Plan) -> bool:
    return plan.config.precision.bf16 or plan.config.precision.fp16


def _compute_parameter_memory(plan: Plan, pipeline_rank: int) -> ParameterMemory:
    return estimate_stage_memory(
        plan.shape,
        describe_layout(plan),
        plan.config.optimizer,
        select_stages_of_rank(plan.stages, pipeline_rank, plan.pipeline_size),
        plan.stage_parameters[pipeline_rank],
        half=_is_half(plan),
    )


def choose_final_schedule(plan: Plan) -> PipelineSchedule:
    """Return the schedule at the final batch size, rounded down to one that fits the grid."""
    # A plan with errors may have a size of 0. The errors are reported, and this estimate must not
    # fail.
    share = max(1, plan.config.batch.micro_batch_size * plan.data_parallel_size)
    return choose_schedule(
        max(1, plan.batch_size.final // share), plan.pipeline_size, plan.stages_per_rank
    )


@dataclass(frozen=True)
class PaperActivations:
    """What a rank keeps of a microbatch for the backward pass, in bytes, by 2205.05198."""

    shape: ModelShape
    micro_batch: int
    tensor: int = 1
    sequence_parallel: bool = False
    half: bool = True
    scores_kept: bool = False
    """Whether the attention scores are kept, as without a flash kernel."""

    @property
    def layer(self) -> int:
        """What one layer keeps without any recomputation.

        For GPT-2's shape in half precision it is s b h (10 + 24/t), or s b h 34/t with sequence
        parallelism. Scores are 5 a s^2 b / t. Source: equations 1, 2 and 4, and table 2.
        """
        config = self.shape.config
        w = get_widths(self.shape)
        value = 2 if self.half else 4
        # Inputs of norms and column-parallel linear layers, and the masks of dropout at one byte
        # each.
        replicated = value * 4 * w.h + (2 * w.h if config.hidden_dropout else 0)
        # Queries, keys, values, the attention's output and the MLP's inner activations.
        sharded = value * (w.q + w.k + w.v + w.context + w.mlp_in + w.f)
        if self.scores_kept:
            # Scores before and after the dropout, and its mask.
            of_score = 2 * value + 1 if config.attention_dropout else value
            sharded += config.num_attention_heads * config.seq_length * of_score
        # Sequence parallelism also shards what every tensor-parallel rank holds otherwise.
        ranks = self.tensor if self.sequence_parallel else 1
        per_token = replicated // ranks + sharded // self.tensor
        return config.seq_length * self.micro_batch * per_token

    @property
    def layer_input(self) -> int:
        """What full recomputation keeps of a layer: 2 s b h in half precision (section 5)."""
        config = self.shape.config
        values = config.seq_length * self.micro_batch * config.hidden_size
        ranks = self.tensor if self.sequence_parallel else 1
        return (2 if self.half else 4) * values // ranks

    @property
    def logits(self) -> int:
        """The last stage's fp32 logits, 4 s b V / t (section 4.3)."""
        values = self.shape.config.seq_length * self.micro_batch * self.shape.padded_vocab_size
        return 4 * values // self.tensor

    def sum_layers(self, layers: int, recomputed: int = 0) -> int:
        """Return what some layers keep. A recomputed one starts again from its input."""
        return (layers - recomputed) * self.layer + recomputed * self.layer_input


def estimate_activations(
    plan: Plan, pipeline_rank: int, recomputed: Fraction, *, scores_kept: bool = False
) -> int:
    """Estimate the activation memory of one rank in bytes.

    It counts all microbatches in flight, one layer being recomputed, and the logits. Layers that
    are recomputed keep only their input.
    """
    parallel = plan.config.parallel
    paper = PaperActivations(
        plan.shape,
        plan.config.batch.micro_batch_size,
        # A plan with errors may have a size of 0 here as well.
        max(1, parallel.tensor_model_parallel_size),
        parallel.sequence_parallel,
        _is_half(plan),
        scores_kept,
    )
    stages = select_stages_of_rank(plan.stages, pipeline_rank, plan.pipeline_size)
    counts = [
        (len(stage.layers), flops.count_recomputed_layers(stage.layers, recomputed))
        for stage in stages
    ]
    # With virtual stages a rank has several stages, and a microbatch visits each of them. They may
    # differ, so the mean of the visits is multiplied by the number in flight.
    visits = sum(paper.sum_layers(*each) for each in counts)
    in_flight = choose_final_schedule(plan).count_in_flight(pipeline_rank)
    kept = in_flight * visits // max(1, len(counts))
    # While one layer is recomputed, its full activations exist next to the stored inputs.
    if any(again for _, again in counts):
        kept += paper.layer
    # Only the last stage has the output projection, whose logits are [b, s, v/t].
    if any(stage.last for stage in stages):
        kept += paper.logits
    # Everything here grows with the tokens of a rank.
    return kept // max(1, parallel.context_parallel_size)


def compute_flops(plan: Plan) -> dict[str, int | None]:
    """Return FLOPs at the full sequence length and the final batch size.

    megatron/model/flops.py describes the two conventions.
    """
    shape = plan.shape
    recompute = get_recomputed_share(plan)
    per_token = flops.count_model_flops_per_token(shape)
    # A run that ends by --train-tokens may train fewer tokens than samples x sequence length.
    tokens = plan.config.batch.train_tokens or plan.train_samples * shape.config.seq_length
    # The speed decides how many tokens a run by time trains.
    whole_run = None
    if plan.train_seconds is None:
        whole_run = per_token * tokens
    return {
        "model_per_token": per_token,
        "hardware_per_token": flops.count_hardware_flops_per_token(shape, recompute=recompute),
        "hardware_per_iteration": flops.count_iteration_flops(
            shape, plan.batch_size.final, recompute=recompute
        ),
        "model_whole_run": whole_run,
    }


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
    prediction = predict_plan(plan, hardware)
    # The rank with most parameters sends most.
    fullest = plan.stage_parameters.index(max(plan.stage_parameters))
    estimates = []
    for name, flags, stage, size in ways:
        layout = replace(prediction.job.layout, zero_stage=stage, shard=size)
        job = replace(prediction.job, layout=layout)
        time = estimate_data_parallel_time(job, plan.stages, fullest)
        changed = StepPrediction(job)
        needs = round(changed.peak_bytes), changed.verdict, changed.seconds
        estimates.append(StrategyEstimate(name, flags, time, *needs))
    return estimates


def choose_strategy(estimates: Sequence[StrategyEstimate]) -> StrategyEstimate | None:
    """Return the strategy that fits in memory and has the shortest step.

    If none fits, it is one that may fit. None if none of them may fit.
    """
    for verdict in (Verdict.FITS, Verdict.MAY_FIT):
        fitting = [each for each in estimates if each.verdict is verdict]
        if fitting:
            return min(fitting, key=lambda each: each.step_seconds)
    return None


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
    own: PlannedGoodput | None = best
    if interval is not None:
        try:
            own = estimate_goodput(reliability, interval)
        except ConfigError:
            own = None
    # An interval that is nearly the best one is not what keeps the run from its end.
    if own is not None and own.useful < _LEAST_USEFUL * best.useful:
        own = None
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
