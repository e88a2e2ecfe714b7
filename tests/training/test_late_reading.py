"""A host that reads a step late trains bit for bit as one that reads it at once."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from process_pool import ProcessPool, pretrain, succeed
from test_plan import with_changes
from training.runs import Runner
from training.spiky_corpus import random_stretch, write_corpus
from training.test_spike_guard_runs import ROLLBACK, list_decisions, make_argv

from megatron.config.precision import PrecisionConfig
from megatron.config.spike_guard import SpikeGuardConfig
from megatron.engine.base import StepOutcome, StepResult
from megatron.engine.loss_scale import LossScale
from megatron.extras.step.late_reading import find_obstacle
from megatron.extras.watch.guard.spike_guard import SpikeGuard
from megatron.observe.metrics import read_metrics
from megatron.plan.resolve import resolve

TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2"
DECAY = "--lr-decay-style cosine --lr-decay-iters 20 --lr-warmup-fraction 0.2"
FP16 = (
    "--fp16 --initial-loss-scale 1099511627776 --hysteresis 1 --loss-scale-window 2 "
    "--train-iters 30"
)
CASES: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "fp32": (1, DECAY, ()),
    "bf16": (1, f"--bf16 {DECAY} --decoupled-lr 1e-3 --log-num-zeros-in-grad", ()),
    "bf16 moments": (
        1,
        "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
        (3,),
    ),
    "a scale that changes": (1, f"{FP16} {DECAY}", (28,)),
    "a scale that changes in a step with statistics": (
        1,
        "--fp16 --initial-loss-scale 1024 --loss-scale-window 2 --log-layer-stats-interval 4 "
        "--train-iters 10",
        (),
    ),
    "nan": (1, DECAY, (4, 5, 10)),
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
    argv: list[str],
    late: bool,
    poisoned: tuple[int, ...] = (),
    stop_at: int = 0,
    switch: str = "",
    emptied: int = 0,
) -> list[str]:
    """Run the main job. Return the order in which steps were computed and read.

    Args:
        argv: The command line.
        late: Whether the engine reads late, which only GPUs do otherwise.
        poisoned: Iterations whose loss is nan on the last rank.
        stop_at: The iteration during which each rank is asked to stop.
        emptied: An iteration in which no token counts.
        switch: The kill switch that asks for it. Without it, a signal does.
    """
    from megatron.engine.native import NativeEngine
    from megatron.extras.step import engines

    order: list[str] = []
    compute, judge = NativeEngine._run_microbatches, NativeEngine._judge_step
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def run_microbatches(self: Any, microbatches: Any, iteration: int, factor: Any) -> Any:
        order.append(f"compute {iteration}")
        if iteration == stop_at and switch:
            Path(switch).touch()
        elif iteration == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if iteration in (*poisoned, emptied) and (is_last or iteration == emptied):
            weight = 0.0 if iteration == emptied else torch.nan
            mask = torch.full_like(microbatches[0].tokens, weight, dtype=torch.float32)
            microbatches = [dataclasses.replace(m, loss_mask=mask) for m in microbatches]
        return compute(self, microbatches, iteration, factor)

    def judge_step(*arguments: Any, **options: Any) -> Any:
        order.append("read")
        return judge(*arguments, **options)

    with (
        mock.patch.object(NativeEngine, "_run_microbatches", run_microbatches),
        mock.patch.object(NativeEngine, "_judge_step", judge_step),
        mock.patch.object(engines, "LATE_DEVICES", ("cpu",) if late else ()),
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


def test_the_flag_turns_it_off(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    runner = Runner(pool, corpus, tmp_path)
    outcomes = pool.run(1, train, runner.argv("--train-iters 4 --no-late-reading"), True)
    table = succeed(outcomes)
    assert "before its update" in table
    assert "--no-late-reading" in table
    assert outcomes[0].value[:4] == ["compute 1", "read", "compute 2", "read"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kernels": {"late_reading": False}}, "--no-late-reading"),
        ({"optimizer": {"optimizer": "muon"}}, "--optimizer muon cannot leave out a step"),
        ({"model": {"num_experts": 4}}, "bias of the routers"),
        ({"logging": {"log_params_norm": True}}, "--log-params-norm"),
    ],
    ids=str,
)
def test_a_run_that_cannot_read_late_says_why(changes: dict[str, Any], reason: str | None) -> None:
    found = find_obstacle(resolve(with_changes(**changes), 1))
    if reason is None:
        assert found is None
    else:
        assert reason in str(found)


def test_a_step_without_tokens_changes_nothing(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    flags = f"--goldfish-loss --goldfish-k 4 --goldfish-h 4 {DECAY}"
    train_twice(pool, corpus, tmp_path, flags, poisoned=(), stop_at=0, switch="", emptied=5)
    reported = {each["iteration"]: each for each in read_metrics(tmp_path / "True/metrics.jsonl")}
    assert reported[5]["learning_rate"] == reported[4]["learning_rate"]


@pytest.mark.parametrize(
    ("flags", "stretch", "iterations", "decisions"),
    [
        ("--spike-guard skip-step", (30, 37), 45, [("skip-step", at) for at in range(30, 38)]),
        (ROLLBACK, (31, 40), 50, [("skip-step", 31), ("skip-step", 32), ("rollback", 33)]),
    ],
    ids=["drops", "rollback"],
)
def test_the_guard_decides_on_the_device(
    flags: str,
    stretch: tuple[int, int],
    iterations: int,
    decisions: list[tuple[str, int]],
    pool: ProcessPool,
    tmp_path: Path,
) -> None:
    data = write_corpus(tmp_path / "text", 100, random_stretch(*stretch))
    runs = []
    for late in (False, True):
        folder = tmp_path / str(late)
        argv = make_argv(folder, data, iterations, flags)
        order = pool.run(1, train, argv, late)[0].value
        runs.append(read_run(folder))
        assert list_decisions(folder)[: len(decisions)] == decisions
        # Nothing of the step that follows the spike is kept.
        if late and "rollback" in flags:
            assert order.count("read") < sum(event.startswith("compute") for event in order)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("ranks", "switches", "last"), [(1, False, 3), (2, False, 3), (1, True, 3), (2, True, 4)]
)
def test_a_request_to_stop_acts_at_most_one_step_later(
    ranks: int, switches: bool, last: int, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """Ranks find a signal while they wait for data. Their votes come with the numbers of a step."""
    runner = Runner(pool, corpus, tmp_path / "late")
    switch = str(tmp_path / "switch") if switches else ""
    flags = f"--bf16 {f'--kill-switch-path {switch}' if switches else ''}"
    outcomes = pool.run(ranks, train, runner.argv(flags), True, (), 3, switch)
    assert switches or "received a signal to stop" in succeed(outcomes)
    assert [*runner.losses()] == list(range(1, last + 1))
    assert (runner.folder / f"global_step{last}").is_dir()
    # The rest is that of a run without a request.
    succeed(pool.run(ranks, train, runner.argv("--bf16"), True))
    whole = Runner(pool, corpus, tmp_path / "whole")
    whole("--bf16", ranks)
    assert runner.losses() == whole.losses()


def test_an_interval_ends_the_run_at_its_iteration(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    at_once, late = train_twice(pool, corpus, tmp_path, "--exit-interval 5", 2)
    assert at_once[-1] == late[-1] == "read"
    assert late.count("read") == 5


def accept_as_documented(guard: SpikeGuard, loss: float, norm: float) -> bool:
    """Return whether the guard accepts a step, from the description of its module."""
    if guard._only_logs or len(guard._dropped) >= guard._config.spike_guard_max_skips:
        return True
    verdict = guard._judge(loss, norm)
    if verdict.bad_data:
        return False
    if verdict.raised_loss and not verdict.high_norm:
        return guard._in_a_row == 0
    return not verdict.high_norm or guard._since_norm_spike < guard._config.spike_guard_window


def test_limits_are_those_of_the_guard() -> None:
    """Random steps with spikes of each kind, and numbers on both sides of each limit."""
    random = np.random.default_rng(0)
    answers = set()
    for kind in ("skip-step", "rollback"):
        guard = SpikeGuard(SpikeGuardConfig(spike_guard=kind, spike_guard_max_skips=4), {}, 9.0)
        for iteration in range(1, 400):
            loss = 5.0 + random.normal(0, 0.02)
            norm = float(np.exp(random.normal(0, 0.1)))
            if random.random() < 0.1:
                loss *= random.choice([0.5, 1.03, 1.1, 1.3, 2.0])
            if random.random() < 0.1:
                norm *= random.choice([0.1, 3.0, 30.0])
            limits = guard.find_limits()
            losses = [loss, *limits.loss, *limits.loss_otherwise]
            for each in (value for value in losses if np.isfinite(value)):
                for number in (each, np.nextafter(each, -np.inf), np.nextafter(each, np.inf)):
                    numbers = torch.tensor([number, norm], dtype=torch.float64)
                    expected = accept_as_documented(guard, number, norm)
                    assert guard.accepts(number, norm) == expected
                    assert bool(limits.accept(*numbers)) == expected
                    answers.add((expected, limits.loss_otherwise[0] == np.inf))
            applied = guard.accepts(loss, norm)
            outcome = StepOutcome.APPLIED if applied else StepOutcome.REJECTED
            guard.observe(StepResult(loss=loss, grad_norm=norm, outcome=outcome), iteration)
    assert len(answers) == 4


def test_the_loss_scale_is_predicted() -> None:
    scale = LossScale(PrecisionConfig(fp16=True, loss_scale_window=2, hysteresis=2))
    random = np.random.default_rng(0)
    for applied in random.random(40) < 0.6:
        predicted = scale.predict()
        scale.update_after_step(applied=bool(applied), loss_is_finite=True)
        assert scale.scale == predicted[0 if applied else 1]


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
