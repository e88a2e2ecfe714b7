"""Text that is returned while its tokens arrive."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpus import GPT2

from megatron.extras.inference.generate.generation import IncrementalText
from megatron.tokenizer.build import build_tokenizer

TOKENIZER = build_tokenizer(GPT2)


def feed(text: str, *stops: str) -> tuple[str, list[str], bool]:
    """Return all text, its pieces and whether it was stopped, for the tokens of a text."""
    incremental = IncrementalText(TOKENIZER.decode, TOKENIZER.encode("A prompt:"), stops)
    pieces = []
    for token in TOKENIZER.encode(text):
        pieces.append(incremental.add(token))
        if incremental.stopped:
            break
    pieces.append(incremental.finish())
    return "".join(pieces), pieces, incremental.stopped


def test_a_character_of_several_tokens_is_returned_once() -> None:
    text = "Zürich 🙂 日本語"
    assert len(TOKENIZER.encode("🙂")) > 1
    whole, pieces, _ = feed(text)
    assert whole == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_appear_as_replacement_characters() -> None:
    half = TOKENIZER.encode("🙂")[:1]
    incremental = IncrementalText(TOKENIZER.decode, [])
    assert incremental.add(half[0]) == ""
    after = incremental.add(TOKENIZER.encode("a")[0])
    assert after == "\ufffda"
    assert incremental.add(half[0]) == ""
    assert incremental.finish() == "\ufffd"


def test_a_stop_string_ends_the_text_and_is_not_part_of_it() -> None:
    whole, pieces, stopped = feed("one two STOP three", "STOP")
    assert whole == "one two "
    assert stopped
    assert not any("S" in piece for piece in pieces)


def test_the_first_of_several_stop_strings_counts() -> None:
    assert feed("one two three", "three", "two")[0] == "one "


def test_the_beginning_of_a_stop_string_is_returned_if_another_text_follows() -> None:
    whole, _, stopped = feed("one STO two ST", "STOP")
    assert whole == "one STO two ST"
    assert not stopped


@settings(max_examples=100, deadline=None)
@given(st.text(), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_the_pieces_are_the_text_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    expected = TOKENIZER.decode(TOKENIZER.encode(text))
    whole, _, stopped = feed(text, *stops)
    found = [expected.find(stop) for stop in stops if stop in expected]
    assert stopped == bool(found)
    assert whole == (expected[: min(found)] if found else expected)
