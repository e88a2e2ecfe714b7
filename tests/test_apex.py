"""NVIDIA's apex is recognised by its contents, because PyPI has another package of that name."""

import sys
import types

import pytest

from megatron.base import apex


def test_apex_is_recognised_by_its_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    assert apex.find("apex.optimizers", "FusedAdam")[0] is None
    # PyPI's package has no optimizers.
    toolkit = types.ModuleType("apex")
    toolkit.__path__ = []
    monkeypatch.setitem(sys.modules, "apex", toolkit)
    monkeypatch.delitem(sys.modules, "apex.optimizers")
    found, reason = apex.find("apex.optimizers", "FusedAdam")
    assert found is None
    assert "not NVIDIA's" in reason
    optimizers = types.ModuleType("apex.optimizers")
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    assert "no FusedAdam" in apex.find("apex.optimizers", "FusedAdam")[1]
    optimizers.FusedAdam = object  # type: ignore[attr-defined]
    assert apex.find("apex.optimizers", "FusedAdam") == (object, "NVIDIA apex is installed")
