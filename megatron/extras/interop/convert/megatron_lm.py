"""Checkpoints of Megatron-LM: one file for each rank, or a folder of torch.distributed.checkpoint.

`mp_rank_TT[_PPP]/model_optim_rng.pt` has the weights of one tensor-parallel and pipeline rank. Both
the older names and those of Megatron core are read. `torch_dist` has whole tensors, usually all
layers of a kind in one, and the optimizer's states under the same names. The distributed optimizer
can also store them as buffers of its ranks (`dp_reshardable`), which is refused.

The optimizer's states in the files of a rank are fp32 weights and Adam's moments:

- An optimizer that is not distributed stores a state for each parameter, group by group. A group
  has the matrices or the vectors, in the order of the model (megatron/core/optimizer/__init__.py,
  `_get_param_groups`).
- The distributed optimizer stores buffers in distrib_optim.pt, one for each part of the model. The
  parameters are in reverse order. Each begins at a multiple of 64 numbers after the beginning of
  its bucket, and buckets follow each other without padding (param_and_grad_buffer.py, and
  `get_parameter_state_dp_zero` of distrib_optimizer.py).

Neither names the parameters. Invariant: the states of a parameter are returned only if its fp32
weights, rounded to the dtype of the model, equal those of the model bit for bit.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError
from megatron.base.outside_file import POINTER_BYTES, load_text
from megatron.extras.interop.convert.megatron_args import read_saved_run
from megatron.extras.interop.convert.megatron_names import (
    Key,
    MegatronSource,
    check_ranks,
    find_steps,
    flatten_tensors,
    is_no_weight,
    is_parameter,
    rename,
)
from megatron.extras.interop.convert.unpickle import DistributedTensors, load_pickle_file
from megatron.parallel.shard import ADAM_KINDS, Kind


class RankFiles:
    """`mp_rank_TT[_PPP]/model_optim_rng.pt`, and `distrib_optim.pt` beside it."""

    def __init__(self, folder: Path, *, weights_only: bool = False) -> None:
        """Read the names of all files' tensors.

        Args:
            folder: The folder.
            weights_only: Do not read the optimizer's states.

        Raises:
            CheckpointError: a file is missing or damaged, or contains what is not allowed.
        """
        self._folder = folder
        try:
            first = _find_rank_file(folder, 0, 0)
        except CheckpointError:
            # Several ranks divide experts.
            first = _find_rank_file(folder, 0, 0, 0)
        state = load_pickle_file(first)
        self.run = read_saved_run(first, state)
        self.slices = self.run.tensor_ranks
        ranks = self.slices * self.run.pipeline_ranks * self.run.expert_ranks
        check_ranks(folder, "mp_rank_*", ranks)
        self._slices: dict[Key, list[dict[Kind, Tensor]]] = {}
        self._names_in_files: dict[Key, str] = {}
        """Key with the number of a layer within its file -> name there."""
        self.names: dict[Key, str] = {}
        self.unknown: list[str] = []
        # The distributed optimizer keeps its settings here, and its states in distrib_optim.pt.
        self._has_states = not weights_only and state.get("optimizer") is not None
        if self._has_states and self.run.args.get("num_experts"):
            raise CheckpointError(
                f"{first} has states of the optimizer of a model with experts, which are not "
                "imported yet; give --weights-only to import the weights without them"
            )
        for rank in range(self.slices):
            self._read_rank(rank)
        self.steps: int | None = None
        if self._has_states:
            self.steps = find_steps(state["optimizer"])
            if self.steps is None:
                raise CheckpointError(
                    f"{first} does not give the number of the optimizer's steps; give "
                    "--weights-only to import the weights without its states"
                )

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return the slices of a tensor. See `MegatronSource`."""
        return [tensors[kind] for tensors in self._slices[key]]

    def _read_rank(self, rank: int) -> None:
        """Collect the tensors of one tensor-parallel rank from all stages.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        # Every file counts its layers from 0, so their numbers follow from the files before.
        stages = [self._read_stage(rank, stage) for stage in range(self.run.pipeline_ranks)]
        before = 0
        # With virtual stages, each file has several parts, which are assigned to the ranks in turn.
        for part in stages[0]:
            for stage in stages:
                before += self._add_part(stage.get(part) or {}, before)

    def _read_stage(self, rank: int, stage: int) -> dict[str, dict[Key, dict[Kind, Tensor]]]:
        """Return the tensors of one rank and stage: part of the model -> key -> kind -> tensor.

        Layers are counted from 0, and experts over all ranks that divide them.
        """
        ranks = self.run.expert_ranks
        local = int(self.run.args.get("num_experts") or 0) // ranks
        found: dict[str, dict[Key, dict[Kind, Tensor]]] = {}
        for expert in range(ranks):
            number = None if ranks == 1 else expert
            for part, tensors in self._read_file(rank, stage, number).items():
                into = found.setdefault(part, {})
                for name, kinds in tensors.items():
                    if is_no_weight(name):
                        continue
                    key = rename(name)
                    if key is None:
                        self.unknown.append(name)
                        continue
                    for own, values in _divide_experts(key, kinds, expert * local, local):
                        # All ranks have the rest of the model. The first one counts.
                        if own not in into:
                            into[own] = values
                            self._names_in_files.setdefault(own, name)
        return found

    def _read_file(
        self, rank: int, stage: int, expert: int | None
    ) -> dict[str, dict[str, dict[Kind, Tensor]]]:
        """Return the tensors of one file: part of the model -> name -> kind -> tensor.

        Raises:
            CheckpointError: the file is missing or damaged, or its optimizer's states do not fit.
        """
        path = _find_rank_file(self._folder, rank, stage, expert)
        state = load_pickle_file(path)
        parts = {
            part: {
                name: tensor
                for name, tensor in flatten_tensors(state[part] or {}).items()
                if is_parameter(name)
            }
            for part in sorted(name for name in state if re.fullmatch(r"model\d*", name))
        }
        states: States | None = None
        if self._has_states:
            # Each part counts its layers from 0.
            named = {
                part: {f"{part}/{name}": tensor for name, tensor in weights.items()}
                for part, weights in parts.items()
            }
            states = read_rank_states(path, state.get("optimizer"), named)
            if states is None:
                raise CheckpointError(f"{path} has no optimizer's states, and other ranks have")
        found: dict[str, dict[str, dict[Kind, Tensor]]] = {}
        for part, weights in parts.items():
            found[part] = {
                name: {"weight": tensor} if states is None else states[f"{part}/{name}"]
                for name, tensor in weights.items()
            }
        return found

    def _add_part(self, part: Mapping[Key, dict[Kind, Tensor]], before: int) -> int:
        """Add the tensors of one part, and return its number of layers."""
        highest = -1
        for (layer, inside), tensors in part.items():
            name = self._names_in_files[layer, inside]
            if layer is not None:
                highest = max(highest, layer)
                layer += before
            self.names[layer, inside] = name
            self._slices.setdefault((layer, inside), []).append(tensors)
        # The names give the count. A part without layers has only the embedding or the head.
        return highest + 1


def _divide_experts(
    key: Key, kinds: dict[Kind, Tensor], first: int, local: int
) -> Iterator[tuple[Key, dict[Kind, Tensor]]]:
    """Yield a tensor of a rank with its key in the complete model.

    Args:
        key: Layer and name of the tensor. Experts are numbered within the rank.
        kinds: The tensor of each kind.
        first: Number of the rank's first expert.
        local: Number of its experts.
    """
    layer, inside = key
    start, _, rest = inside.partition("mlp.experts.")
    if start or not rest:
        yield key, kinds
        return
    number, _, part = rest.rpartition(".")
    if number:
        yield (layer, f"mlp.experts.{first + int(number)}.{part}"), kinds
        return
    # One tensor has all experts, each transposed: [h, 2 f], or [f, h] for the second matrix.
    for own in range(local):
        matrices = {}
        for kind, tensor in kinds.items():
            rows, columns = tensor.shape
            sizes = (local, rows, -1) if part == "in" else (local, -1, columns)
            matrices[kind] = tensor.reshape(sizes)[own].t()
        yield (layer, f"mlp.experts.{first + own}.{part}"), matrices


def _find_rank_file(folder: Path, rank: int, stage: int, expert: int | None = None) -> Path:
    """Return the file of a rank. `expert`: its number among the ranks that divide the experts.

    Raises:
        CheckpointError: there is none.
    """
    names = [f"mp_rank_{rank:02d}_{stage:03d}"]
    if stage == 0:
        # Without a pipeline, the name has no stage.
        names.insert(0, f"mp_rank_{rank:02d}")
    if expert is not None:
        names = [f"{name}_{expert:03d}" for name in names]
    for name in names:
        for file in ("model_optim_rng.pt", "model_rng.pt"):
            if (folder / name / file).is_file():
                return folder / name / file
    raise CheckpointError(f"{folder} has no {names[-1]}/model_optim_rng.pt")


_THEIR_KINDS: dict[Kind, tuple[str, ...]] = {
    # The second name is that of the distributed optimizer, if it is fully reshardable.
    "weight": ("optimizer.state.fp32_param.", "optimizer.state.param."),
    "exp_avg": ("optimizer.state.exp_avg.",),
    "exp_avg_sq": ("optimizer.state.exp_avg_sq.",),
}
# A run with several optimizers numbers them at the beginning of these names.
_BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(.+)")


class TorchDist:
    """`torch_dist`: whole tensors, in a folder of torch.distributed.checkpoint."""

    slices = 1

    def __init__(self, folder: Path, *, weights_only: bool = False) -> None:
        """Read the names of the tensors.

        Args:
            folder: The folder.
            weights_only: Do not read the optimizer's states.

        Raises:
            CheckpointError: a file is missing or damaged, contains what is not allowed, or has the
                optimizer's states as buffers.
        """
        common = folder / "common.pt"
        state = load_pickle_file(common)
        self.run = read_saved_run(common, state)
        self._folder = folder
        self._tensors = DistributedTensors(folder)
        self.names: dict[Key, str] = {}
        self.unknown: list[str] = []
        self._stacked: set[str] = set()
        """Tensors with all layers."""
        self._name_weights()
        self.steps: int | None = None
        self._prefixes: dict[Kind, str] = {}
        if weights_only:
            return
        self._check_sharding(self._tensors.entries)
        for kind, prefixes in _THEIR_KINDS.items():
            for prefix in prefixes:
                if self._has_states(prefix):
                    self._prefixes[kind] = prefix
        if all(kind in self._prefixes for kind in ADAM_KINDS):
            self.steps = find_steps(state.get("optimizer"))

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return a tensor. See `MegatronSource`."""
        layer, _ = key
        name = self.names[key]
        stored = name
        if kind in self._prefixes:
            stored = self._prefixes[kind] + name
        if name in self._stacked:
            return [self._tensors.read(stored, layer)]
        return [self._tensors.read(stored)]

    def _name_weights(self) -> None:
        """Find the weights among the tensors."""
        for name, size in self._tensors.sizes.items():
            # The optimizer's states are under the names of the weights, with a prefix.
            if name.startswith(("optimizer.", "chained_", "rng_state", "rerun_state")):
                continue
            if is_no_weight(name):
                continue
            key = rename(name)
            if key is None:
                self.unknown.append(name)
            # Layers of a kind lie in one tensor, and the first dimension counts them.
            elif key[0] == -1:
                self._stacked.add(name)
                for layer in range(size[0]):
                    self.names[layer, key[1]] = name
            else:
                self.names[key] = name

    def _check_sharding(self, names: Iterable[str]) -> None:
        """Check that the optimizer's states are stored by parameter.

        Raises:
            CheckpointError: they are stored in another way. The message names it.
        """
        found = None
        # Read as whole tensors, these would give wrong numbers without an error.
        if any(".bucket_idx_" in name for name in names if _BUFFERS.match(name)):
            found = "as buffers of the distributed optimizer (dp_reshardable)"
        elif any(name.endswith(".param_state") for name in names if _BUFFERS.match(name)):
            found = "in one object for each rank (dp_zero_gather_scatter)"
        elif self._is_flattened():
            found = "as flattened slices (fully_sharded_model_space)"
        if found is not None:
            raise CheckpointError(
                f"{self._folder} has the optimizer's states {found}, which is not supported; save "
                "the checkpoint with --dist-ckpt-optim-fully-reshardable, or give --weights-only"
            )

    def _is_flattened(self) -> bool:
        """Return whether there is a moment whose shape is not that of its weight."""
        for name, entry in self._tensors.sizes.items():
            weight = self._tensors.sizes.get(name.removeprefix("optimizer.state.exp_avg."))
            if name.startswith("optimizer.state.exp_avg.") and weight is not None:
                return entry != weight
        return False

    def _has_states(self, prefix: str) -> bool:
        """Return whether there is a state of each weight, with its shape."""
        for name in set(self.names.values()):
            entry = self._tensors.sizes.get(prefix + name)
            if entry is None or entry != self._tensors.sizes[name]:
                return False
        return True


def open_megatron_lm(folder: Path, *, weights_only: bool = False) -> MegatronSource:
    """Open a checkpoint of Megatron-LM.

    Args:
        folder: Folder of the checkpoints, or of one iteration.
        weights_only: Do not read the optimizer's states.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    folder = _find_iteration(folder)
    if (folder / ".metadata").is_file() and (folder / "common.pt").is_file():
        return TorchDist(folder, weights_only=weights_only)
    if list(folder.glob("mp_rank_*")):
        return RankFiles(folder, weights_only=weights_only)
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
    if not pointer.exists():
        return folder
    text = load_text(pointer, POINTER_BYTES).strip()
    name = text
    # The pointer may also be a name, such as `release`.
    if text.isdigit():
        name = f"iter_{int(text):07d}"
    if Path(name).name != name or not (folder / name).is_dir():
        raise CheckpointError(f"{pointer} contains {text!r}, and there is no such checkpoint")
    return folder / name


States = dict[str, dict[Kind, Tensor]]
"""Name of a parameter -> kind -> tensor with its shape."""
_ALIGNED = 64
"""Numbers to which the beginning of a parameter is aligned in its bucket."""
_WEIGHTS_ONLY = "give --weights-only to import the weights without the optimizer's states"


def read_rank_states(
    path: Path, optimizer: Any, parts: Mapping[str, Mapping[str, Tensor]]
) -> States | None:
    """Return the states of one rank's parameters. None if its files have none.

    Args:
        path: The file of the rank's weights.
        optimizer: What it has under `optimizer`.
        parts: The weights of each part of the model, in the order of the model. A rank has several
            parts with virtual stages. A name may be in one part only.

    Raises:
        CheckpointError: the states are stored in a way that is not supported, or do not fit the
            weights.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, Mapping):
        raise CheckpointError(
            f"{path} has the states of several optimizers, which is not supported; {_WEIGHTS_ONLY}"
        )
    buffers = path.with_name("distrib_optim.pt")
    if buffers.is_file():
        return _read_buffers(buffers, parts)
    # Mixed precision wraps the optimizer. With fp32 it is not wrapped.
    inner = optimizer.get("optimizer", optimizer)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("state"), Mapping):
        raise CheckpointError(
            f"{path} has no state of its parameters, and there is no {buffers.name} beside it; "
            f"{_WEIGHTS_ONLY}"
        )
    weights = {name: tensor for part in parts.values() for name, tensor in part.items()}
    return _read_groups(path, inner, optimizer.get("fp32_from_fp16_params"), weights)


def _read_groups(
    path: Path, inner: Mapping[str, Any], copies: Any, weights: Mapping[str, Tensor]
) -> States:
    """Return the states of an optimizer that is not distributed.

    Raises:
        CheckpointError: they do not fit the weights.
    """
    remaining = {
        # Megatron puts vectors into a group of their own, because they have no weight decay.
        True: iter([name for name, tensor in weights.items() if tensor.dim() > 1]),
        False: iter([name for name, tensor in weights.items() if tensor.dim() <= 1]),
    }
    found: States = {}
    for number, group in enumerate(inner.get("param_groups") or []):
        group_copies = iter(copies[number] if copies is not None else [])
        for identifier in group["params"]:
            state = inner["state"].get(identifier)
            if not isinstance(state, Mapping) or not all(kind in state for kind in ADAM_KINDS):
                raise CheckpointError(
                    f"{path} has no Adam moments of the parameter {identifier}; {_WEIGHTS_ONLY}"
                )
            name = next(remaining[state["exp_avg"].dim() > 1], None)
            if name is None:
                raise CheckpointError(f"{path} has more states than parameters; {_WEIGHTS_ONLY}")
            weight = weights[name]
            # A model in fp32 has no copies, and its weights are in the file already.
            copy = weight.float()
            if copies is not None and weight.dtype != torch.float32:
                copy = next(group_copies, torch.empty(0))
            tensors: dict[Kind, Tensor] = {"weight": copy}
            tensors |= {kind: state[kind] for kind in ADAM_KINDS}
            if any(tensor.shape != weight.shape for tensor in tensors.values()):
                raise _refuse(path, name)
            # Equal shapes prove nothing, because all layers have the same. Equal numbers do.
            if not torch.equal(copy.to(weight.dtype), weight):
                raise _refuse(path, name)
            found[name] = tensors
    missing = sorted(weights.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{path} has no states of {', '.join(missing[:12])}; {_WEIGHTS_ONLY}")
    return found


def _read_buffers(path: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> States:
    """Return the states of the distributed optimizer.

    Raises:
        CheckpointError: an older version wrote them, or they do not fit the weights.
    """
    content = load_pickle_file(path)
    if not isinstance(content, Mapping) or content.get("buckets_coalesced") is not True:
        raise CheckpointError(
            f"{path} was written bucket by bucket, as before Megatron core 0.7, or by several "
            f"optimizers, which is not supported; {_WEIGHTS_ONLY}"
        )
    buffers = [value for key, value in content.items() if isinstance(key, int)]
    if len(buffers) != len(parts) or any(len(each) != 1 for each in buffers):
        raise CheckpointError(
            f"{path} has {len(buffers)} buffers, and one for each of the {len(parts)} parts of the "
            f"model is supported, all of one dtype; {_WEIGHTS_ONLY}"
        )
    found: States = {}
    for buffer, weights in zip(buffers, parts.values(), strict=True):
        # The key of each buffer is the pair of its dtypes, of which there is one.
        (flat,) = buffer.values()
        found |= _divide_buffer(path, flat, weights)
    return found


def _divide_buffer(path: Path, flat: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> States:
    """Return the states of one part of the model.

    Raises:
        CheckpointError: they do not fit the weights.
    """
    found: States = {}
    start = 0
    end = 0
    # The backward pass reaches the last parameters first, and buckets are sent in that order.
    for name, weight in reversed(list(weights.items())):
        for begin, bucket in _list_positions(start, end):
            tensors = _view_parameter(flat, begin, weight)
            if tensors is not None and torch.equal(tensors["weight"].to(weight.dtype), weight):
                found[name] = tensors
                start = bucket
                end = begin + weight.numel()
                break
        else:
            raise _refuse(path, name)
    # Numbers that are left over belong to a parameter that the weights do not have.
    if end != len(flat["param"]):
        raise CheckpointError(
            f"{path} has {len(flat['param'])} numbers, and the parameters end at {end}; "
            f"{_WEIGHTS_ONLY}"
        )
    return found


def _list_positions(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the next parameter may begin, and the beginning of its bucket.

    Args:
        start: Beginning of the current bucket.
        end: End of the parameter before.
    """
    yield start + -(-(end - start) // _ALIGNED) * _ALIGNED, start
    # A new bucket begins. The file does not say where.
    yield end, end


def _view_parameter(
    flat: Mapping[str, Tensor], begin: int, weight: Tensor
) -> dict[Kind, Tensor] | None:
    """Return the tensors of a parameter, or None if the buffer ends before."""
    end = begin + weight.numel()
    if end > len(flat["param"]):
        return None
    keys: dict[Kind, str] = {"weight": "param", **{kind: str(kind) for kind in ADAM_KINDS}}
    return {kind: flat[key][begin:end].view(weight.shape) for kind, key in keys.items()}


def _refuse(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the optimizer's fp32 weights are not those of the model at {name}, so its order "
        f"of parameters is not known; {_WEIGHTS_ONLY}"
    )
