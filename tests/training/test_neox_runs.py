"""A run from a configuration of GPT-NeoX, with a smaller model by flags."""

import math
from pathlib import Path

import pytest
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import MERGES, VOCAB

from megatron.checkpoint.folder import list_saved_iterations
from megatron.checkpoint.load import open_checkpoint
from megatron.observe.metrics import read_metrics

MODEL = """
{
  "pipe-parallel-size": 1, "model-parallel-size": 1,
  "num-layers": 24, "hidden-size": 2048, "num-attention-heads": 16,
  "seq-length": 2048, "max-position-embeddings": 2048,
  "pos-emb": "rotary", "rotary-pct": 0.25, "no-weight-tying": true, "gpt-j-residual": true,
  "attention-config": [[["flash"], 24]], "bias-gelu-fusion": true,
  "init_method": "small_init", "output_layer_init_method": "wang_init",
  "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "min_lr": 0.001, "lr-decay-style": "cosine", "warmup": 0.3,
  "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000},
  "train_micro_batch_size_per_gpu": 16, "gas": 2,
  "fp16": {"fp16": true, "enabled": true, "loss_scale": 0, "initial_scale_power": 12},
  "train-iters": 10, "lr-decay-iters": 10,
  "checkpoint-factor": 5, "extra-save-iters": [0, 1, 2], "eval-iters": 0, "log-interval": 1,
}
"""
SHRUNK = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--no-fp16"
)


def compute_rate(step: int) -> float:
    """Return the rate of GPT-NeoX after a number of steps of this configuration."""
    peak, floor, warmup, end = 0.01, 0.001, 3, 10
    if step <= warmup:
        return peak * max(1, step) / warmup
    cosine = math.cos(math.pi * (step - warmup) / (end - warmup))
    return floor + (peak - floor) / 2 * (cosine + 1)


def test_ten_iterations_from_two_files(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    (tmp_path / "model.yml").write_text(MODEL)
    (tmp_path / "setup.yml").write_text(
        f"data-path: {corpus}\nvocab-file: {VOCAB}\nmerge-file: {MERGES}\nsave: {tmp_path}/run\n"
        f"load: {tmp_path}/run\n"
    )
    files = f"--config {tmp_path}/model.yml {tmp_path}/setup.yml"
    flags = f"{files} {SHRUNK} --data-cache-path {tmp_path}/cache"
    succeed(pool.run(1, pretrain, flags.split()))
    steps = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if "lm_loss" in each]
    assert [each["iteration"] for each in steps] == list(range(1, 11))
    assert {each["global_batch_size"] for each in steps} == {4}
    # As there, the log has the rate of the next step.
    rates = [each["learning_rate"] for each in steps]
    assert rates == pytest.approx([compute_rate(step) for step in range(1, 11)])
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"] - 0.3
    assert sorted(list_saved_iterations(tmp_path / "run")) == [1, 2, 5, 10]
    config = open_checkpoint(tmp_path / "run", 10).read_config()
    assert config.model.output_init_method_std == "wang"
    # The same command resumes, and finds that training is complete.
    succeed(pool.run(1, pretrain, flags.split()))
