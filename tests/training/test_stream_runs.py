"""Runs with --dataset-format, as black boxes: layouts, resumes at other sizes, skips, refusals."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from data.file_server import serve
from data.row_files import make_dirty_documents, make_documents, write_dataset, write_rows
from faults.launches import Launch
from process_pool import ProcessPool, pretrain, succeed
from training.runs import SIZES, Runner

from megatron.observe.metrics import read_metrics

FLAGS = "--datasets web,code --weights 3,1 --col-name tokens --eos-token 4999 --logical-shards 12"


class StreamRunner(Runner):
    """Train in a folder on Parquet files."""

    def argv(self, flags: str) -> list[str]:
        argv = (
            f"{SIZES} --dataset-format parquet --data-path {self.data} --global-batch-size 12 "
            f"--split 90,10,0 --micro-batch-size 1 --save {self.folder} --load {self.folder} "
            f"{FLAGS} {flags}"
        )
        return argv.split()

    def losses(self) -> dict[int, float]:
        entries = read_metrics(self.folder / "metrics.jsonl")
        return {entry["iteration"]: entry["lm_loss"] for entry in entries if "lm_loss" in entry}

    def filter_counts(self) -> dict[int, dict]:
        entries = read_metrics(self.folder / "metrics.jsonl")
        return {entry["iteration"]: entry["filters"] for entry in entries if "filters" in entry}

    def state(self, iteration: int) -> dict:
        manifest = self.folder / f"global_step{iteration}" / "manifest.json"
        return json.loads(manifest.read_text())["state"]["data"]["train"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_dataset(folder / "web", make_documents(600, 0), group=70)
    write_dataset(folder / "code", make_documents(200, 1), group=70)
    return folder


@pytest.fixture
def run(pool: ProcessPool, data: Path, tmp_path: Path) -> StreamRunner:
    return StreamRunner(pool, str(data), tmp_path / "run")


@pytest.fixture
def other(pool: ProcessPool, data: Path, tmp_path: Path) -> StreamRunner:
    return StreamRunner(pool, str(data), tmp_path / "other")


def test_ranks_layouts_and_resumes_change_nothing(run: StreamRunner, other: StreamRunner) -> None:
    output = other("--save-interval 10")
    assert "streamed, 2 data sets, 12 logical shards" in output
    expected = other.losses()
    run("--exit-interval 3 --save-interval 3", ranks=3)
    run("--exit-interval 5 --tensor-model-parallel-size 2 --micro-batch-size 2", ranks=4)
    run("--exit-interval 8 --micro-batch-size 3", ranks=2)
    run("--save-interval 10")
    assert run.losses() == pytest.approx(expected, rel=1e-6)
    assert run.state(10) == other.state(10)


def test_a_skipped_range_and_evaluation(run: StreamRunner, other: StreamRunner) -> None:
    flags = "--skip-train-iteration-range 4-6 --eval-iters 1 --eval-interval 5 --save-interval 10"
    other(flags)
    run(f"{flags} --exit-interval 3", ranks=2)
    run(flags, ranks=3)
    assert list(run.losses()) == [1, 2, 3, 7, 8, 9, 10]
    assert run.losses() == pytest.approx(other.losses(), rel=1e-6)
    assert run.state(10) == other.state(10)


def test_filters_count_the_same_after_a_kill(
    run: StreamRunner, other: StreamRunner, tmp_path: Path
) -> None:
    """The killed run is resumed with another number of ranks."""
    for name, count in (("web", 600), ("code", 200)):
        write_dataset(tmp_path / "dirty" / name, make_dirty_documents(count, count), group=70)
    run.data = other.data = str(tmp_path / "dirty")
    flags = "--max-document-tokens 60 --max-ngram-repetition 0.3 --drop-duplicates"
    output = other(f"{flags} --save-interval 4")
    expected = other.filter_counts()
    assert sorted(expected) == [4, 8, 10]
    for number in (4, 8, 10):
        for name in ("web", "code"):
            counts = expected[number][name]
            left_out = [
                counts["max_document_tokens_documents"],
                counts["max_ngram_repetition_documents"],
                counts["drop_duplicates_documents"],
            ]
            assert min(left_out) > 0
            share = sum(left_out) / counts["documents"]
            assert f"data set {name}: {share:.1%} of {counts['documents']} documents" in output
    assert "more than half" not in output
    launch = Launch(
        run.argv(f"{flags} --save-interval 4"),
        3,
        tmp_path / "logs",
        delays={rank: {"megatron.run.loop.save_at_end": 100.0} for rank in range(3)},
    )
    launch.wait_for_line("iteration       10/")
    assert launch.kill() == [0, 1, 2]
    run(f"{flags} --save-interval 4", ranks=2)
    assert run.filter_counts() == expected
    assert run.losses() == pytest.approx(other.losses(), rel=1e-6)
    assert run.state(10) == other.state(10)


def test_filters_that_leave_out_much(run: StreamRunner, tmp_path: Path) -> None:
    run.data = str(tmp_path)
    write_rows(tmp_path / "long" / "a.parquet", "tokens", [[5], [6] * 50, [7] * 60] * 300)
    flags = "--datasets long --weights 1 --train-iters 4 --save-interval 2"
    output = run(f"{flags} --max-document-tokens 10")
    assert output.count("more than half of the documents of data set long") == 1
    # Without checkpoints, there is a report at the end.
    argv = run.argv(f"{flags} --max-document-tokens 10")
    place = argv.index("--save")
    del argv[place : place + len(["--save", "folder", "--load", "folder"])]
    output = succeed(run.pool.run(2, pretrain, argv))
    assert output.count("data set long: 66.") == 1
    run.folder = tmp_path / "nothing"
    write_rows(tmp_path / "long" / "a.parquet", "tokens", [[6] * 50] * 300)
    error = run.error(f"{flags} --max-document-tokens 10", ranks=2)
    assert "are empty or left out (--max-document-tokens: 100.0%)" in error


def test_what_is_refused_before_training(run: StreamRunner, data: Path, tmp_path: Path) -> None:
    assert "--logical-shards" in run.error("--logical-shards 300")
    assert "holds the token id 1000" in run.error("--vocab-size 500", ranks=2)
    assert "has no column 'text'" in run.error("--col-name text")
    assert "has the entry '../code'" in run.error("--datasets ../code")
    assert "one positive number for each of the 2 data sets" in run.error("--weights 1")
    run("--exit-interval 2")
    assert "--logical-shards 6 differs from the checkpoint's 12" in run.error(
        "--logical-shards 6", ranks=2
    )
    write_rows(tmp_path / "doubled" / "a.parquet", "tokens", [[5, 4999]] * 600)
    run.data = str(tmp_path)
    assert "would be doubled" in run.error("--datasets doubled --weights 1", ranks=2)


def test_a_server_that_fails_twice_changes_nothing(
    run: StreamRunner, other: StreamRunner, data: Path, tmp_path: Path
) -> None:
    other("--save-interval 10")
    cache = f"--data-cache-path {tmp_path}/cache --data-cache-gb 1"
    with serve(data) as (url, server):
        run.data = url
        run(f"{cache} --exit-interval 5 --save-interval 5", ranks=2)
        # Another folder, and nothing is kept in it, so every read goes to the server.
        server.failures["GET"] = 2
        run(f"--data-cache-path {tmp_path}/other-cache --data-cache-gb 0 --save-interval 10")
        assert server.failures["GET"] == 0
        assert "needs --data-cache-path" in run.error()
        run.data = url.replace("//", "//me:secret@")
        message = run.error(cache)
        assert "password" in message
        assert "secret" not in message
    assert run.losses() == pytest.approx(other.losses(), rel=1e-6)
    states = [run.state(10), other.state(10)]
    for state in states:
        for record in state["stream"]["datasets"]:
            # The contents of remote files are those of their ETags.
            del record["sampled"], record["last_change_ns"]
    assert states[0] == states[1]


def write_plain(path: Path, documents: list[list[int]]) -> None:
    """Write a file whose size depends on the lengths of the documents alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))})
    parquet.write_table(table, path, row_group_size=70, compression="none", use_dictionary=False)


def test_files_overwritten_between_launches_are_refused(run: StreamRunner, tmp_path: Path) -> None:
    """The new files have the same names, sizes and row groups."""
    for name, count in (("web", 600), ("code", 200)):
        for number in range(3):
            documents = make_documents(count // 3, number)
            write_plain(tmp_path / "data" / name / f"{number}.parquet", documents)
    run.data = str(tmp_path / "data")
    run("--exit-interval 2")
    # A copy elsewhere, with other modification times, is the same data.
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "data", copy, copy_function=shutil.copyfile)
    run.data = str(copy)
    run("--exit-interval 4", ranks=2)
    file = copy / "web" / "1.parquet"
    size = file.stat().st_size
    write_plain(file, [document[::-1] for document in make_documents(200, 1)])
    assert file.stat().st_size == size
    error = run.error("--exit-interval 6", ranks=2)
    assert "of data set web" in error
    assert f"and other contents. Modified since then: {file}. A run must" in error
    # A program that keeps the modification times hides which file it is.
    os.utime(file, (1e9, 1e9))
    error = run.error("--exit-interval 6")
    assert f"of data set web ({copy}/web)" in error
    assert "No modification time is later, so it is not known which files they are. A" in error
    output = run("--exit-interval 6 --allow-changed-data", ranks=2)
    assert "--allow-changed-data accepts them" in output
    # The next checkpoint records the new files.
    run("--exit-interval 8")
    assert sorted(run.losses()) == list(range(1, 9))
