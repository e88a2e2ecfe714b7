"""Kill -9 at any instant of a rollback of the spike guard: the next start makes the same rollback.

Half of the instants are calls that change the disk, each of which leaves another state. The others
are random times after the decision.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.launches import Launch
from process_pool import ProcessPool, pretrain, succeed
from training.spiky_corpus import random_stretch, write_corpus
from training.test_spike_guard_runs import make_argv, read_interventions, read_losses

ITERATIONS = 60
FLAGS = (
    "--spike-guard rollback --spike-guard-skip-before 10 --spike-guard-skip-after 9 "
    "--keep-latest-checkpoints 2"
)
CHANGES = ("replace", "rename", "fsync", "unlink")
"""Functions of `os` that change the disk."""


def pretrain_until_call(argv: list[str], folder: str, number: int) -> None:
    """Run the main job, and end the process at a call that changes the disk.

    Calls count from the record of the rollback on, which is in the file when the first one begins.
    """
    calls = 0
    path = Path(folder) / "interventions.jsonl"

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if path.exists() and '"decision": "rollback"' in path.read_text():
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    originals = {name: getattr(os, name) for name in CHANGES}
    for name, original in originals.items():
        setattr(os, name, wrap(original))
    try:
        pretrain(argv)
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def main(arguments: list[str]) -> int:
    """Run `pretrain_until_call`. A `Launch` calls this function of a module."""
    folder, number, *argv = arguments
    pretrain_until_call(argv, folder, int(number))
    return 0


@pytest.fixture(scope="module")
def expected(
    pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """Return a data set with a spike, and what a run without a kill does with it."""
    folder = tmp_path_factory.mktemp("expected")
    corpus = write_corpus(folder / "data" / "text", ITERATIONS, random_stretch(43, 52))
    succeed(pool.run(1, pretrain, make_argv(folder / "run", corpus, ITERATIONS, FLAGS)))
    return corpus, summarise(folder / "run")


def summarise(folder: Path) -> dict[str, Any]:
    """Return what must not depend on a kill."""
    records = read_interventions(folder)
    guard = [
        {key: value for key, value in record.items() if key not in ("time", "request")}
        for record in records
        if record["action"] == "spike-guard"
    ]
    rollbacks = [
        (record["to"], record["reason"], record["skip"])
        for record in records
        if record["action"] == "rollback"
    ]
    last = folder / f"global_step{ITERATIONS}"
    for record in guard:
        # A digest covers the time of training, which differs.
        record.pop("digest", None)
        record.pop("from_digest", None)
    return {
        "guard": guard,
        "rollbacks": rollbacks,
        "losses": read_losses(folder),
        "latest": (folder / "latest").read_text(),
        "weights": (last / "rank_00000.safetensors").read_bytes(),
        "aside": [
            sorted(entry.name for entry in part.iterdir() if entry.is_dir())
            for part in (folder / "rolled-back").iterdir()
            if part.name != ".preparing"
        ],
    }


def check_same_decision(
    launch: Launch, folder: Path, argv: list[str], pool: ProcessPool, expected: dict[str, Any]
) -> None:
    """Check that a launch was killed, and that the next one ends as a run without a kill."""
    assert launch.processes[0].exitcode == -signal.SIGKILL, launch.all_output()
    for entry in (folder / "interventions.jsonl").read_text().splitlines():
        json.loads(entry)
    succeed(pool.run(1, pretrain, argv))
    assert summarise(folder) == expected


@pytest.mark.parametrize(
    "number",
    # A rollback here makes about forty such calls.
    [
        pytest.param(number, marks=() if number in (5, 20) else pytest.mark.full)
        for number in (1, 2, 3, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
    ],
)
def test_kill_at_a_change_of_the_disk_leads_to_the_same_rollback(
    number: int, pool: ProcessPool, expected: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    corpus, result = expected
    folder = tmp_path / "run"
    argv = make_argv(folder, corpus, ITERATIONS, FLAGS)
    launch = Launch([str(folder), str(number), *argv], 1, tmp_path / "logs", program=__name__)
    launch.processes[0].join(120)
    check_same_decision(launch, folder, argv, pool, result)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_kill_at_a_random_time_leads_to_the_same_rollback(
    seed: int, pool: ProcessPool, expected: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    corpus, result = expected
    folder = tmp_path / "run"
    argv = make_argv(folder, corpus, ITERATIONS, FLAGS)
    launch = Launch(argv, 1, tmp_path / "logs")
    launch.wait_for(lambda: (folder / "interventions.jsonl").exists(), "a spike", step=0.001)
    # The rollback and the next start of training take about half a second.
    time.sleep(random.Random(seed).uniform(0, 0.4))
    launch.kill()
    check_same_decision(launch, folder, argv, pool, result)
