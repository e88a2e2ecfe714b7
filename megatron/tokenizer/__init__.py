"""Conversion between text and token ids, and the size of the model's vocabulary.

Invariant: ids are those of Hugging Face tokenizers, or of SentencePiece, without any special
token added around a text. A caller that wants an end-of-document token appends `Tokenizer.eod`
once. No other code appends one.
"""

from megatron.tokenizer.build import (
    HFTokenizer,
    Tokenizer,
    TransformersTokenizer,
    build_tokenizer,
    list_special_token_ids,
)
from megatron.tokenizer.files import (
    compute_digest_of_ids,
    compute_tokenizer_digests,
    find_tokenizer_files,
)
from megatron.tokenizer.sentencepiece_model import SentencePieceTokenizer
from megatron.tokenizer.vocabulary import (
    check_same_vocab_size,
    compute_padded_vocab_size,
    fetch_missing_tokenizer,
    find_vocab_size,
)

__all__ = [
    "HFTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "TransformersTokenizer",
    "build_tokenizer",
    "check_same_vocab_size",
    "compute_digest_of_ids",
    "compute_padded_vocab_size",
    "compute_tokenizer_digests",
    "fetch_missing_tokenizer",
    "find_tokenizer_files",
    "find_vocab_size",
    "list_special_token_ids",
]
