r"""Train a byte-level BPE tokenizer and write its vocab.json, merges.txt and tokenizer.json.

    python tools/train_tokenizer.py --input 'corpus/*.jsonl' --vocab-size 5120 \
        --output-dir tokenizer

The trainer and tools/preprocess_data.py read vocab.json and merges.txt with --vocab-file and
--merge-file. With --tokenizer-type PretrainedFromHF and --tokenizer-name-or-path FOLDER they read
tokenizer.json. Both forms give the same ids.
"""

import sys
from typing import Literal

from megatron.base.plain_text import print_line, print_to_stderr
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.preparation.preprocess.bpe_training import train_bpe


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
