"""Fixtures that many tests share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from process_pool import ProcessPool

os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
LONG_FOLDERS = ("slurm", "equivalence", "training", "faults", "engine", "examples")
"""The folders with most of the time, longest first. With several workers they start first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each folder to one of xdist's workers, so that its fixtures are made once."""
    if not hasattr(config, "workerinput"):
        return

    def find_folder(item: pytest.Item) -> str:
        return item.path.relative_to(TESTS).parts[0]

    for item in items:
        item.add_marker(pytest.mark.xdist_group(find_folder(item)))
    order = {folder: rank for rank, folder in enumerate(LONG_FOLDERS)}
    items.sort(key=lambda item: order.get(find_folder(item), len(order)))


@pytest.fixture(scope="session")
def pool() -> Iterator["ProcessPool"]:
    """Pool of eight real processes, which start once in a session."""
    from process_pool import ProcessPool

    shared = ProcessPool()
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def corpus() -> str:
    """Prefix of a small indexed data set of real web text with a vocabulary of 5000."""
    folder = Path(__file__).parent / "fixtures" / "openwebtext-100"
    return str(folder / "meg-gpt2-openwebtext_text_document")
