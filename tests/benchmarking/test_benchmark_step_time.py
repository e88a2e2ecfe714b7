"""Tests of benchmarks/step_time.py that need no measurement."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def step_time(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module, as the script imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("step_time")
    sys.modules.pop("step_time", None)


@pytest.mark.parametrize(
    ("size", "fitting"),
    [
        ("125m", ["trainer", "bare", "hf"]),
        # A model of 1.4 billion parameters needs 26 GB, and activations need 29 GB.
        ("1.3b", ["trainer"]),
        ("7b", []),
    ],
)
def test_contestants_that_do_not_fit_are_left_out(
    size: str, fitting: list[str], step_time: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = step_time.Arguments(size=size)
    flags = step_time.command_line(arguments, "llama", "bf16")
    plan = resolve(load_config([*flags.split(), "--data-path", "/tmp/none"]).config, 1)
    names = ["trainer", "bare", "hf"]
    assert step_time.choose_fitting(names, plan, 80 * 10**9) == fitting
    shown = capsys.readouterr().out
    assert shown.count("SKIPPED") == len(names) - len(fitting)
