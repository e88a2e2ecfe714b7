"""Prints --help with every group, flag, default and help text. tyro makes the layout.

Invariant: the text of a flag is its field's attribute docstring. Nothing is written here a second
time.
"""

import contextlib
import dataclasses
import shlex
import textwrap
from typing import Annotated, Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from megatron.base.errors import ConfigError
from megatron.config.fields import Field, all_fields, list_groups

DESCRIPTION = """Pretrain a GPT or Llama model.

--help GROUP prints the flags of one group, as in --help model.

Flags may be spelled with hyphens or underscores. If a flag is given twice, the last one wins.
Boolean flags take no value and have a --no- form (--fp16, --no-fp16). --fp16=True and --fp16=False
are accepted too. A flag with the default auto is on, off or left to the trainer (--rope-fusion,
--no-rope-fusion, --rope-fusion auto). Numbers may be grouped (6_000_000). None unsets a value.
Flags have priority over the --config file, which nests the groups below, as in
`model: {hidden_size: 384}`. The file has priority over the --preset.

A small model on one device: pretrain_gpt.py --data-path corpus_text_document
--vocab-file vocab.json --merge-file merges.txt --num-layers 4 --hidden-size 128
--num-attention-heads 2 --seq-length 256 --micro-batch-size 4 --global-batch-size 8 --train-iters
1000 --lr 1e-3 --save runs/small --load runs/small --save-interval 200

A published model: torchrun --nproc-per-node 8 pretrain_gpt.py --preset llama2-7b --zero-stage 3 ...

On 8 devices: torchrun --nproc-per-node 8 pretrain_gpt.py ... --tensor-model-parallel-size 2"""

_MARKERS = (tyro.conf.OmitArgPrefixes,)


def print_help(prog: str | None = None, group: str | None = None) -> None:
    """Print the help text to stdout, for all groups or for one.

    Raises:
        ConfigError: There is no such group.
    """
    if group is not None and group not in list_groups():
        name = group.lstrip("-").replace("-", "_")
        owners = [field.group for field in all_fields().values() if field.name == name]
        if owners:
            raise ConfigError(f"--help {group}: this flag is in the group {owners[0]}.")
        raise ConfigError(f"--help {group}: the groups are {', '.join(list_groups())}.")
    # tyro exits after it printed the help. The caller decides how the process ends.
    with contextlib.suppress(SystemExit):
        tyro.cli(
            _make_help_class(group),
            prog=prog,
            # tyro joins lines, except those that begin with a space.
            description=textwrap.indent(DESCRIPTION, " "),
            args=["--help"],
            config=_MARKERS,
        )


def _make_help_class(only: str | None) -> type:
    """Return a copy of `Config` whose fields carry their help text.

    The copy has the group `only`, or all groups if `only` is None. tyro prints this class and never
    builds an instance of it.
    """
    by_group: dict[str, list[tuple[str, Any, Any]]] = {
        group: [] for group in list_groups() if only in (None, group)
    }
    for field in all_fields().values():
        if field.group not in by_group:
            continue
        by_group[field.group].append(
            (field.name, _add_help(field), dataclasses.field(default=_get_shown_default(field)))
        )
    file_help = tyro.conf.arg(
        metavar="FILE",
        help="YAML file with values by group. Flags have priority over it.",
        help_behavior_hint="",
    )
    preset_help = tyro.conf.arg(
        metavar="NAME",
        help="Architecture of a published model. The --config file and flags have priority over "
        "it. The file may also name it, as in `preset: llama2-7b`.",
        help_behavior_hint="",
    )
    list_help = tyro.conf.arg(
        help="Print the presets with their sizes and sources.", help_behavior_hint=""
    )
    members: list[tuple[str, Any, Any]] = [
        ("config", Annotated[str | None, file_help], dataclasses.field(default=None)),
        ("preset", Annotated[str | None, preset_help], dataclasses.field(default=None)),
        (
            "list_presets",
            Annotated[tyro.conf.FlagCreatePairsOff[bool], list_help],
            dataclasses.field(default=False),
        ),
    ]
    for group, items in by_group.items():
        # Keyword-only fields may be without a default after others that have one.
        cls = dataclasses.make_dataclass(group, items, kw_only=True)
        members.append((group, cls, dataclasses.MISSING))
    return dataclasses.make_dataclass("Config", members, kw_only=True)


def _add_help(field: Field) -> Any:
    """Return the field's type, annotated with its text."""
    metavar, text, hint = format_help_line(field)
    annotation = field.annotation
    if field.optional and not field.is_switch:
        annotation = field.annotation | None
    return Annotated[
        annotation, tyro.conf.arg(help=text, metavar=metavar or None, help_behavior_hint=hint)
    ]


def _get_shown_default(field: Field) -> Any:
    """Return a default from which tyro makes the spelling of the flag."""
    # tyro would offer None, True and False as values of a switch.
    if field.is_switch:
        return False
    return field.default


def find_metavar(field: Field) -> str:
    """Return tyro's placeholder for the values of a field, as in INT."""
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(field.annotation, set()))
    assert not isinstance(spec, UnsupportedTypeAnnotationError), f"tyro cannot read {field}"
    return spec.metavar


def format_help_line(field: Field) -> tuple[str, str, str]:
    """Return what the field's values look like, its text and its default, as --help shows them.

    A part is empty if there is nothing to show.
    """
    many = field.arity == "*" and ("INT ..." if field.annotation == tuple[int, ...] else "STR ...")
    metavar = ""
    if not field.is_bool:
        metavar = many or find_metavar(field)
    if field.required:
        hint = "(required)"
    elif field.is_switch:
        hint = f"({field.expected}; default: auto)"
    elif field.default is None or field.default == ():
        hint = ""
    else:
        if field.is_bool:
            shown = "on" if field.default else "off"
        elif isinstance(field.default, tuple):
            shown = shlex.join(map(str, field.default))
        else:
            shown = shlex.quote(str(field.default))
        hint = f"(default: {shown})"
    return metavar, field.doc, hint
