"""Checkpoints of Megatron-DeepSpeed and GPT-NeoX: layer files, ZeRO 1 partitions, universal ones.

- `layer_LL-model_TT-model_states.pt` has the weights of one module of the pipeline, on one
  tensor-parallel rank. The modules are numbered in the order of the computation.
- `mp_rank_XX_model_states.pt` has the arguments and counters. Without a pipeline it also has the
  weights. XX counts tensor-parallel ranks first, and then stages.
- `[bf16_|fp16_]zero_pp_rank_D_mp_rank_XX_optim_states.pt` has the part of the fp32 weights and of
  Adam's moments that data-parallel rank D updates. All parameters of a group lie one after the
  other in a flat tensor, which is divided evenly, with padding at its end.
- A universal checkpoint has `zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt`, each a complete tensor.

GPT-NeoX has the same files with other names of tensors, and the YAML files of the run in
`configs/` (newer versions). A run with `pipe-parallel-size: 0` has all weights in
`mp_rank_XX_model_states.pt`. Its optimizer's states are not read. Sources: GPT-NeoX's
megatron/checkpointing.py, megatron/model/gpt2_model.py and transformer.py, and its
tools/ckpts/convert_neox_to_hf.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.outside_file import POINTER_BYTES, load_text
from megatron.config.fields import LoadedConfig
from megatron.extras.interop.convert.megatron_args import SavedRun, read_saved_run
from megatron.extras.interop.convert.megatron_names import (
    Key,
    MegatronSource,
    check_ranks,
    find_steps,
    flatten_tensors,
    is_no_weight,
    number_pipeline_layers,
    rename,
)
from megatron.extras.interop.convert.unpickle import FragmentAddress, load_pickle_file
from megatron.extras.interop.translators.translator import load_config
from megatron.parallel.shard import ADAM_KINDS, Kind

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FLAT: dict[Kind, str] = {"weight": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def resolve_names(names: Sequence[str]) -> tuple[dict[str, Key], list[str]]:
    """Return the key of each of their tensors, and the names that have no place in our models."""
    # Layer files have the number of a pipeline module in front. Rank files have nested names.
    weights = [name for name in names if not is_no_weight(name)]
    keys: dict[str, Key] = number_pipeline_layers(weights)
    unknown = []
    for name in weights:
        if name in keys:
            continue
        key = rename(name)
        if key is None:
            unknown.append(name)
        else:
            keys[name] = key
    return keys, unknown


class DeepSpeedFolder:
    """One `global_stepN` with layer files, or with the weights in its rank files."""

    def __init__(self, folder: Path, *, weights_only: bool = False) -> None:
        """Read the names of all tensors.

        Args:
            folder: The folder.
            weights_only: Do not read the optimizer files.

        Raises:
            CheckpointError: a file is missing or damaged, or contains what is not allowed.
        """
        self._folder = folder
        first = folder / "mp_rank_00_model_states.pt"
        self._state = load_pickle_file(first)
        self.run: SavedRun = read_saved_run(first, self._state)
        self.slices = self.run.tensor_ranks
        self.steps: int | None = None
        # Files of another layout that were left in the folder would be read as parts of this one.
        check_ranks(folder, "mp_rank_*_model_states.pt", self.slices * self.run.pipeline_ranks)
        self._weights = self._find_weights()
        keys, self.unknown = resolve_names(list(self._weights))
        self.names: dict[Key, str] = {key: name for name, key in keys.items()}
        self._partitions: Partitions | None = None
        has_states = any(_OPTIMIZER_FILE.fullmatch(path.name) for path in folder.iterdir())
        if has_states and not weights_only:
            self._partitions = Partitions(folder, self.run)
            # Training cannot continue if some parameters have states and others have none.
            missing = self.names.keys() - self._partitions.keys
            if missing:
                raise CheckpointError(
                    f"{folder}: the optimizer files have no state of "
                    f"{', '.join(sorted(self.names[key] for key in missing))}"
                )
            self.steps = self._partitions.steps
            if self.steps is None:
                # The optimizer does not count. DeepSpeed counts the steps that overflowed too.
                skipped = int(self._state.get("skipped_steps") or 0)
                self.steps = int(self._state.get("global_steps") or self.run.iteration) - skipped

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return the slices of a tensor. See `MegatronSource`."""
        if self._partitions is not None:
            return self._partitions.read(kind, key)
        return self._weights[self.names[key]]

    def _find_weights(self) -> dict[str, list[Tensor]]:
        """Return the slices of the weights by their names.

        Raises:
            CheckpointError: a layer file of a rank is missing.
        """
        files = list_layer_files(self._folder)
        if files:
            return read_layer_files(self._folder, files, self.slices)
        if self.run.pipeline_ranks > 1:
            raise CheckpointError(f"{self._folder} has no layer_*-model_*-model_states.pt")
        return read_rank_files(self._folder, self.slices)


def list_layer_files(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the layer files of a checkpoint by module and tensor-parallel rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _LAYER_FILE.fullmatch(path.name):
            found.setdefault(int(match.group(1)), {})[int(match.group(2))] = path
    return found


def read_layer_files(
    folder: Path, found: Mapping[int, Mapping[int, Path]], slices: int
) -> dict[str, list[Tensor]]:
    """Return the slices of the weights in layer files, by number of the module and name.

    Raises:
        CheckpointError: a layer file of a rank is missing.
    """
    weights: dict[str, list[Tensor]] = {}
    for number, files in found.items():
        if sorted(files) != list(range(slices)):
            raise CheckpointError(
                f"{folder} has layer_{number:02d} of the tensor-parallel ranks {sorted(files)}, "
                f"and the run had {slices} ranks"
            )
        for rank in range(slices):
            for name, tensor in flatten_tensors(load_pickle_file(files[rank])).items():
                weights.setdefault(f"{number}.{name}", []).append(tensor)
    return weights


def read_rank_files(folder: Path, slices: int) -> dict[str, list[Tensor]]:
    """Return the slices of the weights of a run without a pipeline.

    Raises:
        CheckpointError: the rank files have no weights.
    """
    weights: dict[str, list[Tensor]] = {}
    for rank in range(slices):
        state = load_pickle_file(folder / f"mp_rank_{rank:02d}_model_states.pt")
        module = state.get("module")
        if not isinstance(module, Mapping):
            raise CheckpointError(
                f"{folder} has no layer_*-model_*-model_states.pt, and its rank files have no "
                "weights of the complete model"
            )
        for name, tensor in flatten_tensors(module).items():
            weights.setdefault(name, []).append(tensor)
    return weights


class Partitions:
    """The optimizer files of ZeRO 1: fp32 weights and Adam's moments in flat partitions."""

    def __init__(self, folder: Path, run: SavedRun) -> None:
        """Find the parameters in the partitions.

        Raises:
            CheckpointError: a file is missing, damaged, or of another ZeRO stage.
        """
        self._folder = folder
        self._fragments: list[dict[str, list[tuple[int, int, FragmentAddress]]]] = []
        """Per model-parallel rank: name -> (data-parallel rank, group, place) of its fragments."""
        self._shapes: list[dict[str, torch.Size]] = []
        self._files: list[list[Mapping[str, Any]]] = []
        self._slices = run.tensor_ranks
        for rank in range(run.tensor_ranks * run.pipeline_ranks):
            self._read_rank(rank)
        names = list(dict.fromkeys(name for each in self._fragments for name in each))
        resolved, _ = resolve_names(names)
        self._names = {key: name for name, key in resolved.items()}
        self.keys = self._names.keys()
        self.steps = find_steps(self._files[0][0])

    def _read_rank(self, rank: int) -> None:
        """Read the files of one model-parallel rank.

        Raises:
            CheckpointError: see the constructor.
        """
        files: dict[int, Path] = {}
        for path in self._folder.iterdir():
            match = _OPTIMIZER_FILE.fullmatch(path.name)
            if match is not None and int(match.group(2)) == rank:
                files[int(match.group(1))] = path
        model = load_pickle_file(self._folder / f"mp_rank_{rank:02d}_model_states.pt")
        # Without it, a missing last file shows only where its fragments are counted.
        expected = model.get("dp_world_size") or len(files)
        if not files or sorted(files) != list(range(expected)):
            raise CheckpointError(
                f"{self._folder} has optimizer files of the data-parallel ranks {sorted(files)} "
                f"for mp_rank_{rank:02d}, and {expected} ranks wrote it"
            )
        shapes: dict[str, torch.Size] = {}
        # The partitions are flat. Only this file has the shapes.
        for group in model.get("param_shapes") or []:
            shapes |= group
        states = []
        fragments: dict[str, list[tuple[int, int, FragmentAddress]]] = {}
        for data_rank in range(expected):
            state = load_pickle_file(files[data_rank]).get("optimizer_state_dict") or {}
            mappings = state.get("param_slice_mappings")
            # Without it, the order would follow from DeepSpeed's rules, which have changed.
            if mappings is None or "single_partition_of_fp32_groups" not in state:
                raise CheckpointError(
                    f"{files[data_rank]} does not say where each parameter lies "
                    "(param_slice_mappings of ZeRO 1); convert it with DeepSpeed's "
                    "ds_to_universal.py, or give --weights-only"
                )
            states.append(state)
            for group_number, mapping in enumerate(mappings):
                for name, place in mapping.items():
                    fragments.setdefault(name, []).append((data_rank, group_number, place))
        self._files.append(states)
        self._shapes.append(shapes)
        self._fragments.append(fragments)

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return the slices of a tensor."""
        name = self._names[key]
        slices = []
        # The first stage that has the parameter. A tied embedding is on the last stage too.
        stages = len(self._fragments) // self._slices
        for tensor_rank in range(self._slices):
            for stage in range(stages):
                rank = stage * self._slices + tensor_rank
                if name in self._fragments[rank]:
                    slices.append(self._collect(kind, rank, name))
                    break
        return slices

    def _collect(self, kind: Kind, rank: int, name: str) -> Tensor:
        """Return one rank's slice of a parameter from its fragments.

        Raises:
            CheckpointError: the fragments do not fit its shape.
        """
        parts = []
        for data_rank, group, place in self._fragments[rank][name]:
            state = self._files[rank][data_rank]
            if kind == "weight":
                flat = state["single_partition_of_fp32_groups"][group]
            else:
                flat = _find_group(state["base_optimizer_state"], group)[_FLAT[kind]]
            # `start` counts from the beginning of this rank's partition, not of the group.
            parts.append(flat.flatten()[place.start : place.start + place.numel])
        whole = torch.cat(parts)
        shape = self._shapes[rank].get(name)
        if shape is None or whole.numel() != shape.numel():
            raise CheckpointError(
                f"{self._folder}: the fragments of {name} have {whole.numel()} numbers, and its "
                f"shape is {None if shape is None else tuple(shape)}"
            )
        return whole.view(shape)


def _find_group(optimizer: Any, group: int) -> Any:
    """Return the state of a group. Older versions store a list."""
    if isinstance(optimizer, Mapping):
        return optimizer["state"][group]
    return optimizer[group]


class Universal:
    """A universal checkpoint of DeepSpeed: complete fp32 tensors."""

    slices = 1

    def __init__(self, folder: Path) -> None:
        """Read the names of the tensors.

        Raises:
            CheckpointError: a file is missing or damaged, or contains what is not allowed.
        """
        # All of them have the same arguments.
        first = next(iter(sorted(folder.glob("mp_rank_*_model_states.pt"))), None)
        if first is None:
            raise CheckpointError(f"{folder} has no mp_rank_00_model_states.pt")
        self.run = read_saved_run(first, load_pickle_file(first))
        self._zero = folder / "zero"
        found = sorted(path.parent.name for path in self._zero.glob("*/fp32.pt"))
        keys, self.unknown = resolve_names(found)
        self.names: dict[Key, str] = {key: name for name, key in keys.items()}
        self.steps = self._find_steps()

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return a tensor. See `MegatronSource`.

        Raises:
            CheckpointError: its file is missing or damaged.
        """
        path = self._zero / self.names[key] / f"{_FLAT[kind]}.pt"
        found = load_pickle_file(path)
        # Versions since 0.10 have a dictionary with notes on how the ranks were merged.
        if isinstance(found, Mapping):
            merged_by_halves = found.get("param_n_sub_params") == 2
            found = found.get("param")
        else:
            merged_by_halves = False
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{path} has no tensor")
        gated = self.run.args.get("swiglu") or self.run.args.get("glu_activation")
        alternate = gated and self.run.tensor_ranks > 1 and not merged_by_halves
        if alternate and key[1].startswith("mlp.in."):
            # The halves of the ranks alternate, and the number of ranks may have been another.
            raise CheckpointError(
                f"{path} does not say how the halves of a gated MLP were merged over "
                f"{self.run.tensor_ranks} tensor-parallel ranks; import the checkpoint that it was "
                "made of"
            )
        return [found]

    def _find_steps(self) -> int | None:
        """Return the number of steps of the optimizer's states. None if there are none."""
        for name in self.names.values():
            # States of some parameters only cannot be continued.
            if not all((self._zero / name / f"{kind}.pt").is_file() for kind in ADAM_KINDS):
                return None
        step = self._zero / next(iter(self.names.values()), "") / "step.pt"
        if step.is_file():
            return int(load_pickle_file(step))
        if (self._zero / "optimizer_state.pt").is_file():
            return find_steps(load_pickle_file(self._zero / "optimizer_state.pt"))
        return None


def open_megatron_deepspeed(folder: Path, *, weights_only: bool = False) -> MegatronSource:
    """Open a checkpoint of Megatron-DeepSpeed.

    Args:
        folder: Folder of the checkpoints, or of one `global_stepN`.
        weights_only: Do not read the optimizer files, which ZeRO 1 writes.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    folder = find_step_folder(folder)
    if (folder / "zero").is_dir():
        return Universal(folder)
    return DeepSpeedFolder(folder, weights_only=weights_only)


def find_step_folder(folder: Path) -> Path:
    """Return the folder `global_stepN` that a folder of checkpoints or its pointer names.

    Raises:
        CheckpointError: there is none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    # A user who has converted a checkpoint means the converted one.
    for pointer in ("latest_universal", "latest"):
        path = folder / pointer
        # A pointer that is no regular file is an error, and not an absent one.
        if path.exists():
            name = load_text(path, POINTER_BYTES).strip()
            if Path(name).name != name or not (folder / name).is_dir():
                raise CheckpointError(f"{path} contains {name!r}, and there is no such checkpoint")
            folder = folder / name
            break
    if not (folder / "zero").is_dir() and not (folder / "mp_rank_00_model_states.pt").is_file():
        raise CheckpointError(f"{folder} has no mp_rank_00_model_states.pt")
    return folder


_RENAMED = (
    (r"^sequential\.", ""),
    (r"\.mlp\.linear1\.", ".mlp.dense_h_to_4h."),
    (r"\.mlp\.linear2\.", ".mlp.dense_4h_to_h."),
    # The weight of an RMSNorm.
    (r"\.scale$", ".weight"),
    (r"^(\d+)\.norm\.", r"\1.final_layernorm."),
    (r"^(\d+)\.final_linear\.", r"\1.lm_head."),
)
"""Pattern in a name of GPT-NeoX -> the same in Megatron-DeepSpeed."""


class NeoxFolder:
    """One `global_stepN` of GPT-NeoX. Only the weights are read."""

    steps: int | None = None

    def __init__(self, folder: Path) -> None:
        """Read the names of all tensors.

        Args:
            folder: Folder of the checkpoints, or of one `global_stepN`.

        Raises:
            CheckpointError: a file is missing or damaged, or contains what is not allowed.
        """
        self._folder = find_step_folder(folder)
        first = self._folder / "mp_rank_00_model_states.pt"
        state = load_pickle_file(first)
        if not isinstance(state, Mapping) or not isinstance(state.get("iteration"), int):
            raise CheckpointError(
                f"{first} has no 'iteration', so it is not known where to continue"
            )
        layers = list_layer_files(self._folder)
        if layers:
            self.slices = 1 + max(max(files) for files in layers.values())
            self._weights = read_layer_files(self._folder, layers, self.slices)
        else:
            self.slices = len(list(self._folder.glob("mp_rank_*_model_states.pt")))
            self._weights = read_rank_files(self._folder, self.slices)
        self._state: Mapping[str, Any] = state
        spelled = {_rename(name): name for name in self._weights}
        keys, unknown = resolve_names(list(spelled))
        self.names: dict[Key, str] = {key: spelled[name] for name, key in keys.items()}
        self.unknown = [spelled[name] for name in unknown]
        counted = {"consumed_train_samples": state.get("global_samples")}
        self.run = SavedRun(counted, state["iteration"], 2.0, None, {}, None)

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return the slices of a tensor. See `MegatronSource`."""
        return self._weights[self.names[key]]

    def load_config(self, flags: Sequence[str], vocab_size: int) -> LoadedConfig:
        """Return the configuration of the run, for any number of ranks.

        Args:
            flags: Flags that replace settings, or --config with the YAML files of the run.
            vocab_size: Number of token ids.

        Raises:
            ConfigError: there are no YAML files, or a setting is not possible here.
        """
        words = [*flags, "--vocab-size", str(vocab_size)]
        if not any(word.partition("=")[0] == "--config" for word in flags):
            files = sorted(map(str, (self._folder / "configs").glob("*.yml")))
            if not files:
                raise ConfigError(
                    f"{self._folder} has no folder 'configs' with the YAML files of the run; give "
                    "them after --, as in: -- --config 20B.yml"
                )
            words = ["--config", *files, *words]
        loaded = load_config(words)
        config = loaded.config
        batch = config.batch
        ranks = self._state.get("dp_world_size")
        if batch.global_batch_size is None and isinstance(ranks, int):
            steps = batch.gradient_accumulation_steps or 1
            batch = replace(
                batch,
                global_batch_size=batch.micro_batch_size * steps * ranks,
                gradient_accumulation_steps=None,
            )
        config = replace(
            config,
            batch=batch,
            # The paths are those of the other trainer's checkpoints.
            checkpoint=replace(config.checkpoint, load=None, save=None),
            parallel=replace(
                config.parallel, tensor_model_parallel_size=1, pipeline_model_parallel_size=1
            ),
        )
        return replace(loaded, config=config)


def _rename(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
