"""The reference of one process: what its formulas must share with the run, and what they refuse."""

from typing import Any, cast

import pytest
import torch
from verify.mutation import ITERATIONS, MODEL

from megatron.base import exit_codes
from megatron.commands.verify import VerifyArguments, main, resolve_command
from megatron.config.table import Absent
from megatron.extras.planner.verify.reference import compute_initial_weight
from megatron.extras.planner.verify.reference_optimizer import FORMULAS
from megatron.model.init import initialise
from megatron.model.shape import ModelShape
from megatron.parallel.layers import Init


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


def test_an_optimizer_without_a_formula_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "cannot be verified: the reference has no formula of it"
    monkeypatch.setitem(cast(dict[str, Any], FORMULAS.rows), "muon", Absent(reason))
    command = f"--world-size 1 -- {MODEL} {ITERATIONS} --optimizer"
    assert main([*command.split(), "muon"]) == exit_codes.USER_ERROR
    assert f"--optimizer muon {reason}" in capsys.readouterr().err
