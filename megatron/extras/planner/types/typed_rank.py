"""One training step of one rank of the real layout, typed."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from spmd_types import SpmdTypeError

from megatron.config.kernels import SWITCHES
from megatron.extras.planner.dry_run.fake_rank import make_batch, name_groups, use_rank
from megatron.extras.planner.dry_run.process import choose_fake_kernels, choose_microbatches
from megatron.extras.planner.dry_run.record import find_line_of_error
from megatron.extras.planner.types.forward import (
    Axis,
    ForwardTypes,
    keep_types_in_hooks,
    list_axes,
    list_offsets,
)
from megatron.extras.planner.types.gradients import GradientFlow
from megatron.extras.planner.types.messages import Recorder
from megatron.extras.planner.types.record import RankTypes
from megatron.extras.planner.types.update import UpdateChecks
from megatron.parallel import mesh
from megatron.plan.run_plan import Plan


def use_plain_operators(plan: Plan) -> Plan:
    """Return the plan without compilation, fused kernels and float8, which have no types."""
    off: dict[str, Any] = dict.fromkeys(("use_torch_compile", *SWITCHES), False)
    kernels = replace(plan.config.kernels, **off)
    precision = replace(plan.config.precision, fp8_format=None)
    config = replace(plan.config, kernels=kernels, precision=precision)
    return choose_fake_kernels(replace(plan, config=config))


def run_typed_rank(plan: Plan, rank: int, kind: str) -> RankTypes:
    """Run a step of a rank on the fake GPU of this process, and return what was found."""
    coordinate = plan.grid.get_coordinate(rank)
    found = RankTypes(rank, str(coordinate), coordinate.pipeline, kind)
    plan = use_plain_operators(plan)
    microbatches = choose_microbatches(plan)
    if plan.pipeline_size == 1:
        # The first one accumulates, and the last one reduces.
        microbatches = min(microbatches, 2)
    last = microbatches - 1
    flow = GradientFlow()
    axes = list_axes(plan.grid)
    # Its keys are groups of an earlier rank, which do not exist any more.
    list_offsets.cache_clear()
    # The ranks' names are the same text on a fake group. Receiving it from 16,384 ranks takes 2 s.
    names = patch.object(mesh, "gather_json", lambda value, group: [value] * plan.world_size)
    try:
        with keep_types_in_hooks(), names, use_rank(plan, rank) as built:
            engine = built.engine
            types = ForwardTypes(built.mesh, axes)
            recorder = Recorder(found, flow, name_groups(built.mesh, engine))
            checks = UpdateChecks(
                engine, built.mesh, found, recorder, flow, passes=min(microbatches, 2)
            )
            # After the construction, in which FSDP2 has made the parameters that layers use.
            for stage in engine._rank_stages:
                types.type_parameters(stage)
                for name, spec in stage.specs.items():
                    found.gradients[spec.get_global_name(name)] = types.find_type(spec)
            batch = plan.config.batch
            samples = make_batch(microbatches, batch.micro_batch_size, plan.config.model.seq_length)
            with (
                types.install(),
                recorder.install(lambda number: 0 < number < last),
                checks.install(),
                recorder,
            ):
                built.train(samples)
                checks.check_reads()
                checks.check_all_coordinates()
            found.checked.update(types.checked)
    except Exception as error:
        # A rank that fails is a result. The other ranks may fail in another way.
        found.problems.append(_describe_error(error, axes))
    return found


def _describe_error(error: BaseException, axes: Sequence[Axis]) -> str:
    """Return an error with the innermost line of the package that it comes from."""
    # torch's pipeline raises an error of its own from ours.
    while error.__cause__ is not None:
        error = error.__cause__
    line = find_line_of_error(error)
    where = ""
    if line is not None:
        where = f"{line}: "
    if not isinstance(error, SpmdTypeError):
        return f"{where}{type(error).__name__}: {error}"
    # Without its proposals, which name functions of spmd_types.
    text = re.split(r"\nAre you missing|\n\nSet SPMD", str(error.args[0]))[0]
    if error.context:
        text = f"{text} {' '.join(error.context.split())}"
    for axis in axes:
        text = text.replace(repr(axis.mesh), axis.name)
    return f"{where}{text}"
