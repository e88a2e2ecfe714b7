"""Fixtures for jobs whose processes end with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.launches import Job, NewJob, Uninterrupted


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache folder of sample orders."""
    return tmp_path_factory.mktemp("faults_cache")


@pytest.fixture(scope="session")
def uninterrupted(
    corpus: str, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Uninterrupted]:
    """Return `uninterrupted(flags, last, ranks=1)`, the curve of a run without faults."""
    root = tmp_path_factory.mktemp("uninterrupted")
    jobs: list[Job] = []

    def make(name: str, flags: str, ranks: int) -> Job:
        jobs.append(Job(corpus, cache, root / name, root / f"{name}_logs", flags, ranks, None))
        return jobs[-1]

    yield Uninterrupted(make)
    for job in jobs:
        job.close()


@pytest.fixture
def new_job(corpus: str, cache: Path, tmp_path: Path) -> Iterator[NewJob]:
    """Return `new_job(name, flags, ranks=1, folder=None, metrics=None)`."""
    jobs: list[Job] = []

    def make(
        name: str,
        flags: str = "",
        ranks: int = 1,
        folder: Path | None = None,
        metrics: Path | None = None,
    ) -> Job:
        jobs.append(
            Job(
                corpus,
                cache,
                folder or tmp_path / name,
                tmp_path / f"{name}_logs_{len(jobs)}",
                flags,
                ranks,
                metrics,
            )
        )
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
