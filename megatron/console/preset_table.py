"""The table that --list-presets prints."""

from collections.abc import Sequence

from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.presets import Preset, list_preset_names, read_preset
from megatron.model.flops import count_parameters
from megatron.model.shape import ModelShape
from megatron.tokenizer.vocabulary import compute_padded_vocab_size

_HEAD = (
    "name",
    "parameters",
    "layers",
    "width",
    "heads",
    "query groups",
    "context",
    "vocabulary",
    "source",
)


def build_preset_shape(preset: Preset) -> ModelShape:
    """Return the sizes of a preset's model. The vocabulary is padded for one rank."""
    values: dict[str, dict[str, object]] = {"model": {}, "tokenizer": {}}
    for dotted, item in preset.values.items():
        group, _, name = dotted.partition(".")
        values[group][name] = item.value
    # A preset is complete, so these classes get every argument without a default.
    model = ModelConfig(**values["model"])  # type: ignore[arg-type]
    tokenizer = TokenizerConfig(**values["tokenizer"])  # type: ignore[arg-type]
    assert tokenizer.vocab_size is not None, preset.name
    padded = compute_padded_vocab_size(
        tokenizer.vocab_size,
        tokenizer.make_vocab_size_divisible_by,
        pad_to=tokenizer.pad_vocab_size_to,
    )
    return ModelShape(model, tokenizer.vocab_size, padded)


def format_preset_table() -> str:
    """Return a table with a line for each preset.

    The numbers of parameters include the padding of the vocabulary for one tensor-parallel rank.
    """
    rows: list[tuple[str, ...]] = [_HEAD]
    for name in list_preset_names():
        preset = read_preset(name)
        shape = build_preset_shape(preset)
        config = shape.config
        numbers = (
            count_parameters(shape),
            config.num_layers,
            config.hidden_size,
            config.num_attention_heads,
            shape.query_groups,
            config.seq_length,
            shape.vocab_size,
        )
        rows.append((name, *(f"{number:,}" for number in numbers), preset.sources[0]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_format_row(row, widths) for row in rows)


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of the table. The name and the source begin at the left of their columns."""
    cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    return "  ".join([row[0].ljust(widths[0]), *cells[1:-1], row[-1]])
