"""The example of instruction tuning: its script as it is, and its file for 8 billion parameters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_corpus
import yaml

from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/instruct"


def test_the_file_of_the_8b_has_no_errors() -> None:
    loaded = load_config(["--config", str(FOLDER / "llama3-8b.yaml"), "--vocab-size", "128256"])
    plan = resolve(loaded.config, 8)
    plan.raise_on_errors()
    assert plan.config.data.needs_documents


@pytest.mark.full
def test_the_laptop_learns_to_answer(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(tiny_corpus.texts()):
        (tmp_path / "corpus" / f"{number:03}.txt").write_text(text, encoding="utf-8")
    first = tmp_path / "first"
    settings = {
        "data": {"data_path": [f"{first}/corpus_text_document"], "split": "95,5,0"},
        "tokenizer": {
            "vocab_file": f"{first}/tokenizer/vocab.json",
            "merge_file": f"{first}/tokenizer/merges.txt",
        },
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 128},
        "batch": {"micro_batch_size": 8, "train_iters": 4, "eval_iters": 1},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"save": f"{first}/run", "load": f"{first}/run"},
    }
    first.mkdir()
    (first / "laptop.yaml").write_text(yaml.safe_dump(settings))
    tokenizer = ["--vocab-file", f"{first}/tokenizer/vocab.json"]
    tokenizer += ["--merge-file", f"{first}/tokenizer/merges.txt"]
    corpus = str(tmp_path / "corpus")
    made = ["--input", corpus, "--vocab-size", "1000", "--output-dir", f"{first}/tokenizer"]
    run([sys.executable, "tools/train_tokenizer.py", *made])
    data = ["--input", corpus, "--output-prefix", f"{first}/corpus", "--append-eod", *tokenizer]
    run([sys.executable, "tools/preprocess_data.py", *data])
    run([sys.executable, "pretrain_gpt.py", "--config", f"{first}/laptop.yaml"])
    script = ["bash", str(FOLDER / "laptop.sh"), corpus, str(first), f"{first}/chat"]
    output = run([*script, "--train-iters", "4", "--hidden-dropout", "0"])
    assert "_conversations: " in output
    assert "<|im_start|>assistant\n«" in output
    assert "the vocabulary has 2 tokens more" in output
    assert "training is complete at iteration 4" in output


def run(command: list[str]) -> str:
    """Run a command, and return what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
