"""Import of a checkpoint of nanoGPT, llm-baselines or fms-fsdp, so that its run goes on here.

Invariant: as in `from_megatron`. The settings of the run are written as a command line, which the
tables of `megatron.config` read as they read a user's.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.base.code_version import get_code_version
from megatron.base.errors import CheckpointError
from megatron.checkpoint.contents import CheckpointContents
from megatron.config.config_with_origin import LoadedConfig
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml
from megatron.extras.convert.architectures import Architecture
from megatron.extras.convert.problems import refuse_problems
from megatron.extras.convert.tensors import VOCABULARY_TENSORS, TensorPair, pair_tensors
from megatron.extras.convert.trainer_files import (
    TrainerCheckpoint,
    open_fms,
    open_llm_baselines,
    open_nanogpt,
)
from megatron.extras.convert.trainer_names import (
    FMS_LLAMA,
    GPT,
    choose_llm_baselines_names,
    separate_rotary_halves,
)
from megatron.extras.convert.writing import (
    TensorToWrite,
    check_is_new,
    choose_states,
    write_checkpoint,
)
from megatron.extras.translators.translator import load_config
from megatron.model.shape import ModelShape
from megatron.parallel.shard import Kind
from megatron.run.state import TrainState

Trainer = Literal["nanogpt", "llm-baselines", "fms-fsdp"]
_NANOGPT_FLAGS = {
    "n_layer": "--num-layers",
    "n_head": "--num-attention-heads",
    "n_embd": "--hidden-size",
    "block_size": "--seq-length",
    "batch_size": "--micro-batch-size",
    "max_iters": "--train-iters",
    "learning_rate": "--lr",
    "weight_decay": "--weight-decay",
    "beta1": "--adam-beta1",
    "beta2": "--adam-beta2",
    "grad_clip": "--clip-grad",
    "eval_interval": "--eval-interval",
    "log_interval": "--log-interval",
}
"""Setting of nanoGPT -> our flag with the same value."""
_DTYPES = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}
_NANOGPT_FIXED = (
    # Its GELU is the erf form.
    "--no-bias-gelu-fusion --init-method-std 0.02 --layernorm-epsilon 1e-5 --adam-eps 1e-8"
)


@dataclass(frozen=True)
class TrainerImport:
    """What to import."""

    path: Path
    """File or folder of the checkpoint."""
    out: Path
    """Folder of the new checkpoint. It must not exist."""
    trainer: Trainer
    flags: tuple[str, ...] = ()
    """Flags of the run. nanoGPT's checkpoints have its settings, which these flags replace."""
    vocab_size: int | None = None
    """Number of token ids. None: all rows of the embedding."""
    weights_only: bool = False
    """Leave out the optimizer's states."""


def import_trainer(command: TrainerImport, log: Callable[[str], None] = lambda line: None) -> None:
    """Write a checkpoint of another trainer as one of this trainer, of the same iteration.

    Raises:
        ConfigError: `out` exists, or the run has a setting that is not possible here.
        CheckpointError: a file is missing, damaged, or contains what is not allowed, or the tensors
            do not fit the settings.
        OSError: a file cannot be written.
    """
    check_is_new(command.out)
    opened = _open(command)
    loaded, vocab_size = _load_run_config(command, opened, log)
    for warning in loaded.warnings:
        log(warning)
    config = loaded.config
    shape = ModelShape(config.model, vocab_size, vocab_size)
    names = _choose_names(command.trainer, config)
    pairs = pair_tensors(names, shape)
    _check_names(opened, names, pairs, vocab_size)
    kinds, scalars = choose_states(opened.steps, log)
    state = _make_state(opened, config)
    contents = CheckpointContents(
        opened.iteration,
        scalars=scalars,
        state=state.to_json(),
        config_yaml=dump_yaml(config),
        version=get_code_version(),
        layout=f"imported from {command.trainer}",
    )
    write_checkpoint(
        command.out,
        [_plan_tensor(opened, kind, pair, shape) for pair in pairs for kind in kinds],
        contents,
    )
    log(
        f"iteration {opened.iteration}, {state.consumed_samples:,} samples, "
        f"{state.consumed_tokens:,} tokens"
    )


def _open(command: TrainerImport) -> TrainerCheckpoint:
    if command.trainer == "nanogpt":
        return open_nanogpt(command.path, weights_only=command.weights_only)
    if command.trainer == "llm-baselines":
        return open_llm_baselines(command.path, weights_only=command.weights_only)
    return open_fms(command.path, weights_only=command.weights_only)


def _choose_names(trainer: Trainer, config: Config) -> Architecture:
    if trainer == "nanogpt":
        return GPT
    if trainer == "llm-baselines":
        return choose_llm_baselines_names(config.model)
    return FMS_LLAMA


def _load_run_config(
    command: TrainerImport, opened: TrainerCheckpoint, log: Callable[[str], None]
) -> tuple[LoadedConfig, int]:
    """Return the configuration of the run, and the number of token ids.

    Raises:
        ConfigError: a setting is not possible here.
        CheckpointError: there is no word embedding, or a setting is missing.
    """
    # All three trainers average the means of the microbatches.
    words = ["--loss-mean", "microbatch"]
    if command.trainer == "nanogpt":
        words += write_nanogpt_words(opened.path, opened.settings)
    words += command.flags
    word = "embedding.weight" if command.trainer == "fms-fsdp" else "transformer.wte.weight"
    if len(opened.shapes.get(word, ())) != 2:
        raise CheckpointError(f"{opened.path} has no word embedding, {word}")
    vocab_size = command.vocab_size or opened.shapes[word][0]
    if command.vocab_size is None:
        log(
            f"all {vocab_size} rows of the embedding are imported; give --vocab-size to leave out "
            "the padding"
        )
    words += ["--vocab-size", str(vocab_size)]
    loaded = load_config(words)
    if opened.tokens is not None and loaded.config.batch.global_batch_size is None:
        # fms-fsdp gives the batch of one GPU, and does not store their number.
        samples = opened.tokens // loaded.config.model.seq_length
        if opened.iteration > 0 and samples % opened.iteration == 0:
            loaded = load_config([*words, "--global-batch-size", str(samples // opened.iteration)])
    # The paths are those of the other trainer's checkpoints.
    checkpoint = replace(loaded.config.checkpoint, load=None, save=None)
    return replace(loaded, config=replace(loaded.config, checkpoint=checkpoint)), vocab_size


def write_nanogpt_words(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of nanoGPT as a command line.

    Args:
        path: The file of the settings, for messages.
        settings: What train.py saves as `config`, updated with `model_args`.

    Raises:
        CheckpointError: a setting is missing, or has an unknown value.
    """
    words = _NANOGPT_FIXED.split()
    try:
        for name, flag in _NANOGPT_FLAGS.items():
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
        words += _DTYPES[settings["dtype"]]
    # A tensor in the place of a number raises RuntimeError.
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the settings of nanoGPT lack one, or have another value than "
            f"expected: {error}"
        ) from error
    return words


def _make_state(opened: TrainerCheckpoint, config: Config) -> TrainState:
    """Return the counters of the run."""
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


def _plan_tensor(
    opened: TrainerCheckpoint, kind: Kind, pair: TensorPair, shape: ModelShape
) -> TensorToWrite:
    """Return a tensor of the new checkpoint, which is read when it is written."""

    def read() -> Tensor:
        tensor = pair.to_ours([opened.read(kind, name) for name in pair.hf_names])
        if shape.rotary_dim:
            tensor = separate_rotary_halves(pair, tensor, shape)
        if pair.ours in VOCABULARY_TENSORS:
            # The rows after the vocabulary are padding.
            tensor = tensor[: pair.our_shape[0]]
        return tensor

    source = f"{', '.join(pair.hf_names)} ({kind})"
    return TensorToWrite(kind, pair.ours, pair.our_shape, source, read)


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
            pair.ours in VOCABULARY_TENSORS and found[0] >= vocab_size and found[1:] == size[1:]
        )
        if found != size and not enough:
            problems.append(f"{name} has the shape {found}, and must have {size}")
    for name in opened.shapes.keys() - expected.keys():
        if any(re.fullmatch(pattern, name) for pattern in names.not_stored):
            continue
        if name == f"{names.modules['head']}.weight" and _is_tied(opened, names, name):
            continue
        problems.append(f"{name} has no part in the model that the settings describe")
    refuse_problems(sorted(problems), "the settings")


def _is_tied(opened: TrainerCheckpoint, names: Architecture, head: str) -> bool:
    """Return whether the output matrix equals the word embedding."""
    word = f"{names.modules['embedding.word']}.weight"
    return torch.equal(opened.read("weight", head), opened.read("weight", word))
