"""Checkpoints of GPT-NeoX: layer files, or the weights of all layers in rank files.

- `layer_LL-model_TT-model_states.pt` has the weights of one module, on one tensor-parallel rank. A
  run with `pipe-parallel-size: 0` has them in `mp_rank_TT_model_states.pt` instead.
- `mp_rank_XX_model_states.pt` has the iteration and the counters of DeepSpeed.
- `configs/` has the YAML files of the run, which newer versions copy there.

Sources: GPT-NeoX's megatron/checkpointing.py, megatron/model/gpt2_model.py and transformer.py, and
its tools/ckpts/convert_neox_to_hf.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.fields import LoadedConfig
from megatron.extras.interop.convert.megatron_args import SavedRun
from megatron.extras.interop.convert.megatron_deepspeed import (
    find_step_folder,
    list_layer_files,
    read_layer_files,
    read_rank_files,
    resolve_names,
)
from megatron.extras.interop.convert.megatron_names import Key
from megatron.extras.interop.convert.unpickle import load_pickle_file
from megatron.extras.interop.translators.translator import load_config
from megatron.parallel.shard import Kind

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
