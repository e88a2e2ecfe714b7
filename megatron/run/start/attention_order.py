"""The choice of the order of attention kernels by the type of the GPUs.

The kernels round differently. So a run keeps its order after a resume, as long as the type of its
GPUs stays the same. See docs/decisions/051.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.config.kernels import AttentionBackend
from megatron.parallel.ranks import Ranks
from megatron.plan.run_plan import Plan
from megatron.run.state import TrainState

_TORCH: tuple[AttentionBackend, ...] = ("auto",)
_ORDERS: dict[str, tuple[AttentionBackend, ...]] = {
    "9.0": ("fused", "flash", "efficient", "unfused")
}
"""Compute capability -> order. All other types have PyTorch's."""


def choose_attention_order(
    plan: Plan, state: TrainState, ranks: Ranks, device: torch.device, log: Callable[[str], None]
) -> Plan:
    """Return the plan with the kernels that `--attention-backend by-gpu` means for these ranks.

    The choice is the same on all ranks, and is recorded in the state. All ranks must call it.

    Args:
        plan: The plan of the run.
        state: The state of the run. It has the record of the checkpoint, if there is one.
        ranks: All ranks.
        device: This rank's device.
        log: Prints a line of the log.
    """
    kernels = plan.config.kernels
    if kernels.attention_backend != ("by-gpu",):
        state.attention = {}
        return plan
    # Ranks with GPUs of several types have a name that is in no table.
    here = " and ".join(sorted(set(ranks.gather(_name_gpu_type(device)))))
    order = _ORDERS.get(here, _TORCH)
    before = state.attention
    if before and before["gpu"] == here:
        order = tuple(before["kernels"])
    elif before:
        log(
            f"--attention-backend by-gpu: the checkpoint was trained on {before['gpu']} and this "
            f"run is on {here} (compute capability), so the kernels of attention are chosen again: "
            f"{' '.join(order)}"
        )
    elif state.iteration > 0:
        order = _TORCH
        log(
            "--attention-backend by-gpu: the checkpoint was trained with PyTorch's order of "
            "kernels and keeps it. To change it, name the kernels, such as fused flash unfused"
        )
    state.attention = {"gpu": here, "kernels": list(order)}
    chosen = replace(kernels, attention_backend=order)
    return replace(plan, config=replace(plan.config, kernels=chosen))


def _name_gpu_type(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return ".".join(map(str, torch.cuda.get_device_capability(device)))
