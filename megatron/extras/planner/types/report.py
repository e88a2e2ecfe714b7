"""The report of a check of types, as plain data and as text."""

import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from megatron.base.code_version import get_code_version
from megatron.extras.planner.types.check import TypeCheck
from megatron.parallel.spmd import DECLARED
from megatron.plan.run_plan import Plan

TRUSTED = (
    "the gradients of declared autograd Functions, apart from their messages in both passes "
    "(tests/parallel/test_declared_gradients.py compares each with one process)",
    "FSDP2, beyond which messages it sends for each group of parameters",
    "what ranks choose by their number: slices of the sequence, vocabulary, heads and experts",
    "sizes of uneven messages: rows of experts, keys of sliding windows, and shards",
    "masks of dropout, which must be equal on ranks with equal activations",
    "that a value of which every rank has a part (V) is a sum where it is added up",
    "ranks that were not run, and microbatches between the first and the last. These pass the "
    "stages of a pipeline, with their messages, without computation",
    "fused kernels, torch.compile and float8, in whose place PyTorch's operators are checked",
    "the optimizer's update, and values: rounding, sizes of numbers, data",
)
_SHOWN = 20
"""Problems that the text has."""
_MEANING = {"I": "equal (I)", "R": "a part (P), added up once", "V": "of this rank only (V)"}


def build_types_report(plan: Plan, check: TypeCheck) -> dict[str, Any]:
    """Return the report as values of JSON."""
    gradients: dict[str, Any] = {}
    checked: dict[str, int] = {}
    for rank in check.ranks:
        for name, types in rank.gradients.items():
            gradients[name] = {axis: _MEANING[letter] for axis, letter in types.items()}
        for what, count in rank.checked.items():
            checked[what] = checked.get(what, 0) + count
    checked["messages of ranks of one kind, and across groups"] = sum(
        len(messages) for rank in check.ranks for messages in rank.phases.values()
    )
    checked["messages between stages"] = sum(
        len(sent) for rank in check.ranks for sent in rank.transfers.values()
    )
    notes = []
    if plan.config.parallel.deepspeed:
        notes.append("The command has --deepspeed. The native engine was checked.")
    if plan.config.precision.fp8_format is not None:
        notes.append("The command has float8. A step without it was checked.")
    layers = plan.config.model.num_layers
    if check.layers != layers:
        notes.append(f"All layers are of one kind, and {check.layers} of {layers} were run.")
    return {
        "type_checked": check.passed,
        "problems": check.problems,
        "world_size": plan.world_size,
        "layout": str(plan.grid),
        "ranks": [
            {"rank": rank.rank, "coordinate": rank.coordinate, "kind": rank.kind}
            for rank in check.ranks
        ],
        "gradients": gradients,
        "checked": checked,
        "trusted": list(TRUSTED),
        "declared": sorted(function.__name__.removeprefix("_") for function in DECLARED),
        "notes": notes,
        "versions": {"megatron": get_code_version(), "spmd_types": version("spmd_types")},
        "seconds": check.seconds,
    }


def format_types_report(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report as text."""
    verdict = "NOT type-checked"
    if report["type_checked"]:
        verdict = "type-checked"
    yield f"{verdict}: {report['layout']}, in {report['seconds']:.0f} s (docs/verify.md)"
    yield from (f"  {problem}" for problem in report["problems"][:_SHOWN])
    if len(report["problems"]) > _SHOWN:
        yield f"  and {len(report['problems']) - _SHOWN} more, see --report or --json"
    yield from (f"note: {note}" for note in report["notes"])
    yield "ranks"
    yield from (
        f"  {each['rank']}: {each['coordinate']} ({each['kind']})" for each in report["ranks"]
    )
    yield "gradients of parameters before they are reduced, over each group of ranks"
    rows: dict[tuple[str, str], int] = {}
    for name, types in report["gradients"].items():
        text = ", ".join(f"{axis}: {meaning}" for axis, meaning in types.items()) or "one rank"
        # Layers have equal rows.
        row = re.sub(r"\.\d+\.", ".*.", name), text
        rows[row] = rows.get(row, 0) + 1
    width = max((len(name) for name, _ in rows), default=0)
    for (name, text), count in rows.items():
        layers = ""
        if count > 1:
            layers = f" ({count} layers)"
        yield f"  {name:<{width}}  {text}{layers}"
    # What a reader must know before trusting the verdict comes last, and is always printed.
    yield "checked"
    yield from (f"  {what}: {count}" for what, count in report["checked"].items())
    yield "trusted"
    yield from (f"  {each}" for each in report["trusted"])
