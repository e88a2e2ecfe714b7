"""Worlds of real ranks that train by the loop of pretrain_gpt.py, step by step, on command.

Invariant: a world without a pending command uses no core, so several worlds can take turns in one
measurement.
"""

import contextlib
import ctypes
import io
import multiprocessing
import os
import platform
import re
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.commands.parts import choose_parts
from megatron.config.fields import all_fields
from megatron.data.indexed import IndexedDatasetWriter, choose_dtype
from megatron.extras.interop.translators.translator import load_config
from megatron.observe.timers import FORWARD_BACKWARD
from megatron.parallel.launcher import read_launcher_world
from megatron.run.loop import check_nan_iterations, list_waits, train_iteration
from megatron.run.pretrain import leave
from megatron.run.report import StepRecord
from megatron.run.run import Run
from megatron.run.start.build import build_timers, divide_ranks, start_run
from megatron.run.start.job import agree_on_job
from megatron.run.start.launch import read_launch
from megatron.run.start.meet import join_ranks
from megatron.run.state import TrainState
from megatron.schedule.batch_size import ConstantBatchSize

CORPUS = (
    Path(__file__).resolve().parents[1]
    / "tests/fixtures/openwebtext-100/meg-gpt2-openwebtext_text_document"
)
TIMEOUT_SECONDS = float(os.environ.get("WORLD_SECONDS", "300"))
"""A rank that does not answer for this long counts as hanging."""
_DOCUMENT = 1000
"""Tokens of a random document."""
CORES = len(os.sched_getaffinity(0))
"""Cores that this process may use, which can be fewer than the machine has."""


def choose_capture(value: str) -> list[str]:
    """Return --cuda-graph with a value, or nothing if the trainer has no such flag."""
    if any(field.flag == "--cuda-graph" for field in all_fields().values()):
        return ["--cuda-graph", value]
    return []


@dataclass(frozen=True)
class Case:
    """A world and what it trains."""

    name: str
    flags: str
    processes: int = 1
    threads: int = 1
    data: Path = CORPUS
    """Prefix of the data set that it trains on."""

    @property
    def cores(self) -> int:
        """Return the number of cores that the world can keep busy."""
        return min(self.processes * self.threads, CORES)


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank over some steps. Seconds are means per step."""

    seconds: float
    cpu_seconds: float
    """CPU time of all threads of the rank. A rank that waits for another one uses none."""
    forward_backward: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Failure:
    """A rank's exception, as text."""

    text: str


class WorldFailedError(Exception):
    """A rank of a world raised an exception, died or hangs."""


Serving = Callable[[list[str]], Any]
"""Builds the object that serves in a rank from a run's command line. Its methods are the commands.

`Rank` is one such class.
"""


# In the ranks


def work(
    pipe: Connection, serve: Serving, argv: list[str], environment: dict[str, str], threads: int
) -> None:
    """Build the object that serves in this rank, then answer commands until the pipe closes."""
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        # The start of a run prints its plan, which would mix with the tables of the benchmark.
        with contextlib.redirect_stdout(io.StringIO()):
            rank = serve(argv)
        pipe.send("built")
        while True:
            try:
                command, *arguments = pipe.recv()
            except EOFError:
                break
            pipe.send(getattr(rank, command)(*arguments))
        leave(contextlib.ExitStack())
    # Every exception of a run or of a command must reach the parent, which would otherwise only see
    # that the rank has ended.
    except Exception:
        # The parent may have ended. Then no process can read the failure.
        with contextlib.suppress(BrokenPipeError):
            pipe.send(Failure(traceback.format_exc()))


class Rank:
    """A real run without output, of which every step is recorded."""

    def __init__(self, argv: list[str]) -> None:
        """Start the run of `argv` in this rank."""
        loaded = load_config(argv)
        launch = read_launch(loaded, choose_parts(loaded.config))
        world = read_launcher_world()
        ranks = join_ranks(launch)
        job = agree_on_job(launch, ranks)
        timers = build_timers(world)
        mesh = divide_ranks(job.plan, ranks, world, timers)
        self._timers = timers
        self._cuda = mesh.device.type == "cuda"
        # The memory of Python and the libraries is not the run's, so `MemoryRank` subtracts it.
        self._before = 0 if self._cuda else _status_bytes("VmRSS")
        self._run = run = start_run(launch, job, mesh, timers, None)
        run.step_clock.start()
        self._seen: list[StepRecord] = []
        report = run.reporter.report_step

        def keep(state: TrainState, step: StepRecord) -> None:
            self._seen.append(step)
            report(state, step)

        run.reporter.log = lambda line: None  # type: ignore[method-assign]
        run.reporter.report_step = keep  # type: ignore[method-assign]

    def steps(self, count: int, microbatches: int | None = None) -> Measured:
        """Run `count` iterations of the loop and return what was measured.

        Args:
            count: Number of iterations.
            microbatches: Number of microbatches per step. Default: as configured.
        """
        run = self._run
        micro = run.plan.config.batch.micro_batch_size
        if microbatches is not None:
            size = ConstantBatchSize(microbatches * micro * run.plan.data_parallel_size)
            run.plan = replace(run.plan, batch_size=size)
        self._seen.clear()
        # Kernels of earlier steps must not count. CUDA events are read a step later, so the last
        # earlier step is taken here, and the last of these steps at the end.
        self._synchronise()
        self._timers.take()
        start = time.perf_counter()
        cpu = time.process_time()
        for _ in range(count):
            one_iteration(run)
        self._synchronise()
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        taken = [*(step.phase_seconds for step in self._seen), self._timers.take()]
        # The first step of a rank has no events of an earlier one.
        inside = sum(seconds.get(FORWARD_BACKWARD, 0.0) for seconds in taken)
        return Measured(
            seconds / count,
            cpu / count,
            inside / count,
            tuple(step.result.loss for step in self._seen),
        )

    def _synchronise(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


class MemoryRank(Rank):
    """A rank whose memory is measured. Its steps are slower, so they are not timed."""

    def __init__(self, argv: list[str]) -> None:
        """Start the run of `argv` in this rank."""
        _free_at_once()
        super().__init__(argv)

    def peak_bytes(self, count: int) -> int:
        """Return the peak memory during `count` steps, minus the memory before the run began."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            # Writing 5 resets the peak (VmHWM) to the present size.
            Path("/proc/self/clear_refs").write_text("5")
        self.steps(count)
        if self._cuda:
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = _status_bytes("VmHWM")
        return peak - self._before


def one_iteration(run: Run) -> None:
    """Run one iteration as the training loop does."""
    train_iteration(run)
    check_nan_iterations(run.plan, run.state)
    iteration = run.state.iteration
    run.exits.decide(iteration - 1, iteration, waits=list_waits(run))


def _status_bytes(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"no {key} in /proc/self/status"
    return 1024 * int(found[1])


def _free_at_once() -> None:
    """Make glibc return every freed block of 1 MB or more to the system.

    By default it keeps freed blocks of up to 32 MB, which would look like memory in use.
    """
    if platform.libc_ver()[0] == "glibc":
        # M_MMAP_THRESHOLD of malloc.h. Blocks of this size get a mapping of their own, which free()
        # removes.
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


# In the parent process


def write_random_tokens(prefix: Path, vocab_size: int, tokens: int) -> None:
    """Write a data set of random ids, in documents of 1,000 tokens.

    Their loss says nothing, but a step takes as long as with text.
    """
    generator = np.random.default_rng(1)
    documents = max(1, tokens // _DOCUMENT)
    dtype = choose_dtype(vocab_size)
    with IndexedDatasetWriter(prefix, dtype) as writer:
        ids = generator.integers(0, vocab_size, documents * _DOCUMENT, dtype=dtype)
        writer.add_documents(ids, [_DOCUMENT] * documents)


class LaunchedWorld:
    """The ranks of a case, which wait for commands without using a core."""

    def __init__(
        self, case: Case, folder: str, serve: Serving = Rank, *, wait_for_start: bool = True
    ) -> None:
        """Start the ranks of a case.

        Args:
            case: The world and what it trains.
            folder: Folder for temporary files.
            serve: Builds the object that serves in a rank.
            wait_for_start: Wait until all ranks are built. Otherwise several worlds can start
                at the same time, and `receive` must be called once for each.
        """
        # A fork of this process would copy its threads' locks. The fork server has imported the
        # trainer once, so that ranks start quickly.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron.run.start.build"])
        home = Path(tempfile.mkdtemp(dir=folder))
        argv = [
            *case.flags.split(),
            "--data-path",
            str(case.data),
            "--data-cache-path",
            f"{folder}/cache",
        ]
        argv += [
            "--tensorboard-dir",
            f"{home}/tensorboard",
            "--metrics-file",
            f"{home}/metrics.jsonl",
        ]
        self.case = case
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(case.processes):
            own_end, rank_end = context.Pipe()
            launcher = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": case.processes,
                "MASTER_PORT": port,
            }
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                **{key: str(value) for key, value in launcher.items()},
            }
            process = context.Process(
                target=work, args=(rank_end, serve, argv, environment, case.threads), daemon=True
            )
            process.start()
            # The rank's end must not stay open here. Otherwise `recv` would not notice that the
            # rank has died.
            rank_end.close()
            self._pipes.append(own_end)
            self._processes.append(process)
        if wait_for_start:
            self.receive()

    def ask(self, *command: Any) -> list[Any]:
        """Send a command to every rank and return their answers.

        Args:
            command: The name of a method of the serving object, then its arguments.

        Raises:
            WorldFailedError: A rank raised, died or hangs. The world is gone.
        """
        self.send(*command)
        return self.receive()

    def send(self, *command: Any) -> None:
        """Send a command to every rank, as `ask` does. Its answers must be received."""
        for pipe in self._pipes:
            try:
                pipe.send(command)
            except BrokenPipeError:
                self._fail("a rank died")

    def receive(self, seconds: float = TIMEOUT_SECONDS) -> list[Any]:
        """Return the ranks' answers to the oldest command without an answer, or to the start.

        Args:
            seconds: A rank that does not answer for this long counts as hanging.

        Raises:
            WorldFailedError: A rank raised, died or hangs. The world is gone.
        """
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            missing = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(missing, seconds)
            if not ready:
                self._fail(f"no answer within {seconds:.0f} s")
            for pipe in ready:
                rank = next(rank for rank, own in enumerate(self._pipes) if own is pipe)
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    self._fail(f"rank {rank} died")
                if isinstance(answers[rank], Failure):
                    self._fail(answers[rank].text)
        return [answers[rank] for rank in range(len(self._pipes))]

    def _fail(self, why: str) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            # The next world needs the memory of the GPU.
            process.join(10)
        raise WorldFailedError(f"{self.case.name}: {why}")

    def close(self) -> None:
        """End the ranks by closing their pipes. A rank that does not end is killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
