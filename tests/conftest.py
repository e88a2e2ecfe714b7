"""Fixtures that many tests share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from process_pool import ProcessPool

os.environ.setdefault("OMP_NUM_THREADS", "1")


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
