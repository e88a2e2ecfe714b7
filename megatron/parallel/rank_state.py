"""What this rank does at an instant: lines of code, collectives, and the files that record them."""

import faulthandler
import json
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from megatron.base.code_version import PACKAGE
from megatron.parallel.rank_progress import RankProgress
from megatron.parallel.time_limit import is_waiting
from megatron.parallel.torch_private import read_flight_recorder

FILE_THREAD = "files"
"""Name of the threads in which a rank works on files while the ranks wait together."""
FLIGHT_RECORDER_ENTRIES = 1000
"""Number of collectives that torch's flight recorder keeps, with a watchdog."""
_RECENT = 4
"""Number of collectives of a group that the state of a rank has."""
_DISTRIBUTED = str(Path(dist.__file__).parent)


@dataclass(frozen=True)
class RankState:
    """What a rank does. It is sent as JSON through the store."""

    at: str
    """The line of this package, like `run/loop.py:102 train_iteration`."""
    waits: bool
    """Whether it waits for other ranks in a collective."""
    phase: str
    sequence: int
    """Number of changes of the phase so far."""
    collectives: dict[str, list[Any]] = field(default_factory=dict)
    """The last collective of each group: its number in the group, and the operation with sizes."""
    recent: dict[str, dict[str, str]] = field(default_factory=dict)
    """The last few collectives of each group: number -> operation with sizes."""
    collective: str = ""
    """The last collective of all groups in words, or nothing if it is not known."""


def find_location(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost frame of this package, like `run/loop.py:102 train_iteration`.

    Args:
        frames: Frames and their line numbers, the outermost first.
    """
    here = "outside of this program"
    for frame, line in frames:
        path = Path(frame.f_code.co_filename)
        # Lines inside torch say little. The caller in this package says what was done.
        if path.is_relative_to(PACKAGE) and not is_waiting(frame):
            here = f"{path.relative_to(PACKAGE)}:{line} {frame.f_code.co_name}"
    return here


def locate_thread(thread: int) -> str:
    """Return the line of this package at which a thread is."""
    frame = sys._current_frames().get(thread)
    return find_location(reversed(list(traceback.walk_stack(frame))))


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
