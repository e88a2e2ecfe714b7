"""Runs of one process, which all layouts and both engines are compared with."""

from pathlib import Path

import pytest
from equivalence.corpus import EVALUATED, NO_DROPOUT, UNTIED, Single, command
from process_pool import ProcessPool, pretrain, succeed


@pytest.fixture(scope="session")
def single(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Single:
    """Return a function that runs one process and returns the folder of the run.

    The run has checkpoints after 5 and 10 steps. Each run is made once in a session.
    """
    folders: dict[tuple[str, bool, str], Path] = {}

    def run(shape: str, tied: bool, variation: str) -> Path:
        key = shape, tied, variation
        if key not in folders:
            folder = tmp_path_factory.mktemp("single")
            flags = (
                NO_DROPOUT,
                "--save-interval 5 --micro-batch-size 4",
                EVALUATED,
                "" if tied else UNTIED,
            )
            succeed(pool.run(1, pretrain, command(folder, corpus, shape, variation, *flags)))
            folders[key] = folder
        return folders[key]

    return run
