"""Ranges of skipped iterations are parsed, merged and searched."""

import pytest

from megatron.base.errors import ConfigError
from megatron.schedule.skip import find_range, parse_ranges


def test_ranges_that_overlap_or_touch_are_merged():
    assert parse_ranges(("9001-9100", "8401-8800")) == ((8401, 8800), (9001, 9100))
    assert parse_ranges(("5-10", "11-12", "8-9", "20-20")) == ((5, 12), (20, 20))
    assert parse_ranges(("5-10", "12-13")) == ((5, 10), (12, 13))
    assert parse_ranges(("1_000-2_000",)) == ((1000, 2000),)
    assert parse_ranges(()) == ()


def test_ends_of_a_range_are_included():
    ranges = parse_ranges(("8401-8800", "9001-9100"))
    found = [find_range(ranges, i) for i in (8400, 8401, 8800, 8801)]
    assert found == [None, (8401, 8800), (8401, 8800), None]
    assert find_range((), 1) is None


@pytest.mark.parametrize(
    "text", ["8401", "8800-8401", "0-5", "-5", "a-b", "1-2-3", "1:2", "", "5-"]
)
def test_anything_but_first_to_last_is_an_error(text):
    with pytest.raises(ConfigError, match="is not FIRST-LAST"):
        parse_ranges(("1-2", text))
