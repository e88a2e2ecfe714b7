"""requirements.txt repeats pyproject.toml's dependencies."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_requirements_equal_those_of_pyproject() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [line for line in lines if line and not line.startswith("#")] == dependencies
