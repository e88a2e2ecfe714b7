"""What a run takes over from a checkpoint of an earlier version, whose defaults were others."""

from collections.abc import Callable
from dataclasses import replace

from megatron.config.tree import Config
from megatron.plan.run_plan import Plan
from megatron.run.state import TrainState

_MASKS = "philox"
"""Name of the masks of `megatron/parallel/rng.py`. Earlier versions recorded none."""


def keep_earlier_choices(
    plan: Plan, state: TrainState, saved: Config | None, log: Callable[[str], None]
) -> Plan:
    """Return the plan with the checkpoint's choices where the run's are left to the trainer.

    Args:
        plan: The plan of the run.
        state: The state of the run. The name of its masks is recorded there.
        saved: The configuration of the checkpoint, or None for a new run.
        log: Prints a line of the log.
    """
    continues = saved is not None and state.iteration > 0
    if continues and plan.config.model.has_dropout and state.dropout_masks != _MASKS:
        log(
            "dropout draws other masks from here on than the version that wrote the checkpoint: "
            "they no longer depend on the layout"
        )
    state.dropout_masks = _MASKS
    if saved is None or not continues:
        return plan
    optimizer = plan.config.optimizer
    if optimizer.muon_fp32_matmul_prec == "auto":
        kept = saved.optimizer.muon_fp32_matmul_prec
        optimizer = replace(optimizer, muon_fp32_matmul_prec=kept)
    return replace(plan, config=replace(plan.config, optimizer=optimizer))
