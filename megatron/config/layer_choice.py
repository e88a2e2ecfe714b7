"""Choices of layers as text: numbers and slices from 0, as in `0,3::4`, or Megatron-LM's lists."""

import re
from functools import lru_cache

_FREQUENCY = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")
_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
"""The innermost parentheses of such a list, which may be repeated."""
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


@lru_cache(maxsize=256)
def find_expert_layers(text: str, num_layers: int) -> frozenset[int]:
    """Return the numbers of the layers with experts.

    Args:
        text: The value of --moe-layer-freq, such as `2` or `([0]*1+[1]*15)`.
        num_layers: Layers of the model.

    Raises:
        ValueError: The text has another form, or as a list another length.
    """
    if number := _read_number(text):
        return frozenset(range(0, num_layers, number))
    return _read_list(text, num_layers)


@lru_cache(maxsize=256)
def find_linear_layers(text: str, num_layers: int) -> frozenset[int]:
    """Return the numbers of the layers with --experimental-attention-variant.

    Args:
        text: The value of --linear-attention-freq, such as `4` or `([1]*3+[0]*1)*12`.
        num_layers: Layers of the model.

    Raises:
        ValueError: The text has another form, or as a list another length.
    """
    if number := _read_number(text):
        return frozenset(range(num_layers)) - frozenset(range(number - 1, num_layers, number))
    return _read_list(text, num_layers)


def _read_number(text: str) -> int | None:
    plain = text.strip()
    # 0 and a list are no number of layers.
    if re.fullmatch(r"[1-9]\d*", plain):
        return int(plain)
    return None


def _read_list(text: str, num_layers: int) -> frozenset[int]:
    """Return the numbers of the layers for which a list has a 1.

    Raises:
        ValueError: The text is no list, or one of another length.
    """
    plain = re.sub(r"\s", "", text)
    # Its text is Python's, and is read without running it.
    try:
        while found := _GROUP.search(plain):
            flags = _join_lists(found[1], num_layers) * min(int(found[2] or 1), num_layers + 1)
            joined = ",".join(flags[: num_layers + 1])
            plain = f"{plain[: found.start()]}[{joined}]{plain[found.end() :]}"
        flags = _join_lists(plain, num_layers)
    except ValueError:
        raise ValueError(
            f"'{text}' is neither a number of at least 1 nor a list such as ([0]*1+[1]*15)"
        ) from None
    if len(flags) != num_layers:
        raise ValueError(f"'{text}' is not a list for {num_layers} layers")
    return frozenset(number for number, flag in enumerate(flags) if flag == "1")


def _join_lists(text: str, num_layers: int) -> list[str]:
    """Return the entries of a sum of lists, as in `[0]*1+[1]*15`.

    A list that is longer than `num_layers` may be cut off, because it is wrong in any case.

    Raises:
        ValueError: The text has another form.
    """
    flags: list[str] = []
    for term in text.split("+"):
        match = _FREQUENCY.fullmatch(term)
        if match is None:
            raise ValueError(term)
        flags += match[1].split(",") * min(int(match[2] or 1), num_layers + 1)
    return flags
