"""A fixture with one Slurm cluster for all tests of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster, NoSlurmError, install, start


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start a real Slurm. Tests are skipped if that is not possible."""
    folder = Path(tempfile.mkdtemp(prefix="s"))
    try:
        install()
        running = start(folder)
    except NoSlurmError as error:
        pytest.skip(f"NO SLURM: NOTHING OF IT IS TESTED: {error}")
    yield running
    running.stop()
