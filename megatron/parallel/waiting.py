"""The wait for an asynchronous collective, in a function that the watchdog can recognise."""

from types import FrameType

import torch.distributed as dist


def wait_for(work: dist.Work) -> None:
    """Wait until a collective is done.

    `Work.wait` has no frame of Python. Without this function, a rank that waits would look like one
    that computes.
    """
    work.wait()


def is_waiting(frame: FrameType) -> bool:
    """Return whether a frame is that of `wait_for`."""
    return frame.f_code is wait_for.__code__
