"""The example that filters raw web pages, makes a corpus of them and trains on it."""

import gzip
import html
import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
from tiny_corpus import ROOT, texts

MISSING = [
    name
    for name in ("datatrove", "spacy", "trafilatura", "fasttext")
    if importlib.util.find_spec(name) is None
]
PAGE = (
    "<html><head><title>x</title></head><body><nav><a href='/'>Home</a></nav><article>{}</article>"
)


def write_pages(path: Path, real: list[str]) -> None:
    """Write pages of real texts, near duplicates, repeated words, numbers and nothing."""
    junk = ["buy now " * 200, " ".join(map(str, range(3000))), ""]
    # A fifth of the texts occur again, with another last sentence.
    again = [f"{text} This copy has an end of its own." for text in real[::5]]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for text in (*real, *again, *junk):
            body = "".join(f"<p>{html.escape(part)}</p>" for part in text.split("\n") if part)
            file.write(json.dumps({"text": PAGE.format(body)}) + "\n")


@pytest.mark.full
@pytest.mark.skipif(
    bool(MISSING),
    reason=f"NOT TESTED: {' '.join(MISSING)} are missing: pip install 'megatron-3d[datatrove]'",
)
def test_raw_pages_become_a_corpus_and_a_model(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    write_pages(tmp_path / "raw" / "pages.jsonl.gz", texts())
    work = tmp_path / "work"
    done = subprocess.run(
        ["bash", "examples/prepare_corpus/run.sh", str(tmp_path / "raw"), "--html"],
        cwd=ROOT,
        env={**os.environ, "PREPARE_CORPUS_DIR": str(work), "TRAIN_ITERS": "4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = (work / "filtered" / "removed.md").read_text()
    assert table.splitlines()[0] in done.stdout
    counts = {}
    for row in table.split("\n\n")[0].splitlines()[2:]:
        step, total, removed, _ = (cell.strip() for cell in row.strip("|").split("|"))
        counts[step] = (int(total.replace(",", "")), int(removed.replace(",", "")))
    assert list(counts) == ["extraction", "repetition", "quality", "lines", "duplicates"]
    assert counts["extraction"][0] == 123
    # Each step reads what the one before it has left.
    left = [total - removed for total, removed in counts.values()]
    assert [total for total, _ in counts.values()][1:] == left[:-1]
    assert counts["duplicates"][1] >= 10
    for path in (work / "filtered" / "kept").iterdir():
        kept = gzip.decompress(path.read_bytes())
        assert b"buy now" not in kept
        assert b"<article>" not in kept
    assert "## Removed by: duplicates" in table
    assert (work / "filtered" / "removed.png").stat().st_size > 5000
    manifest = json.loads((work / "corpus.json").read_text())
    assert manifest["documents"] == left[-1]
    assert "iteration        4" in done.stdout or "iteration 4" in done.stdout
