"""Import of a model in the format of Hugging Face as a checkpoint of this trainer.

Invariant: the checkpoint gets its name after the model was compared with `transformers`. Only
safetensors, JSON and a tokenizer are read, so nothing in the folder can run code.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.base.code_version import get_code_version
from megatron.base.errors import CheckpointError, ConfigError
from megatron.checkpoint.contents import CheckpointContents
from megatron.config.batch import BatchConfig
from megatron.config.data import TokenizerConfig
from megatron.config.fields import all_fields
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml
from megatron.extras.interop.convert.architectures import Architecture, find_architecture
from megatron.extras.interop.convert.compare import Comparison, HfModel, compare_models
from megatron.extras.interop.convert.hf_files import HfTensors, match_names, read_config
from megatron.extras.interop.convert.tensors import TensorPair, list_hf_shapes, pair_tensors
from megatron.extras.interop.convert.tokenizer_files import (
    GENERATION_CONFIG,
    copy_files,
    list_tokenizer_files,
)
from megatron.extras.interop.convert.writing import TensorToWrite, check_is_new, write_checkpoint
from megatron.model.shape import ModelShape
from megatron.run.state import TrainState
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.vocabulary import compute_tokenizer_digests

_TOKENIZER = "tokenizer"
"""Folder of the tokenizer's copy."""


def import_model(
    folder: Path,
    out: Path,
    seq_length: int | None = None,
    log: Callable[[str], None] = lambda line: None,
    *,
    compare_complete: bool = True,
) -> Comparison:
    """Write the model of a folder as the checkpoint of iteration 0 in `out`.

    Args:
        folder: A folder in the format of Hugging Face.
        out: Folder of the new checkpoint. It must not exist.
        seq_length: Sequence length of the training that follows. Default: that of config.json.
        log: Receives messages.
        compare_complete: See `ExportOptions`.

    Raises:
        ConfigError: the architecture is not supported, or `out` exists.
        CheckpointError: a file is missing or damaged, tensors do not fit config.json, or the
            comparison with `transformers` failed.
        OSError: a file cannot be written.
    """
    # Before the comparison, which takes most of the time.
    check_is_new(out)
    hf_config = read_config(folder)
    architecture = find_architecture(hf_config.model_type)
    fields = hf_config.to_dict()
    model = _read_model(architecture, fields, seq_length)
    pairs = pair_tensors(
        architecture, ModelShape(model, hf_config.vocab_size, hf_config.vocab_size)
    )
    tensors = HfTensors(folder, partial(architecture.divide, model))
    # A loss on several tokens is not supported, and the model works without these layers.
    for pattern, what in architecture.left_out.items():
        number = sum(re.fullmatch(pattern, name) is not None for name in tensors.shapes)
        if number:
            log(f"warning: {number} tensors are left out, because {what} is not supported")
    expected = list_hf_shapes(pairs)
    hf = HfModel(
        architecture,
        model,
        hf_config,
        pairs,
        match_names(architecture, expected, tensors),
        tensors,
    )
    tokenizer = _find_tokenizer(folder, hf_config.vocab_size, log)
    digests = compute_tokenizer_digests(tokenizer)
    copied: list[Path] = []
    if tokenizer.tokenizer_name_or_path is not None:
        # The run goes on with a copy, because the folder may be removed after the import.
        copied = list_tokenizer_files(folder)
        # It names the ids that end a text, which an export keeps.
        if (folder / GENERATION_CONFIG).is_file():
            copied.append(Path(GENERATION_CONFIG))
        tokenizer = replace(tokenizer, tokenizer_name_or_path=str(out.absolute() / _TOKENIZER))
    comparison = compare_models(hf, log, complete=compare_complete)
    # Only the model and the tokenizer are known. A user gives the rest when training starts.
    config = Config(model=model, batch=BatchConfig(micro_batch_size=1), tokenizer=tokenizer)
    state = TrainState(tokenizer=digests)
    contents = CheckpointContents(
        0,
        scalars=None,
        state=state.to_json(),
        config_yaml=dump_yaml(config),
        version=get_code_version(),
        layout=f"imported from {architecture.class_name}",
    )

    def copy_tokenizer(root: Path) -> None:
        copy_files(folder, copied, root / _TOKENIZER)

    write_checkpoint(out, _list_tensors(hf), contents, copy_tokenizer)
    return comparison


def _read_model(
    architecture: Architecture, fields: Mapping[str, Any], seq_length: int | None
) -> ModelConfig:
    """Return our description of a config.json.

    Raises:
        ConfigError: the model is not supported.
        CheckpointError: a field is not a number, or a size is below 1.
    """
    try:
        model = architecture.read(fields, seq_length)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json has a field of a wrong kind: {error}") from error
    # transformers accepts any number here. A size of 0 would fail much later, in a division.
    sizes = {
        "vocab_size": fields["vocab_size"],
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "sequence length": model.seq_length,
        "positions": model.max_position_embeddings or 1,
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise CheckpointError(f"config.json: the {name} {size} must be at least 1")
    for dotted, field in all_fields().items():
        section, _, name = dotted.partition(".")
        value = getattr(model, name) if section == "model" else None
        if isinstance(value, int | float) and not field.range.contains(value):
            raise CheckpointError(
                f"config.json gives {field.spell(value)}, which must be {field.range.describe()}"
            )
    return model


def _find_tokenizer(folder: Path, vocab_size: int, log: Callable[[str], None]) -> TokenizerConfig:
    """Return the settings of the folder's tokenizer, if it has one.

    Raises:
        ConfigError: it has more ids than the embedding has rows.
    """
    # The embedding has its padding already. More of it would be rows that no file has.
    without = TokenizerConfig(vocab_size=vocab_size, make_vocab_size_divisible_by=1)
    named = replace(
        without, tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(folder.absolute())
    )
    try:
        # Without the size of the embedding, so that the tokenizer's own size is compared with it.
        size = build_tokenizer(replace(named, vocab_size=None)).vocab_size
    except ConfigError as error:
        log(f"warning: no tokenizer is imported: {error}")
        return without
    if size > vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {size} ids, and the embedding has {vocab_size} rows; "
            "it is not the tokenizer of this model"
        )
    return named


def _list_tensors(hf: HfModel) -> list[TensorToWrite]:
    def describe(pair: TensorPair) -> TensorToWrite:
        return TensorToWrite(
            "weight",
            pair.name,
            pair.shape,
            ", ".join(pair.hf_names),
            lambda: pair.from_hf(hf.read(pair)),
        )

    return [describe(pair) for pair in hf.pairs]
