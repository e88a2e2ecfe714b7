"""Export of a checkpoint in the format of Hugging Face, with a model card.

Invariant: the folder gets its final name only after its tensors were compared with the checkpoint,
and the model with `transformers`. A kill before that leaves a folder that ends in `.unfinished`.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.durable import sync_folder
from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.outside_file import open_regular
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import TensorIndex, collect_digests
from megatron.checkpoint.tensor_file import TensorReader
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from megatron.data.blend import parse_shares
from megatron.data.phases import read_phases, use_phase
from megatron.data.splits import find_train_mixture
from megatron.extras.interop.convert.architectures import Architecture, choose_architecture
from megatron.extras.interop.convert.compare import (
    PART_NUMBERS,
    Comparison,
    HfModel,
    compare_models,
)
from megatron.extras.interop.convert.fields import normalise_model
from megatron.extras.interop.convert.hf_files import (
    HfTensors,
    import_transformers,
    read_config,
    write_tensors,
)
from megatron.extras.interop.convert.tensors import TensorPair, pair_tensors
from megatron.extras.interop.convert.tokenizer_files import SpecialIds, write_tokenizer
from megatron.extras.interop.convert.writing import write_folder
from megatron.model.experts.routing import BALANCE
from megatron.model.flops import count_parameters
from megatron.model.shape import ModelShape
from megatron.observe.metrics import read_metrics
from megatron.plan.rules.finding import TokenizerContext, list_warnings, refuse_errors
from megatron.plan.rules.resume import check_tokenizer
from megatron.run.state import TrainState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Largest size of a file, as in `transformers`."""


@dataclass(frozen=True)
class ExportOptions:
    """What to write."""

    dtype: str | None = None
    """fp32, bf16 or fp16. None: the precision of the training."""
    architecture: str | None = None
    """Their model type. None: the first that can express the model."""
    shard_bytes: int = SHARD_BYTES
    compare_complete: bool = True
    """Compare the complete model with `transformers` as well, if it fits into the memory."""
    tokenizer: TokenizerConfig | None = None
    """The tokenizer to write. None: that of the training."""
    license: str | None = None
    """Licence of the model for its card, as an identifier of the Hub. None: the card says that the
    licence is not stated."""


def export_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    options: ExportOptions,
    log: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Write a checkpoint to the folder `out`, which must not exist, and compare both.

    Raises:
        ConfigError: no architecture can express the model, `out` exists, or another process writes
            it.
        CheckpointError: the checkpoint is damaged, or what was written differs from it.
        OSError: a file cannot be written.
    """
    config = checkpoint.read_config()
    index = checkpoint.read_index()
    vocab_size = index.tensors["weight/embedding.word.weight"]["shape"][0]
    trained = ModelShape(config.model, vocab_size, vocab_size)
    config = replace(config, model=fold_description(config.model))
    architecture = choose_architecture(config.model, options.architecture)
    pairs = pair_tensors(architecture, ModelShape(config.model, vocab_size, vocab_size))
    dtype = _choose_dtype(config, options.dtype)
    # The bias of balancing moves by steps that 16 bits would round away.
    balances = [pair for pair in pairs if pair.name.endswith(BALANCE)]
    wide = {name: torch.float32 for pair in balances for name in pair.hf_names}
    with write_folder(out) as unfinished:
        # Before the tensors, which take much longer.
        ids = _export_tokenizer(unfinished, checkpoint, options.tokenizer, vocab_size, log)
        with TensorReader(checkpoint.folder, collect_digests(checkpoint.manifest, index)) as reader:

            def read(pair: TensorPair) -> Tensor:
                own = wide.get(pair.hf_names[0], dtype)
                return _read_rounded(reader, index, pair, own, trained)

            shapes = _list_shapes(architecture, config, pairs)
            log(f"writing {len(shapes)} tensors of {architecture.class_name} in {dtype}")
            write_tensors(
                unfinished,
                _iterate_hf_tensors(architecture, config, pairs, read, dtype),
                shapes,
                dtype,
                options.shard_bytes,
                wide,
            )
            _write_config(unfinished, architecture, config, vocab_size, dtype, ids)
            log("comparing what was written with the checkpoint and with transformers")
            tensors = HfTensors(unfinished, partial(architecture.divide, config.model))
            _compare_tensors(pairs, read, tensors)
            hf_config = read_config(unfinished)
            _compare_description(architecture, config, hf_config)
            _compare_ids(hf_config, ids)
            _warn_about_dropout(architecture, config, log)
            names = {name: name for pair in pairs for name in pair.hf_names}
            model = normalise_model(config.model)
            comparison = compare_models(
                HfModel(architecture, model, hf_config, pairs, names, tensors),
                log,
                complete=options.compare_complete,
            )
        write_card(
            unfinished, checkpoint, architecture.class_name, str(dtype), comparison, options.license
        )
        _sync(unfinished)
    return comparison


def _export_tokenizer(
    folder: Path,
    checkpoint: Checkpoint,
    given: TokenizerConfig | None,
    rows: int,
    log: Callable[[str], None],
) -> SpecialIds:
    """Write the tokenizer's files, and return its special ids.

    Raises:
        ConfigError: The tokenizer is not the one of the training, or see `write_tokenizer`.
    """
    config = checkpoint.read_config()
    if given is not None:
        config = replace(config, tokenizer=given)
    state = TrainState.from_json(checkpoint.state)
    context = TokenizerContext(config.tokenizer, state.iteration, state.tokenizer)
    findings = list(check_tokenizer(context))
    refuse_errors(findings)
    for text in list_warnings(findings):
        log(f"warning: {text}")
    return write_tokenizer(folder, config.tokenizer, rows, log)


def _choose_dtype(config: Config, requested: str | None) -> torch.dtype:
    if requested is not None:
        return DTYPES[requested]
    if config.precision.bf16:
        return torch.bfloat16
    if config.precision.fp16:
        return torch.float16
    return torch.float32


def _read_rounded(
    reader: TensorReader,
    index: TensorIndex,
    pair: TensorPair,
    dtype: torch.dtype,
    trained: ModelShape,
) -> Tensor:
    """Return a tensor of the checkpoint in the dtype of the files, with the model's factors.

    It is read in parts, so that the memory is that of the result.

    Raises:
        CheckpointError: a number is too large for the dtype, or the checkpoint is damaged.
    """
    key = f"weight/{pair.name}"
    rounded = torch.empty(pair.shape, dtype=dtype)
    rows = max(1, PART_NUMBERS // math.prod(pair.shape[1:]))
    for begin in range(0, pair.shape[0], rows):
        into = rounded[begin : begin + rows]
        part = torch.empty(into.shape)
        needed = ((begin, *(0,) * (part.dim() - 1)), tuple(part.shape))
        reader.read_into(part, needed, index.tensors[key], key)
        into.copy_(fold_rows(part, pair.name, begin, trained))
        if not torch.isfinite(into).all():
            raise CheckpointError(
                f"{pair.name} has numbers that {dtype} cannot hold; give --dtype fp32"
            )
    return rounded


def _list_constants(
    architecture: Architecture, config: Config, pairs: Sequence[TensorPair]
) -> dict[str, float]:
    """Return name -> number of their tensors with one fixed number, for the parts of this model."""
    stored = {name.rpartition(".")[0] for pair in pairs for name in pair.hf_names}
    found = {}
    for layer in range(config.model.num_layers):
        for name, value in architecture.constants.items():
            complete = f"{architecture.layers}.{layer}.{name}"
            if complete.rpartition(".")[0] in stored:
                found[complete] = value
    return found


def _list_shapes(
    architecture: Architecture, config: Config, pairs: Sequence[TensorPair]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of their tensors, in the order of writing."""
    empty = (
        (name, torch.empty(shape, device="meta"))
        for pair in pairs
        for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
    )
    shapes = {name: tuple(x.shape) for name, x in architecture.join(empty, config.model)}
    return shapes | dict.fromkeys(_list_constants(architecture, config, pairs), ())


def _iterate_hf_tensors(
    architecture: Architecture,
    config: Config,
    pairs: Sequence[TensorPair],
    read: Callable[[TensorPair], Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    separate = (
        named for pair in pairs for named in zip(pair.hf_names, pair.to_hf(read(pair)), strict=True)
    )
    yield from architecture.join(separate, config.model)
    for name, value in _list_constants(architecture, config, pairs).items():
        yield name, torch.tensor(value, dtype=dtype)


def _write_config(
    folder: Path,
    architecture: Architecture,
    config: Config,
    vocab_size: int,
    dtype: torch.dtype,
    special_ids: SpecialIds,
) -> None:
    """Write config.json and generation_config.json."""
    transformers = import_transformers()
    fields: dict[str, Any] = architecture.write(config.model)
    # The defaults of the class are the ids of its own tokenizer, not of this one.
    ids = special_ids.to_fields()
    config_class = type(transformers.AutoConfig.for_model(architecture.model_type))
    made = config_class(**fields, **ids, vocab_size=vocab_size)
    made.architectures = [architecture.class_name]
    made.dtype = str(dtype).removeprefix("torch.")
    made.save_pretrained(folder)
    transformers.GenerationConfig(**ids).save_pretrained(folder)


def _compare_tensors(
    pairs: Sequence[TensorPair], read: Callable[[TensorPair], Tensor], tensors: HfTensors
) -> None:
    """Check that the files have the checkpoint's numbers.

    Raises:
        CheckpointError: a tensor is missing or differs.
    """
    for pair in pairs:
        written = pair.from_hf([tensors.read(name) for name in pair.hf_names])
        if not torch.equal(written, read(pair)):
            raise CheckpointError(f"{', '.join(pair.hf_names)} differ from our {pair.name}")


def _compare_description(architecture: Architecture, config: Config, hf_config: Any) -> None:
    """Check that config.json describes the model of the checkpoint.

    Raises:
        CheckpointError: it does not.
    """
    expected = normalise_model(config.model)
    found = normalise_model(architecture.read(hf_config.to_dict(), config.model.seq_length))
    for name in (name for pair in architecture.pairs for name in pair.model_fields):
        # Two texts may choose the same layers, which are compared below. The sequence length was
        # passed to `read`.
        if name in ("full_attention_layers", "no_rope_layers", "moe_layer_freq", "seq_length"):
            continue
        if getattr(found, name) != getattr(expected, name):
            raise CheckpointError(
                f"config.json gives {name} {getattr(found, name)}, and the checkpoint has "
                f"{getattr(expected, name)}"
            )
    for layer in range(expected.num_layers):
        asked, written = (ModelShape(m, 0, 0).describe_layer(layer) for m in (expected, found))
        if asked != written:
            raise CheckpointError(f"config.json describes layer {layer} as {written}, not {asked}")


def _compare_ids(hf_config: Any, special_ids: SpecialIds) -> None:
    """Check that config.json has the special ids of the tokenizer.

    Raises:
        CheckpointError: it does not.
    """
    for name, value in special_ids.to_fields().items():
        if getattr(hf_config, name) != value:
            raise CheckpointError(
                f"config.json gives {name} {getattr(hf_config, name)}, and the tokenizer {value}"
            )


def _warn_about_dropout(
    architecture: Architecture, config: Config, log: Callable[[str], None]
) -> None:
    """Print a warning if the class has no field for the dropout of the run."""
    covered = {name for pair in architecture.pairs for name in pair.model_fields}
    dropout = config.model.hidden_dropout
    if dropout and "hidden_dropout" not in covered:
        log(
            f"warning: {architecture.class_name} has no field for --hidden-dropout {dropout}, so a "
            "training of the exported model has none"
        )


def _sync(folder: Path) -> None:
    """Sync a folder and all files in it. `transformers` and safetensors do not."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            _sync(path)
        else:
            with open_regular(path) as file:
                os.fsync(file.fileno())
    sync_folder(folder)


_BRANCH_OUTPUTS = {
    "input": (".attention.out.", ".mlp.down.", ".mlp.shared.down.", ".mlp.experts.down"),
    "output": (".attention_output_norm.", ".mlp_output_norm."),
}
"""--norm-placement -> the last parameters of a residual branch."""


def fold_description(model: ModelConfig) -> ModelConfig:
    """Return the description of the model with folded weights."""
    return replace(
        model, parametrization="standard", base_width=None, base_depth=None, base_kv_channels=None
    )


def fold_rows(rows: Tensor, name: str, first: int, shape: ModelShape) -> Tensor:
    """Return rows of a parameter, multiplied by the factor on their outputs.

    Other programs have no such factors. A model of the standard parametrization with folded weights
    computes the same function. The optimizer's settings by parameter are lost, so a training that
    goes on there has other learning rates.

    Args:
        rows: Neighbouring rows of the complete parameter.
        name: Name of the parameter.
        first: Number of the first of these rows.
        shape: Sizes of the model, with its parametrization.
    """
    if shape.config.parametrization == "standard":
        return rows
    # The weight of a norm may be stored minus 1.
    stored = 0.0
    if shape.config.apply_layernorm_1p and name.endswith("norm.weight"):
        stored = 1.0
    if name.startswith("head.norm."):
        return (rows + stored) * shape.output_factor - stored
    # A norm after attention would undo a factor before it.
    if any(part in name for part in _BRANCH_OUTPUTS[shape.config.norm_placement]):
        return (rows + stored) * shape.residual_factor - stored
    # A norm of queries undoes factors of their projection.
    if ".attention.q_norm." in name:
        return (rows + stored) * shape.query_factor - stored
    if ".attention.qkv." in name and shape.config.qk_norm is None:
        # Each group has its query heads, its key and its value.
        heads = shape.config.num_attention_heads // shape.query_groups
        head = torch.arange(first, first + len(rows)) // shape.head_dim % (heads + 2)
        factors = torch.where(head < heads, shape.query_factor, 1.0)
        return rows * factors.view(-1, *(1 for _ in rows.shape[1:]))
    return rows


def write_card(
    folder: Path,
    checkpoint: Checkpoint,
    class_name: str,
    dtype: str,
    comparison: Comparison,
    licence: str | None,
) -> None:
    """Write README.md, the model card, with the facts of the run.

    Args:
        folder: The folder of the exported model.
        checkpoint: What was exported.
        class_name: The class of `transformers`.
        dtype: The type of the tensors.
        comparison: How the exported model compares with the checkpoint.
        licence: The licence of the model, or None if it is not known.
    """
    state = checkpoint.state
    config = checkpoint.read_config()
    rows = int(checkpoint.read_index().tensors["weight/embedding.word.weight"]["shape"][0])
    parameters = count_parameters(ModelShape(config.model, rows, rows))
    losses = _find_losses(checkpoint)
    facts = [
        f"- architecture: {class_name}",
        f"- parameters: {parameters:,}, in {dtype.removeprefix('torch.')}",
        f"- layers: {config.model.num_layers}, hidden size: {config.model.hidden_size}, "
        f"sequence length: {config.model.seq_length}",
        f"- iteration: {checkpoint.iteration:,}",
        f"- consumed samples: {state.get('consumed_samples', 0):,}",
        f"- consumed tokens: {state.get('consumed_tokens', 0):,}",
        # Only names, because the folders of a cluster are nobody's business.
        f"- data: {', '.join(list_data_names(config.data)) or 'not recorded'}",
        *(f"- loss on {name}: {loss:.4f}" for name, loss in losses.items()),
        f"- licence: {licence or 'not stated; ask who trained the model before you use it'}",
        f"- trainer: megatron-3d {checkpoint.manifest.version}",
    ]
    # The Hub shows a licence only from this list.
    license_lines = [] if licence is None else [f"license: {licence}"]
    checks = [f"- {line}" for line in comparison.describe()]
    text = "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            *license_lines,
            "---",
            "",
            "# A model trained with megatron-3d",
            "",
            *facts,
            "",
            "The tensors equal those of the checkpoint, rounded to the dtype of the files. The",
            "comparison of this trainer with transformers on these files gave:",
            "",
            *checks,
            "",
        ]
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def list_data_names(data: DataConfig) -> list[str]:
    """Return the names of the training data, without weights and folders.

    The list is empty if a file that lists the data cannot be read any more.
    """
    streamed = data.dataset_format is not None
    paths: list[str] = []
    with contextlib.suppress(ConfigError):
        sections = [data]
        if data.data_phases is not None:
            phases = read_phases(data.data_phases, streamed=streamed)
            sections = [use_phase(data, phase) for phase in phases]
        for section in sections:
            if streamed:
                # Without --datasets, the name is ".", and --data-path itself is meant.
                paths += [f"{section.data_path[0]}/{name}" for name in parse_shares(section)]
            elif mixture := find_train_mixture(section):
                paths += [part.prefix for part in mixture.parts]
    return list(dict.fromkeys(Path(path).name for path in paths))


def _find_losses(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the losses of the last step and evaluation, or nothing without metrics of the run."""
    training: dict[str, float] = {}
    evaluation: dict[str, float] = {}
    # The checkpoint may have been copied without the run's metrics.
    with contextlib.suppress(OSError):
        for entry in read_metrics(checkpoint.folder.parent / "metrics.jsonl"):
            if entry["iteration"] <= checkpoint.iteration:
                evaluation = entry.get("validation", evaluation)
                if entry.get("lm_loss") is not None:
                    training = {"training data": entry["lm_loss"]}
    return training | evaluation
