"""The scripts of examples/ train as they are, on a data set that they build themselves."""

import json
import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

pytestmark = pytest.mark.when_changed(
    "examples/*", "megatron/commands/*", "tests/examples/test_examples.py"
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a first run of the one-device example, which builds the data."""
    folder = tmp_path_factory.mktemp("example")
    run_example("pretrain_gpt.sh", folder, "--train-iters", "2")
    return folder


def run_example(script: str, folder: Path, *flags: str, **environment: str) -> str:
    """Run a script with its results in `folder`, and return what it printed."""
    result = subprocess.run(
        ["bash", str(ROOT / "examples" / script), *flags],
        env={**os.environ, "EXAMPLE_DIR": str(folder), "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def give_data(folder: Path) -> dict[str, str]:
    """Return the variables that name the data of an earlier example."""
    return {
        "DATA_PATH": str(folder / "data" / "stdlib_text_document"),
        "VOCAB_FILE": str(folder / "data" / "vocab.json"),
        "MERGE_FILE": str(folder / "data" / "merges.txt"),
    }


def test_second_call_resumes(data: Path) -> None:
    printed = run_example("pretrain_gpt.sh", data, "--train-iters", "4", "--override-lr-scheduler")
    assert "at iteration 2" in printed
    assert "training is complete at iteration 4" in printed


@pytest.mark.parametrize(
    ("script", "layout"),
    [
        pytest.param("pretrain_gpt_distributed.sh", "2 x ", marks=pytest.mark.full),
        ("pretrain_gpt_distributed_with_mp.sh", "pipeline 2 x data 1 x tensor 2"),
        ("pretrain_gpt_deepspeed.sh", "PipelineEngine"),
    ],
)
def test_example_trains(script: str, layout: str, data: Path, tmp_path: Path) -> None:
    printed = run_example(script, tmp_path, "--train-iters", "2", **give_data(data))
    assert layout in printed
    assert "training is complete at iteration 2" in printed


def test_hackathon_prints_a_report(data: Path, tmp_path: Path) -> None:
    """The example with a small model and a short time. Its flags at the end have priority."""
    small = (
        "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 "
        "--seq-length 64 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1 "
        "--vocab-size 1024 --train-time 5s --eval-interval-time 3s --logical-shards 8"
    )
    environment = give_data(data)
    lines = (data / "data" / "stdlib.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    folder = tmp_path / "texts"
    folder.mkdir()
    parquet.write_table(pa.table({"text": texts}), folder / "stdlib.parquet")
    results = tmp_path / "runs" / "new"
    printed = run_example("hackathon/train.sh", results, str(folder), *small.split(), **environment)
    report = printed[printed.index("report of the run:") :]
    assert "2.000000E-04 at the end" in report
    for measure in ("tokens/s", "perplexity", "bits per byte", "next-token accuracy"):
        assert measure in report
    assert (results / "log.txt").read_text().endswith(report)


@pytest.mark.full
def test_long_context_draws_both_models(data: Path, tmp_path: Path) -> None:
    iterations = {"SHORT_ITERS": "25", "LONG_ITERS": "3"}
    printed = run_example("long_context/run.sh", tmp_path, **give_data(data), **iterations)
    assert "2 context x 1 data" in printed
    assert "training is complete at iteration 3" in printed
    assert (tmp_path / "loss_by_position.png").stat().st_size > 1000
