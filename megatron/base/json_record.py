"""Dataclasses that another rank or a checkpoint gets as JSON.

`dataclasses.asdict` makes the record. JSON has lists in place of tuples, and no classes. The types
of the fields say what a value was.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable
from functools import cache
from itertools import repeat
from typing import Any

_get_hints = cache(typing.get_type_hints)


def restore(kind: Any, record: Any) -> Any:
    """Return the value that a record describes.

    Args:
        kind: Its type: a dataclass, a tuple, one of both or None, or a type that JSON has.
        record: What `dataclasses.asdict` returned, read from JSON.

    Raises:
        KeyError: A name is no field of the dataclass.
        TypeError: A field without a default is missing.
    """
    if record is None:
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return restore(arguments[0], record)
    if origin is tuple:
        kinds: Iterable[Any] = repeat(arguments[0]) if arguments[-1] is ... else arguments
        return tuple(map(restore, kinds, record))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _get_hints(kind)
        return kind(**{name: restore(hints[name], value) for name, value in record.items()})
    return record
