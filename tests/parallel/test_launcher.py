"""Tests of how rank and world are read from the variables of torchrun, Slurm and MPI."""

import ctypes
import os
import signal
from pathlib import Path

import pytest

from megatron.base.errors import LayoutError
from megatron.parallel import launcher
from megatron.parallel.launcher import (
    LaunchedWorld,
    parse_first_host,
    read_launcher_world,
    read_ranks_per_node,
)

SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "iam[07-09,12]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


def test_a_process_without_a_launcher_is_a_world_of_one() -> None:
    assert read_launcher_world(None, {}) == LaunchedWorld(1, 0)
    assert read_launcher_world(3, {}) == LaunchedWorld(1, 3)


def test_variables_of_torchrun_are_read() -> None:
    assert read_launcher_world(
        None, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    ) == LaunchedWorld(8, 1, 5)
    assert read_launcher_world(2, {"RANK": "5", "WORLD_SIZE": "8"}) == LaunchedWorld(8, 2, 5)


def test_variables_of_srun_are_translated() -> None:
    environment = dict(SRUN)
    assert read_launcher_world(None, environment) == LaunchedWorld(16, 1, 9)
    translated = {
        name: environment[name]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    assert translated == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "iam07",
        "MASTER_PORT": "23456",
    }


def test_variables_that_a_script_exports_take_precedence_over_srun() -> None:
    environment = {**SRUN, "MASTER_ADDR": "iam07-ib0", "MASTER_PORT": "6000", "WORLD_SIZE": "16"}
    assert read_launcher_world(None, environment) == LaunchedWorld(16, 1, 9)
    assert environment["MASTER_ADDR"] == "iam07-ib0"
    assert environment["MASTER_PORT"] == "6000"
    with pytest.raises(LayoutError, match="srun started 16 tasks and WORLD_SIZE is 8"):
        read_launcher_world(None, {**SRUN, "WORLD_SIZE": "8"})


def test_torchrun_takes_precedence_over_srun() -> None:
    environment = {
        **SRUN,
        "RANK": "3",
        "WORLD_SIZE": "64",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "here",
    }
    assert read_launcher_world(None, environment) == LaunchedWorld(64, 3, 3)
    assert environment["MASTER_ADDR"] == "here"


def test_a_batch_script_is_a_world_of_one() -> None:
    """The process that sbatch starts has the job's number of tasks, but it is one process."""
    assert read_launcher_world(
        None, {"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    ) == LaunchedWorld(1, 0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE is 8 and RANK is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE is 4"),
    ],
)
def test_a_world_without_ranks_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        read_launcher_world(None, environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("iam[07-09,12],log1", "iam07"),
        ("r[2-3]n[01,04]", "r2n01"),
        ("gpu-01.site.org,x", "gpu-01.site.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert parse_first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 4),
        ({}, 16),
        # Left over from another launch.
        ({"LOCAL_WORLD_SIZE": "64"}, 16),
    ],
)
def test_ranks_of_a_node(environment: dict[str, str], size: int) -> None:
    assert read_ranks_per_node(16, environment) == size


def test_ranks_of_a_node_that_are_no_number() -> None:
    with pytest.raises(LayoutError, match="LOCAL_WORLD_SIZE is 'many'"):
        read_ranks_per_node(16, {"LOCAL_WORLD_SIZE": "many"})


@pytest.mark.parametrize(
    ("command", "is_launcher"),
    [
        (b"/usr/bin/python\0-m\0torch.distributed.run", True),
        (b"torchrun\0--nproc-per-node", True),
        (b"/sbin/init", False),
        (None, True),
    ],
)
@pytest.mark.parametrize("parent", [1, 4711])
def test_rank_whose_launcher_has_ended_kills_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: bytes | None,
    is_launcher: bool,
    parent: int,
) -> None:
    """A rank under process 1 is an orphan, unless process 1 is the launcher or cannot be read."""
    if command is not None:
        (tmp_path / "cmdline").write_bytes(command)
    signals: list[tuple[int, int]] = []
    asked: list[tuple[int, int]] = []

    class FakeLibrary:
        def prctl(self, option: int, value: int) -> None:
            asked.append((option, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: FakeLibrary())
    monkeypatch.setattr(os, "kill", lambda *arguments: signals.append(arguments))
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(launcher, "Path", lambda path: tmp_path / "cmdline")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    launcher.die_with_launcher()
    assert asked == [], "a run that a shell started may outlive the shell"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    launcher.die_with_launcher()
    assert asked == [(1, signal.SIGKILL)]
    is_orphan = parent == 1 and not is_launcher
    assert signals == ([(os.getpid(), signal.SIGKILL)] if is_orphan else [])


def test_rank_without_a_c_library_trains_without_protection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("no library")

    def refuse(*arguments: object) -> None:
        raise AssertionError("a healthy rank was killed")

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(ctypes, "CDLL", fail)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "kill", refuse)
    launcher.die_with_launcher()
