"""Conversion between text and token ids, and the size of the model's vocabulary.

Invariant: ids are those of Hugging Face tokenizers, or of SentencePiece, without any special
token added around a text. A caller that wants an end-of-document token appends `Tokenizer.eod`
once. No other code appends one.
"""
