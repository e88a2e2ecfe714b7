"""The search of layouts for a planned run: a table, a Pareto plot, and why a layout loses."""

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron.cost.hardware import Hardware
from megatron.cost.layout import RankLayout
from megatron.cost.search import (
    SearchResult,
    SearchSpace,
    find_pareto_front,
    search_layouts,
)
from megatron.cost.step import StepJob, StepPrediction
from megatron.errors import ConfigError
from megatron.figure import make_figure, save_figure
from megatron.plan import Plan
from megatron.plan_prediction import describe_layout, describe_software

_SHOWN = 10
_PARTS = ("gemm", "attention", "pointwise", "tensor", "gaps")
_EXPLAINED = {
    "tp": "tensor",
    "pp": "pipeline",
    "micro-batch": "micro_batch",
    "virtual": "virtual",
    "zero": "zero_stage",
}
"""Key of --explain -> field of a layout."""


@dataclass(frozen=True)
class PlannedSearch:
    """The result of a search for a plan."""

    result: SearchResult
    configured: StepPrediction
    """The plan's own layout."""


def search_plan(plan: Plan, hardware: Hardware) -> PlannedSearch:
    """Search the layouts of the plan's model, batch and number of devices.

    Raises:
        ConfigError: No layout is legal, or the hardware has no peak for fp32.
    """
    software = describe_software(plan)
    # The search takes an error for a layout that is not legal, so this one is raised before.
    hardware.get_peak(half=software.half)
    space = SearchSpace(plan.shape, plan.batch_size.final, plan.world_size, hardware, software)
    return PlannedSearch(search_layouts(space, _SHOWN), predict_layout(plan, hardware))


def predict_layout(
    plan: Plan, hardware: Hardware, layout: RankLayout | None = None
) -> StepPrediction:
    """Predict a step of the plan in `layout`. Default: its own layout."""
    job = StepJob(
        plan.shape,
        layout or describe_layout(plan),
        plan.batch_size.final,
        describe_software(plan),
        hardware,
    )
    return StepPrediction(job)


def format_flags(layout: RankLayout, layers: int) -> str:
    """Return the flags that choose a layout."""
    flags = []
    if layout.tensor > 1:
        flags.append(f"--tensor-model-parallel-size {layout.tensor}")
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.pipeline > 1:
        flags.append(f"--pipeline-model-parallel-size {layout.pipeline}")
    if layout.virtual > 1:
        each = layers // (layout.pipeline * layout.virtual)
        flags.append(f"--num-layers-per-virtual-pipeline-stage {each}")
    elif layout.partition != "uniform":
        flags.append(f"--pp-partition-method '{layout.partition}'")
    flags.append(f"--micro-batch-size {layout.micro_batch}")
    if layout.recompute == "full":
        flags.append("--checkpoint-activations")
        if layout.recomputed_share != 1:
            flags.append(f"--checkpoint-fraction {layout.recomputed_share}")
    elif layout.recompute == "selective":
        flags.append("--recompute-attention-core")
    flags.append(f"--zero-stage {layout.zero_stage}")
    if layout.copies > 1 and layout.zero_stage:
        flags.append(f"--hsdp-shard-size {layout.shard_size}")
    return " ".join(flags)


def build_search_json(
    search: PlannedSearch, explained: StepPrediction | None = None
) -> dict[str, Any]:
    """Return the search as plain data.

    Args:
        search: The result of the search.
        explained: The layout of --explain. It and the fastest layout then have the seconds of each
            part of a step.
    """

    def build(prediction: StepPrediction) -> dict[str, Any]:
        return {
            "layout": prediction.job.layout.describe(),
            "flags": format_flags(prediction.job.layout, prediction.job.shape.config.num_layers),
            "seconds": prediction.seconds,
            "peak_bytes": prediction.peak_bytes,
            "fits": prediction.fits,
        }

    report = {
        "fastest": [build(prediction) for prediction in search.result.fastest],
        "configured": build(search.configured),
        "fitting": len(search.result.fitting),
        "too_large": search.result.too_large,
    }
    if explained is None:
        return report
    # The same parts as in the table of `format_explanation`.
    compared = {"explained": explained}
    if search.result.fastest:
        compared["fastest"] = search.result.fastest[0]
    # Without the number of microbatches, both layouts have the same keys.
    parts = {
        name: {part.partition(" (")[0]: seconds for part, seconds in _list_costs(prediction)}
        for name, prediction in compared.items()
    }
    return {**report, "explained": build(explained), "seconds_by_part": parts}


def format_search(search: PlannedSearch) -> list[str]:
    """Format the fastest layouts, each with what it loses to the first one."""
    found = search.result
    total = len(found.fitting) + found.too_large
    lines = [
        f"{total:,} layouts, of which {len(found.fitting):,} fit in "
        f"{search.configured.job.hardware.memory_gib:g} GiB",
        f"{'s/iteration':>12} {'GiB':>6} {'MFU, %':>7}  layout, and what it loses to the fastest",
    ]
    if not found.fastest:
        lines.append("none fits: use more devices, or devices with more memory")
        return [*lines, "the layout that is given:", _format_candidate(search.configured)]
    # Each one is compared with the first.
    best = found.fastest[0]
    for prediction in found.fastest:
        lines.append(_format_candidate(prediction))
        if prediction is not best:
            lines.append(f"{'':>29}{explain_difference(prediction, best)}")
    layers = best.job.shape.config.num_layers
    # Flags of the command that are not repeated, such as --checkpoint-activations, must go.
    flags = format_flags(best.job.layout, layers)
    lines.append(f"flags of the fastest, in place of the command's flags of layout: {flags}")
    lines += ["the layout that is given:", _format_candidate(search.configured)]
    if search.configured.seconds > best.seconds or not search.configured.fits:
        lines.append(f"{'':>29}{explain_difference(search.configured, best)}")
    return lines


def _format_candidate(prediction: StepPrediction) -> str:
    mfu = prediction.compute_tflops(hardware=False) / prediction.job.hardware.peak_tflops
    return (
        f"{prediction.seconds:>12,.3f} {prediction.peak_bytes / 2**30:>6.1f} {100 * mfu:>7.1f}  "
        f"{prediction.job.layout.describe()}"
    )


def explain_difference(prediction: StepPrediction, best: StepPrediction) -> str:
    """Return the reasons for which a layout is slower than the best one, the largest first."""
    if not prediction.fits:
        over = (prediction.peak_bytes - prediction.job.hardware.memory_bytes) / 2**30
        return f"does not fit: {over:,.1f} GiB too much ({_name_largest_kind(prediction)})"
    lost = [
        (name, theirs - ours)
        for (name, theirs), (_, ours) in zip(
            _list_costs(prediction), _list_costs(best), strict=True
        )
        if theirs - ours > 0.002 * best.seconds
    ]
    if not lost:
        return "about as fast"
    lost.sort(key=lambda each: -each[1])
    return "; ".join(f"{name} +{seconds:,.3g} s" for name, seconds in lost[:4])


def _name_largest_kind(prediction: StepPrediction) -> str:
    # From the kind that takes most memory, the user sees what to shard or to recompute.
    fullest = max(prediction.memory, key=lambda rank: rank.total)
    kinds = sorted(vars(fullest).items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name.replace('_', ' ')} {size / 2**30:,.1f}" for name, size in kinds)


def _list_costs(prediction: StepPrediction) -> list[tuple[str, float]]:
    """Return the seconds of a step in parts that can be compared between layouts."""
    busiest = max(prediction.rank_seconds, key=lambda each: each.total)
    m = prediction.schedule.microbatches
    recomputed = _sum_recomputed(prediction)
    return [
        ("recomputation", recomputed),
        ("matrix products", busiest.gemm + busiest.attention - recomputed),
        ("memory-bound kernels", busiest.pointwise),
        ("tensor-parallel communication", busiest.tensor),
        (
            f"bubble and messages of the pipeline ({m} microbatches)",
            prediction.pipeline_seconds - busiest.total,
        ),
        ("data-parallel communication", prediction.data_parallel.waited),
        ("optimizer", prediction.optimizer_seconds),
    ]


def _sum_recomputed(prediction: StepPrediction) -> float:
    """Return the seconds of matrix products and attention that recomputation adds."""
    job = prediction.job
    if job.layout.recompute == "none":
        return 0.0
    # The difference to the same layout without recomputation.
    without = StepPrediction(replace(job, layout=replace(job.layout, recompute="none")))
    busiest = max(prediction.rank_seconds, key=lambda each: each.total)
    same = max(without.rank_seconds, key=lambda each: each.total)
    return busiest.gemm + busiest.attention - same.gemm - same.attention


def parse_layout(text: str, plan: Plan) -> RankLayout:
    """Return the layout that a text such as "tp=8,pp=6,micro-batch=4" describes.

    What it does not give is as in the plan. The data-parallel size follows from the number of
    devices.

    Raises:
        ConfigError: The text cannot be read, or the sizes do not divide the devices or the batch.
    """
    # The plan gives what the text leaves out.
    layout = describe_layout(plan)
    for part in text.replace(" ", "").split(","):
        key, _, value = part.partition("=")
        layout = _set_part(layout, key, value, text)
    grid = layout.tensor * layout.pipeline
    if grid < 1 or plan.world_size % grid:
        raise ConfigError(
            f"--explain {text}: tp x pp = {grid} must divide the {plan.world_size} devices."
        )
    heads = plan.shape.config.num_attention_heads
    if heads % layout.tensor or plan.shape.ffn_hidden_size % layout.tensor:
        raise ConfigError(
            f"--explain {text}: tp must divide the {heads} attention heads and the feed-forward "
            f"size {plan.shape.ffn_hidden_size}."
        )
    data = plan.world_size // grid
    # Groups of HSDP stay as they are, if they divide the data-parallel ranks.
    has_groups = plan.copies > 1 and plan.shard_size > 1 and data % plan.shard_size == 0
    layout = replace(layout, data=data, shard=plan.shard_size if has_groups else None)
    share = layout.data * layout.micro_batch
    if plan.batch_size.final % share:
        raise ConfigError(
            f"--explain {text}: the batch of {plan.batch_size.final} samples must be a multiple of "
            f"data-parallel size x micro-batch = {share}."
        )
    return layout


def _set_part(layout: RankLayout, key: str, value: str, text: str) -> RankLayout:
    """Return the layout with one entry of --explain."""
    if key == "recompute":
        if value == "none":
            return replace(layout, recompute="none")
        if value == "full":
            return replace(layout, recompute="full", recomputed_share=Fraction(1))
        try:
            share = Fraction(value)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not 0 < share <= 1:
            raise ConfigError(
                f"--explain {text}: recompute is {value!r}; give none, full, or a share such as "
                "1/2."
            )
        return replace(layout, recompute="full", recomputed_share=share)
    if key not in _EXPLAINED:
        raise ConfigError(
            f"--explain {text}: {key!r} is not a part of a layout; use "
            f"{', '.join(_EXPLAINED)} and recompute, as in tp=8,pp=6,micro-batch=4."
        )
    lowest = 0 if key == "zero" else 1
    if not value.isascii() or not value.isdigit() or int(value) < lowest:
        raise ConfigError(
            f"--explain {text}: {key} is {value!r}; it must be a whole number of at least {lowest}."
        )
    if key == "zero" and int(value) > 3:
        raise ConfigError(f"--explain {text}: zero is {value}; ZeRO has the stages 0 to 3.")
    changed: dict[str, Any] = {_EXPLAINED[key]: int(value)}
    return replace(layout, **changed)


def format_explanation(prediction: StepPrediction, search: PlannedSearch) -> list[str]:
    """Format why a layout loses to the fastest one, part by part."""
    lines = ["explained:", _format_candidate(prediction)]
    if not search.result.fastest:
        return [*lines, "no layout fits, so there is nothing to compare with"]
    best = search.result.fastest[0]
    lines += ["the fastest:", _format_candidate(best)]
    lines.append(f"{'seconds of a step':<55}{'explained':>12}{'fastest':>12}{'lost':>10}")
    for (name, theirs), (_, ours) in zip(_list_costs(prediction), _list_costs(best), strict=True):
        lines.append(f"{name:<55}{theirs:>12,.3f}{ours:>12,.3f}{theirs - ours:>+10,.3f}")
    lines.append(explain_difference(prediction, best))
    layout = prediction.job.layout
    if layout.tensor > 1 and not layout.sequence_parallel:
        lines.append(
            "The search gives each layout with TP --sequence-parallel. Add it to the command to "
            "explain such a layout."
        )
    return lines


def draw_pareto(search: PlannedSearch, path: Path) -> None:
    """Draw time against memory of all layouts that fit, and the front that none beats in both.

    Raises:
        ConfigError: matplotlib is absent, or the file cannot be written.
    """
    figure = make_figure(8, 5)
    axes = figure.add_subplot()
    fitting = search.result.fitting
    # Most layouts are not simulated, so the axis has lower bounds.
    front = find_pareto_front(fitting)
    axes.scatter(
        [each.lower_bound for each in fitting],
        [each.peak_bytes / 2**30 for each in fitting],
        s=8,
        color="#bbbbbb",
        label="layouts that fit",
    )
    axes.plot(
        [each.lower_bound for each in front],
        [each.peak_bytes / 2**30 for each in front],
        marker="o",
        markersize=4,
        color="#4477aa",
        label="no other is better in both",
    )
    given = search.configured
    axes.scatter(
        [given.lower_bound], [given.peak_bytes / 2**30], marker="x", color="#ee6677", label="given"
    )
    # The slowest layouts take a hundred times as long as the fastest.
    axes.set_xscale("log")
    axes.set_xlabel("s/iteration, at least")
    axes.set_ylabel("peak memory, GiB")
    axes.legend(fontsize=8)
    try:
        save_figure(figure, path)
    except OSError as failure:
        raise ConfigError(f"--pareto {path}: {failure.strerror}; choose another path.") from failure
