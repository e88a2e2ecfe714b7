"""The comparison of steps that were trained again with the record of a run.

Bounds. If nothing differs between both starts, all bits are equal. Otherwise numbers differ by
rounding: at most 1e-5 in fp32 (the bound of all layouts, see `tests/equivalence`). With 16 bits
they may differ by the rounding error of one number, as in `megatron.extras.planner.verify`. A run
may amplify rounding errors. So a later rehearsal with one changed bit in each matrix shows how far
equal steps drift apart, and eight times this drift is allowed too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.fields import all_fields
from megatron.config.precision import PrecisionConfig
from megatron.extras.operations.chronicle.events import compare_settings
from megatron.extras.operations.handover.record import RecordedSteps, Step

EXACT = (
    ("consumed_samples", "number of samples"),
    ("global_batch_size", "batch size"),
    ("curriculum_seqlen", "sequence length"),
    ("batch_digest", "tokens of the batch"),
    ("skipped_iterations", "dropped steps"),
    ("nan_iterations", "steps that are not finite"),
    ("loss_scale", "loss scale"),
    ("learning_rate", "learning rate"),
    ("decoupled_learning_rate", "decoupled learning rate"),
)
"""(key in the metrics, name) of what no rounding changes, in the order of a step."""
ROUNDED = (
    ("lm_loss", "loss"),
    ("dropped_loss", "loss of a dropped step"),
    ("expert_balancing_loss", "balancing loss of experts"),
    ("largest_expert_load", "largest load of an expert"),
    ("smallest_expert_load", "smallest load of an expert"),
    ("grad_norm", "gradient norm"),
    ("params_norm", "norm of the parameters"),
)
FP32_BOUND = 1e-5
MARGIN = 8.0
"""Factor by which the difference may exceed the drift of the perturbed rehearsal."""
_FOREIGN_BOUND = {"learning_rate": 1e-3, "lm_loss": 1e-3, "grad_norm": 2e-2}
"""Bounds for another trainer's log, which has few digits and other kernels. In 16 bits, the bound
of rounding applies too."""
_FACTS = ("version", "torch", "python", "device", "cuda", "driver", "devices", "layout")
"""What is compared of two starts besides packages and settings."""


@dataclass(frozen=True)
class ComparedQuantity:
    """A quantity of a step in the record and in the rehearsal."""

    iteration: int
    name: str
    recorded: Any
    found: Any
    difference: float
    """Relative difference. For what must be equal, it is 0 or infinite."""
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound."""
        return self.difference <= self.bound


@dataclass(frozen=True)
class HandoverComparison:
    """Everything that was compared."""

    quantities: Sequence[ComparedQuantity]
    """In the order of the steps, and in that of a step."""
    missing: Sequence[str]
    """Names of quantities that one of the two did not record."""
    changes: Mapping[str, Sequence[str | None]]
    """What differs between both starts -> its value in the record, and in the rehearsal."""
    drift: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """(iteration, key) -> largest relative drift of the perturbed rehearsal up to it."""

    @property
    def first(self) -> ComparedQuantity | None:
        """The first quantity that differs."""
        return next((each for each in self.quantities if not each.passed), None)


def compare_starts(
    recorded: Mapping[str, Any], found: Mapping[str, Any], own_flags: Sequence[str]
) -> dict[str, list[str | None]]:
    """Return what differs between two starts, with both values. None means the default, or none.

    Args:
        recorded: The details of the run's start. Empty: nothing is compared.
        found: Those of the rehearsal.
        own_flags: Flags that the rehearsal sets itself.
    """
    if not recorded or not found:
        return {}
    pairs = {name: [recorded.get(name), found.get(name)] for name in _FACTS if name in recorded}
    # Records of earlier versions have no packages.
    packages = [each.get("packages") or {} for each in (recorded, found)]
    if packages[0]:
        names = sorted(packages[0].keys() | packages[1].keys())
        pairs |= {name: [each.get(name) for each in packages] for name in names}
    changes = {
        name: [each and str(each) for each in pair]
        for name, pair in pairs.items()
        if pair[0] != pair[1]
    }
    settings = compare_settings([recorded.get("settings"), found.get("settings")])
    known = {item.flag: item.default for item in all_fields().values()}
    for flag, pair in settings.items():
        if flag not in own_flags:
            # None stands for the default, which may be another one in the other version.
            changes[flag] = [each or str(known.get(flag)) for each in pair]
    return changes


def is_bit_equal_promised(recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Return whether equal starts give equal bits, and these are equal.

    On GPUs this needs --deterministic-mode. Records of earlier versions do not name the device.
    """
    if changes or "device" not in recorded:
        return False
    return recorded["cuda"] is None or "--deterministic-mode" in recorded["settings"]


def choose_bound(precision: PrecisionConfig) -> float:
    """Return the bound of rounding of a recorded run. It is relative."""
    if precision.bf16:
        return 2.0**-8
    if precision.fp16:
        return 2.0**-11
    return FP32_BOUND


def compare_steps(
    record: RecordedSteps,
    steps: Mapping[int, Step],
    changes: Mapping[str, Sequence[str | None]],
    perturbed: Mapping[int, Step] | None = None,
) -> HandoverComparison:
    """Compare the steps of a rehearsal with the record.

    Args:
        record: What the run recorded.
        steps: The steps of the rehearsal, by iteration.
        changes: See `compare_starts`.
        perturbed: The steps of a rehearsal with perturbed weights.
    """
    bound = choose_bound(record.config.precision)
    if is_bit_equal_promised(record.start, changes):
        bound = 0.0
    drift = _measure_drift(steps, perturbed or {})
    quantities: list[ComparedQuantity] = []
    missing: dict[str, None] = {}
    for iteration, step in record.steps.items():
        again = steps.get(iteration)
        if again is None:
            continue
        for key, name in (*EXACT, *ROUNDED):
            pair = step.get(key), again.get(key)
            # Only some runs have a curriculum, experts or a loss scale.
            if pair == (None, None):
                continue
            # A step has one of both losses. If one is missing, only one of the steps was dropped.
            if None in pair and key not in ("lm_loss", "dropped_loss"):
                missing[name] = None
                continue
            is_exact = (key, name) in EXACT
            # No rounding changes what must be equal.
            limit = max(bound, MARGIN * drift.get((iteration, key), 0.0)) * (not is_exact)
            # The log has a few digits of each number.
            if record.is_foreign and key in _FOREIGN_BOUND:
                is_exact = False
                limit = max(_FOREIGN_BOUND[key], limit)
            difference = _compare(*pair, is_exact=is_exact)
            quantities.append(ComparedQuantity(iteration, name, *pair, difference, limit))
    return HandoverComparison(quantities, tuple(missing), changes, drift)


def _compare(recorded: Any, found: Any, *, is_exact: bool) -> float:
    """Return the relative difference of two numbers. Without a number, they are equal or not."""
    numbers = [isinstance(each, int | float) for each in (recorded, found)]
    # NaN is the only number that differs from itself.
    if recorded == found or all(each != each for each in (recorded, found)):
        return 0.0
    if is_exact or not all(numbers) or not all(map(math.isfinite, (recorded, found))):
        return math.inf
    return float(abs(found - recorded) / max(abs(recorded), 1e-30))


def _measure_drift(
    steps: Mapping[int, Step], perturbed: Mapping[int, Step]
) -> dict[tuple[int, str], float]:
    """Return the largest difference of two rehearsals up to each iteration, by key."""
    drift = {}
    for key, _ in ROUNDED:
        largest = 0.0
        for iteration in sorted(steps.keys() & perturbed.keys()):
            pair = steps[iteration].get(key), perturbed[iteration].get(key)
            difference = _compare(*pair, is_exact=False)
            # One that is not finite would allow everything.
            if math.isfinite(difference):
                largest = max(largest, difference)
            drift[iteration, key] = largest
    return drift
