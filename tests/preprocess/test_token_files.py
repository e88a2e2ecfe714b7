"""Import of files of token ids, as nanoGPT and llm-baselines write them."""

from pathlib import Path

import numpy as np
import pytest
import tiny_corpus

from megatron.data.indexed import IndexedDataset
from megatron.extras.preparation.commands import import_tokens as token_files
from megatron.extras.preparation.commands import import_tokens as tool


def run(out: Path, *inputs: Path, vocab_size: int, **flags: object) -> int:
    more = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
    return tool.main(
        [
            *("--input", *map(str, inputs), "--output-prefix", str(out)),
            *("--vocab-size", str(vocab_size), *more),
        ]
    )


def write(path: Path, ids: list[int], dtype: str = "<u2") -> Path:
    np.array(ids, dtype).tofile(path)
    return path


@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_each_end_token_ends_a_document(
    block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(token_files, "_BLOCK", block)
    # The second document is only the end token, and the last one of the first file has none.
    first = write(tmp_path / "train.bin", [5, 6, 9, 9, 1, 2, 3, 9, 4])
    second = write(tmp_path / "more.bin", [7, 9])
    assert run(tmp_path / "data" / "all", first, second, vocab_size=10, eod_id=9) == 0
    assert "5 documents, 11 tokens" in capsys.readouterr().out
    found = IndexedDataset(tmp_path / "data" / "all")
    documents = [found[index].tolist() for index in range(len(found))]
    assert documents == [[5, 6, 9], [9], [1, 2, 3, 9], [4], [7, 9]]
    assert found.document_offsets.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_end_token_that_does_not_occur_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "train.bin", [5, 6, 9])
    assert run(tmp_path / "wrong", source, vocab_size=10, eod_id=8) == 0
    assert "warning: --eod-id 8 does not occur" in capsys.readouterr().err
    assert run(tmp_path / "right", source, vocab_size=10, eod_id=9) == 0
    assert "warning" not in capsys.readouterr().err


def test_the_reference_is_imported_from_its_own_tokens(tmp_path: Path) -> None:
    # The .bin of the format is itself such a file.
    source = Path(f"{tiny_corpus.REFERENCE_PREFIX}.bin")
    assert run(tmp_path / "all", source, vocab_size=5000, eod_id=tiny_corpus.EOD) == 0
    assert tiny_corpus.data_files(tmp_path / "all") == tiny_corpus.data_files(
        tiny_corpus.REFERENCE_PREFIX
    )


def test_without_an_end_token_a_file_is_one_document(tmp_path: Path) -> None:
    ids = [70000, 3, 2, 70000]
    source = write(tmp_path / "train.bin", ids, "<u4")
    assert run(tmp_path / "all", source, vocab_size=128256, dtype="uint32") == 0
    found = IndexedDataset(tmp_path / "all")
    assert found.num_documents == 1
    assert found.dtype == np.int32
    assert found[0].tolist() == ids


def test_wrong_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write(tmp_path / "good.bin", [1, 2, 9])
    odd = tmp_path / "odd.bin"
    odd.write_bytes(good.read_bytes() + b"\0")
    empty = tmp_path / "empty.bin"
    empty.write_bytes(b"")
    negative = write(tmp_path / "negative.bin", [1, -1], "<i4")
    out = tmp_path / "data" / "out"

    def refuse(message: str, *inputs: Path, vocab_size: int = 10, **flags: object) -> None:
        assert run(out, *inputs, vocab_size=vocab_size, **flags) == 2
        assert message in capsys.readouterr().err
        assert not list(out.parent.glob("*"))

    refuse("odd.bin has 7 bytes", good, odd)
    refuse("empty.bin is empty", empty)
    refuse("none.bin cannot be read", tmp_path / "none.bin")
    refuse("has the id 9 at token 2, and --vocab-size is 9", good, vocab_size=9)
    refuse("has the id -1 at token 1", negative, dtype="int32")
    refuse("--eod-id 10 must be", good, eod_id=10)
    with monkeypatch.context() as patch:
        patch.setattr(token_files, "_LONGEST", 2)
        refuse("has 3 tokens, and the most is 2", good)
    # The input itself is never replaced.
    command = ["--input", str(good), "--output-prefix", str(tmp_path / "good")]
    assert tool.main([*command, "--vocab-size", "10", "--overwrite"]) == 2
    assert "would replace" in capsys.readouterr().err
    # A finished data set is replaced only on request.
    assert run(tmp_path / "done", good, vocab_size=10, eod_id=9) == 0
    assert run(tmp_path / "done", good, vocab_size=10, eod_id=9) == 2
    assert "exists already" in capsys.readouterr().err
