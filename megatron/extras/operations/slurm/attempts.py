"""Record each start of a Slurm job's training, and count those that failed.

A start writes one JSON line when it begins and one when it ends.

Invariant: a start that saved no new checkpoint and did not end in order is a failed start.
`--max-failed-starts` of them in a row end the array, whatever the cause. This includes starts that
could not record their end, because a node crashed.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.base.durable import append_lines
from megatron.base.errors import CheckpointError
from megatron.base.outside_file import load_text, parse_json
from megatron.checkpoint.folder import read_pointed_iteration

FILE = "attempts.jsonl"
"""File name in the run's --save folder."""


@dataclass(frozen=True)
class Attempt:
    """One start of the training."""

    job: str
    """Slurm's number of the array, or of the job if there is no array.

    A new submission has a new number, so its count starts from zero.
    """
    element: str
    """Number of the array task, or an empty text if there is no array."""
    restart: int
    """Number of times that Slurm restarted the job before."""
    nodes: str
    """List of nodes as Slurm writes it, such as n[1-4]."""
    iteration: int
    """Iteration that the pointers named at the start, or 0 without a checkpoint."""
    began: float
    """Time of the start in seconds since 1970. It also identifies the attempt in the file."""
    is_restart: bool = False
    """Whether it follows a start in the same allocation, without a requeue."""


@dataclass(frozen=True)
class PastAttempt:
    """A start and its outcome."""

    attempt: Attempt
    outcome: str | None
    """None if no end was recorded."""


def begin(
    run: Path, environment: Mapping[str, str] = os.environ, *, is_restart: bool = False
) -> Attempt:
    """Record a start in the run's folder, which is created if it is missing.

    Args:
        run: The run's --save folder.
        environment: The environment variables of the job.
        is_restart: See `Attempt`.

    Raises:
        OSError: The record cannot be written.
    """
    run.mkdir(parents=True, exist_ok=True)
    attempt = Attempt(
        _read_job(environment),
        environment.get("SLURM_ARRAY_TASK_ID", ""),
        int(environment.get("SLURM_RESTART_COUNT", "0")),
        environment.get("SLURM_JOB_NODELIST", ""),
        read_reached_iteration(run),
        time.time(),
        is_restart,
    )
    append_lines(run / FILE, [json.dumps({"began": asdict(attempt)})])
    return attempt


def end(run: Path, attempt: Attempt, outcome: str) -> None:
    """Record how a start ended.

    Args:
        run: The run's --save folder.
        attempt: The start, as `begin` returned it.
        outcome: A text for what happened.

    Raises:
        OSError: The record cannot be written.
    """
    record = {
        "began": attempt.began,
        "outcome": outcome,
        "iteration": read_reached_iteration(run),
        "at": time.time(),
    }
    append_lines(run / FILE, [json.dumps({"ended": record})])


def list_failed_in_a_row(run: Path, job: str, in_order: frozenset[str]) -> list[PastAttempt]:
    """Return the job's newest attempts in a row that failed, the oldest first.

    An attempt failed if the checkpoint is still where it was at its start, and its outcome is not
    one of `in_order`. An attempt without an outcome failed too.
    """
    now = read_reached_iteration(run)
    failed = []
    for past in reversed([past for past in _read(run) if past.attempt.job == job]):
        # One start that trained or ended in order shows that starts can work. Older failures do not
        # count.
        if past.outcome in in_order or past.attempt.iteration != now:
            break
        failed.append(past)
    return failed[::-1]


def count_restarts(run: Path, since: float, environment: Mapping[str, str] = os.environ) -> int:
    """Return how often this job has restarted in an allocation since a time.

    Args:
        run: The run's --save folder.
        since: Seconds since 1970.
        environment: The environment variables of the job.
    """
    job = _read_job(environment)
    own = [past.attempt for past in _read(run) if past.attempt.job == job]
    return sum(attempt.is_restart and attempt.began >= since for attempt in own)


def list_past_nodes(run: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the nodes of this job's starts, each list once, as Slurm writes it."""
    job = _read_job(environment)
    return sorted({past.attempt.nodes for past in _read(run) if past.attempt.job == job})


def _read_job(environment: Mapping[str, str]) -> str:
    """Return the number that all starts of one submission share."""
    # All tasks of an array share one count, so the number of the array comes first.
    return environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID", "")


def read_reached_iteration(run: Path) -> int:
    """Return the iteration that the pointers name, or 0 if no pointer can be read.

    An unreadable pointer is not an error here, because the training reports it.
    """
    try:
        return read_pointed_iteration(run) or 0
    except (CheckpointError, OSError):
        return 0


def _read(run: Path) -> Iterator[PastAttempt]:
    """Yield the attempts in the order of their starts.

    Lines that a full disk or a kill cut off are skipped.
    """
    try:
        lines = load_text(run / FILE, decoding="replace").splitlines()
    except FileNotFoundError:
        return
    # The time of the start joins the two lines of an attempt.
    attempts: dict[float, Attempt] = {}
    outcomes: dict[float, str] = {}
    for line in lines:
        try:
            record = parse_json(line)
            if "began" in record:
                attempt = Attempt(**record["began"])
                # A text in place of a number would only fail when attempts are counted.
                attempts[float(attempt.began)] = replace(
                    attempt, began=float(attempt.began), is_restart=bool(attempt.is_restart)
                )
            else:
                outcomes[record["ended"]["began"]] = str(record["ended"]["outcome"])
        except (ValueError, TypeError, KeyError, OverflowError):
            # A torn line is skipped. If it was an end, the attempt has no outcome and counts as
            # failed.
            continue
    for began, attempt in attempts.items():
        yield PastAttempt(attempt, outcomes.get(began))
