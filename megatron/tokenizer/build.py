"""The tokenizers, built from their files.

Invariant: the ids of a text are those of this text alone. No special token is added, and nothing is
truncated or padded, even if the tokenizer's own files ask for that. If two programs added a
separator, the corpus would have it twice.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.base.errors import ConfigError
from megatron.base.outside_file import INDEX_BYTES, check_regular, load_json
from megatron.config.data import TokenizerConfig, TokenizerType
from megatron.tokenizer.failures import describe_tiktoken, encode_checked
from megatron.tokenizer.hub import fetch_tokenizer, find_tokenizer_file, find_tokenizer_folder
from megatron.tokenizer.sentencepiece_model import (
    FILE,
    SentencePieceTokenizer,
    read_sentencepiece,
)

END_OF_DOCUMENT = "<|endoftext|>"
_LARGEST_ID = (1 << 26) - 1
_LARGEST_GROWTH = 1000


class Tokenizer(Protocol):
    """The interface that the rest of the package needs of a tokenizer.

    Ids are in [0, vocab_size). `eod` ends a document.
    """

    @property
    def vocab_size(self) -> int:
        """Number of ids, at least one more than the largest id."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""


class HFTokenizer:
    """A tokenizer of the `tokenizers` library, held in `backend`."""

    def __init__(self, backend: tokenizers.Tokenizer, eod: int, name: str = "") -> None:
        """Wrap `backend`, whose end-of-document token has the id `eod`. `name` is for messages."""
        self.name = name
        # A tokenizer.json may ask for truncation or padding. Both would change a corpus silently.
        backend.no_truncation()
        backend.no_padding()
        # A text that spells a special token is ordinary text. See `build_tokenizer`.
        backend.encode_special_tokens = True
        self.backend = backend
        self.eod = eod
        # Ids may have gaps, so the number of entries can be smaller than the largest id.
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text. The library encodes them in parallel."""

        def encode(texts: list[str]) -> list[list[int]]:
            found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in found]

        return encode_checked(self.name, encode, texts)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


class TransformersTokenizer:
    """A tokenizer that only `transformers` can read, because it has no tokenizer.json.

    It is slower than the others.
    """

    def __init__(self, backend: Any, eod: int, name: str) -> None:
        """Wrap `backend`, whose end-of-document token has the id `eod`. `name` is for messages."""
        self.name = name
        self.backend = backend
        self.eod = eod
        self.vocab_size = max(len(backend), 1 + max(backend.get_vocab().values()))
        self.options = dict.fromkeys(
            ("add_special_tokens", "truncation", "padding", "verbose"), False
        )
        # A text that spells a special token is ordinary text. See `build_tokenizer`.
        self.options["split_special_tokens"] = True

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""

        def encode(texts: list[str]) -> list[list[int]]:
            return [self.backend.encode(text, **self.options) for text in texts]

        return encode_checked(self.name, encode, texts)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self.backend.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that the flags name.

    A tokenizer on the Hub is downloaded if it is not on this machine.

    Raises:
        ConfigError: it cannot be built. The message names flag and file.
    """
    builders: dict[TokenizerType, Callable[[TokenizerConfig], Tokenizer]] = {
        "GPT2BPETokenizer": _build_gpt2,
        "SentencePieceTokenizer": _build_sentencepiece,
        "PretrainedFromHF": _build_from_hf,
    }
    tokenizer = builders[config.tokenizer_type](config)
    if config.special_tokens_in_text:
        # A text that spells a special token has this token.
        if isinstance(tokenizer, HFTokenizer) and not config.has_two_files:
            tokenizer.backend.encode_special_tokens = False
        elif isinstance(tokenizer, TransformersTokenizer):
            tokenizer.options["split_special_tokens"] = False
        else:
            raise ConfigError(
                f"--special-tokens-in-text is not possible with {config.tokenizer_type}, which has "
                "no special tokens in a text. Leave it out, or use PretrainedFromHF."
            )
    # A smaller --vocab-size would give the model no embedding for some ids. A larger one is
    # allowed.
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {config.vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} ids; leave the flag out."
        )
    return tokenizer


def list_special_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a tokenizer's special tokens (BOS, EOS, ...), sorted.

    The end of a document is one of them.
    """
    found = {tokenizer.eod}
    if isinstance(tokenizer, HFTokenizer):
        found |= {
            index
            for index, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
    elif isinstance(tokenizer, SentencePieceTokenizer):
        found |= tokenizer.control_symbols.keys()
    elif isinstance(tokenizer, TransformersTokenizer):
        found |= set(tokenizer.backend.all_special_ids)
    return tuple(sorted(found))


def find_tokenizer_json(name_or_path: str | None) -> Path | None:
    """Return the tokenizer.json that --tokenizer-name-or-path names, or None if there is none.

    Nothing is downloaded.
    """
    return find_tokenizer_file(name_or_path, "tokenizer.json")


def find_sentencepiece_model(name_or_path: str | None) -> Path | None:
    """Return the tokenizer.model that the flag names, or None if there is none."""
    return find_tokenizer_file(name_or_path, FILE)


def read_vocabulary(vocab_file: str) -> dict[str, int]:
    """Return token -> id of a vocab.json.

    Raises:
        ConfigError: the file is missing or has other content.
    """
    vocabulary = _read_json(vocab_file, f"--vocab-file {vocab_file}")
    if not vocabulary or not all(
        isinstance(index, int) and index >= 0 for index in vocabulary.values()
    ):
        raise ConfigError(
            f"--vocab-file {vocab_file} must be a JSON object of token: id, with ids from 0 on."
        )
    return vocabulary


def read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json.

    Raises:
        ConfigError: the file is damaged, or of a kind that the library does not support.
    """
    try:
        check_regular(path, INDEX_BYTES)
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # The library raises no more specific class. Its class PanicException is no Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        hint = ""
        if path.suffix == ".model":
            hint = ". A tokenizer.model needs --tokenizer-type SentencePieceTokenizer."
        raise ConfigError(
            describe_tiktoken(path)
            or f"--tokenizer-name-or-path: {path} cannot be read as a Hugging Face tokenizer: "
            f"{error}{hint}"
        ) from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > _LARGEST_ID:
        raise ConfigError(
            f"--tokenizer-name-or-path: {path} has the id {largest}, and ids must be at most "
            f"{_LARGEST_ID}, because the embedding has a row for each smaller id"
        )
    growth = 1.0
    if tokenizer.normalizer is not None:
        growth = _find_growth(json.loads(tokenizer.normalizer.__getstate__()))
    if growth > _LARGEST_GROWTH:
        raise ConfigError(
            f"--tokenizer-name-or-path: the normalizer of {path} may make texts {growth:.3g} times "
            f"as long, and at most {_LARGEST_GROWTH} times is allowed. It is damaged or hostile"
        )
    return tokenizer


def _find_growth(normalizer: dict[str, Any]) -> float:
    """Return by what factor the replacements of a normalizer may lengthen a text."""
    if normalizer.get("type") == "Sequence":
        return math.prod(_find_growth(each) for each in normalizer["normalizers"])
    if normalizer.get("type") == "Replace":
        replaced = normalizer["pattern"].get("String", "x")
        return max(1.0, len(normalizer["content"]) / max(1, len(replaced)))
    # A text of one character is the worst case.
    if normalizer.get("type") == "Prepend":
        return 1.0 + len(normalizer["prepend"])
    return 1.0


def _hint_at_other_types(config: TokenizerConfig) -> str:
    """Return the end of a message about GPT2BPETokenizer, which is the default."""
    name = config.tokenizer_name_or_path
    if name is None:
        return (
            ", or name another tokenizer with --tokenizer-type PretrainedFromHF or "
            "SentencePieceTokenizer, and --tokenizer-name-or-path"
        )
    if name.endswith(".model"):
        return f", or add --tokenizer-type SentencePieceTokenizer to use {name}"
    return f", or add --tokenizer-type PretrainedFromHF to use {name}"


def build_byte_level_bpe(vocab_file: str, merge_file: str) -> tokenizers.Tokenizer:
    """Return GPT-2's byte-level BPE (https://github.com/openai/gpt-2).

    It encodes special tokens in a text as ordinary text.

    Raises:
        ConfigError: the files are not a valid BPE.
    """
    try:
        check_regular(merge_file, INDEX_BYTES)
        backend = tokenizers.Tokenizer(models.BPE.from_file(vocab_file, merge_file))
    # The library raises no more specific class.
    except Exception as error:
        hint = "; --merge-file is merges.txt, not the vocabulary" * merge_file.endswith(".json")
        raise ConfigError(
            f"--vocab-file {vocab_file} and --merge-file {merge_file} are not a valid BPE: {error}"
            f"{hint}"
        ) from error
    # GPT-2 adds no space before the first word, and the library does by default.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_gpt2(config: TokenizerConfig) -> HFTokenizer:
    """Return the tokenizer of --vocab-file and --merge-file."""
    for flag, file in (("--vocab-file", config.vocab_file), ("--merge-file", config.merge_file)):
        if file is None:
            raise ConfigError(
                describe_tiktoken(config.tokenizer_name_or_path)
                or f"GPT2BPETokenizer needs {flag}; give both --vocab-file vocab.json and "
                f"--merge-file merges.txt{_hint_at_other_types(config)}."
            )
        if not Path(file).is_file():
            raise ConfigError(f"{flag} {file} does not exist or is not a file.")
    assert config.vocab_file is not None, "checked above"
    assert config.merge_file is not None, "checked above"
    vocabulary = read_vocabulary(config.vocab_file)
    # The library drops a byte whose symbol is not in the vocabulary, without a message.
    lacking = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if lacking:
        raise ConfigError(
            f"--vocab-file {config.vocab_file} lacks {len(lacking)} of the 256 byte symbols "
            f"({' '.join(lacking[:8])} ...): text with these bytes would lose them. Use a "
            "byte-level vocabulary with its complete alphabet."
        )
    if END_OF_DOCUMENT not in vocabulary:
        raise ConfigError(
            f"--vocab-file {config.vocab_file} has no {END_OF_DOCUMENT}, which ends documents; "
            "add it as the last entry."
        )
    return HFTokenizer(
        build_byte_level_bpe(config.vocab_file, config.merge_file),
        vocabulary[END_OF_DOCUMENT],
        config.vocab_file,
    )


def _build_sentencepiece(config: TokenizerConfig) -> SentencePieceTokenizer:
    """Return the tokenizer of a tokenizer.model."""
    name = config.tokenizer_name_or_path
    if name is None:
        raise ConfigError("SentencePieceTokenizer needs --tokenizer-model FILE.")
    if find_tokenizer_folder(name) is None:
        fetch_tokenizer(name)
    found = find_sentencepiece_model(name)
    if found is None:
        raise ConfigError(
            describe_tiktoken(name) or f"--tokenizer-model {name}: this folder has no {FILE}."
        )
    return read_sentencepiece(found)


def _build_from_hf(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of --tokenizer-name-or-path."""
    name = config.tokenizer_name_or_path
    if name is None:
        raise ConfigError("PretrainedFromHF needs --tokenizer-name-or-path FOLDER.")
    folder = fetch_tokenizer(name)
    found = find_tokenizer_json(name)
    if found is None:
        try:
            return _build_from_transformers(name, folder)
        except ConfigError as error:
            raise ConfigError(describe_tiktoken(folder) or str(error)) from error
    backend = read_tokenizer_json(found)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    token = read_end_token(found.parent)
    # A tokenizer.json may have GPT-2's token without a file that names it.
    if token is None and END_OF_DOCUMENT in vocabulary:
        token = END_OF_DOCUMENT
    if token is None or token not in vocabulary:
        raise ConfigError(
            f"--tokenizer-name-or-path {name}: no end-of-document token (eos_token in its files: "
            f'{token!r}). Name one that is in the vocabulary as "eos_token" in '
            "tokenizer_config.json next to tokenizer.json."
        )
    return HFTokenizer(backend, vocabulary[token], str(found))


def read_end_token(folder: Path) -> str | None:
    """Return the end-of-document token that a folder's files name, or None.

    Raises:
        ConfigError: a file is damaged.
    """
    return read_special_token(folder, "eos_token")


def read_special_token(folder: Path, name: str) -> str | None:
    """Return a special token, such as eos_token or bos_token, that a folder's files name, or None.

    Raises:
        ConfigError: a file is damaged.
    """
    # The first file that names a token wins. Some folders have only one of the two.
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).is_file():
            named = f"--tokenizer-name-or-path: {folder / file}"
            token = _read_json(str(folder / file), named).get(name)
            # The token is a text, or an object with the token's settings.
            if isinstance(token, dict):
                token = token.get("content", token)
            if isinstance(token, str):
                return token
            if token is not None:
                raise ConfigError(f"{named}: {name} is {str(token)[:80]}, and must be a text.")
    return None


def _build_from_transformers(name: str, folder: Path) -> TransformersTokenizer:
    """Return the tokenizer of a folder without tokenizer.json, read by `transformers`."""
    try:
        # Import it only here, because the package is optional and slow to import.
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer-name-or-path {name} has no tokenizer.json, and reading it otherwise "
            "needs the package transformers: pip install transformers."
        ) from error
    try:
        # The library would wait for a FIFO.
        for path in folder.iterdir():
            if not path.is_dir():
                check_regular(path)
        # No code of the tokenizer's authors is run, and nothing is downloaded.
        backend = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    # The error depends on the damage: OSError, ValueError, ImportError, KeyError and others.
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"--tokenizer-name-or-path {name} cannot be read: {first.rstrip('.')}. Give a folder "
            "that holds a tokenizer."
        ) from error
    # For GPT-2 and Qwen, transformers builds a tokenizer without a vocabulary from a config.json
    # alone. It encodes each text as no ids.
    if backend.get_vocab().keys() <= backend.get_added_vocab().keys():
        raise ConfigError(
            f"--tokenizer-name-or-path {name} has no vocabulary. Give a folder that holds a "
            "tokenizer, with tokenizer.json for example."
        )
    if backend.eos_token_id is None:
        raise ConfigError(
            f"--tokenizer-name-or-path {name}: no end-of-document token; name an eos_token in its "
            "tokenizer_config.json."
        )
    return TransformersTokenizer(backend, backend.eos_token_id, name)


def _read_json(file: str, named: str) -> dict[str, Any]:
    """Return the JSON object in a file. `named` is the file's name in messages."""
    try:
        content = load_json(file, INDEX_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{named} must be a JSON object; it is {type(content).__name__}.")
    return content
