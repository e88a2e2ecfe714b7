"""Runs with --dataset-format that are killed, or whose data are irregular, as black boxes."""

from pathlib import Path

import pytest
from data.row_files import make_documents, write_dataset, write_rows
from faults.launches import Launch
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import MERGES, VOCAB, texts
from training.runs import SIZES
from training.test_stream_runs import StreamRunner

TEXT = (
    "--datasets web --weights 1 --col-name text --num-layers 2 --train-iters 8 --logical-shards 10 "
    f"--vocab-file {VOCAB} --merge-file {MERGES}"
)


class TextRunner(StreamRunner):
    """Train on texts that are tokenized during training."""

    def argv(self, flags: str) -> list[str]:
        sizes = SIZES.replace("--vocab-size 5000", "")
        argv = (
            f"{sizes} --dataset-format parquet --data-path {self.data} --global-batch-size 12 "
            f"--split 90,10,0 --micro-batch-size 1 --save {self.folder} --load {self.folder} "
            f"{TEXT} {flags}"
        )
        return argv.split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    documents = texts()
    # Empty texts, too. Each gives an end-of-document token. Two files have no other texts.
    with_empty = [text for document in documents for text in (document, "")]
    for number in range(4):
        write_rows(folder / "web" / f"{number}.parquet", "text", with_empty[number::4], group=17)
    return folder


def drop_eos(argv: list[str]) -> list[str]:
    """Return a command line without --eos-token."""
    place = argv.index("--eos-token")
    return argv[:place] + argv[place + 2 :]


def make_runner(pool: ProcessPool, data: Path, folder: Path) -> TextRunner:
    return TextRunner(pool, str(data), folder)


GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
# In most of them, micro-batch x data-parallel size does not divide the 10 shards.
LAYOUTS = [
    (GRID, 4),
    ("--pipeline-model-parallel-size 2 --micro-batch-size 4 --num-workers 0", 2),
    ("--tensor-model-parallel-size 2 --micro-batch-size 2", 4),
]


def test_a_kill_inside_an_iteration(pool: ProcessPool, data: Path, tmp_path: Path) -> None:
    """Every launch is killed between two saves, and resumed at another layout."""
    expected = make_runner(pool, data, tmp_path / "whole")
    expected("--save-interval 4")
    run = make_runner(pool, data, tmp_path / "run")
    for number, (flags, ranks) in enumerate(LAYOUTS):
        saved = 2 * number + 2
        launch = Launch(run.argv(f"{flags} --save-interval 2"), ranks, tmp_path / f"log{number}")
        launch.wait_for_line(f"iteration        {saved + 1}/")
        assert launch.kill() == list(range(ranks))
    run("--save-interval 4 --micro-batch-size 6", ranks=2)
    assert run.losses() == pytest.approx(expected.losses(), rel=1e-6)
    assert run.state(8) == expected.state(8)


def test_another_data_set_on_resume_with_few_documents_for_validation(
    pool: ProcessPool, data: Path, tmp_path: Path
) -> None:
    """The validation data have fewer shards from then on."""
    write_dataset(tmp_path / "rows" / "web", make_documents(600, 0))
    write_dataset(tmp_path / "rows" / "small", make_documents(60, 1))
    run = StreamRunner(pool, str(tmp_path / "rows"), tmp_path / "run")
    flags = "--eval-iters 1 --eval-interval 4"
    run(f"{flags} --datasets web --weights 1 --exit-interval 4")
    output = run(f"{flags} --datasets web,small --weights 1,1 --exit-interval 8")
    assert "validation" in output
    run(f"{flags} --datasets web --weights 1")
    assert sorted(run.losses()) == list(range(1, 11))


def test_empty_documents_among_few_for_validation(pool: ProcessPool, tmp_path: Path) -> None:
    """Without special tokens, an empty document has no tokens."""
    documents = make_documents(100, 0)
    for number in (91, 95, 97):
        documents[number] = []
    write_rows(tmp_path / "rows" / "web" / "a.parquet", "tokens", documents)
    run = StreamRunner(pool, str(tmp_path / "rows"), tmp_path / "run")
    flags = "--eval-iters 2 --eval-interval 4 --datasets web --weights 1 --train-iters 8"
    output = succeed(pool.run(1, pretrain, drop_eos(run.argv(flags))))
    assert output.count("validation loss at iteration") == 2


def test_a_shard_that_is_empty_in_one_epoch(pool: ProcessPool, tmp_path: Path) -> None:
    """Each epoch gives a shard another document, and some documents are empty."""
    for number, document in enumerate(make_documents(10, 0, longest=60)):
        rows = [[] if number in (2, 6) else document]
        write_rows(tmp_path / "rows" / "web" / f"{number}.parquet", "tokens", rows)
    run = StreamRunner(pool, str(tmp_path / "rows"), tmp_path / "run")
    flags = "--datasets web --weights 1 --split 1,0,0 --logical-shards 10"
    argv = drop_eos(run.argv(f"{flags} --exit-interval 4"))
    succeed(pool.run(2, pretrain, argv))
    succeed(pool.run(3, pretrain, drop_eos(run.argv(flags))))
    whole = StreamRunner(pool, str(tmp_path / "rows"), tmp_path / "whole")
    succeed(pool.run(1, pretrain, drop_eos(whole.argv(flags))))
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-6)
    assert run.state(10) == whole.state(10)
    for shard, epoch in enumerate(run.state(10)["stream"]["datasets"][0]["epoch"]):
        assert epoch > 4, shard
