"""The time of a training step: layers, pipeline, data-parallel communication, optimizer."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from megatron.config.model import AttentionKind, MLPKind
from megatron.config.table import Absent, Table
from megatron.extras.planner.cost.communication import (
    Collectives,
    CommunicationTime,
    StepTraffic,
    count_traffic,
    estimate_added_seconds,
    estimate_collective_seconds,
    estimate_message_seconds,
    estimate_small_all_reduce_seconds,
    estimate_time,
)
from megatron.extras.planner.cost.delta_net import LAYERS_BY_ATTENTION
from megatron.extras.planner.cost.experts import LAYERS
from megatron.extras.planner.cost.float8 import (
    count_step_rounding,
    count_weight_scales,
    list_float8_linears,
)
from megatron.extras.planner.cost.kernels import estimate_memory_seconds
from megatron.extras.planner.cost.layers import Passes, Seconds, estimate_rounding_seconds
from megatron.extras.planner.cost.layout import Float8, Software, StepJob
from megatron.extras.planner.cost.memory import (
    RankMemory,
    Verdict,
    build_stages,
    count_own_parameters,
    count_rank_parameters,
    estimate_memory,
    judge_peak,
)
from megatron.extras.planner.cost.parameters import (
    count_gather_bytes,
    count_head_parameters,
    count_layer,
    count_product_bytes,
    count_root_parameters,
    count_sum_bytes,
    describe_layers,
)
from megatron.extras.planner.cost.pipeline_simulation import (
    StageTimes,
    build_trace,
    estimate_pipeline_seconds,
    simulate_pipeline,
)
from megatron.model import flops
from megatron.model.partition import Stage, count_layers_per_rank, select_stages_of_rank
from megatron.model.shape import ModelShape
from megatron.schedule.pipeline_schedule import PipelineSchedule

UPDATE_BYTES = Table(
    "--optimizer",
    {"adam": 32},
    Absent("has no formula for the time of its update, so it is that of AdamW"),
)
"""Memory traffic of an update for each parameter: the gradient twice (norm and update), the master
weight and two moments read and written. The half-precision weight is written as well."""
_ROUNDED_BYTES = 12
"""Further traffic for each moment in bf16, whose fp32 copy is written before the update and read
after it. One kernel for the update reads and writes the moment itself, which saves 4 bytes."""


@dataclass(frozen=True)
class DataParallelSeconds:
    """Seconds of a step's data-parallel communication."""

    total: float
    waited: float
    """The part that computation does not hide."""


class StepPrediction:
    """What a step is predicted to need."""

    def __init__(self, job: StepJob) -> None:
        """Predict the step of `job`.

        Raises:
            ConfigError: The layers cannot be divided into the stages.
        """
        self.job = job
        self.stages: tuple[Stage, ...] = build_stages(job.shape, job.layout)
        self.schedule: PipelineSchedule = job.schedule
        self.passes: tuple[Passes, ...] = _estimate_stages(job, self.stages)

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of each pipeline rank."""
        return estimate_memory(self.job, self.stages)

    @cached_property
    def peak_bytes(self) -> float:
        """Memory of the rank that needs most.

        Earlier ranks have at least as many microbatches in flight. So of ranks with the same
        stages, the first one needs most.
        """
        first: dict[tuple[tuple[int, ...], ...], int] = {}
        for rank in range(self.job.layout.pipeline):
            first.setdefault(self._describe_stages(rank), rank)
        ranks = estimate_memory(self.job, self.stages, list(first.values()))
        return max(rank.total for rank in ranks)

    def _describe_stages(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return what determines the memory of a pipeline rank, apart from its position."""
        share = self.job.layout.layers_recomputed
        return tuple(
            (
                *describe_layers(self.job.shape, stage.layers),
                # Shares of the layers are not the same in all stages.
                flops.count_recomputed_layers(stage.layers, share),
                stage.first,
                stage.last,
            )
            for stage in self.stages[rank :: self.job.layout.pipeline]
        )

    def count_recomputed_layers(self) -> tuple[int, ...]:
        """Return the number of layers of each stage that are recomputed completely."""
        share = self.job.layout.layers_recomputed
        return tuple(flops.count_recomputed_layers(stage.layers, share) for stage in self.stages)

    @property
    def verdict(self) -> Verdict:
        """Whether each rank fits in its device."""
        return judge_peak(self.peak_bytes, self.job.hardware)

    @property
    def stage_times(self) -> StageTimes:
        """The times for the simulation of the pipeline."""
        job = self.job
        return StageTimes(
            [each.forward.total for each in self.passes],
            [each.backward.total for each in self.passes],
            self._estimate_message(),
            blocking=not job.software.hidden_pipeline,
        )

    def _estimate_message(self) -> float:
        job = self.job
        layout = job.layout
        length = job.seq_length or job.shape.config.seq_length
        # The hidden states, [s, b, h].
        value = 2 if job.software.half else 4
        size = value * length * layout.micro_batch // layout.context * job.shape.config.hidden_size
        stride = layout.tensor * layout.context * layout.data
        message = size / layout.tensor
        seconds = estimate_message_seconds(message, stride, job.hardware)
        # The receivers gather the parts of the others, unless they need only their own.
        if layout.tensor > 1 and not layout.sequence_parallel:
            seconds += estimate_collective_seconds(size, layout.tensor, job.hardware)
        return seconds

    @cached_property
    def rank_seconds(self) -> tuple[Seconds, ...]:
        """Computation of each pipeline rank in a step, by what it does."""
        p = self.job.layout.pipeline
        m = self.schedule.microbatches
        sums = []
        for rank in range(p):
            total = Seconds()
            for each in self.passes[rank::p]:
                total += (each.forward + each.backward).scale(m)
            sums.append(total)
        return tuple(sums)

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that the step takes at least. It needs no simulation.

        The busiest rank computes all its microbatches, and waits for the first one to reach it and
        for the last one to come back.
        """
        # The bound is what the search sorts by, so it must be cheap.
        p = self.job.layout.pipeline
        busiest = max(range(p), key=lambda rank: self.rank_seconds[rank].total)
        forward = sum(each.forward.total for each in self.passes[:busiest])
        backward = sum(each.backward.total for each in self.passes[:busiest])
        sent = 0.0
        if p > 1 and not self.job.software.hidden_pipeline:
            # Each visit sends its result, apart from those of the two ends.
            visits = self.schedule.microbatches * (2 * self.job.layout.virtual - 1)
            sent = visits * self._estimate_message()
        return self.rank_seconds[busiest].total + sent + forward + backward + self._fixed_seconds

    @cached_property
    def pipeline_seconds(self) -> float:
        """Seconds of all microbatches."""
        return estimate_pipeline_seconds(self.schedule, self.stage_times)

    @cached_property
    def data_parallel(self) -> DataParallelSeconds:
        """Data-parallel communication of the rank that waits longest."""
        p = self.job.layout.pipeline
        layers = count_layers_per_rank(self.stages, p)
        # Other ranks send at most as much as one of these.
        ranks = {0, p - 1, layers.index(max(layers))}
        each = [
            _estimate_data_parallel(self.job, self.stages, rank, self.passes[rank::p])
            for rank in ranks
        ]
        return max(each, key=lambda seconds: seconds.waited)

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds of the update of the rank with most parameters."""
        layout = self.job.layout
        # Ranks update at the same time, so the one with most parameters decides.
        parameters = max(
            count_own_parameters(
                self.job.shape, layout, every, self.stages[rank :: layout.pipeline]
            )
            for rank, every in enumerate(count_rank_parameters(self.job.shape, layout, self.stages))
        )
        optimizer = self.job.software.optimizer
        traffic: float = UPDATE_BYTES.get(optimizer.optimizer) or UPDATE_BYTES.require("adam")
        traffic += 2 if self.job.software.half else 0
        dtypes = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
        fused = self.job.software.fused_update
        traffic += (-4 if fused else _ROUNDED_BYTES) * dtypes.count("bf16")
        if self.job.software.counts_tensors and not fused:
            # A kernel of its own reads the masters again to write the weights in half precision.
            traffic = self.job.software.pointwise * (traffic + 4 * self.job.software.half)
        return estimate_memory_seconds(traffic * parameters, self.job.hardware, 20)

    @cached_property
    def weight_scale_seconds(self) -> Seconds:
        """Time at the start of a step for the largest values of the weights in float8.

        Ranks with a copy of the weights read their shards, and exchange the values in one message.
        """
        job = self.job
        float8 = job.software.float8
        if float8 is None:
            return Seconds()
        layout = job.layout
        layers = max(
            sum(
                float8.covers(layer)
                for stage in select_stages_of_rank(self.stages, rank, layout.pipeline)
                for layer in stage.layers
            )
            for rank in range(layout.pipeline)
        )
        linears = list_float8_linears(job.shape, layout.tensor)
        read = count_step_rounding(linears, layers, layout.shard_size)
        numbers = count_weight_scales(linears, layers, float8)
        message = estimate_small_all_reduce_seconds(
            4 * numbers, layout.shard_size * layout.tensor, job.hardware
        )
        return Seconds(rounding=estimate_rounding_seconds(read, job.hardware), scales=message)

    @property
    def _fixed_seconds(self) -> float:
        fixed = self.data_parallel.waited + self.optimizer_seconds
        return fixed + self.weight_scale_seconds.total + self.job.software.step_gap

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.pipeline_seconds + self._fixed_seconds

    def estimate_replay_seconds(self) -> float:
        """Seconds of a replay (--replay-interval): two passes of one microbatch.

        Each also reduces its gradients. A replay needs about the memory of a step.
        """
        layout = self.job.layout
        one = StepPrediction(replace(self.job, batch_size=layout.micro_batch * layout.data))
        return 2 * (one.pipeline_seconds + one.data_parallel.waited)

    def build_trace(self) -> dict[str, Any]:
        """Return the trace of the step. See `pipeline_simulation.build_trace`."""
        ends = (
            ("data-parallel communication", self.data_parallel.waited),
            ("optimizer", self.optimizer_seconds),
            ("between steps", self.job.software.step_gap),
        )
        return build_trace(simulate_pipeline(self.schedule, self.stage_times), ends)

    def compute_mfu(self, *, causal: bool) -> float:
        """Return the model FLOPs relative to the peak of the precision, from 0 to 1."""
        peak = self.job.hardware.get_peak(half=self.job.software.half)
        return self.compute_tflops(hardware=False, causal=causal) * 1e12 / peak

    def compute_tflops(self, *, hardware: bool, causal: bool = False) -> float:
        """Return the TFLOPs of a device.

        Args:
            hardware: Count recomputed layers as well.
            causal: Count only the half of attention that the mask leaves.
        """
        recompute = self.job.layout.layers_recomputed if hardware else 0
        # The same function counts the FLOPs of the training log.
        work = flops.count_iteration_flops(
            self.job.shape,
            self.job.batch_size,
            self.job.seq_length,
            recompute=recompute,
            causal=causal,
        )
        return work / self.seconds / self.job.layout.ranks / 1e12

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one device."""
        return self.job.tokens / self.seconds / self.job.layout.ranks


_Kind = tuple[int | None, MLPKind, AttentionKind]
"""Attention window of a layer, and the kinds of its parts."""


def _find_kind(shape: ModelShape, layer: int) -> _Kind:
    described = shape.describe_layer(layer)
    return described.window, described.mlp, described.attention


@dataclass(frozen=True)
class _Parts:
    """The times of the parts that stages are made of."""

    plain: Mapping[_Kind, Passes]
    """Kind -> a layer without recomputation."""
    again: Mapping[_Kind, Passes]
    """Kind -> a layer with the recomputation of the layout."""
    embedding: Passes
    output: Passes


@lru_cache(maxsize=4096)
def _estimate_parts(job: StepJob, gradient_bytes: float | None, microbatches: int) -> _Parts:
    """Return the times of the parts of a model. Many layouts of a search have the same parts."""
    arguments = (job.shape, job.layout, job.software, job.hardware, job.seq_length)
    further = (gradient_bytes, microbatches)
    classes = {name: row.times for name, row in LAYERS.list_rows()} | dict(job.software.times)
    times = classes["dense"](*arguments, *further)
    kinds = {_find_kind(job.shape, index) for index in range(job.shape.config.num_layers)}
    plain, again = {}, {}
    for kind in kinds:
        window, mlp, attention = kind
        # Other trainers have times of their own for layers with attention only.
        own = LAYERS_BY_ATTENTION.require(attention)
        of_layer = classes[mlp] if own is LAYERS else own.require(mlp).times
        of_kind = of_layer(*arguments, *further)
        plain[kind] = of_kind.estimate_layer(window)
        again[kind] = of_kind.estimate_recomputed_layer(window)
    return _Parts(plain, again, times.estimate_embedding(), times.estimate_output())


def _estimate_stages(job: StepJob, stages: Sequence[Stage]) -> tuple[Passes, ...]:
    """Return the times of each stage for one microbatch."""
    layout = job.layout
    microbatches = job.schedule.microbatches
    # Only these fields matter for the parts.
    key = layout.keep(
        *("tensor", "context", "exchange_heads", "micro_batch", "sequence_parallel"),
        *("recompute", "expert", "imbalance"),
    )
    gradient_bytes = None
    if job.software.counts_tensors:
        gradient_bytes = count_product_bytes(layout, job.software, microbatches)
    float8 = job.software.float8
    # Otherwise the number of microbatches does not matter.
    rounds = 1
    if float8 is not None:
        rounds = microbatches
        key = replace(key, data=min(layout.data, 2), zero_stage=layout.zero_stage)
    of_parts = replace(job, layout=key, batch_size=0)
    parts = _estimate_parts(of_parts, gradient_bytes, rounds)
    if float8 is None or float8.layers is None:
        passes = _sum_stages(job, stages, parts)
    else:
        plain = replace(of_parts, software=replace(job.software, float8=None))
        others = _estimate_parts(plain, gradient_bytes, rounds)
        passes = tuple(_sum_mixed_stage(job, stage, parts, others, float8) for stage in stages)
    if not job.software.counts_tensors:
        return passes

    # A search has many stages of few kinds.
    kinds = [
        (*describe_layers(job.shape, stage.layers), stage.first, stage.last) for stage in stages
    ]
    traffic = {
        kind: _estimate_parameter_traffic(job, stage)
        for kind, stage in dict(zip(kinds, stages, strict=True)).items()
    }
    return tuple(each + traffic[kind] for each, kind in zip(passes, kinds, strict=True))


def _estimate_parameter_traffic(job: StepJob, stage: Stage) -> Passes:
    """Return the mean time of one microbatch for gathered weights and sums of gradients."""
    forward, backward = (
        Seconds(
            pointwise=job.software.pointwise
            * (count(job, stage) / job.schedule.microbatches)
            / job.hardware.memory_rate
        )
        for count in (count_gather_bytes, count_sum_bytes)
    )
    return Passes(forward, backward)


def _sum_stages(job: StepJob, stages: Sequence[Stage], parts: _Parts) -> tuple[Passes, ...]:
    """Return the time of each stage for one microbatch."""
    found: dict[tuple[int | range, int, bool, bool], Passes] = {}
    sums = []
    for stage in stages:
        recomputed = len(stage.layers)
        if job.layout.recompute == "full":
            share = job.layout.layers_recomputed
            recomputed = flops.count_recomputed_layers(stage.layers, share)
        # If layers differ, their numbers matter too.
        layers = len(stage.layers) if len(parts.plain) == 1 else stage.layers
        key = (layers, recomputed, stage.first, stage.last)
        if key not in found:
            found[key] = _sum_stage(job.shape, stage, recomputed, parts)
        sums.append(found[key])
    return tuple(sums)


def _sum_stage(shape: ModelShape, stage: Stage, recomputed: int, parts: _Parts) -> Passes:
    """Return the time of one stage for one microbatch, with this number of recomputed layers."""
    passes = Passes(Seconds(), Seconds())
    if len(parts.plain) == 1:
        (kind,) = parts.plain
        passes += parts.again[kind].scale(recomputed)
        passes += parts.plain[kind].scale(len(stage.layers) - recomputed)
    else:
        for number, layer in enumerate(stage.layers):
            # Which layers of a stage are recomputed hardly changes their sum.
            times = parts.again if number < recomputed else parts.plain
            passes += times[_find_kind(shape, layer)]
    return _add_ends(passes, stage, parts)


def _add_ends(passes: Passes, stage: Stage, parts: _Parts) -> Passes:
    """Add the embedding and the output layer to the layers of a stage that has them."""
    if stage.first:
        passes += parts.embedding
    if stage.last:
        passes += parts.output
    return passes


def _sum_mixed_stage(
    job: StepJob, stage: Stage, parts: _Parts, others: _Parts, float8: Float8
) -> Passes:
    """Return the time of one stage with some layers in float8, for one microbatch.

    Args:
        job: The step.
        stage: The stage.
        parts: Times with float8.
        others: Times without it.
        float8: Which layers have it.
    """
    layout = job.layout
    again = layout.recompute != "full"
    kinds: Counter[tuple[bool, bool, _Kind]] = Counter()
    for layer in stage.layers:
        recomputed = again or (
            flops.count_recomputed_layers(range(layer, layer + 1), layout.layers_recomputed) > 0
        )
        kinds[float8.covers(layer), recomputed, _find_kind(job.shape, layer)] += 1
    passes = Passes(Seconds(), Seconds())
    for (in_float8, recomputed, kind), count in kinds.items():
        times = parts if in_float8 else others
        passes += (times.again if recomputed else times.plain)[kind].scale(count)
    return _add_ends(passes, stage, parts)


def estimate_data_parallel_time(
    job: StepJob,
    stages: Sequence[Stage],
    rank: int,
    select: Callable[[StepTraffic], StepTraffic] = lambda traffic: traffic,
) -> CommunicationTime:
    """Return how long pipeline rank `rank` sends weights and gradients to ranks with the same ones.

    Args:
        job: The step.
        stages: All stages.
        rank: The pipeline rank.
        select: Returns the part of the traffic that counts. Default: all of it.
    """
    layout = job.layout
    own = select_stages_of_rank(stages, rank, layout.pipeline)
    layers = [count_layer(job.shape, layout, layer) for stage in own for layer in stage.layers]
    counted = (count_root_parameters, count_head_parameters)
    outside = [count(job.shape, layout.tensor, stage) for stage in own for count in counted]
    # Parameters of layers, others, ranks that share a copy, copies, and ranks between neighbours.
    dense = [each.dense for each in layers]
    groups = [(dense, [*filter(None, outside)], layout.shard_size, layout.copies, layout.tensor)]
    if job.shape.expert_layers:
        # The same links send both.
        experts = [each.experts for each in layers if each.experts]
        shards = layout.expert_shards, layout.expert_copies
        groups.append((experts, [], *shards, layout.expert or 1))
    total = CommunicationTime(0.0, 0.0)
    for blocks, others, shard_size, copies, inner_ranks in groups:
        traffic = count_traffic(
            blocks,
            others,
            shard_size=shard_size,
            copies=copies,
            zero_stage=layout.zero_stage,
            microbatches=job.schedule.microbatches,
            weight_bytes=2 if job.software.half else 4,
            gradient_bytes=job.software.gradient_bytes,
        )
        total += estimate_time(
            select(traffic),
            job.hardware.network,
            shard_size=shard_size,
            copies=copies,
            inner_ranks=inner_ranks,
        )
    return total


def _estimate_data_parallel(
    job: StepJob, stages: Sequence[Stage], rank: int, passes: Sequence[Passes]
) -> DataParallelSeconds:
    """Estimate the communication of a pipeline rank, whose stages have these times."""
    layout = job.layout
    software = job.software
    microbatches = job.schedule.microbatches

    def estimate(select: Callable[[StepTraffic], StepTraffic]) -> float:
        return estimate_data_parallel_time(job, stages, rank, select).total

    forward = sum(each.forward.total for each in passes)
    backward = sum(each.backward.total for each in passes)
    if layout.zero_stage == 3:
        # Weights are gathered for each pass of each microbatch, and gradients reduced after it.
        hidden = software.hidden_data * microbatches * (forward + backward)
        return _hide(estimate(lambda each: each), hidden, software)
    nothing = Collectives()
    gathered = estimate(lambda each: StepTraffic(each.all_gather, nothing, nothing))
    reduced = estimate(lambda each: replace(each, all_gather=nothing))
    # Stage 2 reduces after each microbatch, and the others after the last one.
    covered = microbatches if layout.zero_stage == 2 else 1
    parts = [
        _hide(gathered, software.hidden_data * forward, software),
        _hide(reduced, software.hidden_data * covered * backward, software),
    ]
    return DataParallelSeconds(
        sum(part.total for part in parts), sum(part.waited for part in parts)
    )


def _hide(total: float, hidden: float, software: Software) -> DataParallelSeconds:
    """Return what is waited for if `hidden` seconds of computation run at the same time."""
    return DataParallelSeconds(total, estimate_added_seconds(total, hidden, software.contention))
