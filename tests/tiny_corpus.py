"""The first 100 documents of the reference corpus, its tokenizer, and how a test runs a tool."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron.config.data import TokenizerConfig

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "fixtures" / "openwebtext-100"
JSONL = FOLDER / "openwebtext-100.jsonl"
VOCAB = str(FOLDER / "gpt2-tiny-vocab.json")
MERGES = str(FOLDER / "gpt2-tiny-merges.txt")
REFERENCE_PREFIX = FOLDER / "meg-gpt2-openwebtext_text_document"
EOD = 4999
GPT2 = TokenizerConfig(vocab_file=VOCAB, merge_file=MERGES)


def texts() -> list[str]:
    """Return the text of each document."""
    with open(JSONL, encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def data_files(prefix: str | Path) -> tuple[bytes, bytes]:
    """Return the contents of the `.bin` and `.idx` files of a data set."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def command(*arguments: str | Path, folder: Path = ROOT) -> subprocess.Popen[str]:
    """Start Python where the package can be imported.

    Args:
        arguments: A script and its arguments, or "-c" and a program.
        folder: The working directory.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
