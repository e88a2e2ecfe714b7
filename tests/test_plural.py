"""Numbers with their nouns."""

from megatron.base.plain_text import format_count


def test_one_is_singular_and_all_others_are_plural() -> None:
    assert format_count(1, "process", "processes") == "1 process"
    assert format_count(0, "file") == "0 files"
    assert format_count(12_000, "process", "processes") == "12,000 processes"
