"""What this rank does at an instant and for how long, and the files that record it."""

import faulthandler
import json
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.parallel.rank_progress import (
    FILE_THREAD,
    RankProgress,
    RankState,
    find_location,
    is_waiting,
    locate_thread,
)
from megatron.parallel.torch_private import read_flight_recorder

_RECENT = 4
"""Number of collectives of a group that the state of a rank has."""
_DISTRIBUTED = str(Path(dist.__file__).parent)


def read_state(main: int, progress: RankProgress, *, with_collectives: bool) -> RankState:
    """Return what this rank does.

    Args:
        main: Identifier of the main thread.
        progress: The phases of this rank.
        with_collectives: Whether to read the flight recorder, which takes milliseconds.
    """
    frame = sys._current_frames().get(main)
    at = find_location(reversed(list(traceback.walk_stack(frame))))
    waits = frame is not None and (
        frame.f_code.co_filename.startswith(_DISTRIBUTED) or is_waiting(frame)
    )
    if progress.phase.in_threads:
        # The main thread alternates between its thread and short collectives.
        busy = [each for each in threading.enumerate() if each.name == FILE_THREAD]
        waits = not busy
        for each in busy:
            if each.ident is not None:
                at = locate_thread(each.ident)
    state = RankState(at, waits, progress.phase.name, progress.sequence)
    if not with_collectives:
        return state
    recent, collective = find_last_collectives(read_flight_recorder())
    last = {group: [max(found), found[max(found)]] for group, found in recent.items()}
    # The state is sent as JSON, which has no numbers as keys.
    named = {
        group: {str(number): operation for number, operation in found.items()}
        for group, found in recent.items()
    }
    return replace(state, collectives=last, recent=named, collective=collective)


def find_last_collectives(entries: list[dict[str, Any]]) -> tuple[dict[str, dict[int, str]], str]:
    """Return the last collectives of each group, and the last one of all groups in words.

    The first result is group -> number in the group -> operation with sizes.

    Args:
        entries: What `read_flight_recorder` returned.
    """
    last: dict[str, dict[int, str]] = {}
    text = ""
    for entry in entries:
        # Two ranks may have sent each other a different number of messages.
        if entry["is_p2p"]:
            continue
        group = entry["process_group"][0]
        sizes = " ".join(str(size) for size in entry["input_sizes"])
        operation = f"{entry['profiling_name']} {sizes}"
        found = last.setdefault(group, {})
        found[entry["collective_seq_id"]] = operation
        if len(found) > _RECENT:
            del found[min(found)]
        text = f"{operation}, number {entry['collective_seq_id']} of group {group}"
    return last, text


def write_state(folder: Path, rank: int) -> None:
    """Write the stacks of all threads and the flight recorder of this rank.

    Args:
        folder: It is created if it does not exist.
        rank: This rank.

    Raises:
        OSError: The files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"rank_{rank:06d}_stacks.txt", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    text = json.dumps(read_flight_recorder())
    (folder / f"rank_{rank:06d}_collectives.json").write_text(text)


class Stopwatch:
    """Measures how long the phase has lasted, in the thread that watches it.

    The time in which this process did not run at all does not count. After a job was suspended and
    resumed, no phase has exceeded its limit.
    """

    def __init__(self, progress: RankProgress, hang_timeout: float, interval: float) -> None:
        """Start at the current phase.

        Args:
            progress: The phases of this rank.
            hang_timeout: Seconds that a step may take.
            interval: Seconds between two calls of `exceeds_limit`.
        """
        self._progress = progress
        self._hang_timeout = hang_timeout
        self._longest_tick = 4 * interval
        self._sequence = progress.sequence
        self._last: float | None = None
        self.seconds = 0.0
        """Seconds for which the phase has lasted."""

    def exceeds_limit(self, now: float) -> bool:
        """Return whether the current phase has lasted longer than it may.

        Args:
            now: The time of a monotonic clock, in seconds.
        """
        phase = self._progress.phase
        if self._last is None or self._sequence != self._progress.sequence:
            self._sequence = self._progress.sequence
            self.seconds = 0.0
        else:
            # A long gap between two calls means that this process was suspended.
            self.seconds += min(now - self._last, self._longest_tick)
        self._last = now
        return self.seconds > phase.factor * self._hang_timeout
