"""The files of a tokenizer beside a model in the format of Hugging Face.

Invariant: what the source's files say is kept: chat templates, special tokens, and the ids that end
a generated text. A tokenizer that cannot be written exactly is not written under a name that
`transformers` reads.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from megatron.base.errors import ConfigError
from megatron.base.outside_file import INDEX_BYTES, check_regular, load_json
from megatron.config.data import TokenizerConfig
from megatron.extras.interop.convert.sentencepiece_json import (
    convert_sentencepiece,
    list_known_differences,
)
from megatron.tokenizer.build import (
    HFTokenizer,
    Tokenizer,
    TransformersTokenizer,
    build_tokenizer,
    find_tokenizer_json,
    read_special_token,
)
from megatron.tokenizer.hub import find_tokenizer_folder
from megatron.tokenizer.sentencepiece_model import SentencePieceTokenizer

GENERATION_CONFIG = "generation_config.json"
_SETTINGS = "tokenizer_config.json"
_PATTERNS = (
    "tokenizer.json",
    _SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "chat_template*.jinja",
    "additional_chat_templates/*.jinja",
)
_INEXACT_NAME = "sentencepiece.model"
"""`transformers` does not read this name, so it cannot convert the file inexactly."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids for config.json and generation_config.json. None: there is no such token."""

    bos: int | None = None
    eos: int | list[int] | None = None
    """The ids that end a generated text. A chat model may have several."""
    pad: int | None = None

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of both files."""
        return {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}


def list_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that describe its tokenizer, relative to the folder."""
    found = [path for pattern in _PATTERNS for path in sorted(folder.glob(pattern))]
    return [path.relative_to(folder) for path in found if path.is_file()]


def copy_files(source: Path, files: list[Path], folder: Path) -> None:
    """Copy files of a folder to another one, under their relative paths."""
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        check_regular(source / path, INDEX_BYTES)
        shutil.copyfile(source / path, folder / path)


def write_tokenizer(
    folder: Path, config: TokenizerConfig, rows: int, log: Callable[[str], None]
) -> SpecialIds:
    """Write the tokenizer's files, and return its special ids.

    If the tokenizer is not on this machine, print a warning and write nothing.

    Args:
        folder: The folder of the exported model.
        config: Settings of the tokenizer.
        rows: Rows of the model's embedding.
        log: Receives warnings.

    Raises:
        ConfigError: The tokenizer has more ids than the embedding has rows, or a file beside it is
            damaged.
    """
    try:
        # A model without a tokenizer is still of use, so this is no error.
        tokenizer = build_tokenizer(config)
    except ConfigError as error:
        log(f"warning: the tokenizer is not exported: {error}")
        return SpecialIds()
    # The model could not compute these ids. Fewer ids than rows are padding.
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, and the embedding has {rows} rows; "
            "give the tokenizer of the training"
        )
    source = None
    if not config.has_two_files:
        # The type with two files has no folder, and no settings beside them.
        source = find_tokenizer_folder(config.tokenizer_name_or_path)
    if isinstance(tokenizer, SentencePieceTokenizer):
        names = _write_sentencepiece(folder, tokenizer, log)
    elif isinstance(tokenizer, TransformersTokenizer):
        tokenizer.backend.save_pretrained(folder)
        names = {}
    else:
        assert isinstance(tokenizer, HFTokenizer), "the last kind of tokenizer"
        end = tokenizer.backend.id_to_token(tokenizer.eod)
        assert end is not None, "the tokenizer was built with this token"
        names = {"eos_token": end}
        if source is None:
            _save(tokenizer.backend, folder)
        else:
            _copy_hf(source, config, folder)
    if names:
        _write_settings(folder, names)
    return _find_special_ids(tokenizer, source, rows)


def _save(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Write tokenizer.json.

    Raises:
        OSError: It cannot be written. The library's own writer raises no such class.
    """
    text = backend.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


def _copy_hf(source: Path, config: TokenizerConfig, folder: Path) -> None:
    """Copy the files of a Hugging Face tokenizer."""
    # Copied and not written again, so that chat templates and added tokens stay as they are.
    copy_files(source, list_tokenizer_files(source), folder)
    found = find_tokenizer_json(config.tokenizer_name_or_path)
    assert found is not None, "the tokenizer was built from it"
    # The flag may name a file with another name.
    shutil.copyfile(found, folder / "tokenizer.json")


def _write_sentencepiece(
    folder: Path, tokenizer: SentencePieceTokenizer, log: Callable[[str], None]
) -> dict[str, str]:
    """Write tokenizer.json and tokenizer.model, and return the special tokens.

    If no tokenizer.json gives the same ids, only a copy of the model is written.
    """
    try:
        backend = convert_sentencepiece(tokenizer)
    except ConfigError as error:
        log(
            f"warning: the tokenizer is not exported as tokenizer.json: {error}. {_INEXACT_NAME} "
            "is the SentencePiece model itself"
        )
        (folder / _INEXACT_NAME).write_bytes(tokenizer.content)
        return {}
    for difference in list_known_differences(tokenizer):
        log(f"warning: tokenizer.json may divide in another way: {difference}")
    _save(backend, folder)
    (folder / "tokenizer.model").write_bytes(tokenizer.content)
    processor = tokenizer.processor
    ids = {
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "unk_token": processor.unk_id(),
        "pad_token": processor.pad_id(),
    }
    # -1 means that the model has no such piece.
    return {name: processor.id_to_piece(index) for name, index in ids.items() if index >= 0}


def _write_settings(folder: Path, names: Mapping[str, str]) -> None:
    """Complete tokenizer_config.json, or write it. No file of the source names these tokens."""
    path = folder / _SETTINGS
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if path.exists():
        settings = load_json(path)
    missing = {name: token for name, token in names.items() if not read_special_token(folder, name)}
    if path.exists() and not missing:
        return
    text = json.dumps(settings | missing, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _find_special_ids(tokenizer: Tokenizer, source: Path | None, rows: int) -> SpecialIds:
    """Return the ids that the source's generation_config.json names, or the tokenizer's own."""
    if source is not None and (source / GENERATION_CONFIG).is_file():
        fields = _read_generation_config(source / GENERATION_CONFIG)
        eos = fields.get("eos_token_id")
        # If one of these ids is not of this vocabulary, no field of the file is used.
        if _list_ids(eos, rows):
            return SpecialIds(
                _keep_id(fields.get("bos_token_id"), rows),
                eos,
                _keep_id(fields.get("pad_token_id"), rows),
            )
    if isinstance(tokenizer, SentencePieceTokenizer):
        bos, pad = tokenizer.processor.bos_id(), tokenizer.processor.pad_id()
        return SpecialIds(_keep_id(bos, rows), tokenizer.eod, _keep_id(pad, rows))
    if isinstance(tokenizer, TransformersTokenizer):
        backend = tokenizer.backend
        return SpecialIds(backend.bos_token_id, tokenizer.eod, backend.pad_token_id)
    if source is None or not isinstance(tokenizer, HFTokenizer):
        return SpecialIds(eos=tokenizer.eod)
    tokens = [read_special_token(source, name) for name in ("bos_token", "pad_token")]
    bos, pad = (tokenizer.backend.token_to_id(token) if token else None for token in tokens)
    return SpecialIds(bos, tokenizer.eod, pad)


def _read_generation_config(path: Path) -> dict[str, Any]:
    """Return the fields of a generation_config.json.

    Raises:
        ConfigError: It is damaged.
    """
    try:
        fields = load_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} must be a JSON object; it is {type(fields).__name__}.")
    return fields


def _list_ids(value: Any, rows: int) -> list[int]:
    """Return the ids of a field with one id or a list, or nothing if it has anything else."""
    values = value if isinstance(value, list) else [value]
    if any(_keep_id(each, rows) is None for each in values):
        return []
    return values


def _keep_id(value: Any, rows: int) -> int | None:
    """Return a value if it is an id of the model."""
    if isinstance(value, int) and 0 <= value < rows:
        return value
    return None
