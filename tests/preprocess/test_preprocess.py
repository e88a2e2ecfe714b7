"""Preprocessing: the bytes of the output, bad lines and wrong flags.

The bytes are the reference's for every input format, number of workers and library.
"""

import builtins
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_corpus
from shared_data import shared_dir
from tiny_corpus import EOD, GPT2, JSONL, MERGES, REFERENCE_PREFIX, VOCAB, data_files

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.extras.preparation.commands import preprocess as preprocess_data
from megatron.extras.preparation.preprocess.build_dataset import PreprocessJob, Summary, preprocess
from megatron.extras.preparation.preprocess.encoders import CANDIDATES, REFERENCE, choose_encoder
from megatron.extras.preparation.preprocess.inputs import InputBlock, Position, extract_texts
from megatron.extras.preparation.preprocess.journal import lock_output
from megatron.tokenizer.build import build_tokenizer

# Bytes of a block. The fixture has 29 blocks of this size.
SMALL = 1 << 14


def job(output: Path, *inputs: Path | str, **changes: Any) -> PreprocessJob:
    """Return a job for the fixture's texts, or for other inputs."""
    paths = tuple(str(path) for path in inputs or (JSONL,))
    made = PreprocessJob(
        input=paths, output_prefix=str(output), tokenizer=GPT2, append_eod=True, block_bytes=SMALL
    )
    return replace(made, **changes)


def by_reference(*_: object) -> str:
    """Choose the tokenizer itself as the encoder."""
    return REFERENCE


def run(given: PreprocessJob, messages: list[str] | None = None) -> Summary:
    """Run a job with the tokenizer itself, and append its messages to `messages`."""
    received = [] if messages is None else messages
    return preprocess(given, log=received.append, choose=by_reference)


def encode_line(line: bytes | dict) -> bytes:
    if isinstance(line, dict):
        return json.dumps(line).encode()
    return line


def write_lines(path: Path, *lines: bytes | dict) -> Path:
    """Write lines, of which dictionaries become JSON records."""
    path.write_bytes(b"".join(encode_line(line) + b"\n" for line in lines))
    return path


def documents(prefix: Path | str) -> list[list[int]]:
    """Return the tokens of each document of a data set."""
    dataset = IndexedDataset(prefix)
    assert dataset.document_offsets.tolist() == list(range(len(dataset) + 1))
    return [dataset.get(number).tolist() for number in range(len(dataset))]


def flags(output: Path, *more: str) -> list[str]:
    """Return the flags of the tool for an output."""
    return ["--output-prefix", str(output), "--vocab-file", VOCAB, "--merge-file", MERGES, *more]


def test_the_tool_gives_the_bytes_of_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags are those of Megatron, which also have underscores."""
    megatron_flags = [
        "--input",
        str(JSONL),
        "--dataset_impl",
        "mmap",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--append-eod",
    ]
    more = ["--json_keys", "text", "--workers", "2"]
    assert preprocess_data.main(flags(tmp_path / "out", *megatron_flags, *more)) == 0
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)
    assert "100 documents, " in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out_text_document.bin",
        "out_text_document.idx",
        "out_text_document.tokenizer.json",
    ]


def test_the_complete_corpus_gives_the_bytes_of_the_reference(tmp_path: Path) -> None:
    folder = shared_dir("data", "openwebtext-1000")
    given = ["--input", str(folder / "openwebtext-1000.jsonl"), "--append-eod", "--workers", "1"]
    assert preprocess_data.main(flags(tmp_path / "meg-gpt2-openwebtext", *given)) == 0
    name = "meg-gpt2-openwebtext_text_document"
    assert data_files(tmp_path / name) == data_files(folder / name)


@pytest.mark.parametrize("encoder", ["gigatoken", "tiktoken"])
def test_every_library_gives_the_same_bytes(tmp_path: Path, encoder: str) -> None:
    pytest.importorskip(encoder)
    preprocess(job(tmp_path / "out"), log=lambda _: None, choose=lambda *_: encoder)
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)


@pytest.mark.parametrize(("workers", "block_bytes"), [(1, 1), (1, 1 << 30), (3, 3000)])
def test_the_bytes_do_not_depend_on_workers_or_blocks(
    tmp_path: Path, workers: int, block_bytes: int
) -> None:
    run(job(tmp_path / "out", workers=workers, block_bytes=block_bytes))
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)


def test_several_inputs_in_all_formats_give_the_bytes_of_the_reference(tmp_path: Path) -> None:
    """Four parts in four formats are read in order, those of the glob in the order of names."""
    zstandard = pytest.importorskip("zstandard")
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = JSONL.read_bytes().splitlines(keepends=True)
    (tmp_path / "b2.jsonl.zst").write_bytes(
        zstandard.ZstdCompressor().compress(b"".join(lines[25:30]))
        + zstandard.ZstdCompressor().compress(b"".join(lines[30:50]))
    )
    (tmp_path / "b1.jsonl.gz").write_bytes(
        gzip.compress(b"".join(lines[:20])) + gzip.compress(b"".join(lines[20:25]))
    )
    texts = pa.table({"text": tiny_corpus.texts()[50:75], "other": list(range(25))})
    parquet.write_table(texts, tmp_path / "a.parquet", row_group_size=4)
    (tmp_path / "a.json").write_bytes(b"".join(lines[75:]))
    run(job(tmp_path / "out", tmp_path / "b*", tmp_path / "a.parquet", tmp_path / "a.json"))
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)


def test_parquet_with_dictionaries_and_nulls_is_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pa.array(["a b", None, "c", "a b"]).dictionary_encode()
    parquet.write_table(pa.table({"text": column}), tmp_path / "in.parquet")
    messages: list[str] = []
    done = run(job(tmp_path / "out", tmp_path / "in.parquet", on_bad_line="skip"), messages)
    assert done.documents["text"] == 3
    assert done.bad_lines == 1
    assert f"{tmp_path / 'in.parquet'}:2: the value of 'text' is null" in messages[0]


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow", "in.jsonl", "in.json"])
def test_null_texts_are_bad_lines_in_each_format(name: str, tmp_path: Path) -> None:
    """A column whose values are all null has no type of strings."""
    path = tmp_path / name
    rows = [{"text": None}] * 3
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        pa = pytest.importorskip("pyarrow")
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".jsonl":
        write_lines(path, *rows)
    else:
        path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=":1: the value of 'text' is null, not a string") as stopped:
        run(job(tmp_path / "stopped", path))
    assert "--json-keys" not in str(stopped.value)
    good = write_lines(tmp_path / "z.jsonl", {"text": "a b"})
    messages: list[str] = []
    done = run(job(tmp_path / "out", path, good, on_bad_line="skip"), messages)
    assert (done.bad_lines, done.documents) == (3, {"text": 1})
    assert sum("is null" in message for message in messages) == 3


@pytest.mark.parametrize("in_text", [False, True])
@pytest.mark.parametrize("encoder", [REFERENCE, "gigatoken", "tiktoken"])
def test_a_text_that_spells_a_special_token(in_text: bool, encoder: str, tmp_path: Path) -> None:
    if encoder != REFERENCE:
        pytest.importorskip(encoder)
    (tmp_path / "tok").mkdir()
    backend: Any = build_tokenizer(GPT2).backend  # type: ignore[attr-defined]
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tok" / "tokenizer.json"))
    tokenizer = TokenizerConfig(
        tokenizer_type="PretrainedFromHF",
        tokenizer_name_or_path=str(tmp_path / "tok"),
        special_tokens_in_text=in_text,
    )
    text = "a <|endoftext|> b<|endoftext|>"
    path = write_lines(tmp_path / "in.jsonl", {"text": text}, {"text": "c"})
    messages: list[str] = []

    def choose(*arguments: Any) -> str:
        rejected = [name for name in CANDIDATES if name != encoder]
        chosen = choose_encoder(arguments[0], arguments[1], rejected, messages.append)
        # tiktoken itself knows no special tokens.
        expected = REFERENCE if in_text and encoder == "tiktoken" else encoder
        assert chosen == expected, messages
        return chosen

    done = preprocess(job(tmp_path / "out", path, tokenizer=tokenizer), print, choose)
    first, second = documents(tmp_path / "out_text_document")
    assert first.count(EOD) == (3 if in_text else 1)
    assert second.count(EOD) == 1
    if not in_text:
        assert first[:-1] == build_tokenizer(GPT2).encode(text)
    assert done.special_tokens is not None
    assert done.special_tokens.startswith("texts spell 2 special tokens, and each ")
    assert ("became this token" in done.special_tokens) == in_text


def test_two_keys_give_two_data_sets(tmp_path: Path) -> None:
    lines = [{"text": "a b", "title": ""}, {"text": "c", "title": "d e"}]
    done = run(
        job(
            tmp_path / "out",
            write_lines(tmp_path / "in.jsonl", *lines),
            json_keys=("text", "title"),
            append_eod=False,
        )
    )
    assert done.documents == {"text": 2, "title": 1}
    assert len(documents(tmp_path / "out_text_document")) == 2
    assert all(EOD not in ids for ids in documents(tmp_path / "out_title_document"))


def test_empty_documents_and_blank_lines_are_left_out(tmp_path: Path) -> None:
    """The reference leaves out empty documents, too.

    A byte order mark, CRLF and a last line without newline are not errors.
    """
    content = [
        b'\xef\xbb\xbf{"text": "a"}\r\n\n   \n{"text": ""}\n',
        b'{"text": "b\\u2028c", "score": NaN}\n{"text": "d"}',
    ]
    (tmp_path / "in.jsonl").write_bytes(b"".join(content))
    done = run(job(tmp_path / "out", tmp_path / "in.jsonl", append_eod=True))
    assert done.documents["text"] == 3
    assert done.bad_lines == 0
    tokenizer = build_tokenizer(GPT2)
    assert documents(tmp_path / "out_text_document") == [
        [*tokenizer.encode(text), EOD] for text in ("a", "b\u2028c", "d")
    ]


def test_a_document_may_be_far_longer_than_a_block(tmp_path: Path) -> None:
    text = " ".join(tiny_corpus.texts())
    path = write_lines(tmp_path / "in.jsonl", {"text": "a"}, {"text": text}, {"text": "b"})
    run(job(tmp_path / "out", path, block_bytes=1000))
    assert [len(ids) > 100_000 for ids in documents(tmp_path / "out_text_document")] == [
        False,
        True,
        False,
    ]


BAD = [
    (b'{"text": "cut', "not JSON: "),
    (b'{"txt": "a"}', "no key 'text'"),
    (b'{"text": 5}', "the value of 'text' is int, not a string"),
    (b'["text"]', "must be a JSON object, is list"),
    (b'{"text": "\xff"}', "not JSON: 'utf-8' codec can't decode"),
    (b'{"text": "\\ud800"}', "holds half a surrogate pair"),
    (b"[" * 100_000, "not JSON: "),
]


@pytest.mark.parametrize("fast", [True, False])
def test_bad_lines_are_reported_with_file_and_number(
    tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        hide(monkeypatch, "orjson")
    lines = [line for bad, _ in BAD for line in (b'{"text": "a"}', bad)]
    path = write_lines(tmp_path / "in.jsonl", *lines, *[b"x"] * 120)
    messages: list[str] = []
    done = run(job(tmp_path / "out", path, on_bad_line="skip"), messages)
    assert done.documents["text"] == len(BAD)
    assert done.bad_lines == len(BAD) + 120
    for number, (_, reason) in enumerate(BAD):
        assert f"{path}:{2 * number + 2}: {reason}" in messages[number]
    assert len(messages) == 101
    assert "further bad lines are only counted" in messages[-1]


@pytest.mark.parametrize("fast", [True, False])
def test_half_a_surrogate_pair_is_bad_only_in_a_text(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both parsers agree, however the half is written. A complete pair is one character."""
    if fast:
        pytest.importorskip("orjson")
    else:
        hide(monkeypatch, "orjson")
    halves = [r"a\ud800", r"\uDFFFb", r"\ude00\ud83d", r"\ud800\u0041", r"\ud800\ud800\udc00"]
    good = [r'{"text": "\uD83D\ude00"}', r'{"text": "a", "other\ud800": "\udfff"}']
    lines = [*(f'{{"text": "{half}"}}' for half in halves), *good]
    content = "\n".join(lines).encode()
    block = InputBlock("in.jsonl", 1, content, Position(0, len(content), len(lines)), len(content))
    texts, bad = extract_texts(block, ["text"])
    assert texts == [["\U0001f600", "a"]]
    assert [line.line for line in bad] == [1, 2, 3, 4, 5]
    assert all("half a surrogate pair" in line.reason for line in bad)


def test_a_run_that_stopped_at_a_bad_line_continues_after_it(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "in.jsonl",
        *[{"text": f"a{n}"} for n in range(50)],
        b"{",
        *[{"text": f"b{n}"} for n in range(50)],
    )
    stopping = job(tmp_path / "out", path, block_bytes=40)
    with pytest.raises(DataError, match=f"{path}:51: not JSON") as raised:
        run(stopping)
    assert "With --on-bad-line skip the run continues" in str(raised.value)
    assert not (tmp_path / "out_text_document.idx").exists()
    messages: list[str] = []
    assert run(replace(stopping, on_bad_line="skip"), messages).documents == {"text": 100}
    assert "continuing an interrupted run: 48 lines are done, up to 48 of" in messages[0]


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make the import of packages fail."""
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.split(".")[0] in names:
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.mark.parametrize(("name", "package"), [("in.zst", "zstandard"), ("in.parquet", "pyarrow")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    hide(monkeypatch, package)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=f"pip install {package}"):
        run(job(tmp_path / "out", tmp_path / name))


def test_damaged_inputs_are_named(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    content = JSONL.read_bytes()
    parquet.write_table(
        pa.table({"text": [1, 2], "title": ["a", "b"]}), tmp_path / "numbers.parquet"
    )
    damaged = {
        "cut.gz": gzip.compress(content)[:-100],
        "not.gz": content,
        "cut.zst": zstandard.ZstdCompressor().compress(content)[:-100],
        "not.zst": content,
        "not.parquet": content,
    }
    for name, written in damaged.items():
        (tmp_path / name).write_bytes(written)
    messages = {
        "cut.gz": "cannot be read: Compressed file ended",
        "not.gz": "cannot be read: Not a gzipped file",
        "cut.zst": "is truncated: it ends inside a zstd frame",
        "not.zst": "cannot be read: ",
        "not.parquet": "cannot be read as Parquet",
        "numbers.parquet": "column 'text' holds int64, not strings",
    }
    for name, message in messages.items():
        with pytest.raises(DataError, match=f"{tmp_path / name}:? {message}"):
            run(job(tmp_path / "out", tmp_path / name))
        (tmp_path / "out.journal").unlink(missing_ok=True)
    with pytest.raises(DataError, match="has no column 'body', only text, title"):
        run(job(tmp_path / "out", tmp_path / "numbers.parquet", json_keys=("body",)))


def test_wrong_flags_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    cases: list[tuple[PreprocessJob, str]] = [
        (job(tmp_path / "o", "none.jsonl"), "--input none.jsonl does not exist"),
        (job(tmp_path / "o", tmp_path / "*.none"), r"--input .*\*.none matches no file"),
        (job(tmp_path / "o", tmp_path / "folder"), r"folder has no file that can be read"),
        (job(tmp_path / "o", input=()), "--input needs at least one file"),
        (job(tmp_path / "o", workers=0), "--workers 0 must be at least 1"),
        (
            job(tmp_path / "o", json_keys=("a", "a")),
            "--json-keys a a must name at least one key",
        ),
        (job(tmp_path / "o", json_keys=("a/b",)), "must not contain '/'"),
        (job(tmp_path / "o", tokenizer=TokenizerConfig()), "needs --vocab-file"),
    ]
    for given, message in cases:
        with pytest.raises(ConfigError, match=message):
            run(given)
    assert preprocess_data.main(flags(tmp_path / "o", "--input", "none.jsonl")) == 2
    assert capsys.readouterr().err.startswith("error: --input none.jsonl does not exist")
    with pytest.raises(SystemExit) as refused:
        preprocess_data.main(flags(tmp_path / "o", "--input", str(JSONL), "--no-such-flag"))
    assert refused.value.code == 2
    with pytest.raises(ConfigError, match=r"cannot be written"):
        run(job(Path("/proc/none"), JSONL))


def test_inputs_without_documents_are_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"text": ""})
    with pytest.raises(DataError, match="1 lines, 0 of them bad, gave no document"):
        run(job(tmp_path / "out", path))
    assert not list(tmp_path.glob("*.idx"))


def test_an_input_that_is_given_twice_is_reported(tmp_path: Path) -> None:
    messages: list[str] = []
    assert run(job(tmp_path / "out", JSONL, JSONL), messages).documents == {"text": 200}
    assert "more than once" in messages[0]


def test_output_in_the_folder_of_the_inputs_is_left_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", {"text": "one"}, {"text": "two"})
    given = job(tmp_path / "out", tmp_path, overwrite=True)
    run(given)
    before = data_files(tmp_path / "out_text_document")
    messages: list[str] = []
    run(given, messages)
    assert data_files(tmp_path / "out_text_document") == before
    assert any("1 file of --input left out, since this --output" in each for each in messages)


def test_a_second_run_on_one_output_is_refused(tmp_path: Path) -> None:
    with (
        lock_output(str(tmp_path / "out")),
        pytest.raises(ConfigError, match="another run is writing it"),
    ):
        run(job(tmp_path / "out"))
    run(job(tmp_path / "out"))


def test_large_vocabularies_are_written_as_int32(tmp_path: Path) -> None:
    """The vocabulary has 70,000 ids, of which uint16 could not store the last ones."""
    import tokenizers

    backend: tokenizers.Tokenizer = build_tokenizer(GPT2).backend  # type: ignore[attr-defined]
    backend.add_special_tokens([f"<extra{number}>" for number in range(65_000)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig(
        tokenizer_type="PretrainedFromHF",
        tokenizer_name_or_path=str(tmp_path),
        special_tokens_in_text=True,
    )
    path = write_lines(tmp_path / "in.jsonl", {"text": "a<extra64999>"})
    run(job(tmp_path / "out", path, tokenizer=config))
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.int32
    assert documents(tmp_path / "out_text_document") == [[64, 69_999, EOD]]
