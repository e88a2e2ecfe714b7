"""The same text by .bin/.idx and by streaming: equal documents, and equal losses in equal order."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiny_corpus
from data.row_files import write_rows
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import EOD, GPT2, JSONL, MERGES, VOCAB
from training.runs import SIZES

from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.extras.preparation.commands import preprocess
from megatron.extras.samples.stream.listing import list_dataset
from megatron.extras.samples.stream.reader import Cursor, ShardReader
from megatron.extras.samples.stream.streamed_dataset import Specials, StreamedDataset
from megatron.observe.metrics import read_metrics
from megatron.tokenizer.build import build_tokenizer

TOKENIZER = ["--vocab-file", VOCAB, "--merge-file", MERGES]
SEED = 1234


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """Return the corpus as tools/preprocess_data.py writes it."""
    prefix = tmp_path_factory.mktemp("indexed") / "corpus"
    arguments = ["--input", str(JSONL), "--output-prefix", str(prefix), "--append-eod", *TOKENIZER]
    assert preprocess.main(arguments) == 0
    return IndexedDataset(f"{prefix}_text_document")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder with the texts of the corpus for each format that is streamed."""
    texts = tiny_corpus.texts()
    folder = tmp_path_factory.mktemp("streamed")
    for name, suffix in (("jsonl", "jsonl"), ("parquet", "parquet"), ("arrow", "arrow")):
        write_rows(folder / name / f"a.{suffix}", "text", texts[:37], group=11)
        write_rows(folder / name / f"b.{suffix}", "text", texts[37:], group=11)
    # These are the very bytes that the tool reads.
    (folder / "jsonl" / "a.jsonl").unlink()
    (folder / "jsonl" / "b.jsonl").write_bytes(JSONL.read_bytes())
    return {name: folder / name for name in ("jsonl", "parquet", "arrow")}


def open_streamed(folder: Path, format: str, shards: int) -> StreamedDataset:
    tokenizer = build_tokenizer(GPT2)
    listing = list_dataset(str(folder), format, "text", None)
    return StreamedDataset(
        format,
        listing,
        (0, int(listing.rows.sum())),
        SEED,
        shards,
        Specials(eos=tokenizer.eod),
        lambda texts: [np.array(ids, np.int64) for ids in tokenizer.encode_batch(texts)],
        tokenizer.vocab_size,
    )


def read_epoch(dataset: StreamedDataset, epoch: int = 0) -> list[tuple[int, ...]]:
    """Return the documents of an epoch in the order in which the shards read them."""
    return [
        tuple(document.ids.tolist())
        for shard in range(dataset.shards)
        for piece in dataset.open_epoch(epoch).list_pieces(shard)
        for document in dataset.read_documents(epoch, piece)
    ]


@pytest.mark.parametrize("format", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("shards", [1, 7])
def test_each_format_streams_the_documents_of_the_index(
    indexed: IndexedDataset, folders: dict[str, Path], format: str, shards: int
) -> None:
    expected = Counter(tuple(indexed.get(n).tolist()) for n in range(len(indexed)))
    assert expected.total() == 100
    for epoch in (0, 1):
        found = read_epoch(open_streamed(folders[format], format, shards), epoch)
        assert Counter(found) == expected


def test_the_samples_of_a_shard_are_those_of_its_documents(
    indexed: IndexedDataset, folders: dict[str, Path]
) -> None:
    """What training reads is the documents end to end, with no token lost at any border."""
    dataset = open_streamed(folders["parquet"], "parquet", 1)
    reader = ShardReader(dataset, 0, Cursor())
    samples = [reader.read_sample(32).tokens for _ in range(len(indexed.tokens) // 32)]
    stream = np.concatenate([sample[:-1] for sample in samples])
    documents = np.concatenate([np.array(ids) for ids in read_epoch(dataset)])
    assert np.array_equal(stream, documents[: len(stream)])
    assert len(documents) == len(indexed.tokens)


def pretrain_in_file_order(argv: list[str]) -> None:
    """Train on indexed data without any shuffle, so that samples come in the order of the file."""
    from megatron.data import gpt_dataset

    shuffle = gpt_dataset.shuffle_in_place
    gpt_dataset.shuffle_in_place = lambda array, rng: None
    try:
        pretrain(argv)
    finally:
        gpt_dataset.shuffle_in_place = shuffle


@pytest.mark.parametrize(
    "masks", ["", "--reset-position-ids --reset-attention-mask --eod-mask-loss"]
)
def test_the_losses_are_equal_on_an_order_made_equal(
    pool: ProcessPool, folders: dict[str, Path], tmp_path: Path, masks: str
) -> None:
    """Texts are tokenized during the one run. The other one reads them from .bin/.idx."""
    documents = read_epoch(open_streamed(folders["jsonl"], "jsonl", 1))
    with IndexedDatasetWriter(tmp_path / "ordered", np.uint16) as writer:
        for ids in documents:
            writer.add_document(np.array(ids, np.uint16))
    common = [*SIZES.split(), *TOKENIZER, "--split", "100,0,0", "--seed", str(SEED)]
    common += ["--seq-length", "64", "--make-vocab-size-divisible-by", "8", *masks.split()]
    position = common.index("--vocab-size")
    del common[position : position + 2]
    streamed = ["--dataset-format", "jsonl", "--logical-shards", "1"]
    runs = {
        "streamed": (pretrain, [str(folders["jsonl"]), *streamed]),
        "indexed": (pretrain_in_file_order, [str(tmp_path / "ordered")]),
    }
    losses = {}
    for name, (function, paths) in runs.items():
        saved = ["--save", str(tmp_path / name), "--data-cache-path", str(tmp_path / "cache")]
        argv = [*common, *saved, "--data-path", *paths]
        succeed(pool.run(2, function, argv))
        entries = read_metrics(tmp_path / name / "metrics.jsonl")
        losses[name] = [entry["lm_loss"] for entry in entries if "lm_loss" in entry]
    assert len(losses["streamed"]) == 10
    assert losses["streamed"] == losses["indexed"]
    assert EOD in documents[0]
