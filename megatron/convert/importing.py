"""Import of a model in the format of Hugging Face as a checkpoint of this trainer.

Invariant: the checkpoint gets its name when the model was compared with `transformers`. Only
safetensors, JSON and a tokenizer are read, so nothing in the folder can run code.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.contents import CheckpointContents, write_small_files
from megatron.checkpoint.folder import UNFINISHED, point_to, put_in_place, step_folder
from megatron.checkpoint.shard_file import WrittenFile, select_own_shards, write_shard_file
from megatron.code_version import get_code_version
from megatron.config.batch import BatchConfig
from megatron.config.cli import dump_yaml
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from megatron.convert.architectures import find_architecture
from megatron.convert.compare import Comparison, TheirModel, compare_models
from megatron.convert.tensors import TensorPair, pair_tensors
from megatron.convert.their_files import TheirTensors, match_names, read_config
from megatron.errors import CheckpointError, ConfigError
from megatron.model.shape import ModelShape
from megatron.parallel.shard import TensorShard
from megatron.tokenizer import build_tokenizer, tokenizer_digests
from megatron.training.state import TrainState

FILE_BYTES = 5 * 10**8
"""Largest size of a tensor file, unless one tensor is larger."""
_ITEM = 4
"""Bytes of an fp32 number."""


def import_model(
    folder: Path,
    out: Path,
    seq_length: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    compare_complete: bool = True,
) -> Comparison:
    """Write the model of a folder as the checkpoint of iteration 0 in `out`.

    Args:
        folder: A folder in the format of Hugging Face.
        out: Folder of the new checkpoint. It must not exist.
        seq_length: Sequence length of the training that follows. Default: that of config.json.
        say: Receives messages.
        compare_complete: See `ExportOptions`.

    Raises:
        ConfigError: the architecture is not supported, or `out` exists.
        CheckpointError: a file is missing or damaged, tensors do not fit config.json, or the
            comparison with `transformers` failed.
        OSError: the disk refuses.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; give another folder, or remove it")
    their_config = read_config(folder)
    architecture = find_architecture(their_config.model_type)
    fields = their_config.to_dict()
    model = _set_dropouts(architecture.read(fields, seq_length), fields)
    pairs = pair_tensors(
        architecture, ModelShape(model, their_config.vocab_size, their_config.vocab_size)
    )
    tensors = TheirTensors(folder)
    expected = {
        name: size
        for pair in pairs
        for name, size in zip(pair.theirs, pair.their_shapes, strict=True)
    }
    theirs = TheirModel(
        architecture,
        model,
        their_config,
        pairs,
        match_names(architecture, expected, tensors),
        tensors,
    )
    tokenizer = _find_tokenizer(folder, their_config.vocab_size, say)
    comparison = compare_models(theirs, say, complete=compare_complete)
    config = Config(model=model, batch=BatchConfig(micro_batch_size=1), tokenizer=tokenizer)
    state = TrainState(tokenizer=tokenizer_digests(tokenizer))
    contents = CheckpointContents(
        0,
        scalars=None,
        state=state.to_json(),
        config_yaml=dump_yaml(config),
        version=get_code_version(),
        layout=f"imported from {architecture.class_name}",
    )
    _write(out, theirs, contents)
    return comparison


def _set_dropouts(model: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model with the dropouts of config.json, which are 0 where it names none."""
    return replace(
        model,
        hidden_dropout=float(fields.get("hidden_dropout", fields.get("resid_pdrop", 0.0))),
        attention_dropout=float(fields.get("attention_dropout", fields.get("attn_pdrop", 0.0))),
    )


def _find_tokenizer(folder: Path, vocab_size: int, say: Callable[[str], None]) -> TokenizerConfig:
    """Return the settings of the folder's tokenizer, if it has one.

    Raises:
        ConfigError: it has more ids than the embedding has rows.
    """
    without = TokenizerConfig(vocab_size=vocab_size, make_vocab_size_divisible_by=1)
    named = replace(
        without, tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(folder.absolute())
    )
    try:
        size = build_tokenizer(replace(named, vocab_size=None)).vocab_size
    except ConfigError as error:
        say(f"warning: no tokenizer is imported: {error}")
        return without
    if size > vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {size} ids, and the embedding has {vocab_size} rows; "
            "it is not the tokenizer of this model"
        )
    return named


def _write(out: Path, theirs: TheirModel, contents: CheckpointContents) -> None:
    """Write the checkpoint in parts, so that few tensors are in memory at a time."""
    out.mkdir(parents=True)
    final = step_folder(out, contents.iteration)
    unfinished = final.with_name(final.name + UNFINISHED)
    unfinished.mkdir()
    try:
        files = [
            _write_file(unfinished, number, theirs, part)
            for number, part in enumerate(_divide(theirs.pairs))
        ]
        write_small_files(unfinished, contents, files, (), keep=False)
        put_in_place(unfinished, final)
        point_to(out, contents.iteration)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _divide(pairs: Sequence[TensorPair]) -> Iterator[list[TensorPair]]:
    """Yield the pairs in parts of limited size."""
    part: list[TensorPair] = []
    used = 0
    for pair in pairs:
        size = _ITEM * torch.Size(pair.our_shape).numel()
        if part and used + size > FILE_BYTES:
            yield part
            part = []
            used = 0
        part.append(pair)
        used += size
    yield part


def _write_file(
    folder: Path, number: int, theirs: TheirModel, pairs: Sequence[TensorPair]
) -> WrittenFile:
    shards = []
    for pair in pairs:
        tensor = pair.to_ours(theirs.read(pair)).float()
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{', '.join(pair.theirs)} have numbers that are not finite")
        zeros = (0,) * tensor.dim()
        shards.append(TensorShard("weight", pair.ours, pair.our_shape, zeros, tensor, owner=True))
    own = select_own_shards(shards)
    return write_shard_file(folder, number, own, {key: each.tensor for key, each in own.items()})
