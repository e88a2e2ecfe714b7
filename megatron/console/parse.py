"""The command lines of the tools, with a --help that shows plain values."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from megatron.config.fields import read_attribute_docs
from megatron.console.standard_streams import end_without_reader

_Parsed = TypeVar("_Parsed")


def _format_default(label: str) -> str:
    """Return what --help shows of a default. Without one, the text of the flag explains it."""
    return "" if label == "None" else f"(default: {label})"


def parse_arguments(
    target: Callable[..., _Parsed],
    *,
    args: Sequence[str] | None,
    prog: str | None = None,
    description: str | None = None,
) -> _Parsed:
    """Parse a command line.

    --help shows `INT` for a flag that may be left out, where tyro shows `{None}|INT` and
    `(default: None)`. The text of a flag is wrapped as one paragraph. tyro would keep some of the
    line breaks of the source.

    Args:
        target: A dataclass with the arguments, a union of dataclasses, or a function to call.
        args: The words of the command line. Default: those of the process.
        prog: Name of the program in the help.
        description: Text of the help. Default: the docstring of `target`.
    """
    words = sys.argv[1:] if args is None else args
    _annotate_fields(target, with_help=bool({"-h", "--help"} & set(words)))
    with end_without_reader():
        return tyro.cli(
            target,
            args=args,
            prog=prog,
            description=description,
            config=(tyro.conf.DisallowNone,),
        )


def _annotate_fields(kind: Any, *, with_help: bool) -> None:
    """Annotate what may be None in `kind`, and in the dataclasses that it contains.

    With `with_help`, fields get their texts too, which are read from the source code.
    """
    kind = _strip(kind)
    for part in get_args(kind):
        _annotate_fields(part, with_help=with_help)
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
        texts = read_attribute_docs(owner) if with_help and isinstance(owner, type) else {}
        for name in owner.__annotations__:
            _annotate_fields(hints[name], with_help=with_help)
            if type(None) in get_args(_strip(hints[name])) and name != "return":
                hints[name] = _configure(hints[name], help_behavior_hint=_format_default)
            if name in texts and not is_dataclass(_strip(hints[name])):
                hints[name] = _configure(hints[name], help=texts[name])
            owner.__annotations__[name] = hints[name]


def _strip(hint: Any) -> Any:
    """Return a type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _configure(hint: Any, **settings: Any) -> Any:
    """Return a type with settings of its flag. Its other annotations are kept."""
    known: list[Any] = list(getattr(hint, "__metadata__", ()))
    plain: Any = tyro.conf.arg()
    configured = [isinstance(each, type(plain)) for each in known]
    if True in configured:
        number = configured.index(True)
        known[number] = replace(known[number], **settings)
    else:
        known.append(replace(plain, **settings))
    return Annotated[_strip(hint), *known]


def split_at_double_dash(argv: Sequence[str] | None) -> tuple[list[str], list[str] | None]:
    """Return the words before the first `--`, and those after it.

    tyro would refuse the flags of the other program, so they are separated first.

    Args:
        argv: The command line. Default: that of this process.

    Returns:
        The words before `--`.
        The words after it, or None if there is no `--`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--" not in words:
        return words, None
    end = words.index("--")
    return words[:end], words[end + 1 :]
