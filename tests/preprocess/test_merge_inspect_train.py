"""Merging, inspecting and training a vocabulary: the tools as they are called, and what they refuse."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_corpus
from test_preprocess import documents, job, run, write_lines
from tiny_corpus import EOD, JSONL, MERGES, REFERENCE_PREFIX, VOCAB, data_files

from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.errors import ConfigError, DataError
from megatron.preprocess import inspection
from megatron.preprocess.bpe_training import train_bpe
from megatron.preprocess.inspection import inspect_dataset
from megatron.preprocess.merge import merge_datasets
from megatron.tokenizer import build_tokenizer

sys.path.insert(0, str(tiny_corpus.ROOT / "tools"))
import inspect_dataset as inspect_tool
import merge_datasets as merge_tool
import train_tokenizer as train_tool

TOKENIZER = ["--vocab-file", VOCAB, "--merge-file", MERGES]


def written(prefix: Path, *given: list[int], dtype: type = np.uint16) -> str:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for ids in given:
            writer.add_document(np.array(ids, dtype))
    return str(prefix)


def test_merging_the_parts_gives_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, parts = JSONL.read_bytes().splitlines(), []
    for number, (begin, end) in enumerate(((0, 30), (30, 31), (31, 100))):
        run(
            job(
                tmp_path / str(number), write_lines(tmp_path / f"{number}.jsonl", *lines[begin:end])
            )
        )
        parts.append(str(tmp_path / f"{number}_text_document"))
    assert (
        merge_tool.main(["--input", *parts, "--output-prefix", str(tmp_path / "new" / "all")]) == 0
    )
    assert data_files(tmp_path / "new" / "all") == data_files(REFERENCE_PREFIX)
    assert "100 documents" in capsys.readouterr().out


def test_merge_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = written(tmp_path / "a", [1]), written(tmp_path / "b", [1], dtype=np.int32)
    with pytest.raises(DataError, match=r"b holds int32 and .*a uint16"):
        merge_datasets([small, large], str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="is also an --input, which would be lost"):
        merge_datasets([small], str(tmp_path / "x" / ".." / "a"))
    with pytest.raises(ConfigError, match="--input needs at least one data set"):
        merge_datasets([], str(tmp_path / "c"))
    assert (
        merge_tool.main(["--input", str(tmp_path / "none"), "--output-prefix", str(tmp_path / "c")])
        == 2
    )
    assert "none.idx does not exist" in capsys.readouterr().err
    assert not list(tmp_path.glob("c*"))


def test_inspect_finds_nothing_wrong_with_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "lengths.png"
    arguments = [str(REFERENCE_PREFIX), *TOKENIZER, "--strict", "--json", "--plot", str(picture)]
    assert inspect_tool.main(arguments) == 0
    found, dataset = json.loads(capsys.readouterr().out), IndexedDataset(REFERENCE_PREFIX)
    assert (found["documents"], found["tokens"], found["eod"]) == (100, len(dataset.tokens), EOD)
    assert (found["shortest"], found["longest"]) == (dataset.sizes.min(), dataset.sizes.max())
    assert (found["smallest_id"], found["largest_id"], found["vocab_size"]) == (
        dataset.tokens.min(),
        EOD,
        5000,
    )
    assert sum(count for _, _, count in found["histogram"]) == 100
    for low, high, count in found["histogram"]:
        assert count == np.count_nonzero((dataset.sizes >= low) & (dataset.sizes < high))
    assert found["problems"] == []
    assert picture.read_bytes().startswith(b"\x89PNG")


TEXT = [list(range(n, n + 20)) for n in range(40)]


def problems(prefix: str, **known: object) -> dict[str, tuple[int, list[int]]]:
    return {p.kind: (p.count, p.examples) for p in inspect_dataset(prefix, **known).problems}  # type: ignore[arg-type]


def test_inspect_finds_planted_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind, found with documents and tokens taken a few at a time too."""
    corpus = [[*text, EOD] for text in TEXT]
    corpus[3] = [EOD, *TEXT[3], EOD]
    corpus[5] = [*TEXT[5], EOD, EOD]
    corpus[6] = [4998, *TEXT[6], EOD]
    corpus[7] = [*TEXT[7]]
    corpus[9] = [1, 2, EOD, 3, EOD, 4, EOD]
    corpus[11], corpus[12] = [EOD], []
    corpus[13] = [1, 6000, EOD]
    prefix = written(tmp_path / "a", *corpus)
    expected = {
        "empty documents": (2, [11, 12]),
        "separator at the beginning": (2, [3, 6]),
        "doubled separator at the end": (1, [5]),
        "no end of document": (1, [7]),
        "end of document inside": (2, [9]),
        "ids beyond the vocabulary": (1, [13]),
    }
    for _ in range(2):
        assert problems(prefix, vocab_size=5000, eod=EOD, specials=(4998,)) == expected
        monkeypatch.setattr(inspection, "_DOCUMENTS", 2)
        monkeypatch.setattr(inspection, "_TOKENS", 3)
    assert inspect_tool.main([prefix, *TOKENIZER]) == 0
    assert inspect_tool.main([prefix, *TOKENIZER, "--strict"]) == 1


def test_inspect_finds_the_separators_of_two_programs_without_being_told(tmp_path: Path) -> None:
    """The 7B run's: a tokenizer that adds its own BOS and EOS, and a data loader that adds its separator to that."""
    prefix = written(tmp_path / "a", *[[4000, *text, 4001, 4002] for text in TEXT])
    assert problems(prefix) == {
        "separator at the beginning": (40, [0, 1, 2, 3, 4]),
        "doubled separator at the end": (40, [0, 1, 2, 3, 4]),
    }
    assert inspect_dataset(prefix).eod == 4002
    assert inspect_dataset(prefix).eod_source == "guessed"
    nothing = inspect_dataset(written(tmp_path / "b", *TEXT))
    assert (nothing.eod, nothing.eod_source, nothing.problems) == (None, "none", [])
    assert "unknown: no token ends most documents" in inspection.report(nothing)


def test_inspect_takes_documents_of_several_sequences(tmp_path: Path) -> None:
    """Document borders count, not sequence borders."""
    prefix = written(tmp_path / "a", *[[*text, EOD] for text in TEXT])
    index = IndexedDataset(prefix)
    content = Path(f"{prefix}.idx").read_bytes()
    offsets = np.array([0, 2, 2, 40], "<i8")  # the second document is empty
    header = bytearray(content[: 9 + 8 + 1 + 16])
    header[-8:] = np.array([len(offsets)], "<u8").tobytes()
    Path(f"{prefix}.idx").write_bytes(
        bytes(header) + content[34 : 34 + 12 * len(index)] + offsets.tobytes()
    )
    found = inspect_dataset(prefix, eod=EOD)
    assert (found.documents, found.sequences, found.longest) == (3, 40, 38 * 21)
    assert {p.kind: p.count for p in found.problems} == {
        "empty documents": 1,
        "end of document inside": 38,
    }


def test_inspect_of_an_empty_data_set_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_dataset(written(tmp_path / "a")).documents == 0
    assert inspect_tool.main([str(tmp_path / "none")]) == 2
    assert "none.idx does not exist" in capsys.readouterr().err


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ConfigError, match="--plot needs the package matplotlib: pip install matplotlib"
    ):
        inspection.plot_lengths(inspect_dataset(str(REFERENCE_PREFIX)), "x.png")


def test_trained_vocabulary_is_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From JSON lines and plain text; the same twice; 256 bytes first, the end of a document last."""
    (tmp_path / "plain.txt").write_text("\n".join(tiny_corpus.texts()[:10]), encoding="utf-8")
    for output in ("a", "b"):
        arguments = [
            "--input",
            str(JSONL),
            str(tmp_path / "plain.txt"),
            "--vocab-size",
            "600",
            "--output-dir",
            str(tmp_path / output),
        ]
        assert train_tool.main(arguments) == 0
    assert "600 ids\n" in capsys.readouterr().out
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    config = TokenizerConfig(
        vocab_file=str(tmp_path / "a" / "vocab.json"), merge_file=str(tmp_path / "a" / "merges.txt")
    )
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod) == (600, 599)
    text = tiny_corpus.texts()[50]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < 0.7 * len(text.encode())
    run(job(tmp_path / "out", tokenizer=config))
    assert all(ids[-1] == 599 for ids in documents(tmp_path / "out_text_document"))


def test_training_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--vocab-size 256 must be at least 257"):
        train_bpe([str(JSONL)], 256, str(tmp_path / "tok"))
    with pytest.raises(DataError, match="holds no text to train on"):
        train_bpe(
            [str(write_lines(tmp_path / "a.jsonl", {"text": ""}))], 300, str(tmp_path / "tok")
        )
    with pytest.raises(DataError, match=r"b.jsonl:2: not JSON.*Fix or remove the line"):
        train_bpe(
            [str(write_lines(tmp_path / "b.jsonl", {"text": "a"}, b"{"))],
            300,
            str(tmp_path / "tok"),
        )
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"c.txt is not UTF-8 text"):
        train_bpe([str(tmp_path / "c.txt")], 300, str(tmp_path / "tok"))
    assert (
        train_tool.main(["--input", "none", "--vocab-size", "300", "--output-dir", str(tmp_path)])
        == 2
    )
    assert "--input none does not exist" in capsys.readouterr().err
    short = write_lines(tmp_path / "d.jsonl", {"text": "ab ab"})
    assert (
        train_tool.main(
            ["--input", str(short), "--vocab-size", "5000", "--output-dir", str(tmp_path / "short")]
        )
        == 0
    )
    assert "fewer than 5000: the text has no more pairs to merge" in capsys.readouterr().out


def test_texts_that_end_in_a_newline_have_no_second_separator(tmp_path: Path) -> None:
    prefix = written(tmp_path / "a", *[[*text, 198, EOD] for text in TEXT])
    assert problems(prefix, vocab_size=5000, eod=EOD, specials=(EOD,)) == {}
    unsure = inspect_dataset(prefix).problems  # without the tokenizer nobody can know
    assert [(problem.kind, problem.sure) for problem in unsure] == [
        ("doubled separator at the end", False)
    ]
    assert "POSSIBLE PROBLEM" in inspection.report(inspect_dataset(prefix))
    assert inspect_tool.main([prefix, "--strict"]) == 0
