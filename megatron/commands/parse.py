"""The command lines of the tools, with a --help that shows plain values."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from megatron.commands.standard_streams import end_without_reader

_Parsed = TypeVar("_Parsed")


def _format_default(label: str) -> str:
    """Return what --help shows of a default. Without one, the text of the flag explains it."""
    return "" if label == "None" else f"(default: {label})"


_HINT = tyro.conf.arg(help_behavior_hint=_format_default)


def parse_arguments(
    target: Callable[..., _Parsed],
    *,
    args: Sequence[str] | None,
    prog: str | None = None,
    description: str | None = None,
) -> _Parsed:
    """Parse a command line.

    --help shows `INT` for a flag that may be left out, where tyro shows `{None}|INT` and
    `(default: None)`.

    Args:
        target: A dataclass with the arguments, a union of dataclasses, or a function to call.
        args: The words of the command line. Default: those of the process.
        prog: Name of the program in the help.
        description: Text of the help. Default: the docstring of `target`.
    """
    _hide_missing_defaults(target)
    with end_without_reader():
        return tyro.cli(
            target,
            args=args,
            prog=prog,
            description=description,
            config=(tyro.conf.DisallowNone,),
        )


def _hide_missing_defaults(kind: Any) -> None:
    """Annotate what may be None in `kind`, and in the dataclasses that it contains."""
    kind = _strip(kind)
    for part in get_args(kind):
        _hide_missing_defaults(part)
    # The arguments of a command are the fields of a dataclass, or the parameters of a function.
    if inspect.isfunction(kind):
        owners: tuple[Any, ...] = (kind,)
    elif isinstance(kind, type) and is_dataclass(kind):
        # A field may be that of a base class.
        owners = tuple(base for base in kind.__mro__ if "__annotations__" in vars(base))
    else:
        return
    hints = get_type_hints(kind, include_extras=True)
    for owner in owners:
        for name in owner.__annotations__:
            _hide_missing_defaults(hints[name])
            if type(None) in get_args(_strip(hints[name])) and name != "return":
                owner.__annotations__[name] = _add_hint(hints[name])


def _strip(hint: Any) -> Any:
    """Return a type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _add_hint(hint: Any) -> Any:
    """Return a type with the text of its default. Its other annotations are kept."""
    known: list[Any] = list(getattr(hint, "__metadata__", ()))
    configured = [isinstance(each, type(_HINT)) for each in known]
    if True in configured:
        number = configured.index(True)
        known[number] = replace(known[number], help_behavior_hint=_format_default)
    else:
        known.append(_HINT)
    return Annotated[_strip(hint), *known]
