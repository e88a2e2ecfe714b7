"""Skip ranges: reading, merging, finding."""

import pytest

from megatron.errors import ConfigError
from megatron.schedule.skip import find_range, parse_ranges


def test_ranges_are_sorted_and_merged_where_they_overlap_or_touch():
    assert parse_ranges(("9001-9100", "8401-8800")) == ((8401, 8800), (9001, 9100))
    assert parse_ranges(("5-10", "11-12", "8-9", "20-20")) == ((5, 12), (20, 20))
    assert parse_ranges(("5-10", "12-13")) == ((5, 10), (12, 13))
    assert parse_ranges(("1_000-2_000",)) == ((1000, 2000),)
    assert parse_ranges(()) == ()


def test_ends_are_included():
    ranges = parse_ranges(("8401-8800", "9001-9100"))
    assert [find_range(ranges, i) for i in (8400, 8401, 8800, 8801)] == [
        None,
        (8401, 8800),
        (8401, 8800),
        None,
    ]
    assert find_range((), 1) is None


@pytest.mark.parametrize(
    "text", ["8401", "8800-8401", "0-5", "-5", "a-b", "1-2-3", "1:2", "", "5-"]
)
def test_anything_but_first_to_last_is_refused(text):
    with pytest.raises(ConfigError, match="is not FIRST-LAST"):
        parse_ranges(("1-2", text))
