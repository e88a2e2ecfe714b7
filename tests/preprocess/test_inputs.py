"""The formats of the inputs, and what the first run of a new user meets."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_corpus
from preprocess.test_preprocess import SMALL, documents, flags, job, run, write_lines
from tiny_corpus import EOD, GPT2, JSONL, REFERENCE_PREFIX, data_files

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.extras.preparation.commands.train_tokenizer import train_bpe
from megatron.extras.preparation.preprocess import encoders
from megatron.extras.preparation.preprocess.encoders import sample_texts
from megatron.extras.preparation.preprocess.input_files import expand_inputs
from megatron.extras.preparation.preprocess.inputs import Position, extract_texts, read_blocks
from megatron.tokenizer.build import build_tokenizer

TEXTS = tiny_corpus.texts()


BEGINNING = Position()


def read_texts(*paths: Path, block_bytes: int = SMALL, start: Position = BEGINNING) -> list[str]:
    """Return the texts of files, read in small blocks."""
    found = list[str]()
    for block in read_blocks([str(path) for path in paths], ["text"], start, block_bytes):
        (texts,), bad = extract_texts(block, ["text"])
        assert not bad
        found += texts
    return found


def write_arrow(path: Path, batches: list[list[str]]) -> Path:
    """Write an Arrow file as Hugging Face datasets does, in stream format."""
    pa = pytest.importorskip("pyarrow")
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for texts in batches:
            rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
            stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    return path


def save_dataset(folder: Path, **state: Any) -> Path:
    """Write a folder like that of `save_to_disk`, with the fixture's texts in two files."""
    folder.mkdir(parents=True)
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    write_arrow(folder / names[0], [TEXTS[:30], TEXTS[30:45]])
    write_arrow(folder / names[1], [TEXTS[45:]])
    files = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(files | state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


# Formats


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("block_bytes", [1, 3000, 1 << 30])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_an_array_gives_the_texts_of_its_records(
    tmp_path: Path, indent: int | None, block_bytes: int, suffix: str
) -> None:
    records = [{"id": n, "text": text, "more": [{"a": None}]} for n, text in enumerate(TEXTS)]
    content = json.dumps(records, indent=indent, ensure_ascii=False).encode()
    path = tmp_path / f"in{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    assert read_texts(path, block_bytes=block_bytes) == TEXTS
    assert set(sample_texts([str(path)], ["text"])) <= {text[:16_000] for text in TEXTS}


def test_an_array_continues_after_each_block(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(
        b'\xef\xbb\xbf [\n {"text": "\xc3\xa9 }],["},{"text":"b\\\\"} ,\n{"text":"c"}\n]\n'
    )
    texts = ["é }],[", "b\\", "c"]
    assert read_texts(path, block_bytes=1) == texts
    blocks = list(read_blocks([str(path)], ["text"], block_bytes=1))
    assert [block.first_line for block in blocks] == [1, 2, 3]
    for number, block in enumerate(blocks, 1):
        assert read_texts(path, block_bytes=1, start=block.end) == texts[number:]


@pytest.mark.parametrize(
    ("content", "records"),
    [
        (b'[{"text": "a"}, {"text": "b"', 1),
        (b'[{"text": "a"}, {"text": "b', 1),
        (b'[{"text": "a"} {"text": "b"}]', 1),
        (b'[{"text": "a"}] {"text": "b"}', 1),
        (b'[{"text": "a"},]', 1),
        (b'[{"text": nothing}, ' + b'{"text": "b"}, ' * 1000 + b"]", 0),
        (b'[{"text": "a"}, ' + b"[" * 100_000, 1),
        (b"[", 0),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_an_array_that_is_not_closed_or_not_json_is_an_error(
    tmp_path: Path, content: bytes, records: int, block_bytes: int
) -> None:
    (tmp_path / "in.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"in.json is not a JSON array .*\(after {records} rec"):
        read_texts(tmp_path / "in.json", block_bytes=block_bytes)


def test_a_record_of_an_array_without_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory would grow until the system ends the process."""
    module = "megatron.extras.preparation.preprocess.inputs"
    monkeypatch.setattr(f"{module}._LONGEST_RECORD_BYTES", 1000)
    (tmp_path / "in.json").write_text('[{"text": "' + "a" * 900 + '"}, {"text": "b"}]')
    assert len(read_texts(tmp_path / "in.json", block_bytes=100)) == 2
    (tmp_path / "in.json").write_text('[{"text": "a"}, {"text": "' + "b" * 5000)
    with pytest.raises(DataError, match=r"a record has more than .*\(after 1 records\)"):
        read_texts(tmp_path / "in.json", block_bytes=100)


def test_an_empty_array_has_no_document(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(" [ ]\n")
    assert read_texts(tmp_path / "in.json") == []


def test_a_record_of_an_array_may_be_bad(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('[{"text": "a"}, ["b"], 12, {"text": "c"}]')
    messages: list[str] = []
    done = run(job(tmp_path / "out", tmp_path / "in.json", on_bad_line="skip"), messages)
    assert done.documents["text"] == 2
    assert "in.json:2: must be a JSON object, is list" in messages[0]
    assert "in.json:3: must be a JSON object, is int" in messages[1]


def test_a_file_of_plain_text_is_one_document(tmp_path: Path) -> None:
    texts = ["one\n\ntwo\r\n", "three é\n", "four"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + texts[0].encode())
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(texts[1].encode()))
    (tmp_path / "c.TXT").write_text(texts[2])
    # A file with this suffix is text if it is named, and no document of a folder.
    (tmp_path / "c2.rst").write_text("five")
    (tmp_path / "d.text").write_text(" \n\n")
    (tmp_path / "e.txt").write_text("")
    run(job(tmp_path / "out", *sorted(tmp_path.iterdir())))
    encode = build_tokenizer(GPT2).encode
    expected = [[*encode(text), EOD] for text in [*texts, "five"]]
    assert documents(tmp_path / "out_text_document") == expected


def test_a_run_on_plain_text_continues_at_the_next_file(tmp_path: Path) -> None:
    for name, content in (("a.txt", b"a"), ("b.txt", b"\xff"), ("c.txt", b"c")):
        (tmp_path / name).write_bytes(content)
    given = job(tmp_path / "out", *sorted(tmp_path.glob("*.txt")))
    with pytest.raises(DataError, match=r"b.txt:1: not UTF-8 text"):
        run(given)
    messages: list[str] = []
    assert run(replace(given, on_bad_line="skip"), messages).documents == {"text": 2}
    assert "continuing an interrupted run: 1 lines are done" in messages[0]


def test_plain_text_has_one_key_and_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="is plain text, which has one text"):
        run(job(tmp_path / "out", tmp_path / "a.txt", json_keys=("text", "title")))
    monkeypatch.setattr("megatron.extras.preparation.preprocess.inputs._LONGEST_TEXT_BYTES", 4)
    with pytest.raises(DataError, match="is one document"):
        run(job(tmp_path / "out", tmp_path / "a.txt"))


def test_a_folder_stands_for_its_files(tmp_path: Path) -> None:
    """Subfolders are included. Hidden files and files with other suffixes are left out."""
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    write_lines(folder / "b.jsonl", {"text": "second"})
    (folder / "a.txt").write_text("first")
    (folder / "deep" / "c.md").write_text("third")
    (folder / ".git" / "d.txt").write_text("hidden")
    (folder / ".e.txt").write_text("hidden")
    (folder / "f.pdf").write_bytes(b"%PDF")
    messages: list[str] = []
    run(job(tmp_path / "out", folder), messages)
    decode = build_tokenizer(GPT2).decode
    found = [decode(ids[:-1]) for ids in documents(tmp_path / "out_text_document")]
    assert found == ["first", "second", "third"]
    assert "3 files (1 .jsonl, 1 .md, 1 .txt)" in messages[0]
    assert "1 other file left out, such as" in messages[1]
    made = train_bpe([str(folder)], 300, str(tmp_path / "tokenizer"))
    assert made.size > 257


def test_a_recursive_glob_uses_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for path in (tmp_path / "a.txt", tmp_path / "deep" / "b.txt"):
        path.write_text("text")
    messages: list[str] = []
    found = expand_inputs([f"{tmp_path}/**"], messages.append)
    assert found == [f"{tmp_path}/a.txt", f"{tmp_path}/deep/b.txt"]
    assert messages == []


def test_a_subfolder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="closed"):
        expand_inputs([str(tmp_path)], print)


def test_suffixes_in_capitals_are_known(tmp_path: Path) -> None:
    path = tmp_path / "CORPUS.JSONL.GZ"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n'))
    assert read_texts(path) == ["one"]
    assert sample_texts([str(path)], ["text"]) == ["one"]


def test_a_column_of_lists_holds_no_texts(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lists = pa.array([["a", "b"], ["c"]])
    parquet.write_table(pa.table({"text": lists}), tmp_path / "lists.parquet")
    with pytest.raises(DataError, match="not strings"):
        read_texts(tmp_path / "lists.parquet")
    codes = pa.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(pa.table({"text": codes}), tmp_path / "codes.parquet")
    assert read_texts(tmp_path / "codes.parquet") == ["a", "b", "a"]


def test_a_folder_of_save_to_disk_gives_the_bytes_of_the_reference(tmp_path: Path) -> None:
    """Only the files that its state.json names are read."""
    folder = save_dataset(tmp_path / "saved")
    (folder / "cache-1234.arrow").write_bytes(b"not read")
    run(job(tmp_path / "out", folder, block_bytes=2000))
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)
    blocks = list(read_blocks([str(folder / "data-00000-of-00002.arrow")], ["text"]))
    for end in (Position(0, 7, 7), Position(0, 30, 30), blocks[-1].end):
        rest = read_texts(folder / "data-00000-of-00002.arrow", start=end)
        assert rest == TEXTS[end.offset : 45]
    assert len(sample_texts([str(folder / "data-00001-of-00002.arrow")], ["text"])) > 20


def test_damaged_folders_of_save_to_disk_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"_data_files": [{"filename": "data-7.arrow"}]}, "is not in the folder"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "is not in the folder"),
        ({"_data_files": None}, "names no data files"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "is a selection of rows"),
    ]
    write_arrow(tmp_path / "x.arrow", [["a"]])
    for number, (state, reason) in enumerate(cases):
        folder = save_dataset(tmp_path / str(number), **state)
        with pytest.raises(DataError, match=reason):
            run(job(tmp_path / "out", folder))
    (folder / "state.json").write_text("[")
    with pytest.raises(DataError, match=r"state.json cannot be read as JSON"):
        run(job(tmp_path / "out", folder))
    splits = tmp_path / "splits"
    save_dataset(splits / "train")
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"several splits .*splits/train, .*splits/test"):
        run(job(tmp_path / "out", splits))
    (tmp_path / "bad.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match="cannot be read as Arrow"):
        run(job(tmp_path / "out", tmp_path / "bad.arrow"))


# The first run


def test_a_run_without_documents_does_not_block_the_corrected_command(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"content": "a", "id": 5}, {"content": "b", "id": 6})
    given = job(tmp_path / "out", path)
    with pytest.raises(DataError, match="no key 'text', only 'content', 'id'") as raised:
        run(given)
    assert "--json-keys" in str(raised.value)
    assert "Correct the file or the command" in str(raised.value)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["in.jsonl"]
    # The journal of a run that was killed before its first document.
    journal = tmp_path / "out.journal"
    with pytest.raises(DataError, match="gave no document"):
        run(replace(given, on_bad_line="skip", journal_seconds=0, block_bytes=1))
    assert journal.exists()
    assert run(replace(given, json_keys=("content",))).documents == {"content": 2}
    assert not journal.exists()


def test_a_message_names_only_some_of_many_keys(tmp_path: Path) -> None:
    record = {f"number{n}": n for n in range(100)} | {"body": "text"}
    path = write_lines(tmp_path / "in.jsonl", record)
    with pytest.raises(DataError, match=r"only 'body', 'number0', .*'number6' and 93 more;"):
        run(job(tmp_path / "out", path))
    write_lines(path, {})
    with pytest.raises(DataError, match="no key 'text', only an empty object"):
        run(job(tmp_path / "out", path))


def test_a_finished_data_set_is_replaced_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.extras.preparation.commands import preprocess as tool

    assert tool.main(flags(tmp_path / "out", "--input", str(JSONL))) == 0
    assert capsys.readouterr().err.count("without --append-eod") == 1
    before = data_files(tmp_path / "out_text_document")
    again = flags(tmp_path / "out", "--input", str(JSONL), "--append-eod")
    assert tool.main(again) == 2
    error = capsys.readouterr().err
    assert "exists already" in error
    assert "--overwrite" in error
    assert "without --append-eod" not in error
    assert data_files(tmp_path / "out_text_document") == before
    assert tool.main([*again, "--overwrite"]) == 0
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)


def test_a_trained_tokenizer_json_gives_the_same_ids(tmp_path: Path) -> None:
    made = train_bpe([str(JSONL)], 600, str(tmp_path / "tokenizer"))
    by_files = TokenizerConfig(vocab_file=str(made.vocab), merge_file=str(made.merges))
    by_folder = TokenizerConfig(
        tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(tmp_path / "tokenizer")
    )
    first = build_tokenizer(by_files)
    second = build_tokenizer(by_folder)
    assert (first.eod, first.vocab_size) == (second.eod, second.vocab_size) == (599, 600)
    awkward = "naïve <|endoftext|> 漢字\n\n  x"
    for text in (*TEXTS[:20], awkward):
        assert first.encode(text) == second.encode(text)
        assert second.decode(second.encode(text)) == text
    run(job(tmp_path / "a", tokenizer=by_files))
    run(job(tmp_path / "b", tokenizer=by_folder))
    assert data_files(tmp_path / "a_text_document") == data_files(tmp_path / "b_text_document")


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    """Reading them may wait permanently."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for pattern in ("pipe.jsonl", "zero.jsonl", "*.jsonl", ""):
        with pytest.raises(ConfigError, match=r"(pipe|zero)\.jsonl is not a regular file"):
            expand_inputs([str(tmp_path / pattern)], print)


def test_the_first_block_of_a_compressed_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed file may be one very long line, and each of 64 spots would parse it again."""
    path = tmp_path / "in.jsonl.gz"
    lines = "".join(f'{{"text": "text {n}"}}\n' for n in range(300))
    path.write_bytes(gzip.compress(lines.encode()))
    calls: list[object] = []

    def count(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return read_blocks(*args, **options)

    monkeypatch.setattr(encoders, "read_blocks", count)
    assert len(sample_texts([str(path)], ["text"])) == 64
    assert len(calls) == 1
