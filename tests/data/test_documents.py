"""Bounds, positions and masks of documents, compared with a loop and with the corpus."""

from pathlib import Path

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from data.corpora import HUNDRED, write_numbered
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.errors import DataError
from megatron.data.documents import (
    find_document_bounds,
    make_loss_mask,
    make_position_ids,
)
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.data.indexed_source import check_documents_end

EOD = 0
SAMPLES = npst.arrays(
    np.int64, npst.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.integers(0, 3)
)


def walk(tokens: list[int]) -> tuple[tuple[int, ...], list[int], list[float]]:
    """Return bounds, positions and mask of one sample, computed token by token."""
    bounds = [0]
    positions = []
    position = 0
    for place, token in enumerate(tokens):
        positions.append(position)
        position += 1
        if token == EOD:
            position = 0
            if place + 1 < len(tokens):
                bounds.append(place + 1)
    mask = [0.0 if token == EOD else 1.0 for token in tokens]
    return (*bounds, len(tokens)), positions, mask


@given(SAMPLES)
def test_bounds_positions_and_masks_equal_a_walk_over_the_tokens(samples: np.ndarray) -> None:
    tokens = torch.from_numpy(samples)
    bounds, positions, masks = zip(*map(walk, samples.tolist()), strict=True)
    assert find_document_bounds(tokens, EOD) == bounds
    assert make_position_ids(tokens, EOD).tolist() == list(positions)
    assert make_loss_mask(tokens, EOD).tolist() == list(masks)


def test_bounds_positions_and_masks_of_an_example() -> None:
    tokens = torch.tensor([[5, 6, EOD, 7, EOD], [EOD, EOD, 5, 6, 7], [5, 6, 7, 8, 9]])
    assert find_document_bounds(tokens, EOD) == ((0, 3, 5), (0, 1, 2, 5), (0, 5))
    assert make_position_ids(tokens, EOD).tolist() == [
        [0, 1, 2, 0, 1],
        [0, 0, 0, 1, 2],
        [0, 1, 2, 3, 4],
    ]
    assert make_loss_mask(tokens, EOD).tolist() == [
        [1, 1, 0, 1, 0],
        [0, 0, 1, 1, 1],
        [1, 1, 1, 1, 1],
    ]
    assert make_position_ids(tokens, EOD).dtype == torch.int64
    assert make_loss_mask(tokens, EOD).dtype == torch.float32


def test_bounds_of_a_complete_corpus_are_those_of_its_index() -> None:
    """The complete corpus is taken as one sample."""
    indexed = IndexedDataset(HUNDRED)
    tokens = torch.from_numpy(indexed.tokens.astype(np.int64))[None]
    assert find_document_bounds(tokens, 4999) == ((0, *np.cumsum(indexed.sizes).tolist()),)


def test_data_without_the_end_of_document_id_are_refused(tmp_path: Path) -> None:
    check_documents_end(IndexedDataset(HUNDRED), 4999)
    with pytest.raises(DataError, match="none of the first 100 documents") as raised:
        check_documents_end(IndexedDataset(HUNDRED), 0)
    assert "end-of-document id 0" in str(raised.value)
    plain = write_numbered(tmp_path / "plain", documents=2000, size=3)
    with pytest.raises(DataError, match="none of the first 1000 documents"):
        check_documents_end(IndexedDataset(plain), 7)
    check_documents_end(IndexedDataset(plain), 5)


def test_only_the_last_sequence_of_a_document_ends_it(tmp_path: Path) -> None:
    """A document may have no sequence or several."""
    with IndexedDatasetWriter(tmp_path / "parts", np.int32) as writer:
        writer.add_documents([1, EOD, 2, 9, 3, 8], [2, 2, 0, 2])
    indexed = IndexedDataset(tmp_path / "parts")
    check_documents_end(indexed, EOD)
    indexed.document_offsets = np.array([0, 0, 2, 3, 4])
    with pytest.raises(DataError, match="none of the first 2 documents"):
        check_documents_end(indexed, EOD)
    check_documents_end(indexed, 9)
