"""One element of a job array, from its first second to its last: may it start, are its nodes good, train, what follows.

Invariant: what the next element finds does not depend on how this one ended; nothing is decided twice. The training's own processes
are started by one srun, which writes to the one main log; an element that stops for a reason that needs a person stops the array.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from megatron.errors import OperationsError
from megatron.observe.log_line import training_complete_line
from megatron.operations import attempts, node_report

REPOSITORY = Path(__file__).resolve().parents[2]
TAIL_BYTES = 1 << 16
"""Of the log, in which the last words of the training are looked for."""


class Outcome(Enum):
    """Why an element ended; the value is what is noted."""

    LEFT = "left in order"
    """Saved and stopped by time or signal: the next element goes on."""
    COMPLETE = "training is complete"
    KILL_SWITCH = "kill switch"
    NEEDS_PEOPLE = "error that needs a person"
    BAD_NODES = "bad nodes"
    CRASHED = "crashed"
    CRASH_LOOP = "crash loop"


IN_ORDER = frozenset({Outcome.LEFT.value, Outcome.COMPLETE.value, Outcome.KILL_SWITCH.value, Outcome.BAD_NODES.value})
CODES = {
    Outcome.LEFT: 0,
    Outcome.COMPLETE: 0,
    Outcome.KILL_SWITCH: 0,
    Outcome.CRASHED: 1,
    Outcome.BAD_NODES: 1,
    Outcome.NEEDS_PEOPLE: 2,
    Outcome.CRASH_LOOP: 3,
}


@dataclass(frozen=True)
class Element:
    save: Path
    """The run's --save folder."""
    main_log: Path
    command: tuple[str, ...]
    """pretrain_gpt.py and its arguments."""
    kill_switch: Path | None
    max_failed_starts: int
    nodes: node_report.Limits | None
    """None: nodes are not checked."""
    srun: tuple[str, ...]
    """More options of srun."""
    alert: Callable[[str], None]


def run_element(element: Element) -> Outcome:
    """Returns how it ended; on a crash or bad nodes the job has been requeued by then, where Slurm allows it.

    Raises:
        OperationsError: this is no Slurm job. OSError: the log or the run's folder cannot be written.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise OperationsError("there is no SLURM_JOB_ID: this starts inside a Slurm job; submit the script with sbatch")
    element.main_log.parent.mkdir(parents=True, exist_ok=True)
    signals = _Signals()
    attempt = attempts.begin(element.save)
    outcome = _outcome(element, attempt, signals)
    attempts.end(element.save, attempt, outcome.value)
    _say(element, f"element {_name()} ended at iteration {attempts.reached(element.save)}: {outcome.value}")
    _follow(element, outcome)
    return outcome


def _outcome(element: Element, attempt: attempts.Attempt, signals: "_Signals") -> Outcome:
    if element.kill_switch is not None and element.kill_switch.exists():
        _say(element, f"{element.kill_switch} is there; nothing starts until it is removed")
        return Outcome.KILL_SWITCH
    failed = attempts.failed_in_a_row(element.save, attempt.job, IN_ORDER)[:-1]  # the last is this one
    if len(failed) >= element.max_failed_starts:
        told = "; ".join(f"{past.attempt.nodes}: {past.outcome or 'ended without a word'}" for past in failed)
        element.alert(
            f"{len(failed)} starts in a row trained nothing behind iteration {attempt.iteration} ({told}); the array ends here. "
            f"Mend it and submit anew; {element.main_log} has the reasons"
        )
        return Outcome.CRASH_LOOP
    if element.nodes is not None and (bad := _bad_nodes(element, element.nodes)):
        for host, reason in bad.items():
            element.alert(f"node {host} is not used any more: {reason}")
        _exclude(sorted(bad))
        return Outcome.BAD_NODES
    return _train(element, signals)


def _train(element: Element, signals: "_Signals") -> Outcome:
    where = element.main_log.stat().st_size if element.main_log.exists() else 0
    _say(element, f"element {_name()} starts on {os.environ.get('SLURM_JOB_NODELIST', '?')}")
    with tempfile.TemporaryDirectory(dir=element.save, prefix=".element-") as folder:
        told = Path(folder) / "error.json"
        environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(told)}  # where a rank says what a person must mend
        code = _srun(element, ["--kill-on-bad-exit=1", *element.srun], ["-u", *element.command], environment)
        message = _error(told)
    if message is not None:
        element.alert(f"training needs a person: {message}")
        return Outcome.NEEDS_PEOPLE
    if code == 0:
        if training_complete_line() in _behind(element.main_log, where):
            return Outcome.COMPLETE
        stopped = element.kill_switch is not None and element.kill_switch.exists()
        return Outcome.KILL_SWITCH if stopped else Outcome.LEFT
    if signals.received:
        _say(element, f"the training did not end by itself (code {code}) after a signal to this job")
    else:
        _say(element, f"the training ended with code {code}, and no rank could say why")
    return Outcome.CRASHED


def _srun(element: Element, options: Sequence[str], program: Sequence[str], environment: dict[str, str]) -> int:
    """Exit code of a step that has this job's tasks; its output goes to the main log."""
    line = ["srun", *options, sys.executable, *program]
    with open(element.main_log, "ab") as log:
        try:
            step = subprocess.Popen(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=REPOSITORY, env=environment)
        except OSError as error:
            raise OperationsError(f"srun cannot be started: {error}; Slurm's client must be on the PATH") from error
    return step.wait()


def _bad_nodes(element: Element, limits: node_report.Limits) -> dict[str, str]:
    """Host -> what is wrong with it."""
    hosts = _output("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    with tempfile.TemporaryDirectory(dir=element.save, prefix=".nodes-") as folder:
        program = [str(REPOSITORY / "tools" / "node_check.py"), "--report", folder, *limits.as_flags()]
        minutes = f"--time={max(1, round(limits.seconds / 60))}"
        line = ["srun", "--kill-on-bad-exit=0", "--wait=0", minutes, *element.srun, sys.executable, *program]
        with open(element.main_log, "ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=limits.seconds + 60, check=False)
        return node_report.bad_hosts(node_report.read(Path(folder)), hosts, limits)


def _exclude(hosts: Sequence[str]) -> None:
    """From the pending elements of the array; this one follows when it is pending itself: see `_follow`."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    for job in (array, os.environ["SLURM_JOB_ID"]):
        if job is not None:
            _update_exclusions(job, hosts)
    os.environ["MEGATRON_EXCLUDE"] = ",".join(hosts)


def _follow(element: Element, outcome: Outcome) -> None:
    """What this end means for the rest of the array, and for this element."""
    if outcome in (Outcome.COMPLETE, Outcome.KILL_SWITCH, Outcome.NEEDS_PEOPLE, Outcome.CRASH_LOOP):
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        if array is not None:
            _output("scancel", "--state=PENDING", array)
            _say(element, f"what is still pending of array {array} is cancelled: {outcome.value}")
    elif outcome in (Outcome.CRASHED, Outcome.BAD_NODES):
        job = os.environ["SLURM_JOB_ID"]
        _say(element, f"job {job} is requeued: {outcome.value}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # requeueing ends this script, too
        if _try("scontrol", "requeue", job) is None:
            _say(element, f"job {job} could not be requeued (is --requeue missing?); the next element goes on")
            return
        hosts = os.environ.get("MEGATRON_EXCLUDE", "").split(",")
        end = time.monotonic() + 20
        while hosts != [""] and not _update_exclusions(job, hosts) and time.monotonic() < end:
            time.sleep(0.2)


def _update_exclusions(job: str, hosts: Sequence[str]) -> bool:
    """Slurm takes it for pending jobs only."""
    shown = _try("scontrol", "show", "job", job) or ""
    known = re.findall(r"ExcNodeList=(\S+)", shown)
    before = [name for name in known if name != "(null)"]
    return _try("scontrol", "update", f"jobid={job}", f"ExcNodeList={','.join([*before, *hosts])}") is not None


def _error(told: Path) -> str | None:
    try:
        return str(json.loads(told.read_text())["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _behind(log: Path, where: int) -> str:
    """The end of what was written after `where`."""
    with open(log, "rb") as file:
        file.seek(max(where, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _name() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    name = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    return name if restart == "0" else f"{name} (restart {restart})"


def _say(element: Element, text: str) -> None:
    line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}\n"
    with open(element.main_log, "a") as log:
        log.write(line)
    print(line, end="", flush=True)


def _try(*command: str) -> str | None:
    """What it prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _output(*command: str) -> str:
    found = _try(*command)
    if found is None:
        raise OperationsError(f"{shlex.join(command)} failed; is Slurm's client on the PATH, and its controller alive?")
    return found


class _Signals:
    """Slurm signals the training as well, which saves and leaves; this script outlives it, to say how it ended."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = number
