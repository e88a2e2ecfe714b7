"""The limits of the project's size fall, and rise only by grants that give a reason."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).resolve().parents[1] / ".ci"
TEXT = '[limits]\n"modules" = 10\n[[grants]]\nlimit = "modules"\nmore = 2\nreason = "a new layer"\n'


@pytest.fixture
def limits(monkeypatch, tmp_path) -> ModuleType:
    """Return the script, in a folder of its own, with two sizes instead of the project's."""
    monkeypatch.syspath_prepend(str(CI))
    spec = importlib.util.spec_from_file_location("limits_script", CI / "limits.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "LIMITS", tmp_path / "limits.toml")
    script.LIMITS.write_text(TEXT)
    return script


def run(script: ModuleType, monkeypatch, modules: int, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["limits.py", *arguments])
    monkeypatch.setattr(script, "measure_sizes", lambda: iter([("modules", modules)]))
    return script.main()


@pytest.mark.parametrize(("modules", "code"), [(10, 0), (12, 0), (13, 1)])
def test_a_grant_raises_a_limit(limits, monkeypatch, modules, code):
    assert run(limits, monkeypatch, modules) == code


def test_lowering_removes_the_grants_and_never_raises(limits, monkeypatch):
    run(limits, monkeypatch, 5, "--lower")
    assert limits.read_limits(limits.LIMITS.read_text()) == ({"modules": 5}, [])
    run(limits, monkeypatch, 100, "--lower")
    assert limits.read_limits(limits.LIMITS.read_text()) == ({"modules": 5}, [])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('reason = "a new layer"', 'reason = " "', "needs"),
        ("more = 2", "", "needs"),
        ('limit = "modules"', 'limit = "other"', "'other', which has no limit"),
    ],
)
def test_a_grant_without_a_reason_is_refused(limits, old, new, message):
    with pytest.raises(SystemExit, match=message):
        limits.read_limits(TEXT.replace(old, new))


def test_a_size_without_a_limit_is_above_it(limits, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["limits.py"])
    monkeypatch.setattr(limits, "measure_sizes", lambda: iter([("new", 1)]))
    assert limits.main() == 1
