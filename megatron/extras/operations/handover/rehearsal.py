"""Recorded steps that are trained again by another command, in a scratch folder.

Invariants: the training writes to the scratch folder alone, which is in memory if the host has such
a file system. A process of its own removes the folder when this one ends, even if it is killed. If
both are killed, the next rehearsal on the host removes it.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.base.error_report import FOLDER_VARIABLE
from megatron.base.errors import ConfigError
from megatron.base.file_lock import read_process_space
from megatron.base.plain_text import make_plain, print_to_stderr
from megatron.config.data import DataConfig
from megatron.extras.operations.chronicle.records import read_events
from megatron.extras.operations.handover.comparison import compare_starts
from megatron.extras.operations.handover.record import RecordedSteps, Step, read_recorded
from megatron.observe.chronicle import CHRONICLE

_PROGRAMS = ("pretrain_gpt.py", "megatron-pretrain", "megatron.commands.pretrain")
"""Names of the training program, whose arguments follow it in a command."""
_UNSET = (
    *("--tensorboard-dir", "--metrics-file", "--tracker", "--codecarbon-dir", "--verification"),
    *("--save-interval", "--save-interval-time", "--save-at", "--hf-export-interval"),
    *("--keep-latest-checkpoints", "--keep-every", "--keep-for-handover", "--save-staging"),
    *("--pretrained-checkpoint", "--kill-switch-path", "--exit-duration-in-mins", "--eval-tasks"),
    *("--profile-iterations", "--local-dir"),
)
"""Flags that a rehearsal does without, because they write elsewhere or end the run."""
_END_SECONDS = 40
"""Time in which a launcher ends its workers after SIGTERM.

Those of torchrun are in sessions of their own. It waits 30 s for them, and then kills them.
"""
_REMOVE = r"""
trap '' HUP INT TERM
while read -r line; do group=$line; done
[ -n "$group" ] && kill -s TERM -- "-$group" 2>/dev/null && for second in $(seq "$2"); do
    sleep 1
    kill -s 0 -- "-$group" 2>/dev/null || break
done
[ -n "$group" ] && kill -s KILL -- "-$group" 2>/dev/null
rm -rf -- "$1"
"""
"""What waits for the end of this process, ends what is left of the command, and removes the folder.

A line of its input is the process group of a command.
"""
_WAIT = 'read -r line && exec timeout --kill-after="$0" "$@" </dev/null'
"""What starts a command once its process group is known to the process above.

`timeout` sends SIGTERM at the limit, and then SIGKILL. 0 is no limit.
"""


@dataclass(frozen=True)
class Rehearsal:
    """What a command trained again."""

    steps: Mapping[int, Step]
    """The recorded steps, by iteration."""
    changes: Mapping[str, Sequence[str | None]]
    """What differs between the starts. See `compare_starts`."""
    code: int | None
    """The exit code of the command. None: it was ended after the time limit."""
    output: Sequence[str]
    """The last lines that it printed."""


def find_program(command: Sequence[str]) -> int:
    """Return how many words of a command come before the arguments of the training.

    Raises:
        ConfigError: The training is not found. A script could leave out the flags of the
            rehearsal, and train in the folder of the run.
    """
    for number, word in enumerate(command):
        if os.path.basename(word) in _PROGRAMS:
            return number + 1
    # The arguments may come alone, for one process.
    if command and (command[0].startswith("-") or command[0].endswith((".yaml", ".yml"))):
        return 0
    raise ConfigError(
        f"the command {' '.join(command) or 'is empty and'} does not name pretrain_gpt.py. Put the "
        "launcher, pretrain_gpt.py and its arguments after --, and no script around them"
    )


def list_own_flags(record: RecordedSteps, run: str, folder: Path, kind: str) -> list[str]:
    """Return the flags of a rehearsal. They follow those of the command, and replace them.

    Args:
        record: The steps to train again.
        run: The run's folder or address.
        folder: Where the rehearsal writes.
        kind: The value of --rehearsal.
    """
    words = ["--rehearsal", kind, "--save", str(folder), "--load", run]
    words += ["--load-iteration", str(record.iteration), "--exit-interval", str(record.last)]
    words += ["--data-cache-path", str(folder.parent / "index"), "--log-interval", "1"]
    # The checkpoint is continued, also if the run itself began from another one.
    words += ["--no-finetune", "--load-optim", "--no-memory-snapshot"]
    words += [word for flag in _UNSET for word in (flag, "None")]
    # Ranges that are loaded are put there.
    if "://" in run:
        words += ["--local-dir", str(folder / "local")]
    return words


def link_index_caches(data: DataConfig, folder: Path) -> None:
    """Link the files of the index caches of a run, so that a rehearsal need not build them.

    What it builds replaces a link and not the file.
    """
    folder.mkdir()
    # By default, caches are next to the data sets, which several fields name.
    words = re.findall(r"[^\s,'\"()=]+", str(data))
    places = [Path(word + end) for word in words for end in (".index-cache", "/.index-cache")]
    if data.data_cache_path is not None:
        places = [Path(data.data_cache_path)]
    for path in [path for place in places if place.is_dir() for path in place.iterdir()]:
        # A lock would be shared with the run.
        if path.is_file() and path.suffix != ".lock":
            with contextlib.suppress(OSError):
                (folder / path.name).symlink_to(path.absolute())


class ScratchFolder:
    """A folder that is removed when this process ends, with the command that uses it."""

    def __init__(self, parent: Path | None) -> None:
        """Create the folder.

        Args:
            parent: Where it is created. None: in memory, if the host has such a file system.
        """
        if parent is None:
            parent = Path(tempfile.gettempdir())
            # A file system in memory, on Linux.
            if os.access("/dev/shm", os.W_OK):
                parent = Path("/dev/shm")
        # Processes with this number in common see each other's ids.
        space = zlib.crc32(read_process_space().encode())
        for left in parent.glob(f"handover-{space:08x}-*"):
            # Its processes were all killed at the same time.
            if space and not Path("/proc", left.name.split("-")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)
        name = f"handover-{space:08x}-{os.getpid()}-{uuid.uuid4().hex}"
        self.path = parent.absolute() / name
        # What removes the folder comes first, so that no kill leaves it.
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, "sh", str(self.path), str(_END_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal must not end it.
            start_new_session=True,
            text=True,
        )
        self.path.mkdir(mode=0o700)

    def __enter__(self) -> "ScratchFolder":
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the command if it still runs, and remove the folder."""
        # This closes its input.
        self._remover.communicate()

    def run(self, command: Sequence[str], limit: float | None) -> tuple[int | None, list[str]]:
        """Run a command, and pass its output on to standard error.

        Args:
            command: The command.
            limit: Seconds after which it is ended. None: no limit.

        Returns:
            Its exit code, or None after the time limit, and the last lines that it printed.
        """
        # The reports of errors would be taken for those of a training in this job.
        environment = {key: value for key, value in os.environ.items() if key != FOLDER_VARIABLE}
        begin = time.monotonic()
        started = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, str(_END_SECONDS), str(limit or 0), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # The process that removes the folder ends this group.
            start_new_session=True,
            text=True,
            errors="replace",
        )
        print(started.pid, file=self._remover.stdin, flush=True)
        print("start", file=started.stdin, flush=True)
        assert started.stdout is not None, "it was opened with a pipe"
        # The end of the output explains a failure.
        last: deque[str] = deque(maxlen=100)
        for line in started.stdout:
            last.append(make_plain(line.rstrip("\n")))
            print_to_stderr(last[-1])
        code = started.wait()
        if limit is not None and time.monotonic() - begin >= limit:
            return None, list(last)
        return code, list(last)


def rehearse(
    scratch: ScratchFolder,
    command: Sequence[str],
    record: RecordedSteps,
    run: str,
    limit: float | None,
    kind: str = "exact",
) -> Rehearsal:
    """Train recorded steps again. See `list_own_flags` and `ScratchFolder.run`."""
    words = list(command)
    if find_program(words) == 0:
        words = ["-m", "megatron.commands.pretrain", *words]
    # A job script names the program without Python.
    if words[0] == "-m" or words[0].endswith(".py"):
        words = [sys.executable, *words]
    folder = scratch.path / kind
    own = list_own_flags(record, run, folder, kind)
    code, output = scratch.run([*words, *own], limit)
    # Without a start, the command has failed before its first step.
    starts = [e.details for e in read_events(folder / CHRONICLE) if e.kind == "start"]
    changes = compare_starts(record.start, [{}, *starts][-1], own)
    return Rehearsal(read_recorded(folder / "metrics.jsonl"), changes, code, output)
