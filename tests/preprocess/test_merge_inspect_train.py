"""The tools that merge data sets, inspect them, and train a vocabulary."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_corpus
from preprocess.test_preprocess import documents, job, run, write_lines
from tiny_corpus import EOD, JSONL, MERGES, REFERENCE_PREFIX, VOCAB, data_files

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.extras.preparation.commands import inspect_dataset as inspect_tool
from megatron.extras.preparation.commands import merge_datasets as merge_tool
from megatron.extras.preparation.commands import train_tokenizer as train_tool
from megatron.extras.preparation.commands.merge_datasets import merge_datasets
from megatron.extras.preparation.commands.train_tokenizer import train_bpe
from megatron.extras.preparation.preprocess import inspection
from megatron.extras.preparation.preprocess.inspection import inspect_dataset
from megatron.tokenizer.build import build_tokenizer

TOKENIZER = ["--vocab-file", VOCAB, "--merge-file", MERGES]


def write_documents(prefix: Path, *given: list[int], dtype: type = np.uint16) -> str:
    """Write a data set of the given documents, and return its path."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for ids in given:
            writer.add_document(np.array(ids, dtype))
    return str(prefix)


def test_merged_parts_equal_the_complete_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = JSONL.read_bytes().splitlines()
    parts = []
    for number, (begin, end) in enumerate(((0, 30), (30, 31), (31, 100))):
        path = write_lines(tmp_path / f"{number}.jsonl", *lines[begin:end])
        run(job(tmp_path / str(number), path))
        parts.append(str(tmp_path / f"{number}_text_document"))
    arguments = ["--input", *parts, "--output-prefix", str(tmp_path / "new" / "all")]
    assert merge_tool.main(arguments) == 0
    assert data_files(tmp_path / "new" / "all") == data_files(REFERENCE_PREFIX)
    assert "100 documents" in capsys.readouterr().out


def test_merge_refuses_wrong_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = write_documents(tmp_path / "a", [1])
    large = write_documents(tmp_path / "b", [1], dtype=np.int32)
    with pytest.raises(DataError, match=r"b holds int32 and .*a uint16"):
        merge_datasets([small, large], str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="is also an --input"):
        merge_datasets([small], str(tmp_path / "x" / ".." / "a"))
    with pytest.raises(ConfigError, match="--input needs at least one data set"):
        merge_datasets([], str(tmp_path / "c"))
    arguments = ["--input", str(tmp_path / "none"), "--output-prefix", str(tmp_path / "c")]
    assert merge_tool.main(arguments) == 2
    assert "none.idx does not exist" in capsys.readouterr().err
    assert not list(tmp_path.glob("c*"))


def test_inspect_finds_no_problem_in_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "lengths.png"
    arguments = [str(REFERENCE_PREFIX), *TOKENIZER, "--strict", "--json", "--plot", str(picture)]
    assert inspect_tool.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    dataset = IndexedDataset(REFERENCE_PREFIX)
    assert found["documents"] == 100
    assert found["tokens"] == len(dataset.tokens)
    assert found["eod"] == EOD
    assert found["shortest"] == dataset.sizes.min()
    assert found["longest"] == dataset.sizes.max()
    assert found["smallest_id"] == dataset.tokens.min()
    assert found["largest_id"] == EOD
    assert found["vocab_size"] == 5000
    assert sum(count for _, _, count in found["histogram"]) == 100
    for low, high, count in found["histogram"]:
        assert count == np.count_nonzero((dataset.sizes >= low) & (dataset.sizes < high))
    assert found["problems"] == []
    assert picture.read_bytes().startswith(b"\x89PNG")


TEXT = [list(range(n, n + 20)) for n in range(40)]


def find_problems(prefix: str, **known: object) -> dict[str, tuple[int, list[int]]]:
    """Return count and examples of each kind of problem."""
    found = inspect_dataset(prefix, **known)  # type: ignore[arg-type]
    return {problem.kind: (problem.count, problem.examples) for problem in found.problems}


def test_inspect_finds_problems_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are also found when documents and tokens are read a few at a time."""
    corpus = [[*text, EOD] for text in TEXT]
    corpus[3] = [EOD, *TEXT[3], EOD]
    corpus[5] = [*TEXT[5], EOD, EOD]
    corpus[6] = [4998, *TEXT[6], EOD]
    corpus[7] = [*TEXT[7]]
    corpus[9] = [1, 2, EOD, 3, EOD, 4, EOD]
    corpus[11] = [EOD]
    corpus[12] = []
    corpus[13] = [1, 6000, EOD]
    prefix = write_documents(tmp_path / "a", *corpus)
    expected = {
        "empty documents": (2, [11, 12]),
        "separator at the beginning": (2, [3, 6]),
        "doubled separator at the end": (1, [5]),
        "no end of document": (1, [7]),
        "end of document inside": (2, [9]),
        "ids beyond the vocabulary": (1, [13]),
    }
    for _ in range(2):
        assert find_problems(prefix, vocab_size=5000, eod=EOD, specials=(4998,)) == expected
        monkeypatch.setattr(inspection, "_DOCUMENTS", 2)
        monkeypatch.setattr(inspection, "_TOKENS", 3)
    assert inspect_tool.main([prefix, *TOKENIZER]) == 0
    assert inspect_tool.main([prefix, *TOKENIZER, "--strict"]) == 1


def test_inspect_finds_doubled_separators_without_a_tokenizer(tmp_path: Path) -> None:
    """A tokenizer adds its own BOS and EOS, and the data loader adds its separator to these.

    This happened in the 7B run.
    """
    prefix = write_documents(tmp_path / "a", *[[4000, *text, 4001, 4002] for text in TEXT])
    assert find_problems(prefix) == {
        "separator at the beginning": (40, [0, 1, 2, 3, 4]),
        "doubled separator at the end": (40, [0, 1, 2, 3, 4]),
    }
    assert inspect_dataset(prefix).eod == 4002
    assert inspect_dataset(prefix).eod_source == "guessed"
    plain = inspect_dataset(write_documents(tmp_path / "b", *TEXT))
    assert plain.eod is None
    assert plain.eod_source == "none"
    assert plain.problems == []
    assert "unknown: no token ends most documents" in inspection.report(plain)


def test_inspect_reads_documents_of_several_sequences(tmp_path: Path) -> None:
    """The borders of documents count, and those of sequences do not."""
    prefix = write_documents(tmp_path / "a", *[[*text, EOD] for text in TEXT])
    index = IndexedDataset(prefix)
    content = Path(f"{prefix}.idx").read_bytes()
    offsets = np.array([0, 2, 2, 40], "<i8")  # the second document is empty
    header = bytearray(content[: 9 + 8 + 1 + 16])
    header[-8:] = np.array([len(offsets)], "<u8").tobytes()
    Path(f"{prefix}.idx").write_bytes(
        bytes(header) + content[34 : 34 + 12 * len(index)] + offsets.tobytes()
    )
    found = inspect_dataset(prefix, eod=EOD)
    assert found.documents == 3
    assert found.sequences == 40
    assert found.longest == 38 * 21
    assert {p.kind: p.count for p in found.problems} == {
        "empty documents": 1,
        "end of document inside": 38,
    }


def test_inspect_of_an_empty_data_set(tmp_path: Path) -> None:
    assert inspect_dataset(write_documents(tmp_path / "a")).documents == 0


def test_inspect_of_a_missing_data_set_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_tool.main([str(tmp_path / "none")]) == 2
    assert "none.idx does not exist" in capsys.readouterr().err


def test_plot_without_matplotlib_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        inspection.plot_lengths(inspect_dataset(str(REFERENCE_PREFIX)), "x.png")


def test_a_trained_vocabulary_is_reproducible_and_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The texts come from JSON lines and from plain text. The last id ends documents."""
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
    assert tokenizer.vocab_size == 600
    assert tokenizer.eod == 599
    text = tiny_corpus.texts()[50]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < 0.7 * len(text.encode())
    run(job(tmp_path / "out", tokenizer=config))
    assert all(ids[-1] == 599 for ids in documents(tmp_path / "out_text_document"))


def test_training_refuses_wrong_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--vocab-size 256 must be at least 257"):
        train_bpe([str(JSONL)], 256, str(tmp_path / "tok"))
    empty = write_lines(tmp_path / "a.jsonl", {"text": ""})
    with pytest.raises(DataError, match="holds no text to train on"):
        train_bpe([str(empty)], 300, str(tmp_path / "tok"))
    bad = write_lines(tmp_path / "b.jsonl", {"text": "a"}, b"{")
    with pytest.raises(DataError, match=r"b.jsonl:2: not JSON"):
        train_bpe([str(bad)], 300, str(tmp_path / "tok"))
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"c.txt is not UTF-8 text"):
        train_bpe([str(tmp_path / "c.txt")], 300, str(tmp_path / "tok"))
    arguments = ["--input", "none", "--vocab-size", "300", "--output-dir", str(tmp_path)]
    assert train_tool.main(arguments) == 2
    assert "--input none does not exist" in capsys.readouterr().err


def test_training_keeps_a_tokenizer_that_exists(tmp_path: Path) -> None:
    """Data that were made with it would be read with other ids."""
    first = write_lines(tmp_path / "a.jsonl", {"text": "ab ab"})
    made = train_bpe([str(first)], 300, str(tmp_path / "tok"))
    before = made.merges.read_bytes()
    second = write_lines(tmp_path / "b.jsonl", {"text": "xyz xyz"})
    with pytest.raises(ConfigError, match="has a tokenizer already") as refusal:
        train_bpe([str(second)], 300, str(tmp_path / "tok"))
    assert "--overwrite" in str(refusal.value)
    assert made.merges.read_bytes() == before
    train_bpe([str(second)], 300, str(tmp_path / "tok"), overwrite=True)
    assert made.merges.read_bytes() != before


def test_training_on_a_short_text_gives_fewer_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = write_lines(tmp_path / "d.jsonl", {"text": "ab ab"})
    output = str(tmp_path / "short")
    arguments = ["--input", str(short), "--vocab-size", "5000", "--output-dir", output]
    assert train_tool.main(arguments) == 0
    assert "fewer than 5000" in capsys.readouterr().out


def test_a_newline_at_the_end_of_files_is_no_separator(tmp_path: Path) -> None:
    """It also ends the lines inside the texts, so the tokenizer is not needed to recognise it."""
    texts = [[*text[:9], 198, *text[9:], 198] for text in TEXT]
    good = write_documents(tmp_path / "a", *[[*text, EOD] for text in texts])
    found = inspect_dataset(good)
    assert found.problems == []
    assert found.eod == EOD
    # A separator is never inside, and is still found in the same data.
    doubled = write_documents(tmp_path / "b", *[[4000, *text, 4001, EOD] for text in texts])
    assert set(find_problems(doubled)) == {
        "separator at the beginning",
        "doubled separator at the end",
    }


def test_what_was_found_with_a_guessed_separator_is_not_sure(tmp_path: Path) -> None:
    """Most texts end with a newline, and none with an end-of-document id."""
    texts = [[*text[:9], 198, *text[9:], 198] for text in TEXT[:30]] + TEXT[30:]
    prefix = write_documents(tmp_path / "a", *texts)
    found = inspect_dataset(prefix)
    assert {problem.kind for problem in found.problems} >= {"no end of document"}
    assert not any(problem.sure for problem in found.problems)
    assert inspect_tool.main([prefix, "--strict"]) == 0


def test_a_newline_at_the_end_of_texts_is_only_a_possible_problem(tmp_path: Path) -> None:
    """Without the tokenizer, it cannot be distinguished from a second separator."""
    prefix = write_documents(tmp_path / "a", *[[*text, 198, EOD] for text in TEXT])
    assert find_problems(prefix, vocab_size=5000, eod=EOD, specials=(EOD,)) == {}
    (problem,) = inspect_dataset(prefix).problems
    assert problem.kind == "doubled separator at the end"
    assert not problem.sure
    assert "POSSIBLE PROBLEM" in inspection.report(inspect_dataset(prefix))
    assert inspect_tool.main([prefix, "--strict"]) == 0


def test_all_bad_files_of_a_tokenizer_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    for name in ("good", "bad1", "bad2"):
        content = b"a text with words\n" * 9 + (b"caf\xe9\n" if name != "good" else b"")
        (tmp_path / f"{name}.txt").write_bytes(content)
    (tmp_path / "records.jsonl").write_text('{"text": "more words"}\nno record\n')
    patterns = [str(tmp_path / "*.txt"), str(tmp_path / "records.jsonl")]
    with pytest.raises(DataError, match="2 of the files cannot be read") as caught:
        train_bpe(patterns, 300, str(tmp_path / "tok"))
    assert all(f"{name}.txt is not UTF-8 text" in str(caught.value) for name in ("bad1", "bad2"))
    with pytest.raises(DataError, match=r"records\.jsonl:2: .*--on-bad-line skip"):
        train_bpe(patterns[1:], 300, str(tmp_path / "tok"))
    said: list[str] = []
    made = train_bpe(patterns, 300, str(tmp_path / "tok"), log=said.append, on_bad_line="skip")
    skipped = [line.split(": ", 1)[0] for line in said if " skipped: " in line]
    assert skipped == ["bad file skipped", "bad file skipped", "bad line skipped"]
    good = [str(tmp_path / "good.txt"), str(tmp_path / "one.jsonl")]
    (tmp_path / "one.jsonl").write_text('{"text": "more words"}\n')
    other = train_bpe(good, 300, str(tmp_path / "other"))
    assert made.vocab.read_bytes() == other.vocab.read_bytes()
