"""Messages between ranks as JSON text, so that no received message can run code.

torch's `all_gather_object` unpickles what it receives, and a pickle may call any function.

Each message contains the function that sends it. A rank that has left out a message is found at the
next one, before anything is done with a value of another kind.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.base.code_version import PACKAGE

_WRAPPERS = (__file__, str(PACKAGE / "parallel" / "ranks.py"))
"""Files whose functions send messages for others."""


class OutOfStepError(Exception):
    """The ranks exchange different messages, because one of them has left one out.

    `RollCall` replaces it by an error that names the rank.
    """

    def __init__(self, places: dict[int, list[str]]) -> None:
        """Create the error.

        Args:
            places: Rank -> the function and the line of code at which it sends. It may lack ranks,
                and is empty if only this rank knows that something is wrong.
        """
        text = ", ".join(f"rank {rank} at {line}" for rank, (_, line) in places.items())
        super().__init__(f"the ranks exchange different messages {text}".rstrip())
        self.places = places


def _find_sender() -> list[str]:
    """Return the function that sends a message, and its line of code."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _WRAPPERS and frame.f_back is not None:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(PACKAGE):
        path = path.relative_to(PACKAGE)
    name = frame.f_code.co_qualname
    # Ranks may send the same message at two lines of a function, so lines are not compared.
    return [f"{path} {name}", f"{path}:{frame.f_lineno} {frame.f_code.co_name}"]


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's value on every rank of a gloo group, in the order of the ranks.

    A value may contain None, bool, int, finite float, str, list, and dict with str keys. A tuple
    arrives as a list. The caller must convert everything else. Without a group there is one value,
    which is converted to JSON and back too.

    Raises:
        TypeError: The value contains a type that JSON does not have.
        ValueError: The value contains a float that is not finite, or a message is not JSON text.
        OutOfStepError: Ranks send from different functions.
    """
    if group is None:
        return [_convert(value)]
    # A value that JSON refuses raises here, before the first collective.
    text = json.dumps([_find_sender(), value], allow_nan=False).encode()
    # All tensors of an all-gather must have one shape. So the ranks exchange lengths first, and pad
    # the texts to the longest one.
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    # `frombuffer` needs a writable buffer, and bytes are not writable.
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    messages = [
        json.loads(row[: int(length)].numpy().tobytes())
        for row, length in zip(received, lengths, strict=True)
    ]
    if len({function for (function, _), _ in messages}) > 1:
        raise OutOfStepError({rank: sender for rank, (sender, _) in enumerate(messages)})
    return [value for _, value in messages]


def _convert(value: Any) -> Any:
    """Return a value as another rank would receive it."""
    return json.loads(json.dumps(value, allow_nan=False))


def gather_json_on_rank_0(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Return every rank's value on rank 0 of a gloo group of all ranks, and None elsewhere.

    `gather_json` gives every rank all values, so its memory and messages grow with the square of
    the number of ranks. See there for what a value may be.

    Raises:
        TypeError: The value contains a type that JSON does not have.
        ValueError: The value contains a float that is not finite, or a message is not JSON text.
        OutOfStepError: Ranks send from different functions. Every rank raises it.
    """
    text = json.dumps(value, allow_nan=False).encode()
    if group is None:
        return [json.loads(text)]
    # All tensors of a gather must have one shape, so each text is padded to the longest one. The
    # same message compares the senders. If only rank 0 compared them, the others would not know why
    # it ends. The maximum of negative numbers gives the minimum.
    sender = zlib.crc32(_find_sender()[0].encode())
    largest = torch.tensor([len(text), sender, -sender])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    longest, highest, lowest = largest.tolist()
    if highest != -lowest:
        # All ranks come here, and the senders differ. So this raises on all of them.
        gather_json(None, group)
    # `json.loads` ignores spaces after the value.
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    if dist.get_rank(group) != 0:
        dist.gather(padded, group=group, group_dst=0)
        return None
    received = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.gather(padded, received, group=group, group_dst=0)
    return [json.loads(row.numpy().tobytes()) for row in received]


def broadcast_json(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return rank 0's value on every rank of a gloo group of all ranks.

    See `gather_json` for what a value may be. The values of the other ranks are ignored.

    Raises:
        TypeError: The value of rank 0 contains a type that JSON does not have.
        ValueError: The value of rank 0 contains a float that is not finite.
        OutOfStepError: Rank 0 sends from another function than this rank.
    """
    if group is None:
        return _convert(value)
    own = _find_sender()
    text = bytearray()
    if dist.get_rank(group) == 0:
        text = bytearray(json.dumps([own, value], allow_nan=False).encode())
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=0, group=group)
    if dist.get_rank(group) == 0:
        message = torch.frombuffer(text, dtype=torch.uint8)
    else:
        message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, src=0, group=group)
    sender, value = json.loads(message.numpy().tobytes())
    if sender[0] != own[0]:
        raise OutOfStepError({0: sender, dist.get_rank(group): own})
    return value
