"""Runs commands in forked processes, so that a hundred of them start in a few seconds.

One process imports all commands. It forks for each command line, and the fork runs the command as
its console script would, with its own working folder, environment, arguments and streams. A command
changes no state of the process that later commands are forked from.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from process_pool import start_fork_server

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 60
_CAPABILITIES_VERSION = 0x20080522
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: the rights of root to open files of any mode.
_IGNORE_MODES = 1 << 1 | 1 << 2

_LATE_IMPORTS = (
    "gigatoken",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "megatron.extras.operations.slurm.node_probe",
    "megatron.run.pretrain",
    "orjson",
    "pyarrow.parquet",
    "tiktoken",
    "torch.utils.tensorboard",
    "zstandard",
)
"""Modules that commands import only when they need them. Here they are imported before the fork."""


@dataclass(frozen=True)
class CommandLine:
    """A command line and the state of the process that runs it."""

    words: Sequence[str]
    """Name of the console script without `megatron-`, and its arguments."""
    folder: Path
    """The working folder."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that are added to those of this process."""
    absent: str | None = None
    """A package that cannot be imported, as if it were not installed."""
    obey_modes: bool = False
    """Whether file modes restrict the command, as for a user who is not root."""
    new_process: bool = False
    """Whether the command runs in a new Python process instead of a fork."""


@dataclass(frozen=True)
class Result:
    """What a command returned and printed."""

    code: int
    output: str
    errors: str


def list_entry_points() -> dict[str, str]:
    """Return each console script: its name without `megatron-` -> `module:function`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {name.removeprefix("megatron-"): target for name, target in project["scripts"].items()}


class ForkedCommands:
    """Handle of the process that is forked for each command line."""

    def __init__(self, streams: Path) -> None:
        """Start the process.

        Args:
            streams: An existing folder. The output of the commands is written to files in it.
        """
        self._streams = streams
        context = start_fork_server()
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end, streams))
        self._process.start()
        other_end.close()

    def run(self, line: CommandLine) -> Result:
        """Run a command line and return its result."""
        if line.new_process:
            return _run_new_process(line)
        self._pipe.send(line)
        code = self._pipe.recv()
        output, errors = (
            (self._streams / name).read_text(errors="replace") for name in ("stdout", "stderr")
        )
        return Result(code, output, errors)

    def close(self) -> float:
        """End the process. Return the seconds of CPU time that it and its forks took."""
        self._pipe.send(None)
        seconds = self._pipe.recv()
        self._process.join()
        return float(seconds)


def _serve(pipe: Connection, streams: Path) -> None:
    entry_points = list_entry_points()
    for target in entry_points.values():
        importlib.import_module(target.partition(":")[0])
    for module in _LATE_IMPORTS:
        # If one is not installed, the rows that need it fail with a clear message.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # Garbage collections in the forks skip these objects, so that their memory stays shared.
    gc.freeze()
    while (line := pipe.recv()) is not None:
        child = os.fork()
        if child == 0:
            _become_command(line, entry_points[line.words[0]], streams)
        _, status = os.waitpid(child, 0)
        pipe.send(os.waitstatus_to_exitcode(status))
    times = os.times()
    pipe.send(times.user + times.system + times.children_user + times.children_system)


def _become_command(line: CommandLine, target: str, streams: Path) -> NoReturn:
    """Run the command, and end this process with the exit code that Python would give."""
    # The kernel ends a command that hangs.
    signal.alarm(_LIMIT_SECONDS)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(streams / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
    os.chdir(line.folder)
    os.environ.update(line.environment)
    if line.absent is not None:
        _hide_package(line.absent)
    if line.obey_modes:
        _give_up_rights_over_modes()
    sys.argv = list(line.words)
    module, _, function = target.partition(":")
    code: object = 1
    try:
        code = getattr(importlib.import_module(module), function)()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _hide_package(package: str) -> None:
    """Make each import of a package fail."""
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]


def _give_up_rights_over_modes() -> None:
    """Make file modes restrict this process even if it runs as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    # Two structures, each with effective, permitted and inheritable capabilities.
    data = (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for number in range(3):
        data[number] &= ~_IGNORE_MODES
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset failed")


def _run_new_process(line: CommandLine) -> Result:
    module, _, _ = list_entry_points()[line.words[0]].partition(":")
    done = subprocess.run(
        [sys.executable, "-m", module, *line.words[1:]],
        cwd=line.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **line.environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT_SECONDS,
    )
    return Result(done.returncode, done.stdout, done.stderr)
