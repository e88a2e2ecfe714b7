"""Import of a checkpoint of another trainer, so that its run goes on here.

Invariant: the checkpoint gets its name after all of it was written. The files are pickles, and
nothing in them is run (`unpickle.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megatron.base.code_version import get_code_version
from megatron.checkpoint.contents import CheckpointContents
from megatron.config.fields import LoadedConfig
from megatron.config.yaml_file import dump_yaml
from megatron.extras.interop.convert.from_megatron import open_megatron
from megatron.extras.interop.convert.from_trainer import open_trainer
from megatron.extras.interop.convert.writing import (
    TensorToWrite,
    check_is_new,
    choose_states,
    write_checkpoint,
)
from megatron.model.shape import ModelShape
from megatron.parallel.shard import Kind
from megatron.run.state import TrainState

Trainer = Literal[
    "megatron-deepspeed",
    "megatron-lm",
    "gpt-neox",
    "nanogpt",
    "llm-baselines",
    "fms-fsdp",
]


@dataclass(frozen=True)
class ForeignImport:
    """What to import."""

    path: Path
    """File or folder of the checkpoint, or folder of several."""
    out: Path
    """Folder of the new checkpoint. It must not exist."""
    trainer: Trainer
    vocab_size: int | None = None
    """Number of token ids. None: that of the checkpoint, or all rows of its embedding."""
    weights_only: bool = False
    """Leave out the optimizer's states. Those of GPT-NeoX are never read."""
    flags: tuple[str, ...] = ()
    """Flags of the run. Where the checkpoint has its settings, these flags replace them."""


class ForeignCheckpoint(Protocol):
    """An opened checkpoint of another trainer."""

    iteration: int
    steps: int | None
    """Steps of the optimizer's states. None if there are none that are imported."""
    vocab_size: int | None
    """Number of token ids without padding, if the checkpoint has it."""
    layout: str
    """Ranks of the run that wrote it, as in ", TP 2, PP 4". Empty if whole tensors are stored."""

    def count_rows(self) -> int:
        """Return the rows of the word embedding, with its padding.

        Raises:
            CheckpointError: there is no word embedding.
        """

    def load_config(
        self, flags: Sequence[str], vocab_size: int
    ) -> tuple[LoadedConfig, Sequence[str]]:
        """Return the configuration of the run, and the settings that are not used.

        Raises:
            ConfigError: a setting is not possible here.
            CheckpointError: a setting is missing.
        """

    def make_state(self, loaded: LoadedConfig) -> TrainState:
        """Return the counters of the run."""

    def list_tensors(
        self, loaded: LoadedConfig, shape: ModelShape, kinds: Sequence[Kind]
    ) -> list[TensorToWrite]:
        """Return the tensors of the new checkpoint, which are read when they are written.

        Raises:
            CheckpointError: the tensors do not fit the settings.
        """


def import_checkpoint(
    command: ForeignImport, log: Callable[[str], None] = lambda line: None
) -> None:
    """Write a checkpoint of another trainer as one of this trainer, of the same iteration.

    Raises:
        ConfigError: `out` exists, or the run has a setting that is not possible here.
        CheckpointError: a file is missing, damaged, or contains what is not allowed, or the tensors
            do not fit the settings.
        OSError: a file cannot be written.
    """
    check_is_new(command.out)
    checkpoint = _open(command)
    vocab_size = command.vocab_size or checkpoint.vocab_size
    if vocab_size is None:
        vocab_size = checkpoint.count_rows()
        log(
            f"all {vocab_size} rows of the embedding are imported; give --vocab-size to leave out "
            "the padding"
        )
    loaded, unused = checkpoint.load_config(command.flags, vocab_size)
    for warning in loaded.warnings:
        log(warning)
    if unused:
        log(f"not used of the saved arguments: {', '.join(unused)}")
    kinds, scalars = choose_states(checkpoint.steps, log)
    shape = ModelShape(loaded.config.model, vocab_size, vocab_size)
    tensors = checkpoint.list_tensors(loaded, shape, kinds)
    state = checkpoint.make_state(loaded)
    contents = CheckpointContents(
        checkpoint.iteration,
        scalars=scalars,
        state=state.to_json(),
        config_yaml=dump_yaml(loaded.config),
        version=get_code_version(),
        layout=f"imported from {command.trainer}{checkpoint.layout}",
    )
    write_checkpoint(command.out, tensors, contents)
    log(
        f"iteration {checkpoint.iteration}, {state.consumed_samples:,} samples, "
        f"{state.consumed_tokens:,} tokens, {state.lr_samples:,} samples of the learning rate"
    )


def _open(command: ForeignImport) -> ForeignCheckpoint:
    trainer = command.trainer
    if trainer in ("megatron-deepspeed", "megatron-lm", "gpt-neox"):
        return open_megatron(trainer, command.path, weights_only=command.weights_only)
    return open_trainer(trainer, command.path, weights_only=command.weights_only)
