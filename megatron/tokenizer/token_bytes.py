"""The number of bytes of text that each token stands for."""

import json

from megatron.tokenizer.build import HFTokenizer, Tokenizer, list_special_token_ids

_SPACE = "\u2581"
"""What stands for a space in the tokens of SentencePiece."""


def count_token_bytes(tokenizer: Tokenizer) -> list[int] | None:
    """Return the bytes in UTF-8 of each id, or None if the kind of tokenizer does not give them.

    The sum over the ids of a text is the length of the text for byte-level tokenizers. For those
    of the kind of SentencePiece, it is one more if they put a space before a text. Special tokens
    are no text and have 0 bytes.
    """
    if not isinstance(tokenizer, HFTokenizer) or tokenizer.backend.decoder is None:
        return None
    kinds = _list_decoders(json.loads(tokenizer.backend.decoder.__getstate__()))
    counts = [0] * tokenizer.vocab_size
    added = tokenizer.backend.get_added_tokens_decoder()
    for token, index in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if index in added:
            # Added tokens stand for themselves, whatever the others are spelled with.
            counts[index] = len(token.encode())
        elif "ByteLevel" in kinds:
            # Each byte is spelled with one letter of an alphabet of 256.
            counts[index] = len(token)
        elif kinds & {"Metaspace", "ByteFallback"}:
            counts[index] = _count_sentencepiece_bytes(token)
        else:
            return None
    for index in list_special_token_ids(tokenizer):
        counts[index] = 0
    return counts


def _list_decoders(record: dict) -> set[str]:
    """Return the kinds of a decoder and of the decoders in it."""
    kinds = {str(record.get("type"))}
    for part in record.get("decoders", []):
        kinds |= _list_decoders(part)
    return kinds


def _count_sentencepiece_bytes(token: str) -> int:
    # With byte fallback, a byte that is in no other token is spelled <0x0A>.
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace(_SPACE, " ").encode())
