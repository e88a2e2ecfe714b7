"""Reads the YAML files of GPT-NeoX as a command line of this trainer.

Invariant: no key is dropped silently, and no text of a file is run. `compat` has the meaning
of each key. Keys of DeepSpeed are read by `deepspeed_json`. What depends on the sizes of the model
is computed later, in `compat_neox_derived`, because flags may replace the sizes.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megatron.base.outside_file import SETTINGS_BYTES, load_text
from megatron.base.plain_text import find_close_names
from megatron.config.fields import ValueWithOrigin
from megatron.config.normalise import CommandLine, read_argv
from megatron.config.yaml_file import PLAIN_TAGS, compose, get_line, is_null, read_items
from megatron.extras.interop.translators.compat import NEOX, NEOX_KEYS, NEOX_TRAINER, Row, pick_row
from megatron.extras.interop.translators.deepspeed_json import (
    ALTERNATIVES,
    KEYS,
    UNSUPPORTED_BLOCKS,
    Convert,
    merge_content,
    read_count,
    read_flag,
    read_list,
    read_number,
    read_positive,
    read_text,
)


def get_plain_value(node: yaml.Node) -> Any:
    """Return the value of a node in the types of Python: dict, list, bool, number, text or None.

    A number such as 1e-8, which YAML 1.1 reads as text, is a number. A word that is no number,
    such as 1:30, stays text.

    Raises:
        ValueError: the node has a tag, a key that is not a word, or a list or mapping twice.
    """
    return _get_plain_part(node, set())


def _get_plain_part(node: yaml.Node, seen: set[int]) -> Any:
    if node.tag not in PLAIN_TAGS:
        raise ValueError(f"must not have the tag {node.tag}")
    if isinstance(node, yaml.ScalarNode):
        return _get_plain_scalar(node)
    # Aliases of aliases would make a short text huge.
    if id(node) in seen:
        raise ValueError("must not have the same list or mapping twice, by an alias")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_get_plain_part(item, seen) for item in node.value]
    errors: list[str] = []
    items = read_items(node, "", "it", errors)
    if errors:
        raise ValueError(errors[0].removeprefix(":").removesuffix("."))
    return {key.value: _get_plain_part(value, seen) for key, value in items}


def _get_plain_scalar(node: yaml.ScalarNode) -> Any:
    if node.style:
        return node.value
    if is_null(node):
        return None
    if node.tag == "tag:yaml.org,2002:bool":
        return node.value.lower() in ("true", "yes", "on")
    # Python reads the words nan and inf as numbers.
    if any(letter.isdigit() for letter in node.value):
        for convert in (int, float):
            with contextlib.suppress(ValueError):
                number = convert(node.value)
                # A number that no float can hold stays text, which is no number to any key.
                return number if abs(number) < math.inf else node.value
    return node.value


_OTHER_NAMES = {"gas": "gradient-accumulation-steps", "save-interval": "checkpoint-factor"}
"""Names of older versions."""
_OF_DEEPSPEED = {
    key.partition(".")[0].replace("_", "-")
    for key in (*KEYS, *UNSUPPORTED_BLOCKS, *ALTERNATIVES, "bfloat16")
} - {"gradient-accumulation-steps"}
"""Keys that GPT-NeoX passes on to DeepSpeed."""
_TOKENIZERS = {
    "HFTokenizer": "PretrainedFromHF",
    "HFGPT2Tokenizer": "PretrainedFromHF",
    "SPMTokenizer": "SentencePieceTokenizer",
}
_CHECKS: dict[str, Convert] = {
    **dict.fromkeys(
        (
            "intermediate-size",
            "mlp-multiple-of",
            "sliding-window-width",
            "gradient-accumulation-steps",
            "checkpoint-factor",
            "keep-last-n-checkpoints",
        ),
        read_positive,
    ),
    **dict.fromkeys(
        ("expansion-factor", "rms-norm-epsilon", "init-method-std", "warmup", "lr-decay-fraction"),
        read_number,
    ),
    **dict.fromkeys(("use-bias-in-attn-linear", "use-bias-in-mlp"), read_flag),
    **dict.fromkeys(("tokenizer-type", "vocab-file", "merge-file"), read_text),
    **{f"{part}-data-paths": read_list(read_text) for part in ("train", "valid", "test")},
    **{f"{part}-data-weights": read_list(read_number) for part in ("train", "valid", "test")},
    "extra-save-iters": read_list(read_count),
}
"""Keys from which values are computed -> the check of their own values."""
_DENSE = {"global", "flash"}
"""Values of attention_config that are layers with full attention."""


@dataclass(frozen=True)
class _Key:
    """A key of a file."""

    typed: str
    place: str
    """File and line."""
    value: Any
    """The value in the types of Python."""

    @property
    def texts(self) -> list[str]:
        """Return the value as the words of a command line."""
        values = self.value
        if not isinstance(values, list):
            values = [values]
        return [str(each).lower() if isinstance(each, bool) else str(each) for each in values]

    def __str__(self) -> str:
        """Return place, key and value for messages."""
        shown = " ".join(self.texts)
        return f"{self.place} {self.typed}: {shown[:60]}"


def read_neox_files(paths: Sequence[str]) -> CommandLine | None:
    """Return the configuration of GPT-NeoX in these files, or None if they are of another kind.

    Errors are in the result.
    """
    errors: list[str] = []
    keys = _merge_files(paths, errors)
    if keys.keys().isdisjoint(NEOX_TRAINER.identify):
        return None
    line = CommandLine(foreign=" ".join(paths), errors=errors)
    line.typed[NEOX] = tuple(paths)
    if refusal := _find_other_kind(keys):
        # Its other keys are those of that kind, and would only give further errors.
        line.errors = [refusal]
        return line
    given = {name: key for name, key in keys.items() if key.value is not None}
    for name, check in _CHECKS.items():
        try:
            if name in given:
                check(given[name].value)
        except ValueError as error:
            # Without the key, nothing is computed from a wrong value.
            line.errors.append(f"{given.pop(name)} {error}.")
    _read_rows(line, {name: key for name, key in given.items() if name not in _OF_DEEPSPEED})
    _read_deepspeed(line, {name: key for name, key in given.items() if name in _OF_DEEPSPEED})
    _read_words(line, _write_tokenizer(given))
    _read_words(line, _write_biases(given, line))
    for part in ("train", "valid", "test"):
        _read_words(line, _write_data(given, part, line))
    _warn_about_linear_floor(line, given)
    return line


def _merge_files(paths: Sequence[str], errors: list[str]) -> dict[str, _Key]:
    """Return the keys of all files, with hyphens. A key that two files give is an error."""
    keys: dict[str, _Key] = {}
    for path in paths:
        try:
            root, broken = compose(load_text(path, SETTINGS_BYTES), path)
        except OSError as error:
            root, broken = None, f"--config {path} cannot be read: {error}."
        if broken is not None:
            errors.append(broken)
        for key in _read_keys(root, path, errors):
            name = key.typed.replace("_", "-")
            name = _OTHER_NAMES.get(name, name)
            if name in keys:
                errors.append(f"{key.place} gives {key.typed} again, after {keys[name].place}.")
            keys[name] = key
    return keys


def _warn_about_linear_floor(line: CommandLine, keys: Mapping[str, _Key]) -> None:
    """Warn if the rate falls on another line than in GPT-NeoX."""
    decay = keys.get("lr-decay-style")
    floor = keys.get("min-lr")
    if floor is not None and floor.value and (decay is None or decay.value == "linear"):
        line.warnings.append(
            f"{floor}: GPT-NeoX's linear decay goes to 0 and stays at min_lr once it is below, "
            "and here it goes to min_lr; cosine is the same in both."
        )


def _read_keys(root: yaml.Node | None, path: str, errors: list[str]) -> Iterator[_Key]:
    """Yield the keys of a file."""
    for node, value in read_items(root, path, "the file", errors):
        place = f"{path}:{get_line(node)}"
        try:
            yield _Key(node.value, place, get_plain_value(value))
        except ValueError as error:
            errors.append(f"{place} {node.value}: {error}.")


def _find_other_kind(keys: Mapping[str, _Key]) -> str | None:
    """Return an error if this is no pretraining of a dense transformer."""
    for name, usual, kind in (
        ("moe-num-experts", (None, 1), "mixtures of experts are not supported"),
        ("train-impl", (None, "normal"), "this program only pretrains"),
        ("train-label-data-paths", (None,), "this program only pretrains, on texts"),
    ):
        if name in keys and keys[name].value not in usual:
            return f"{keys[name]} is not possible here: {kind}."
    attention = keys.get("attention-config")
    if attention is None or attention.value is None:
        return None
    try:
        kinds = {str(kind) for kinds, _ in attention.value for kind in kinds}
    except (TypeError, ValueError):
        return f'{attention}: it must be a list such as [[["flash"], 24]].'
    if kinds <= _DENSE:
        return None
    return (
        f"{attention.place} {attention.typed}: layers of the kind "
        f"{', '.join(sorted(kinds - _DENSE))} are not supported; only dense transformers with "
        "global or flash attention are trained."
    )


def _read_rows(line: CommandLine, keys: Mapping[str, _Key]) -> None:
    """Read keys as their rows in the table prescribe."""
    # Reason -> the keys. One message for each reason is enough.
    ignored: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for name, key in keys.items():
        row = _find_row(name, key.texts)
        if row is None:
            close = find_close_names(name, _list_names())
            hint = "remove it"
            if close:
                hint = f"perhaps you meant {close[0].replace('-', '_')}"
            line.errors.append(f"{key.place}: GPT-NeoX has no key '{key.typed}'; {hint}.")
        elif row.arity == 0 and not isinstance(key.value, bool):
            line.errors.append(f"{key} must be true or false.")
        elif row.kind in ("renamed", "derived"):
            line.typed[name] = tuple(key.texts)
            if row.kind == "renamed":
                _read_words(line, [(key, _write_renamed(row, key))])
        # A key that is off or 0 asks for nothing.
        elif key.value:
            if row.kind == "harmless":
                ignored.setdefault(row.reason, []).append(key.typed)
            else:
                refused.setdefault(row.reason, []).append(str(key))
    line.errors += [
        f"{', '.join(shown)} is not possible here: {why}." for why, shown in refused.items()
    ]
    line.warnings += [
        f"{line.foreign}: {', '.join(shown)}: this has no effect here: {why}."
        for why, shown in ignored.items()
    ]


def _find_row(name: str, texts: Sequence[str]) -> Row | None:
    """Return the first row that holds for a key with these values. None if there is none."""
    rows = [row for row in NEOX_KEYS if row.flag == name]
    rows = rows or [
        row for row in NEOX_KEYS if row.flag.endswith("*") and name.startswith(row.flag[:-1])
    ]
    return pick_row(rows, texts)


def _list_names() -> list[str]:
    return [*(row.flag for row in NEOX_KEYS), *_OF_DEEPSPEED]


def _write_renamed(row: Row, key: _Key) -> list[str]:
    """Return a key with another name here as a command line."""
    if row.arity == 0:
        return [f"{flag}={key.texts[0]}" for flag in row.to]
    if row.only:
        return list(row.to)
    return [*row.to, *key.texts]


def _read_words(line: CommandLine, written: Iterable[tuple[_Key, list[str]]]) -> None:
    """Read the words that keys stand for, which are flags of this trainer with their values."""
    for key, words in written:
        found = read_argv(words)
        for dotted, item in found.given.items():
            line.given[dotted] = ValueWithOrigin(item.value, key.place)
        line.errors += [f"{key}: {error}" for error in found.errors]


def _read_deepspeed(line: CommandLine, keys: Mapping[str, _Key]) -> None:
    """Read DeepSpeed's keys by the tables of its JSON."""
    content = {name.replace("-", "_"): key.value for name, key in keys.items()}
    optimizer = content.get("optimizer")
    if isinstance(optimizer, dict) and str(optimizer.get("type")).lower() == "adam":
        # GPT-NeoX reads the type in any case.
        content["optimizer"] = {**optimizer, "type": "Adam"}
    if isinstance(block := content.get("fp16"), dict):
        # GPT-NeoX reads neither, except that old versions know bf16 by this type.
        kept = {key: value for key, value in block.items() if key not in ("fp16", "type")}
        content["fp16"] = kept
        if block.get("type") == "bfloat16":
            del content["fp16"]
            content["bf16"] = {"enabled": kept.get("enabled", False)}
    found, errors, warnings = merge_content(content, str(line.foreign), {})
    for dotted, item in found.items():
        # The origin is 'PATH: KEY', where KEY has its block in front.
        top = item.origin.removeprefix(f"{line.foreign}: ").partition(".")[0].replace("_", "-")
        # bf16 may have been read from the block fp16.
        key = keys.get(top) or keys["fp16"]
        line.given[dotted] = ValueWithOrigin(item.value, key.place)
    line.errors += errors
    line.warnings += warnings
    if "train-batch-size" in keys:
        line.typed["train-batch-size"] = tuple(keys["train-batch-size"].texts)
    passed = [name for name in _list_dotted(content) if name in KEYS and KEYS[name].passed]
    if passed:
        line.warnings.append(
            f"{line.foreign}: {', '.join(passed)}: this has no effect here: it is for DeepSpeed's "
            "engine."
        )


def _list_dotted(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of DeepSpeed's keys, and those in blocks with the block in front."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def _write_tokenizer(keys: Mapping[str, _Key]) -> Iterator[tuple[_Key, list[str]]]:
    """Yield the keys of the tokenizer and their words."""
    kind = keys.get("tokenizer-type")
    vocabulary = keys.get("vocab-file")
    merges = keys.get("merge-file")
    if kind is None or kind.value == "GPT2BPETokenizer":
        for key, flag in ((vocabulary, "--vocab-file"), (merges, "--merge-file")):
            if key is not None:
                yield key, ["--tokenizer-type", "GPT2BPETokenizer", flag, str(key.value)]
        return
    yield kind, ["--tokenizer-type", _TOKENIZERS.get(str(kind.value), str(kind.value))]
    if vocabulary is not None:
        yield vocabulary, ["--tokenizer-name-or-path", str(vocabulary.value)]
    elif kind.value == "HFGPT2Tokenizer":
        yield kind, ["--tokenizer-name-or-path", "gpt2"]


def _write_biases(keys: Mapping[str, _Key], line: CommandLine) -> Iterator[tuple[_Key, list[str]]]:
    """Yield the key that turns the biases of linear layers off, if there is one."""
    attention = keys.get("use-bias-in-attn-linear")
    mlp = keys.get("use-bias-in-mlp")
    # GPT-NeoX's first Llama MLP has no biases.
    if mlp is None and line.typed.get("mlp-type") == ("llama",):
        mlp = keys["mlp-type"]
    off = [attention is not None and attention.value is False]
    off.append(mlp is not None and mlp.value in (False, "llama"))
    for key in (attention, mlp):
        if key is None or not any(off):
            continue
        if all(off):
            yield key, ["--no-add-bias-linear"]
            return
        line.errors.append(
            f"{key}: attention and MLP both have biases here, or none. Give both "
            "use_bias_in_attn_linear and use_bias_in_mlp as false, as in Llama, or as true."
        )
        return


def _write_data(
    keys: Mapping[str, _Key], part: str, line: CommandLine
) -> Iterator[tuple[_Key, list[str]]]:
    """Yield the place and the words of the data sets of training, validation or test."""
    paths = keys.get(f"{part}-data-paths")
    weights = keys.get(f"{part}-data-weights")
    if paths is None:
        return
    shares = ["1"] * len(paths.texts)
    if weights is not None:
        shares = weights.texts
    if len(shares) != len(paths.texts):
        line.errors.append(f"{weights}: {len(paths.texts)} data sets need as many weights.")
        return
    mixture = ", ".join(
        f"{share} 0:1 {path}" for share, path in zip(shares, paths.texts, strict=True)
    )
    yield paths, [f"--{part}-weighted-split-paths", f"{part}: {mixture}"]
