"""Launches of the training on new processes. They are forked, so that they import nothing again.

The caller has imported torch and the training already. It must not have started threads, because a
fork copies only the thread that calls it.
"""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from megatron.base.errors import MegatronError
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml
from megatron.extras.planner.verify.recording import RankRecord, Train, load_records, run_recorded
from megatron.extras.planner.verify.reduction import replace_values

LIMIT_SECONDS = 120.0
"""Longest time of a launch whose processes have a core each. A rank that waits for a message that
never comes would not end. A launch takes some seconds."""


class LaunchError(Exception):
    """A rank has failed. The text has the rank and its error."""


class LaunchTimeoutError(LaunchError):
    """Ranks have not ended in time. They may be slow, or wait for each other."""


def choose_limit(world_size: int) -> float:
    """Return the seconds that a launch may take on this machine, with its cores and its load."""
    busy = world_size + os.getloadavg()[0]
    return LIMIT_SECONDS * max(1.0, busy / len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Launcher:
    """Starts training runs in a folder."""

    train: Train
    folder: Path
    limit: float | None = None
    """Seconds of a launch. None: what `choose_limit` returns."""

    def __post_init__(self) -> None:
        """Create the folder."""
        self.folder.mkdir()

    def launch(
        self, config: Config, world_size: int, name: str, last: int, run: str
    ) -> tuple[Sequence[RankRecord], LaunchError | None]:
        """Train a configuration up to an iteration.

        Args:
            config: The configuration.
            world_size: Number of processes.
            name: Name of the launch, for its files.
            last: The run saves and ends at multiples of this iteration.
            run: Name of the folder that it saves to, and loads from.

        Returns:
            The records of all ranks, and the first error. After an error, steps are missing.
        """
        path = self.folder / name
        save = str(self.folder / run)
        # A launch resumes if its folder has a checkpoint.
        values = {"checkpoint.save": save, "checkpoint.load": save, "batch.exit_interval": last}
        path.with_suffix(".yaml").write_text(dump_yaml(replace_values(config, values)))
        argv = ["--config", str(path.with_suffix(".yaml"))]
        error = None
        try:
            self.run_world(world_size, name, partial(run_recorded, self.train, argv, path))
        except LaunchError as failure:
            error = failure
        return load_records(path, world_size), error

    def run_world(self, world_size: int, name: str, work: Callable[[int], None]) -> None:
        """Start new processes, and call a function with the rank in each.

        What the ranks print is in the folder NAME.output.

        Raises:
            LaunchError: A rank has failed.
            LaunchTimeoutError: A rank has not ended in time.
        """
        limit = self.limit or choose_limit(world_size)
        output = self.folder / f"{name}.output"
        # The log of a rank helps to explain its error.
        output.mkdir()
        context = multiprocessing.get_context("fork")
        port = _find_free_port()
        running = {}
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, world_size, port, work, output, sender)
            process = context.Process(target=_run_rank, args=arguments)
            process.start()
            # The end of the rank then closes the pipe, and `recv` does not wait.
            sender.close()
            running[receiver] = rank, process
        processes = [process for _, process in running.values()]
        end = time.monotonic() + limit
        try:
            while running:
                ready = wait(list(running), timeout=max(0.0, end - time.monotonic()))
                # A rank that hangs is reported as an error.
                if not ready:
                    ranks = sorted(rank for rank, _ in running.values())
                    raise LaunchTimeoutError(
                        f"{name}: ranks {ranks} still run after {limit:g} s. The machine may be "
                        f"slow, or they wait for each other. --time-limit {4 * limit:g} allows "
                        "more time"
                    )
                for pipe in ready:
                    assert isinstance(pipe, Connection), "only pipes are waited for"
                    rank, _ = running.pop(pipe)
                    error = _receive(pipe)
                    if error is not None:
                        raise LaunchError(f"{name}, rank {rank}: {error}")
        finally:
            for process in processes:
                # The other ranks wait for the one that has failed.
                if running:
                    process.kill()
                process.join()


def _receive(receiver: Connection) -> str | None:
    """Return the error of a rank, or None if it has succeeded."""
    try:
        error: str | None = receiver.recv()
    except EOFError:
        return "the process ended without a result"
    return error


def _run_rank(
    rank: int,
    world_size: int,
    port: int,
    work: Callable[[int], None],
    folder: Path,
    result: Connection,
) -> None:
    """Run one rank, send its error or None, and end the process."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    # Otherwise, all ranks would write to the same terminal.
    os.dup2(output, 1)
    os.dup2(output, 2)
    error = None
    try:
        work(rank)
    except MegatronError as failure:
        error = str(failure)
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    # Before the exit, because `os._exit` writes no buffers.
    result.send(error)
    # Threads of process groups could keep a normal exit from ending. The result has been sent.
    os._exit(0)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
