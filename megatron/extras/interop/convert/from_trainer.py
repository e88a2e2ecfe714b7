"""Checkpoints of nanoGPT, llm-baselines and fms-fsdp, for `convert_checkpoint`.

The settings of the run are written as a command line, which the tables of
`megatron.extras.interop.translators` read as they read a user's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.base.errors import CheckpointError
from megatron.config.fields import LoadedConfig
from megatron.config.tree import Config
from megatron.extras.interop.convert.architectures import Architecture
from megatron.extras.interop.convert.hf_files import list_other_names
from megatron.extras.interop.convert.tensors import (
    VOCABULARY_TENSORS,
    TensorPair,
    pair_tensors,
    refuse_problems,
)
from megatron.extras.interop.convert.trainer_files import (
    FMS_LLAMA,
    NANOGPT,
    TrainerCheckpoint,
    choose_llm_baselines_names,
    open_fms,
    open_llm_baselines,
    open_nanogpt,
    separate_rotary_halves,
)
from megatron.extras.interop.convert.writing import TensorToWrite
from megatron.extras.interop.translators.compat import load_table
from megatron.extras.interop.translators.translator import load_config
from megatron.model.shape import ModelShape
from megatron.parallel.shard import Kind
from megatron.run.state import TrainState

_NANOGPT = load_table("nanogpt")


class ImportedTrainer:
    """A checkpoint of nanoGPT, llm-baselines or fms-fsdp. See `ForeignCheckpoint`."""

    vocab_size: int | None = None
    layout = ""

    def __init__(self, trainer: str, opened: TrainerCheckpoint) -> None:
        """Take the facts of the run from its file."""
        self.iteration = opened.iteration
        self.steps = opened.steps
        self._trainer = trainer
        self._opened = opened

    def count_rows(self) -> int:
        """Return the rows of the word embedding, with its padding."""
        word = "embedding.weight" if self._trainer == "fms-fsdp" else "transformer.wte.weight"
        shape = self._opened.shapes.get(word, ())
        if len(shape) != 2:
            raise CheckpointError(f"{self._opened.path} has no word embedding, {word}")
        return shape[0]

    def load_config(
        self, flags: Sequence[str], vocab_size: int
    ) -> tuple[LoadedConfig, Sequence[str]]:
        """Return the configuration of the run."""
        opened = self._opened
        # All three trainers average the means of the microbatches.
        words = ["--loss-mean", "microbatch"]
        if self._trainer == "nanogpt":
            words += write_nanogpt_words(opened.path, opened.settings)
        words += [*flags, "--vocab-size", str(vocab_size)]
        loaded = load_config(words)
        if opened.tokens is not None and loaded.config.batch.global_batch_size is None:
            # fms-fsdp gives the batch of one GPU, and does not store their number.
            samples = opened.tokens // loaded.config.model.seq_length
            if opened.iteration > 0 and samples % opened.iteration == 0:
                batch = str(samples // opened.iteration)
                loaded = load_config([*words, "--global-batch-size", batch])
        # The paths are those of the other trainer's checkpoints.
        checkpoint = replace(loaded.config.checkpoint, load=None, save=None)
        return replace(loaded, config=replace(loaded.config, checkpoint=checkpoint)), ()

    def make_state(self, loaded: LoadedConfig) -> TrainState:
        """Return the counters of the run."""
        config = loaded.config
        opened = self._opened
        length = config.model.seq_length
        if opened.tokens is not None:
            samples = opened.tokens // length
        else:
            batch = config.batch
            samples = opened.iteration * (batch.global_batch_size or batch.micro_batch_size)
        return TrainState(
            iteration=opened.iteration,
            consumed_samples=samples,
            consumed_tokens=samples * length,
            lr_samples=samples,
            lr_tokens=samples * length,
            applied_steps=opened.iteration if opened.steps is None else opened.steps,
        )

    def list_tensors(
        self, loaded: LoadedConfig, shape: ModelShape, kinds: Sequence[Kind]
    ) -> list[TensorToWrite]:
        """Return the tensors of the new checkpoint, after a check of their names."""
        names = _choose_names(self._trainer, loaded.config)
        pairs = pair_tensors(names, shape)
        _check_names(self._opened, names, pairs, shape.vocab_size)
        return [_plan_tensor(self._opened, kind, pair, shape) for pair in pairs for kind in kinds]


def open_trainer(trainer: str, path: Path, *, weights_only: bool) -> ImportedTrainer:
    """Open a checkpoint of nanoGPT, llm-baselines or fms-fsdp.

    Args:
        trainer: nanogpt, llm-baselines or fms-fsdp.
        path: File or folder of the checkpoint.
        weights_only: Leave out the optimizer's states.

    Raises:
        CheckpointError: a file is missing or damaged, or contains what is not allowed.
    """
    openers = {
        "nanogpt": open_nanogpt,
        "llm-baselines": open_llm_baselines,
        "fms-fsdp": open_fms,
    }
    return ImportedTrainer(trainer, openers[trainer](path, weights_only=weights_only))


def _choose_names(trainer: str, config: Config) -> Architecture:
    if trainer == "nanogpt":
        return NANOGPT
    if trainer == "llm-baselines":
        return choose_llm_baselines_names(config.model)
    return FMS_LLAMA


def write_nanogpt_words(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of nanoGPT as a command line.

    Args:
        path: The file of the settings, for messages.
        settings: What train.py saves as `config`, updated with `model_args`.

    Raises:
        CheckpointError: a setting is missing, or has an unknown value.
    """
    words = _NANOGPT["fixed"].split()
    try:
        for name, flag in _NANOGPT["flags"].items():
            words += [flag, str(settings[name])]
        accumulated = settings["gradient_accumulation_steps"]
        batch = settings["batch_size"] * accumulated
        # An evaluation there has micro-batches, and here it has global batches.
        words += ["--eval-iters", str(math.ceil(settings["eval_iters"] / accumulated))]
        dropout = str(settings["dropout"])
        words += ["--global-batch-size", str(batch)]
        # It saves a checkpoint after each evaluation.
        words += ["--save-interval", str(settings["eval_interval"])]
        words += ["--hidden-dropout", dropout, "--attention-dropout", dropout]
        if not settings["bias"]:
            words += ["--no-add-bias-linear", "--no-norm-bias"]
        if settings["decay_lr"]:
            words += ["--lr-decay-style", "cosine", "--min-lr", str(settings["min_lr"])]
            words += ["--lr-decay-iters", str(settings["lr_decay_iters"])]
            words += ["--lr-warmup-iters", str(settings["warmup_iters"])]
        else:
            words += ["--lr-decay-style", "constant"]
        words += _NANOGPT["dtypes"][settings["dtype"]]
    # A tensor in the place of a number raises RuntimeError.
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the settings of nanoGPT lack one, or have another value than "
            f"expected: {error}"
        ) from error
    return words


def _plan_tensor(
    opened: TrainerCheckpoint, kind: Kind, pair: TensorPair, shape: ModelShape
) -> TensorToWrite:
    """Return a tensor of the new checkpoint, which is read when it is written."""

    def read() -> Tensor:
        tensor = pair.from_hf([opened.read(kind, name) for name in pair.hf_names])
        if shape.rotary_dim:
            tensor = separate_rotary_halves(pair, tensor, shape)
        if pair.name in VOCABULARY_TENSORS:
            # The rows after the vocabulary are padding.
            tensor = tensor[: pair.shape[0]]
        return tensor

    source = f"{', '.join(pair.hf_names)} ({kind})"
    return TensorToWrite(kind, pair.name, pair.shape, source, read)


def _check_names(
    opened: TrainerCheckpoint,
    names: Architecture,
    pairs: Sequence[TensorPair],
    vocab_size: int,
) -> None:
    """Check that the checkpoint has the tensors of the model and no others.

    Raises:
        CheckpointError: it does not. The message lists the first 12 problems.
    """
    expected = {
        name: (pair, size)
        for pair in pairs
        for name, size in zip(pair.hf_names, pair.hf_shapes, strict=True)
    }
    problems = [f"{name} is missing" for name in expected if name not in opened.shapes]
    for name, (pair, size) in expected.items():
        found = opened.shapes.get(name, size)
        enough = (
            pair.name in VOCABULARY_TENSORS and found[0] >= vocab_size and found[1:] == size[1:]
        )
        if found != size and not enough:
            problems.append(f"{name} has the shape {found}, and must have {size}")
    problems += [
        f"{name} has no part in the model that the settings describe"
        for name in list_other_names(
            names, opened.shapes, expected, lambda name: opened.read("weight", name)
        )
    ]
    refuse_problems(sorted(problems), "the settings")
