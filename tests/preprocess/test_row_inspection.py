"""The tool that inspects files of rows, as --dataset-format reads them."""

import json
from pathlib import Path

import pytest
import tiny_corpus
from data.file_server import serve
from data.row_files import make_documents, write_rows
from tiny_corpus import MERGES, VOCAB

from megatron.extras.preparation.commands import inspect_dataset as inspect_tool

FORMATS = {"parquet": "a.parquet", "arrow": "a.stream.arrow", "jsonl": "a.jsonl"}


def inspect(capsys: pytest.CaptureFixture[str], path: Path | str, *flags: str) -> tuple[int, dict]:
    """Return the exit code and the findings of the tool."""
    code = inspect_tool.main([str(path), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_tokens_and_separators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    documents = [[*ids, 7, 7] for ids in make_documents(3000, seed=1)]
    write_rows(tmp_path / FORMATS[format], "ids", documents, group=500)
    flags = ["--dataset-format", format, "--col-name", "ids"]
    code, found = inspect(capsys, tmp_path, *flags)
    assert code == 0
    assert found["rows"] == 3000
    assert found["row_groups"] == {"parquet": 6, "arrow": 2, "jsonl": 3}[format]
    assert found["kinds"] == ["tokens"]
    assert found["tokens"] == (None if format == "jsonl" else sum(map(len, documents)))
    assert found["columns"][0]["ids"].startswith("list")
    assert found["last_ids"][0] == [7, 1.0]
    assert found["lengths"][0][1] >= 3
    assert found["lengths"][-1][1] <= 42
    assert ["doubled separator" in problem for problem in found["problems"]] == [True]
    assert inspect(capsys, tmp_path / FORMATS[format], *flags, "--strict")[0] == 1
    write_rows(tmp_path / FORMATS[format], "ids", [ids[:-2] for ids in documents], group=500)
    _, without = inspect(capsys, tmp_path, *flags)
    assert any("no separator" in problem for problem in without["problems"])


def test_damaged_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        write_rows(tmp_path / f"{number}.parquet", "text", ["one", "two"] * 100, group=50)
    torn = (tmp_path / "1.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(torn[:-100])
    write_rows(tmp_path / "2.parquet", "body", ["one"])
    # The footer is good, and the rows are not.
    changed = bytearray(torn)
    changed[4:400] = bytes(396)
    (tmp_path / "3.parquet").write_bytes(changed)
    code, found = inspect(capsys, tmp_path, "--dataset-format", "parquet")
    assert code == 1
    for name in ("1.parquet", "2.parquet", "3.parquet"):
        assert any(name in message for message in found["damaged"])
    assert not any("0.parquet" in message for message in found["damaged"])
    assert len(found["columns"]) == 2
    assert inspect_tool.main([str(tmp_path), "--dataset-format", "parquet"]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_texts_with_a_tokenizer_and_behind_a_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["", *tiny_corpus.texts()]
    write_rows(tmp_path / "web" / "a.jsonl", "text", texts)
    flags = ["--dataset-format", "jsonl"]
    _, found = inspect(capsys, tmp_path / "web", *flags)
    assert found["unit"] == "characters"
    with serve(tmp_path / "web") as (url, _server):
        cache = ["--data-cache-path", str(tmp_path / "cache")]
        code, found = inspect(
            capsys, url, *flags, *cache, "--vocab-file", VOCAB, "--merge-file", MERGES
        )
    assert code == 0
    assert found["unit"] == "tokens"
    assert found["rows"] == 101
    assert [problem.split(":")[0] for problem in found["problems"]] == ["empty documents"]


def test_a_folder_without_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_tool.main([str(tmp_path), "--dataset-format", "arrow"]) == 2
    assert "no files with the ending" in capsys.readouterr().err
