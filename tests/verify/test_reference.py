"""The reference of one process: what its formulas must share with the run, and what they refuse."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from verify.mutation import ITERATIONS, MODEL

from megatron.commands.verify import VerifyArguments, resolve_command
from megatron.config.optimizer import OptimizerConfig
from megatron.extras.planner.verify.comparison import get_decays
from megatron.extras.planner.verify.reference import compute_initial_weight
from megatron.extras.planner.verify.reference_optimizer import ReferenceOptimizer
from megatron.model.init import initialise
from megatron.model.shape import ModelShape
from megatron.parallel.parameter_spec import Init


@pytest.fixture
def shape() -> ModelShape:
    options = VerifyArguments(world_size=1)
    return resolve_command(options, f"{MODEL} {ITERATIONS}".split())[0].shape


@pytest.mark.parametrize("rows", [96, 3072])
def test_large_matrices_are_drawn_in_the_blocks_of_the_run(rows: int, shape: ModelShape) -> None:
    """Eight experts of width 384 have more elements than a block."""
    name, size = "blocks.0.mlp.experts.up", (rows, 96)
    expected = torch.empty(size)
    initialise(name, Init.NORMAL, expected, size, (0, 0), shape, 7)
    assert torch.allclose(compute_initial_weight(name, size, shape, 7), expected, rtol=1e-6)


def test_an_unknown_optimizer_is_not_taken_for_another_one(shape: ModelShape) -> None:
    unknown = replace(OptimizerConfig(), optimizer=cast(Any, "sgd"))
    parameters = {"head.norm.weight": torch.nn.Parameter(torch.ones(4))}
    with pytest.raises(AssertionError, match="sgd"):
        ReferenceOptimizer(parameters, unknown, shape)
    with pytest.raises(AssertionError, match="sgd"):
        get_decays(unknown)
