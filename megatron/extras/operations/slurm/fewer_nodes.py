"""A training that goes on with fewer nodes after its spare nodes are used up.

The planner chooses the layout, in a process of its own (`tools/plan.py --search-devices`). Only
flags of the layout follow those of the command, so the global batch, the micro-batch and the order
of the samples stay.
"""

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.base.errors import OperationsError
from megatron.base.outside_file import parse_json
from megatron.extras.operations.chronicle.records import read_events
from megatron.extras.operations.slurm import client
from megatron.extras.operations.slurm.attempts import read_reached_iteration
from megatron.observe.chronicle import CHRONICLE

CHANGE = "nodes"
"""Detail of an event "restart" with another number of nodes than before."""
_SIZES = 4
"""Numbers of nodes that are tried. Some nodes may be better left idle than used."""
_SEARCH_SECONDS = 600.0
_MOST_CHANGES = 4
_CHANGES_SECONDS = 3600.0
"""A run takes no nodes back after so many changes of its number of nodes within this time."""
_LONGEST_POLL = 30.0


@dataclass(frozen=True)
class NodeLayout:
    """A layout of the training on fewer nodes."""

    nodes: int
    flags: tuple[str, ...]
    """Flags that choose it if they follow those of the command."""
    seconds: float
    """Predicted seconds of an iteration."""
    text: str
    """Both layouts with their predicted times, for people."""


def choose_layout(
    command: Sequence[str],
    options: Sequence[str],
    tasks: Sequence[int],
    good: Mapping[str, int],
    least: int,
) -> NodeLayout:
    """Return the fastest layout on some of the good hosts.

    Args:
        command: Path of pretrain_gpt.py and its arguments, or `-m MODULE` and them.
        options: More options of the planner.
        tasks: The number of tasks of each host of the complete training.
        good: Each host that may be used, with the number of its tasks.
        least: Fewest hosts.

    Raises:
        OperationsError: No layout fits, or the planner does not run.
    """
    arguments = command[2:] if command[0] == "-m" else command[1:]
    counts = list(good.values())
    # More nodes are not always faster: their number may allow only a long pipeline.
    found: list[NodeLayout] = []
    problem = ""
    for nodes in range(len(counts), max(least, len(counts) - _SIZES + 1) - 1, -1):
        devices = sum(counts[:nodes])
        sizes = {
            "--world-size": sum(tasks),
            "--ranks-per-node": max(tasks),
            "--search-devices": devices,
        }
        words = [word for name, value in sizes.items() for word in (name, str(value))]
        try:
            found.append(_search(nodes, [*options, *words], arguments))
        except OperationsError as error:
            # That of the most nodes is the one to solve.
            problem = problem or f"{devices} devices: {error}"
    if not found:
        raise OperationsError(problem)
    return min(found, key=lambda layout: layout.seconds)


def _search(nodes: int, options: Sequence[str], arguments: Sequence[str]) -> NodeLayout:
    """Search the layouts on some nodes.

    Raises:
        OperationsError: See `choose_layout`.
    """
    line = [sys.executable, "-m", "megatron.commands.plan", "--json", *options, "--"]
    try:
        done = subprocess.run(
            [*line, *arguments],
            cwd=client.find_training_folder(),
            capture_output=True,
            text=True,
            timeout=_SEARCH_SECONDS,
            check=False,
        )
        # The planner prints no search for a command that it refuses.
        search = parse_json(done.stdout)["search"]
        given = search["configured"]
        fitting = [each for each in search["fastest"] if each["verdict"] == "fits"]
        if not fitting:
            raise OperationsError("no layout fits in memory")
        best = fitting[0]
        seconds = float(best["seconds"])
        flags = tuple(shlex.split(best["flags"]))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperationsError(f"the planner does not run: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise OperationsError(f"the planner has no layout ({reason})") from error
    text = (
        f"from {given['layout']}, predicted {given['seconds']:.3g} s, to {best['layout']}, "
        f"predicted {seconds:.3g} s an iteration"
    )
    return NodeLayout(nodes, flags, seconds, text)


def count_changes(save: Path) -> int:
    """Return how often the number of nodes has changed lately.

    Args:
        save: The run's --save folder.
    """
    since = time.time() - _CHANGES_SECONDS
    try:
        events = read_events(save / CHRONICLE)
    except OSError:
        # Without the count, the run must not change its nodes again and again.
        return _MOST_CHANGES
    changes = [event for event in events if event.kind == "restart" and CHANGE in event.details]
    return sum(event.time.timestamp() >= since for event in changes)


@dataclass
class ReturnWatch:
    """Ends the step of a training on fewer nodes when enough lost hosts have been healthy.

    The step is asked to save and to end right after a save. A host is healthy while Slurm reports
    it as idle.
    """

    _lost: Sequence[str]
    """Hosts that the job had and has lost."""
    _missing: int
    """How many of them the complete training needs."""
    _minutes: float
    """Time for which they must be healthy, in minutes."""
    _save: Path
    """The run's --save folder."""
    _log: Callable[[str], None]
    """Writes a line to the main log."""
    has_ended_step: bool = False
    """Whether the step was asked to end, so that the job starts again with these hosts."""

    def __post_init__(self) -> None:
        """Prepare the thread that watches."""
        self._seconds = 60 * self._minutes
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ReturnWatch":
        """Start to watch."""
        if 0 < self._missing <= len(self._lost):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        # The step has ended by itself.
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        since: dict[str, float] = {}
        ready_at: int | None = None
        poll = min(_LONGEST_POLL, 1.0 + self._seconds / 4)
        while not self._end.wait(poll):
            # A host that is not idle in between starts from zero.
            idle = client.list_idle_hosts(self._lost)
            since = {host: since.get(host, time.monotonic()) for host in idle}
            limit = time.monotonic() - self._seconds
            healthy = sorted(host for host, moment in since.items() if moment <= limit)
            if len(healthy) < self._missing or count_changes(self._save) >= _MOST_CHANGES:
                ready_at = None
                continue
            reached = read_reached_iteration(self._save)
            if ready_at is None:
                ready_at = reached
                self._log(f"{', '.join(healthy)} can be used again; the next save ends this step")
            # Right after a save, the end of the step costs no step that must be repeated.
            if reached > ready_at and client.signal_steps("USR2"):
                self.has_ended_step = True
                return
