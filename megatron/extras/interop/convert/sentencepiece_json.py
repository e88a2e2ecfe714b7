"""Conversion of SentencePiece's tokenizer.model to the tokenizer.json of Hugging Face.

Invariant: a tokenizer is returned only after it gave the ids of `sentencepiece` on difficult texts
and on texts of its own pieces. `list_known_differences` names the rare texts that remain.

Source: Kudo and Richardson, https://arxiv.org/abs/1808.06226. The order of merges and of
normalisations is that of `sentencepiece`'s source.
"""

import importlib
import math
import random
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megatron.base.errors import ConfigError
from megatron.extras.interop.convert.awkward_texts import AWKWARD
from megatron.tokenizer.sentencepiece_model import SentencePieceTokenizer

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

    Raises:
        ConfigError: `tokenizers` cannot express it, or gives other ids.
    """
    description = _parse(tokenizer.content)
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
    _compare(backend, tokenizer)
    return backend


def list_known_differences(tokenizer: SentencePieceTokenizer) -> list[str]:
    """Return descriptions of texts for which the converted tokenizer may give other ids.

    All tokenizers of Hugging Face also turn the name of a control symbol into the symbol. That is
    what chat templates need, and it is not listed.
    """
    description = _parse(tokenizer.content)
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


def _parse(content: bytes) -> Any:
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


def _compare(backend: tokenizers.Tokenizer, tokenizer: SentencePieceTokenizer) -> None:
    """Check that both tokenizers give the same ids.

    Raises:
        ConfigError: They do not. The message has the first text.
    """
    unigram = _parse(tokenizer.content).trainer_spec.model_type == _UNIGRAM
    names = tokenizer.control_symbols.values()
    for text in [*AWKWARD, *_make_texts(tokenizer)]:
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


def _make_texts(tokenizer: SentencePieceTokenizer) -> Iterator[str]:
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
