"""What a tracker needs of a run: its ids, what was sent and stored, and values of metrics lines.

The file with the ids is in the --save folder, so that it moves with the run.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.outside_file import iterate_lines, load_json
from megatron.extras.operations.chronicle.records import parse_object
from megatron.extras.watch.trackers.trackers import TrackedRun


def flatten_record(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of the metrics file, by the names that the tracker shows."""
    kind = record["kind"]
    if kind == "train":
        prefix = ""
        numbers: Any = {key: record[key] for key in record if key not in ("kind", "iteration")}
    elif kind == "validation":
        prefix = f"validation/{record.get('name')}/"
        measures = ("lm_loss", "accuracy", "bits_per_byte")
        numbers = {key: record[key] for key in measures if key in record}
    elif kind == "task":
        prefix = f"tasks/{record.get('name')}/"
        numbers = record.get("scores")
    elif kind == "ranks":
        # The names of the slow ranks are text, which is left out below.
        prefix = f"ranks/{record.get('name')}/"
        numbers = record.get("times")
    else:
        prefix = f"filters/{record.get('name')}/"
        numbers = record.get("counts")
    values = {}
    for key, value in _iterate_numbers(numbers):
        values[f"{prefix}{key}"] = value
    return values


def _iterate_numbers(values: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a dictionary. A list has one for each layer."""
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        if isinstance(value, list):
            width = len(str(len(value) - 1))
            layers = {f"{key}/{layer:0{width}}": each for layer, each in enumerate(value)}
            yield from _iterate_numbers(layers)
        elif value in ("NaN", "Infinity", "-Infinity"):
            # JSON lacks these numbers.
            yield key, float(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def read_backlog(path: Path, end: int, after: int, until: int) -> list[dict[str, Any]]:
    """Read the records of the run's lineage for iterations in (after, until].

    Args:
        path: The metrics file.
        end: Number of its bytes that are read. The later ones belong to this launch.
        after: The iteration before the first one that is read.
        until: The last iteration that is read.

    Raises:
        OSError: The file cannot be read.
    """
    found: list[dict[str, Any]] = []
    if after >= until or not path.exists():
        return found
    last = 0
    read = 0
    for line in iterate_lines(path):
        read += len(line)
        if read > end:
            break
        record = parse_record(line)
        if record is None:
            continue
        iteration = record["iteration"]
        # A start at an iteration, or an iteration that comes again, undoes all later ones.
        keep = iteration - (record["kind"] == "train")
        if record["kind"] in ("start", "train"):
            if keep < last:
                found = [each for each in found if each["iteration"] <= keep]
            last = iteration
        if record["kind"] != "start" and iteration > after:
            found.append(record)
    return [each for each in found if each["iteration"] <= until]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is torn or of another kind."""
    record = parse_object(line)
    known = ("start", "train", "validation", "task", "filters", "ranks")
    if record.get("kind") not in known or type(record.get("iteration")) is not int:
        return None
    return record


@dataclass
class FeedState:
    """What the tracker has of a run."""

    runs: list[TrackedRun] = field(default_factory=list)
    """All runs of the tracker, oldest first. The last one is the present one."""
    sending: int = 0
    """No iteration after this one was passed to the tracker."""
    delivered: int = 0
    """All iterations up to this one are stored by the tracker."""

    @classmethod
    def read(cls, path: Path) -> "FeedState":
        """Read the state, which is empty if the file does not exist.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is damaged.
        """
        if not path.exists():
            return cls()
        try:
            record = load_json(path)
            runs = [TrackedRun(**run) for run in record["runs"]]
            return cls(runs, int(record["sending"]), int(record["delivered"]))
        except (ValueError, TypeError, KeyError, OverflowError) as damage:
            # Without the ids, a new run would repeat every iteration. That is the user's choice.
            raise ValueError(
                f"{path} is damaged ({damage}); restore it, or remove it to send all iterations "
                "to a new run"
            ) from damage

    def write(self, path: Path) -> None:
        """Write the state durably.

        Raises:
            OSError: It cannot be written.
        """
        replace_file(path, json.dumps(asdict(self), indent=1) + "\n")

    def continue_after(self, iteration: int, name: str) -> int:
        """Choose the run for a launch that continues after `iteration`.

        Args:
            iteration: The iteration.
            name: Start of the id of a new run.

        Returns:
            The iteration after which iterations are sent.
        """
        after = min(iteration, self.delivered)
        # A kill may have hit the feed between the two, so it is unknown what arrived.
        is_certain = self.sending == self.delivered
        if not self.runs or iteration < self.sending or not is_certain:
            self._add_run(f"{name}-{secrets.token_hex(4)}", after)
        self.sending = after
        self.delivered = after
        return after

    def _add_run(self, new: str, after: int) -> None:
        if not self.runs:
            self.runs.append(TrackedRun(new, root=new, parent=None, parent_iteration=0))
            return
        last = self.runs[-1]
        self.runs.append(TrackedRun(new, last.root, parent=last.id, parent_iteration=after))
