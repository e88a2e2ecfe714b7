"""Fixtures that run the main job as a black box."""

from pathlib import Path

import pytest
from process_pool import ProcessPool
from training.runs import Runner


@pytest.fixture
def run(pool: ProcessPool, corpus: str, tmp_path: Path) -> Runner:
    return Runner(pool, corpus, tmp_path / "run")


@pytest.fixture
def other(pool: ProcessPool, corpus: str, tmp_path: Path) -> Runner:
    return Runner(pool, corpus, tmp_path / "other")
