"""The check of a plan's types: which ranks are run, what is compared between them, and the report.

What is found on a rank is plain data, without tensors.
"""

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise, zip_longest
from typing import Any

from megatron.base.code_version import get_code_version
from megatron.base.errors import ConfigError
from megatron.base.plain_text import format_count
from megatron.model.partition import make_single_stage, select_stages_of_rank
from megatron.parallel.grid import GridCoordinate
from megatron.parallel.spmd import DECLARED
from megatron.plan.run_plan import Plan

STEP = "step"
"""The phase of messages outside of the stages."""


@dataclass(frozen=True)
class Message:
    """A message of a rank, in the order of its program."""

    kind: str
    group: str
    ranks: int
    dtype: str
    shape: tuple[int, ...]
    """Shape of the first tensor, without what differs between ranks that get uneven parts."""
    line: str

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "scalar"
        return f"{self.kind} of {self.dtype} {shape} in the {self.group} group at {self.line}"


@dataclass(frozen=True)
class Transfer:
    """A message between stages, as the sender or the receiver sees it."""

    chunk: int
    """Number of the sender's stage among those of its rank."""
    microbatch: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"microbatch {self.microbatch} of chunk {self.chunk}: {self.dtype} {shape}"


@dataclass
class RankTypes:
    """The step of one rank."""

    rank: int
    coordinate: str
    pipeline: int
    kind: str
    problems: list[str] = field(default_factory=list)
    phases: dict[str, list[Message]] = field(default_factory=dict)
    """Forward or backward pass of a microbatch -> its messages. The order is that of the step."""
    transfers: dict[str, list[Transfer]] = field(default_factory=dict)
    """Side and direction, such as `sent forward` -> the messages in order."""
    gradients: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Parameter -> group of ranks -> type of its gradient."""
    checked: Counter[str] = field(default_factory=Counter)
    """What was checked -> how often."""


Run = Callable[[list[tuple[Plan, int, str]]], list[RankTypes]]
"""Runs a step of each rank, and returns what was found in the same order."""


@dataclass(frozen=True)
class TypeCheck:
    """The result for a plan."""

    ranks: list[RankTypes]
    problems: list[str]
    seconds: float
    layers: int
    """Layers of the model that was run."""

    @property
    def passed(self) -> bool:
        """Whether the plan is type-checked."""
        return not self.problems


def choose_ranks(plan: Plan) -> list[tuple[int, str]]:
    """Return the ranks to run with their kinds: of each the first, the last and a random one.

    Ranks are of one kind if their stages have equal layers, and the same ends of the model.
    """
    grid = plan.grid
    kinds: dict[Any, list[int]] = {}
    for pipeline in range(grid.pipeline):
        stages = select_stages_of_rank(plan.stages, pipeline, grid.pipeline)
        layers = tuple(
            (stage.first, stage.last, *(_describe_layer(plan, each) for each in stage.layers))
            for stage in stages
        )
        kinds.setdefault((layers, pipeline in (0, grid.pipeline - 1)), []).append(pipeline)
    # The same plan is checked on the same ranks again.
    draw = random.Random(plan.config.batch.seed)
    chosen = []
    for pipelines in kinds.values():
        first = GridCoordinate(pipelines[0], 0, 0)
        size = grid.world_size // grid.pipeline
        # The ranks of a stage are neighbours.
        begins = [grid.get_rank(replace(first, pipeline=each)) for each in pipelines]
        ranks = [begins[0], begins[-1] + size - 1, draw.choice(begins) + draw.randrange(size)]
        name = f"stage {pipelines[0]}"
        if len(pipelines) > 1:
            name = f"{len(pipelines)} stages from {pipelines[0]} to {pipelines[-1]}"
        chosen += [(rank, name) for rank in sorted(set(ranks))]
    return chosen


def _describe_layer(plan: Plan, number: int) -> Any:
    return replace(plan.shape.describe_layer(number), number=0)


_LAYERS = 32
_LAYERS_WITH_EXPERTS = 16
"""The largest depths without a pipeline. A rank of them takes 10 s to 15 s on a core."""


def reduce_depth(plan: Plan) -> Plan:
    """Return the plan with fewer layers if it has one stage with many equal layers."""
    layers = plan.config.model.num_layers
    kinds = {_describe_layer(plan, number) for number in range(layers)}
    limit = _LAYERS
    if plan.shape.expert_layers:
        limit = _LAYERS_WITH_EXPERTS
    if plan.pipeline_size > 1 or len(kinds) > 1 or layers <= limit:
        return plan
    config = replace(plan.config, model=replace(plan.config.model, num_layers=limit))
    shape = replace(plan.shape, config=config.model)
    return replace(plan, config=config, shape=shape, stages=(make_single_stage(shape),))


def check_types(plan: Plan, run: Run) -> TypeCheck:
    """Run the chosen ranks of a plan, and compare them."""
    began = time.monotonic()
    plan = reduce_depth(plan)
    ranks = run([(plan, rank, kind) for rank, kind in choose_ranks(plan)])
    # The same line runs in each layer.
    problems = [
        f"rank {rank.rank} ({rank.coordinate}): {problem}"
        for rank in ranks
        for problem in dict.fromkeys(rank.problems)
    ]
    # The traces of a rank that ended early differ, and would hide why.
    if not problems:
        problems = [*_compare_kinds(ranks), *_compare_groups(ranks), *_compare_transfers(ranks)]
    return TypeCheck(ranks, problems, time.monotonic() - began, plan.config.model.num_layers)


def check_in_processes(plan: Plan) -> TypeCheck:
    """Check a plan, with a process for each core.

    Raises:
        ConfigError: There is no C++ compiler, see `build_guard`.
    """
    from megatron.extras.planner.dry_run.process import open_pool

    with open_pool(len(os.sched_getaffinity(0))) as pool:
        return check_types(plan, lambda tasks: list(pool.map(_run_task, tasks)))


def _run_task(task: tuple[Plan, int, str]) -> RankTypes:
    # Not at the top, because it imports torch and the fake GPU.
    from megatron.extras.planner.types.typed_rank import run_typed_rank

    return run_typed_rank(*task)


def require_spmd_types() -> None:
    """Check that the package is installed.

    Raises:
        ConfigError: It is not.
    """
    try:
        import spmd_types  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--types needs the package spmd_types 0.3.1 or newer, which is not installed. "
            "Install the extra: pip install 'megatron-3d[verify]'."
        ) from error


def _compare_kinds(ranks: Sequence[RankTypes]) -> Iterator[str]:
    """Compare the messages of the ranks of each kind."""
    for one, other in pairwise(ranks):
        if one.kind != other.kind:
            continue
        # Stages of a schedule run their passes in other orders. Within a pass, all are equal.
        if one.pipeline == other.pipeline and list(one.phases) != list(other.phases):
            yield f"ranks {one.rank} and {other.rank} run their passes in another order"
        for phase in {**one.phases, **other.phases}:
            if phase == STEP and one.pipeline != other.pipeline:
                # It has the messages between stages in the order of the schedule.
                continue
            text = _compare(one.phases.get(phase, []), other.phases.get(phase, []))
            if text:
                names = f"ranks {one.rank} ({one.coordinate}) and {other.rank} ({other.coordinate})"
                yield f"{names}, {phase}: {text}"
                break


def _compare(one: Sequence[Any], other: Sequence[Any]) -> str:
    """Return the first difference of two lists, or nothing."""
    for number, (left, right) in enumerate(zip_longest(one, other)):
        if left != right:
            equal = format_count(number, "equal message")
            return f"after {equal}, one has {left or 'none'}, and the other {right or 'none'}"
    return ""


def _compare_all(lists: Sequence[tuple[str, Sequence[Any]]]) -> Iterator[tuple[str, str, str]]:
    """Yield the names of neighbouring lists that differ, and their first difference."""
    for (one, left), (other, right) in pairwise(lists):
        if text := _compare(left, right):
            yield one, other, text


_ACROSS = ("world", "ends", "control")
"""Groups whose ranks are of several kinds."""


def _compare_groups(ranks: Sequence[RankTypes]) -> Iterator[str]:
    """Compare the messages in groups that have ranks of several kinds."""
    last = max(rank.pipeline for rank in ranks)
    for group in _ACROSS:
        lists: list[tuple[str, list[Message]]] = []
        for rank in ranks:
            sent = [
                # Ranks of other kinds may send it at another line.
                replace(each, line="")
                for phase in rank.phases.values()
                for each in phase
                if each.group == group
            ]
            # Ranks between the ends have no such group.
            if group != "ends" or rank.pipeline in (0, last):
                lists.append((str(rank.rank), sent))
        for one, other, text in _compare_all(lists):
            yield f"ranks {one} and {other}, messages of the {group} group: {text}"


def _compare_transfers(ranks: Sequence[RankTypes]) -> Iterator[str]:
    """Compare what stages send with what their neighbours receive.

    All stages send the same microbatches in the same order, so the neighbour need not be run.
    """
    last = max(rank.pipeline for rank in ranks)
    for direction in ("forward", "backward"):
        # The last rank sends to the first one if stages are interleaved.
        sides: dict[bool, list[tuple[str, list[Any]]]] = {True: [], False: []}
        for rank in ranks:
            for action in ("sent", "received"):
                # Between the last and the first rank, a chunk ends and the next one begins.
                forward = (action == "sent") == (direction == "forward")
                around = rank.pipeline == (last if forward else 0)
                transfers = rank.transfers.get(f"{action} {direction}", [])
                sides[around].append((f"rank {rank.rank} has {action}", transfers))
        for lists in sides.values():
            for one, other, text in _compare_all(lists):
                yield f"messages between stages, {direction}, {one} and {other}: {text}"


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
    checked: Counter[str] = Counter()
    for rank in check.ranks:
        for name, types in rank.gradients.items():
            gradients[name] = {axis: _MEANING[letter] for axis, letter in types.items()}
        checked.update(rank.checked)
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
        "checked": dict(checked),
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
    rows: Counter[tuple[str, str]] = Counter()
    for name, types in report["gradients"].items():
        text = ", ".join(f"{axis}: {meaning}" for axis, meaning in types.items()) or "one rank"
        # Layers have equal rows.
        rows[re.sub(r"\.\d+\.", ".*.", name), text] += 1
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
