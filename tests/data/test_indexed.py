"""The .bin/.idx format: its bytes, round trips, and the ways in which files can be wrong."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from data.corpora import HUNDRED
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import DataError
from megatron.data.indexed import DTYPES, IndexedDataset, IndexedDatasetWriter, choose_dtype

HEADER = 34


@pytest.fixture
def copy(tmp_path):
    """The path of a copy of the first 100 documents that a test may change."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"c{suffix}").write_bytes(Path(HUNDRED + suffix).read_bytes())
    return tmp_path / "c"


def patch(path, at, data):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


def test_reads_the_reference_files():
    data = IndexedDataset(HUNDRED)
    assert len(data) == 100
    assert data.num_documents == 100
    assert data.dtype == np.uint16
    assert data.sizes[:3].tolist() == [1411, 918, 1046]
    assert data.document_offsets[[0, 1, -1]].tolist() == [0, 1, 100]
    assert all(data[i][-1] == 4999 for i in range(100)), (
        "each document ends with the end-of-document id"
    )
    assert data.get(1, 5, 4).tolist() == data[1].tolist()[5:9]
    assert data.get(1, 910).size == 8


@pytest.mark.parametrize("how", ["documents", "flat", "dataset"])
def test_writes_the_reference_bytes(tmp_path, how):
    data = IndexedDataset(HUNDRED)
    with IndexedDatasetWriter(tmp_path / "x", data.dtype) as writer:
        if how == "documents":
            for i in range(len(data)):
                writer.add_document(data[i].tolist())
        elif how == "flat":
            writer.add_documents(data.tokens, data.sizes)
        else:
            writer.add_dataset(data)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"x{suffix}").read_bytes() == Path(HUNDRED + suffix).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_merged_data_sets_keep_all_sequences(tmp_path):
    data = IndexedDataset(HUNDRED)
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_document([1, 2])
        writer.add_dataset(data)
        writer.add_dataset(data)
    merged = IndexedDataset(tmp_path / "x")
    assert len(merged) == 201
    assert merged.num_documents == 201
    assert merged[0].tolist() == [1, 2]
    assert merged[101].tolist() == data[0].tolist()
    assert merged[200].tolist() == data[99].tolist()


@settings(max_examples=40, deadline=None)
@given(dtype=st.sampled_from([d.name for d in DTYPES.values()]), data=st.data())
def test_written_documents_are_read_back(tmp_path_factory, dtype, data):
    limits = np.iinfo(dtype)
    ids = st.integers(int(limits.min), int(limits.max))
    documents = data.draw(st.lists(st.lists(ids, max_size=6), max_size=6))
    prefix = tmp_path_factory.mktemp("round") / "x"
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=dtype))
    back = IndexedDataset(prefix)
    assert [back[i].tolist() for i in range(len(back))] == documents
    assert back.dtype == np.dtype(dtype)


def test_an_interrupted_writer_leaves_no_files(tmp_path):
    def write_and_interrupt():
        with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
            writer.add_document([1, 2, 3])
            assert not (tmp_path / "x.bin").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt()
    assert list(tmp_path.iterdir()) == []


def test_an_old_idx_never_exists_with_a_new_bin(copy, monkeypatch):
    """The writer is interrupted between the two renames."""
    renamed = []

    def replace(source, target):
        renamed.append(target)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        os.rename(source, target)

    monkeypatch.setattr("megatron.data.indexed.os.replace", replace)
    writer = IndexedDatasetWriter(copy, np.uint16)
    writer.add_document([1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        writer.finalize()
    assert [path.suffix for path in renamed] == [".bin", ".idx"]
    assert not copy.with_suffix(".idx").exists()


def test_dtype_is_the_smallest_for_the_vocabulary():
    assert choose_dtype(65499) == np.uint16
    assert choose_dtype(65500) == np.int32


def test_fingerprint_depends_on_the_content_and_not_the_path(copy):
    before = IndexedDataset(HUNDRED).compute_fingerprint()
    assert IndexedDataset(copy).compute_fingerprint() == before
    patch(copy.with_suffix(".bin"), 0, b"\x07\x00")
    assert IndexedDataset(copy).compute_fingerprint() != before


def test_missing_files_are_named(copy):
    copy.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"c\.bin does not exist"):
        IndexedDataset(copy)
    with pytest.raises(DataError, match=r"nowhere\.idx does not exist"):
        IndexedDataset("/nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:20], "has 20 bytes, less than the 34"),
        (
            lambda raw: raw[:-8],
            "has 2034 bytes, but 100 sequences and 101 document offsets need 2042: it is truncated",
        ),
        (lambda raw: raw + b"\0", "need 2042: it is longer than its header states"),
        (
            lambda raw: b"TNTIDX\x00\x00\x00" + raw[9:],
            "it is not the index of an mmap data set",
        ),
        (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "has format version 2"),
        (lambda raw: raw[:17] + b"\x06" + raw[18:], r"has dtype code 6 \(6 and 7 mean"),
        (lambda raw: raw[:17] + b"\x07" + raw[18:], "has dtype code 7"),
        (lambda raw: raw[:17] + b"\x63" + raw[18:], "dtype code 99; supported are 1 uint8"),
        (
            lambda raw: raw[:HEADER] + struct.pack("<i", -5) + raw[HEADER + 4 :],
            "sequence 0 has size -5",
        ),
        (
            lambda raw: raw[: HEADER + 408] + struct.pack("<q", 4) + raw[HEADER + 416 :],
            "sequence 1 points to byte 4, but the sizes before it add up to 2822",
        ),
        (
            lambda raw: raw[:-8] + struct.pack("<q", 99),
            r"document offsets \(from 0 to 99\) must rise",
        ),
    ],
)
def test_a_wrong_idx_is_refused(copy, damage, message):
    path = copy.with_suffix(".idx")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        IndexedDataset(copy)


@pytest.mark.parametrize(
    ("size", "reason"),
    [(259_476, "it is truncated"), (259_480, "not the file that this index was made for")],
)
def test_a_bin_of_another_size_is_refused(copy, size, reason):
    assert copy.with_suffix(".bin").stat().st_size == 259_478
    os.truncate(copy.with_suffix(".bin"), size)
    with pytest.raises(DataError, match=f"has {size} bytes") as raised:
        IndexedDataset(copy)
    assert "the 129739 uint16 tokens of c.idx need 259478" in str(raised.value)
    assert reason in str(raised.value)


def test_the_writer_refuses_what_the_format_cannot_hold(tmp_path):
    with pytest.raises(DataError, match="cannot be stored as float32"):
        IndexedDatasetWriter(tmp_path / "x", np.float32)
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16)
    for low, high in ((-1, 70000), (-1, 65535), (0, 65536)):
        with pytest.raises(DataError, match=f"{low} to {high} do not fit uint16"):
            writer.add_document([low, high])
    # The second size makes the sum 0. Otherwise this test would need 4 GiB of tokens.
    with pytest.raises(DataError, match=f"a sequence of {2**31} tokens is longer"):
        writer.add_documents(np.zeros(0, np.uint16), [2**31, -(2**31)])
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("c.bin", r"leave out the suffix \.bin: .*/c\."),
        ("c.idx", r"leave out the suffix \.idx: .*/c\."),
        ("text.jsonl", r"text\.jsonl is not an indexed data set; convert it with tools/preprocess"),
        ("corpus", "there is .*/corpus_text_document"),
        ("folder", "folder is a folder; .* --dataset-format parquet"),
        ("nothing", r"does not exist; a data set is given by its path without \.bin and \.idx"),
    ],
)
def test_a_path_that_is_no_data_set_gets_a_hint(copy, given, hint):
    (copy.parent / "text.jsonl").write_text("{}")
    (copy.parent / "folder").mkdir()
    for suffix in (".bin", ".idx"):
        (copy.parent / f"corpus_text_document{suffix}").write_bytes(b"")
    with pytest.raises(DataError, match=hint):
        IndexedDataset(copy.parent / given)
