"""Tests of an engine that is added from outside, as CONTRIBUTING.md describes it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from process_pool import ProcessPool, succeed
from training.runs import SIZES

from megatron.base.errors import ConfigError
from megatron.commands.parts import choose_parts
from megatron.data.batches import Microbatch
from megatron.engine.base import StepOutcome, StepResult
from megatron.engine.kind import BuildEngine, EngineKind
from megatron.extras.interop.translators.translator import load_config
from megatron.model.gpt import GPT
from megatron.model.tally import Tally
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import TensorShard
from megatron.plan.rules.finding import Finding, error
from megatron.plan.run_plan import Plan
from megatron.run.start.launch import check_before_torch, read_launch

CALLS: Counter[str] = Counter()


class CountingEngine:
    """An engine that counts its calls. It computes nothing."""

    reads_late = False

    def __init__(self, plan: Plan, mesh: Mesh, timers: Any, wait: Callable[[], None]) -> None:
        self.stages: Sequence[GPT] = ()

    def train_batch(self, microbatches: Sequence[Microbatch], **options: Any) -> StepResult:
        CALLS["train_batch"] += 1
        return StepResult(loss=1.0, grad_norm=1.0, outcome=StepOutcome.APPLIED)

    def queue_batch(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    def eval_batch(self, microbatches: Sequence[Microbatch], tally: Tally | None = None) -> float:
        CALLS["eval_batch"] += 1
        return 1.0

    def score_batch(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        raise NotImplementedError

    def shards(self, *, optimizer: bool) -> list[TensorShard]:
        return []

    def get_scalars(self) -> dict[str, Any]:
        return {"calls": CALLS["train_batch"]}

    def finish_load(self, scalars: dict[str, Any] | None) -> None:
        assert scalars is not None
        CALLS["train_batch"] = scalars["calls"]

    def check_invariants(self, *, repair: bool, iteration: int, last_good: int | None) -> list[str]:
        return []

    def compute_parameter_norm(self) -> float:
        return 0.0

    def describe_choices(self) -> list[tuple[str, str, str]]:
        return [("engine", "a counter", "")]


def load_counter(device_type: str) -> BuildEngine:
    return CountingEngine


def check_precision(plan: Plan) -> Iterator[Finding]:
    if plan.config.precision.fp16:
        yield error("--fp16: a count has no precision; use --no-fp16")


COUNTING = EngineKind("counting", load_counter, rules=(check_precision,))


def train_counting(argv: list[str]) -> dict[str, int]:
    """Train with the counting engine, and return its calls."""
    from megatron.run.parts import Parts
    from megatron.run.pretrain import pretrain

    CALLS.clear()
    pretrain(read_launch(load_config(argv), Parts(engine=COUNTING)))
    return dict(CALLS)


def test_an_added_engine_trains_and_resumes(pool: ProcessPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    argv = [*SIZES.split(), "--mock-data", "--save", folder, "--load", folder]
    outcomes = pool.run(2, train_counting, [*argv, "--exit-interval", "3"])
    assert "a counter" in succeed(outcomes)
    assert [outcome.value for outcome in outcomes] == [{"train_batch": 3}] * 2
    # After its load, the engine goes on from the count in the checkpoint.
    outcomes = pool.run(2, train_counting, [*argv, "--eval-interval", "5", "--eval-iters", "1"])
    succeed(outcomes)
    for outcome in outcomes:
        assert outcome.value == {"train_batch": 10, "eval_batch": 3}
    for outcome in pool.run(2, train_counting, [*argv, "--fp16"]):
        assert outcome.kind == "ConfigError"
        assert "counting does not support:\n  --fp16: a count" in str(outcome.error)


def test_missing_package_of_an_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config([*SIZES.split(), "--deepspeed", "--data-path", "x"])
    check_before_torch(read_launch(loaded, choose_parts(loaded.config)))
    monkeypatch.setattr("megatron.commands.parts._has_extras", lambda: False)
    with pytest.raises(ConfigError, match=r"needs megatron\.extras\.step\.deepspeed, which"):
        check_before_torch(read_launch(loaded, choose_parts(loaded.config)))
