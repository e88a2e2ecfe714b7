"""The answer of a rehearsal, as text and as JSON."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.base.plain_text import format_bytes, make_plain
from megatron.extras.operations.handover.comparison import HandoverComparison
from megatron.extras.operations.handover.record import RecordedSteps, Step
from megatron.extras.operations.handover.rehearsal import Rehearsal

_ROW = "{:>9}  {:<26} {:>14} {:>14} {:>9} {:>8}"


@dataclass(frozen=True)
class Answer:
    """What a rehearsal has found."""

    record: RecordedSteps
    rehearsal: Rehearsal
    comparison: HandoverComparison

    @property
    def verdict(self) -> str:
        """`go`, or why the run should not go on."""
        first, code = self.comparison.first, self.rehearsal.code
        if first is not None:
            return f"no go: iteration {first.iteration}, {first.name}"
        if code is None:
            return "no verdict: the command had too little time"
        absent = min(self.record.steps.keys() - self.rehearsal.steps.keys(), default=None)
        if code != 0:
            output = self.rehearsal.output
            reason = next((line for line in output if "error" in line), *output[-1:])
            before = f" before iteration {absent}" * (absent is not None)
            return f"no go: the command ended with exit code {code}{before}. {reason}"
        if absent is not None:
            return f"no go: the command trains no iteration {absent}, which the run has trained"
        return "go"

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of the answer."""
        found = self.comparison
        if not self.record.start:
            yield "the run has no record of its start, so settings and versions were not compared"
        for name, (before, now) in found.changes.items():
            yield make_plain(f"changed: {name} {before or 'unset'} -> {now or 'unset'}")
        yield _ROW.format("iteration", "quantity", "recorded", "now", "differs", "bound")
        for each in found.quantities:
            # What is equal is shown for loss and norm alone.
            if not each.passed or each.name in ("loss", "gradient norm"):
                values = [_format(value) for value in (each.recorded, each.found)]
                values += [f"{number:.1e}" for number in (each.difference, each.bound)]
                row = _ROW.format(each.iteration, each.name, *values)
                yield row + "  DIFFERS" * (not each.passed)
        if found.drift:
            yield f"the perturbed rehearsal drifted by up to {max(found.drift.values()):.1e}"
        if found.missing:
            yield f"not compared, because only one of both recorded it: {', '.join(found.missing)}"
        yield f"record:    {_describe_speed(self.record.steps)}"
        yield f"rehearsal: {_describe_speed(self.rehearsal.steps)}"
        yield self.verdict

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        found = self.comparison
        return {
            "verdict": self.verdict,
            "from": self.record.iteration,
            "changes": found.changes,
            "not_compared": found.missing,
            "drift": max(found.drift.values(), default=None),
            "quantities": [vars(each) for each in found.quantities],
        }


def _format(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def _describe_speed(steps: Mapping[int, Step]) -> str:
    """Return the time of a step and the memory. The first step of a launch is slower."""
    times = [float(each["seconds"]) for each in steps.values() if "seconds" in each]
    if not times:
        return "no step"
    text = f"{statistics.median(times[1:] or times):.3g} s for a step"
    peaks = [each["peak_memory_bytes"] for each in steps.values() if each.get("peak_memory_bytes")]
    return f"{text}, {format_bytes(max(peaks))} of GPU memory" if peaks else text
