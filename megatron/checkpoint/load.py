"""Loading: a checkpoint's boxes into the live shards of any layout, every byte checked, and whether it fits the run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from megatron.config.cli import load_yaml
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from megatron.errors import CheckpointError, ConfigError, DamagedError
from megatron.model.shape import ModelShape
from megatron.parallel.shard import TensorShard

# What may change on resume: it shapes no weight and no function of the weights.
_FREE_TO_CHANGE = {
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "seq_length",
    "max_position_embeddings",
}


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint, opened: its small files are read, its tensors are not."""

    folder: Path
    manifest: Manifest
    config_yaml: str

    @property
    def iteration(self) -> int:
        return self.manifest.iteration

    @property
    def state(self) -> dict[str, Any]:
        """TrainState."""
        return self.manifest.state

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's scalars; None: saved without the optimizer."""
        return self.manifest.optimizer

    def load_into(self, shards: Sequence[TensorShard], model: ModelConfig | None = None) -> None:
        """Fill live shards, whatever layout wrote the checkpoint; reads only the blocks that they lie in.

        `model`: the architecture of the run; it is compared with the checkpoint's first.

        Raises:
            CheckpointError: all differences of architecture, names and shapes together, before anything is written.
            DamagedError: a file is missing, cut off or altered; shards may have been written into.
        """
        index = self.read_index()
        self._check_fit(shards, index, model)
        with TensorReader(self.folder, collect_digests(self.manifest, index)) as reader:
            for shard in shards:
                tensor = f"{shard.kind}/{shard.name}"
                box = (shard.offset, tuple(shard.tensor.shape))
                reader.read_into(shard.tensor, box, index.tensors[tensor]["boxes"], tensor)

    def read_index(self) -> TensorIndex:
        """Where the tensors are.

        Raises:
            DamagedError: the file is missing or altered.
        """
        return read_index(self.folder, self.manifest)

    def read_config(self) -> Config:
        """What the run was asked to do.

        Raises:
            CheckpointError: it has fields that this version does not know.
        """
        try:
            return load_yaml(self.config_yaml)
        except ConfigError as error:
            raise CheckpointError(
                f"{self.folder / CONFIG} was written by version {self.manifest.version}: {error}"
            ) from error

    def check_files(self) -> None:
        """That all files are there, in their sizes.

        Raises:
            DamagedError: one is not.
        """
        for name, facts in self.manifest.files.items():
            check_size(self.folder, name, facts["bytes"])

    def verify(self, name: str) -> None:
        """Read a file whole and compare it with its digest.

        Raises:
            DamagedError: it differs, or is missing.
        """
        if name == MANIFEST:
            read_manifest(self.folder)
        else:
            verify_file(
                self.folder,
                name,
                self.manifest.files[name]["bytes"],
                self.manifest.files[name]["xxh128"],
            )

    def _check_fit(
        self, shards: Sequence[TensorShard], index: TensorIndex, model: ModelConfig | None
    ) -> None:
        problems = []
        if model is not None:
            problems += _compare_models(self.read_config().model, model)
        for shard in shards:
            stored = index.tensors.get(f"{shard.kind}/{shard.name}")
            if stored is None:
                problems.append(f"{shard.kind} of {shard.name} is not in it")
            elif tuple(stored["shape"]) != shard.global_shape:
                problems.append(
                    f"{shard.name} is {tuple(stored['shape'])} in it, and {shard.global_shape} here"
                )
        if problems:
            problems = list(dict.fromkeys(problems))
            raise CheckpointError(
                f"{self.folder} does not fit this run:\n  " + "\n  ".join(problems)
            )


def _compare_models(saved: ModelConfig, asked: ModelConfig) -> list[str]:
    differences = []
    for field in dataclasses.fields(ModelConfig):
        before, now = (_resolve_field(config, field.name) for config in (saved, asked))
        if before != now and field.name not in _FREE_TO_CHANGE:
            flag = "--" + field.name.replace("_", "-")
            hint = (
                "; a norm added in mid-run begins untrained: start a new run for it"
                if field.name == "embed_layernorm"
                else ""
            )
            differences.append(f"{flag} is {before} in it, and {now} here{hint}")
    return differences


def _resolve_field(model: ModelConfig, name: str) -> Any:
    """A field's value, or what its default stands for: writing the default out changes nothing."""
    shape = ModelShape(model, 0, 0)
    derived = {
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_query_groups": shape.query_groups,
        "kv_channels": shape.head_dim,
    }
    return derived.get(name, getattr(model, name))


def open_checkpoint(root: Path, iteration: int) -> Checkpoint:
    """Read the small files of a finished checkpoint.

    Raises:
        DamagedError: they are missing or altered; the message names the folder. CheckpointError: of another format, or they cannot
            be read.
    """
    folder = find_stored_folder(root, iteration)
    checkpoint = open_folder(folder)
    if checkpoint.iteration != iteration:
        raise DamagedError(
            f"{folder} is damaged: it is the checkpoint of iteration {checkpoint.iteration}, renamed",
            MANIFEST,
        )
    return checkpoint


def open_folder(folder: Path) -> Checkpoint:
    """As `open_checkpoint`, for a folder of any name."""
    try:
        manifest = read_manifest(folder)
        return Checkpoint(folder, manifest, read_checked_text(folder, CONFIG, manifest))
    except DamagedError as damage:
        raise DamagedError(f"{folder} is damaged: {damage}", damage.file) from damage
