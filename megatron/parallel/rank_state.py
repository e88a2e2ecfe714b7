"""What a rank does at an instant: its line of code, its phase and its collectives."""

import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.base.code_version import PACKAGE
from megatron.parallel.time_limit import is_waiting

FILE_THREAD = "files"
"""Name of the threads in which a rank works on files while the ranks wait together."""
FLIGHT_RECORDER_ENTRIES = 1000
"""Number of collectives that torch's flight recorder keeps, with a watchdog."""


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
