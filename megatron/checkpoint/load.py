"""Loading: which checkpoint a run starts from, whether it fits, and its boxes into the live chunks of any layout."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder import LATEST, pointed_iteration, saved_iterations, step_folder, traces
from megatron.checkpoint.save import FORMAT
from megatron.checkpoint.tensor_file import TensorReader
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.cli import from_yaml
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from megatron.errors import CheckpointError, ConfigError
from megatron.model.shape import ModelShape
from megatron.parallel.chunk import Chunk

# What may change on resume: it shapes no weight and no function of the weights.
_FREE_TO_CHANGE = {"hidden_dropout", "attention_dropout", "init_method_std", "seq_length", "max_position_embeddings"}


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint, opened: its small files are read, its tensors are not."""

    folder: Path
    iteration: int
    state: dict[str, Any]
    """TrainState."""
    optimizer: dict[str, Any] | None
    """The optimizer's scalars; None: saved without the optimizer."""
    files: dict[str, dict[str, Any]]
    config_yaml: str

    def load_into(self, chunks: Sequence[Chunk], model: ModelConfig | None = None) -> None:
        """Fill live chunks, whatever layout wrote the checkpoint.

        `model`: the architecture of the run; it is compared with the checkpoint's first.

        Raises:
            CheckpointError: all differences of architecture, names and shapes together, before anything is written;
                or a file is missing, cut off or damaged.
        """
        index = self.index()
        self._check(chunks, index, model)
        with TensorReader(self.folder) as reader:
            for chunk in chunks:
                tensor = f"{chunk.kind}/{chunk.name}"
                box = (chunk.offset, tuple(chunk.tensor.shape))
                reader.read_into(chunk.tensor, box, index[tensor]["boxes"], tensor)

    def index(self) -> dict[str, Any]:
        """kind/name -> global shape and boxes.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            index: dict[str, Any] = json.loads((self.folder / "index.json").read_text())
            return index
        except (OSError, ValueError) as damage:
            raise CheckpointError(f"{self.folder / 'index.json'} cannot be read: {damage}") from damage

    def config(self) -> Config:
        """What the run was asked to do.

        Raises:
            CheckpointError: config.yaml is damaged.
        """
        try:
            return from_yaml(self.config_yaml)
        except ConfigError as damage:
            raise CheckpointError(f"{self.folder / 'config.yaml'} is damaged: {damage}") from damage

    def _check(self, chunks: Sequence[Chunk], index: dict[str, Any], model: ModelConfig | None) -> None:
        problems = []
        if model is not None:
            problems += _model_differences(self.config().model, model)
        for chunk in chunks:
            stored = index.get(f"{chunk.kind}/{chunk.name}")
            if stored is None:
                problems.append(f"{chunk.kind} of {chunk.name} is not in it")
            elif tuple(stored["shape"]) != chunk.global_shape:
                problems.append(f"{chunk.name} is {tuple(stored['shape'])} in it, and {chunk.global_shape} here")
        for name, facts in self.files.items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != facts["bytes"]:
                problems.append(
                    f"file {name} " + ("is missing" if size is None else f"has {size} bytes instead of {facts['bytes']}")
                )
        if problems:
            problems = list(dict.fromkeys(problems))
            raise CheckpointError(f"{self.folder} does not fit this run:\n  " + "\n  ".join(problems))


def _model_differences(saved: ModelConfig, asked: ModelConfig) -> list[str]:
    differences = []
    for field in dataclasses.fields(ModelConfig):
        before, now = (_resolved(config, field.name) for config in (saved, asked))
        if before != now and field.name not in _FREE_TO_CHANGE:
            flag = "--" + field.name.replace("_", "-")
            hint = "; a norm added in mid-run begins untrained: start a new run for it" if field.name == "embed_layernorm" else ""
            differences.append(f"{flag} is {before} in it, and {now} here{hint}")
    return differences


def _resolved(model: ModelConfig, name: str) -> Any:
    """A field's value, or what its default stands for: writing the default out changes nothing."""
    shape = ModelShape(model, 0, 0)
    derived = {"ffn_hidden_size": shape.ffn_hidden_size, "num_query_groups": shape.query_groups, "kv_channels": shape.head_dim}
    return derived.get(name, getattr(model, name))


def open_checkpoint(root: Path, iteration: int) -> Checkpoint:
    """Read the small files of a finished checkpoint.

    Raises:
        CheckpointError: they are not there, damaged, or of a newer format.
    """
    folder = step_folder(root, iteration)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        config_yaml = (folder / "config.yaml").read_text()
        if manifest["format"] > FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}; this version reads up to {FORMAT}: update it")
        if not isinstance(manifest["state"], dict):
            raise ValueError("its state is not there")
        return Checkpoint(folder, manifest["iteration"], manifest["state"], manifest["optimizer"], manifest["files"], config_yaml)
    except (OSError, ValueError, KeyError, TypeError) as damage:
        raise CheckpointError(f"{folder} cannot be opened: {type(damage).__name__}: {damage}") from damage


def find_start(config: CheckpointConfig) -> Checkpoint | None:
    """The checkpoint that `--load` leads to, or None for a fresh start.

    Raises:
        CheckpointError: there should be one, or there are traces of a run and no pointer to say where it stood.
    """
    _refuse_to_overwrite(config)
    if config.load is None:
        if config.require_load:
            raise CheckpointError("--require-load needs --load FOLDER")
        return None
    root = Path(config.load)
    iteration = pointed_iteration(root)
    if iteration is not None:
        return open_checkpoint(root, iteration)
    if config.require_load:
        raise CheckpointError(f"--require-load: {root / LATEST} is not there, so there is nothing to load")
    found = traces(root)
    if found and not config.allow_fresh_start:
        saved = saved_iterations(root)
        point = f"write global_step{saved[-1]} into {root / LATEST} to go on from there, or " if saved else ""
        raise CheckpointError(
            f"{root} holds traces of a run ({', '.join(found[:8])}{', ...' if len(found) > 8 else ''}) but no pointer "
            f"{LATEST}; {point}give --allow-fresh-start to begin at iteration 0"
        )
    return None


def _refuse_to_overwrite(config: CheckpointConfig) -> None:
    """A run that would begin anew in a folder where another one has checkpoints has probably lost its `--load`."""
    if config.save is None or config.allow_fresh_start or config.load == config.save:
        return
    saved = saved_iterations(Path(config.save))
    if saved:
        raise CheckpointError(
            f"--save {config.save} holds a run (its last checkpoint is global_step{saved[-1]}) and --load does not lead there; "
            f"give --load {config.save} to go on with it, another --save, or --allow-fresh-start to begin over it"
        )
