"""Lost nodes on a real Slurm: the training goes on with fewer, and takes them back."""

# ruff: noqa: F811 (fixtures are imported by their names)

import contextlib
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from process_pool import ProcessPool, pretrain, succeed
from slurm.test_array_task import SAVED, TinyRun, plain_arguments, tiny  # noqa: F401

from megatron.extras.operations.chronicle.records import read_events
from megatron.observe.chronicle import CHRONICLE
from megatron.observe.metrics import read_metrics

pytestmark = pytest.mark.full

SAMPLES = 1_000_000
"""More than the run reaches. A signal ends it."""
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
STARTS = re.compile(r"array task \d+(?: \(requeue \d+\))? starts on (\S+)")


def train_uninterrupted(
    pool: ProcessPool, folder: Path, flags: str, iterations: int
) -> list[dict[str, Any]]:
    """Return the records of a run on four ranks without losses."""
    variables = {"TRAIN_SAMPLES": SAMPLES, "EXIT_INTERVAL": iterations}
    argv = [*plain_arguments(folder, **variables), *flags.split()]
    succeed(pool.run(4, pretrain, argv))
    return list(read_metrics(folder / "tiny-logs" / "logs" / "metrics.jsonl"))


def change_state(tiny: TinyRun, node: str, state: str) -> None:
    tiny.cluster.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")


def repair(tiny: TinyRun, node: str) -> None:
    """Let Slurm use a node again. Its daemon may have done that already."""
    with contextlib.suppress(AssertionError):
        change_state(tiny, node, "resume")
    state = ["sinfo", "--noheader", f"--nodes={node}", "--format=%T"]
    tiny.wait_for(lambda: "idle" in tiny.cluster.run(*state), f"{node} is idle")


@pytest.mark.parametrize("flags", ["", EXPERTS], ids=["dense", "experts"])
def test_run_shrinks_and_grows(
    flags: str, tiny: TinyRun, pool: ProcessPool, tmp_path: Path
) -> None:
    """Nodes are lost at a random moment, in a save and in a start, and all come back.

    After the third loss, the number of nodes has changed too often, and the run stays on three.
    """
    chance = random.Random(len(flags))
    job = tiny.submit(
        "--nodes=4",
        "--ntasks-per-node=1",
        "--no-kill",
        TRAIN_SAMPLES=str(SAMPLES),
        EXIT_INTERVAL="100000",
        INTERVENTION_ARGS=flags,
        ELEMENT_ARGS="--fewer-nodes 3 --grow-after 0.03 --plan=--hardware=cpu",
    )
    for number, moment in enumerate(("any", "save", "start"), start=1):
        node = f"n{chance.randint(2, 4)}"
        if moment == "start":
            tiny.wait_for(lambda: len(STARTS.findall(tiny.main_log())) == 5, "the fifth start")
            time.sleep(chance.uniform(0.5, 3))
        else:
            saves = tiny.main_log().count(SAVED)
            tiny.wait_for_line(SAVED, saves + 1)
        if moment == "save":
            tiny.wait_for(lambda: list(tiny.checkpoints.glob("*.unfinished")), "a save")
        elif moment == "any":
            time.sleep(chance.uniform(0, 1))
        change_state(tiny, node, "down")
        tiny.wait_for_line("goes on with 3 of 4 nodes", number)
        saves = tiny.main_log().count(SAVED)
        tiny.wait_for_line(SAVED, saves + 1)
        repair(tiny, node)
        if number < 3:
            tiny.wait_for_line(f"{node} can be used again", 1)
            tiny.wait_for_line(f"array task {job} (requeue {number}) starts on n[1-4]")
    tiny.wait_for_line(SAVED, tiny.main_log().count(SAVED) + 2)
    tiny.cluster.run("scancel", "--signal=USR1", job)
    tiny.wait_for_end(job)
    log = tiny.main_log()
    assert ": left in order" in log
    assert "(requeue 3)" not in log
    assert log.count("predicted") == 6
    events = read_events(tiny.checkpoints / CHRONICLE)
    devices = [event.details["devices"] for event in events if event.kind == "start"]
    assert [size for size in devices if size == 3] == [3, 3, 3]
    changes = [event.details["nodes"] for event in events if "nodes" in event.details]
    assert changes == [3, 4, 3, 4, 3]
    entries = read_metrics(tiny.folder / "tiny-logs" / "logs" / "metrics.jsonl")
    found = {entry["iteration"]: entry for entry in entries}
    expected = train_uninterrupted(pool, tmp_path / "uninterrupted", flags, max(found))
    assert sorted(found) == [entry["iteration"] for entry in expected]
    for entry in expected:
        own = found[entry["iteration"]]
        assert own["consumed_samples"] == entry["consumed_samples"]
        assert own["lm_loss"] == pytest.approx(entry["lm_loss"], abs=1e-5)
