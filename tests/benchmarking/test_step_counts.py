"""Limits of the calls and launches of a step, counted by benchmarks/step_counts.py.

The counts were made with Python 3.11 and torch 2.13. Other versions make other calls.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


def count_calls(name: str) -> tuple[float, float]:
    """Return the calls of a step, and those inside of `megatron/`."""
    sys.path.insert(0, BENCHMARKS)
    counts = importlib.import_module("step_counts").count_calls(name, "gpt2", 2)
    return counts.calls, counts.inside


def test_an_eager_step_makes_few_calls(pool: Any) -> None:
    """The plain loop of the benchmark makes 8,400, and the trainer once made 36,300."""
    (outcome,) = pool.run(1, count_calls, "trainer")
    calls, inside = outcome.value
    assert 0 < inside < calls <= 20_000


@pytest.mark.full
def test_a_compiled_step_makes_few_calls(pool: Any) -> None:
    (outcome,) = pool.run(1, count_calls, "trainer-compiled")
    assert outcome.value[0] <= 40_000
