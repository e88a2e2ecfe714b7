"""How often a run reads its training data."""

import pytest

from megatron.base.errors import DataError
from megatron.config.data import DataConfig
from megatron.data.epochs import describe_epochs, measure_training_data, warn_about_many_epochs
from megatron.data.indexed import IndexedDataset


def test_epochs_are_tokens_asked_by_tokens_there(corpus: str) -> None:
    everything = int(IndexedDataset(corpus).sizes.sum())
    (use,) = measure_training_data(DataConfig(data_path=(corpus,), split="1"), 2 * everything)
    assert use.tokens == everything
    assert use.epochs == 2
    assert describe_epochs([use]).startswith("2 epochs")
    assert warn_about_many_epochs([use]) == []


def test_only_the_training_part_counts(corpus: str) -> None:
    everything = int(IndexedDataset(corpus).sizes.sum())
    (use,) = measure_training_data(DataConfig(data_path=(corpus,), split="50,50,0"), everything)
    sizes = IndexedDataset(corpus).sizes
    assert use.tokens == int(sizes[: round(len(sizes) / 2)].sum())
    assert use.epochs == pytest.approx(everything / use.tokens)


def test_each_data_set_of_a_mixture_has_its_own_epochs(corpus: str) -> None:
    everything = int(IndexedDataset(corpus).sizes.sum())
    data = DataConfig(
        train_weighted_split_paths=(f"train: 3 0:1 {corpus}, 1 0:0.001 {corpus}, 1 0:1 {corpus}",)
    )
    uses = measure_training_data(data, 8 * everything)
    # The second one has no document, so the weights of the others are 3/4 and 1/4.
    assert [use.epochs for use in uses] == [6, 2]
    assert describe_epochs(uses).startswith("2 to 6 epochs of 2 data sets")
    (warning,) = warn_about_many_epochs(uses)
    assert "6.0 epochs" in warning


def test_missing_data_set_is_an_error() -> None:
    with pytest.raises(DataError):
        measure_training_data(DataConfig(data_path=("/nowhere/corpus",)), 100)


def test_synthetic_data_are_no_data_set() -> None:
    """--mock-data opens nothing, so --data-path need not exist."""
    assert measure_training_data(DataConfig(mock_data=True, data_path=("/nowhere",)), 100) == []
