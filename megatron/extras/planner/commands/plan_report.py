"""The report of a plan: text for people, and JSON for programs."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from typing import Any

from megatron.base.plain_text import format_count
from megatron.config.compare import (
    format_warnings,
    split_off_flags_without_effect,
)
from megatron.config.optimizer import OptimizerConfig
from megatron.data.epochs import DatasetUse, describe_epochs
from megatron.data.phases import PlannedPhase
from megatron.extras.planner.commands.plan_cost import Row, format_rows, list_assumed
from megatron.extras.planner.commands.plan_estimates import (
    choose_final_schedule,
    choose_strategy,
    compute_flops,
    estimate_compute_seconds,
    estimate_memory,
    estimate_strategies,
)
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.layers import LayerTimes
from megatron.extras.planner.cost.memory import Verdict
from megatron.extras.planner.cost.parameters import count_message_bytes, count_rows
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.prediction import (
    can_be_predicted,
    describe_layout,
    describe_software,
    get_recomputed_share,
    predict_plan,
)
from megatron.model import flops
from megatron.plan.run_plan import Plan
from megatron.schedule.clock import format_duration
from megatron.schedule.lr import LRSchedule
from megatron.schedule.pipeline_schedule import PipelineSchedule
from megatron.schedule.position import ForecastPoint, Progress, Steps

SHOWN_SIZES = 8
"""A ramp-up with more batch sizes than this is shortened in the report."""


def build_json(
    plan: Plan,
    at: list[ForecastPoint],
    warnings: list[str],
    uses: Sequence[DatasetUse],
    hardware: Hardware,
) -> dict[str, Any]:
    """Return the plan as plain data. Memory is in bytes, and FLOPs are plain counts."""
    shown = ["iteration", "consumed_samples", "consumed_tokens", "global_batch_size", "lr"]
    if plan.lr_schedule.decoupled_max_lr is not None:
        shown.append("decoupled_lr")
    return {
        "parameters": plan.parameters,
        "active_parameters": flops.count_active_parameters(plan.shape),
        "parameters_per_rank": max(plan.stage_parameters),
        "world_size": plan.world_size,
        "data_parallel_size": plan.data_parallel_size,
        "shard_size": plan.shard_size,
        "layers_per_stage": list(plan.layers_per_stage),
        "parameters_by_pipeline_rank": list(plan.stage_parameters),
        "pipeline": [
            {
                "batch_size": size,
                "microbatches": made.microbatches,
                "schedule": made.name,
                "idle": made.bubble,
            }
            for size, made in list_first_and_final(plan)
        ],
        "padded_vocab_size": plan.padded_vocab_size,
        **build_length_json(plan),
        "training_data": [
            {name: getattr(use, name) for name in ("prefix", "tokens", "epochs", "filled")}
            for use in uses
        ],
        "last_lr": compute_last_rate(plan),
        "data_phases": [build_phase_json(planned) for planned in plan.data_phases],
        "loss_mean": plan.config.loss.loss_mean,
        "at": [{name: getattr(progress, name) for name in shown} for progress in at],
        "memory_bytes": estimate_memory(plan),
        "flops": compute_flops(plan),
        "communication": _build_communication_json(plan, hardware),
        "errors": list(plan.errors),
        "warnings": warnings,
        "flags_without_effect": split_off_flags_without_effect(warnings)[1],
    }


def _build_communication_json(plan: Plan, hardware: Hardware) -> dict[str, Any] | None:
    """Return the estimates of each strategy as plain data, in seconds of a step and in bytes.

    It is None for a plan with errors, whose sizes may be placeholders.
    """
    if plan.errors:
        return None
    estimates = estimate_strategies(plan, hardware)
    compute = estimate_compute_seconds(plan, hardware)
    best = choose_strategy(estimates)
    return {
        "hardware": hardware.name,
        "compute_seconds": compute,
        "strategies": {
            each.name: {
                "seconds": each.communication.total,
                "inside_nodes": each.communication.inside_nodes,
                "between_nodes": each.communication.between_nodes,
                "memory_bytes": each.memory,
                "verdict": each.verdict,
                "step_seconds": each.step_seconds,
            }
            for each in estimates
        },
        "recommended": None if best is None else best.flags,
    }


def build_length_json(plan: Plan) -> dict[str, Any]:
    """Return the length of the run as plain data. Of a run by time, only the time is known."""
    if plan.train_seconds is not None:
        length: dict[str, Any] = dict.fromkeys(("train_iters", "train_samples", "train_tokens"))
        return {**length, "train_seconds": plan.train_seconds}
    tokens = plan.train_samples * plan.config.model.seq_length
    return {
        "train_iters": plan.train_iters,
        "train_samples": plan.train_samples,
        "train_tokens": plan.config.batch.train_tokens or tokens,
        "train_seconds": None,
    }


def build_phase_json(planned: PlannedPhase) -> dict[str, Any]:
    """Return a phase of the training data as plain data."""
    names = ("seed", "data_path", "train_weighted_split_paths", "datasets", "weights")
    return {
        "first_iteration": planned.first_iteration,
        "start_sample": planned.start_sample,
        **{name: getattr(planned.phase, name) for name in names},
    }


def list_first_and_final(plan: Plan) -> list[tuple[int, PipelineSchedule]]:
    """Return the first and the final batch size that fit the grid, each with its pipeline schedule.

    The list is empty if no batch size fits.
    """
    share = plan.config.batch.micro_batch_size * plan.data_parallel_size
    sizes = plan.batch_size.iterate_upcoming(0, 0, plan.config.model.seq_length)
    # A ramp-up may start at a size that this grid cannot take, which is among the plan's errors.
    fitting = [size for size in sizes if share > 0 and size % share == 0]
    # `dict.fromkeys` drops the second entry if the first size is also the final one.
    return [
        (size, plan.choose_pipeline_schedule(size))
        for size in dict.fromkeys([*fitting[:1], *fitting[-1:]])
    ]


def format_plan(
    plan: Plan,
    at: list[ForecastPoint],
    warnings: list[str],
    uses: Sequence[DatasetUse],
    hardware: Hardware,
    cost: Iterable[Row] = (),
    assumed: Sequence[str] = (),
) -> list[str]:
    """Format the plan for people, one line per entry.

    Args:
        plan: The plan.
        at: The forecast iterations.
        warnings: The warnings.
        uses: The training data sets.
        hardware: The devices.
        cost: The rows of its prediction.
        assumed: What is assumed about the run.
    """
    rows = [
        *list_assumed("assumed", assumed),
        *_list_model(plan, hardware),
        *_list_training(plan),
        *_list_phases(plan),
        *([("epochs", describe_epochs(uses))] if uses else []),
        *_list_memory(plan),
        *_list_flops(plan),
        *_list_context(plan, hardware),
        *_list_communication(plan, hardware),
        *cost,
    ]
    lines = format_rows(rows)
    if at:
        lines += [
            "",
            f"{'iteration':>10} {'samples':>14} {'tokens':>18} {'batch':>6} {'length':>7} "
            f"{'learning rate':>14}"
            + (f" {'decoupled':>10}" if plan.lr_schedule.decoupled_max_lr is not None else ""),
        ]
    lines += [
        f"{p.iteration:>10} {p.consumed_samples:>14,} {p.consumed_tokens:>18,} "
        f"{p.global_batch_size:>6} {p.seq_length:>7} "
        f"{p.lr:>14.3E}" + (f" {p.decoupled_lr:>10.3E}" if p.decoupled_lr is not None else "")
        for p in at
    ]
    lines += ["", *format_warnings(warnings)] if warnings else []
    # Errors come last, so that they are at the end of the terminal's output.
    lines += ["", *(f"error: {error}" for error in plan.errors)] if plan.errors else []
    return lines


def _list_model(plan: Plan, hardware: Hardware) -> Iterator[Row]:
    parallel = plan.config.parallel
    fullest = max(plan.stage_parameters)
    context = ""
    if parallel.context_parallel_size > 1:
        context = f"{parallel.context_parallel_size} context x "
    vocabulary = f"{plan.padded_vocab_size:,} ({plan.vocab_size:,} real)"
    yield "parameters", f"{plan.parameters:,} with the padded vocabulary of {vocabulary}"
    rank = plan.stage_parameters.index(fullest)
    yield "  on a rank", f"{fullest:,} at most (pipeline rank {rank}), before ZeRO"
    yield (
        "grid",
        f"{format_count(plan.world_size, 'process', 'processes')} = "
        f"{parallel.tensor_model_parallel_size} tensor x "
        f"{parallel.pipeline_model_parallel_size} pipeline x {context}"
        f"{plan.data_parallel_size} data; ZeRO {plan.zero_stage}{_describe_copies(plan)}",
    )
    yield from _list_pipeline(plan)
    yield "attention", _describe_attention(plan)
    # There may be no layer with an MLP.
    if len(plan.shape.expert_layers) < plan.config.model.num_layers:
        yield "feed-forward", f"{plan.shape.ffn_hidden_size:,} wide"
    yield from _list_experts(plan, hardware)


def _describe_attention(plan: Plan) -> str:
    """Return the heads, and the key/value groups or the latent vectors."""
    model = plan.config.model
    heads = f"{model.num_attention_heads} heads of {plan.shape.head_dim}"
    if plan.shape.attention != "latent":
        return f"{heads}, {plan.shape.query_groups} key/value groups"
    queries = ""
    if model.q_lora_rank is not None:
        queries = f", and of {model.q_lora_rank:,} for queries"
    # Both are stored once for all heads.
    kept = model.kv_lora_rank + model.qk_pos_emb_head_dim
    return (
        f"{heads}, of which {model.qk_pos_emb_head_dim} rotary, values of {model.v_head_dim}; "
        f"latent vectors of {model.kv_lora_rank:,}{queries}; generation keeps {kept:,} numbers of "
        "a token and layer"
    )


def _list_experts(plan: Plan, hardware: Hardware) -> Iterator[Row]:
    """Describe the layers with experts, if there are any."""
    model = plan.config.model
    if model.num_experts is None:
        return
    size = plan.config.parallel.expert_model_parallel_size
    shared = ""
    if model.moe_shared_expert_intermediate_size is not None:
        shared = f", and a shared one of {model.moe_shared_expert_intermediate_size:,}"
    yield (
        "experts",
        f"{model.moe_router_topk} of {model.num_experts:,}, each {plan.shape.expert_width:,} "
        f"wide{shared}, in {len(plan.shape.expert_layers)} of {model.num_layers} layers; "
        f"{model.num_experts // size:,} on a rank",
    )
    yield "  used by a token", f"{flops.count_active_parameters(plan.shape):,} parameters"
    # The ranks of a plan with errors may not divide the experts.
    if plan.errors:
        return
    layout = replace(describe_layout(plan), imbalance=hardware.expert_imbalance)
    _, _, received = count_rows(plan.shape, layout)
    value = 2 if plan.config.precision.bf16 or plan.config.precision.fp16 else 4
    text = f"{received * size / model.num_experts:,.0f} rows for an expert"
    if sent := count_message_bytes(plan.shape, layout, value):
        near = min(size, hardware.ranks_per_node)
        where = "inside a node"
        if near < size:
            where = f"{near} of {size} ranks on a node"
        text += f"; 2 all-to-all a pass and layer, of {sent / 2**20:,.3g} MiB, {where}"
    yield "  a microbatch", text


def _describe_copies(plan: Plan) -> str:
    """Describe how the data-parallel ranks share several copies of the model."""
    if plan.copies == 1:
        return ""
    ranks = format_count(plan.shard_size, "data-parallel rank")
    return f" in {plan.copies} copies of the model, each on {ranks}"


def _list_pipeline(plan: Plan) -> Iterator[Row]:
    """Describe the stages of the pipeline, if there are several."""
    if plan.pipeline_size == 1:
        return
    each = ""
    if plan.stages_per_rank > 1:
        each = f", in {plan.stages_per_rank} virtual stages on each rank"
    millions = (f"{parameters / 1e6:,.1f}" for parameters in plan.stage_parameters)
    yield "layers by stage", _collapse_runs(map(str, plan.layers_per_stage)) + each
    yield "  parameters, 10^6", f"{_collapse_runs(millions)} by pipeline rank"
    for size, made in list_first_and_final(plan):
        yield "", made.describe(size).removeprefix("pipeline: ")


def _collapse_runs(texts: Iterable[str]) -> str:
    """Join texts and count repetitions, as in '5, 10 x 6, 5'."""
    runs = [(text, len(list(run))) for text, run in groupby(texts)]
    return ", ".join(text if length == 1 else f"{length} x {text}" for text, length in runs)


def _list_training(plan: Plan) -> Iterator[Row]:
    batch = plan.config.batch
    seq_length = plan.config.model.seq_length
    share = batch.micro_batch_size * plan.data_parallel_size
    sizes = [
        f"{size} ({size / share:g})" for size in plan.batch_size.iterate_upcoming(0, 0, seq_length)
    ]
    if len(sizes) > SHOWN_SIZES:
        # A ramp-up can have hundreds of sizes.
        sizes = [*sizes[:3], f"... {len(sizes) - 4} more ...", sizes[-1]]
    yield "batch (microbatches)", ", ".join(sizes)
    if plan.train_seconds is not None:
        time = format_duration(plan.train_seconds)
        yield "time", f"{time}: the speed decides on iterations and samples"
    else:
        yield "iterations", f"{plan.train_iters:,}"
        yield "samples", f"{plan.train_samples:,} of {seq_length:,} tokens"
        most = " at most" if plan.curriculum else ""
        yield "tokens", f"{plan.train_samples * seq_length:,}{most}"
    if plan.curriculum is not None:
        yield "sequence length", str(plan.curriculum)
    if batch.train_tokens is not None:
        last = plan.forecast().find_iteration_reaching_tokens(batch.train_tokens, plan.train_iters)
        tokens = f"{batch.train_tokens:,} tokens or all samples"
        yield "ends by tokens", f"{tokens}, at iteration {last:,}"
    yield "learning rate", _describe_schedule(plan)
    if described := plan.describe_loss_mean():
        mean, why = described
        yield "loss", f"mean {mean} ({why})"


def _list_phases(plan: Plan) -> Iterator[Row]:
    """Describe the phases of the training data, one in each row."""
    for number, planned in enumerate(plan.data_phases, 1):
        phase = planned.phase
        seed = plan.config.batch.seed if phase.seed is None else phase.seed
        data = " ".join(phase.data_path or phase.train_weighted_split_paths)
        if phase.datasets is not None:
            data = f"{phase.datasets}, weights {phase.weights or 'equal'}"
        start = f"{planned.first_iteration:,} (sample {planned.start_sample:,})"
        yield f"data phase {number}", f"from iteration {start}, seed {seed}: {data}"


def compute_last_rate(plan: Plan) -> float | None:
    """Return the learning rate after the last iteration, as its log line shows it.

    It is None if the length of the run is not known.
    """
    # The rate of a run by time follows the time.
    if plan.train_seconds is not None or not plan.train_iters:
        return None
    lr = plan.lr_schedule
    steps = Steps(plan.batch_size, plan.config.model.seq_length, plan.curriculum)
    end = steps.find_iteration(Progress(), plan.train_iters)
    if plan.config.batch.train_tokens is not None:
        tokens = plan.config.batch.train_tokens
        end = steps.find_tokens(Progress(), tokens, plan.train_iters)

    def count_applied(iteration: int) -> tuple[int, int]:
        """Return the samples and tokens up to an iteration, without those that are skipped."""
        at = steps.find_iteration(Progress(), iteration)
        samples, tokens = at.samples, at.tokens
        for bounds in plan.skip_ranges:
            first, last = (min(iteration, each) for each in (bounds[0] - 1, bounds[1]))
            before, after = (steps.find_iteration(Progress(), each) for each in (first, last))
            samples -= after.samples - before.samples
            tokens -= after.tokens - before.tokens
        return samples, tokens

    # A run may have millions of iterations, so the end of the warm-up is found by bisection.
    iterations = range(end.iteration + 1)
    warm = bisect_left(iterations, lr.warmup_steps, key=lambda each: count_applied(each)[0])
    warmup_tokens = 0
    if lr.is_warm(count_applied(end.iteration)[0]):
        warmup_tokens = count_applied(warm)[1]
    return lr.get_lr(*count_applied(end.iteration), warmup_tokens)


def _describe_warmup(lr: LRSchedule) -> str:
    warmup = f"warm-up {lr.warmup_steps:,.0f} samples"
    if lr.warmup_fraction is not None:
        warmup = f"warm-up in {100 * lr.warmup_fraction:g} % of the time"
    if lr.warmup_init > 0:
        warmup += f" from {lr.warmup_init:g}"
    if lr.warmup_style != "linear":
        warmup = f"{lr.warmup_style} {warmup}"
    if lr.decay_from_start:
        warmup += " during the decay"
    return warmup


def _describe_schedule(plan: Plan) -> str:
    lr = plan.lr_schedule
    warmup = _describe_warmup(lr)
    if lr.train_seconds is not None:
        end = "the end of the time"
    elif lr.decay_tokens is None:
        end = f"{lr.decay_steps:,} samples"
    else:
        end = f"{lr.decay_tokens:,} tokens"
    text = f"{lr.max_lr:g} to {lr.min_lr:g}, {lr.style}, {warmup}, decay to {end}"
    final = lr.min_lr
    if lr.style == "constant":
        text = f"{lr.max_lr:g}, constant, {warmup}"
        final = lr.max_lr
    last_rate = compute_last_rate(plan)
    if last_rate is not None and not math.isclose(last_rate, final, rel_tol=1e-3):
        # The run ends before the decay, or the style does not fall to the minimum.
        text = f"{last_rate:.3g} at the last iteration; {text}"
    if lr.style == "WSD":
        if lr.wsd_decay_fraction is not None:
            last = f"{100 * lr.wsd_decay_fraction:g} %"
        else:
            last = f"{lr.wsd_decay_steps:,}"
        text += f", {lr.wsd_decay_style} over the last {last}"
    if lr.decoupled_max_lr is not None:
        text += (
            f"; word embedding and output matrix: {lr.decoupled_max_lr:g} to "
            f"{lr.decoupled_min_lr:g}"
        )
    return text


def _describe_memory_rule(config: OptimizerConfig) -> str:
    """Return the bytes of a parameter as text."""
    # Weights in fp32 and 16 bits, and gradients. In fp32 there is one copy of the weights.
    size = 10 + flops.count_state_bytes(config, 1, 0)
    rule = f"{size} bytes a parameter ({size - 2} in fp32)"
    less = flops.count_state_bytes(config, 1, 0) - flops.count_state_bytes(config, 1, 1)
    if less:
        rule += f", and {less} less in the matrices of the layers"
    return rule


def _list_memory(plan: Plan) -> Iterator[Row]:
    memory_bytes = estimate_memory(plan)
    # The figures of a rank are those of the rank that needs most.
    where = ""
    if plan.pipeline_size > 1:
        where = f"; pipeline rank {memory_bytes['pipeline_rank']} needs most"
    rule = f"by the rule of {_describe_memory_rule(plan.config.optimizer)}{where}"
    yield "memory, GiB (2^30)", f"{'model':>12}{'a rank':>12}   {rule}"
    for part in ("master_weights", "working_weights", "optimizer_states", "gradients", "total"):
        model, rank = (memory_bytes[whose][part] / 2**30 for whose in ("model", "rank"))
        yield f"  {part.replace('_', ' ')}", f"{model:>12,.2f}{rank:>12,.2f}"
    if plan.shape.expert_layers:
        # The formula of other trainers has no experts. The predicted step has their memory.
        return
    configured, kept, scores, again = (
        memory_bytes[f"activations{key}"] / 2**30
        for key in ("", "_kept", "_with_scores", "_recomputed")
    )
    if share := get_recomputed_share(plan):
        note = f"{_format_layer_share(share)} recomputed; {kept:,.2f} without recomputation"
    else:
        note = f"{scores:,.2f} without a flash kernel, {again:,.2f} with all layers recomputed"
    if plan.pipeline_size > 1:
        # The number in flight explains why an early stage needs more memory than a late one.
        visits = choose_final_schedule(plan).count_in_flight(memory_bytes["pipeline_rank"])
        one, many = "microbatch", "microbatches"
        if plan.stages_per_rank > 1:
            one, many = "virtual stage", "virtual stages"
        note += f"; {format_count(visits, one, many)} in flight"
    yield "  activations", f"{'about':>12}{configured:>12,.2f}   ({note})"


def _format_layer_share(share: Fraction) -> str:
    if share == 1:
        return "all layers"
    return f"{share} of the layers"


def _list_flops(plan: Plan) -> Iterator[Row]:
    counts = compute_flops(plan)
    recomputation = "no recomputation"
    if share := get_recomputed_share(plan):
        recomputation = f"{_format_layer_share(share)} recomputed"
    model, hardware = counts["model_per_token"], counts["hardware_per_token"]
    yield "FLOPs a token", f"{model:.4e} model, {hardware:.4e} hardware"
    hardware = counts["hardware_per_iteration"]
    yield "FLOPs an iteration", f"{hardware:.4e} hardware, {recomputation}"
    if counts["model_whole_run"] is not None:
        counted = "forward and backward, causal attention counted as full"
        yield "FLOPs of the run", f"{counts['model_whole_run']:.4e} model ({counted})"


def _list_context(plan: Plan, hardware: Hardware) -> Iterator[Row]:
    """Describe what context-parallel ranks send, by each kind, and whether fewer are faster."""
    parallel = plan.config.parallel
    if parallel.context_parallel_size == 1 or plan.errors:
        return
    layout = describe_layout(plan)
    heads = plan.config.model.num_attention_heads // layout.tensor
    software = describe_software(plan, hardware)
    received = (layout.context - 1) / layout.context
    # Both kinds, so that the choice is explained.
    texts = []
    for name, exchanges in (("allgather", False), ("a2a", True)):
        changed = replace(layout, exchange_heads=exchanges)
        times = LayerTimes(plan.shape, changed, software, hardware)
        size = received * times.count_context_bytes() / 2**20
        possible = "" if heads % layout.context == 0 or not exchanges else " (too few heads)"
        texts.append(f"{name} {size:,.3g} MiB{possible}")
    sent = f"a rank receives in each layer and pass: {', '.join(texts)}"
    yield "context parallelism", f"{parallel.cp_comm_type}; {sent}"
    if not can_be_predicted(plan, hardware):
        return
    prediction = predict_plan(plan, hardware)
    # A user may have more ranks for a sequence than it needs.
    # The same samples on one rank each, with as many data-parallel ranks more.
    alone = replace(
        layout, context=1, exchange_heads=False, data=layout.data * layout.context, shard=None
    )
    if plan.batch_size.final % (alone.data * alone.micro_batch):
        return
    other = StepPrediction(replace(prediction.job, layout=alone))
    if other.verdict is Verdict.FITS and other.seconds < prediction.seconds:
        both = f"{other.seconds:,.3g} s instead of {prediction.seconds:,.3g} s"
        yield "", f"note: --context-parallel-size 1 fits too, and a step would take {both}"


def _list_communication(plan: Plan, hardware: Hardware) -> Iterator[Row]:
    """Describe the communication of each strategy. One data-parallel rank sends nothing."""
    # The sizes of a plan with errors may be placeholders.
    if plan.weight_ranks == 1 or plan.errors:
        return
    estimates = estimate_strategies(plan, hardware)
    compute = estimate_compute_seconds(plan, hardware)
    tensor = plan.config.parallel.tensor_model_parallel_size > 1
    yield (
        "communication, s",
        f"about, in a step, on {hardware.name} (nodes of {hardware.ranks_per_node}); "
        f"computation {'and tensor parallelism take' if tensor else 'takes'} "
        f"{compute:,.3g}; links inside and between nodes work at the same time",
    )
    for each in estimates:
        times = each.communication
        yield (
            f"  {each.name}",
            f"{times.total:>12,.3g}   ({times.inside_nodes:,.3g} inside nodes, "
            f"{times.between_nodes:,.3g} between them; step {each.step_seconds:,.3g} s; "
            f"{each.memory / 2**30:,.1f} GiB a rank: {each.verdict})",
        )
    best = choose_strategy(estimates)
    if best is None:
        precision = plan.config.precision
        half = "--bf16, "
        if precision.bf16 or precision.fp16:
            half = ""
        advice = f"none fits in memory: use {half}more tensor or pipeline ranks, or recomputation"
    else:
        # --search also changes the micro-batch and the grid.
        verb = "fit" if best.verdict is Verdict.FITS else "may fit; none fits with the margin"
        advice = f"{best.flags} (the shortest step of those that {verb})"
    yield "  recommended", advice
