"""The predicted cost of a planned run: memory, time, energy, goodput.

`megatron/extras/planner/cost/` has the model. This module takes what it needs from a plan, and
formats what it predicts.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError
from megatron.base.plain_text import is_url
from megatron.config.kernels import KernelsConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.tree import Config
from megatron.extras.object_store.objects import PART
from megatron.extras.planner.commands.plan_estimates import (
    GoodputForecast,
    GoodputReplay,
    build_replay_json,
    format_number,
    list_goodput_rows,
    predict_goodput,
    replay_failures,
)
from megatron.extras.planner.cost.float8 import list_linears
from megatron.extras.planner.cost.goodput import (
    CostOptions,
    Footprint,
    PlannedGoodput,
    estimate_footprint,
)
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.layers import Seconds
from megatron.extras.planner.cost.memory import Verdict
from megatron.extras.planner.cost.search import balance_stages
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.prediction import (
    can_be_predicted,
    find_float8_obstacle,
    predict_plan,
)
from megatron.extras.step.float8.recipe import MULTIPLE, fits_float8, list_float8_layers
from megatron.plan.kernel_choice import has_use
from megatron.plan.run_plan import Plan
from megatron.run.start.launch import count_checkpoint_bytes

FLOAT8_ROUNDING = "float8: rounding"
FLOAT8_SCALES = "float8: messages"
EXPERT_MESSAGES = "tokens to experts and back"
"""Parts of a step with float8. The messages have largest values, from which scales follow."""
Row = tuple[str, str]
"""Label and text of a line of a report. The label is indented if the row is a part of another."""
_BAR = 50
"""Characters of the bar that shows where the time goes."""
_LEAST_GAIN = 0.02
"""Smallest predicted gain that is printed."""
_MOST_DRAWN = 20_000
"""Visits of a pipeline that a trace may have."""


@dataclass(frozen=True)
class RunCost:
    """What a complete run costs."""

    days: float
    """Days without failures."""
    days_with_failures: float
    footprint: Footprint


def predict_days(plan: Plan, prediction: StepPrediction) -> float | None:
    """Predict the days of the run without failures. None if its length in tokens is not known."""
    if plan.train_seconds is not None or not plan.train_tokens:
        return None
    ranks = prediction.job.layout.ranks
    return plan.train_tokens / (prediction.tokens_per_second * ranks) / 86400


def predict_run(
    plan: Plan, prediction: StepPrediction, goodput: PlannedGoodput | None, options: CostOptions
) -> RunCost | None:
    """Predict what the complete run costs.

    None if its length in tokens is not known, if it does not end, or if the layout does not fit, so
    that it has no cost.
    """
    days = predict_days(plan, prediction)
    if days is None or goodput is None or prediction.verdict is Verdict.DOES_NOT_FIT:
        return None
    # Goodput is the useful share of the wall time, so the rest is added here.
    wall = days / goodput.useful
    footprint = estimate_footprint(prediction.job.hardware, plan.world_size, 24 * wall, options)
    return RunCost(days, wall, footprint)


def list_breakdown(prediction: StepPrediction) -> list[tuple[str, float]]:
    """Return the seconds of a step by what the busiest pipeline rank does."""
    busiest: Seconds = max(prediction.rank_seconds, key=lambda each: each.total)
    # Everything that the rank does not compute is waiting: the bubble, and messages.
    waiting = 0.0
    # Without a pipeline, the difference would be that of two roundings.
    if prediction.job.layout.pipeline > 1:
        waiting = max(0.0, prediction.pipeline_seconds - busiest.total)
    parts = [
        ("matrix products", busiest.gemm),
        ("attention", busiest.attention),
        ("other kernels", busiest.pointwise),
        (FLOAT8_ROUNDING, busiest.rounding + prediction.weight_scale_seconds.rounding),
        (FLOAT8_SCALES, busiest.scales + prediction.weight_scale_seconds.scales),
        ("between kernels", busiest.gaps),
        ("between steps", prediction.job.software.step_gap),
        (_name_layer_messages(prediction), busiest.tensor),
        (EXPERT_MESSAGES, busiest.experts),
        ("pipeline", waiting),
        ("data-parallel", prediction.data_parallel.waited),
        ("optimizer", prediction.optimizer_seconds),
    ]
    return [(name, seconds) for name, seconds in parts if seconds > 0]


def _name_layer_messages(prediction: StepPrediction) -> str:
    """Return which ranks send the messages within a layer."""
    layout = prediction.job.layout
    if layout.context == 1:
        return "tensor-parallel"
    if layout.tensor == 1:
        return "context-parallel"
    return "tensor and context"


def build_verdict_json(prediction: StepPrediction) -> dict[str, Any]:
    """Return the peak memory, what it may be, and whether it fits, as plain data."""
    return {
        "peak_bytes": prediction.peak_bytes,
        "usable_bytes": prediction.job.hardware.usable_bytes,
        "verdict": prediction.verdict,
    }


def build_cost_json(plan: Plan, hardware: Hardware, options: CostOptions) -> dict[str, Any] | None:
    """Return the prediction as plain data. None if there is none."""
    if not can_be_predicted(plan, hardware):
        return None
    prediction = predict_plan(plan, hardware)
    forecast = predict_goodput(plan, hardware, options, prediction.seconds)
    run = predict_run(plan, prediction, forecast.own, options)
    storage = plan_storage(plan, hardware, prediction.seconds, options)
    return {
        "hardware": hardware.name,
        "layout": prediction.job.layout.describe(),
        "seconds_per_iteration": prediction.seconds,
        "breakdown_seconds": dict(list_breakdown(prediction)),
        "tokens_per_second": prediction.tokens_per_second * plan.world_size,
        "tflops": prediction.compute_tflops(hardware=True),
        "mfu": prediction.compute_mfu(causal=False),
        "mfu_causal": prediction.compute_mfu(causal=True),
        "memory_bytes_by_pipeline_rank": [rank.total for rank in prediction.memory],
        "memory_bytes_by_kind": vars(max(prediction.memory, key=lambda rank: rank.total)),
        **build_verdict_json(prediction),
        "replay_share": _compute_replay_share(plan, prediction),
        "goodput": None if forecast.own is None else vars(forecast.own),
        "best_goodput": vars(forecast.best),
        "replay_of_failures": build_replay_json(replay_failures(plan, hardware, options, forecast)),
        "object_store": None if storage is None else vars(storage),
        "run": None
        if run is None
        else {
            "days": run.days,
            "days_with_failures": run.days_with_failures,
            **vars(run.footprint),
        },
    }


def list_cost_rows(
    plan: Plan,
    hardware: Hardware,
    options: CostOptions,
    *,
    is_default: bool = False,
    assumed: Sequence[str] = (),
) -> Iterator[Row]:
    """Yield the rows of the prediction.

    Args:
        plan: The plan.
        hardware: The devices.
        options: What is assumed about the cluster.
        is_default: Whether nobody chose the hardware.
        assumed: What is assumed about the run.
    """
    if plan.errors:
        return
    if not can_be_predicted(plan, hardware):
        yield "step", f"no prediction: {hardware.name} has no fp32_tflops. Use --bf16"
        return
    prediction = predict_plan(plan, hardware)
    forecast = predict_goodput(plan, hardware, options, prediction.seconds)
    found = replay_failures(plan, hardware, options, forecast)
    size = f"batch size {plan.batch_size.final:,}"
    yield "predicted step", f"{prediction.seconds:,.3g} s on {hardware.name}, at {size}"
    if is_default:
        text = f"{hardware.name} is the default. Without a GPU, give --hardware cpu"
        yield "  hardware", text
    if not hardware.has_gpu:
        yield "  devices", "CPUs. The run has no GPU, and its prediction is rough"
    yield from _list_precision(plan, hardware, prediction)
    yield from _list_float8(plan, prediction)
    yield from _list_breakdown(prediction)
    tflops = f"{prediction.compute_tflops(hardware=True):.1f} TFLOPs (hardware, full attention)"
    yield "  speed", f"{prediction.tokens_per_second * plan.world_size:,.0f} tokens/s, {tflops}"
    full, causal = (100 * prediction.compute_mfu(causal=causal) for causal in (False, True))
    yield "  MFU", f"{full:.1f} % with full attention, {causal:.1f} % with causal attention"
    if (share := _compute_replay_share(plan, prediction)) is not None:
        yield (
            "  replay",
            f"{prediction.estimate_replay_seconds():,.3g} s every "
            f"{plan.config.parallel.replay_interval:,} iterations, which is {100 * share:.2g} % of "
            "their time. It needs about the memory of a step",
        )
    # The loads of experts that the prediction assumes.
    if (plan.expert_size or 1) > 1 and hardware.expert_imbalance > 1:
        text = f"the fullest rank gets {hardware.expert_imbalance:g} times the mean"
        yield "  experts", f"{text} (--expert-imbalance)"
    elif (plan.expert_size or 1) > 1:
        text = "in perfect balance. A learned router is slower: one run had an MFU of 14.7 % and "
        yield "  experts", f"{text}32.4 % with forced balance (--expert-imbalance)"
    yield from _list_memory(prediction)
    yield from list_assumed("  assumed", assumed)
    # At most three rows about speed that the plan does not use.
    for gain, advice in list_unused_speed(plan, hardware, prediction)[:3]:
        yield "  unused speed", f"{100 * gain:,.0f} % more: {advice}"
    yield from _list_run(plan, prediction, forecast, found, options)
    storage = plan_storage(plan, hardware, prediction.seconds, options)
    if storage is not None:
        yield "object store", describe_storage(plan, storage, options)


def _compute_replay_share(plan: Plan, prediction: StepPrediction) -> float | None:
    """Return which part of the steps' time replays take. None without them."""
    interval = plan.config.parallel.replay_interval
    if not interval:
        return None
    return prediction.estimate_replay_seconds() / (interval * prediction.seconds)


def format_days(days: float) -> str:
    """Return a duration in days, or in a smaller unit if it is shorter."""
    return _format_in(days, (("days", 1), ("hours", 24), ("minutes", 1440), ("seconds", 86400)))


def _format_in(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return a value in the first unit in which it is at least 1, or in the last one.

    `units` has names and how many of each are one of the value's own unit, the largest unit first.
    """
    fitting = (each for each in units if value * each[1] >= 1)
    unit, count = next(fitting, units[-1])
    return f"{format_number(value * count)} {unit}"


def format_rows(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a report."""
    return [f"{label:<22}{text}" for label, text in rows]


def list_assumed(label: str, assumed: Sequence[str]) -> Iterator[Row]:
    """Yield what the numbers rest on, and neither the command nor a file gives."""
    if assumed:
        yield label, "; ".join(assumed)


def _list_precision(plan: Plan, hardware: Hardware, prediction: StepPrediction) -> Iterator[Row]:
    """Yield a row about a format that the device does not compute in, or only slowly."""
    precision = plan.config.precision
    if precision.bf16 and not hardware.has_bf16:
        text = f"{hardware.name} does not compute in bf16. Use --fp16, whose times these are"
        yield "  precision", text
    if precision.bf16 or precision.fp16 or not hardware.has_gpu:
        return
    flag, config = _use_half_precision(plan.config, hardware)
    half = predict_plan(replace(plan, config=config), hardware)
    sizes = f"{half.peak_bytes / 2**30:,.1f} instead of {prediction.peak_bytes / 2**30:,.1f} GiB"
    text = f"fp32. With {flag}, a step would take {half.seconds:,.3g} s, and {sizes}"
    yield "  precision", text


def _use_half_precision(config: Config, hardware: Hardware) -> tuple[str, Config]:
    """Return the flag of the half precision that a device computes in, and what follows it."""
    bf16 = hardware.has_bf16
    precision = replace(config.precision, bf16=bf16, fp16=not bf16)
    return ("--fp16", "--bf16")[bf16], replace(config, precision=precision)


def _list_float8(plan: Plan, prediction: StepPrediction) -> Iterator[Row]:
    """Yield a row about float8, or about why it is not predicted."""
    config = plan.config
    if config.precision.fp8_format is None:
        return
    obstacle = find_float8_obstacle(config, prediction.job.hardware)
    text = f"{obstacle}. The times and the memory are those without float8"
    if config.precision.fp8_emulate:
        text = "emulated. The times and the memory are those without it"
    elif not obstacle:
        layers = list_float8_layers(config)
        sizes = sorted({each.complete for each in list_linears(plan.shape, 1)})
        others = [f"{size[0]:,} x {size[1]:,}" for size in sizes if not fits_float8(size)]
        recipe = config.precision.fp8_recipe
        text = f"{recipe}, transformer layers {layers.start + 1} to {layers.stop}"
        if others:
            why = f"a size is no multiple of {MULTIPLE}"
            text += f"; not in float8, because {why}: {', '.join(others)}"
    yield "  float8", text


def list_possible_fusions(plan: Plan) -> dict[str, str]:
    """Return the fused kernels that a flag leaves out although they would fit: field -> flag."""
    config = plan.config
    kernels = config.kernels
    half = config.precision.bf16 or config.precision.fp16
    accumulates = half and not config.parallel.deepspeed
    possible = {
        "rope_fusion": has_use("rope_fusion", plan),
        "bias_swiglu_fusion": has_use("bias_swiglu_fusion", plan),
        "cross_entropy_loss_fusion": True,
        "gradient_accumulation_fusion": accumulates,
    }
    return {
        field: f"--{field.replace('_', '-')}"
        for field, can_be_used in possible.items()
        if can_be_used and getattr(kernels, field) is False
    }


def list_unused_speed(
    plan: Plan, hardware: Hardware, prediction: StepPrediction
) -> list[tuple[float, str]]:
    """Return how much faster the plan would be with other flags: (0.05 is 5 %, advice).

    What is below 2 % or needs too much memory is left out. torch.compile is left out as well,
    because the error of its prediction is larger than its gain.
    """
    if not hardware.has_gpu:
        return []
    config = plan.config
    changes: list[tuple[str, Config]] = []
    fusions = list_possible_fusions(plan)
    if fusions:
        given: dict[str, Any] = dict.fromkeys(fusions)
        flags = " ".join(flag.replace("--", "--no-", 1) for flag in fusions.values())
        kernels = replace(config.kernels, **given)
        changes.append((f"leave out {flags}", replace(config, kernels=kernels)))
    if config.kernels.attention_backend[0] in ("flash", "efficient", "unfused"):
        order = KernelsConfig().attention_backend
        kernels = replace(config.kernels, attention_backend=order)
        changes.append(("leave out --attention-backend", replace(config, kernels=kernels)))
    if not prediction.job.software.half:
        flag, changed = _use_half_precision(config, hardware)
        changes.append((f"give {flag}", changed))
    for name in ("checkpoint_activations", "recompute_attention_core"):
        if getattr(config.recompute, name):
            advice = f"leave out --{name.replace('_', '-')}"
            changes.append((advice, replace(config, recompute=RecomputeConfig())))
    changes += _list_layout_changes(plan, prediction)
    found = []
    for advice, changed in changes:
        other = predict_plan(replace(plan, config=changed), hardware)
        gain = prediction.seconds / other.seconds - 1
        less = other.peak_bytes <= min(prediction.peak_bytes, hardware.memory_bytes)
        if gain >= _LEAST_GAIN and (less or other.verdict is Verdict.FITS):
            found.append((gain, advice))
    return sorted(found, reverse=True)


def _list_layout_changes(plan: Plan, prediction: StepPrediction) -> list[tuple[str, Config]]:
    """Return advice about the micro-batch and the stages, with the configuration that follows it.

    See `list_unused_speed`.
    """
    config = plan.config
    changes = []
    if plan.shape.linear_layers and plan.stages_per_rank == 1 < plan.pipeline_size:
        method = balance_stages(prediction.job).layout.partition
        parallel = replace(config.parallel, pp_partition_method=method)
        changes.append((f"give --pp-partition-method {method}", replace(config, parallel=parallel)))
    double = 2 * config.batch.micro_batch_size
    if plan.batch_size.final % (double * plan.data_parallel_size) == 0:
        batch = replace(config.batch, micro_batch_size=double)
        changes.append((f"give --micro-batch-size {double}", replace(config, batch=batch)))
    return changes


def _list_breakdown(prediction: StepPrediction) -> Iterator[Row]:
    """Yield a bar for each part of a step."""
    parts = list_breakdown(prediction)
    # Shares refer to the sum of the parts, which is the step.
    total = sum(seconds for _, seconds in parts)
    for name, seconds in parts:
        # The others would be shown as 0.0 %.
        if seconds >= 0.0005 * total:
            bar = "#" * round(_BAR * seconds / total)
            yield f"  {name}", f"{seconds:>10,.3g} s {100 * seconds / total:>5.1f} % {bar}"
    # Stages with equal numbers of layers differ in time if their kinds of layers do.
    if prediction.job.shape.linear_layers and len(prediction.rank_seconds) > 1:
        ranks = " ".join(f"{each.total:,.3g}" for each in prediction.rank_seconds)
        yield "  by pipeline rank", f"{ranks} s of computation"


def _list_memory(prediction: StepPrediction) -> Iterator[Row]:
    hardware = prediction.job.hardware
    totals = [rank.total / 2**30 for rank in prediction.memory]
    fullest = totals.index(max(totals))
    verdict = prediction.verdict
    # Kinds that do not matter would make the line longer than the terminal.
    kinds = ", ".join(
        f"{name.replace('_', ' ')} {size / 2**30:,.1f}"
        for name, size in vars(prediction.memory[fullest]).items()
        if size >= 0.05 * 2**30
    )
    yield (
        "  peak memory",
        f"{totals[fullest]:,.1f} of {hardware.memory_gib:,.1f} GiB, of which "
        f"{100 * hardware.usable_share:g} % may be used: "
        f"{verdict if verdict is Verdict.FITS else verdict.upper()} ({kinds})",
    )
    if len(totals) > 1:
        yield "    by pipeline rank", " ".join(f"{total:,.1f}" for total in totals)


def _list_run(
    plan: Plan,
    prediction: StepPrediction,
    forecast: GoodputForecast,
    found: GoodputReplay | None,
    options: CostOptions,
) -> Iterator[Row]:
    if prediction.verdict is Verdict.DOES_NOT_FIT:
        yield "predicted run", "none, because the layout does not fit"
        return
    run = predict_run(plan, prediction, forecast.own, options)
    if run is not None:
        yield "predicted run", ", ".join([format_days(run.days), *_list_cost(run, prediction)])
        if 86400 * run.days < forecast.best.save_interval_seconds:
            # A short run ends before the first save, and hardly ever fails.
            return
    yield from list_goodput_rows(prediction, forecast, found)


def _list_cost(run: RunCost, prediction: StepPrediction) -> Iterator[str]:
    """Yield what a run costs, without what is next to nothing."""
    # Below a thousandth, both durations are shown as the same number.
    if run.days_with_failures > 1.001 * run.days:
        yield f"{format_days(run.days_with_failures)} with failures"
    footprint = run.footprint
    if prediction.job.hardware.has_gpu and footprint.device_hours >= 0.5:
        yield f"{footprint.device_hours:,.0f} GPU-hours"
    if footprint.megawatt_hours >= 1e-6:
        yield _format_in(footprint.megawatt_hours, (("MWh", 1), ("kWh", 1e3), ("Wh", 1e6)))
    if footprint.tonnes >= 1e-6:
        yield _format_in(footprint.tonnes, (("t CO2e", 1), ("kg CO2e", 1e3), ("g CO2e", 1e6)))


def write_trace(prediction: StepPrediction, path: Path) -> None:
    """Write the predicted step as a Chrome trace.

    Raises:
        ConfigError: The step is too long, or the file cannot be written.
    """
    schedule = prediction.schedule
    visits = 2 * schedule.microbatches * schedule.ranks * schedule.stages_per_rank
    # A trace of a million events opens in no viewer.
    if visits > _MOST_DRAWN:
        raise ConfigError(
            f"--trace {path}: the step has {visits:,} passes of a microbatch through a stage, and "
            f"at most {_MOST_DRAWN:,} are drawn; use a smaller --global-batch-size for it."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(prediction.build_trace()))
    except OSError as failure:
        raise ConfigError(f"--trace {path}: {failure.strerror}; choose another path.") from failure


_MONTH_SECONDS = 30 * 86400


@dataclass(frozen=True)
class StoragePlan:
    """The checkpoints of a run on a store."""

    bytes: int
    """Bytes of a checkpoint."""
    upload_seconds: float
    load_seconds: float
    saves: float
    """Checkpoints of a month of training. 0 without --save-interval."""
    kept: float
    """Checkpoints that are stored at the end of that month."""
    dollars: float
    """What the first month costs: requests, and the storage that grows up to `kept`."""
    dollars_later: float
    """What it costs for each later month to keep these checkpoints."""


def plan_storage(
    plan: Plan, hardware: Hardware, step_seconds: float, options: CostOptions
) -> StoragePlan | None:
    """Predict the time and the price of a run's checkpoints on a store.

    None if --save is no address.

    Args:
        plan: The plan, with --save-interval and --keep-latest-checkpoints.
        hardware: The devices. All nodes transfer their parts at the same time.
        step_seconds: Predicted seconds of an iteration.
        options: What is assumed about the store. The prices are in dollars.
    """
    config = plan.config.checkpoint
    if not is_url(config.save or ""):
        return None
    size = count_checkpoint_bytes(plan)
    nodes = -(-plan.world_size // hardware.ranks_per_node)
    seconds = size / (nodes * options.store_gb_per_second * 1e9)
    saves = 0.0
    if config.save_interval:
        saves = _MONTH_SECONDS / (step_seconds * config.save_interval)
    # While a checkpoint is uploaded, the ones before it are still there.
    most = saves
    if config.keep_latest_checkpoints is not None:
        most = min(saves, config.keep_latest_checkpoints + 1)
    monthly = options.store_price * size / 1e9
    # The storage grows evenly to its maximum, and stays there.
    mean = most * (1 - most / (2 * saves)) if saves else 0.0
    # Each rank's last part is not full, so a request for each rank is added.
    writes = saves * (size / PART + plan.world_size)
    return StoragePlan(
        bytes=size,
        upload_seconds=seconds,
        load_seconds=seconds,
        saves=saves,
        kept=most,
        dollars=mean * monthly + options.store_write_price * writes / 1000,
        dollars_later=most * monthly,
    )


def describe_storage(plan: Plan, found: StoragePlan, options: CostOptions) -> str:
    """Return the prediction in words."""
    text = (
        f"{found.bytes / 1e9:,.3g} GB upload in {found.upload_seconds:,.3g} s and load in "
        f"{found.load_seconds:,.3g} s at {options.store_gb_per_second:g} GB/s for each node"
    )
    if not found.saves:
        return text
    interval = plan.config.checkpoint.save_interval
    return (
        f"{text}; --save-interval {interval} gives {found.saves:,.0f} a month for "
        f"${found.dollars:,.2f}, and ${found.dollars_later:,.2f} for each month that the last "
        f"{found.kept:,.0f} are kept"
    )
