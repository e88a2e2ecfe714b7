"""The comparison of the records of all ranks with the reference.

Each shard of each rank is compared, also replicas that no checkpoint stores. Errors are norms of
differences, relative to the norm of the expected tensor plus a small share of the norm of all
tensors of its kind. A gradient that is zero in exact arithmetic has no scale of its own.

One process rounds the operands of products in float8 again from the complete tensor. The largest
value of an operand is found over all ranks that have a part of it. Its scale is the largest power
of two with which it fits into the format. So scales and rounded values must be equal, whichever
ranks exchange messages. See decision 052.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.extras.planner.verify.recording import (
    ActivationTrace,
    RankRecord,
    RecordedStep,
    ShardCopy,
)
from megatron.extras.planner.verify.reduction import DROPPED
from megatron.extras.planner.verify.reference import ReferenceRun, ReferenceStep
from megatron.extras.planner.verify.reference_layers import list_microbatches
from megatron.extras.planner.verify.reference_optimizer import compute_clipping, get_decays
from megatron.model.inputs import Inputs
from megatron.parallel.grid import Grid, GridCoordinate
from megatron.plan.run_plan import Plan

BOUND = 1e-5
OWN_NORM_BOUND = 1e-6
"""Bound of a norm beside the norm of the same gradients, which only the order of the sum changes.
The parameters of some heads may be less than 1e-5 of the norm."""
SHARE = 3e-3
"""Share of the norm of all tensors that is added to the norm of each."""
_DATA = "labels, masks and positions"
COMPARISONS: tuple[str, ...] = (
    # The loaded state comes before the loss of the step that uses it.
    *("samples", _DATA, "learning rate", "initial weights", "state after the resume"),
    *("loss", "gradient norm", "parts of the norm", "gradients", "moments", "weights", "overflow"),
    "step count",
)
"""The comparisons in the order of a step, so the first one that fails is closest to the cause."""


@dataclass(frozen=True)
class ComparedValue:
    """One comparison of one tensor or number."""

    comparison: str
    iteration: int
    subject: str
    """What was compared, and on which rank."""
    error: float
    value: float
    """The copy's number, or the norm of its tensor."""
    expected: float
    bound: float = BOUND

    def __str__(self) -> str:
        """Return what was found as one sentence."""
        return (
            f"iteration {self.iteration}, {self.subject}: {self.value:.7g}, expected "
            f"{self.expected:.7g} (relative error {self.error:.1e})"
        )


@dataclass(frozen=True)
class ComparedRow:
    """All values of one comparison."""

    comparison: str
    compared: int
    """Number of tensors or numbers."""
    error: float
    """The largest error."""
    failure: ComparedValue | None = None
    """The first value above the bound. A comparison in the run's own precision has none."""
    bound: float = BOUND

    @property
    def passed(self) -> bool:
        """Whether the error is at most the bound. A number that is not finite is above it."""
        return self.error <= self.bound


def compare_records(
    plan: Plan, reference: ReferenceRun, launches: Sequence[Sequence[RankRecord]]
) -> list[ComparedRow]:
    """Compare all launches of a copy with the reference.

    Args:
        plan: The plan of the copy.
        reference: The reference of the same plan.
        launches: For each launch, the record of each rank.
    """
    findings = [
        finding
        for ranks in launches
        for rank, record in enumerate(ranks)
        for finding in _compare_rank(plan, reference, record, f"rank {rank} ({record.coordinate})")
    ]
    findings += _compare_parts_of_norm(plan.config.optimizer, launches[0])
    return summarise(findings, COMPARISONS)


def summarise(findings: Sequence[ComparedValue], comparisons: Sequence[str]) -> list[ComparedRow]:
    """Return the rows of these comparisons, which are in the order of a step."""
    rows = []
    for comparison in comparisons:
        # Findings are in the order of ranks. The rows are in the order of a step.
        own = [finding for finding in findings if finding.comparison == comparison]
        # A number that is not finite is a failure.
        failures = [finding for finding in own if not finding.error <= finding.bound]
        first = min(failures, key=lambda finding: finding.iteration, default=None)
        # A NaN is larger than any number here.
        errors = [math.inf if math.isnan(finding.error) else finding.error for finding in own]
        # A run without a decoupled rate or a resume has no finding for some rows.
        if own:
            rows.append(ComparedRow(comparison, len(own), max(errors), first, own[0].bound))
    return rows


def find_first_failure(rows: Sequence[ComparedRow]) -> ComparedValue | None:
    """Return what fails first: in the earliest iteration, and there in the order of a step."""
    failures = [row.failure for row in rows if row.failure is not None]
    return min(failures, key=lambda failure: failure.iteration, default=None)


def _compare_rank(
    plan: Plan, reference: ReferenceRun, record: RankRecord, name: str
) -> Iterator[ComparedValue]:
    """Yield all findings of one rank in one launch. Subjects end with the rank's name."""
    for step in record.steps:
        number = step.iteration
        expected = reference.steps[number - 1]
        # The state before the first step of a launch is what was initialised or loaded.
        if step is record.steps[0] and number == 1:
            initial = {"weight": reference.initial}
            yield from _compare_state("initial weights", number, step.before, initial, name)
        elif step is record.steps[0]:
            earlier = reference.steps[number - 2]
            state = ("state after the resume", number, step.before, earlier.state, name)
            yield from _compare_state(*state, earlier.rates[0])
        yield from _compare_data(plan, step, expected.inputs, record.coordinate.data, name)
        yield from _compare_numbers(step, expected, name)
        if number == DROPPED:
            yield from _check_dropped(step, name)
            continue
        yield from _compare_gradients(plan.config.optimizer, step, expected, name)
        yield from _compare_state("", number, step.after, expected.state, name, expected.rates[0])


def _check_dropped(step: RecordedStep, name: str) -> Iterator[ComparedValue]:
    """Compare weights and moments before and after a step with infinite gradients on one stage."""
    # The rank must also know that the step was dropped, because its counters depend on it.
    applied = float(step.result.applied)
    yield ComparedValue(
        "overflow", step.iteration, f"step applied on {name}", applied, applied, 0.0
    )
    for before, after in zip(step.before, step.after, strict=True):
        subject = f"{after.kind} of {after.name} on {name}"
        yield compare_exactly("overflow", step.iteration, subject, after.tensor, before.tensor)


def _compare_data(
    plan: Plan, step: RecordedStep, expected: Inputs, data: int, name: str
) -> Iterator[ComparedValue]:
    places = [
        samples
        for _, rank, samples in list_microbatches(plan, len(expected.tokens))
        if rank == data
    ]
    found = len(step.microbatches)
    subject = f"number of microbatches on {name}"
    # Otherwise `zip` below would leave microbatches out.
    yield _compare_numerically("samples", step.iteration, subject, found, len(places))
    for number, (samples, microbatch) in enumerate(zip(places, step.microbatches, strict=False)):
        for field in ("tokens", "labels", "loss_mask", "position_ids"):
            comparison = {"tokens": "samples"}.get(field, _DATA)
            whole = getattr(expected, field)
            part = None if whole is None else whole[samples]
            subject = f"{field} of microbatch {number} on {name}"
            tensor = getattr(microbatch, field)
            yield compare_exactly(comparison, step.iteration, subject, tensor, part)
        # Bounds are tuples of Python integers.
        bounds = expected.documents and expected.documents[samples]
        subject = f"documents of microbatch {number} on {name}"
        error = float(microbatch.documents != bounds)
        yield ComparedValue(_DATA, step.iteration, subject, error, 0.0, 0.0)


def compare_exactly(
    comparison: str, iteration: int, subject: str, found: Tensor | None, expected: Tensor | None
) -> ComparedValue:
    """Compare tensors that must be equal. The error is the share of elements that differ."""
    if found is None or expected is None or found.shape != expected.shape:
        error = float(found is not None or expected is not None)
        return ComparedValue(comparison, iteration, subject, error, math.nan, math.nan)
    # A rank may hold no element of a small parameter, and the mean of no element is NaN.
    differs = found != expected
    error = float(differs.float().mean()) if differs.any() else 0.0
    sums = float(found.double().sum()), float(expected.double().sum())
    return ComparedValue(comparison, iteration, subject, error, *sums)


def _compare_numerically(
    comparison: str, iteration: int, subject: str, value: float, wanted: float
) -> ComparedValue:
    # If a count or a rate is 0, the error is the absolute difference.
    error = abs(value - wanted) / (abs(wanted) or 1.0)
    return ComparedValue(comparison, iteration, subject, error, value, wanted)


def _compare_numbers(
    step: RecordedStep, expected: ReferenceStep, name: str
) -> Iterator[ComparedValue]:
    # If only one of them has a decoupled rate, the other is NaN, which is a failure.
    decoupled = [
        math.nan if rates[1] is None else rates[1] for rates in (step.rates, expected.rates)
    ]
    numbers = [
        ("learning rate", step.rates[0], expected.rates[0]),
        ("loss", step.result.loss, expected.loss),
        ("step count", step.step_count, step.iteration - (step.iteration >= DROPPED)),
    ]
    if step.iteration != DROPPED:
        numbers.append(("gradient norm", step.result.grad_norm, expected.grad_norm))
    if step.rates[1] is not None or expected.rates[1] is not None:
        numbers.append(("learning rate", decoupled[0], decoupled[1]))
    for comparison, value, wanted in numbers:
        subject = f"{comparison} on {name}"
        yield _compare_numerically(comparison, step.iteration, subject, value, wanted)


def _compare_gradients(
    config: OptimizerConfig, step: RecordedStep, expected: ReferenceStep, name: str
) -> Iterator[ComparedValue]:
    """Compare the gradients that the first moments contain, before clipping."""
    decays = get_decays(config)
    # The copy's own norm, so that a wrong norm is not reported as wrong gradients.
    clipped = compute_clipping(config, step.result.grad_norm)
    for before, after in zip(step.before, step.after, strict=True):
        if after.kind not in decays:
            continue
        # m' = b m + (1 - b) g for each of these moments.
        decay = decays[after.kind]
        gradient = (after.tensor - decay * before.tensor) / ((1 - decay) * clipped)
        floor = SHARE * expected.grad_norm
        # The subtraction of the moments rounds by a share of the old moment.
        floor += 0.1 * decay / (1 - decay) * float(before.tensor.norm()) / clipped
        found = replace(after, tensor=gradient)
        subject = f"{after.name} on {name}"
        yield _compare_shard("gradients", step.iteration, subject, found, expected.gradients, floor)


def _compare_parts_of_norm(
    config: OptimizerConfig, ranks: Sequence[RankRecord]
) -> Iterator[ComparedValue]:
    """Compare the norm of the first step with that of the gradients of all ranks.

    The reference's norm has other rounding errors, which hide what small parameters add to it.
    """
    # A launch may have ended with an error before the first step. The records of a launch are
    # missing if a rank was ended before it wrote its own.
    if not ranks or not all(record.steps for record in ranks):
        return
    steps = [record.steps[0] for record in ranks]
    norm = steps[0].result.grad_norm
    decays = get_decays(config)
    # Several ranks may hold the same shard. The moments of the first step are its gradients.
    shards = {
        (shard.name, shard.offset): shard.tensor.double() / (1 - decays[shard.kind])
        for step in steps
        for shard in step.after
        if shard.kind in decays
    }
    own = math.sqrt(sum(float(t.square().sum()) for t in shards.values()))
    own /= compute_clipping(config, norm)
    yield replace(
        _compare_numerically("parts of the norm", 1, "norm of all gradients", norm, own),
        bound=OWN_NORM_BOUND,
    )


def _compare_state(
    comparison: str,
    iteration: int,
    shards: Sequence[ShardCopy],
    expected: Mapping[str, dict[str, Tensor]],
    name: str,
    rate: float = 0.0,
) -> Iterator[ComparedValue]:
    """Compare weights and moments.

    Without a name of the comparison, they belong to the two comparisons "weights" and "moments".

    Args:
        comparison: The name of the comparison, or an empty text.
        iteration: The iteration.
        shards: What a rank holds.
        expected: Kind -> name -> complete tensor.
        name: Name of the rank.
        rate: The learning rate of the last step.
    """
    for kind, tensors in expected.items():
        # The norm of all tensors of a kind.
        total = math.sqrt(sum(float(t.square().sum()) for t in tensors.values()))
        for shard in shards:
            if shard.kind != kind:
                continue
            floor = SHARE * total
            if kind == "weight":
                # A weight may start at zero. Its scale is then the size of a few updates.
                floor = 5 * rate * math.sqrt(shard.tensor.numel()) + 1e-12
            found = comparison or {"weight": "weights"}.get(kind, "moments")
            subject = f"{kind} of {shard.name} on {name}"
            yield _compare_shard(found, iteration, subject, shard, tensors, floor)


def _compare_shard(
    comparison: str,
    iteration: int,
    subject: str,
    shard: ShardCopy,
    whole: dict[str, Tensor],
    floor: float,
) -> ComparedValue:
    """Compare a shard with its slice of the complete tensor of its name."""
    if shard.name not in whole:
        # The reference keeps no such state of this parameter.
        return ComparedValue(
            comparison, iteration, subject, math.inf, float(shard.tensor.norm()), 0.0
        )
    expected = shard.select(whole[shard.name])
    norm = float(expected.norm())
    # The last term is for an empty shard.
    error = float((shard.tensor - expected).norm()) / (norm + floor + 1e-30)
    return ComparedValue(comparison, iteration, subject, error, float(shard.tensor.norm()), norm)


COMPARISON = "scales and values of float8"


def compare_operands(
    ranks: Sequence[RankRecord], dtype: torch.dtype, gradients: torch.dtype
) -> Iterator[ComparedValue]:
    """Compare scales and values of each operand with those of one process. The error is a share.

    Args:
        ranks: The records of all ranks of a copy.
        dtype: The dtype that weights are rounded to before float8.
        gradients: The float8 format of gradients.
    """
    for steps in zip(*(rank.steps for rank in ranks), strict=True):
        weights = _join_weights(steps)
        groups = defaultdict(list)
        for number, (rank, step) in enumerate(zip(ranks, steps, strict=True)):
            at = rank.coordinate
            for index, operand in enumerate(step.operands):
                # Context-parallel ranks have other rows, and share the scale of a tensor only.
                context = 0
                if operand.by_row:
                    context = at.context
                key = at.pipeline, at.data, context, index, operand.name
                groups[key].append((f"rank {number} ({at})", at.tensor, operand))
        for (*_, name), parts in groups.items():
            kind = torch.float8_e4m3fn
            if name.startswith("gradient"):
                kind = gradients
            matrices = [operand.matrix for _, _, operand in parts if operand.matrix is not None]
            for rank_name, tensor, operand in parts:
                matrix, whole = operand.matrix, matrices
                compared = []
                if matrix is None:
                    assert operand.largest is not None, "a weight has it"
                    weight = weights[name.split()[0]].to(dtype)
                    matrix = torch.cat([weight[rows] for rows in operand.rows])
                    whole = [matrix if operand.by_row else weight]
                    rows = weight.float().abs().amax(1)
                    largest = rows if len(operand.largest) > 1 else rows.amax(0, keepdim=True)
                    compared = [("largest value", operand.largest, largest)]
                    # A row-parallel layer has some of the columns.
                    width = operand.values.shape[1]
                    matrix = matrix.split(width, 1)[tensor if width < matrix.shape[1] else 0]
                scale = _find_scale(whole, operand.by_row, kind)
                expected = (matrix.double() * scale).float().to(kind)
                compared += [
                    ("1 / scale", operand.inverse, scale.reciprocal().float()),
                    ("values", operand.values, expected),
                ]
                for what, found, wanted in compared:
                    subject = f"{what} of {name} on {rank_name}"
                    # A dropped step has infinite gradients, whose scale is 0.
                    plain = [x.float().nan_to_num() for x in (found, wanted)]
                    yield compare_exactly(COMPARISON, steps[0].iteration, subject, *plain)


def count_flips(copy: Sequence[RankRecord], single: RankRecord, step: int) -> tuple[int, int]:
    """Count the values in float8 of a step that differ from those of one process.

    Returns:
        How many differ at least, and of how many. An operand's values are compared by how often
        each number occurs, so two flips of opposite directions may hide each other.
    """
    found, expected = _count_codes(copy, step), _count_codes([single], step)
    flips = 0.0
    for name, counts in expected.items():
        # Replicas and recomputations multiply all counts of an operand by the same number.
        others = found[name] * (counts.sum() / found[name].sum())
        flips += float((others - counts).abs().sum()) / 2
    return round(flips), round(sum(float(counts.sum()) for counts in expected.values()))


def _count_codes(ranks: Sequence[RankRecord], step: int) -> dict[str, Tensor]:
    """Return how often each byte occurs in the values of an operand, fp64[256], by its name."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for operand in rank.steps[step].operands:
            codes = operand.values.contiguous().view(torch.uint8).flatten().long()
            counts = torch.bincount(codes, minlength=256).double()
            # Byte 128 is the zero with a sign.
            counts[0] += counts[128]
            counts[128] = 0
            found[operand.name] = found.get(operand.name, torch.zeros(256).double()) + counts
    return found


def _find_scale(matrices: Sequence[Tensor], by_row: bool, kind: torch.dtype) -> Tensor:
    """Return the largest power of two with which all values fit into a format, in fp64."""
    sizes = [x.double().abs() for x in matrices]
    largest = torch.stack([x.amax(1) if by_row else x.max() for x in sizes]).amax(0)
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    # torchao's lower limit, for a tensor of zeros.
    scale = torch.exp2((torch.finfo(kind).max / largest.clamp(min=1e-12)).log2().floor())
    return scale.unsqueeze(1) if by_row else scale


def _join_weights(steps: Sequence[RecordedStep]) -> dict[str, Tensor]:
    """Return the complete weights before a step, from the shards of all ranks."""
    shards = [s for step in steps for s in step.before if s.kind == "weight" and s.tensor.dim() > 1]
    weights: dict[str, Tensor] = {}
    for name in {shard.name for shard in shards}:
        own = [shard for shard in shards if shard.name == name]
        ends = [[o + n for o, n in zip(s.offset, s.tensor.shape, strict=True)] for s in own]
        weights[name] = torch.empty(tuple(map(max, zip(*ends, strict=True))))
        for shard in own:
            shard.select(weights[name]).copy_(shard.tensor)
    return weights


@dataclass(frozen=True)
class TracedRank:
    """The trace of one rank of the copy in one iteration."""

    rank: str
    """The rank's name for messages."""
    trace: ActivationTrace
    samples: Mapping[int, slice]
    """Number of a microbatch -> its samples in the global batch."""
    coordinate: GridCoordinate
    grid: Grid

    def select(self, whole: Tensor, part: Tensor, microbatch: int) -> Tensor | None:
        """Return this rank's part of [s, B, h], or None if the shapes do not fit.

        Args:
            whole: The reference's tensor of the complete batch.
            part: This rank's tensor, [s, b, h] or [s/t, b, h]. With context parallelism, read s/c
                for s.
            microbatch: The number of the microbatch.
        """
        selected = whole[:, self.samples[microbatch]]
        if self.grid.context > 1:
            # A rank has an early and a late part of the sequence.
            parts = selected.chunk(2 * self.grid.context)
            number = self.coordinate.context
            selected = torch.cat((parts[number], parts[-1 - number]))
        # With sequence parallelism, the rank has its slice of the sequence.
        if selected.shape[0] == part.shape[0] * self.grid.tensor:
            selected = selected.chunk(self.grid.tensor)[self.coordinate.tensor]
        return selected if selected.shape == part.shape else None


def find_first_difference(
    reference: ActivationTrace, ranks: Sequence[TracedRank], weight_ranks: int, bound: float
) -> str:
    """Return a text about the first tensor that differs by more than the bound, forward first.

    Args:
        reference: The record of one process, whose only microbatch is the global batch.
        ranks: The records of all ranks.
        weight_ranks: Number of data x context ranks. Gradients of a rank are those of its own mean
            loss.
        bound: The largest relative error.
    """
    for attribute, what, factor in (
        ("outputs", "forward pass, output of", 1.0),
        ("gradients", "backward pass, gradient of the output of", 1.0 / weight_ranks),
    ):
        for (_, operator), whole in getattr(reference, attribute).items():
            for rank in ranks:
                for (microbatch, name), found in getattr(rank.trace, attribute).items():
                    if name != operator:
                        continue
                    part = found * factor
                    expected = rank.select(whole, part, microbatch)
                    if expected is None:
                        continue
                    # The smallest term is for a gradient of zeros.
                    norm = float(expected.norm())
                    error = float((part - expected).norm()) / (norm + 1e-30)
                    if not error <= bound:
                        return (
                            f"{what} {operator} on {rank.rank}: norm {float(part.norm()):.6g}, "
                            f"expected {norm:.6g}, relative error {error:.1e}"
                        )
    return (
        "none. The cause is in the reduction of gradients, in the update, or in the data of the "
        "step"
    )
