"""Lost nodes on a real Slurm: the training goes on with fewer, and takes them back."""

# ruff: noqa: F811 (fixtures are imported by their names)

import contextlib
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_pool import ProcessPool, pretrain, succeed
from slurm.cluster import Cluster
from slurm.test_array_task import (  # noqa: F401
    ROOT,
    SAVED,
    SCRIPT,
    TinyRun,
    plain_arguments,
    tiny,
)

from megatron.extras.operations.chronicle.records import read_events
from megatron.observe.chronicle import CHRONICLE
from megatron.observe.metrics import read_metrics

pytestmark = pytest.mark.full

SAMPLES = 1_000_000
"""More than the run reaches. A signal ends it."""
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
STARTS = re.compile(r"array task \d+(?: \(requeue \d+\))? starts on (\S+)")
ITERATION = re.compile(r"^ iteration +\d+/", re.MULTILINE)
FEWER = "goes on with 3 of 4 nodes"
LIMITS = "--fewer-nodes 3 --grow-after 0.03 --plan=--hardware=cpu"
LOSSES = int(os.environ.get("NODE_LOSSES", 20))
SLOW_TRAINING = """
# A step and a file of a checkpoint take longer, so that a loss falls into them.
import sys
import time
sys.path.insert(0, {root!r})
from megatron.checkpoint import shard_file
from megatron.commands.pretrain import main
from megatron.parallel.rank_progress import RankProgress
def slow_down(owner, name, seconds):
    original = getattr(owner, name)
    def call(*arguments, **options):
        time.sleep(seconds)
        return original(*arguments, **options)
    setattr(owner, name, call)
slow_down(RankProgress, "begin_step", 0.15)
slow_down(shard_file, "write_tensors", 2.0)
main()
"""
ARRAY_TASK = """
# More changes of nodes than an hour of a real run may have.
import sys
sys.path.insert(0, {root!r})
from megatron.extras.operations.commands.slurm_array_task import run_command
from megatron.extras.operations.slurm import fewer_nodes
fewer_nodes._MOST_CHANGES = 1000
sys.exit(run_command())
"""


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
    assert isinstance(tiny.cluster, Cluster)
    tiny.cluster.start_daemons()
    state = ["sinfo", "--noheader", f"--nodes={node}", "--format=%T"]
    tiny.wait_for(lambda: "idle" in tiny.cluster.run(*state), f"{node} is idle")


def kill_node(tiny: TinyRun, node: str) -> None:
    """Kill all processes of a node at once, as a loss of power does. Slurm learns it later."""
    daemon = int((tiny.cluster.folder / "run" / f"slurmd.{node}.pid").read_text())
    namespace = os.readlink(f"/proc/{daemon}/ns/uts")
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.readlink(f"/proc/{process.pid}/ns/uts") == namespace:
                process.kill()


def write_script(tiny: TinyRun) -> str:
    """Write the tiny script with `SLOW_TRAINING` and `ARRAY_TASK`, and return its path."""
    text = (ROOT / SCRIPT).read_text()
    for name, source in (
        ("pretrain_gpt.py", SLOW_TRAINING),
        ("tools/slurm_array_task.py", ARRAY_TASK),
    ):
        path = tiny.folder / f"slow_{Path(name).name}"
        path.write_text(source.format(root=str(ROOT)))
        assert text.count(f" {name} ") == 1
        text = text.replace(f" {name} ", f" {path} ")
    script = tiny.folder / "slow.slurm"
    script.write_text(text)
    return str(script)


def draw_losses(chance: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Return moment, kind and node of each loss. The first node is not lost."""
    losses = []
    special = chance.sample(range(1, count), 3)
    for number in range(count):
        moment = "any"
        if number in special:
            moment = "start" if number == special[0] else "save"
        # Slurm finds out by itself after 30 s.
        kind = "killed" if number % 5 == 4 else "down"
        losses.append((moment, kind, f"n{chance.randint(2, 4)}"))
    return losses


def lose_node(
    tiny: TinyRun, chance: random.Random, starts: int, loss: tuple[str, str, str]
) -> None:
    """Wait for the moment of a loss after a number of starts, lose the node, and check it."""
    moment, kind, node = loss
    tiny.wait_for(lambda: len(STARTS.findall(tiny.main_log())) == starts, f"start {starts}")
    if moment == "start":
        time.sleep(chance.uniform(0.5, 4))
    else:
        tiny.wait_for_line(SAVED, tiny.main_log().count(SAVED) + 1)
    unfinished = []
    if moment == "save":
        tiny.wait_for(lambda: list(tiny.checkpoints.glob("*.unfinished")), "a save")
        unfinished = list(tiny.checkpoints.glob("*.unfinished"))
    elif moment == "any":
        time.sleep(chance.uniform(0, 3))
    if kind == "killed":
        kill_node(tiny, node)
    else:
        change_state(tiny, node, "down")
    tiny.wait_for_line(FEWER, (starts + 1) // 2)
    since = STARTS.split(tiny.main_log().rpartition(FEWER)[0])[-1]
    if moment == "start":
        assert not ITERATION.search(since), since
    # The loss has ended the save. The next start removes what is left of it.
    assert all(path.exists() for path in unfinished)
    print(f"{time.strftime('%X')} {moment}, {kind}: {node}", flush=True)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flags", ["", EXPERTS], ids=["dense", "experts"])
def test_run_survives_many_losses(
    flags: str, tiny: TinyRun, pool: ProcessPool, tmp_path: Path
) -> None:
    """Nodes are lost at random moments, three of them in a save or a start, and all come back."""
    chance = random.Random(72 + len(flags))
    losses = draw_losses(chance, LOSSES)
    job = tiny.submit(
        "--nodes=4",
        "--ntasks-per-node=1",
        "--no-kill",
        "--time=120",
        script=write_script(tiny),
        TRAIN_SAMPLES=str(SAMPLES),
        EXIT_INTERVAL="100000",
        INTERVENTION_ARGS=flags,
        ELEMENT_ARGS=f"{LIMITS} --max-restarts 1000",
    )
    for number, loss in enumerate(losses):
        lose_node(tiny, chance, 2 * number + 1, loss)
        tiny.wait_for_line(SAVED, tiny.main_log().count(SAVED) + 1)
        repair(tiny, loss[-1])
        tiny.wait_for_line(f"array task {job} (requeue {number + 1}) starts on n[1-4]")
    tiny.wait_for_line(SAVED, tiny.main_log().count(SAVED) + 1)
    tiny.cluster.run("scancel", "--signal=USR1", job)
    tiny.wait_for_end(job)
    assert ": left in order" in tiny.main_log()
    events = read_events(tiny.checkpoints / CHRONICLE)
    changes = [event.details["nodes"] for event in events if "nodes" in event.details]
    assert changes == [3, 4] * LOSSES
    check_curve(tiny, pool, tmp_path / "uninterrupted", flags)


def check_curve(
    tiny: TinyRun, pool: ProcessPool, folder: Path, flags: str, bound: float = 1e-5
) -> None:
    """Check the samples of each step, and the curve, against those of a run without losses."""
    entries = read_metrics(tiny.folder / "tiny-logs" / "logs" / "metrics.jsonl")
    found = {entry["iteration"]: entry for entry in entries}
    expected = train_uninterrupted(pool, folder, flags, max(found))
    assert sorted(found) == [entry["iteration"] for entry in expected]
    for entry in expected:
        assert found[entry["iteration"]]["consumed_samples"] == entry["consumed_samples"]
    differences = [
        abs(found[entry["iteration"]]["lm_loss"] - entry["lm_loss"]) for entry in expected
    ]
    print(f"{len(expected)} iterations; the losses differ by at most {max(differences):.1e}")
    assert max(differences) <= bound


@pytest.mark.parametrize("nodes", ["4", "3-4"])
def test_loss_of_the_first_node_requeues_the_job(
    nodes: str, tiny: TinyRun, pool: ProcessPool, tmp_path: Path
) -> None:
    """The batch script dies with its node. The requeued job waits for it, or starts without it."""
    # With one task for each node, Slurm takes `--nodes=3-4` for three.
    script = Path(write_script(tiny))
    text = script.read_text()
    assert text.count("#SBATCH --ntasks-per-node") == 1
    script.write_text(text.replace("#SBATCH --ntasks-per-node", "# "))
    job = tiny.submit(
        f"--nodes={nodes}",
        script=str(script),
        TRAIN_SAMPLES=str(SAMPLES),
        EXIT_INTERVAL="100000",
        ELEMENT_ARGS=f"--train-nodes 4 {LIMITS}",
    )
    tiny.wait_for_line(f"array task {job} starts on n[1-4]")
    tiny.wait_for_line(SAVED)
    kill_node(tiny, "n1")
    requeues = 1
    if nodes == "3-4":
        tiny.wait_for_line(f"array task {job} (requeue 1) goes on with 3 of 4 nodes")
        tiny.wait_for_line(f"array task {job} (requeue 1) starts on n[2-4]")
        tiny.wait_for_line(SAVED, tiny.main_log().count(SAVED) + 1)
        requeues = 2
    else:
        state = ["squeue", "--noheader", "--format=%T"]
        tiny.wait_for(lambda: "PENDING" in tiny.cluster.run(*state), "the requeue")
    repair(tiny, "n1")
    tiny.wait_for_line(f"array task {job} (requeue {requeues}) starts on n[1-4]")
    tiny.wait_for_line(SAVED, tiny.main_log().count(SAVED) + 1)
    tiny.cluster.run("scancel", "--signal=USR1", job)
    tiny.wait_for_end(job)
    assert ": left in order" in tiny.main_log()
    bound = 1e-5 if nodes == "3-4" else 0.0
    check_curve(tiny, pool, tmp_path / "uninterrupted", "", bound)


def test_run_with_too_many_changes_stays_on_fewer_nodes(tiny: TinyRun) -> None:
    """After the third loss, the number of nodes has changed too often."""
    chance = random.Random(72)
    job = tiny.submit(
        "--nodes=4",
        "--ntasks-per-node=1",
        "--no-kill",
        TRAIN_SAMPLES=str(SAMPLES),
        EXIT_INTERVAL="100000",
        ELEMENT_ARGS=LIMITS,
    )
    for number in range(3):
        node = f"n{number + 2}"
        lose_node(tiny, chance, 2 * number + 1, ("any", "down", node))
        tiny.wait_for_line(SAVED, tiny.main_log().count(SAVED) + 1)
        repair(tiny, node)
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
