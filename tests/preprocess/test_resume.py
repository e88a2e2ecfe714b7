"""Interrupted runs.

A run that is interrupted anywhere continues to the same bytes. A run with other inputs or flags
does not continue it.
"""

import fcntl
import gzip
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from preprocess.test_preprocess import JSONL, SMALL, job, run, write_lines
from process_states import has_ended
from tiny_corpus import MERGES, REFERENCE_PREFIX, VOCAB, command, data_files

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.extras.preparation.preprocess import build_dataset, journal
from megatron.extras.preparation.preprocess.inputs import InputBlock, read_blocks
from megatron.extras.preparation.preprocess.journal import Journal

SLOW_RUN = """
import sys, time
from megatron.config.data import TokenizerConfig
from megatron.extras.preparation.preprocess.journal import Journal
from megatron.extras.preparation.preprocess.build_dataset import PreprocessJob, preprocess
save = Journal.save
def save_slowly(journal, progress):
    save(journal, progress)
    print("saved", flush=True)
    time.sleep(0.05)
Journal.save = save_slowly
if __name__ == "__main__":
    input, output, vocab, merges, block_bytes = sys.argv[1:]
    job = PreprocessJob(
        input=(input,),
        output_prefix=output,
        tokenizer=TokenizerConfig(vocab_file=vocab, merge_file=merges),
        append_eod=True,
        workers=2,
        block_bytes=int(block_bytes),
        journal_seconds=0,
    )
    preprocess(job, choose=lambda *_: "reference")
"""


class Interruption(BaseException):
    """The run ends here."""


def test_a_run_that_was_killed_continues_to_the_same_bytes(tmp_path: Path) -> None:
    """A process with two workers is killed after its fifth journal entry. The workers end, too."""
    script = tmp_path / "slow_run.py"
    script.write_text(SLOW_RUN)
    process = command(script, JSONL, tmp_path / "out", VOCAB, MERGES, str(SMALL))
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == "saved\n", (
            process.stderr.read() if process.stderr else ""
        )
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out_text_document.idx").exists()
    deadline = time.monotonic() + 20
    while not all(has_ended(child.pid) for child in children):
        assert time.monotonic() < deadline, f"workers {children} run without their parent"
        time.sleep(0.05)
    messages: list[str] = []
    run(job(tmp_path / "out"), messages)
    assert "continuing an interrupted run" in messages[0]
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)
    left = (".partial", ".journal", ".lock", ".new")
    assert not [path for path in tmp_path.iterdir() if path.suffix in left]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End the run before its step-th write of the journal, rename or removal."""
    count = 0

    def counted(function: Callable) -> Callable:
        def wrapper(*given: object) -> object:
            nonlocal count
            count += 1
            if count == step:
                raise Interruption
            return function(*given)

        return wrapper

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Journal, "save", counted(Journal.save))
    monkeypatch.setattr(Journal, "delete", counted(Journal.delete))
    monkeypatch.setattr(journal, "sync_folder", counted(journal.sync_folder))


@pytest.mark.parametrize("suffix", ["jsonl", "gz", "parquet"])
def test_a_run_interrupted_at_any_step_continues_to_the_same_files(
    tmp_path: Path, suffix: str
) -> None:
    """The job has two keys and several blocks. Its outputs have the names of an older data set."""
    lines = [{"text": f"number {n}", "title": f"title {n}"} for n in range(60)]
    path = write_lines(tmp_path / "in.jsonl", *lines)
    if suffix == "gz":
        path = tmp_path / "in.gz"
        path.write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "in.parquet"
        parquet.write_table(pa.Table.from_pylist(lines), path, row_group_size=25)
    keys = ("text", "title")
    uninterrupted = job(
        tmp_path / "all", path, path, json_keys=keys, block_bytes=1000, journal_seconds=0
    )
    run(uninterrupted)
    expected = [data_files(tmp_path / f"all_{key}_document") for key in keys]
    run(replace(uninterrupted, output_prefix=str(tmp_path / "old"), append_eod=False))
    old = data_files(tmp_path / "old_text_document")
    step = 0
    while True:
        step += 1 if suffix == "jsonl" else 3
        interrupted = replace(
            uninterrupted, output_prefix=str(tmp_path / f"at{step}"), overwrite=True
        )
        output = tmp_path / f"at{step}_text_document"
        for ending, content in zip((".bin", ".idx"), old, strict=True):
            Path(f"{output}{ending}").write_bytes(content)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, step)
            try:
                run(interrupted)
                break
            except Interruption:
                if Path(f"{output}.idx").exists():
                    assert data_files(output) in (old, expected[0]), (
                        f"old and new files are mixed after step {step}"
                    )
        run(interrupted)
        assert [data_files(tmp_path / f"at{step}_{key}_document") for key in keys] == expected, step
        assert not list(tmp_path.glob(f"at{step}*.partial"))
        assert not list(tmp_path.glob(f"at{step}.journal"))
    assert step > 15, "there are several journal entries, and one step for each rename"


def interrupt_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build_dataset.PreprocessJob:
    """Return a job whose first run ended after some blocks."""
    path = write_lines(tmp_path / "in.jsonl", *[{"text": f"number {n}"} for n in range(60)])
    given = job(tmp_path / "out", path, block_bytes=200, journal_seconds=0)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 9)
        with pytest.raises(Interruption):
            run(given)
    return given


def test_another_run_is_refused_and_the_change_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = interrupt_run(tmp_path, monkeypatch)
    changed = "belongs to an interrupted run with other {}; "
    with pytest.raises(ConfigError, match=changed.format("--append-eod")):
        run(replace(given, append_eod=False))
    with pytest.raises(ConfigError, match=changed.format("--input")):
        run(replace(given, input=(*given.input, str(JSONL))))
    (tmp_path / "merges.txt").write_bytes(Path(MERGES).read_bytes().replace(b"0.2", b"0.3"))
    other = TokenizerConfig(vocab_file=VOCAB, merge_file=str(tmp_path / "merges.txt"))
    with pytest.raises(ConfigError, match=changed.format("tokenizer")):
        run(replace(given, tokenizer=other))
    os.utime(given.input[0], (1, 1))
    with pytest.raises(ConfigError, match=changed.format("--input")):
        run(given)
    (tmp_path / "out.journal").unlink()
    assert run(given).documents == {"text": 60}


def test_a_damaged_journal_or_a_lost_output_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = interrupt_run(tmp_path, monkeypatch)
    journal = (tmp_path / "out.journal").read_text()
    (tmp_path / "out.journal").write_text(journal[:-20])
    with pytest.raises(DataError, match="journal of an interrupted run, cannot be read") as raised:
        run(given)
    assert "Delete it to start from scratch" in str(raised.value)
    (tmp_path / "out.journal").write_text(json.dumps(json.loads(journal) | {"version": 99}))
    with pytest.raises(ConfigError, match="interrupted run with other version"):
        run(given)
    (tmp_path / "out.journal").write_text(journal)
    (tmp_path / "out_text_document.bin.partial").write_bytes(b"")
    with pytest.raises(DataError, match=r"has 0 bytes, but the journal .* records \d+"):
        run(given)


def test_a_lock_that_its_owner_has_just_removed_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def remove_and_lock(file: object, operation: int) -> None:
        (tmp_path / "out.lock").unlink()
        lock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with pytest.raises(ConfigError, match="another run is writing it"):
        run(job(tmp_path / "out"))


def test_a_document_that_is_too_long_for_the_format_is_refused(tmp_path: Path) -> None:
    writer = journal.ResumableWriter(str(tmp_path / "out"), np.dtype(np.uint16))
    empty = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (1 << 31,), (0,))
    with pytest.raises(DataError, match="a document of 2147483648 tokens is longer"):
        writer.add_documents(empty, np.array([1 << 31]))
    writer.close()


# With two workers, block 1 is read after one worker has received block 0, so that the other one is
# killed before its first block is sent. Block 2 is read while both workers have a block.
@pytest.mark.parametrize("killed_at", [1, 2, 12])
def test_a_worker_that_dies_is_named_and_the_run_can_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """The workers are killed while the block with the number `killed_at` is read."""
    given = job(tmp_path / "out", workers=2, block_bytes=3000, journal_seconds=0)
    # Other tests of this session may have processes of their own.
    others = multiprocessing.active_children()

    def read_and_kill(*arguments: object) -> Iterator[InputBlock]:
        for number, block in enumerate(read_blocks(*arguments)):  # type: ignore[arg-type]
            if number == killed_at:
                for process in multiprocessing.active_children():
                    if process not in others:
                        process.kill()
                        process.join()
            yield block

    with monkeypatch.context() as patch:
        patch.setattr(build_dataset, "read_blocks", read_and_kill)
        with pytest.raises(DataError, match=r"worker process \d+ ended with exit code") as raised:
            run(given)
    assert "exit code -9 in " in str(raised.value)
    assert f"{JSONL}, lines " in str(raised.value)
    run(replace(given, workers=1))
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)


@pytest.mark.parametrize(
    ("name", "error"),
    [("out.lock", ConfigError), ("out_text_document.bin.partial", OSError)],
)
def test_a_link_is_not_written_through(tmp_path: Path, name: str, error: type[Exception]) -> None:
    """A link in the place of the lock or of a partial file is refused, and its target is kept."""
    target = tmp_path / "precious"
    target.write_text("keep me")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(error):
        run(job(tmp_path / "out"))
    assert target.read_text() == "keep me"
