"""Messages between ranks as JSON text. Nothing that arrives from another rank can run code.

torch's `all_gather_object` unpickles what it receives, and a pickle may call any function. Here every message is checked text.
"""

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's value on every rank of a gloo group, in the order of the ranks.

    A value is what JSON holds: None, bool, int, finite float, str, list, and dict with str keys. A tuple arrives as a list.
    Everything else is the caller's to convert. Without a group, the only value takes the same way through JSON.

    Raises:
        TypeError: the value holds a type that JSON does not have.
        ValueError: the value holds a float that is not finite, or a message is no JSON text.
    """
    text = json.dumps(mine, allow_nan=False).encode()
    if group is None:
        return [json.loads(text)]
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    return [
        json.loads(row[: int(length)].numpy().tobytes())
        for row, length in zip(received, lengths, strict=True)
    ]
