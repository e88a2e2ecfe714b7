"""Fixtures that many tests share."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pool() -> Iterator["ProcessPool"]:  # noqa: F821
    """Eight real processes, started once for the whole session."""
    from process_pool import ProcessPool

    shared = ProcessPool()
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def corpus() -> str:
    """Prefix of a small indexed data set of real web text (5000 ids)."""
    from pathlib import Path

    return str(
        Path(__file__).parent
        / "fixtures"
        / "openwebtext-100"
        / "meg-gpt2-openwebtext_text_document"
    )
