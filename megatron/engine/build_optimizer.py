"""The choice of the optimizer that the configuration names."""

from typing import assert_never

from megatron.engine.ademamix import AdEMAMix
from megatron.engine.muon import Muon
from megatron.engine.optimizer import AdamW, MasterParameter, Optimizer
from megatron.model.fused_operators import FusedOperators
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan


def build_optimizer(
    masters: list[MasterParameter], plan: Plan, mesh: Mesh, operators: FusedOperators
) -> Optimizer:
    """Return the optimizer of `--optimizer`, with states of zero. All ranks must call it.

    Args:
        masters: The parameters of this rank.
        plan: The plan of the run.
        mesh: This rank's mesh.
        operators: The kernels of the run. AdamW may have one.
    """
    config = plan.config.optimizer
    match config.optimizer:
        case "adam":
            return (operators.build_adamw or AdamW)(masters, config)
        case "ademamix":
            return AdEMAMix(masters, config)
        case "muon":
            precision = plan.config.precision
            in_fp32 = not (precision.bf16 or precision.fp16)
            return Muon(masters, config, plan.shape, mesh, in_fp32=in_fp32)
        case _:
            assert_never(config.optimizer)
