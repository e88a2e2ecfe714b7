r"""Import files of token ids, as nanoGPT and llm-baselines write them, as an indexed data set.

    python tools/import_tokens.py --input data/openwebtext/train.bin \
        --output-prefix data/owt-train --vocab-size 50257 --eod-id 50256

The files have no header: all ids follow each other. Each --eod-id ends a document. Without it, each
file is one document. The ids stay as they are.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import check_regular
from megatron.base.plain_text import format_count, print_line, print_to_stderr
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.data.indexed import IndexedDatasetWriter, choose_dtype
from megatron.data.tokenizer_record import write_record
from megatron.extras.preparation.preprocess.build_dataset import refuse_existing

TokenType = Literal["uint16", "uint32", "int32"]
_BLOCK = 1 << 22
"""Tokens that are read at once."""
_LONGEST = int(np.iinfo(np.int32).max)
"""The most tokens that the format can store in a document."""


@dataclass(frozen=True)
class TokenFiles:
    """Files of tokens, and what their ids mean."""

    paths: Sequence[str]
    """The files, in the order of the output. A document may not go on in the next file."""
    dtype: TokenType
    """Type of an id. The bytes are little endian."""
    vocab_size: int
    """Number of token ids."""
    eod_id: int | None = None
    """Id that ends each document. None makes each file one document."""


def import_token_files(
    files: TokenFiles, output_prefix: str, *, overwrite: bool = False
) -> tuple[int, int, int]:
    """Write the tokens of some files as an indexed data set. Memory holds one document.

    Each document of nanoGPT and llm-baselines ends with an end-of-document token. The data set gets
    its name when it is complete.

    Args:
        files: The files.
        output_prefix: Path of the result, without .bin and .idx.
        overwrite: Replace a data set that has this path already.

    Returns:
        The number of documents, of tokens, and of documents that end with the end-of-document id.

    Raises:
        ConfigError: no file is given, the end-of-document token is not in the vocabulary, or the
            output exists already or is one of the files.
        DataError: a file cannot be read, is empty, is no multiple of the type's size, or has an id
            that is not in the vocabulary. Or a document is too long.
    """
    _check_settings(files, output_prefix)
    if not overwrite:
        refuse_existing(output_prefix)
    # All files are opened and checked before anything is written.
    arrays = [_open_tokens(path, files.dtype) for path in files.paths]
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    # After a crash, the record of an older data set must not stay beside the new one.
    write_record(output_prefix, None)
    total = sum(len(array) for array in arrays)
    ends = 0
    with (
        IndexedDatasetWriter(output_prefix, choose_dtype(files.vocab_size)) as writer,
        tqdm(total=total, unit="token", unit_scale=True, desc="import") as bar,
    ):
        for path, array in zip(files.paths, arrays, strict=True):
            for begin, sizes in _find_documents(path, array, files, bar):
                tokens = array[begin : begin + int(sizes.sum())]
                writer.add_documents(tokens, sizes)
                ends += int(np.count_nonzero(tokens == files.eod_id))
    return writer.num_documents, writer.num_tokens, ends


def _check_settings(files: TokenFiles, output_prefix: str) -> None:
    if not files.paths:
        raise ConfigError("--input needs at least one file.")
    if files.vocab_size < 1:
        raise ConfigError(f"--vocab-size {files.vocab_size} must be at least 1.")
    if files.eod_id is not None and not 0 <= files.eod_id < files.vocab_size:
        raise ConfigError(
            f"--eod-id {files.eod_id} must be at least 0 and below --vocab-size {files.vocab_size}."
        )
    # The input is memory-mapped, and the output would replace it permanently.
    if Path(f"{output_prefix}.bin").resolve() in {Path(path).resolve() for path in files.paths}:
        raise ConfigError(
            f"--output-prefix {output_prefix} would replace {output_prefix}.bin, which is an "
            "--input. Choose another name."
        )


def _open_tokens(path: str, dtype: TokenType) -> NDArray:
    """Return the tokens of a file, memory-mapped.

    Raises:
        DataError: the file cannot be read, is empty, or does not end at a whole id.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    try:
        check_regular(path)
        size = Path(path).stat().st_size
        if size == 0:
            raise DataError(f"{path} is empty. Leave out the file.")
        if size % kind.itemsize:
            raise DataError(
                f"{path} has {size} bytes, which is no multiple of the {kind.itemsize} bytes of "
                f"{dtype}. It is truncated, or --dtype is another one."
            )
        return np.memmap(path, dtype=kind, mode="r")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Correct the path.") from error


def _find_documents(
    path: str, tokens: NDArray, files: TokenFiles, bar: "tqdm[None]"
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the documents of a file in groups, and check all ids.

    Yields:
        The first token of the group, and the number of tokens of each document.

    Raises:
        DataError: an id is not in the vocabulary, or a document is too long.
    """
    begin = 0
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        _check_ids(path, start, block, files)
        ends = np.empty(0, np.int64)
        if files.eod_id is not None:
            ends = start + 1 + np.flatnonzero(block == files.eod_id)
        last = start + len(block) == len(tokens)
        if last and (len(ends) == 0 or ends[-1] != len(tokens)):
            ends = np.append(ends, len(tokens))
        if len(ends):
            sizes = np.diff(ends, prepend=begin)
            _check_length(path, begin, int(sizes[0]))
            yield begin, sizes
            begin = int(ends[-1])
        bar.update(len(block))


def _check_ids(path: str, start: int, block: NDArray, files: TokenFiles) -> None:
    wrong = np.flatnonzero((block < 0) | (block >= files.vocab_size))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{path} has the id {int(block[first])} at token {start + first}, and --vocab-size is "
            f"{files.vocab_size}. Give the vocabulary of the tokenizer that wrote the file, and "
            f"its type (--dtype, now {files.dtype})."
        )


def _check_length(path: str, begin: int, size: int) -> None:
    # Only the first document of a group can be longer than a block.
    if size > _LONGEST:
        raise DataError(
            f"{path}: the document from token {begin} on has {size} tokens, and the most is "
            f"{_LONGEST}. Give --eod-id, the id that ends a document."
        )


def import_tokens(
    input: tuple[str, ...],
    output_prefix: str,
    vocab_size: int,
    eod_id: int | None = None,
    dtype: TokenType = "uint16",
    overwrite: bool = False,
) -> int:
    """Import files of token ids as an indexed data set.

    Args:
        input: Files in the order of the output.
        output_prefix: Path of the result without .bin and .idx.
        vocab_size: Number of token ids. An id that is not below it is an error.
        eod_id: Id that ends each document. Default: each file is one document.
        dtype: Type of an id in the files, little endian.
        overwrite: Replace a data set that has this path already.
    """
    files = TokenFiles(input, dtype, vocab_size, eod_id)
    documents, tokens, ends = import_token_files(files, output_prefix, overwrite=overwrite)
    if eod_id is not None and ends == 0:
        print_to_stderr(f"warning: --eod-id {eod_id} does not occur, so each file is one document")
    print_line(
        f"{output_prefix}: {format_count(documents, 'document')}, {format_count(tokens, 'token')}"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Import the files that `argv` names and return the exit code."""
    return run_tool(lambda: parse_arguments(import_tokens, args=argv))


if __name__ == "__main__":
    sys.exit(main())
