"""What the layouts of Megatron's checkpoints have in common: tensors are found by our names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron.base.errors import CheckpointError
from megatron.extras.interop.convert.megatron_args import SavedRun
from megatron.parallel.shard import Kind

Key = tuple[int | None, str]
"""Number of the layer, or None, and our name within it."""


class MegatronSource(Protocol):
    """A checkpoint of Megatron, whose tensors are found by our names."""

    run: SavedRun
    names: dict[Key, str]
    """Each weight -> its name in the checkpoint, for messages."""
    unknown: list[str]
    """Their tensors that have no place in our models."""
    slices: int
    """Tensor-parallel slices of each tensor. 1 if the files have whole tensors."""
    steps: int | None
    """Steps of the optimizer's states. None if there are none that can be read."""

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return the slices of a tensor, or the tensor itself if it was stored whole."""
        ...


def flatten_tensors(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries, named with dots."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            found |= flatten_tensors(value, f"{prefix}{name}.")
    return found


def check_ranks(folder: Path, pattern: str, expected: int) -> None:
    """Check that a folder has as many files as ranks.

    Raises:
        CheckpointError: it has fewer or more.
    """
    found = sorted(path.name for path in folder.glob(pattern))
    if len(found) != expected:
        raise CheckpointError(
            f"{folder} has {len(found)} of {pattern}, and the saved arguments (tensor, pipeline "
            f"and expert parallel size) need {expected}: {', '.join(found)}"
        )


def find_steps(optimizer: Any) -> int | None:
    """Return the number of steps of an optimizer's state. None if it has none.

    Megatron stores it beside the states, apex in the parameter groups.
    """
    if not isinstance(optimizer, Mapping):
        return None
    for name in ("common_step", "step", "base_optimizer_state_step"):
        if (found := optimizer.get(name)) is not None:
            return int(found)
    groups = optimizer.get("param_groups") or []
    for group in groups:
        if isinstance(group, Mapping) and group.get("step") is not None:
            return int(group["step"])
    states = optimizer.get("state")
    if isinstance(states, Mapping):
        for each in [states, *states.values()]:
            if isinstance(each, Mapping):
                step = each.get("common_step", each.get("step"))
                if step is not None:
                    return int(step)
    return find_steps(optimizer.get("optimizer", optimizer.get("base_optimizer_state")))
