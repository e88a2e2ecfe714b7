r"""Import files of token ids, as nanoGPT and llm-baselines write them, as an indexed data set.

    python tools/import_tokens.py --input data/openwebtext/train.bin \
        --output-prefix data/owt-train --vocab-size 50257 --eod-id 50256

The files have no header: all ids follow each other. Each --eod-id ends a document. Without it, each
file is one document. The ids stay as they are.
"""

import sys

from megatron.base.plain_text import format_count, print_line, print_to_stderr
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.preparation.preprocess.token_files import (
    TokenFiles,
    TokenType,
    import_token_files,
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
