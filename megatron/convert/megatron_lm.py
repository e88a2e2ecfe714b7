"""Checkpoints of Megatron-LM: one file for each rank, or a folder of torch.distributed.checkpoint.

`mp_rank_TT[_PPP]/model_optim_rng.pt` has the weights of one tensor-parallel and pipeline rank. Both
the older names and those of Megatron core are read. `torch_dist` has whole tensors, usually all
layers of a kind in one, and the optimizer's states under the same names.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.convert.distributed_tensors import DistributedTensors
from megatron.convert.megatron_args import read_saved_run
from megatron.convert.megatron_names import is_no_weight, rename
from megatron.convert.megatron_source import (
    Key,
    MegatronSource,
    check_ranks,
    find_steps,
    flatten_tensors,
)
from megatron.convert.unpickle import load_pickle_file
from megatron.errors import CheckpointError
from megatron.parallel.shard import ADAM_KINDS, Kind


class RankFiles:
    """`mp_rank_TT[_PPP]/model_optim_rng.pt`. The optimizer's states are not read."""

    def __init__(self, folder: Path) -> None:
        """Read the names of all files' tensors.

        Raises:
            CheckpointError: a file is missing or damaged, or contains what is not allowed.
        """
        first = _find_rank_file(folder, 0, 0)
        state = load_pickle_file(first)
        self.run = read_saved_run(first, state)
        self.steps: int | None = None
        self.slices = self.run.tensor_ranks
        check_ranks(folder, "mp_rank_*", self.slices * self.run.pipeline_ranks)
        self._slices: dict[Key, list[Tensor]] = {}
        self.names: dict[Key, str] = {}
        self.unknown: list[str] = []
        for rank in range(self.slices):
            self._read_rank(
                [
                    load_pickle_file(_find_rank_file(folder, rank, stage))
                    for stage in range(self.run.pipeline_ranks)
                ]
            )

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return the slices of a weight. See `MegatronSource`."""
        return self._slices[key]

    def _read_rank(self, stages: Sequence[Mapping[str, Any]]) -> None:
        """Collect the tensors of one tensor-parallel rank from all stages."""
        before = 0
        # With virtual stages, each file has several parts, which are dealt to the ranks in turn.
        parts = [name for name in stages[0] if re.fullmatch(r"model\d*", name)]
        for part in sorted(parts):
            for stage in stages:
                layers = self._read_part(stage.get(part) or {}, before)
                before += layers

    def _read_part(self, part: Mapping[str, Any], before: int) -> int:
        """Collect the tensors of one part, and return its number of layers."""
        highest = -1
        for name, tensor in flatten_tensors(part).items():
            if is_no_weight(name):
                continue
            key = rename(name)
            if key is None:
                self.unknown.append(name)
                continue
            layer, ours = key
            if layer is not None:
                highest = max(highest, layer)
                layer += before
            self.names[layer, ours] = name
            self._slices.setdefault((layer, ours), []).append(tensor)
        return highest + 1


def _find_rank_file(folder: Path, rank: int, stage: int) -> Path:
    """Return the file of a rank.

    Raises:
        CheckpointError: there is none.
    """
    names = [f"mp_rank_{rank:02d}_{stage:03d}"]
    if stage == 0:
        names.insert(0, f"mp_rank_{rank:02d}")
    for name in names:
        for file in ("model_optim_rng.pt", "model_rng.pt"):
            if (folder / name / file).is_file():
                return folder / name / file
    raise CheckpointError(f"{folder} has no {names[-1]}/model_optim_rng.pt")


_THEIR_KINDS: dict[Kind, str] = {
    "weight": "optimizer.state.fp32_param.",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
}


class TorchDist:
    """`torch_dist`: whole tensors, in a folder of torch.distributed.checkpoint."""

    slices = 1

    def __init__(self, folder: Path) -> None:
        """Read the names of the tensors.

        Raises:
            CheckpointError: a file is missing or damaged, or contains what is not allowed.
        """
        common = folder / "common.pt"
        state = load_pickle_file(common)
        self.run = read_saved_run(common, state)
        self._tensors = DistributedTensors(folder)
        self.names: dict[Key, str] = {}
        self.unknown: list[str] = []
        self._stacked: set[str] = set()
        """Tensors with all layers."""
        for name, size in self._tensors.sizes.items():
            if name.startswith(("optimizer.", "chained_", "rng_state", "rerun_state")):
                continue
            if is_no_weight(name):
                continue
            key = rename(name)
            if key is None:
                self.unknown.append(name)
            elif key[0] == -1:
                self._stacked.add(name)
                for layer in range(size[0]):
                    self.names[layer, key[1]] = name
            else:
                self.names[key] = name
        self._kinds = {kind: self._find_states(prefix) for kind, prefix in _THEIR_KINDS.items()}
        self.steps: int | None = None
        if all(self._kinds[kind] for kind in ADAM_KINDS):
            self.steps = find_steps(state.get("optimizer"))

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return a tensor. See `MegatronSource`."""
        layer, _ = key
        name = self.names[key]
        stored = name
        if self._kinds[kind]:
            stored = _THEIR_KINDS[kind] + name
        if name in self._stacked:
            return [self._tensors.read(stored, layer)]
        return [self._tensors.read(stored)]

    def _find_states(self, prefix: str) -> bool:
        """Return whether there is a state of each weight, with its shape."""
        for name in set(self.names.values()):
            if self._tensors.sizes.get(prefix + name) != self._tensors.sizes[name]:
                return False
        return True


def open_megatron_lm(folder: Path) -> MegatronSource:
    """Open a checkpoint of Megatron-LM.

    Args:
        folder: Folder of the checkpoints, or of one iteration.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    folder = _find_iteration(folder)
    if (folder / ".metadata").is_file() and (folder / "common.pt").is_file():
        return TorchDist(folder)
    if list(folder.glob("mp_rank_*")):
        return RankFiles(folder)
    raise CheckpointError(
        f"{folder} has neither mp_rank_*/model_optim_rng.pt nor .metadata and common.pt"
    )


def _find_iteration(folder: Path) -> Path:
    """Return the folder of the iteration that the checkpoints' pointer names.

    Raises:
        CheckpointError: the folder or the pointer is missing or wrong.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    pointer = folder / "latest_checkpointed_iteration.txt"
    if not pointer.is_file():
        return folder
    text = pointer.read_text(encoding="utf-8").strip()
    name = text
    if text.isdigit():
        name = f"iter_{int(text):07d}"
    if Path(name).name != name or not (folder / name).is_dir():
        raise CheckpointError(f"{pointer} contains {text!r}, and there is no such checkpoint")
    return folder / name
