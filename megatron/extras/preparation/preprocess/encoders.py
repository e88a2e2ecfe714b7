"""The libraries that can encode, fastest first, and the choice among them.

Invariant: a library is used only after it gave the same ids as the tokenizer itself. They are
compared on texts of the corpus and on difficult ones. While a library is in use, a part of its
output is checked again. The tokenizer itself is always the last candidate. The texts of the corpus
come from all parts of the inputs. Their reading is bounded, whatever the size of the corpus, and
files that can be entered at any byte are entered there.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from megatron.base.errors import MegatronError
from megatron.extras.interop.convert.tokenizer_files import AWKWARD
from megatron.extras.preparation.preprocess.input_files import (
    InputFormat,
    find_format,
    is_compressed,
)
from megatron.extras.preparation.preprocess.inputs import (
    InputBlock,
    Position,
    count_rows,
    extract_texts,
    is_array_file,
    open_lines,
    read_blocks,
)
from megatron.tokenizer.build import HFTokenizer, Tokenizer
from megatron.tokenizer.failures import TokenizerError

# GPT-2's pattern with possessive quantifiers, which match the same and need no backtracking.
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
REFERENCE = "reference"
CANDIDATES = ("gigatoken", "tiktoken")
# `tokenizers` needs some hundred bytes for each token of one call.
_SLICE_CHARS = 1 << 20
# gigatoken's cache of words has no limit of its own.
_GIGATOKEN_CACHE_BYTES = 1 << 30
# Where the memory in use cannot be read, the cache is dropped after this much text.
_GIGATOKEN_TEXT_CHARS = 256 << 20


class EncoderMismatchError(Exception):
    """A library that was chosen gave other ids than the tokenizer, or failed."""

    def __init__(self, name: str, reason: str) -> None:
        """Remember the library's name, and the reason for messages."""
        super().__init__(name, reason)
        self.name = name
        self.reason = reason


class EncoderUnavailableError(Exception):
    """A library cannot be used with this tokenizer. The message is the reason."""


class Encoder(Protocol):
    """A library that turns texts into ids."""

    name: str

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
        """Return all ids end to end, and the number of ids of each text."""
        ...


def read_resident_bytes() -> int | None:
    """Return the resident memory of this process, or None where /proc does not exist."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError):
        return None


class ReferenceEncoder:
    """The tokenizer itself, in slices that bound the memory."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Use a tokenizer as the encoder."""
        self.name = REFERENCE
        self._tokenizer = tokenizer

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
        """Return all ids end to end, and the number of ids of each text."""
        parts = [np.empty(0, np.int32)]
        sizes = list[int]()
        for some in _slice_texts(texts):
            for ids in self._tokenizer.encode_batch(some):
                parts.append(np.array(ids, np.int32))
                sizes.append(len(ids))
        return np.concatenate(parts), np.array(sizes, np.int64)


class TiktokenEncoder:
    """Encoding with tiktoken, for BPE of GPT-2's kind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Convert the tokenizer's vocabulary to tiktoken's form.

        Raises:
            EncoderUnavailableError: tiktoken is not installed, or the tokenizer is of another kind.
        """
        self.name = "tiktoken"
        try:
            import tiktoken
        except ImportError as error:
            raise EncoderUnavailableError("it is not installed (pip install tiktoken)") from error
        ranks, ids = _build_ranks(_get_gpt2_model(tokenizer))
        self._encoding = tiktoken.Encoding(
            "corpus", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        # tiktoken numbers tokens by the order of merges. This table gives the vocabulary's ids.
        self._ids = np.array(ids, np.int32)

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
        """Return all ids end to end, and the number of ids of each text."""
        parts = [np.empty(0, np.int64)] + [
            self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts
        ]
        return self._ids[np.concatenate(parts).astype(np.int64)], np.array(
            [len(part) for part in parts[1:]], np.int64
        )


class GigatokenEncoder:
    """Encoding with gigatoken on the calling thread.

    Its cache is dropped when it has become too large.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        read_resident_bytes: Callable[[], int | None] = read_resident_bytes,
    ) -> None:
        """Load the tokenizer's description into gigatoken.

        Args:
            tokenizer: The tokenizer.
            read_resident_bytes: Returns the memory in use, from which the size of the cache
                follows.

        Raises:
            EncoderUnavailableError: gigatoken is not installed, or the tokenizer has no
                tokenizer.json.
        """
        self.name = "gigatoken"
        try:
            import awkward
            import gigatoken
        except ImportError as error:
            raise EncoderUnavailableError("it is not installed (pip install gigatoken)") from error
        if not isinstance(tokenizer, HFTokenizer):
            raise EncoderUnavailableError("it needs a tokenizer.json")
        description = json.dumps(_describe_backend(tokenizer))
        self._awkward = awkward
        self._make = lambda: gigatoken.Tokenizer.from_json(description)
        self._read_resident_bytes = read_resident_bytes
        self._start()

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
        """Return all ids end to end, and the number of ids of each text."""
        if self._cache_is_large():
            self._start()
        self._chars += sum(map(len, texts))
        # The workers already use all cores, so the library must not start threads.
        encoded = self._tokenizer.encode_batch(texts, parallel=False)
        sizes = np.asarray(self._awkward.num(encoded), np.int64)
        return np.asarray(self._awkward.flatten(encoded)), sizes

    def _start(self) -> None:
        """Create gigatoken's tokenizer, with an empty cache."""
        self._tokenizer = self._make()
        self._chars = 0
        self._resident = self._read_resident_bytes()

    def _cache_is_large(self) -> bool:
        """Return whether the cache must be dropped."""
        # The library does not report the size of its cache. The growth of the process is near it.
        now = self._read_resident_bytes()
        if now is None or self._resident is None:
            return self._chars > _GIGATOKEN_TEXT_CHARS
        return now - self._resident > _GIGATOKEN_CACHE_BYTES


def make_encoder(name: str, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder with a name.

    Raises:
        EncoderUnavailableError: the library is not installed, or does not support this tokenizer.
    """
    kinds: dict[str, Callable[[Tokenizer], Encoder]] = {
        "gigatoken": GigatokenEncoder,
        "tiktoken": TiktokenEncoder,
        REFERENCE: ReferenceEncoder,
    }
    try:
        return kinds[name](tokenizer)
    except EncoderUnavailableError:
        raise
    # Libraries raise many kinds of errors for tokenizers that they do not know.
    except Exception as error:
        raise EncoderUnavailableError(f"it does not support this tokenizer: {error}") from error


def choose_encoder(
    tokenizer: Tokenizer,
    sample: Sequence[str],
    rejected: Sequence[str],
    log: Callable[[str], None],
    make: Callable[[str, Tokenizer], Encoder] = make_encoder,
) -> str:
    """Return the name of the first encoder that gives the tokenizer's own ids.

    Args:
        tokenizer: The tokenizer.
        sample: Texts of the corpus.
        rejected: Encoders that gave wrong ids earlier in this run.
        log: Receives one line for each encoder, with the reason if it is not used.
        make: Creates an encoder.
    """
    texts = [*AWKWARD, *_list_special_tokens(tokenizer), *sample]
    # An encoder that was wrong once may pass the sample again.
    for name in CANDIDATES:
        if name in rejected:
            log(f"encoder {name}: not used, it gave wrong ids earlier in this run")
            continue
        try:
            check_encoder(make(name, tokenizer), tokenizer, texts)
        except (EncoderUnavailableError, TokenizerError) as error:
            log(f"encoder {name}: not used, {error}")
        except EncoderMismatchError as error:
            log(f"encoder {name}: NOT USED, {error.reason}")
        else:
            log(
                f"encoder {name}: in use, same ids as the tokenizer on {len(sample)} texts of this "
                f"corpus and {len(AWKWARD)} more"
            )
            return name
    log("encoder: the tokenizer itself, several times slower than gigatoken")
    return REFERENCE


def check_encoder(encoder: Encoder, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Check that the ids of an encoder are the tokenizer's own.

    Raises:
        EncoderMismatchError: they differ. The message has the first difference.
    """
    flat, sizes = run_encoder(encoder, list(texts))
    ends = np.cumsum(sizes)
    # In slices, because the tokenizer needs much memory for each token.
    for number, expected in enumerate(
        i for some in _slice_texts(list(texts)) for i in tokenizer.encode_batch(some)
    ):
        given = flat[ends[number] - sizes[number] : ends[number]]
        if not np.array_equal(given, expected):
            same = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(given.tolist(), expected, strict=False))
                    if a != b
                ),
                min(len(given), len(expected)),
            )
            raise EncoderMismatchError(
                encoder.name,
                f"its ids differ from the tokenizer's at token {same}: "
                f"{given[same : same + 4].tolist()} instead of "
                f"{expected[same : same + 4]}, in the text {texts[number][:80]!r}",
            )


def run_encoder(encoder: Encoder, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
    """Return what `encoder.encode` returns.

    Raises:
        EncoderMismatchError: the library failed.
    """
    try:
        return encoder.encode(texts)
    except (KeyboardInterrupt, SystemExit, MemoryError, MegatronError):
        raise
    # A panic in Rust code is a BaseException, but not an Exception.
    except BaseException as error:
        if encoder.name == REFERENCE:
            raise
        raise EncoderMismatchError(
            encoder.name, f"it failed: {type(error).__name__}: {error}"
        ) from error


def _slice_texts(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of about _SLICE_CHARS characters."""
    some = list[str]()
    chars = 0
    for text in texts:
        # A text is never split, since the ids at a split would differ.
        some.append(text)
        chars += len(text)
        if chars >= _SLICE_CHARS:
            yield some
            some = []
            chars = 0
    if some:
        yield some


def _list_special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return texts with the tokenizer's special tokens, which libraries often treat differently."""
    if not isinstance(tokenizer, HFTokenizer):
        return []
    return [
        f"a{token.content} b {token.content}\nc"
        for token in tokenizer.backend.get_added_tokens_decoder().values()
    ][:64]


def _describe_backend(tokenizer: HFTokenizer) -> dict[str, Any]:
    """Return the tokenizer.json of a tokenizer as JSON values, as its texts are encoded.

    Special tokens are left out if texts that spell them are ordinary text.
    """
    description: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    if tokenizer.backend.encode_special_tokens:
        added = description["added_tokens"]
        description["added_tokens"] = [token for token in added if not token["special"]]
    return description


def _get_gpt2_model(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the BPE model of a tokenizer that treats text like GPT-2's.

    Raises:
        EncoderUnavailableError: the tokenizer is of another kind.
    """
    if not isinstance(tokenizer, HFTokenizer):
        raise EncoderUnavailableError("it needs a byte-level BPE like GPT-2's")
    description = _describe_backend(tokenizer)
    model = description["model"]
    splitting = description["pre_tokenizer"] or {}
    plain = (
        splitting.get("type") == "ByteLevel"
        and splitting.get("use_regex")
        and not splitting.get("add_prefix_space")
    )
    # A normaliser, added tokens or dropout change the ids in ways that tiktoken does not reproduce.
    if (
        model["type"] != "BPE"
        or not plain
        or description["normalizer"]
        or description["added_tokens"]
        or model["dropout"]
    ):
        raise EncoderUnavailableError("it needs a byte-level BPE like GPT-2's")
    return model


def _build_ranks(model: dict[str, Any]) -> tuple[dict[bytes, int], list[int]]:
    """Return tiktoken's table bytes -> rank, and the id in the vocabulary of each rank.

    Raises:
        EncoderUnavailableError: two merges give the same token, which has no single rank.
    """
    byte_of = {symbol: byte for byte, symbol in make_byte_symbols().items()}
    ranks: dict[bytes, int] = {}
    ids: list[int] = []
    # Newer tokenizer.json files store a merge as a list, older ones as a text with a space.
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    for token in (*make_byte_symbols().values(), *(left + right for left, right in merges)):
        as_bytes = bytes(byte_of[symbol] for symbol in token)
        if as_bytes in ranks:
            raise EncoderUnavailableError("two merges of this vocabulary give the same token")
        # The rank of a token is its place in the order of merges, after the 256 bytes.
        ranks[as_bytes] = len(ids)
        ids.append(model["vocab"][token])
    return ranks, ids


def make_byte_symbols() -> dict[int, str]:
    """Return the printable character that represents each byte in a byte-level vocabulary.

    Source: bytes_to_unicode in GPT-2's encoder.py.
    """
    # Bytes without a printable character get the code points from 256 on.
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
    # The table must be the one that `tokenizers` uses, or all ids would be wrong.
    assert set(symbols.values()) == set(pre_tokenizers.ByteLevel.alphabet()), (
        "the byte symbols are not those of `tokenizers`"
    )
    return symbols


# Spots from the first byte of the inputs to the last one. One text is taken at each.
_SPOTS = 64
_BLOCK_BYTES = 1 << 16
_PIECE_BYTES = 1 << 18
# The search for the end of a longer line is given up. The spot then gives no sample.
_LONGEST_LINE_BYTES = 1 << 23
_CHARS_EACH = 16_000
_CHARS_ALL = 400_000


def sample_texts(paths: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return up to 64 texts, spread evenly over the bytes of all files.

    Each text is truncated to 16,000 characters, and all together have about 400,000.

    Args:
        paths: The input files.
        keys: The keys of the texts in a record.
    """
    sizes = [Path(path).stat().st_size for path in paths]
    total = sum(sizes)
    chosen = list[str]()
    chars = 0
    # Several spots of such a file read the same block, which may be one very long line.
    begin = functools.cache(lambda path: _read_first_columns(path, keys))
    for spot in range(_SPOTS):
        place = total * spot // _SPOTS
        file = 0
        # `place` is a byte of all files end to end. The loop finds the file that holds it.
        while file < len(paths) - 1 and place >= sizes[file]:
            place = place - sizes[file]
            file = file + 1
        if _has_one_entry(paths[file]):
            texts = _choose_row(begin(paths[file]), spot)
        else:
            texts = next(_read_texts_at(paths[file], place, sizes[file], spot, keys), None)
        if texts is not None and chars < _CHARS_ALL:
            chosen += [text[:_CHARS_EACH] for text in texts]
            chars += sum(min(len(text), _CHARS_EACH) for text in texts)
    # Small files give the same line at several spots. dict keeps the order and drops repetitions.
    return list(dict.fromkeys(chosen))


def _has_one_entry(path: str) -> bool:
    """Return whether records of a file can be read from its beginning only."""
    if find_format(path) in (InputFormat.TEXT, InputFormat.PARQUET, InputFormat.ARROW):
        return False
    return is_compressed(path) or is_array_file(path)


def _read_first_columns(path: str, keys: Sequence[str]) -> list[list[str]]:
    """Return the texts of the first block with any, a list for each key. It may be empty."""
    for block in read_blocks([path], keys, block_bytes=_BLOCK_BYTES):
        columns, _ = extract_texts(block, keys)
        if columns and columns[0]:
            return columns
    return []


def _choose_row(columns: list[list[str]], spot: int) -> list[str] | None:
    """Return one text of each column, another one for each spot."""
    if not columns:
        return None
    row = spot % len(columns[0])
    return [column[row] for column in columns]


def _read_texts_at(
    path: str, place: int, size: int, spot: int, keys: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the texts of one line at or after a byte of a file, as a list with one for each key."""
    if find_format(path) is InputFormat.TEXT:
        yield [_read_passage_at(path, place)] * len(keys)
        return
    for block in _read_block_at(path, place, size, keys):
        columns, _ = extract_texts(block, keys)
        if columns and columns[0]:
            texts = _choose_row(columns, spot)
            assert texts is not None, "there is a column"
            yield texts


def _read_passage_at(path: str, place: int) -> str:
    """Return some text of a file of plain text, which begins near a byte."""
    if is_compressed(path):
        place = 0
    piece, _ = next(open_lines(path, place, _BLOCK_BYTES), (b"", 0))
    # The byte may be inside a character. The incomplete character is left out.
    return piece[:_BLOCK_BYTES].decode("utf-8", errors="ignore")


def _read_block_at(path: str, place: int, size: int, keys: Sequence[str]) -> Iterator[InputBlock]:
    """Yield the block with the first complete line at or after a byte of a file."""
    if find_format(path) in (InputFormat.PARQUET, InputFormat.ARROW):
        # Tables are entered by row, so the byte is converted to a row.
        row = count_rows(path) * place // max(1, size)
        yield from read_blocks([path], keys, Position(0, row, row), _BLOCK_BYTES)
        return
    content = b""
    found = place == 0
    for piece, _ in open_lines(path, place, _PIECE_BYTES):
        content += piece
        # The byte is usually inside a line, of which only a part would be read. Skip to the next.
        if not found and b"\n" in content:
            content = content.split(b"\n", 1)[1]
            found = True
        if found and b"\n" in content:
            yield InputBlock(path, 2, content[: content.rindex(b"\n")], Position(), 0)
            return
        if len(content) > _LONGEST_LINE_BYTES:
            return
    # The last line of a file may have no newline.
    if found and content:
        yield InputBlock(path, 2, content, Position(), 0)
