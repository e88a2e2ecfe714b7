"""Tests of the Python scripts of the quickstart. The quickstart itself runs in the long suite."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from observe.reports import make_evaluation

from megatron.data.indexed import IndexedDatasetWriter
from megatron.observe.metrics import MetricsFile
from megatron.observe.report import LaunchStart

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_corpus_is_real_text_without_duplicates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_corpus = load("build_corpus")
    corpus = tmp_path / "new" / "corpus.jsonl"
    assert build_corpus.main(["--output", str(corpus)]) == 0
    documents = [json.loads(line) for line in corpus.open(encoding="utf-8")]
    texts = [document["text"] for document in documents]
    assert len(texts) > 300
    assert len(set(texts)) == len(texts)
    assert sum(map(len, texts)) > 3e6
    assert any(
        document["source"] == "argparse.py" and "ArgumentParser" in document["text"]
        for document in documents
    )
    assert f"{len(texts)} documents" in capsys.readouterr().out
    first = corpus.read_bytes()
    build_corpus.main(["--output", str(corpus)])
    assert corpus.read_bytes() == first
    build_corpus.main(["--output", str(corpus), "--max-megabytes", "0.5"])
    assert sum(len(json.loads(line)["text"]) for line in corpus.open(encoding="utf-8")) <= 500_000


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Write ten documents, of which the last two are for validation.

    Half of the validation tokens are 7, a quarter are 1, and a quarter are 2.
    """
    writer = IndexedDatasetWriter(tmp_path / "data", np.dtype(np.uint16))
    for _ in range(8):
        writer.add_document([0, 0, 0])
    writer.add_document([7, 7, 1, 2])
    writer.add_document([7, 7, 1, 2])
    writer.finalize()
    return tmp_path / "data"


def compare(dataset: Path, loss: float | None) -> int:
    metrics = MetricsFile(dataset.parent / "metrics.jsonl")
    metrics.write(LaunchStart(0))
    if loss is not None:
        metrics.write(make_evaluation(5, 9.0))
        metrics.write(make_evaluation(10, loss))
    arguments = [
        "--dataset",
        str(dataset),
        "--split",
        "80,20,0",
        "--metrics",
        str(dataset.parent / "metrics.jsonl"),
        "--margin",
        "0.5",
    ]
    status: int = load("compare_with_unigram").main(arguments)
    return status


def test_unigram_entropy_is_that_of_the_validation_tokens(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entropy = 1.5 * math.log(2)
    assert compare(dataset, entropy - 0.51) == 0
    assert (
        f"unigram entropy of the validation tokens: {entropy:.4f} nats" in capsys.readouterr().out
    )


def test_a_loss_above_the_margin_fails(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(dataset, 1.5 * math.log(2) - 0.49) == 1
    assert "must be lower by at least 0.5" in capsys.readouterr().err
    assert compare(dataset, math.nan) == 1


def test_a_run_without_an_evaluation_is_an_error(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(dataset, None) == 2
    assert "has no validation loss" in capsys.readouterr().err
