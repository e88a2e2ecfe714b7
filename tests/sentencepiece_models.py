"""SentencePiece models that tests train on the first documents of the reference corpus."""

import io
from typing import Any

import tiny_corpus

LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "user_defined_symbols": ["<|im_start|>", "[PAD]"],
    "control_symbols": ["<|call|>"],
}
"""The settings of Llama 2, with additional symbols."""
UNIGRAM = {"model_type": "unigram"}
"""The defaults of the library, with nmt_nfkc."""


def train_model(**settings: Any) -> bytes:
    """Return the content of a tokenizer.model with 1000 pieces."""
    import sentencepiece

    lines = [line for text in tiny_corpus.texts()[:50] for line in text.split("\n") if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 1000, **settings},
    )
    return model.getvalue()
