"""What became of each start of a Slurm job's training, one JSON line for its begin and one for its end.

Invariant: a start that trained nothing and did not end in order counts against the job; `--max-failed-starts` of them in a row end
the array, however they died: also those that could not write an end (a node that went away).
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.checkpoint.folder import read_pointed_iteration
from megatron.durable import append_lines
from megatron.errors import CheckpointError

FILE = "attempts.jsonl"
"""In the run's --save folder."""


@dataclass(frozen=True)
class Attempt:
    job: str
    """Slurm's number of the array, or of the job where there is none: a new submission begins to count anew."""
    element: str
    """Of the array; "" where there is none."""
    restart: int
    nodes: str
    iteration: int
    """That the pointers named when it began; 0 without a checkpoint."""
    began: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class PastAttempt:
    attempt: Attempt
    outcome: str | None
    """None: it ended without a word."""


def begin(run: Path, environment: Mapping[str, str] = os.environ) -> Attempt:
    """Note a start in the folder, which is made where it is missing. Raises OSError."""
    run.mkdir(parents=True, exist_ok=True)
    attempt = Attempt(
        environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID", ""),
        environment.get("SLURM_ARRAY_TASK_ID", ""),
        int(environment.get("SLURM_RESTART_COUNT", "0")),
        environment.get("SLURM_JOB_NODELIST", ""),
        read_reached_iteration(run),
        time.time(),
    )
    append_lines(run / FILE, [json.dumps({"began": asdict(attempt)})])
    return attempt


def end(run: Path, attempt: Attempt, outcome: str) -> None:
    """`outcome`: a word for what happened. Raises OSError."""
    record = {
        "began": attempt.began,
        "outcome": outcome,
        "iteration": read_reached_iteration(run),
        "at": time.time(),
    }
    append_lines(run / FILE, [json.dumps({"ended": record})])


def list_failed_in_a_row(run: Path, job: str, in_order: frozenset[str]) -> list[PastAttempt]:
    """The job's newest attempts that left the checkpoint where it is now and did not end with an outcome `in_order`."""
    now, failed = read_reached_iteration(run), []
    for past in reversed([past for past in _read(run) if past.attempt.job == job]):
        if past.outcome in in_order or past.attempt.iteration != now:
            break
        failed.append(past)
    return failed[::-1]


def read_reached_iteration(run: Path) -> int:
    """The iteration that the pointers name; 0 where there is none, or none that can be read: training will say why."""
    try:
        return read_pointed_iteration(run) or 0
    except (CheckpointError, OSError):
        return 0


def _read(run: Path) -> Iterator[PastAttempt]:
    """In order; lines that were cut off by a full disk or a kill are left out."""
    try:
        lines = (run / FILE).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return
    attempts: dict[float, Attempt] = {}
    outcomes: dict[float, str] = {}
    for line in lines:
        try:
            record = json.loads(line)
            if "began" in record:
                attempt = Attempt(**record["began"])
                attempts[attempt.began] = attempt
            else:
                outcomes[record["ended"]["began"]] = record["ended"]["outcome"]
        except (ValueError, TypeError, KeyError):
            continue
    for began, attempt in attempts.items():
        yield PastAttempt(attempt, outcomes.get(began))
