"""Streamed samples are the same by every route: any number of ranks, kills, skips and resumes."""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.row_files import make_documents, write_dataset, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpus import GPT2

from megatron.base.errors import DataError
from megatron.data.documents import DocumentRules
from megatron.data.source import BatchSlice
from megatron.extras.samples.stream.build import _StreamOpener
from megatron.extras.samples.stream.filters import Filters
from megatron.extras.samples.stream.listing import list_dataset
from megatron.extras.samples.stream.reader import Cursor, OpenShard, ShardReader
from megatron.extras.samples.stream.shard_order import MixturePhase
from megatron.extras.samples.stream.source import StreamSource
from megatron.extras.samples.stream.streamed_dataset import Specials, StreamedDataset
from megatron.parallel.ranks import Ranks
from megatron.tokenizer.build import build_tokenizer

SHARDS = 12
LENGTH = 32
EOS = 100_000
COUNTS = {"web": 900, "code": 400, "math": 120}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    for number, (name, count) in enumerate(COUNTS.items()):
        documents = make_documents(count, number, first=10_000 * (number + 1))
        write_dataset(folder / name, documents, group=130)
    return folder


def open_dataset(
    corpus: Path,
    name: str,
    specials: Specials,
    shards: int = SHARDS,
    filters: Filters | None = None,
) -> StreamedDataset:
    listing = list_dataset(str(corpus / name), "parquet", "tokens", None)
    rows = (0, int(listing.rows.sum()))
    return StreamedDataset(name, listing, rows, 7, shards, specials, None, None, filters)


class ThreadRanks:
    """Ranks that are threads of one process, with a gather that exchanges JSON."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: list[str] = [""] * size

    def of(self, rank: int) -> Ranks:
        group = self

        class Member(Ranks):
            def gather(self, mine: Any) -> list[Any]:
                group._values[rank] = json.dumps(mine)
                group._barrier.wait(60)
                values = list(map(json.loads, group._values))
                group._barrier.wait(60)
                return values

        return Member(rank, self.size)


Mixture = dict[str, float]
Phases = list[tuple[int, Mixture]]


def list_phases(mixture: Mixture | Phases) -> list[MixturePhase]:
    """Return the phases: one from the start on, or those of a list with their first samples."""
    pairs = mixture if isinstance(mixture, list) else [(0, mixture)]
    return [
        MixturePhase(
            start, {name: weight / sum(weights.values()) for name, weight in weights.items()}
        )
        for start, weights in pairs
    ]


def build(
    corpus: Path,
    mixture: Mixture | Phases,
    ranks: Ranks,
    micro_batch: int = 1,
    threads: int = 0,
    **others: Any,
) -> StreamSource:
    phases = list_phases(mixture)
    names = dict.fromkeys(name for phase in phases for name in phase.shares)
    specials = others.get("specials", Specials(eos=EOS))
    filters = others.get("filters")
    return StreamSource(
        "train",
        [open_dataset(corpus, name, specials, SHARDS, filters) for name in names],
        phases,
        others.get("seq_length", LENGTH),
        BatchSlice(micro_batch, ranks.rank, ranks.size, document_rules=others.get("rules")),
        threads,
        ranks,
    )


def run(
    corpus: Path,
    steps: Sequence[int],
    mixture: Mixture | Phases,
    state: dict | None = None,
    ranks: int = 1,
    micro_batch: int = 1,
    threads: int = 0,
    filters: Filters | None = None,
) -> tuple[list[list[tuple]], dict]:
    """Read batches, and return them sorted, with the state at the end.

    A negative step skips samples. Step 0 asks for the state and goes on, as a save does.
    """
    group = ThreadRanks(ranks)
    outcomes: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        source = build(corpus, mixture, group.of(rank), micro_batch, threads, filters=filters)
        if state is not None:
            source.load(state)
        rows = []
        for step in steps:
            if step < 0:
                source.advance(-step)
            elif step == 0:
                # Without the wait, it would depend on the load whether the threads are done.
                futures.wait([future for _, future in source._prefetcher._ahead])
                source.state()
            else:
                rows.append(
                    [
                        (*row.tolist(), int(label))
                        for batch in source.read_batch(step)
                        for row, label in zip(batch.tokens, batch.labels[:, -1], strict=True)
                    ]
                )
        outcomes[rank] = (rows, json.loads(json.dumps(source.state())))
        source.close()

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(outcome is not None for outcome in outcomes), "a rank failed"
    assert all(outcome[1] == outcomes[0][1] for outcome in outcomes)
    batches = [
        sorted(row for outcome in outcomes for row in outcome[0][number])
        for number in range(sum(step > 0 for step in steps))
    ]
    return batches, outcomes[0][1]


MIXTURE = {"web": 6.0, "code": 3.0, "math": 1.0}


@pytest.mark.parametrize(("ranks", "micro_batch", "threads"), [(1, 4, 2), (2, 3, 0), (3, 1, 3)])
def test_any_number_of_ranks_reads_the_same(corpus, ranks: int, micro_batch: int, threads: int):
    expected, state = run(corpus, [12] * 20, MIXTURE)
    assert run(corpus, [12] * 20, MIXTURE, None, ranks, micro_batch, threads) == (expected, state)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2)]),
            st.lists(st.sampled_from([6, 12, 24, -6, -30]), min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_resumes_at_other_numbers_of_ranks_change_nothing(corpus: Path, launches: list):
    """Batch sizes may change as well, as in a ramp-up."""
    steps = [step for _, of_launch in launches for step in of_launch]
    expected, final = run(corpus, steps, MIXTURE)
    batches: list = []
    state = None
    for (ranks, micro_batch), of_launch in launches:
        found, state = run(corpus, of_launch, MIXTURE, state, ranks, micro_batch)
        batches += found
    assert (batches, state) == (expected, final)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 0), (1, 2), (2, 2), (3, 1)])
def test_a_save_after_a_skipped_range_changes_nothing(corpus: Path, ranks: int, threads: int):
    """Shards whose samples were skipped are behind, and their next samples are read ahead."""
    saving = [6, -6, 6, 0, 6, 0, -18, 0, 6, 0, 6]
    expected = run(corpus, [step for step in saving if step], MIXTURE)
    assert run(corpus, saving, MIXTURE, None, ranks, 1, threads) == expected


def test_a_batch_that_is_not_wanted_any_more_does_not_move_the_reader(corpus: Path):
    """A thread may still read a batch from before a skipped range. Its result is dropped."""
    opened = OpenShard(open_dataset(corpus, "web", Specials()), 3, 0, Cursor())
    expected = OpenShard(open_dataset(corpus, "web", Specials()), 3, 0, Cursor())
    for number in range(4):
        opened.read(number, LENGTH)
        opened.confirm(number)
    with pytest.raises(ValueError, match="sample 2 is before the position 4"):
        opened.read(2, LENGTH)
    assert np.array_equal(opened.read(4, LENGTH).tokens, expected.read(4, LENGTH).tokens)
    assert np.array_equal(opened.read(6, LENGTH).tokens, expected.read(6, LENGTH).tokens)


def test_each_document_is_read_once_an_epoch(corpus: Path):
    """A shard reads each of its documents once before it reads one twice."""
    dataset = open_dataset(corpus, "web", Specials(eos=EOS))
    of_epoch: list[Counter] = [Counter(), Counter()]
    for shard in range(SHARDS):
        reader = ShardReader(dataset, shard, Cursor())
        stream: list[int] = []
        while reader.cursor.epoch < 2:
            stream += reader.read_sample(LENGTH).tokens[:-1].tolist()
        # The first token of a document is its number.
        starts = [0, *(place + 1 for place, token in enumerate(stream) if token == EOS)]
        numbers = [stream[start] for start in starts if start < len(stream)]
        size = dataset.open_epoch(0).count_rows(shard)
        of_epoch[0].update(numbers[:size])
        of_epoch[1].update(numbers[size : size + dataset.open_epoch(1).count_rows(shard)])
    assert of_epoch[0] == of_epoch[1] == Counter(range(10_000, 10_000 + COUNTS["web"]))


def test_skipping_goes_where_reading_goes(corpus: Path):
    for specials in (Specials(), Specials(bos=EOS, eos=EOS + 1), Specials(strip=(5, 6))):
        dataset = open_dataset(corpus, "web", specials, shards=2)
        reader = ShardReader(dataset, 1, Cursor())
        cursors = [reader.cursor]
        samples = []
        while reader.cursor.epoch < 2:
            samples.append(reader.read_sample(LENGTH))
            cursors.append(reader.cursor)
        for number in (1, 2, 100, len(samples) // 2, len(samples) - 1):
            skipping = ShardReader(dataset, 1, Cursor())
            skipping.skip_tokens(number * LENGTH)
            assert skipping.cursor == cursors[number]
            assert np.array_equal(skipping.read_sample(LENGTH).tokens, samples[number].tokens)
            # A skip after a read begins inside a window that is in memory.
            skipping = ShardReader(dataset, 1, Cursor())
            skipping.read_sample(LENGTH)
            skipping.skip_tokens((number - 1) * LENGTH)
            assert skipping.cursor == cursors[number]


def test_texts_are_tokenized_when_they_are_needed(tmp_path: Path):
    """A window has 256 texts, and each logical shard has a window of its own in memory."""
    texts = [f"{number} {'x' * (number % 7)}" for number in range(600)]
    write_rows(tmp_path / "web" / "a.parquet", "tokens", texts, group=600)
    listing = list_dataset(str(tmp_path / "web"), "parquet", "tokens", None)
    tokenized: list[str] = []

    def encode(some: list[str]) -> list[np.ndarray]:
        tokenized.extend(some)
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in some]

    def open_texts(filters: Filters | None = None) -> StreamedDataset:
        return StreamedDataset(
            "web", listing, (0, 600), 7, 1, Specials(eos=EOS), encode, None, filters
        )

    dataset = open_texts()
    (piece,) = dataset.open_epoch(0).list_pieces(0)
    documents = [document.ids.tolist() for document in dataset.read_documents(0, piece)]
    assert sorted(tokenized) == sorted(texts)
    for skipped in (0, 5, 255, 256, 300, 599, 600):
        tokenized.clear()
        found = dataset.read_documents(0, piece, skipped)
        first = [document.ids.tolist() for document in itertools.islice(found, 3)]
        assert first == documents[skipped : skipped + 3]
        assert len(tokenized) <= 32
    # Duplicates are found in the complete window, so all of it is tokenized. The order is the same.
    unequal = open_texts(Filters(drop_duplicates=True))
    assert [each.ids.tolist() for each in unequal.read_documents(0, piece)] == documents
    reader = ShardReader(dataset, 0, Cursor(document=300, token=2))
    tokenized.clear()
    assert reader.read_sample(1).tokens.tolist() == documents[300][2:4]
    assert len(tokenized) <= 16


def test_null_texts_and_special_tokens_in_texts_are_counted(tmp_path: Path):
    write_rows(tmp_path / "a.jsonl", "text", ["a <|endoftext|>", None, "b<|endoftext|>", ""])
    listing = list_dataset(str(tmp_path), "jsonl", "text", None)
    tokenizer = build_tokenizer(GPT2)
    opener = _StreamOpener(None, {}, tokenizer)  # type: ignore[arg-type]
    dataset = StreamedDataset("web", listing, (0, 4), 7, 1, Specials(), opener._encode, None)
    nulls, spelled = opener._check_texts(dataset)
    assert nulls.startswith(
        "data set web, its first 4 rows: 1 have no text (null, or a blank line)"
    )
    assert "its first 4 rows: texts spell 2 special tokens, and each is ordinary text" in spelled
    # An empty text is a text.
    write_rows(tmp_path / "b" / "a.jsonl", "text", ["a", "", "b"])
    listing = list_dataset(str(tmp_path / "b"), "jsonl", "text", None)
    dataset = StreamedDataset("web", listing, (0, 3), 7, 1, Specials(), opener._encode, None)
    assert opener._check_texts(dataset) == []


def test_weights_and_data_sets_change_from_the_position_on(corpus: Path):
    first, state = run(corpus, [12] * 5, {"web": 1.0, "code": 1.0})
    for ranks in (1, 3):
        assert run(corpus, [12] * 5, {"web": 1.0, "code": 1.0}, None, ranks) == (first, state)
    second, middle = run(corpus, [12] * 5, {"web": 1.0, "math": 3.0}, state, 2)
    assert run(corpus, [12] * 5, {"web": 1.0, "math": 3.0}, state, 3)[0] == second
    numbers = [token for batch in second for row in batch for token in row]
    assert not any(20_000 <= token < 30_000 for token in numbers), "code is not read any more"
    assert any(30_000 <= token < 40_000 for token in numbers), "math is read"
    assert [segment["start_sample"] for segment in middle["stream"]["segments"]] == [0, 60]
    # The removed data set continues where it was.
    before = next(d for d in state["stream"]["datasets"] if d["name"] == "code")
    kept = next(d for d in middle["stream"]["datasets"] if d["name"] == "code")
    assert kept == before
    third, last = run(corpus, [12] * 5, {"web": 1.0, "code": 1.0}, middle)
    code = next(d for d in last["stream"]["datasets"] if d["name"] == "code")
    assert sum(code["samples"]) == sum(before["samples"]) + 30
    # No sample was drawn twice.
    rows = [row for batch in first + second + third for row in batch]
    assert len(rows) == len(set(rows))


PHASES: Phases = [
    (0, {"web": 1.0, "code": 1.0}),
    (60, {"math": 3.0, "web": 1.0}),
    # In the middle of a batch of 12, which the mixture permits.
    (102, {"code": 1.0, "math": 1.0, "web": 2.0}),
]


def sort_datasets(state: dict) -> dict:
    """Return a state whose data sets are sorted. Those that are not read any more come last."""
    stream = state["stream"]
    names = sorted(stream["datasets"], key=lambda each: each["name"])
    return {**state, "stream": {**stream, "datasets": names}}


def test_a_phase_equals_a_resume_with_its_data_sets(corpus: Path):
    """A run with phases reads what a run reads that is stopped and started with other flags."""
    expected = []
    state = None
    for steps, (_, mixture) in zip(([12] * 5, [12, 12, 18], [18, 12]), PHASES, strict=True):
        found, state = run(corpus, steps, mixture, state, 2)
        expected += found
    batches, last = run(corpus, [12] * 7 + [18, 18, 12], PHASES, None, 3, threads=2)
    rows = sorted(itertools.chain(*expected))
    assert sorted(itertools.chain(*batches)) == rows
    assert state is not None
    assert sort_datasets(last) == sort_datasets(state)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2)]),
            st.lists(st.sampled_from([6, 12, 24, -6, -30, 0]), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=4,
    ),
    st.data(),
)
def test_resumes_and_rollbacks_with_phases_change_nothing(corpus: Path, launches: list, data):
    """Each launch resumes at another number of ranks, in or between phases.

    It knows only the phase at its position and later ones. Before it, there may be a rollback.
    """
    states: list = [(0, None)]
    batches: list = []
    steps: list = []
    for (ranks, micro_batch), of_launch in launches:
        # Steps of earlier launches that are kept.
        kept, state = data.draw(st.sampled_from(states))
        states = [each for each in states if each[0] <= kept]
        del steps[kept:]
        del batches[sum(step > 0 for step in steps) :]
        consumed = sum(map(abs, steps))
        present = max(number for number, (start, _) in enumerate(PHASES) if start <= consumed)
        # The start of the present phase is an estimate on a resume, and at most the position.
        ahead = [(max(0, PHASES[present][0] - 1), PHASES[present][1]), *PHASES[present + 1 :]]
        found, state = run(corpus, of_launch, ahead, state, ranks, micro_batch)
        batches += found
        steps += of_launch
        states.append((len(steps), state))
    expected, last = run(corpus, steps, PHASES)
    assert (batches, sort_datasets(state)) == (expected, sort_datasets(last))


def test_a_phase_that_begins_at_the_position_may_still_be_moved(corpus: Path):
    _, state = run(corpus, [12] * 5, PHASES)
    moved: Phases = [PHASES[0], (84, {"math": 1.0})]
    found, last = run(corpus, [12] * 4, moved, state)
    assert (found, last) == (run(corpus, [12] * 9, moved)[0][5:], run(corpus, [12] * 9, moved)[1])
    assert [segment["start_sample"] for segment in last["stream"]["segments"]] == [0, 84]
    # A phase that has started keeps its past. The change is reported.
    _, state = run(corpus, [12] * 6, PHASES)
    source = build(corpus, moved, Ranks())
    source.load(state)
    assert "applies from sample 72 on" in source.take_notes()[0]
    starts = [segment["start_sample"] for segment in source.state()["stream"]["segments"]]
    assert starts == [0, 60, 72, 84]
    # What was planned is not reported.
    for source_phases in (PHASES[1:], PHASES):
        source = build(corpus, source_phases[-2:], Ranks())
        source.load(run(corpus, [12] * 5, PHASES)[1])
        assert source.take_notes() == []


def test_another_sequence_length_continues_at_the_token(corpus: Path):
    first = build(corpus, {"web": 1.0}, Ranks())
    tokens = [batch.tokens[0].tolist() for batch in first.read_batch(SHARDS * 2)]
    second = build(corpus, {"web": 1.0}, Ranks(), seq_length=LENGTH * 2)
    second.load(first.state())
    longer = [batch.tokens[0].tolist() for batch in second.read_batch(SHARDS)]
    whole = build(corpus, {"web": 1.0}, Ranks(), seq_length=LENGTH * 4)
    for shard, batch in enumerate(whole.read_batch(SHARDS)):
        expected = tokens[shard] + tokens[shard + SHARDS] + longer[shard]
        assert batch.tokens[0].tolist() == expected


def test_bounds_come_from_the_files(corpus: Path):
    """No token marks the end of a document here."""
    rules = DocumentRules(-1, True, True, True)
    source = build(corpus, {"web": 1.0}, Ranks(), specials=Specials(), rules=rules)
    for batch in source.read_batch(SHARDS) + source.read_batch(SHARDS, LENGTH // 2):
        assert batch.documents is not None
        assert batch.position_ids is not None
        assert batch.loss_mask is not None
        (bounds,) = batch.documents
        length = batch.tokens.shape[1]
        tokens = batch.tokens[0].tolist()
        assert bounds[0] == 0
        assert bounds[-1] == length
        starts = [place for place, token in enumerate(tokens) if token >= 10_000 and place]
        assert list(bounds[1:-1]) == starts
        positions = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(bounds)])
        assert batch.position_ids[0].tolist() == positions.tolist()
        new = (batch.labels[0] >= 10_000).tolist()
        assert batch.loss_mask[0].tolist() == [0.0 if first else 1.0 for first in new]


def test_what_a_resume_refuses(corpus: Path, tmp_path: Path):
    _, state = run(corpus, [12], MIXTURE)
    source = build(corpus, MIXTURE, Ranks())
    with pytest.raises(DataError, match="--finetune"):
        source.load({"consumed_samples": 3, "segments": []})
    with pytest.raises(DataError, match="data with --dataset-format bytes"):
        source.load({"consumed_samples": 3, "segments": [], "kind": "bytes"})
    with pytest.raises(DataError, match="--logical-shards 7"):
        source.load({**state, "stream": {**state["stream"], "logical_shards": 7}})
    documents = make_documents(900, 0, first=10_000)
    write_dataset(tmp_path / "web", documents[:-1], group=130)
    changed = build(tmp_path, {"web": 1.0}, Ranks())
    with pytest.raises(DataError, match="files of data set web"):
        changed.load(state)


def test_too_few_documents(corpus: Path):
    with pytest.raises(DataError, match="--logical-shards"):
        open_dataset(corpus, "math", Specials(), shards=121)


def test_ids_beyond_the_vocabulary_and_files_that_change(corpus: Path, tmp_path: Path):
    write_dataset(tmp_path / "web", make_documents(300, 0, first=10_000))
    listing = list_dataset(str(tmp_path / "web"), "parquet", "tokens", None)
    dataset = StreamedDataset("web", listing, (0, 300), 7, 1, Specials(), None, 10_100)
    with pytest.raises(DataError, match="10100 entries"):
        ShardReader(dataset, 0, Cursor()).read_sample(5000)
    unchecked = StreamedDataset("web", listing, (0, 300), 7, 1, Specials(), None, None)
    reader = ShardReader(unchecked, 0, Cursor())
    reader.read_sample(LENGTH)
    write_dataset(tmp_path / "web", make_documents(290, 0, first=10_000))
    with pytest.raises(DataError, match="has changed since the run started"):
        reader.skip_tokens(50_000)
