"""Choices of layers as text: numbers and slices from 0, separated by commas, as in `0,3::4`."""

import re
from collections.abc import Sequence

_PART = re.compile(r"(\d+)|(\d*):(\d*)(?::(\d+))?")


def choose_layers(text: str, num_layers: int) -> frozenset[int]:
    """Return the numbers of the chosen layers.

    A slice START:STOP:STEP has the meaning that it has in Python, without negative numbers.

    Args:
        text: The choice.
        num_layers: Layers of the model.

    Raises:
        ValueError: The text is no choice of layers, or it chooses a layer that the model lacks.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"'{part}' is neither a number nor START:STOP:STEP, as in 3::4")
        number, start, stop, step = match.groups()
        if number is not None:
            bounds = slice(int(number), int(number) + 1)
        else:
            begin, end, stride = (int(text) if text else None for text in (start, stop, step))
            bounds = slice(begin, end, stride)
        if bounds.step == 0:
            raise ValueError(f"'{part}' has the step 0; use 1 or more")
        layers = range(num_layers)[bounds]
        if not layers:
            raise ValueError(f"'{part}' chooses none of the layers 0 to {num_layers - 1}")
        chosen.update(layers)
    return frozenset(chosen)


def describe_layers(chosen: Sequence[int], num_layers: int) -> str | None:
    """Return a text for which `choose_layers` returns these layers, as in 3::4.

    Args:
        chosen: Numbers of layers in ascending order.
        num_layers: Layers of the model.

    Returns:
        The text, or None if no layer is chosen.
    """
    if not chosen:
        return None
    if len(chosen) > 1:
        text = f"{chosen[0]}::{chosen[1] - chosen[0]}"
        if choose_layers(text, num_layers) == frozenset(chosen):
            return text
    return ",".join(map(str, chosen))
