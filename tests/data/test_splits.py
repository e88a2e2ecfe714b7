"""The flags --data-path, --split and --*-weighted-split-paths."""

import pytest

from megatron.base.errors import ConfigError
from megatron.config.data import DataConfig
from megatron.data.splits import (
    compute_split_bounds,
    find_evaluation_mixtures,
    find_train_mixture,
    parse_data_path,
    parse_range_bounds,
    parse_weighted_split_paths,
)

TRAIN = "train: 0.7 0:0.95 data/en, 0.3 0.5:1 data/fr"


@pytest.mark.parametrize(
    ("split", "count", "bounds"),
    [
        ("949,50,1", 1000, (0, 949, 999, 1000)),
        ("969,30,1", 1000, (0, 969, 999, 1000)),
        ("949/50/1", 10, (0, 10, 10, 10)),
        ("1", 7, (0, 7, 7, 7)),
        ("0,1", 7, (0, 0, 7, 7)),
        # The rounded bounds end at 999. The missing document is added to all bounds but the first.
        ("1,1,1", 1000, (0, 334, 667, 1000)),
        ("5,5,0", 5, (0, 3, 5, 5)),
    ],
)
def test_bounds_of_a_split(split, count, bounds):
    assert compute_split_bounds(split, count) == bounds


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf,1"])
def test_a_wrong_split_is_refused(split):
    with pytest.raises(ConfigError, match="up to three numbers"):
        compute_split_bounds(split, 10)


def test_bounds_of_a_range():
    assert parse_range_bounds("0:0.95", 1000) == (0, 950)
    assert parse_range_bounds("0.95:1", 1000) == (950, 1000)


@pytest.mark.parametrize("text", ["0.5:0.5", "0:1.5", "-0.1:1", "0.2", "a:b", "0:0.5:1"])
def test_a_wrong_range_is_refused(text):
    with pytest.raises(ConfigError, match="START < END <= 1"):
        parse_range_bounds(text, 10)


def test_data_path_is_one_path_or_pairs():
    assert parse_data_path(("a",)) == ((1.0, "a"),)
    assert parse_data_path(("0.3", "a", "0.7", "b")) == ((0.3, "a"), (0.7, "b"))
    with pytest.raises(ConfigError, match="has 3 values"):
        parse_data_path(("0.3", "a", "b"))


@pytest.mark.parametrize("weight", ["0", "-1", "x", "nan", "inf"])
def test_a_wrong_weight_is_refused(weight):
    with pytest.raises(ConfigError, match=f"the weight '{weight}' in"):
        parse_data_path((weight, "a"))


def test_weighted_split_paths_are_parsed():
    mixture = parse_weighted_split_paths(TRAIN)
    assert mixture.name == "train"
    assert [part.weight for part in mixture.parts] == [0.7, 0.3]
    assert [part.prefix for part in mixture.parts] == ["data/en", "data/fr"]
    assert [part.select_documents(100) for part in mixture.parts] == [(0, 95), (50, 100)]


@pytest.mark.parametrize("text", ["0.7 data/en", "", ": 1 0:1 a", "two words: 1 0:1 a"])
def test_weighted_split_paths_without_a_name_are_refused(text):
    with pytest.raises(ConfigError, match="does not begin with a NAME"):
        parse_weighted_split_paths(text)


@pytest.mark.parametrize(
    "text", ["train: 0.7 data/en", "train: 1 0:1 a,", "train: data/en", "t: 0:1 1 a"]
)
def test_a_wrong_entry_of_weighted_split_paths_is_refused(text):
    with pytest.raises(ConfigError, match="is not WEIGHT START:END PATH"):
        parse_weighted_split_paths(text)


def test_one_path_gives_three_pieces():
    data = DataConfig(data_path=("a",), split="8,1,1")
    train = find_train_mixture(data)
    assert train is not None
    assert train.parts[0].select_documents(10) == (0, 8)
    (valid,) = find_evaluation_mixtures(data, "valid")
    (test,) = find_evaluation_mixtures(data, "test")
    assert valid.name == "validation"
    assert valid.parts[0].select_documents(10) == (8, 9)
    assert test.name == "test"
    assert test.parts[0].select_documents(10) == (9, 10)


def test_several_named_validation_sets_from_flags_and_from_a_file(tmp_path):
    groups = ("en: 1 0.95:1 data/en", "both: 0.5 0.95:1 data/en, 0.5 0.95:1 data/fr")
    expected = find_evaluation_mixtures(DataConfig(valid_weighted_split_paths=groups), "valid")
    assert [mixture.name for mixture in expected] == ["en", "both"]
    path = tmp_path / "splits.txt"
    data = DataConfig(valid_weighted_split_paths_path=str(path))
    for text in (" ".join(f'"{group}"' for group in groups) + "\n", "\n".join(groups)):
        path.write_text(text)
        assert find_evaluation_mixtures(data, "valid") == expected


def test_without_flags_no_data_is_found():
    assert find_train_mixture(DataConfig()) is None
    assert find_evaluation_mixtures(DataConfig(), "test") == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataConfig(data_path=("a",), train_weighted_split_paths=(TRAIN,)),
            "and --data-path are both given",
        ),
        (
            DataConfig(train_weighted_split_paths=(TRAIN,), train_weighted_split_paths_path="x"),
            "-path x are both given",
        ),
        (
            DataConfig(train_weighted_split_paths=(TRAIN, "b: 1 0:1 x")),
            r"names 2 mixtures \(train, b\)",
        ),
        (DataConfig(train_weighted_split_paths=(TRAIN, TRAIN)), "uses a name twice"),
        (DataConfig(train_weighted_split_paths_path="/nowhere"), "/nowhere cannot be read"),
    ],
)
def test_contradicting_flags_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        find_train_mixture(data)


def test_an_unclosed_quote_in_a_file_is_refused(tmp_path):
    (tmp_path / "f").write_text('"train: 1 0:1 a')
    with pytest.raises(ConfigError, match="No closing quotation"):
        find_train_mixture(DataConfig(train_weighted_split_paths_path=str(tmp_path / "f")))
