"""Tests of the warnings about values that float8 loses, and of an overflow on one rank."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from process_pool import pretrain, succeed
from training.runs import Runner

from megatron.extras.operations.chronicle.records import read_events
from megatron.extras.step.float8.engine import Float8Watch
from megatron.extras.step.float8.operand_shares import LAYERS, OperandCounter, Share
from megatron.extras.step.float8.recipe import Recipe
from megatron.extras.step.float8.rounding import FORWARD, round_to_float8
from megatron.observe.chronicle import CHRONICLE
from megatron.parallel.grid import Grid

MODEL = (
    "--num-layers 3 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 48 "
    "--position-embedding-type rotary --glu-activation swiglu --normalization RMSNorm --bf16 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --fp8-emulate"
)
OUTLIER = "blocks.2.mlp.down"


def damage_and_train(argv: list[str]) -> None:
    """Train with one huge weight, and with an infinity on the last rank in iteration 2."""
    from megatron.engine.engine_base import EngineBase
    from megatron.extras.step.float8.engine import Float8Engine
    from megatron.extras.step.float8.products import Float8Products

    multiply, prepare = Float8Products.multiply, Float8Engine._prepare_step
    initialise = EngineBase._initialise_weights
    iterations: list[int | None] = []

    def initialise_with_outlier(engine: Any) -> None:
        initialise(engine)
        for shard in engine.shards(optimizer=False):
            if shard.name == f"{OUTLIER}.weight" and shard.offset == (0, 0):
                shard.tensor[0, 0] = 1e6
        engine._refresh_model()

    def remember(engine: Any, iteration: int | None, microbatches: int) -> None:
        iterations.append(iteration)
        prepare(engine, iteration, microbatches)

    def overflow(its: Any, x: torch.Tensor, *arguments: Any) -> Any:
        if iterations[-1] == 2 and its.names == ("blocks.2.attention.out",):
            x = x.clone()
            if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                x[0, 0, 0] = torch.inf
        return multiply(its, x, *arguments)

    with (
        mock.patch.object(EngineBase, "_initialise_weights", initialise_with_outlier),
        mock.patch.object(Float8Engine, "_prepare_step", remember),
        mock.patch.object(Float8Products, "multiply", overflow),
    ):
        pretrain(argv)


def test_a_huge_weight_is_a_warning_and_an_overflow_of_one_rank_is_dropped(run: Runner) -> None:
    flags = (
        f"{MODEL} --fp8-format hybrid --fp8-recipe tensorwise --tensor-model-parallel-size 2 "
        "--sequence-parallel --pipeline-model-parallel-size 2 --checkpoint-activations "
        "--train-iters 3 --log-layer-stats-interval 1 --check-invariants-interval 1"
    )
    log = succeed(run.pool.run(4, damage_and_train, run.argv(flags)))
    warnings = [line for line in log.splitlines() if line.startswith("warning: float8 loses")]
    (warning,) = (line for line in warnings if f"of the weights of {OUTLIER} become" in line)
    # All but the huge one, of 48 x 32.
    assert "at iteration 1: 99.93% of the weights" in warning
    assert "--fp8-recipe rowwise" in warning
    alerts = [e.details["text"] for e in read_events(run.folder / CHRONICLE) if e.kind == "alert"]
    assert warning.removeprefix("warning: ") in alerts
    steps = [e for e in run.metrics() if "output_logit" in e]
    assert [step["nan_iterations"] for step in steps] == [0, 1, 0]
    of_layers = steps[0]["layer_fp8_weight_flushed"]
    assert of_layers[2] > 0.999
    assert max(of_layers[:2]) < 0.01
    # The step with the infinity changed no weight.
    assert steps[0]["layer_params_norm"] == steps[1]["layer_params_norm"]
    assert steps[1]["layer_params_norm"] != steps[2]["layer_params_norm"]


def test_a_healthy_run_has_no_warning(run: Runner) -> None:
    """The gradients are in e4m3, whose range is the smaller one."""
    flags = "--fp8-format e4m3 --fp8-recipe tensorwise --log-layer-stats-interval 10"
    log = run(f"{MODEL} {flags} --train-iters 50 --log-interval 50 --global-batch-size 1")
    assert "float8 loses" not in log
    assert "float8 cuts off" not in log
    flushed = [e["layer_fp8_gradient_flushed"] for e in run.metrics() if "output_logit" in e]
    assert len(flushed) == 5
    assert all(0 < max(of_layers) < 0.1 for of_layers in flushed)


def test_values_are_counted() -> None:
    counter = OperandCounter(2, torch.device("cpu"))
    x = torch.tensor([[1.0, 0.0, 1e-9, -1e-9], [2.0, 0.0, 500.0, 1.0]])
    # The largest value should be 500.
    rounded = round_to_float8(x, torch.tensor(1.0), FORWARD)
    counter.count("input", "blocks.1.mlp.down", x, rounded)
    counter.start()
    for _ in range(2):
        counter.count("input", "blocks.1.mlp.down", x, rounded)
    wrong = torch.full((2, 4), torch.inf)
    wrong[1] = 1.0
    counter.count(
        "weight", "blocks.0.mlp.up", wrong, round_to_float8(wrong, torch.tensor(torch.inf), FORWARD)
    )
    alone: Any = SimpleNamespace(grid=Grid(1, 1, 1))
    shares = counter.take_shares(alone)
    assert shares[:, 0, LAYERS.index("mlp.down"), 1].tolist() == pytest.approx([2 / 6, 2 / 6])
    assert shares.count_nonzero() == 2


def test_a_share_must_grow_for_the_next_warning() -> None:
    watch = Float8Watch(Recipe("e4m3", rowwise=False, emulated=True))

    def observe(flushed: Sequence[float], saturated: float = 0.0) -> list[str]:
        shares = [
            Share("gradient", f"blocks.{n}.mlp.up", 0.0, each) for n, each in enumerate(flushed)
        ]
        return watch.observe([*shares, Share("input", "blocks.0.mlp.down", saturated, 0.0)], 7)

    assert observe([0.05, 0.1]) == []
    (text,) = observe([0.12, 0.2, 0.3, 0.4, 0.5])
    assert "50.00% of the gradients of blocks.4.mlp.up" in text
    assert "smaller shares of 2 others" in text
    assert "--fp8-format hybrid" in text
    assert observe([0.2, 0.4, 0.6, 0.8, 1.0]) == []
    (text,) = observe([0.25, 0.4])
    assert "blocks.0.mlp.up" in text
    assert "blocks.1.mlp.up" not in text
    (text,) = observe([], 1e-5)
    assert "report it" in text
