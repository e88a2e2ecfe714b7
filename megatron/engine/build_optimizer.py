"""The table of the optimizers' classes. `OPTIMIZERS` (`config/optimizer.py`) has their facts."""

from megatron.config.table import Table
from megatron.engine.ademamix import AdEMAMix
from megatron.engine.muon import Muon
from megatron.engine.optimizer import AdamW, Masters, Optimizer
from megatron.model.fused_operators import FusedOperators
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan

CLASSES: Table[type[Optimizer]] = Table(
    "--optimizer",
    {
        "adam": AdamW,
        "ademamix": AdEMAMix,
        "muon": Muon,
    },
)


def build_optimizer(
    masters: Masters, plan: Plan, mesh: Mesh, operators: FusedOperators
) -> Optimizer:
    """Return the optimizer of `--optimizer`, with states of zero. See `Optimizer.build`."""
    choice = CLASSES.require(plan.config.optimizer.optimizer)
    return choice.build(masters, plan, mesh, operators)
