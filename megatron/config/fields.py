"""The table of all configuration fields, read off the dataclasses: flag, type, default, help text.

Invariant: every field of every group in `Config` is here once, and its name is unique over the groups, so that flags can be flat.
Text becomes values here and nowhere else: the command line and YAML files are read by the same rules.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Sequence

from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from megatron.config.tree import Config

Arity = int | typing.Literal["*"]

_EXPECTED = {
    int: "a whole number (as in 2048 or 6_000_000)",
    float: "a number (as in 0.1 or 6e-5)",
    str: "text",
}


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of the configuration, e.g. `model.hidden_size`."""

    dotted: str
    annotation: typing.Any
    """Type without None."""
    optional: bool
    """Whether None is allowed."""
    default: typing.Any
    """The default, or dataclasses.MISSING for a required field."""
    doc: str
    spec: PrimitiveConstructorSpec[typing.Any] = dataclasses.field(repr=False, compare=False)

    @property
    def group(self) -> str:
        return self.dotted.partition(".")[0]

    @property
    def name(self) -> str:
        return self.dotted.partition(".")[2]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str:
        """The flag that turns a boolean off."""
        return "--no-" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return self.annotation is bool

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def arity(self) -> Arity:
        """Number of values that the flag takes; 0 for booleans, '*' for one or more."""
        if self.is_bool:
            return 0
        return self.spec.nargs if isinstance(self.spec.nargs, int) else "*"

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.is_bool:
            return "true or false"
        if isinstance(self.arity, int) and self.arity > 1:
            return (
                f"{self.arity} values, each {_describe_type(typing.get_args(self.annotation)[0])}"
            )
        if self.arity == "*":
            return (
                "a list of text"
                if typing.get_args(self.annotation)[0] is str
                else "a list of whole numbers"
            )
        return _describe_type(self.annotation)

    def convert(self, texts: Sequence[str]) -> typing.Any:
        """The value that `texts` stand for. Raises ValueError saying what was expected."""
        if self.is_bool and len(texts) == 1 and texts[0].lower() in ("true", "false"):
            return texts[0].lower() == "true"
        try:
            if self.is_bool or (self.arity != "*" and len(texts) != self.arity):
                raise ValueError
            return self.spec.instance_from_str(list(texts))
        except ValueError:
            raise ValueError(f"must be {self.expected}") from None


@dataclasses.dataclass(frozen=True)
class ValueWithOrigin:
    """A value that somebody gave, and where: '--lr' or 'run.yaml:9'."""

    value: typing.Any
    origin: str


@functools.cache
def all_fields() -> dict[str, Field]:
    """Every field by its dotted name, in the order of declaration."""
    table = {}
    for group, cls in list_groups().items():
        docs, types_ = _read_attribute_docs(cls), typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            table[f"{group}.{item.name}"] = _make_field(
                f"{group}.{item.name}", types_[item.name], item, docs.get(item.name, "")
            )
    flags = [field.flag for field in table.values()] + [
        field.negative_flag for field in table.values() if field.is_bool
    ]
    doubled = {flag for flag in flags if flags.count(flag) > 1}
    assert not doubled, f"flags declared twice: {sorted(doubled)}"
    return table


@functools.cache
def list_groups() -> dict[str, type]:
    """The groups of `Config` by name."""
    hints = typing.get_type_hints(Config)
    return {item.name: hints[item.name] for item in dataclasses.fields(Config)}


def build_config(values: dict[str, typing.Any]) -> Config:
    """The `Config` with these values by dotted name, and defaults elsewhere; every required field must be there."""
    kwargs: dict[str, dict[str, typing.Any]] = {group: {} for group in list_groups()}
    for dotted, value in values.items():
        group, _, name = dotted.partition(".")
        kwargs[group][name] = value
    return Config(**{group: cls(**kwargs[group]) for group, cls in list_groups().items()})


def flatten(config: Config) -> dict[str, typing.Any]:
    """Every value of `config` by its dotted name."""
    return {
        dotted: getattr(getattr(config, field.group), field.name)
        for dotted, field in all_fields().items()
    }


def find_missing(given: Iterable[str]) -> list[str]:
    """A message for each required field that is not among the dotted names `given`."""
    absent = [
        field
        for field in all_fields().values()
        if field.required and field.dotted not in set(given)
    ]
    return [
        f"{field.flag} is required: give it as a flag, or as {field.dotted} in the --config file."
        for field in absent
    ]


def _describe_type(annotation: typing.Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return ", or ".join(map(_describe_type, typing.get_args(annotation)))
    return _EXPECTED[annotation]


def _make_field(
    dotted: str, hint: typing.Any, item: "dataclasses.Field[typing.Any]", doc: str
) -> Field:
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )
    optional = type(None) in options
    annotation: typing.Any = typing.Union.__getitem__(
        tuple(option for option in options if option is not type(None))
    )
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(annotation, set()))
    assert not isinstance(spec, UnsupportedTypeAnnotationError), (
        f"{dotted}: tyro cannot read {hint}"
    )
    default = item.default
    if item.default_factory is not dataclasses.MISSING:
        default = item.default_factory()
    return Field(dotted, annotation, optional, default, doc, spec)


def _read_attribute_docs(cls: type) -> dict[str, str]:
    """The string literal below each attribute of a dataclass, by the attribute's name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for declared, literal in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(declared, ast.AnnAssign)
            and isinstance(literal, ast.Expr)
            and isinstance(literal.value, ast.Constant)
        ):
            assert isinstance(declared.target, ast.Name)
            docs[declared.target.id] = " ".join(str(literal.value.value).split())
    return docs
