"""Runs of one process, which all layouts and both engines are compared with."""

from collections.abc import Callable
from pathlib import Path

import pytest
from equivalence.corpus import (
    EVALUATED,
    NO_DROPOUT,
    UNTIED,
    Single,
    command,
    count_iterations,
    curve,
    of_suite,
    validation,
    worst,
    write_sentences,
)
from equivalence.layouts import Layout
from process_pool import ProcessPool, pretrain, succeed

BOUND = 1e-5
Compare = Callable[..., tuple[int, int]]


@pytest.fixture(scope="session")
def single(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Single:
    """Return a function that runs one process and returns the folder of the run.

    The run has checkpoints after half of its steps and at its end. Each run is made once in a
    session.
    """
    folders: dict[tuple[str, bool, str, str, str], Path] = {}

    def run(shape: str, tied: bool, variation: str, more: str = "", data: str = corpus) -> Path:
        key = shape, tied, variation, more, data
        if key not in folders:
            folder = tmp_path_factory.mktemp("single")
            flags = (
                NO_DROPOUT,
                f"--save-interval {count_iterations(variation) // 2} --micro-batch-size 4",
                EVALUATED,
                "" if tied else UNTIED,
                more,
            )
            succeed(pool.run(1, pretrain, command(folder, data, shape, variation, *flags)))
            folders[key] = folder
        return folders[key]

    return run


@pytest.fixture(scope="session")
def sentences(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of the corpus in which each sentence is a document."""
    return write_sentences(corpus, tmp_path_factory.mktemp("sentences"))


@pytest.fixture(scope="session")
def compare(pool: ProcessPool, corpus: str, sentences: str, single: Single) -> Compare:
    """Return a function that trains a layout in a folder, and compares it with one process.

    Both get the flags of the third argument. It returns the number of iterations and evaluations.
    The short suite trains fewer iterations, unless `complete` is set.
    """

    def run(
        layout: Layout, folder: Path, more: str = "", *, complete: bool = False
    ) -> tuple[int, int]:
        shape = layout.shape
        variation = layout.variation if complete else of_suite(layout.variation)
        data = sentences if layout.masks == "documents" else corpus
        shared = f"{layout.training} {more}".strip()
        argv = command(folder, data, shape, variation, NO_DROPOUT, EVALUATED, layout.flags, shared)
        succeed(pool.run(layout.ranks, pretrain, argv))
        alone = single(shape, layout.tied, variation, shared, data)
        assert worst(curve(folder), curve(alone)) < BOUND
        assert worst(validation(folder), validation(alone)) < BOUND
        return len(curve(folder)), len(validation(folder))

    return run
