"""Loading of a checkpoint into the shards of any parallel layout.

Invariants: every byte that is loaded was checked against its digest. A checkpoint that does not fit
the run is refused before anything is written into the shards.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron.base.errors import CheckpointError, ConfigError, DamagedError
from megatron.checkpoint.folder import find_stored_folder
from megatron.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    Manifest,
    TensorIndex,
    check_size,
    collect_digests,
    read_checked_text,
    read_index,
    read_manifest,
    verify_file,
)
from megatron.checkpoint.tensor_file import TensorReader
from megatron.config.compare import load_yaml
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from megatron.model.gpt import INPUT_AND_OUTPUT
from megatron.model.layer_parts import list_unused_fields
from megatron.model.shape import ModelShape
from megatron.parallel.shard import TensorShard

# Fields that may change on resume, because the shapes of the weights and the function that the
# model computes do not depend on them.
_FREE_TO_CHANGE = {
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "output_init_method_std",
    "linear_time_step",
    "seq_length",
}
_FREE_IN_NEW_RUNS = ("rotary_base", "mscale", "mscale_all_dim")
"""Fields that may change if a run only takes the weights. Longer contexts need other frequencies of
the rotary positions, so all fields of their scaling may change too."""


_ROWS_AT_ONCE = 4096
"""Rows of a matrix that are in memory while their mean is computed."""
_SHOWN_TENSORS = 3
"""Number of tensors that a message lists."""


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint whose small files were read and whose tensors were not."""

    folder: Path
    manifest: Manifest
    config_yaml: str
    """The resolved configuration of the run that wrote it."""

    @property
    def iteration(self) -> int:
        """Iteration after which it was saved."""
        return self.manifest.iteration

    @property
    def state(self) -> dict[str, Any]:
        """`TrainState` as JSON."""
        return self.manifest.state

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's step count and loss scale. None if its state was not saved."""
        return self.manifest.optimizer

    def load_into(
        self,
        shards: Sequence[TensorShard],
        model: ModelConfig | None = None,
        *,
        finetune: bool = False,
    ) -> int:
        """Fill the shards of this rank, whatever layout wrote the checkpoint.

        Only the blocks that hold these shards are read.

        Args:
            shards: The shards of this rank. Their tensors are overwritten.
            model: Architecture of the run. If given, it must fit the checkpoint's.
            finetune: Whether a new run takes the weights. Its rotary positions may differ, and its
                vocabulary may have more tokens. Their rows are the mean of the checkpoint's.

        Returns:
            The number of tokens that the checkpoint does not have.

        Raises:
            CheckpointError: If the checkpoint does not fit. The message has all differences of the
                architecture, and the first ones of names and shapes. Nothing was written.
            DamagedError: If a file is missing, cut off or altered. Some of the shards may have been
                overwritten.
        """
        index = self.read_index()
        # First, because a partly loaded model must not be trained by accident.
        self._check_fit(shards, index, model, finetune)
        added = 0
        with TensorReader(self.folder, collect_digests(self.manifest, index)) as reader:
            for shard in shards:
                stored = index.tensors[f"{shard.kind}/{shard.name}"]
                if tuple(stored["shape"]) == shard.global_shape:
                    _read_shard(reader, shard, stored, len(shard.tensor))
                    continue
                added = shard.global_shape[0] - stored["shape"][0]
                kept = max(0, min(stored["shape"][0] - shard.offset[0], len(shard.tensor)))
                if kept:
                    _read_shard(reader, shard, stored, kept)
                if kept < len(shard.tensor):
                    shard.tensor[kept:] = _compute_mean_row(reader, shard, stored)
        return added

    def read_index(self) -> TensorIndex:
        """Return the positions of the stored tensors.

        Raises:
            DamagedError: If the file is missing or altered.
        """
        return read_index(self.folder, self.manifest)

    def read_config(self) -> Config:
        """Return the configuration of the run that wrote the checkpoint.

        Raises:
            CheckpointError: If it has fields that this version does not know.
        """
        return self._config

    @cached_property
    def _config(self) -> Config:
        """The parsed configuration. A start reads it in several places."""
        # The file's digest was checked, so an error here is a difference of versions.
        try:
            return load_yaml(self.config_yaml)
        except ConfigError as error:
            raise CheckpointError(
                f"{self.folder / CONFIG} was written by version {self.manifest.version}: {error}"
            ) from error

    def check_files(self) -> None:
        """Check that all files exist and have their sizes. It is cheap, and reads no tensor.

        Raises:
            DamagedError: If a file is missing or has another size.
        """
        for name, facts in self.manifest.files.items():
            check_size(self.folder, name, facts["bytes"])

    def verify(self, name: str, read: Callable[[Path, str, int, str], None] = verify_file) -> None:
        """Read one file completely and compare it with its digest.

        Args:
            name: The file.
            read: Reads the file where it is kept. See `verify_file`.

        Raises:
            DamagedError: If it differs or is missing.
            OSError: If it cannot be read.
        """
        # The manifest's digest is in the manifest itself.
        if name == MANIFEST:
            read_manifest(self.folder)
        else:
            read(
                self.folder,
                name,
                self.manifest.files[name]["bytes"],
                self.manifest.files[name]["xxh128"],
            )

    def _check_fit(
        self,
        shards: Sequence[TensorShard],
        index: TensorIndex,
        model: ModelConfig | None,
        finetune: bool,
    ) -> None:
        """Raise CheckpointError with the differences between the checkpoint and the run.

        The settings come first. All of them are listed, so that a user need not correct them one by
        one. The tensors mostly follow from them, so only the first ones are listed.
        """
        settings = []
        if model is not None:
            settings = compare_models(self.read_config().model, model, finetune)
        tensors = _compare_tensors(shards, index, finetune)
        if not settings and not tensors:
            return
        shown = tensors[:_SHOWN_TENSORS]
        if len(tensors) > len(shown):
            shown.append(f"... and {len(tensors) - len(shown)} more differences of tensors")
        raise CheckpointError(
            f"{self.folder} does not fit this run:\n  " + "\n  ".join([*settings, *shown])
        )


def _read_shard(
    reader: TensorReader, shard: TensorShard, stored: Mapping[str, Any], rows: int
) -> None:
    """Fill the first rows of a shard."""
    target = shard.tensor[:rows]
    name = f"{shard.kind}/{shard.name}"
    reader.read_into(target, (shard.offset, tuple(target.shape)), stored, name)


def _compute_mean_row(
    reader: TensorReader, shard: TensorShard, stored: Mapping[str, Any]
) -> torch.Tensor:
    """Return the mean of all rows of a stored matrix, for the columns of a shard."""
    rows = stored["shape"][0]
    columns = tuple(shard.tensor.shape[1:])
    # All ranks add up the same rows in the same order, so their means are equal.
    total = torch.zeros(columns, dtype=torch.float64)
    for first in range(0, rows, _ROWS_AT_ONCE):
        part = torch.empty((min(_ROWS_AT_ONCE, rows - first), *columns))
        needed = ((first, *shard.offset[1:]), tuple(part.shape))
        reader.read_into(part, needed, stored, f"{shard.kind}/{shard.name}")
        total += part.double().sum(0)
    return (total / rows).to(shard.tensor)


def _compare_tensors(
    shards: Sequence[TensorShard], index: TensorIndex, finetune: bool
) -> list[str]:
    """Return a line for each tensor that is missing or has another shape.

    A weight and its states have one line together.
    """
    differing: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for shard in shards:
        stored = index.tensors.get(f"{shard.kind}/{shard.name}")
        if stored is None:
            kinds = missing.setdefault(shard.name, [])
            if shard.kind not in kinds:
                kinds.append(shard.kind)
            differing[shard.name] = f"{', '.join(kinds)} of {shard.name} is not in the checkpoint"
        elif tuple(stored["shape"]) != shard.global_shape:
            rows, *columns = stored["shape"]
            has_new_rows = rows < shard.global_shape[0] and tuple(columns) == shard.global_shape[1:]
            if finetune and shard.name in INPUT_AND_OUTPUT and has_new_rows:
                continue
            differing[shard.name] = (
                f"{shard.name} is {tuple(stored['shape'])} in the checkpoint, and "
                f"{shard.global_shape} in this run"
            )
    return list(differing.values())


def compare_models(saved: ModelConfig, asked: ModelConfig, finetune: bool = False) -> list[str]:
    """Return a line for each field of the architecture that differs and must not change."""
    differences = []
    for field in dataclasses.fields(ModelConfig):
        before, now = (_resolve_field(config, field.name) for config in (saved, asked))
        if before == now or field.name in _FREE_TO_CHANGE:
            continue
        # The weights of another run are a starting point, and need not compute the same.
        if not (finetune and (field.name in _FREE_IN_NEW_RUNS or field.name.startswith("rope_"))):
            flag = "--" + field.name.replace("_", "-")
            hint = ""
            if field.name == "embed_layernorm":
                hint = "; a norm that is added later is untrained: start a new run for it"
            differences.append(f"{flag} is {before} in the checkpoint, and {now} in this run{hint}")
    return differences


def _resolve_field(model: ModelConfig, name: str) -> Any:
    """Return the value of a field, or the value that is derived if the field has its default.

    So a run may write out a value that was left to the default before. A field that has no effect
    in this model has the value None.
    """
    if name in list_unused_fields(model):
        return None
    # These values do not depend on the vocabulary size and the padding, so 0 is given for both.
    shape = ModelShape(model, 0, 0)
    derived = {
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_query_groups": shape.query_groups,
        "max_position_embeddings": shape.position_table_size,
        "kv_channels": shape.head_dim,
        "add_qkv_bias": shape.has_qkv_bias,
        "add_attention_bias": shape.has_attention_bias,
        "add_mlp_bias": shape.has_mlp_bias,
        "latent_norm_epsilon": model.latent_norm_epsilon or model.layernorm_epsilon,
        "linear_norm_epsilon": model.linear_norm_epsilon or model.layernorm_epsilon,
        "linear_norm_placement": model.linear_norm_placement or model.norm_placement,
    }
    return derived.get(name, getattr(model, name))


def open_checkpoint(root: Path, iteration: int) -> Checkpoint:
    """Open the checkpoint of an iteration by reading its small files.

    Args:
        root: Folder of the checkpoints.
        iteration: Iteration of the checkpoint.

    Raises:
        DamagedError: If a file is missing or altered. The message names the folder.
        CheckpointError: If it has another format or cannot be read.
    """
    folder = find_stored_folder(root, iteration)
    checkpoint = open_folder(folder)
    # Somebody renamed the folder. The pointers and the lineage would mean another checkpoint.
    if checkpoint.iteration != iteration:
        raise DamagedError(
            f"{folder} is damaged: it is the checkpoint of iteration {checkpoint.iteration}, "
            "renamed",
            MANIFEST,
        )
    return checkpoint


def open_folder(folder: Path) -> Checkpoint:
    """Open a checkpoint in a folder of any name. See `open_checkpoint`."""
    try:
        manifest = read_manifest(folder)
        return Checkpoint(folder, manifest, read_checked_text(folder, CONFIG, manifest))
    except DamagedError as damage:
        raise DamagedError(f"{folder} is damaged: {damage}", damage.file) from damage
