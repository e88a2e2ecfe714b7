"""A corpus of shards: faults, resumes, failures, the manifest, and reading it as one data set."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from data.file_server import serve
from preprocess.corpus_inputs import write_inputs
from preprocess.corpus_runs import make_corpus, make_environment
from tiny_corpus import GPT2, MERGES, REFERENCE_PREFIX, ROOT, VOCAB, data_files

from megatron.base.errors import ConfigError, DataError
from megatron.commands.parts import open_indexed
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.data.registry import DatasetRegistry
from megatron.data.tokenizer_record import check_tokenizers_of_data, read_record
from megatron.extras.preparation.commands import inspect_dataset, merge_datasets, preprocess
from megatron.extras.preparation.corpus import shards
from megatron.extras.preparation.corpus.joined import JoinedDataset
from megatron.extras.preparation.corpus.shards import CorpusJob, ShardMaker, list_inputs

FLAGS = ("--vocab-file", VOCAB, "--merge-file", MERGES, "--append-eod", "--engine", "local")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus in whose making two workers were killed, one of them twice."""
    folder = tmp_path_factory.mktemp("corpus")
    paths = write_inputs(folder / "in")
    faults = folder / "faults"
    faults.mkdir()
    for fault in ("a kill 1", "a kill 2", "e kill 1"):
        (faults / fault).touch()
    result = make_corpus(
        folder / "corpus",
        *("--input", *map(str, paths), "--engine", "local", "--workers", "2"),
        environment=make_environment(faults),
    )
    assert result.code == 0, result.output
    assert not list(faults.iterdir())
    assert "attempt 2 of 3" in result.output
    return result.manifest


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of the corpus, which a test may damage."""
    shutil.copytree(made.with_suffix(""), tmp_path / "corpus")
    return Path(shutil.copy(made, tmp_path / "corpus.json"))


def change(manifest: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(manifest.read_text())
    edit(content)
    manifest.write_text(json.dumps(content))


def test_shards_have_the_bytes_of_the_local_tool_whatever_was_killed(
    made: Path, tmp_path: Path
) -> None:
    """Merged they are the reference, and each is what the tool makes of its file."""
    merged = tmp_path / "merged"
    assert merge_datasets.main(["--input", str(made), "--output-prefix", str(merged)]) == 0
    assert data_files(merged) == data_files(REFERENCE_PREFIX)
    assert not list(made.with_suffix("").glob(".new-*"))
    for shard in json.loads(made.read_text())["shards"]:
        if shard["documents"]:
            flags = ["--input", shard["input"], "--output-prefix", str(tmp_path / "one")]
            files = ["--vocab-file", VOCAB, "--merge-file", MERGES, "--append-eod", "--overwrite"]
            assert preprocess.main([*flags, *files]) == 0
            one = data_files(tmp_path / "one_text_document")
            assert one == data_files(made.parent / shard["path"])


def test_files_behind_urls_give_the_same_shards(made: Path, tmp_path: Path) -> None:
    """Names in messages are those of the URLs."""
    folder = made.parent / "in"
    flags = ["--vocab-file", VOCAB, "--merge-file", MERGES, "--append-eod", "--engine", "local"]
    given = ["--input", f"file://{folder}", "--output-prefix", str(tmp_path / "corpus"), *flags]
    assert preprocess.main([*given, "--workers", "1"]) == 0
    shards = json.loads((tmp_path / "corpus.json").read_text())["shards"]
    assert [shard["sha256"] for shard in shards] == [
        shard["sha256"] for shard in json.loads(made.read_text())["shards"]
    ]
    assert shards[0]["input"] == f"file://{folder}/a.jsonl"
    assert sorted(path.suffix for path in (tmp_path / "corpus").iterdir() if path.is_dir()) == [""]


def test_files_of_other_file_systems_are_copied(tmp_path: Path) -> None:
    """Tasks are other processes, which do not see this one's memory, so none is started."""
    system = fsspec.filesystem("memory")
    for name in ("b.jsonl", "deep/a.jsonl.gz", ".hidden.jsonl", "picture.png"):
        system.pipe(f"/corpus-test/{name}", name.encode())
    inputs = list_inputs(["memory://corpus-test", "memory://corpus-test/b.jsonl"], print)
    names = [f"memory://corpus-test/{name}" for name in ("b.jsonl", "deep/a.jsonl.gz", "b.jsonl")]
    assert [each.path for each in inputs] == names
    for each in inputs[:2]:
        copied = Path(each.fetch(tmp_path, print))
        assert each.path.endswith(f"/{copied.name}")
        assert copied.read_text() == each.path.removeprefix("memory://corpus-test/")
    system.pipe("/corpus-test/b.jsonl", b"longer than before")
    with pytest.raises(DataError, match="has changed since it was listed"):
        inputs[0].fetch(tmp_path, print)


def test_missing_packages_and_engines_of_urls_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, protocol, extra in (("s3fs", "s3", "s3"), ("gcsfs", "gs", "gs")):
        monkeypatch.setitem(sys.modules, package, None)
        url = f"{protocol}://bucket/folder"
        files = ["--vocab-file", VOCAB, "--merge-file", MERGES]
        given = ["--input", url, "--output-prefix", str(tmp_path / "corpus"), *files]
        assert preprocess.main([*given, "--engine", "local"]) == 2
        error = capfd.readouterr().err
        assert f"{url} cannot be opened" in error
        assert f"pip install 'megatron-3d[remote,{extra}]'" in error
        (needed,) = extras["optional-dependencies"][extra]
        assert needed.startswith(package)
        assert preprocess.main(given) == 2
        assert f"--input {url} is a URL. Only" in capfd.readouterr().err


def test_joined_shards_are_the_merged_data_set(made: Path) -> None:
    joined = open_indexed(str(made))
    merged = IndexedDataset(REFERENCE_PREFIX)
    assert joined.compute_fingerprint() == merged.compute_fingerprint()
    assert joined.sizes.tolist() == merged.sizes.tolist()
    assert joined.document_offsets.tolist() == merged.document_offsets.tolist()
    for number in range(len(merged)):
        np.testing.assert_array_equal(joined[number], merged[number])
    joined.check_not_truncated()


def test_resume_makes_only_what_is_missing_or_changed(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made.parent, tmp_path / "all")
    manifest = tmp_path / "all" / "corpus.json"
    inputs = [shard["input"] for shard in json.loads(made.read_text())["shards"]]
    before = json.loads(manifest.read_text())["shards"]
    first, second, *_ = sorted(manifest.with_suffix("").glob("*.bin"))
    content = bytearray(first.read_bytes())
    content[7] ^= 1
    first.write_bytes(content)
    second.unlink()
    flags = ["--vocab-file", VOCAB, "--merge-file", MERGES, "--engine", "local", "--workers", "1"]
    given = ["--input", *inputs, "--output-prefix", str(manifest.with_suffix("")), *flags]
    assert preprocess.main([*given, "--append-eod"]) == 0
    output = capfd.readouterr().err
    assert output.count("the shard is complete") == 3
    assert "ended with exit code" not in output
    assert output.count("the shard has changed and is made again") == 1
    assert json.loads(manifest.read_text())["shards"] == before
    assert preprocess.main(given) == 2
    assert "was made, or started, with another append_eod" in capfd.readouterr().err


def test_failed_files_and_documents_are_listed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    write_inputs(folder)
    (folder / "broken.parquet").write_bytes(b"PAR1")
    (folder / "keys.jsonl").write_text('{"body": "x"}\n')
    (folder / "lines.jsonl").write_text('{"text": "one"}\nno JSON\n{"text": 2}\n')
    (folder / "cut.jsonl.gz").write_bytes((folder / "b.jsonl.gz").read_bytes()[:-40])
    flags = ["--vocab-file", VOCAB, "--merge-file", MERGES, "--on-bad-line", "skip"]
    given = ["--input", str(folder), "--output-prefix", str(tmp_path / "corpus"), *flags]
    assert preprocess.main([*given, "--engine", "local", "--workers", "1"]) == 1
    output = capfd.readouterr().err
    content = json.loads((tmp_path / "corpus.json").read_text())
    failed = {Path(name).name: reason for name, reason in content["failed_files"].items()}
    assert sorted(failed) == ["broken.parquet", "cut.jsonl.gz", "keys.jsonl"]
    assert "none of its documents is usable, such as line 1: no key 'text'" in failed["keys.jsonl"]
    for name, reason in failed.items():
        assert f"FAILED: {folder / name}: {reason}" in output
    (lines,) = [each for each in content["shards"] if each["input"].endswith("lines.jsonl")]
    assert (lines["documents"], lines["bad_documents"]) == (1, 2)
    assert [bad.partition(":")[0] for bad in lines["first_bad_documents"]] == ["line 2", "line 3"]
    for bad in lines["first_bad_documents"]:
        assert f"bad document left out: {folder / 'lines.jsonl'}: {bad}" in output
    assert content["bad_documents"] == 2
    registry = DatasetRegistry(None)
    registry.open_indexed = open_indexed
    registry.open(str(tmp_path / "corpus.json"))
    assert "lacks the documents of 3 input files" in registry.notes[0]
    merged = ["--input", str(tmp_path / "corpus.json"), "--output-prefix", str(tmp_path / "merged")]
    assert merge_datasets.main(merged) == 0
    assert "lacks the documents of 3 input files" in capfd.readouterr().err
    # With the file repaired, the same command makes its shard.
    (folder / "keys.jsonl").write_text('{"text": "x"}\n')
    assert preprocess.main([*given, "--engine", "local", "--workers", "1"]) == 1
    content = json.loads((tmp_path / "corpus.json").read_text())
    assert len(content["failed_files"]) == 2


def test_bad_lines_may_be_left_out_later_but_not_the_other_way_round(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The shards that were made with "stop" are kept. Those with fewer documents are not silent."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.jsonl").write_text('{"text": "one"}\n')
    (folder / "lines.jsonl").write_text('{"text": "two"}\nno JSON\n')
    flags = ["--vocab-file", VOCAB, "--merge-file", MERGES, "--engine", "local", "--workers", "1"]
    given = ["--input", str(folder), "--output-prefix", str(tmp_path / "corpus"), *flags]
    assert preprocess.main(given) == 1
    assert "or add --on-bad-line skip, which leaves such lines out" in capfd.readouterr().err
    assert preprocess.main([*given, "--on-bad-line", "skip"]) == 0
    assert f"{folder / 'good.jsonl'}: the shard is complete" in capfd.readouterr().err
    content = json.loads((tmp_path / "corpus.json").read_text())
    assert [shard["documents"] for shard in content["shards"]] == [1, 1]
    assert (content["failed_files"], content["bad_documents"]) == ({}, 1)
    assert preprocess.main(given) == 2
    assert "was made, or started, with another on_bad_line" in capfd.readouterr().err
    assert json.loads((tmp_path / "corpus.json").read_text()) == content
    # The shard of the file with a bad line is made again, and the good one is kept.
    assert preprocess.main([*given, "--overwrite"]) == 1
    assert f"{folder / 'good.jsonl'}: the shard is complete" in capfd.readouterr().err
    (failed,) = json.loads((tmp_path / "corpus.json").read_text())["failed_files"]
    assert failed == str(folder / "lines.jsonl")


def test_inspection_compares_digests_and_reports_each_shard(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_dataset.main([str(copy)]) == 0
    assert capsys.readouterr().out.count("_text_document: ") == 5
    largest = max(copy.with_suffix("").glob("*.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)
    assert inspect_dataset.main([str(copy)]) == 2
    assert f"{largest} has the SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a//x", 3, "\0", "\ud800"])
def test_manifest_leads_nowhere_else(copy: Path, path: object) -> None:
    change(copy, lambda content: content["shards"][1].update(path=path))
    with pytest.raises(DataError, match="no manifest of a corpus"):
        open_indexed(str(copy))


def test_damaged_manifests_and_shards_are_refused(copy: Path) -> None:
    """Values, rules and fixes are in the messages."""
    files = [copy.parent / shard["path"] for shard in json.loads(copy.read_text())["shards"]]
    intact = copy.read_text()

    def refuse(message: str) -> None:
        with pytest.raises(DataError, match=message):
            open_indexed(str(copy))
        copy.write_text(intact)

    change(copy, lambda content: content.update(version=2))
    refuse("it has version 2, and this program reads version 1")
    change(copy, lambda content: content["shards"].pop(3))
    refuse("records 100 documents, and its shards have 99, so a shard was removed")
    change(copy, lambda content: content["shards"][0].update(documents=3))
    change(copy, lambda content: content.update(documents=66))
    refuse("has 37 documents and .* records 3 and .*Preprocess the input file again")
    change(copy, lambda content: content["shards"][0].update(tokens=-1))
    refuse("no integer from 0 on")
    change(copy, lambda content: content.update(shards=[]))
    refuse("it has no shard")
    change(copy, lambda content: content["shards"][0].update(sha256=["0" * 64] * 2))
    refuse("has the SHA-256 .* records 000")
    copy.write_text("[" * 100_000)
    refuse("no manifest of a corpus")
    index = Path(f"{files[1]}.idx")
    whole = index.read_bytes()
    # A document that lies elsewhere, in a file of the same size.
    index.write_bytes(whole[:-9] + b"\x01" + whole[-8:])
    refuse(r"\.idx has the SHA-256")
    index.write_bytes(whole[:-1])
    refuse("has .* bytes, and .* records .*Copy the corpus again")
    index.unlink()
    refuse("cannot be read .No such file")
    copy.unlink()
    os.mkfifo(copy)
    for read in (open_indexed, read_record):
        with pytest.raises(DataError, match="is not a regular file"):
            read(str(copy))


def test_file_that_changes_in_use_and_another_tokenizer_are_found(copy: Path) -> None:
    joined = open_indexed(str(copy))
    assert isinstance(joined, JoinedDataset)
    largest = max(joined.parts, key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.truncate(10)
    with pytest.raises(DataError, match="was changed while it is in use"):
        joined.check_not_truncated()
    check_tokenizers_of_data(GPT2, [str(copy)])
    other = copy.parent / "other.json"
    other.write_text(Path(VOCAB).read_text() + " ")
    config = TokenizerConfig(vocab_file=str(other), merge_file=MERGES)
    with pytest.raises(ConfigError, match="made with another tokenizer"):
        check_tokenizers_of_data(config, [str(copy)])


def test_file_that_ends_its_task_does_not_keep_the_others_from_their_shards(tmp_path: Path) -> None:
    """The largest file ends the only task each time."""
    folder = tmp_path / "in"
    write_inputs(folder)
    (folder / "e.parquet").unlink()
    faults = tmp_path / "faults"
    faults.mkdir()
    for number in range(3):
        (faults / f"a kill {number}").touch()
    result = make_corpus(
        tmp_path / "corpus",
        *("--input", str(folder), "--engine", "local", "--workers", "1"),
        environment=make_environment(faults),
    )
    assert result.code == 1, result.output
    content = json.loads(result.manifest.read_text())
    assert list(content["failed_files"]) == [str(folder / "a.jsonl")]
    assert len(content["shards"]) == 3


def test_tasks_end_with_a_tool_that_is_killed(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in")
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "a stop 1").touch()
    given = ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "corpus"), *FLAGS]
    tool = subprocess.Popen(
        [sys.executable, "tools/preprocess_data.py", *given, "--workers", "1"],
        cwd=ROOT,
        env=make_environment(faults),
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not (faults / "a stopped").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    tool.send_signal(signal.SIGKILL)
    # The stopped task has the same standard error, so this returns when it has ended too.
    tool.communicate(timeout=60)
    assert not (tmp_path / "corpus.json").exists()


def test_output_in_the_folder_of_unusual_inputs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second command finds the same inputs, and a renamed folder has a manifest that opens."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "left.jsonl").write_text('{"text": "left"}\n')
    folder = tmp_path / "in"
    folder.mkdir()
    for number, name in enumerate((b"x" * 249, b"\xff.of.\xe6", "日 本".encode())):
        Path(os.fsdecode(bytes(folder) + b"/" + name + b".jsonl")).write_text(
            json.dumps({"text": f"text {number}"}) + "\r\n", encoding="utf-8-sig"
        )
    (folder / "link").symlink_to(tmp_path / "plain")

    def make(prefix: str) -> dict[str, Any]:
        given = ["--input", str(folder), "--output-prefix", str(folder / prefix), *FLAGS]
        assert preprocess.main([*given, "--workers", "1"]) == 0
        output = capfd.readouterr().err
        assert f"1 link to a folder left out, such as {folder / 'link'}" in output
        assert ("--input left out, since this --output-prefix" in output) == bool(manifests)
        manifests.append(json.loads((folder / f"{prefix}.json").read_text()))
        return manifests[-1]

    manifests: list[dict[str, Any]] = []
    assert make("corpus")["documents"] == 3
    assert make("corpus") == manifests[0]
    shutil.move(folder / "corpus", folder / "renamed")
    (folder / "corpus.json").unlink()
    assert [shard["sha256"] for shard in make("renamed")["shards"]] == [
        shard["sha256"] for shard in manifests[0]["shards"]
    ]
    assert len(open_indexed(str(folder / "renamed.json"))) == 3


def test_outputs_and_flags_that_cannot_be_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file of records with the name of the manifest stays."""
    (tmp_path / "one.jsonl").write_text('{"text": "one"}\n')

    def refuse(message: str, *flags: str, source: str = "one.jsonl") -> None:
        given = ["--input", str(tmp_path / source), "--output-prefix", str(tmp_path / "corpus")]
        assert preprocess.main([*given, *FLAGS, "--workers", "1", *flags]) == 2
        assert message in capfd.readouterr().err

    records = Path(shutil.copy(tmp_path / "one.jsonl", tmp_path / "corpus.json"))
    refuse("--input has no file except those that --output-prefix writes", source="corpus.json")
    refuse("corpus.json would be replaced by the manifest, and", "--overwrite")
    assert records.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    records.unlink()
    (tmp_path / "corpus").touch()
    refuse("corpus is a file, and with --engine it is the folder")
    (tmp_path / "corpus").unlink()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "made_with.json").write_text("[1")
    refuse("made_with.json is damaged")
    refuse("--slurm-args=--time=5 needs --engine slurm", "--slurm-args=--time=5")
    words = ("--engine", "slurm", "--slurm-args=--comment='x", "--overwrite")
    refuse("--slurm-args=--comment='x cannot be divided into words: No closing quotation", *words)


@pytest.mark.parametrize("kind", ["", "file://"])
def test_file_that_changes_while_it_is_read_fails(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new content has the same size."""
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "one"}\n')

    def then_change(read: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            result = read(*arguments)
            path.write_text('{"text": "two"}\n')
            os.utime(path, ns=(1, 1))
            return result

        return wrapped

    monkeypatch.setattr(ShardMaker, "_encode_file", then_change(ShardMaker._encode_file))
    monkeypatch.setattr(shards.shutil, "copyfileobj", then_change(shutil.copyfileobj))
    (source,) = shards.list_inputs([f"{kind}{path}"], print)
    (tmp_path / "corpus").mkdir()
    job = CorpusJob(str(tmp_path / "corpus"), "text", True, "stop", GPT2)
    ShardMaker(job, print).make(source)
    result = job.find_result(source, job.made_with)
    assert isinstance(result, str)
    assert "has changed since it was listed" in result


def test_secrets_of_urls_are_neither_printed_nor_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two URLs that differ only in the query have two shards, and two failures."""
    web = tmp_path / "web"
    web.mkdir()
    (web / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    (web / "b.jsonl").write_text('{"body": "one"}\n')
    with serve(web) as (url, _):
        base = url.replace("://", "://user:SECRET@")
        names = [f"{name}?key=SECRET{i}" for name in ("a.jsonl.gz", "b.jsonl") for i in (1, 2)]
        given = ["--input", *(f"{base}/{name}" for name in names), *FLAGS, "--workers", "1"]
        assert preprocess.main([*given, "--output-prefix", str(tmp_path / "corpus")]) == 1
    content = json.loads((tmp_path / "corpus.json").read_text())
    assert (len(content["shards"]), len(content["failed_files"])) == (2, 2)
    output = capfd.readouterr()
    kept = [path.read_bytes() for path in (tmp_path / "corpus").rglob("*") if path.is_file()]
    kept += [(tmp_path / "corpus.json").read_bytes(), (output.out + output.err).encode()]
    assert not [each for each in kept if b"SECRET" in each]
