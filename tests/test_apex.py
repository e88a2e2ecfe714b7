"""apex is recognised by what it offers: PyPI's package of that name is another one."""

import sys
import types

import pytest

from megatron import apex


def test_apex_is_known_by_what_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    assert apex.find("apex.optimizers", "FusedAdam")[0] is None
    toolkit = types.ModuleType("apex")  # PyPI's: a package without optimizers
    toolkit.__path__ = []  # type: ignore[attr-defined]
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
