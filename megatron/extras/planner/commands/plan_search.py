"""The search of layouts for a planned run: a table, a Pareto plot, and why a layout loses."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.plain_text import format_count
from megatron.config.fields import ConfigWithOrigin, all_fields, flatten
from megatron.extras.planner.commands.plan_cost import (
    EXPERT_MESSAGES,
    FLOAT8_ROUNDING,
    FLOAT8_SCALES,
    build_verdict_json,
    format_days,
    predict_days,
)
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.layers import Seconds
from megatron.extras.planner.cost.layout import RankLayout
from megatron.extras.planner.cost.memory import Verdict
from megatron.extras.planner.cost.search import (
    SearchResult,
    find_context_size,
    find_enough_devices,
    search_layouts,
)
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.prediction import (
    build_layout_rules,
    build_search_space,
    change_layout,
    describe_layout,
    describe_software,
    find_float8_obstacle,
    predict_plan,
    propose_float8,
)
from megatron.extras.step.engines import choose_engine
from megatron.plan.resolve import resolve
from megatron.plan.rules.finding import list_errors
from megatron.plan.rules.kernels import check_float8
from megatron.plan.run_plan import Plan

_SHOWN = 10
_SHOWN_FLAGS = ("batch.micro_batch_size", "parallel.zero_stage")
_MOST_DIGITS = 9
_INDENT = 50 * " "
"""Width of the columns before the layout."""
_EXPLAINED = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "micro-batch": "micro_batch",
    "virtual": "virtual",
    "zero": "zero_stage",
    "ep": "expert",
}
"""Key of --explain -> field of a layout."""


@dataclass(frozen=True)
class PlannedSearch:
    """The result of a search for a plan."""

    plan: Plan
    result: SearchResult
    configured: StepPrediction
    """The plan's own layout."""
    enough_devices: int | None = None
    """If no layout fits, a number of devices with which one does. None if none was found."""


def search_plan(
    plan: Plan, hardware: Hardware, *, allow_fp8: bool = False, devices: int | None = None
) -> PlannedSearch:
    """Search the layouts of the plan's model and batch.

    Args:
        plan: A plan without errors.
        hardware: The devices.
        allow_fp8: Whether each layout is also predicted with float8.
        devices: Number of devices. The layouts then have the plan's micro-batch, on which the loss
            of some runs depends. Default: the plan's number, with any micro-batch.

    Raises:
        ConfigError: No layout is legal, the hardware has no peak for fp32, or the plan cannot have
            float8.
    """
    # The search treats each ConfigError as a layout that is not legal. So this one is raised first.
    hardware.get_peak(half=describe_software(plan, hardware).half)
    space = build_search_space(plan, hardware)
    if devices is not None:
        plan = replace(plan, world_size=devices)
        size = plan.config.batch.micro_batch_size
        space = replace(space, devices=devices, micro_batch=size)
    if allow_fp8 and plan.config.precision.fp8_format is None:
        space = replace(
            space, float8_software=describe_software(_add_float8(plan, hardware), hardware)
        )
    # One rank may not be able to hold its part of a sequence. The batch may also have fewer samples
    # than there are ranks.
    if (longer := find_context_size(space)) is not None:
        space = longer
    found = search_layouts(space, _SHOWN)
    enough = None if found.fitting else find_enough_devices(space)
    return PlannedSearch(plan, found, predict_plan(plan, hardware), enough)


def _add_float8(plan: Plan, hardware: Hardware) -> Plan:
    """Return the plan with float8.

    Raises:
        ConfigError: The trainer refuses it, or the planner does not predict it.
    """
    config = replace(plan.config, precision=propose_float8(plan.config))
    problems = list_errors(check_float8(ConfigWithOrigin(config, {})))
    problems += choose_engine(config).list_unsupported(replace(plan, config=config))
    if obstacle := find_float8_obstacle(config, hardware):
        other = ", or use other --hardware" * (hardware.float8_tflops is None)
        problems.append(f"{obstacle}; leave it out{other}.")
    if problems:
        raise ConfigError(f"--allow-fp8: {'; '.join(problems)}")
    return replace(plan, config=config)


def format_flags(plan: Plan, layout: RankLayout, *, float8: bool = False) -> str:
    """Return the flags that choose a layout if they are appended to the plan's command.

    `float8` adds those that choose float8.
    """
    before = flatten(plan.config)
    config = change_layout(plan.config, layout)
    if float8:
        config = replace(config, precision=propose_float8(config))
    after = flatten(config)
    words: list[str] = []
    for dotted, value in after.items():
        field = all_fields()[dotted]
        # These two are what people look for first, so they are always shown.
        if value == before[dotted] and dotted not in _SHOWN_FLAGS:
            continue
        if field.is_bool:
            words.append(field.flag if value else field.negative_flag)
        else:
            # The command line reads None as an empty list.
            words += [field.flag, shlex.quote("None" if value == () else str(value))]
    return " ".join(words)


def _format_all_flags(prediction: StepPrediction, search: PlannedSearch) -> str:
    """Return the flags of a layout, and those of float8 if only the search proposes it."""
    return format_flags(search.plan, prediction.job.layout, float8=_is_proposed(prediction, search))


def _is_proposed(prediction: StepPrediction, search: PlannedSearch) -> bool:
    """Return whether a prediction has float8 that the plan does not have."""
    given = search.plan.config.precision.fp8_format is not None
    return prediction.job.software.float8 is not None and not given


def _build_candidate(prediction: StepPrediction, search: PlannedSearch) -> dict[str, Any]:
    return {
        "layout": prediction.job.layout.describe(),
        "flags": _format_all_flags(prediction, search),
        "other_virtual_stages": search.result.list_virtual_stages(prediction),
        "seconds": prediction.seconds,
        "days": _predict_days_if_it_fits(prediction, search),
        **build_verdict_json(prediction),
    }


def build_search_json(
    search: PlannedSearch, explained: StepPrediction | None = None
) -> dict[str, Any]:
    """Return the search as plain data.

    Args:
        search: The result of the search.
        explained: The layout of --explain. It and the fastest layout then have the seconds of each
            part of a step.
    """
    report = {
        "fastest": [_build_candidate(each, search) for each in search.result.fastest],
        "configured": _build_candidate(search.configured, search),
        "fitting": len(search.result.fitting),
        "uncertain": len(search.result.uncertain),
        "too_large": search.result.too_large,
        "smallest": _build_candidate(search.result.smallest, search),
        "enough_devices": search.enough_devices,
    }
    if explained is None:
        return report
    # The same parts as in the table of `format_explanation`.
    compared = {"explained": explained}
    if search.result.fastest:
        compared["fastest"] = search.result.fastest[0]
    costs = _list_costs(*compared.values())
    parts = {
        # Without the number of microbatches.
        name: {part.partition(" (")[0]: seconds[number] for part, seconds in costs}
        for number, name in enumerate(compared)
    }
    built = _build_candidate(explained, search)
    return {**report, "explained": built, "seconds_by_part": parts}


def format_search(search: PlannedSearch) -> Iterator[str]:
    """Yield lines about the fastest layouts, each with what it loses to the first one."""
    found = search.result
    hardware = search.configured.job.hardware
    total = len(found.fitting) + len(found.uncertain) + found.too_large
    devices = format_count(search.plan.world_size, "device")
    yield f"{total:,} layouts on {devices} with {hardware.memory_gib:g} GiB"
    yield (
        f"  {len(found.fitting):,} fit: at most {hardware.usable_bytes / 2**30:,.1f} GiB, which is "
        f"{100 * hardware.usable_share:g} % (--usable-share)"
    )
    yield f"  {len(found.uncertain):,} may fit: outside of this margin, and at most the memory"
    yield f"  {found.too_large:,} do not fit"
    if not found.fitting:
        yield _describe_shortage(search)
    yield (
        f"{'s/iteration':>12} {'run':>12} {'GiB':>6} {'memory':>7} {'MFU, %':>7}  layout, and what "
        "it loses to the first"
    )
    if not found.fastest:
        yield "the layout that needs least memory:"
        yield _format_candidate(found.smallest, search)
        yield "the layout that is given:"
        yield _format_candidate(search.configured, search)
        return
    # Each one is compared with the first.
    best = found.fastest[0]
    margin = best.verdict
    for prediction in found.fastest:
        if prediction.verdict is not margin:
            margin = prediction.verdict
            yield "outside of the margin, and faster than the first:"
        yield _format_candidate(prediction, search)
        if prediction is not best:
            yield f"{_INDENT}{explain_difference(prediction, best)}"
    yield f"flags of the first, after those of the command: {_format_all_flags(best, search)}"
    if _is_proposed(best, search):
        yield "float8 changes the numbers of this run (docs/float8.md)"
    if search.plan.can_mask_tokens(training=True) and search.plan.config.loss.loss_mean != "step":
        yield "another micro-batch size changes the loss of this run (--loss-mean)"
    yield "the layout that is given:"
    yield _format_candidate(search.configured, search)
    if search.configured.seconds > best.seconds or search.configured.verdict is not Verdict.FITS:
        yield f"{_INDENT}{explain_difference(search.configured, best)}"


def _describe_shortage(search: PlannedSearch) -> str:
    """Return what is lacking if no layout fits."""
    needed = search.result.smallest.peak_bytes / 2**30
    usable = search.configured.job.hardware.usable_bytes / 2**30
    text = f"none fits: the smallest need is {needed:,.1f} GiB, {needed - usable:,.1f} too much."
    precision = search.plan.config.precision
    if not (precision.bf16 or precision.fp16):
        text += " The plan is in fp32, and --bf16 needs less."
    if search.enough_devices is not None:
        return f"{text} {search.enough_devices:,} devices would do (--world-size)"
    return f"{text} No number of devices was found that helps. Use devices with more memory"


def _predict_days_if_it_fits(prediction: StepPrediction, search: PlannedSearch) -> float | None:
    if prediction.verdict is Verdict.DOES_NOT_FIT:
        return None
    return predict_days(search.plan, prediction)


def _format_candidate(prediction: StepPrediction, search: PlannedSearch) -> str:
    mfu = prediction.compute_mfu(causal=False)
    share = prediction.peak_bytes / prediction.job.hardware.memory_bytes
    mark = "" if prediction.verdict is Verdict.FITS else f"  {prediction.verdict.upper()}"
    days = _predict_days_if_it_fits(prediction, search)
    others = search.result.list_virtual_stages(prediction)
    stages = f" (or {', '.join(map(str, others))} virtual stages)" if others else ""
    float8 = " float8" * (prediction.job.software.float8 is not None)
    seconds = f"{prediction.seconds:,.3f}"
    if prediction.seconds < 1:
        seconds = f"{prediction.seconds:.3g}"
    return (
        f"{seconds:>12} {'-' if days is None else format_days(days):>12} "
        f"{prediction.peak_bytes / 2**30:>6.1f} {100 * share:>5.0f} % {100 * mfu:>7.1f}  "
        f"{prediction.job.layout.describe()}{stages}{float8}{mark}"
    )


def explain_difference(prediction: StepPrediction, best: StepPrediction) -> str:
    """Return the reasons for which a layout is slower than the best one, the largest first."""
    if prediction.verdict is Verdict.DOES_NOT_FIT:
        over = (prediction.peak_bytes - prediction.job.hardware.memory_bytes) / 2**30
        return f"does not fit: {over:,.1f} GiB too much ({_name_largest_kind(prediction)})"
    lost = [
        (name, own - fastest)
        for name, (own, fastest) in _list_costs(prediction, best)
        if own - fastest > 0.002 * best.seconds
    ]
    lost.sort(key=lambda each: -each[1])
    reasons = [f"{name} +{seconds:,.3g} s" for name, seconds in lost[:4]]
    gained = best.seconds - prediction.seconds
    if gained > 0.002 * best.seconds:
        # Only a layout that may fit is faster than the first one.
        reasons.insert(0, f"{gained:,.3g} s faster")
    return "; ".join(reasons) or "about as fast"


def _name_largest_kind(prediction: StepPrediction) -> str:
    # From the kind that takes most memory, the user sees what to shard or to recompute.
    fullest = max(prediction.memory, key=lambda rank: rank.total)
    kinds = sorted(vars(fullest).items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name.replace('_', ' ')} {size / 2**30:,.1f}" for name, size in kinds)


def _list_costs(*predictions: StepPrediction) -> list[tuple[str, tuple[float, ...]]]:
    """Return the parts of a step that can be compared, each with the seconds of each prediction.

    The parts of float8 and of experts, and the time between steps, are left out if no prediction
    has them.
    """
    pipeline = (
        f"bubble and messages of the pipeline ({predictions[0].schedule.microbatches} microbatches)"
    )
    optional = (FLOAT8_ROUNDING, FLOAT8_SCALES, EXPERT_MESSAGES, "between steps")
    measured = []
    for prediction in predictions:
        busiest = max(prediction.rank_seconds, key=lambda each: each.total)
        # The passes without the recomputation.
        passes = _remove_recomputation(prediction)
        of_weights = prediction.weight_scale_seconds
        measured.append(
            {
                "recomputation": _sum_kernels(busiest) - _sum_kernels(passes),
                "matrix products and attention": passes.gemm + passes.attention,
                "other kernels": passes.pointwise,
                FLOAT8_ROUNDING: passes.rounding + of_weights.rounding,
                FLOAT8_SCALES: busiest.scales + of_weights.scales,
                _name_layer_messages(predictions): busiest.tensor,
                EXPERT_MESSAGES: busiest.experts,
                pipeline: prediction.pipeline_seconds - busiest.total,
                "data-parallel communication": prediction.data_parallel.waited,
                "optimizer": prediction.optimizer_seconds,
                "between steps": prediction.job.software.step_gap,
            }
        )
    costs = [(name, tuple(each[name] for each in measured)) for name in measured[0]]
    return [(name, seconds) for name, seconds in costs if name not in optional or any(seconds)]


def _name_layer_messages(predictions: Sequence[StepPrediction]) -> str:
    """Return which ranks send the messages within a layer, in one of several layouts."""
    layouts = [prediction.job.layout for prediction in predictions]
    if all(layout.context == 1 for layout in layouts):
        return "tensor-parallel communication"
    if all(layout.tensor == 1 for layout in layouts):
        return "context-parallel communication"
    return "tensor- and context-parallel communication"


def _sum_kernels(seconds: Seconds) -> float:
    return seconds.gemm + seconds.attention + seconds.pointwise + seconds.rounding


def _remove_recomputation(prediction: StepPrediction) -> Seconds:
    """Return the seconds of the busiest rank in the same layout without recomputation."""
    job = prediction.job
    layout = replace(job.layout, recompute="none")
    return max(
        StepPrediction(replace(job, layout=layout)).rank_seconds, key=lambda each: each.total
    )


def predict_explained(text: str, plan: Plan, hardware: Hardware) -> StepPrediction:
    """Predict a step in the layout that a text such as "tp=8,pp=6,micro-batch=2" describes.

    What it does not give is as in the plan. The data-parallel size follows from the number of
    devices.

    Raises:
        ConfigError: The text cannot be read, or the trainer refuses the layout.
    """
    layout = _parse_layout(text, plan)
    config = change_layout(plan.config, layout)
    # The same rules as for the flags of a command. The position of the plan is not known here.
    changed = resolve(config, plan.world_size, consumed_samples=None, vocab_size=plan.vocab_size)
    problems = list(changed.errors)
    if not problems and not build_layout_rules(plan)(describe_layout(changed)):
        problems.append("a batch size of the ramp-up does not fit; use a smaller micro-batch.")
    problems += choose_engine(config).list_unsupported(changed)
    if problems:
        raise ConfigError(f"--explain {text}: {'; '.join(problems)}")
    return predict_plan(changed, hardware)


def _parse_layout(text: str, plan: Plan) -> RankLayout:
    """Return the layout that a text describes. Only its virtual stages are checked."""
    # The plan gives what the text leaves out. It also gives what has no effect without tensor
    # parallelism, because the text may ask for that.
    sequence_parallel = plan.config.parallel.sequence_parallel
    layout = replace(
        describe_layout(plan),
        sequence_parallel=sequence_parallel,
        partition_inputs=plan.config.recompute.partition_activations and not sequence_parallel,
    )
    keys = set()
    for part in text.replace(" ", "").split(","):
        key, _, value = part.partition("=")
        if key in keys:
            raise ConfigError(f"--explain {text}: {key} is given twice; remove one.")
        keys.add(key)
        layout = _set_part(layout, key, value, text)
    if layout.tensor == 1:
        # They shard over the tensor-parallel ranks.
        layout = replace(layout, sequence_parallel=False, partition_inputs=False)
    layers = plan.shape.config.num_layers
    stages = layout.pipeline * layout.virtual
    if layout.virtual > 1 and (layers % stages or layout.pipeline == 1):
        raise ConfigError(
            f"--explain {text}: {layout.virtual} virtual stages on each of {layout.pipeline} "
            f"pipeline ranks need a pipeline, and pp x virtual = {stages} must divide the "
            f"{layers} layers."
        )
    data = max(1, plan.world_size // (layout.tensor * layout.pipeline * layout.context))
    # Groups that share a copy of the model are kept where they fit.
    shard = layout.shard
    if plan.copies == 1 or shard is None or data * layout.context % shard:
        shard = None
    return replace(layout, data=data, shard=shard)


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
            f"{', '.join(_EXPLAINED)} and recompute, as in tp=8,pp=6,micro-batch=2."
        )
    lowest = int(key != "zero")
    digits = value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS
    if not digits or int(value) < lowest:
        raise ConfigError(
            f"--explain {text}: {key} is {value!r}; it must be a whole number from {lowest} to "
            f"{10**_MOST_DIGITS - 1:,}."
        )
    if key == "zero" and int(value) > 3:
        raise ConfigError(f"--explain {text}: zero is {value}; ZeRO has the stages 0 to 3.")
    changed: dict[str, Any] = {_EXPLAINED[key]: int(value)}
    return replace(layout, **changed)


def format_explanation(prediction: StepPrediction, search: PlannedSearch) -> Iterator[str]:
    """Yield lines about why a layout loses to the fastest one, part by part."""
    yield "explained:"
    yield _format_candidate(prediction, search)
    if not search.result.fastest:
        yield "no layout fits, so there is nothing to compare with"
        return
    best = search.result.fastest[0]
    yield "the fastest:"
    yield _format_candidate(best, search)
    yield f"{'seconds of a step':<55}{'explained':>12}{'fastest':>12}{'lost':>10}"
    for name, (own, fastest) in _list_costs(prediction, best):
        # A difference of -0.0001 would be shown as -0.000.
        lost = round(own - fastest, 3) + 0.0
        yield f"{name:<55}{own:>12,.3f}{fastest:>12,.3f}{lost:>+10,.3f}"
    yield explain_difference(prediction, best)
    layout = prediction.job.layout
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield (
            "The search gives each layout with TP --sequence-parallel. Add it to the command to "
            "explain such a layout."
        )
