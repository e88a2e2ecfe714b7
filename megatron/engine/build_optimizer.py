"""The table of the optimizers' classes. `OPTIMIZERS` (`config/optimizer.py`) has their facts."""

from collections.abc import Callable
from typing import Any

from megatron.config.table import Table
from megatron.engine.ademamix import AdEMAMix
from megatron.engine.muon import Muon
from megatron.engine.optimizer import AdamW, MasterParameter, Optimizer
from megatron.model.fused_operators import FusedOperators
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan

Masters = list[MasterParameter]


def build_optimizer(
    masters: Masters, plan: Plan, mesh: Mesh, operators: FusedOperators
) -> Optimizer:
    """Return the optimizer of `--optimizer`, with states of zero. All ranks must call it.

    Args:
        masters: The parameters of this rank.
        plan: The plan of the run.
        mesh: This rank's mesh.
        operators: The kernels of the run. AdamW may have one.
    """
    build = BUILDERS.require(plan.config.optimizer.optimizer)
    return build(masters, plan, mesh, operators)


def _build_adamw(masters: Masters, plan: Plan, mesh: Mesh, operators: FusedOperators) -> Optimizer:
    if operators.build_adamw is not None:
        return operators.build_adamw(masters, plan.config.optimizer)
    return AdamW(masters, plan.config.optimizer)


def _build_ademamix(masters: Masters, plan: Plan, *unused: Any) -> Optimizer:
    return AdEMAMix(masters, plan.config.optimizer)


def _build_muon(masters: Masters, plan: Plan, mesh: Mesh, *unused: Any) -> Optimizer:
    precision = plan.config.precision
    in_fp32 = not (precision.bf16 or precision.fp16)
    return Muon(masters, plan.config.optimizer, plan.shape, mesh, in_fp32=in_fp32)


BUILDERS: Table[Callable[[Masters, Plan, Mesh, FusedOperators], Optimizer]] = Table(
    "--optimizer",
    {
        "adam": _build_adamw,
        "ademamix": _build_ademamix,
        "muon": _build_muon,
    },
)
