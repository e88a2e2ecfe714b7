"""The libraries that can encode, fastest first, and the choice among them.

Invariant: a library is used only after it gave, for texts of the very corpus and for awkward ones, the ids that the tokenizer
itself gives; while it is in use a part of what it does is checked again. The tokenizer itself is always the last candidate.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from megatron.errors import MegatronError
from megatron.tokenizer import HFTokenizer, Tokenizer

GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
REFERENCE = "reference"
CANDIDATES = ("gigatoken", "tiktoken")
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
_SLICE_CHARS = 1 << 20  # `tokenizers` holds some hundred bytes for each token of one call
_GIGATOKEN_CACHE_BYTES = 1 << 30  # its cache of words has no bound of its own
_GIGATOKEN_TEXT_CHARS = (
    256 << 20
)  # how much text is taken for that where the memory in use cannot be read


class EncoderMismatch(Exception):
    """A library gave other ids than the tokenizer, or failed, after it had been chosen. `name` is the library."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason


class EncoderUnavailable(Exception):
    """Why a library cannot be used with this tokenizer."""


class Encoder(Protocol):
    """`encode`: all ids end to end, and the number of ids of each text."""

    name: str

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]: ...


class ReferenceEncoder:
    """The tokenizer itself, in slices that bound the memory."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = REFERENCE
        self._tokenizer = tokenizer

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
        parts, sizes = [np.empty(0, np.int32)], list[int]()
        for some in _slice_texts(texts):
            for ids in self._tokenizer.encode_batch(some):
                parts.append(np.array(ids, np.int32))
                sizes.append(len(ids))
        return np.concatenate(parts), np.array(sizes, np.int64)


class TiktokenEncoder:
    """tiktoken, for GPT-2's kind of BPE. It numbers tokens by the order of merges; a table gives the vocabulary's ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = "tiktoken"
        try:
            import tiktoken
        except ImportError as error:
            raise EncoderUnavailable("it is not installed (pip install tiktoken)") from error
        ranks, ids = _build_ranks(_get_gpt2_model(tokenizer))
        self._encoding = tiktoken.Encoding(
            "corpus", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self._ids = np.array(ids, np.int32)

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
        parts = [np.empty(0, np.int64)] + [
            self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts
        ]
        return self._ids[np.concatenate(parts).astype(np.int64)], np.array(
            [len(part) for part in parts[1:]], np.int64
        )


class GigatokenEncoder:
    """gigatoken, on the calling thread. Its cache is dropped when it has grown too large."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = "gigatoken"
        try:
            import awkward
            import gigatoken
        except ImportError as error:
            raise EncoderUnavailable("it is not installed (pip install gigatoken)") from error
        if not isinstance(tokenizer, HFTokenizer):
            raise EncoderUnavailable("it needs a tokenizer.json")
        description = tokenizer.backend.to_str()
        self._awkward = awkward
        self._make = lambda: gigatoken.Tokenizer.from_json(description)
        self._start()

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
        if self._cache_is_large():
            self._start()
        self._chars += sum(map(len, texts))
        encoded = self._tokenizer.encode_batch(texts, parallel=False)
        sizes = np.asarray(self._awkward.num(encoded), np.int64)
        return np.asarray(self._awkward.flatten(encoded)), sizes

    def _start(self) -> None:
        self._tokenizer, self._chars = self._make(), 0
        self._resident = _read_resident_bytes()

    def _cache_is_large(self) -> bool:
        now = _read_resident_bytes()
        if now is None or self._resident is None:
            return self._chars > _GIGATOKEN_TEXT_CHARS
        return now - self._resident > _GIGATOKEN_CACHE_BYTES


def make_encoder(name: str, tokenizer: Tokenizer) -> Encoder:
    """Raises EncoderUnavailable where the library is not there or cannot take this tokenizer."""
    kinds: dict[str, Callable[[Tokenizer], Encoder]] = {
        "gigatoken": GigatokenEncoder,
        "tiktoken": TiktokenEncoder,
        REFERENCE: ReferenceEncoder,
    }
    try:
        return kinds[name](tokenizer)
    except EncoderUnavailable:
        raise
    except (
        Exception
    ) as error:  # what a library raises on a tokenizer that it does not know is its own affair
        raise EncoderUnavailable(f"it does not take this tokenizer: {error}") from error


def choose_encoder(
    tokenizer: Tokenizer,
    sample: Sequence[str],
    rejected: Sequence[str],
    say: Callable[[str], None],
    make: Callable[[str, Tokenizer], Encoder] = make_encoder,
) -> str:
    """The first candidate that gives the tokenizer's own ids on the sample and awkward texts; says what it passes over."""
    texts = [*AWKWARD, *_list_special_tokens(tokenizer), *sample]
    for name in CANDIDATES:
        if name in rejected:
            say(f"encoder {name}: not used, it gave wrong ids earlier in this run")
            continue
        try:
            check_encoder(make(name, tokenizer), tokenizer, texts)
        except EncoderUnavailable as error:
            say(f"encoder {name}: not used, {error}")
        except EncoderMismatch as error:
            say(f"encoder {name}: NOT USED, {error.reason}")
        else:
            say(
                f"encoder {name}: in use, same ids as the tokenizer on {len(sample)} texts of this corpus and {len(AWKWARD)} more"
            )
            return name
    say("encoder: the tokenizer itself, several times slower than gigatoken")
    return REFERENCE


def check_encoder(encoder: Encoder, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Raises EncoderMismatch, with the first difference, where the ids are not the tokenizer's own."""
    flat, sizes = run_encoder(encoder, list(texts))
    ends = np.cumsum(sizes)
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
            raise EncoderMismatch(
                encoder.name,
                f"its ids differ from the tokenizer's at token {same}: {given[same : same + 4].tolist()} instead of "
                f"{expected[same : same + 4]}, in the text {texts[number][:80]!r}",
            )


def run_encoder(encoder: Encoder, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
    """`encoder.encode`; any failure of the library, a panic of its Rust code included, becomes EncoderMismatch."""
    try:
        return encoder.encode(texts)
    except (KeyboardInterrupt, SystemExit, MemoryError, MegatronError):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        if encoder.name == REFERENCE:
            raise
        raise EncoderMismatch(
            encoder.name, f"it failed: {type(error).__name__}: {error}"
        ) from error


def _slice_texts(texts: list[str]) -> Iterator[list[str]]:
    some, chars = list[str](), 0
    for text in texts:
        some.append(text)
        chars += len(text)
        if chars >= _SLICE_CHARS:
            yield some
            some, chars = [], 0
    if some:
        yield some


def _list_special_tokens(tokenizer: Tokenizer) -> list[str]:
    if not isinstance(tokenizer, HFTokenizer):
        return []
    return [
        f"a{token.content} b {token.content}\nc"
        for token in tokenizer.backend.get_added_tokens_decoder().values()
    ][:64]


def _get_gpt2_model(tokenizer: Tokenizer) -> dict[str, Any]:
    """The BPE of a tokenizer whose text handling is GPT-2's."""
    if not isinstance(tokenizer, HFTokenizer):
        raise EncoderUnavailable("it needs a byte-level BPE like GPT-2's")
    whole = json.loads(tokenizer.backend.to_str())
    model, splitting = whole["model"], whole["pre_tokenizer"] or {}
    plain = (
        splitting.get("type") == "ByteLevel"
        and splitting.get("use_regex")
        and not splitting.get("add_prefix_space")
    )
    if (
        model["type"] != "BPE"
        or not plain
        or whole["normalizer"]
        or whole["added_tokens"]
        or model["dropout"]
    ):
        raise EncoderUnavailable("it needs a byte-level BPE like GPT-2's")
    return model


def _build_ranks(model: dict[str, Any]) -> tuple[dict[bytes, int], list[int]]:
    """tiktoken's bytes -> rank, and rank -> id of the vocabulary."""
    byte_of = {symbol: byte for byte, symbol in make_byte_symbols().items()}
    ranks: dict[bytes, int] = {}
    ids: list[int] = []
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    for token in (*make_byte_symbols().values(), *(left + right for left, right in merges)):
        as_bytes = bytes(byte_of[symbol] for symbol in token)
        if as_bytes in ranks:
            raise EncoderUnavailable("two merges of this vocabulary give the same token")
        ranks[as_bytes] = len(ids)
        ids.append(model["vocab"][token])
    return ranks, ids


def make_byte_symbols() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary (GPT-2's encoder.py)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
    assert set(symbols.values()) == set(pre_tokenizers.ByteLevel.alphabet()), (
        "the byte symbols are not those of `tokenizers`"
    )
    return symbols


def _read_resident_bytes() -> int | None:
    """Memory of this process, where the system tells it (Linux)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError):
        return None
