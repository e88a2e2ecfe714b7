"""Launches that tests may break.

Each launch has new processes that can be killed or stopped, and logs on the disk. A process that
torchrun starts spends seconds on imports. These are forked from a server that has imported
everything, so only the process group takes time. Environment, exit codes and the `main` of the
program are as under torchrun.
"""

import contextlib
import importlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from failing_calls import FailingCalls
from process_pool import find_free_port, start_fork_server
from training.runs import SIZES

from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.load import open_checkpoint
from megatron.observe.metrics import read_metrics

BOUND_SECONDS = 120.0
"""Seconds within which an awaited event must happen. It is long enough for a busy machine."""
ERROR = 2
"""Exit code after an error whose message explains how to fix it."""


def _rank(
    program: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: str,
    constants: Mapping[str, Any],
    largest_file: int | None,
    io_error: tuple[str, str] | None,
    delays: Mapping[str, float],
    prepare: Callable[[int], None] | None,
) -> None:
    from megatron.parallel.launcher import die_with_launcher

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)  # a line that was printed survives a kill
    os.environ.update(environment)
    # As in a terminal, also if a shell has started the tests in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_launcher()
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant), name
        setattr(importlib.import_module(module), constant, value)
    for name, seconds in delays.items():
        _delay(name, seconds)
    if prepare is not None:
        prepare(int(environment["RANK"]))
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    import torch

    main = importlib.import_module(program).main
    torch.set_num_threads(1)
    with contextlib.nullcontext() if io_error is None else _failing_once(*io_error):
        sys.exit(main(list(argv)))


def _failing_once(folder: str, call: str) -> contextlib.AbstractContextManager[None]:
    """Make the first call of this kind ("replace latest.new") under the folder fail with EIO."""
    failing = FailingCalls(
        Path(folder), lambda number, name: name == call and failing.calls.count(call) == 1
    )
    return failing.installed()


def _delay(name: str, seconds: float) -> None:
    """Make the first call of a library function slower, as on a slow file system."""
    module, _, function = name.rpartition(".")
    original = getattr(importlib.import_module(module), function)
    called: list[str] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        if not called:
            called.append(name)
            print(f"{name} takes {seconds:g} s")
            time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(importlib.import_module(module), function, slow)


class Launch:
    """All ranks of one start of a command line."""

    def __init__(
        self,
        argv: Sequence[str],
        ranks: int,
        logs: Path,
        *,
        environment: Mapping[str, str] | None = None,
        constants: Mapping[str, Any] | None = None,
        largest_file: Mapping[int, int] | None = None,
        io_error: tuple[str, str] | None = None,
        delays: Mapping[int, Mapping[str, float]] | None = None,
        prepare: Callable[[int], None] | None = None,
        program: str = "megatron.commands.pretrain",
    ) -> None:
        """Start the ranks.

        `io_error`: the folder and the call that fails once on rank 0. `delays`: rank -> function ->
        seconds by which its first call is slower. `prepare`: called with the rank before the
        program starts. It must be importable.
        """
        context = start_fork_server()
        logs.mkdir(parents=True)
        self._logs = [logs / f"rank_{rank}.txt" for rank in range(ranks)]
        self.processes = []
        world = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
        }
        for rank in range(ranks):
            self._logs[rank].touch()
            # With TORCHELASTIC_RUN_ID the kernel ends the ranks when the server ends, that is, when
            # the tests are interrupted.
            own = {
                **world,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "TORCHELASTIC_RUN_ID": "faults",
                **(environment or {}),
            }
            arguments = (
                program,
                list(argv),
                own,
                str(self._logs[rank]),
                dict(constants or {}),
                (largest_file or {}).get(rank),
                io_error if rank == 0 else None,
                dict((delays or {}).get(rank, {})),
                prepare,
            )
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        found = []
        for process in self.processes:
            assert process.pid is not None
            found.append(process.pid)
        return found

    def output(self, rank: int = 0) -> str:
        return self._logs[rank].read_text(errors="replace")

    def all_output(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(len(self._logs)))

    def running(self) -> list[int]:
        """Return the ranks that are running."""
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    def kill(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Send SIGKILL to ranks, and return those that were running."""
        chosen = [
            rank
            for rank in (range(len(self.processes)) if ranks is None else ranks)
            if self.processes[rank].is_alive()
        ]
        for rank in chosen:
            self.processes[rank].kill()
        for rank in chosen:
            self.processes[rank].join(BOUND_SECONDS)
        # One that ended by itself in between was not killed.
        return [rank for rank in chosen if self.processes[rank].exitcode == -signal.SIGKILL]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop every rank within this context."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def freeze(self) -> None:
        for rank in self.running():
            os.kill(self.pids[rank], signal.SIGSTOP)
        for rank in self.running():
            state = ""
            while self.processes[rank].is_alive() and state != psutil.STATUS_STOPPED:
                with contextlib.suppress(psutil.NoSuchProcess):
                    state = psutil.Process(self.pids[rank]).status()

    def thaw(self) -> None:
        for rank in self.running():
            os.kill(self.pids[rank], signal.SIGCONT)

    def wait_for(self, condition: Callable[[], object], what: str, *, step: float = 0.005) -> None:
        """Wait until a condition holds. The test fails if all ranks end first, or after a limit."""
        end = time.monotonic() + BOUND_SECONDS
        while not condition():
            if not self.running() and not condition():
                pytest.fail(f"the run ended before {what}:\n{self.all_output()}")
            if time.monotonic() > end:
                self.kill()
                pytest.fail(f"{what} did not happen in {BOUND_SECONDS:g} s:\n{self.all_output()}")
            time.sleep(step)

    def wait_for_line(self, text: str, times: int = 1) -> None:
        """Wait until rank 0's log has a text so many times."""
        self.wait_for(lambda: self.output().count(text) >= times, f"{text!r} {times} times")

    def codes(self, *, by_themselves: bool = False) -> list[int | None]:
        """Return the exit codes of all ranks.

        When one rank fails, the others are killed, as torchrun does. With `by_themselves` they must
        end without that.
        """
        end = time.monotonic() + BOUND_SECONDS
        while self.running():
            failed = any(process.exitcode for process in self.processes)
            if failed and not by_themselves:
                time.sleep(0.2)  # rank 0 reports first
                self.kill()
            if time.monotonic() > end:
                still = self.running()
                self.kill()
                pytest.fail(
                    f"ranks {still} did not end in {BOUND_SECONDS:g} s:\n{self.all_output()}"
                )
            time.sleep(0.005)
        return [process.exitcode for process in self.processes]


class Job:
    """A command line that is launched repeatedly, and the folder that it saves to."""

    def __init__(
        self,
        data: str,
        cache: Path,
        folder: Path,
        logs: Path,
        flags: str,
        ranks: int,
        metrics: Path | None,
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.logs = logs
        self.metrics_file = metrics or folder / "metrics.jsonl"
        paths = [
            "--data-path",
            data,
            "--data-cache-path",
            str(cache),
            "--save",
            str(folder),
            "--load",
            str(folder),
        ]
        self.argv = [
            *SIZES.split(),
            *paths,
            "--metrics-file",
            str(self.metrics_file),
            *flags.split(),
        ]
        self.launches: list[Launch] = []

    def launch(self, extra: str = "", **how: Any) -> Launch:
        logs = self.logs / f"launch_{len(self.launches)}"
        self.launches.append(Launch([*self.argv, *extra.split()], self.ranks, logs, **how))
        return self.launches[-1]

    def succeed(self, extra: str = "", **how: Any) -> str:
        """Launch, expect exit code 0, and return rank 0's log."""
        launch = self.launch(extra, **how)
        assert launch.codes() == [0] * self.ranks, launch.all_output()
        return launch.output()

    def fail(self, extra: str = "", **how: Any) -> str:
        """Launch, expect the exit code of an error with a message, and return rank 0's log."""
        launch = self.launch(extra, **how)
        codes = launch.codes()
        assert codes[0] == ERROR, f"exit codes {codes}\n{launch.all_output()}"
        return launch.output()

    def curve(self) -> dict[int, tuple[float, float]]:
        """Return {iteration: (loss, gradient norm)}. It is empty if nothing was trained."""
        if not self.metrics_file.exists():
            return {}
        return {
            entry["iteration"]: (entry["lm_loss"], entry["grad_norm"])
            for entry in read_metrics(self.metrics_file)
        }

    def names(self) -> set[str]:
        """Return the names of all checkpoint folders, complete or not."""
        return {
            entry.name for entry in self.folder.iterdir() if entry.name.startswith("global_step")
        }

    def snapshot(self) -> dict[str, bytes]:
        """Return the contents of all files in the folder, by relative path.

        Metrics and chronicle are left out, because a launch that fails adds lines to them. So are
        the temporary files of an interrupted replacement.
        """
        files = (
            p
            for p in self.folder.rglob("*")
            if p.is_file()
            and p.name not in ("metrics.jsonl", "chronicle.jsonl")
            and p.suffix != ".new"
        )
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def verify(self, iteration: int) -> None:
        """Verify the digest of every file of a checkpoint."""
        checkpoint = open_checkpoint(self.folder, iteration)
        checkpoint.check_files()
        for name in checkpoint.manifest.files:
            checkpoint.verify(name)
        checkpoint.verify("manifest.json")

    def check(self, last: int, saved: Sequence[int] | None = None) -> None:
        """Check that the pointers name `last`, which is valid, and that nothing unfinished is left.

        If `saved` is given, exactly these checkpoints must exist.
        """
        assert read_pointed_iteration(self.folder) == last
        assert (self.folder / "latest").read_text() == f"global_step{last}"
        assert (self.folder / "latest_checkpointed_iteration.txt").read_text() == str(last)
        self.verify(last)
        assert not [
            name
            for name in self.names()
            if name.endswith((".unfinished", ".deleting", ".replaced"))
        ]
        assert saved is None or list_saved_iterations(self.folder) == list(saved)

    def clear(self) -> None:
        """Remove everything that the launches wrote."""
        shutil.rmtree(self.folder)
        self.metrics_file.unlink(missing_ok=True)

    def close(self) -> None:
        for launch in self.launches:
            launch.kill()


class Uninterrupted:
    """Curves of runs without faults. Each is trained once, in one launch and with few saves."""

    def __init__(self, make: Callable[[str, str, int], Job]) -> None:
        self._make = make
        self._curves: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
        self._jobs = 0

    def __call__(self, flags: str, last: int, ranks: int = 1) -> dict[int, tuple[float, float]]:
        """Return the curve of iterations 1 to `last`.

        `flags` must have everything that the curve depends on, including --train-iters.
        """
        known = self._curves.get((flags, ranks), {})
        if last not in known:
            self._jobs += 1
            job = self._make(f"uninterrupted_{self._jobs}", flags, ranks)
            job.succeed(f"--exit-interval {max(last, 60)}")
            known = self._curves[flags, ranks] = job.curve()
            assert sorted(known) == list(range(1, max(known) + 1))
            assert last in known
        return {iteration: values for iteration, values in known.items() if iteration <= last}


def saved_lines(output: str) -> list[int]:
    """Return the iterations whose checkpoints rank 0 reported as saved."""
    return [
        int(found)
        for found in re.findall(r"successfully saved checkpoint at iteration +(\d+) to", output)
    ]


def loaded_line(output: str) -> int:
    """Return the iteration that a launch resumed from, or 0."""
    found = re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", output)
    return int(found[1]) if found else 0


NewJob = Callable[..., Job]
"""Type of the fixture `new_job`: (name, flags, ranks=1, folder=None, metrics=None) -> Job."""
