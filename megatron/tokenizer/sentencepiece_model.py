"""Tokenizers of SentencePiece, read from a tokenizer.model.

Invariant: the ids are those of the `sentencepiece` library. No special token is added, and no text
gives a control symbol such as `</s>`.

Source: https://github.com/google/sentencepiece. Megatron-LM's SentencePieceTokenizer,
GPTSentencePieceTokenizer and Llama2Tokenizer are this tokenizer.
"""

import functools
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import INDEX_BYTES, load_bytes
from megatron.tokenizer.failures import describe_tiktoken, encode_checked

FILE = "tokenizer.model"
_REQUIRED_PARTS = {1, 2, 3}
"""Numbers of the parts that each file has: pieces, settings of its training, and normalisation."""
_GIT_LFS = b"version https://git-lfs"
_PICKLES = (b"\x80", b"PK\x03\x04")
"""How a pickle begins, and a file of torch.save, which is a zip file."""


class SentencePieceTokenizer:
    """A tokenizer of the `sentencepiece` library, held in `processor`."""

    def __init__(self, processor: Any, content: bytes, name: str) -> None:
        """Wrap `processor`, which was made from the `content` of a tokenizer.model, `name`."""
        self.name = name
        self.processor = processor
        self.content = content
        self.eod: int = processor.eos_id()
        self.vocab_size: int = processor.get_piece_size()
        self.control_symbols: dict[int, str] = {
            index: processor.id_to_piece(index)
            for index in range(self.vocab_size)
            if processor.is_control(index)
        }
        """Ids that no text gives, with their names."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it.

        Raises:
            DataError: The text has half a surrogate pair.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text. The library encodes them in parallel.

        Raises:
            DataError: A text has half a surrogate pair.
        """
        threads = -1
        # Worker processes set this, because each of them is one of many.
        if len(texts) == 1 or os.environ.get("TOKENIZERS_PARALLELISM") == "false":
            threads = 1
        for text in texts:
            _check_characters(text)
        encode = functools.partial(self.processor.encode, num_threads=threads)
        return encode_checked(self.name, encode, texts)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, control symbols included."""
        parts = []
        pieces: list[int] = []
        for index in ids:
            # The library gives no text for control symbols.
            if index in self.control_symbols:
                parts += [self.processor.decode(pieces), self.control_symbols[index]]
                pieces = []
            # A larger --vocab-size has ids that stand for nothing.
            elif index < self.vocab_size:
                pieces.append(index)
        return "".join([*parts, self.processor.decode(pieces)])

    def get_vocab(self) -> dict[str, int]:
        """Return piece -> id."""
        return {self.processor.id_to_piece(index): index for index in range(self.vocab_size)}


def read_sentencepiece(path: Path) -> SentencePieceTokenizer:
    """Read a tokenizer.model.

    Raises:
        ConfigError: The file is missing or damaged, its content is of another kind, it has no end
            of a document, or `sentencepiece` is not installed.
    """
    try:
        content = load_bytes(path, INDEX_BYTES)
    except OSError as error:
        raise ConfigError(
            f"--tokenizer-model {path} cannot be read: {error.strerror}. Give the file "
            f"{FILE} of SentencePiece."
        ) from error
    problem = _find_problem(content)
    if problem is not None:
        raise ConfigError(describe_tiktoken(path) or f"--tokenizer-model {path} {problem}.")
    processor = _import_sentencepiece().SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    # Versions of the library raise different classes.
    except Exception as error:
        raise ConfigError(
            f"--tokenizer-model {path} is not a SentencePiece model, or is damaged: {error}"
        ) from error
    if processor.eos_id() < 0:
        raise ConfigError(
            f"--tokenizer-model {path} has no end-of-sentence piece, which ends documents. Train "
            "it again without --eos_id=-1."
        )
    return SentencePieceTokenizer(processor, content, str(path))


def is_sentencepiece_installed() -> bool:
    """Return whether the library can be imported."""
    return find_spec("sentencepiece") is not None


def _import_sentencepiece() -> Any:
    """Return the library, which is optional.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            "--tokenizer-type SentencePieceTokenizer needs the package sentencepiece: "
            "pip install 'sentencepiece>=0.2'. If no text is tokenized, --vocab-size N is enough "
            "without --tokenizer-model."
        ) from error
    return sentencepiece


def _find_problem(content: bytes) -> str | None:
    """Return why the content of a file is not a SentencePiece model, if that is known.

    The library's message is the same for all of these.
    """
    if _list_parts(content) >= _REQUIRED_PARTS:
        return None
    if not content:
        return "is empty. Copy the file again"
    if content.startswith(_GIT_LFS):
        return "is a pointer of Git LFS and not the file itself: run git lfs pull"
    if content.startswith(_PICKLES):
        return "is a pickle, which is never loaded. Give the file tokenizer.model of SentencePiece"
    if content.lstrip().startswith(b"{"):
        return (
            "is JSON. A tokenizer.json needs --tokenizer-type PretrainedFromHF with "
            "--tokenizer-name-or-path FOLDER"
        )
    return "is not a SentencePiece model, or is truncated. Copy the file again"


def _list_parts(content: bytes) -> set[int]:
    """Return the numbers of the complete parts of a file, up to the first damaged one.

    The library accepts a file that was truncated between two parts, with other normalisation.

    Source: https://protobuf.dev/programming-guides/encoding.
    """
    found: set[int] = set()
    place = 0
    try:
        while place < len(content):
            key, place = _read_varint(content, place)
            # All parts are messages, which begin with their length.
            if key & 7 != 2:
                return found
            size, place = _read_varint(content, place)
            place += size
            if place <= len(content):
                found.add(key >> 3)
    except IndexError:
        pass
    return found


def _read_varint(content: bytes, place: int) -> tuple[int, int]:
    """Return a number of protobuf's variable length, and the place after it.

    Raises:
        IndexError: The content ends within it, or it is too long.
    """
    value = 0
    shift = 0
    while shift < 64:
        byte = content[place]
        value |= (byte & 127) << shift
        place += 1
        shift += 7
        if byte < 128:
            return value, place
    raise IndexError("a number of protobuf has at most 64 bits")


def _check_characters(text: str) -> None:
    """Check that a text can be encoded as UTF-8.

    Raises:
        DataError: It cannot.
    """
    # Text with ASCII alone is the common case, and this check takes no time.
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds half a surrogate pair at character {error.start}, which is not a "
            "character. Remove it."
        ) from error
