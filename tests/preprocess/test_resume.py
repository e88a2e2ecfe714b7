"""A run that is cut off anywhere goes on to the same bytes; one that is not the same run does not."""

import fcntl
import gzip
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from test_preprocess import JSONL, SMALL, by_reference, job, run, write_lines
from tiny_corpus import MERGES, REFERENCE_PREFIX, VOCAB, command, data_files

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.preprocess import pipeline, resumable
from megatron.preprocess.journal import Journal
from megatron.preprocess.pipeline import preprocess

SLOW_RUN = """
import sys, time
from megatron.config.data import TokenizerConfig
from megatron.preprocess import pipeline
save = pipeline._save
def slow(*given):
    save(*given)
    print("saved", flush=True)
    time.sleep(0.05)
pipeline._save = slow
if __name__ == "__main__":
    job = pipeline.PreprocessJob((sys.argv[1],), sys.argv[2], TokenizerConfig(vocab_file=sys.argv[3], merge_file=sys.argv[4]),
        append_eod=True, workers=2, block_bytes=int(sys.argv[5]), journal_seconds=0)
    pipeline.preprocess(job, choose=lambda *_: "reference")
"""


class Cut(BaseException):
    """The run ends here."""


def test_kill_9_in_the_middle(tmp_path: Path) -> None:
    """A real process with two workers, killed after its fifth journal entry. The workers end too."""
    script = tmp_path / "slow_run.py"
    script.write_text(SLOW_RUN)
    process = command(script, JSONL, tmp_path / "out", VOCAB, MERGES, str(SMALL))
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == "saved\n", (
            process.stderr.read() if process.stderr else ""
        )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out_text_document.idx").exists()
    deadline = time.monotonic() + 20
    while any(_alive(int(child)) for child in children):
        assert time.monotonic() < deadline, f"workers {children} outlived their parent"
        time.sleep(0.05)
    said: list[str] = []
    run(job(tmp_path / "out"), said)
    assert "going on with an interrupted run" in said[0]
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)
    assert not [
        path
        for path in tmp_path.iterdir()
        if path.suffix in (".partial", ".journal", ".lock", ".new")
    ]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _cut_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The run ends before its step-th write of the journal, rename or removal, with half a block in the data files."""
    count = 0

    def counted(function):  # type: ignore[no-untyped-def]
        def wrapper(*given):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count == step:
                raise Cut
            return function(*given)

        return wrapper

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Journal, "save", counted(Journal.save))
    monkeypatch.setattr(Journal, "delete", counted(Journal.delete))
    monkeypatch.setattr(resumable, "sync_folder", counted(resumable.sync_folder))


@pytest.mark.parametrize("suffix", ["jsonl", "gz", "parquet"])
def test_cut_off_at_every_step(tmp_path: Path, suffix: str) -> None:
    """Two keys, several blocks; whichever step is the last one before the end, the next run comes to the same files."""
    lines = [{"text": f"number {n}", "title": f"title {n}"} for n in range(60)]
    path = write_lines(tmp_path / "in.jsonl", *lines)
    if suffix == "gz":
        path = tmp_path / "in.gz"
        path.write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        path = tmp_path / "in.parquet"
        parquet.write_table(pa.Table.from_pylist(lines), path, row_group_size=25)
    job_of = job(
        tmp_path / "whole",
        path,
        path,
        json_keys=("text", "title"),
        block_bytes=1000,
        journal_seconds=0,
    )
    run(job_of)
    expected = [data_files(tmp_path / f"whole_{key}_document") for key in ("text", "title")]
    run(replace(job_of, output_prefix=str(tmp_path / "old"), append_eod=False))
    old = data_files(tmp_path / "old_text_document")
    steps = 0
    while True:
        steps += 1 if suffix == "jsonl" else 3
        cut = replace(job_of, output_prefix=str(tmp_path / f"cut{steps}"))
        former = tmp_path / f"cut{steps}_text_document"  # what an earlier job left there
        for ending, content in zip((".bin", ".idx"), old, strict=True):
            Path(f"{former}{ending}").write_bytes(content)
        with pytest.MonkeyPatch.context() as patch:
            _cut_at(patch, steps)
            try:
                run(cut)
                break
            except Cut:
                stands = Path(f"{former}.idx").exists()
                assert not stands or data_files(former) in (old, expected[0]), (
                    f"old and new are mixed after step {steps}"
                )
        run(cut)
        assert [
            data_files(tmp_path / f"cut{steps}_{key}_document") for key in ("text", "title")
        ] == expected, steps
        assert not list(tmp_path.glob(f"cut{steps}*.partial")) + list(
            tmp_path.glob(f"cut{steps}.journal")
        )
    assert steps > 15  # several journal entries, and every rename


def _interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pipeline.PreprocessJob:
    """A job whose first run ended after some blocks."""
    path = write_lines(tmp_path / "in.jsonl", *[{"text": f"number {n}"} for n in range(60)])
    given = job(tmp_path / "out", path, block_bytes=200, journal_seconds=0)
    with monkeypatch.context() as patch:
        _cut_at(patch, 9)
        with pytest.raises(Cut):
            run(given)
    return given


def test_another_run_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = _interrupted(tmp_path, monkeypatch)
    changed = "belongs to an interrupted run with other {}; this one cannot continue it"
    with pytest.raises(ConfigError, match=changed.format("--append-eod")):
        run(replace(given, append_eod=False))
    with pytest.raises(ConfigError, match=changed.format("--input")):
        run(replace(given, input=(*given.input, str(JSONL))))
    (tmp_path / "merges.txt").write_bytes(Path(MERGES).read_bytes().replace(b"0.2", b"0.3"))
    with pytest.raises(ConfigError, match=changed.format("tokenizer")):
        run(
            replace(
                given,
                tokenizer=TokenizerConfig(
                    vocab_file=VOCAB, merge_file=str(tmp_path / "merges.txt")
                ),
            )
        )
    os.utime(given.input[0], (1, 1))
    with pytest.raises(ConfigError, match=changed.format("--input")):
        run(given)
    (tmp_path / "out.journal").unlink()
    assert run(given).documents == {"text": 60}


def test_damaged_journal_and_lost_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = _interrupted(tmp_path, monkeypatch)
    journal = (tmp_path / "out.journal").read_text()
    (tmp_path / "out.journal").write_text(journal[:-20])
    with pytest.raises(
        DataError, match=r"journal of an interrupted run, cannot be read .* Delete it to start over"
    ):
        run(given)
    (tmp_path / "out.journal").write_text(json.dumps(json.loads(journal) | {"version": 99}))
    with pytest.raises(ConfigError, match="interrupted run with other version"):
        run(given)
    (tmp_path / "out.journal").write_text(journal)
    (tmp_path / "out_text_document.bin.partial").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"has 0 bytes, but the journal of the interrupted run says \d+"
    ):
        run(given)


def test_a_lock_that_its_owner_has_just_removed_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def too_late(*given) -> None:  # type: ignore[no-untyped-def]
        (tmp_path / "out.lock").unlink()
        real(*given)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with pytest.raises(ConfigError, match="another run is writing it"):
        run(job(tmp_path / "out"))


def test_a_document_beyond_the_format(tmp_path: Path) -> None:
    import numpy as np

    writer = resumable.ResumableWriter(str(tmp_path / "out"), np.dtype(np.uint16))
    empty = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (1 << 31,), (0,))
    with pytest.raises(
        DataError, match="a document of 2147483648 tokens is longer than the format's limit"
    ):
        writer.add_documents(empty, np.array([1 << 31]))
    writer.close()


def test_a_worker_that_dies_is_named_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.preprocess import workers

    given = job(tmp_path / "out", workers=2, block_bytes=3000)
    real = workers._Pool._receive

    def kill_one(pool: workers._Pool, connection, block):  # type: ignore[no-untyped-def]
        if block.first_line > 50:
            pool._processes[connection].kill()
            pool._processes[connection].join()
            with suppress(EOFError):
                connection.recv_bytes()  # what it had sent before
        return real(pool, connection, block)

    with monkeypatch.context() as patch:
        patch.setattr(workers._Pool, "_receive", kill_one)
        with pytest.raises(
            DataError,
            match=r"worker process \d+ ended with exit code -9 in .*openwebtext-100.jsonl, lines \d+ to \d+",
        ):
            run(given)
    with monkeypatch.context() as patch:
        real_send = workers._Pool._send

        def kill_before(pool: workers._Pool, connection, block):  # type: ignore[no-untyped-def]
            pool._processes[connection].kill()
            pool._processes[connection].join()
            real_send(pool, connection, block)

        patch.setattr(workers._Pool, "_send", kill_before)
        with pytest.raises(DataError, match=r"ended with exit code -9"):
            run(given)
    preprocess(given, say=lambda _: None, choose=by_reference)
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)


@pytest.mark.parametrize(
    ("name", "error"),
    [("out.lock", ConfigError), ("out_text_document.bin.partial", OSError)],
)
def test_a_link_is_not_written_through(tmp_path: Path, name: str, error: type[Exception]) -> None:
    """A link in the place of the lock or of a partial file is refused; its target stays."""
    target = tmp_path / "precious"
    target.write_text("keep me")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(error):
        run(job(tmp_path / "out"))
    assert target.read_text() == "keep me"
