r"""Train a byte-level BPE tokenizer and write its vocab.json and merges.txt.

    python tools/train_tokenizer.py --input 'corpus/*.jsonl' --vocab-size 5120 \
        --output-dir tokenizer

--vocab-file and --merge-file of the trainer read these files.
"""

import sys

import tyro

from megatron.errors import MegatronError
from megatron.preprocess.bpe_training import train_bpe


def train(input: tuple[str, ...], vocab_size: int, output_dir: str, json_key: str = "text") -> int:
    """Train a byte-level BPE tokenizer and write its vocab.json and merges.txt.

    Args:
        input: Files and globs: .jsonl and .parquet, or any text; .gz and .zst too.
        vocab_size: Number of ids. The 256 bytes and the end-of-document token (the last id) are
            among them.
        output_dir: Folder for vocab.json and merges.txt.
        json_key: Key (column) that holds the text.
    """
    try:
        vocab, merges, size = train_bpe(input, vocab_size, output_dir, json_key)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if size == vocab_size:
        short = ""
    else:
        short = f", fewer than {vocab_size}: the text has no more pairs to merge"
    print(f"{vocab} and {merges}: {size} ids{short}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Train the tokenizer that `argv` asks for and return the exit code."""
    return tyro.cli(train, args=argv)


if __name__ == "__main__":
    sys.exit(main())
