"""The choice of the optimizer that the configuration names."""

from megatron.engine.ademamix import AdEMAMix
from megatron.engine.muon import Muon
from megatron.engine.optimizer import AdamW, MasterParameter, Optimizer
from megatron.parallel.mesh import Mesh
from megatron.plan import Plan


def build_optimizer(masters: list[MasterParameter], plan: Plan, mesh: Mesh) -> Optimizer:
    """Return the optimizer of `--optimizer`, with states of zero. All ranks must call it.

    Args:
        masters: The parameters of this rank.
        plan: The plan of the run.
        mesh: This rank's mesh.
    """
    config = plan.config.optimizer
    if config.optimizer == "ademamix":
        return AdEMAMix(masters, config)
    if config.optimizer == "muon":
        return Muon(masters, config, plan.shape, mesh)
    return AdamW(masters, config)
