r"""Train a byte-level BPE tokenizer and write its vocab.json, merges.txt and tokenizer.json.

    python tools/train_tokenizer.py --input 'corpus/*.jsonl' --vocab-size 5120 \
        --output-dir tokenizer

The trainer and tools/preprocess_data.py read vocab.json and merges.txt with --vocab-file and
--merge-file. With --tokenizer-type PretrainedFromHF and --tokenizer-name-or-path FOLDER they read
tokenizer.json. Both forms give the same ids.
"""

import codecs
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from tqdm import tqdm

from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import INDEX_BYTES, load_json
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.preparation.preprocess.input_files import expand_inputs, has_record_suffix
from megatron.extras.preparation.preprocess.inputs import (
    BadLine,
    extract_texts,
    open_lines,
    read_blocks,
)
from megatron.tokenizer.build import END_OF_DOCUMENT, build_byte_level_bpe

# 256 bytes and the end of a document.
_SMALLEST = 257
_SHOWN = 8
"""Largest number of bad files, and of bad lines, that are listed."""
FILES = ("vocab.json", "merges.txt", "tokenizer.json")
"""The files of a tokenizer."""


@dataclass(frozen=True)
class TrainedTokenizer:
    """The files of a tokenizer that was trained.

    Attributes:
        vocab: The path of vocab.json.
        merges: The path of merges.txt.
        tokenizer: The path of tokenizer.json, which gives the same ids as the other two.
        size: The number of ids. It is less than the requested number if the text has no more pairs
            to merge.
    """

    vocab: Path
    merges: Path
    tokenizer: Path
    size: int


def train_bpe(
    patterns: Sequence[str],
    vocab_size: int,
    output_folder: str,
    json_key: str = "text",
    log: Callable[[str], None] = lambda line: None,
    *,
    overwrite: bool = False,
    on_bad_line: Literal["stop", "skip"] = "stop",
) -> TrainedTokenizer:
    """Train a vocabulary and write it.

    Args:
        patterns: Input files, globs and folders. In files with records (JSON, Parquet, Arrow), the
            texts of `json_key` are used. In any other file, all lines are used. Files may be
            compressed as .gz or .zst.
        vocab_size: The largest number of ids, at least 257.
        output_folder: Where the files are written.
        json_key: The key of the text in a record.
        log: Receives a line for each folder, which describes the files that are used.
        overwrite: Replace a tokenizer that is in the folder already.
        on_bad_line: Whether a bad record, or a text file that is not UTF-8, ends the training or is
            left out and reported.

    Raises:
        ConfigError: `vocab_size` is below 257, the folder is a file, or it has a tokenizer that may
            not be replaced.
        DataError: A line or a file is bad, or the inputs have no text.
    """
    if vocab_size < _SMALLEST:
        raise ConfigError(
            f"--vocab-size {vocab_size} must be at least {_SMALLEST}: 256 bytes and the end of a "
            "document."
        )
    folder = Path(output_folder)
    # A wrong folder must not be found after hours of training.
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output-dir {folder} is a file; give a folder.")
    existing = [name for name in FILES if (folder / name).exists()]
    # Data and checkpoints that were made with that tokenizer would be read with other ids, without
    # an error if both vocabularies have the same size.
    if existing and not overwrite:
        raise ConfigError(
            f"--output-dir {folder} has a tokenizer already ({', '.join(existing)}). Use it as it "
            "is, choose another folder, or give --overwrite. Data that were made with it must then "
            "be preprocessed again."
        )
    paths = _leave_out_bad_files(expand_inputs(patterns, log), on_bad_line, log)
    bad_lines = _BadLines(on_bad_line, log)
    backend = tokenizers.Tokenizer(models.BPE())
    # One id is left for the end of a document, which `_write` adds. As a special token of the
    # trainer it would get the first id instead of the last.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    with tqdm(
        total=sum(Path(path).stat().st_size for path in paths),
        unit="B",
        unit_scale=True,
        desc="read",
    ) as bar:
        texts = 0

        def count_texts() -> Iterator[list[str]]:
            # The trainer accepts inputs without text, so the texts are counted here.
            nonlocal texts
            for batch in _read_texts(paths, json_key, bar, bad_lines.report):
                texts += sum(1 for text in batch if text)
                yield batch

        backend.train_from_iterator(count_texts(), trainer)
    bad_lines.report_number()
    if not texts:
        raise DataError(f"--input {' '.join(patterns)} holds no text to train on.")
    return _write(backend, folder)


class _BadLines:
    """Reports bad lines, up to _SHOWN of them, or ends the training at the first one."""

    def __init__(self, on_bad_line: Literal["stop", "skip"], log: Callable[[str], None]) -> None:
        self._on_bad_line = on_bad_line
        self._log = log
        self._number = 0

    def report(self, line: BadLine) -> None:
        """Report a line. Raise DataError if bad lines end the training."""
        if self._on_bad_line == "stop":
            raise DataError(f"{line}. Correct it, or leave such lines out with --on-bad-line skip.")
        if self._number < _SHOWN:
            self._log(f"bad line skipped: {line}")
        self._number += 1

    def report_number(self) -> None:
        """Report how many lines were bad, if not all were reported."""
        if self._number > _SHOWN:
            self._log(f"bad lines skipped: {self._number} in all")


def _leave_out_bad_files(
    paths: Sequence[str], on_bad_line: Literal["stop", "skip"], log: Callable[[str], None]
) -> list[str]:
    """Return the inputs without text files that are not UTF-8.

    All text files are read here once before the training, so that all bad ones are reported.

    Raises:
        DataError: Files are not UTF-8, and `on_bad_line` is "stop".
    """
    bad = {}
    for path in paths:
        if not has_record_suffix(path):
            try:
                decoder = codecs.getincrementaldecoder("utf-8")()
                for piece, _ in open_lines(path):
                    decoder.decode(piece)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError as error:
                bad[path] = f"{path} is not UTF-8 text ({error.reason})"
    # All of them are named at once, so that they can be corrected at once.
    if bad and on_bad_line == "stop":
        shown = "\n  ".join(list(bad.values())[:_SHOWN])
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise DataError(
            f"{len(bad)} of the files cannot be read as text:\n  {shown}{more}\nConvert them, or "
            "leave them out with --on-bad-line skip."
        )
    for text in list(bad.values())[:_SHOWN]:
        log(f"bad file skipped: {text}")
    if len(bad) > _SHOWN:
        log(f"bad files skipped: {len(bad)} in all")
    return [path for path in paths if path not in bad]


def _read_texts(
    paths: Sequence[str], key: str, bar: tqdm, report: Callable[[BadLine], None]
) -> Iterator[list[str]]:
    """Yield the texts of the inputs in batches, and move the progress bar."""
    done = 0
    for path in paths:
        if has_record_suffix(path):
            for block in read_blocks([path], [key]):
                (texts,), bad = extract_texts(block, [key])
                for line in bad:
                    report(line)
                yield texts
                bar.update(done + block.disk_bytes - bar.n)
        else:
            rest = b""
            for piece, disk_bytes in open_lines(path):
                # A piece may end inside a line or a character. The rest is put before the next.
                cut = piece.rfind(b"\n") + 1
                yield (rest + piece[:cut]).decode("utf-8").splitlines(keepends=True)
                if cut:
                    rest = piece[cut:]
                else:
                    rest = rest + piece
                bar.update(done + disk_bytes - bar.n)
            yield rest.decode("utf-8").splitlines(keepends=True)
        done += Path(path).stat().st_size


def _write(backend: tokenizers.Tokenizer, folder: Path) -> TrainedTokenizer:
    """Write vocab.json, merges.txt and tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder next to the final files, so that they can be renamed.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        vocab, merges = (Path(path) for path in backend.model.save(temporary))
        vocabulary = load_json(vocab, INDEX_BYTES)
        vocabulary[END_OF_DOCUMENT] = len(vocabulary)
        vocab.write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
        tokenizer = Path(temporary, "tokenizer.json")
        # Build it from the two files, so that it gives the same ids. In both forms the end of a
        # document is an ordinary entry. A document that contains this text is therefore not ended
        # by it.
        build_byte_level_bpe(str(vocab), str(merges)).save(str(tokenizer))
        made = TrainedTokenizer(
            vocab=folder / vocab.name,
            merges=folder / merges.name,
            tokenizer=folder / tokenizer.name,
            size=len(vocabulary),
        )
        for file in (vocab, merges, tokenizer):
            os.replace(file, folder / file.name)
    return made


def train(
    input: tuple[str, ...],
    vocab_size: int,
    output_dir: str,
    json_key: str = "text",
    overwrite: bool = False,
    on_bad_line: Literal["stop", "skip"] = "stop",
) -> int:
    """Train a byte-level BPE tokenizer and write vocab.json, merges.txt and tokenizer.json.

    Args:
        input: Files, globs and folders. They may have JSON records, .parquet, .arrow or any text,
            and JSON and text may be compressed as .gz or .zst.
        vocab_size: Number of ids. The 256 bytes and the end-of-document token (the last id) are
            among them.
        output_dir: Folder for the three files.
        json_key: Key (column) that holds the text.
        overwrite: Replace a tokenizer that is in the folder already. Data that were made with it
            must then be preprocessed again.
        on_bad_line: Whether a record that is not JSON, or a text file that is not UTF-8, ends the
            training or is left out and reported.
    """
    made = train_bpe(
        input,
        vocab_size,
        output_dir,
        json_key,
        log=print_to_stderr,
        overwrite=overwrite,
        on_bad_line=on_bad_line,
    )
    if made.size == vocab_size:
        short = ""
    else:
        short = f", fewer than {vocab_size}: the text has no more pairs to merge"
    print_line(f"{made.vocab}, {made.merges} and {made.tokenizer}: {made.size} ids{short}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Train the tokenizer that `argv` asks for and return the exit code."""
    return run_tool(lambda: parse_arguments(train, args=argv))


if __name__ == "__main__":
    sys.exit(main())
