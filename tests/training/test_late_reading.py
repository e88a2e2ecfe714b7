"""A host that reads a step late trains bit for bit as one that reads it at once."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from process_pool import ProcessPool, pretrain, succeed
from training.runs import SIZES, Runner
from training.spiky_corpus import random_stretch, write_corpus
from training.test_spike_guard_runs import ROLLBACK, list_decisions, make_argv

from megatron.observe.metrics import read_metrics

TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2"
DECAY = "--lr-decay-style cosine --lr-decay-iters 20 --lr-warmup-fraction 0.2"
FP16 = (
    "--fp16 --initial-loss-scale 1099511627776 --hysteresis 1 --loss-scale-window 2 "
    "--train-iters 40"
)
CASES: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "fp32": (1, DECAY, ()),
    "bf16": (1, f"--bf16 {DECAY} --decoupled-lr 1e-3 --log-num-zeros-in-grad", ()),
    "bf16 moments": (
        1,
        "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
        (3,),
    ),
    "a scale that changes": (1, f"{FP16} {DECAY}", (30,)),
    "nan": (1, DECAY, (4, 5, 10)),
    "tokens that are counted": (1, f"--goldfish-loss --goldfish-k 4 --goldfish-h 4 {DECAY}", (5,)),
    "what needs the numbers": (
        1,
        "--eval-interval 4 --eval-iters 1 --split 80,20,0 --save-interval 3 --async-save "
        "--log-layer-stats-interval 5 --skip-train-iteration-range 7-8 --train-iters 16",
        (4, 6),
    ),
    "dp2": (2, f"--bf16 --zero-stage 3 {DECAY}", (6,)),
    "tp2-pp2": (4, f"--bf16 {TP2_PP2} {DECAY}", (6,)),
}
LONG = {"tp2-pp2"}
CLOCKS = ("time", "seconds", "per_second", "tflops", "mfu", "memory", "goodput", "bytes", "eta")
"""Parts of the names of numbers that no two runs have in common."""


def train(
    argv: list[str], late: bool, poisoned: tuple[int, ...] = (), signal_at: int = 0
) -> list[str]:
    """Run the main job. Return the order in which steps were computed and read.

    Args:
        argv: The command line.
        late: Whether the engine reads late, which only GPUs do otherwise.
        poisoned: Iterations whose loss is nan on the last rank.
        signal_at: The iteration during which each rank gets a signal to stop.
    """
    import torch

    from megatron.engine.native import NativeEngine
    from megatron.extras.training.late_reading import kind

    order: list[str] = []
    compute, judge = NativeEngine._run_microbatches, NativeEngine._judge_step
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def run_microbatches(self: Any, microbatches: Any, iteration: int, factor: Any) -> Any:
        order.append(f"compute {iteration}")
        if iteration == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if iteration in poisoned and is_last:
            mask = torch.full_like(microbatches[0].tokens, torch.nan, dtype=torch.float32)
            microbatches = [dataclasses.replace(m, loss_mask=mask) for m in microbatches]
        return compute(self, microbatches, iteration, factor)

    def judge_step(*arguments: Any, **options: Any) -> Any:
        order.append("read")
        return judge(*arguments, **options)

    with (
        mock.patch.object(NativeEngine, "_run_microbatches", run_microbatches),
        mock.patch.object(NativeEngine, "_judge_step", judge_step),
        mock.patch.object(kind, "DEVICES", ("cpu",) if late else ()),
    ):
        pretrain(argv)
    return order


def read_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return the metrics of a run without its times, and the tensors of its checkpoints."""
    metrics = [
        {key: value for key, value in entry.items() if not any(part in key for part in CLOCKS)}
        for entry in read_metrics(folder / "metrics.jsonl")
    ]
    tensors = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.glob("global_step*/*.safetensors"))
    }
    assert metrics
    assert tensors
    return metrics, tensors


def train_twice(
    pool: ProcessPool, corpus: str, folder: Path, flags: str, ranks: int = 1, **options: Any
) -> list[list[str]]:
    """Train with both ways to read. Check that they are equal, and return both orders."""
    orders = []
    runs = []
    for late in (False, True):
        runner = Runner(pool, corpus, folder / str(late))
        outcomes = pool.run(ranks, train, runner.argv(flags), late, *options.values())
        succeed(outcomes)
        orders.append(outcomes[0].value)
        runs.append(read_run(runner.folder))
    assert runs[0] == runs[1]
    return orders


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in CASES],
)
def test_the_runs_are_equal(name: str, pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    ranks, flags, poisoned = CASES[name]
    at_once, late = train_twice(pool, corpus, tmp_path, flags, ranks, poisoned=poisoned)
    steps = sum(event.startswith("compute") for event in at_once)
    assert at_once[:4] == ["compute 1", "read", "compute 2", "read"]
    assert late[:4] == ["compute 1", "compute 2", "read", "compute 3"]
    assert late.count("read") == steps
    assert late[-2:] == ["read", "read"]
