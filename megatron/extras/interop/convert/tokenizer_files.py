"""The files of a tokenizer beside a model in the format of Hugging Face.

Invariant: what the source's files say is kept: chat templates, special tokens, and the ids that end
a generated text. A tokenizer that cannot be written exactly is not written under a name that
`transformers` reads.
"""

import importlib
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megatron.base.errors import ConfigError
from megatron.base.outside_file import INDEX_BYTES, check_regular, load_json
from megatron.config.data import TokenizerConfig
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


AWKWARD = (
    *("", " ", "   ", "\n", "\r\n\r\n  \t x", "a  b   c    d\n\n\ne ", " leading and trailing "),
    "don't we'll I'VE they're it's 'tis ''s",
    "naïve café Ünïcödé ﬁ ſ İstanbul e\u0301 \u00a0\u2003\u3000x\u200b\u2028y\x85z",
    "漢字かな交じり文 한국어 ไทย العربية हिन्दी עברית",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \U0010ffff\ufffd\ufeff",
    "0 00 123456789 1,234.56e-7 ½ ² Ⅷ ٣",
    "\x00\x01\x7f\x1b[0m",
    "<|endoftext|> a<|endoftext|>b <s></s>[CLS]",
    "a" * 3000,
    "=" * 500 + " " * 500 + "\t" * 70 + "!?" * 300,
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # \u2192 done\n",
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org",
)
"""Texts on which tokenizer libraries tend to differ.

They have white space, contractions, combining characters, scripts without spaces, emoji, control
characters, special tokens and long repetitions.
"""
_SPACE = "\u2581"
"""What stands for a space in pieces."""
_UNIGRAM = 1
_BPE = 2
_NORMAL = 1
_USER_DEFINED = 4
_RANDOM_TEXTS = 400
_PIECES_OF_A_TEXT = 30


def convert_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Return the same tokenizer as one of the `tokenizers` library.

    It is returned only after it gave the ids of `sentencepiece` on difficult texts and on texts of
    its own pieces. `list_known_differences` names the rare texts that remain.

    Source: Kudo and Richardson, https://arxiv.org/abs/1808.06226. The order of merges and of
    normalisations is that of `sentencepiece`'s source.

    Raises:
        ConfigError: `tokenizers` cannot express it, or gives other ids.
    """
    description = _parse_sentencepiece(tokenizer.content)
    backend = tokenizers.Tokenizer(_make_model(description))
    steps = list(_list_normalizers(description.normalizer_spec))
    backend.normalizer = normalizers.Sequence(steps)
    # Such symbols are found before anything else, and no merge crosses them.
    symbols = [piece.piece for piece in description.pieces if piece.type == _USER_DEFINED]
    if symbols:
        symbols.sort(key=len, reverse=True)
        pattern = Regex("|".join(map(_escape, symbols)))
        backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = _make_decoder(description.normalizer_spec)
    backend.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name in tokenizer.control_symbols.values()
        ]
    )
    _compare_ids(backend, tokenizer)
    return backend


def list_known_differences(tokenizer: SentencePieceTokenizer) -> list[str]:
    """Return descriptions of texts for which the converted tokenizer may give other ids.

    All tokenizers of Hugging Face also turn the name of a control symbol into the symbol. That is
    what chat templates need, and it is not listed.
    """
    description = _parse_sentencepiece(tokenizer.content)
    found = []
    if description.trainer_spec.model_type == _UNIGRAM:
        found.append(
            "a long text with two divisions that are nearly equally likely, because sentencepiece "
            "adds their scores in fp32 and tokenizers in fp64"
        )
    if description.normalizer_spec.precompiled_charsmap:
        found.append(
            "a character that normalisation replaces, followed by a combining mark, which "
            "tokenizers drops"
        )
    return found


def _parse_sentencepiece(content: bytes) -> Any:
    """Return the description of a tokenizer.model."""
    # protobuf makes its classes at run time, so mypy does not know them.
    pb2: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    description = pb2.ModelProto()
    description.ParseFromString(content)
    return description


def _make_model(description: Any) -> models.Model:
    """Return the pieces with their scores or merges.

    Raises:
        ConfigError: The model is of another kind than BPE and Unigram.
    """
    settings = description.trainer_spec
    if settings.model_type == _UNIGRAM:
        pieces = [(piece.piece, piece.score) for piece in description.pieces]
        return models.Unigram(pieces, settings.unk_id, settings.byte_fallback)
    if settings.model_type != _BPE:
        raise ConfigError("it is a model of words or characters, not BPE or Unigram")
    return models.BPE(
        vocab={piece.piece: index for index, piece in enumerate(description.pieces)},
        merges=_list_merges(description),
        unk_token=description.pieces[settings.unk_id].piece,
        fuse_unk=True,
        byte_fallback=settings.byte_fallback,
        # User-defined symbols have no merges. They are words of their own after the split.
        ignore_merges=any(piece.type == _USER_DEFINED for piece in description.pieces),
    )


def _list_merges(description: Any) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, the best first.

    `sentencepiece` merges the pair whose piece has the highest score. The file has no merges.
    """
    scores = {piece.piece: piece.score for piece in description.pieces if piece.type == _NORMAL}
    places = {piece: place for place, piece in enumerate(scores)}
    found = []
    for piece, score in scores.items():
        for middle in range(1, len(piece)):
            left, right = piece[:middle], piece[middle:]
            if left in scores and right in scores:
                found.append((-score, places[piece], places[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _list_normalizers(settings: Any) -> Iterator[normalizers.Normalizer]:
    """Yield the steps from a text to what is divided into pieces.

    Raises:
        ConfigError: A setting is not known here.
    """
    if not settings.escape_whitespaces:
        raise ConfigError("it does not escape spaces")
    if settings.precompiled_charsmap:
        yield normalizers.Precompiled(settings.precompiled_charsmap)
    if settings.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(r"\A +| +\z"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if settings.add_dummy_prefix:
        yield normalizers.Prepend(_SPACE)
    yield normalizers.Replace(" ", _SPACE)


def _make_decoder(settings: Any) -> decoders.Decoder:
    """Return the steps from pieces to a text."""
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if settings.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _escape(text: str) -> str:
    """Return a regular expression that matches a text alone. A piece has no line ends."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _compare_ids(backend: tokenizers.Tokenizer, tokenizer: SentencePieceTokenizer) -> None:
    """Check that both tokenizers give the same ids.

    Raises:
        ConfigError: They do not. The message has the first text.
    """
    unigram = _parse_sentencepiece(tokenizer.content).trainer_spec.model_type == _UNIGRAM
    names = tokenizer.control_symbols.values()
    for text in [*AWKWARD, *_make_difficult_texts(tokenizer)]:
        if any(name in text for name in names):
            continue
        expected = tokenizer.encode(text)
        found = backend.encode(text, add_special_tokens=False).ids
        if found != expected and not (unigram and _have_equal_scores(tokenizer, expected, found)):
            raise ConfigError(f"its ids differ from those of sentencepiece, as in {text[:60]!r}")


def _have_equal_scores(
    tokenizer: SentencePieceTokenizer, first: list[int], second: list[int]
) -> bool:
    """Return whether two divisions of a text have the same sum of scores, up to fp32 rounding."""
    sums = [math.fsum(map(tokenizer.processor.get_score, ids)) for ids in (first, second)]
    return math.isclose(*sums, rel_tol=1e-6)


def _make_difficult_texts(tokenizer: SentencePieceTokenizer) -> Iterator[str]:
    """Yield the text of each piece that gives text, and random sequences of pieces."""
    # Random bytes would give sequences of characters that no language has.
    ids = [
        index
        for index in range(tokenizer.vocab_size)
        if index not in tokenizer.control_symbols and not tokenizer.processor.is_byte(index)
    ]
    for index in ids:
        yield tokenizer.decode([index])
    generator = random.Random(0)
    for _ in range(_RANDOM_TEXTS):
        yield tokenizer.decode(generator.choices(ids, k=_PIECES_OF_A_TEXT))
