"""The bytes of each token, against the bytes of real text."""

import tokenizers
from tiny_corpus import GPT2, texts
from tokenizers import decoders, models, pre_tokenizers

from megatron.tokenizer.build import HFTokenizer, build_tokenizer
from megatron.tokenizer.vocabulary import count_token_bytes


def test_byte_level_tokens_add_up_to_the_text() -> None:
    tokenizer = build_tokenizer(GPT2)
    counts = count_token_bytes(tokenizer)
    assert counts is not None
    assert len(counts) == tokenizer.vocab_size
    for text in [*texts()[:20], "naïve 日本語 🙂\n\t"]:
        assert sum(counts[index] for index in tokenizer.encode(text)) == len(text.encode())
    # The end of a document is no text.
    assert counts[tokenizer.eod] == 0


def test_tokens_of_the_kind_of_sentencepiece_add_up_to_the_text_and_a_space() -> None:
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{number:02X}>" for number in range(256)),
        *"\u2581abcdefghijklmnopqrstuvwxyzT",
        "\u2581i",
        "in",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [("\u2581", "i"), ("i", "n")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    end = backend.token_to_id("</s>")
    assert end is not None
    tokenizer = HFTokenizer(backend, end)
    counts = count_token_bytes(tokenizer)
    assert counts is not None
    for text in ("The first words of a text", "and 日本 in it"):
        ids = tokenizer.encode(text)
        assert backend.token_to_id("<unk>") not in ids
        assert sum(counts[index] for index in ids) == len(text.encode()) + 1


def test_other_kinds_have_no_bytes() -> None:
    words = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    words.decoder = decoders.WordPiece()
    assert count_token_bytes(HFTokenizer(words, 0)) is None
    # Without a decoder, nothing is known about the spelling.
    assert count_token_bytes(HFTokenizer(tokenizers.Tokenizer(models.BPE({"a": 0}, [])), 0)) is None
