"""The ids that a tracker has for a run, and the last iterations that were sent and stored.

The file with them is in the --save folder, so that it moves with the run.
"""

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron.base.durable import replace_file
from megatron.base.outside_file import load_json
from megatron.extras.training.trackers.trackers import TrackedRun


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
