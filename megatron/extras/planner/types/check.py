"""The check of a plan's types: which ranks are run, and what is compared between them."""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.plain_text import format_count
from megatron.extras.planner.types.record import STEP, Message, RankTypes
from megatron.model.partition import make_single_stage, select_stages_of_rank
from megatron.parallel.grid import GridCoordinate
from megatron.plan.run_plan import Plan

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


def _compare_kinds(ranks: Sequence[RankTypes]) -> list[str]:
    """Compare the messages of the ranks of each kind."""
    found = []
    for one, other in pairwise(ranks):
        if one.kind != other.kind:
            continue
        # Stages of a schedule run their passes in other orders. Within a pass, all are equal.
        if one.pipeline == other.pipeline and list(one.phases) != list(other.phases):
            found.append(f"ranks {one.rank} and {other.rank} run their passes in another order")
        for phase in {**one.phases, **other.phases}:
            if phase == STEP and one.pipeline != other.pipeline:
                # It has the messages between stages in the order of the schedule.
                continue
            text = _compare(one.phases.get(phase, []), other.phases.get(phase, []))
            if text:
                names = f"ranks {one.rank} ({one.coordinate}) and {other.rank} ({other.coordinate})"
                found.append(f"{names}, {phase}: {text}")
                break
    return found


def _compare(one: Sequence[Any], other: Sequence[Any]) -> str:
    """Return the first difference of two lists, or nothing."""
    for number, (left, right) in enumerate(zip_longest(one, other)):
        if left != right:
            equal = format_count(number, "equal message")
            return f"after {equal}, one has {left or 'none'}, and the other {right or 'none'}"
    return ""


_ACROSS = ("world", "ends", "control")
"""Groups whose ranks are of several kinds."""


def _compare_groups(ranks: Sequence[RankTypes]) -> list[str]:
    """Compare the messages in groups that have ranks of several kinds."""
    found = []
    last = max(rank.pipeline for rank in ranks)
    for group in _ACROSS:
        lists: list[tuple[int, list[Message]]] = []
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
                lists.append((rank.rank, sent))
        for (one, left), (other, right) in pairwise(lists):
            text = _compare(left, right)
            if text:
                found.append(f"ranks {one} and {other}, messages of the {group} group: {text}")
    return found


def _compare_transfers(ranks: Sequence[RankTypes]) -> list[str]:
    """Compare what stages send with what their neighbours receive.

    All stages send the same microbatches in the same order, so the neighbour need not be run.
    """
    found = []
    last = max(rank.pipeline for rank in ranks)
    for direction in ("forward", "backward"):
        # The last rank sends to the first one if stages are interleaved.
        sides: dict[bool, list[tuple[str, list[Any]]]] = {True: [], False: []}
        for rank in ranks:
            for action in ("sent", "received"):
                # Between the last and the first rank, a chunk ends and the next one begins.
                forward = (action == "sent") == (direction == "forward")
                end = last
                if not forward:
                    end = 0
                around = rank.pipeline == end
                transfers = rank.transfers.get(f"{action} {direction}", [])
                sides[around].append((f"rank {rank.rank} has {action}", transfers))
        for lists in sides.values():
            for (one, left), (other, right) in pairwise(lists):
                text = _compare(left, right)
                if text:
                    found.append(f"messages between stages, {direction}, {one} and {other}: {text}")
    return found
