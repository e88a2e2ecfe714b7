"""Checkpoints of Megatron-LM: one file for each rank, or a folder of torch.distributed.checkpoint.

`mp_rank_TT[_PPP]/model_optim_rng.pt` has the weights of one tensor-parallel and pipeline rank. Both
the older names and those of Megatron core are read. `torch_dist` has whole tensors, usually all
layers of a kind in one, and the optimizer's states under the same names.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron.convert.megatron_args import read_saved_run
from megatron.convert.megatron_names import is_no_weight, rename
from megatron.convert.megatron_source import (
    Key,
    MegatronSource,
    check_ranks,
    find_steps,
    flatten_tensors,
)
from megatron.convert.unpickle import load_metadata, load_pickle_bytes, load_pickle_file
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
        metadata = load_metadata(folder / ".metadata")
        self._storage = metadata.storage_data
        self._folder = folder
        self._sizes: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.names: dict[Key, str] = {}
        self.unknown: list[str] = []
        self._stacked: set[str] = set()
        """Tensors with all layers."""
        for name, entry in self._sizes.items():
            if name.startswith(("optimizer.", "chained_", "rng_state", "rerun_state")):
                continue
            if is_no_weight(name):
                continue
            key = rename(name)
            if key is None:
                self.unknown.append(name)
            elif key[0] == -1:
                self._stacked.add(name)
                for layer in range(entry.size[0]):
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
            return [self._load(stored, layer)]
        return [self._load(stored, None)]

    def _load(self, name: str, layer: int | None) -> Tensor:
        """Read a tensor, or one layer of a tensor that has all of them.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        entry = self._sizes[name]
        begins = [0] * len(entry.size)
        ends = list(entry.size)
        if layer is not None:
            begins[0] = layer
            ends[0] = layer + 1
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        tensor = torch.empty(sizes, dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            inside = []
            outside = []
            for begin, end, offset, size in zip(
                begins, ends, chunk.offsets, chunk.sizes, strict=True
            ):
                low = max(begin, offset)
                high = max(low, min(end, offset + size))
                inside.append(slice(low - offset, high - offset))
                outside.append(slice(low - begin, high - begin))
            part = tensor[tuple(outside)]
            if part.numel() == 0:
                continue
            part.copy_(self._read_chunk(name, chunk.offsets).reshape(chunk.sizes)[tuple(inside)])
            filled += part.numel()
        if filled != tensor.numel():
            raise CheckpointError(f"{self._folder}: parts of {name} are missing")
        if layer is None:
            return tensor
        return tensor[0]

    def _read_chunk(self, name: str, offsets: torch.Size) -> Tensor:
        """Read one chunk of a tensor from its file.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        stored = self._storage.get(MetadataIndex(name, offsets))
        # A path with a folder in it could read files elsewhere.
        if stored is None or Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(f"{self._folder / '.metadata'} does not give the file of {name}")
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(f"{self._folder}: {name} is compressed, which is not supported")
        path = self._folder / stored.relative_path
        try:
            with open(path, "rb") as file:
                file.seek(stored.offset)
                data = file.read(stored.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        found = load_pickle_bytes(path, data)
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{path} has no tensor for {name}")
        return found

    def _find_states(self, prefix: str) -> bool:
        """Return whether there is a state of each weight, with its shape."""
        for name in set(self.names.values()):
            entry = self._sizes.get(prefix + name)
            if entry is None or entry.size != self._sizes[name].size:
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
