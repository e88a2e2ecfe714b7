"""Conversations are packed whole, once in each epoch, in an order that does not depend on ranks."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.source_requests import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import DataError
from megatron.commands.parts import open_indexed
from megatron.config.data import DataConfig
from megatron.data.batches import take_marks
from megatron.data.build_sources import build_sources
from megatron.data.documents import DocumentRules
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.data.registry import DatasetRegistry
from megatron.data.source import BatchSlice
from megatron.extras.samples.chat.packed import ConversationPacking, PackedDataset, pack

EOD = 7
RULES = DocumentRules(EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
LENGTH = 31


def write(prefix: Path, sizes: list[int], seed: int = 0) -> IndexedDataset:
    """Write conversations. The second token of each is its number, and half of the others count."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for number, size in enumerate(sizes):
            ids = rng.integers(0, 90, size).astype(np.int32)
            ids[1:2] = 100 + number
            counted = rng.random(size) < 0.5
            counted[0] = False
            counted[1:2] = True
            writer.add_document(np.where(counted, ids, ~ids))
    return IndexedDataset(prefix)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=80), st.integers(0, 99))
def test_no_sample_is_overfull_and_no_two_fit_together(sizes: list[int], seed: int) -> None:
    packed = pack(np.array(sizes, np.int64), LENGTH + 1, seed)
    filled = np.bincount(packed, weights=sizes)
    assert filled.max() <= LENGTH + 1
    assert filled.min() > 0
    # Otherwise the later one would have gone into the earlier one.
    two = np.sort(filled)[:2]
    assert len(filled) == 1 or two.sum() > LENGTH + 1
    # The number of samples does not depend on the seed.
    assert len(filled) == len(np.bincount(pack(np.array(sizes, np.int64), LENGTH + 1, seed + 1)))


def test_packing_is_dense_and_fast_for_many_conversations() -> None:
    sizes = np.random.default_rng(1).lognormal(5.5, 0.8, 50_000).astype(np.int64).clip(2, 4097)
    packed = pack(sizes, 4097, 1)
    assert sizes.sum() / ((packed.max() + 1) * 4097) > 0.99


def test_each_conversation_is_whole_and_once_in_each_epoch(tmp_path: Path) -> None:
    sizes = [*range(2, 33), *[5] * 20, 32, 32, 1]
    data = write(tmp_path / "data", sizes)
    registry = DatasetRegistry(None)
    packed = PackedDataset(data, (3, len(sizes)), LENGTH, 4, 40, registry.cache(data.prefix))
    more = PackedDataset(data, (3, len(sizes)), LENGTH, 4, 90, registry.cache(data.prefix))
    assert len(packed) >= 40
    assert len(packed) % packed.per_epoch == 0
    found: list[list[int]] = []
    for start in range(0, len(packed), packed.per_epoch):
        count = packed.per_epoch
        out = np.full((count, LENGTH + 1), 5, np.int64)
        longer = out.copy()
        rows = np.arange(count)
        packed.read(np.arange(start, start + count), rows, out)
        # An epoch does not depend on how many follow it.
        more.read(np.arange(start, start + count), rows, longer)
        assert np.array_equal(out, longer)
        marks = take_marks(out)
        assert marks is not None
        numbers = []
        for row in range(count):
            starts = [*np.flatnonzero(marks.starts[row]), LENGTH + 1]
            for begin, end in pairwise(starts):
                document, place = packed.locate(start + row, begin)
                if place:
                    # Padding of zeros, none of which counts.
                    assert not out[row, begin:end].any()
                    assert not marks.counted[row, begin:end].any()
                    continue
                stored = data[document]
                assert np.array_equal(out[row, begin:end], np.maximum(stored, ~stored))
                assert np.array_equal(marks.counted[row, begin:end], stored >= 0)
                numbers.append(document)
        assert sorted(numbers) == list(range(3, len(sizes)))
        found.append(numbers)
    assert found[0] != found[1]
    counted = ConversationPacking().count_samples(data, (3, len(sizes)), LENGTH)
    assert counted == packed.per_epoch


def build(tmp_path: Path, *paths: str, rules: DocumentRules | None = RULES, **changes: Any) -> Any:
    ranks = changes.pop("ranks", (0, 1))
    micro = changes.pop("micro", 2)
    request = make_request(
        DataConfig(data_path=paths, split="1", num_workers=0),
        seq_length=LENGTH,
        train_samples=changes.pop("samples", 48),
        open_indexed=changes.pop("open_indexed", open_indexed),
        batch_slice=BatchSlice(micro, ranks[0], ranks[1], 1000, rules),
    )
    return build_sources(request).train


def test_batches_have_masks_positions_and_bounds(tmp_path: Path) -> None:
    write(tmp_path / "data", [9, 12, 5, 30, 3])
    [first, *_] = build(tmp_path, str(tmp_path / "data"), micro=2).read_batch(2)
    assert first.documents is not None
    for row, bounds in enumerate(first.documents):
        assert bounds[0] == 0
        assert bounds[-1] == LENGTH
        for begin, end in pairwise(bounds):
            assert torch.equal(first.position_ids[row, begin:end], torch.arange(end - begin))
            # The next text cannot be predicted.
            if end < LENGTH:
                assert first.loss_mask[row, end - 1] == 0
    assert 0 < first.loss_mask.mean() < 1
    # The label of each first token is the number of its conversation, which counts.
    begins = first.labels >= 100
    assert (first.loss_mask[begins] == 1).all()


def test_samples_do_not_depend_on_ranks_and_the_position_is_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    write(tmp_path / "chat", rng.integers(2, 33, 60).tolist())
    with IndexedDatasetWriter(tmp_path / "text", np.uint16) as writer:
        for _ in range(30):
            writer.add_document([*rng.integers(10, 90, 40), EOD])
    paths = ("0.8", str(tmp_path / "text"), "0.2", str(tmp_path / "chat"))
    one = build(tmp_path, *paths, micro=4)
    expected = [one.read_batch(8) for _ in range(5)]
    tokens = torch.cat([each.tokens for batch in expected for each in batch])
    packed = sum(bool((row >= 100).any()) for row in tokens)
    # 80 % documents, 20 % conversations.
    assert packed == 8
    for at, row in enumerate(tokens[:8]):
        if not (row >= 100).any():
            first = expected[0][at // 4]
            mask, bounds = first.loss_mask[at % 4], first.documents[at % 4]
            # Documents have the rules of their end-of-document tokens.
            assert torch.equal(mask, (row != EOD).float())
            ends = (torch.nonzero(row[:-1] == EOD).squeeze(1) + 1).tolist()
            assert bounds == (0, *ends, LENGTH)
    for resumed_at in (1, 3):
        other = build(tmp_path, *paths, micro=2, ranks=(1, 2))
        other.load({**one.state(), "consumed_samples": 8 * resumed_at})
        batch = other.read_batch(8)
        rows = torch.cat([each.tokens for each in expected[resumed_at]])
        assert torch.equal(torch.cat([each.tokens for each in batch]), rows[[2, 3, 6, 7]])


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (None, "--reset-position-ids --reset-attention-mask --eod-mask-loss too"),
        (
            DocumentRules(
                EOD, reset_position_ids=True, reset_attention_mask=False, eod_mask_loss=True
            ),
            "Give --reset-attention-mask too",
        ),
    ],
)
def test_the_flags_of_documents_are_needed(
    rules: DocumentRules | None, reason: str, tmp_path: Path
) -> None:
    write(tmp_path / "data", [9, 12])
    with pytest.raises(DataError, match=reason):
        build(tmp_path, str(tmp_path / "data"), rules=rules)


def test_conversations_that_would_be_cut_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", [9, 33, 12, 40])
    with pytest.raises(
        DataError, match=r"2 of 4 conversations have more than 32 tokens, the longest 40 .*2, 4"
    ):
        build(tmp_path, str(tmp_path / "data"))
    write(tmp_path / "short", [9, 12])
    source = build(tmp_path, str(tmp_path / "short"))
    with pytest.raises(DataError, match=r"cut at 16 tokens by the curriculum"):
        source.read_batch(2, 16)


def test_documents_among_conversations_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document([-3, 4, 5])
        writer.add_document([3, 4, 5])
    with pytest.raises(DataError, match="mixes conversations with documents, as number 2"):
        build(tmp_path, str(tmp_path / "data"))


def test_ids_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data", [9, 12])
    with IndexedDatasetWriter(tmp_path / "wrong", np.int32) as writer:
        writer.add_document([~3, ~1000, 5])
    with pytest.raises(DataError, match=r"wrong: document 0 holds the token id -?1001|1000"):
        build(tmp_path, str(tmp_path / "wrong"))


def test_endless_data_begin_again(tmp_path: Path) -> None:
    write(tmp_path / "data", [20, 20, 20, 9])
    source = build(tmp_path, str(tmp_path / "data"), samples=None)
    for _ in range(5):
        if source.must_extend(2):
            source.extend(2)
        source.read_batch(2)
    assert source.consumed_samples == 10


def test_the_core_alone_names_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "data", [20, 22])
    with pytest.raises(DataError, match="the part that packs them is not there"):
        build(tmp_path, str(tmp_path / "data"), open_indexed=IndexedDataset)
