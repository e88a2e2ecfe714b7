"""Every kind of hang in every phase of a run: rank, host and line are named within the limit + 5 s.

The faults are real: a process that is stopped by SIGSTOP, a thread that sleeps, a collective that
one rank leaves out, and a file that never answers. The ranks are processes of their own.
"""

import ctypes
import os
import pkgutil
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.launches import NewJob
from faults.test_hangs import (
    CONSTANTS,
    COORDINATES,
    FLAGS,
    HANG_SECONDS,
    LONG_FACTOR,
    LOST,
    STARTED,
    find_line,
    wait_for_verdict,
)

from megatron.base.error_report import FOLDER_VARIABLE
from megatron.extras.operations.slurm.start import read_reports

FULL = pytest.mark.full
SILENT = ("stopped", "mapped file")
"""Faults after which no thread of the process runs."""
BEATS_SECONDS = 3.5
"""Time in which a rank publishes its line at least once, and the others read it."""


@dataclass(frozen=True)
class Site:
    """A place in a phase of the run where a rank hangs."""

    function: str
    """The function in which it hangs, as `module.name` or `module.Class.name`."""
    line: str
    """What the line of its caller begins with. The verdict has it, because the fault is no part of
    the package."""
    call: int = 1
    """The call of the function that hangs, counted from 1."""
    is_long: bool = True
    """Whether the phase may take LONG_FACTOR times the limit."""
    result: Any = None
    """What the function returns in the place of a skipped collective."""


INDEX = Site("megatron.data.indexed_source.IndexedSource.prepare", "data/source.py")
LOAD = Site("megatron.checkpoint.load.Checkpoint.load_into", "run/start/build.py")
AFTER_LOAD = Site("megatron.run.start.build.agree_on_damage", "run/start/build.py")
FIRST_STEP = Site("megatron.run.loop.count_step", "run/loop.py")
FIRST_DECISION = Site("megatron.run.loop.decide", "run/loop.py")
FIRST_READ = Site("megatron.data.position_source.compute_sample_positions", "data/")
TRAIN = Site("megatron.run.loop.count_step", "run/loop.py", 3, is_long=False)
DECISION = Site("megatron.run.loop.decide", "run/loop.py", 3, is_long=False)
EVALUATE = Site("megatron.run.evaluate._sum_over_ranks", "run/", 3, is_long=False, result=[1.0] * 4)
EVALUATION = Site("megatron.run.loop.evaluate_validation", "run/", 3, is_long=False)
SAVE = Site("megatron.checkpoint.save.Saver._end_stage", "checkpoint/save.py")
WRITE = Site("megatron.checkpoint.shard_file.write_tensors", "checkpoint/")
PUBLISH = Site("megatron.checkpoint.stages.Publisher.publish", "checkpoint/stages.py")


def break_rank(victim: int, site: Site, fault: str, rank: int) -> None:
    """Let one rank hang at a place."""
    if rank != victim:
        return
    owner, _, name = site.function.rpartition(".")
    target = pkgutil.resolve_name(owner)
    original = getattr(target, name)
    calls: list[str] = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append("")
        if len(calls) != site.call:
            return original(*arguments, **options)
        hang(fault)
        return site.result

    setattr(target, name, call)


def hang(fault: str) -> None:
    """Hang permanently, or return if a collective is skipped."""
    if fault in SILENT:
        time.sleep(BEATS_SECONDS)
    print(STARTED)
    match fault:
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleeps":
            time.sleep(1000)
        case "file":
            # Opening a pipe without a writer blocks, as a file system that does not answer does.
            pipe = Path(tempfile.mkdtemp()) / "pipe"
            os.mkfifo(pipe)
            pipe.read_bytes()
        case "mapped file":
            # A page of a mapped file is read while Python's lock is held. So no thread answers.
            ctypes.PyDLL(None).sleep(1000)
        case "skips":
            pass


def check_named_hang(new_job: NewJob, site: Site, fault: str, victim: int, extra: str = "") -> None:
    """Let a rank hang, and check that the verdict names it in time with its line of code."""
    flags = f"{FLAGS} {extra} --eval-interval 1 --eval-iters 1 --split 9,1,0 --save-interval 4"
    job = new_job("job", flags, 4)
    if site in (LOAD, AFTER_LOAD):
        job.succeed("--train-iters 2")
    launch = job.launch(constants=CONSTANTS, prepare=partial(break_rank, victim, site, fault))
    launch.wait_for(lambda: STARTED in launch.output(victim), "the fault")
    limit = HANG_SECONDS
    if site.is_long:
        limit *= LONG_FACTOR
    # A process that holds Python's lock cannot end itself either. The launcher ends it.
    silent = fault in SILENT
    start = time.monotonic()
    output = wait_for_verdict(launch, victim if silent else -1, limit, start)
    found = find_line(output, victim)
    if silent:
        assert "does not answer" in found, output
        # Not each of the others has read its last line from the store before it stopped.
        told = [line for line in output.splitlines() if f" rank {victim} on" in line]
        assert any(f"it was at {site.line}" in line for line in told), output
    elif fault != "skips":
        assert f"is at {site.line}" in found, output


PLACES: list[tuple[Site, str]] = [
    (INDEX, "stopped"),
    (INDEX, "sleeps"),
    (INDEX, "file"),
    (INDEX, "mapped file"),
    (LOAD, "stopped"),
    (LOAD, "sleeps"),
    (LOAD, "file"),
    (AFTER_LOAD, "stopped"),
    (AFTER_LOAD, "sleeps"),
    (FIRST_STEP, "stopped"),
    (FIRST_STEP, "sleeps"),
    (FIRST_DECISION, "skips"),
    (FIRST_READ, "file"),
    (FIRST_READ, "mapped file"),
    (TRAIN, "stopped"),
    (TRAIN, "sleeps"),
    (DECISION, "skips"),
    (EVALUATE, "stopped"),
    (EVALUATE, "sleeps"),
    (EVALUATE, "skips"),
    (EVALUATION, "skips"),
    (EVALUATION, "file"),
    (EVALUATION, "mapped file"),
    (SAVE, "stopped"),
    (SAVE, "sleeps"),
    (SAVE, "skips"),
    (WRITE, "stopped"),
    (WRITE, "sleeps"),
    (WRITE, "file"),
]
# Train is in the short suite already, in `test_hangs.py`.
SHORT = [(EVALUATION, "mapped file", 3), (WRITE, "stopped", 0)]


def name_case(value: object) -> str:
    return value.function.rpartition(".")[2] if isinstance(value, Site) else str(value)


@pytest.mark.parametrize(
    ("site", "fault", "victim"),
    [
        pytest.param(site, fault, victim, marks=() if (site, fault, victim) in SHORT else FULL)
        for site, fault in PLACES
        for victim in (0, 3)
    ],
    ids=name_case,
)
def test_hang_is_named_in_every_phase(site: Site, fault: str, victim: int, new_job: NewJob) -> None:
    check_named_hang(new_job, site, fault, victim)


@FULL
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize(
    ("site", "fault"),
    [
        (INDEX, "stopped"),
        (FIRST_STEP, "stopped"),
        (TRAIN, "stopped"),
        (TRAIN, "sleeps"),
        (EVALUATE, "stopped"),
        (SAVE, "stopped"),
        (WRITE, "file"),
        (LOAD, "stopped"),
    ],
    ids=name_case,
)
def test_hang_is_named_with_deepspeed(site: Site, fault: str, victim: int, new_job: NewJob) -> None:
    check_named_hang(new_job, site, fault, victim, "--deepspeed")


@FULL
@pytest.mark.parametrize("victim", [0, 3])
def test_rank_that_leaves_out_a_message_is_named(
    victim: int, new_job: NewJob, tmp_path: Path
) -> None:
    """gloo takes the next message for the missing one. No rank hangs, and none may go on."""
    reports = tmp_path / "reports"
    reports.mkdir()
    job = new_job("job", FLAGS, 4)
    job.succeed("--train-iters 2")
    launch = job.launch(
        constants=CONSTANTS,
        environment={FOLDER_VARIABLE: str(reports)},
        prepare=partial(break_rank, victim, AFTER_LOAD, "skips"),
    )
    assert launch.codes(by_themselves=True) == [LOST] * 4, launch.all_output()
    found = re.search(r"the ranks are out of step.*\n  (.*)\n  (.*)", launch.all_output())
    assert found is not None, launch.all_output()
    name = f"rank {victim} on {os.uname().nodename} ({COORDINATES[victim]})"
    assert found[1].startswith(f"{name} is at checkpoint/finite.py"), found[1]
    assert found[2].startswith("3 of the other ranks are at checkpoint/start.py"), found[2]
    errors, _ = read_reports(reports)
    assert [error.rank for error in errors] == [0, 1, 2, 3]
    assert all(name in error.message for error in errors)
