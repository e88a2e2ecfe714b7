"""The choice of kernels at the start of a run, by all ranks together.

Kernels round differently. So a run keeps its kernels after a resume, as long as the type of its
GPUs stays the same. See docs/decisions/056.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from megatron.config.fields import all_fields
from megatron.config.kernels import SWITCHES, AttentionBackend, KernelsConfig
from megatron.engine.kind import EngineKind
from megatron.parallel.ranks import Ranks
from megatron.plan.kernel_choice import (
    CPU,
    ROCM,
    KernelChoice,
    KernelDevice,
    apply_kernel_choice,
    choose_kernels,
    explain_refusal,
)
from megatron.plan.run_plan import Plan
from megatron.run.state import TrainState

_CHOSEN = ("attention_backend", *SWITCHES)


def choose_run_kernels(
    plan: Plan,
    state: TrainState,
    saved: KernelsConfig | None,
    ranks: Ranks,
    device: torch.device,
    kind: EngineKind,
    log: Callable[[str], None],
) -> Plan:
    """Return the plan with the kernels that this run uses, and record them in the state.

    The choice is the same on all ranks. All ranks must call it.

    Args:
        plan: The plan of the run.
        state: The state of the run. It has the record of the checkpoint, if there is one.
        saved: The settings of kernels in the checkpoint. They replace what the record lacks.
        ranks: All ranks.
        device: This rank's device.
        kind: The engine. It knows whether this rank can run its kernels.
        log: Prints a line of the log.
    """
    mine = _name_gpu_type(device), kind.find_kernel_obstacle(device.type)
    here = replace(_find_common(ranks.gather(mine)), has_graphs=kind.has_graphs)
    choice = choose_kernels(plan, here)
    record = state.kernels
    if record and not _is_valid(record):
        log("warning: the checkpoint's record of kernels is not valid, and is ignored")
        record = {}
    if record and record["gpu"] != here.gpu:
        log(
            f"the checkpoint was trained on {record['gpu']} and this run is on {here.gpu} (compute "
            "capability or cpu), so kernels without a flag are chosen again"
        )
    elif saved is not None and state.iteration > 0:
        choice = _keep(choice, _complete(record.get("kernels", {}), saved), plan, here, log)
    state.kernels = {
        "gpu": here.gpu,
        "kernels": {name: getattr(choice.kernels, name) for name in _CHOSEN},
    }
    return apply_kernel_choice(plan, choice)


def _find_common(ranks: Sequence[tuple[str, str]]) -> KernelDevice:
    """Return what all ranks have in common, from the type of GPU and the obstacle of each."""
    obstacles = [f"{found} (rank {rank})" for rank, (_, found) in enumerate(ranks) if found]
    # Ranks with GPUs of several types have a name that is in no table.
    types = " and ".join(sorted({gpu for gpu, _ in ranks}))
    return KernelDevice(types, "".join(obstacles[:1]))


def _name_gpu_type(device: torch.device) -> str:
    if device.type != "cuda":
        return CPU
    capability = map(str, torch.cuda.get_device_capability(device))
    if torch.version.hip is not None:
        return ROCM
    return ".".join(capability)


def _is_valid(record: Any) -> bool:
    """Return whether a record has the values that `choose_run_kernels` writes."""
    if not isinstance(record, Mapping) or not isinstance(record.get("gpu"), str):
        return False
    used = record.get("kernels")
    if not isinstance(used, Mapping) or not {*used} <= {*_CHOSEN}:
        return False
    order = used.get("attention_backend", ["auto"])
    if (
        not isinstance(order, Sequence)
        or not order
        or not {*order} <= {*get_args(AttentionBackend)}
    ):
        return False
    return all(isinstance(used.get(name, False), bool) for name in SWITCHES)


def _complete(record: Mapping[str, Any], saved: KernelsConfig) -> dict[str, Any]:
    """Return the kernels that a checkpoint was trained with.

    Versions without a record used PyTorch's operators where no flag was given.
    """
    used: dict[str, Any] = {name: bool(getattr(saved, name)) for name in SWITCHES}
    used["attention_backend"] = saved.attention_backend
    used |= record
    used["attention_backend"] = tuple(used["attention_backend"])
    if used["attention_backend"] == ("by-gpu",):
        used["attention_backend"] = ("auto",)
    return used


def _keep(
    choice: KernelChoice,
    used: Mapping[str, Any],
    plan: Plan,
    here: KernelDevice,
    log: Callable[[str], None],
) -> KernelChoice:
    """Return a choice in which kernels without a flag are those of the checkpoint.

    Args:
        choice: The choice of a run from scratch.
        used: The kernels that the checkpoint was trained with.
        plan: The plan of the run, whose settings have None or by-gpu where no flag was given.
        here: What all ranks have in common.
        log: Prints a line of the log.
    """
    fields = all_fields()
    given = plan.config.kernels
    differing = [name for name in _CHOSEN if used[name] != getattr(choice.kernels, name)]
    kept = [name for name in differing if getattr(given, name) in (None, ("by-gpu",))]
    refusals = {name: explain_refusal(name, used[name], plan, here) for name in kept}
    kept = [name for name in kept if refusals[name] is None]
    for name, why in refusals.items():
        if why is not None:
            spelled = fields[f"kernels.{name}"].spell(used[name])
            log(f"warning: {spelled} of the checkpoint is not kept: {why}")
    if not kept:
        return choice
    before, default = (
        " ".join(fields[f"kernels.{name}"].spell(values[name]) for name in kept)
        for values in (used, vars(choice.kernels))
    )
    log(
        f"kernels stay as in the checkpoint, so that the run continues as it was: {before}. "
        f"The default for a new run here is {default}. Give these flags to change to it"
    )
    reasons = {**choice.reasons, **dict.fromkeys(kept, "as in the checkpoint")}
    kernels = replace(choice.kernels, **{name: used[name] for name in kept})
    return KernelChoice(kernels, reasons)
