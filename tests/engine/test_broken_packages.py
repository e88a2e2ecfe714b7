"""Tests of packages that are installed but cannot be imported. The start must name the fix."""

import sys

import pytest

from megatron.base.errors import ConfigError
from megatron.config.kernels import KernelsConfig
from megatron.extras.step.float8.kind import FLOAT8
from megatron.extras.step.kernels.kind import choose_operators


def test_torchao_that_does_not_fit_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.extras.step.float8.rounding", raising=False)
    # The import of a module that is None fails.
    monkeypatch.setitem(sys.modules, "torchao.float8.float8_utils", None)
    with pytest.raises(ConfigError, match=r"import of torchao fails .*float8_utils.*--upgrade"):
        FLOAT8.load("cpu")


def test_a_damaged_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setitem(sys.modules, "triton.language", None)
    config = KernelsConfig(rope_fusion=True)
    with pytest.raises(ConfigError, match="--rope-fusion: the import of Triton fails"):
        choose_operators(config, "cuda")
