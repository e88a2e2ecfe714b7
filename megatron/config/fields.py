"""The table of all configuration fields, read from the dataclasses: flag, type, default, help text.

Invariant: every field of every group in `Config` is here once. No two groups have a field of the
same name, so flags need no group name. Text is converted to values only here, so the command line
and YAML files follow the same rules.

`ConfigWithOrigin` is a configuration with the origin of each value. Rules read it, and messages
take their wording from it.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, FINITE, Range
from megatron.config.tree import Config

Arity = int | typing.Literal["*"]

# These words complete the message "--flag value must be ...".
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
    """Type of the value, without None."""
    optional: bool
    """Whether None is allowed."""
    default: typing.Any
    """The default, or `dataclasses.MISSING` for a required field."""
    declared_range: Range | None
    """The range beside the type, if there is one."""

    @property
    def group(self) -> str:
        """The group that holds the field, as in `model`."""
        return self.dotted.partition(".")[0]

    @property
    def name(self) -> str:
        """The field's name within its group, as in `hidden_size`."""
        return self.dotted.partition(".")[2]

    @property
    def doc(self) -> str:
        """What the field means, for --help."""
        return read_attribute_docs(list_groups()[self.group]).get(self.name, "")

    @property
    def flag(self) -> str:
        """The flag that sets the field, as in `--hidden-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str:
        """The flag that turns a boolean off."""
        return "--no-" + self.name.replace("_", "-")

    def spell(self, value: typing.Any) -> str:
        """Return the flag with a value, as a user types it.

        A boolean that is off is spelled --no-x.
        """
        if isinstance(value, bool):
            return self.flag if value else self.negative_flag
        if self.is_switch and value is None:
            return f"{self.flag} auto"
        if isinstance(value, tuple):
            value = " ".join(map(str, value))
        return f"{self.flag} {value}"

    @property
    def is_bool(self) -> bool:
        """Whether the field is a boolean, whose flag takes no value."""
        return self.annotation is bool

    @property
    def is_switch(self) -> bool:
        """Whether the field is on, off or left to the trainer, which None stands for."""
        return self.is_bool and self.optional

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    @property
    def range(self) -> Range:
        """The values that a number of this field may have."""
        if self.declared_range is not None:
            return self.declared_range
        if self.annotation is int:
            return AT_LEAST_ONE
        return FINITE

    @property
    def arity(self) -> Arity:
        """Number of values that the flag takes: 0 for booleans, '*' for one or more."""
        if self.is_bool:
            return 0
        if typing.get_origin(self.annotation) is not tuple:
            return 1
        items = typing.get_args(self.annotation)
        return "*" if items[-1] is ... else len(items)

    @property
    def expected(self) -> str:
        """What a value must be, in words that complete "must be ..."."""
        if self.is_switch:
            return "auto, on or off"
        if self.is_bool:
            return "true or false"
        if isinstance(self.arity, int) and self.arity > 1:
            return (
                f"{self.arity} values, each {_describe_type(typing.get_args(self.annotation)[0])}"
            )
        if self.arity == "*":
            item = typing.get_args(self.annotation)[0]
            if typing.get_origin(item) is typing.Literal:
                return f"a list, each {_describe_type(item)}"
            if item is str:
                return "a list of text"
            return "a list of whole numbers"
        return _describe_type(self.annotation)

    def convert(self, texts: Sequence[str]) -> typing.Any:
        """Return the value that `texts` spell.

        Raises:
            ValueError: the texts do not fit. The message describes what was expected.
        """
        # Every call of the system refuses such a name of a file.
        if any("\0" in text for text in texts):
            raise ValueError("must not have the character NUL")
        # Flags and YAML may have any case.
        if self.is_switch and len(texts) == 1 and texts[0].lower() in SWITCH:
            return SWITCH[texts[0].lower()]
        if self.is_bool and len(texts) == 1 and texts[0].lower() in ("true", "false"):
            return texts[0].lower() == "true"
        try:
            if self.is_bool or (self.arity != "*" and len(texts) != self.arity):
                # The message of this error is not used. The handler below writes the same one for
                # every reason.
                raise ValueError
            if typing.get_origin(self.annotation) is not tuple:
                return _convert_text(self.annotation, texts[0])
            item = typing.get_args(self.annotation)[0]
            return tuple(_convert_text(item, text) for text in texts)
        except ValueError:
            separator = ""
            if self.arity == "*" and any("," in text for text in texts):
                separator = "; separate the values by spaces"
            # `from None` hides the first message, which does not name what the field expects.
            raise ValueError(f"must be {self.expected}{separator}") from None


SWITCH = {"auto": None, "on": True, "off": False}
"""Words for the values of a field that is left to the trainer by default."""
PRESET_ORIGIN = "preset "
"""The origin of a preset's values begins with this. The name of the preset follows."""


@dataclasses.dataclass(frozen=True)
class ValueWithOrigin:
    """A value that a user gave, and where: '--lr', 'run.yaml:9' or 'preset llama2-7b'."""

    value: typing.Any
    origin: str


@functools.cache
def all_fields() -> dict[str, Field]:
    """Return every field by its dotted name, in the order of declaration."""
    table = {}
    for group, cls in list_groups().items():
        types_ = typing.get_type_hints(cls, include_extras=True)
        for item in dataclasses.fields(cls):
            table[f"{group}.{item.name}"] = _make_field(
                f"{group}.{item.name}", types_[item.name], item
            )
    # Flags do not name their group. Two fields with one name, or a field named `no_x` for a boolean
    # `x`, would make a flag ambiguous.
    flags = [field.flag for field in table.values()] + [
        field.negative_flag for field in table.values() if field.is_bool
    ]
    doubled = {flag for flag in flags if flags.count(flag) > 1}
    assert not doubled, f"flags declared twice: {sorted(doubled)}"
    return table


@functools.cache
def list_groups() -> dict[str, type]:
    """Return the groups of `Config` by name."""
    hints = typing.get_type_hints(Config)
    return {item.name: hints[item.name] for item in dataclasses.fields(Config)}


def build_config(values: dict[str, typing.Any]) -> Config:
    """Return the `Config` with these values, by dotted name, and defaults elsewhere.

    `values` must have every required field.
    """
    kwargs: dict[str, dict[str, typing.Any]] = {group: {} for group in list_groups()}
    for dotted, value in values.items():
        group, _, name = dotted.partition(".")
        kwargs[group][name] = value
    return Config(**{group: cls(**kwargs[group]) for group, cls in list_groups().items()})


def flatten(config: Config) -> dict[str, typing.Any]:
    """Return every value of `config` by its dotted name."""
    return {
        dotted: getattr(getattr(config, field.group), field.name)
        for dotted, field in all_fields().items()
    }


def find_missing(given: Iterable[str]) -> list[str]:
    """Return a message for each required field that is not among the dotted names `given`."""
    absent = [
        field
        for field in all_fields().values()
        if field.required and field.dotted not in set(given)
    ]
    return [
        f"{field.flag} is required: give it as a flag, or as {field.dotted} in the --config file."
        for field in absent
    ]


def _convert_text(annotation: typing.Any, text: str) -> typing.Any:
    """Return the value that a text spells.

    It is the value that tyro, which prints --help, reads from the same text. Importing tyro takes
    longer than reading a command line, so only --help imports it.

    Raises:
        ValueError: The text is no value of this type.
    """
    if typing.get_origin(annotation) is typing.Literal:
        values = {str(value): value for value in typing.get_args(annotation)}
        if text not in values:
            raise ValueError(text)
        return values[text]
    if typing.get_origin(annotation) is typing.Union:
        for option in typing.get_args(annotation):
            with contextlib.suppress(ValueError):
                return _convert_text(option, text)
        raise ValueError(text)
    return annotation(text)


def _describe_type(annotation: typing.Any) -> str:
    """Return in words what a value of this type looks like."""
    # Only the types that occur in the groups are handled. Another type raises KeyError below.
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return ", or ".join(map(_describe_type, typing.get_args(annotation)))
    return _EXPECTED[annotation]


def _make_field(dotted: str, hint: typing.Any, item: "dataclasses.Field[typing.Any]") -> Field:
    """Build the `Field` of one dataclass field from its type hint."""
    declared_range = None
    if typing.get_origin(hint) is typing.Annotated:
        hint, declared_range = typing.get_args(hint)
    options = (hint,)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
    optional = type(None) in options
    # A union of one type is that type itself, so `int | None` becomes `int` and `int | str | None`
    # becomes `int | str`.
    annotation: typing.Any = typing.Union.__getitem__(
        tuple(option for option in options if option is not type(None))
    )
    default = item.default
    # A field has a default or a factory for it, never both.
    if item.default_factory is not dataclasses.MISSING:
        default = item.default_factory()
    return Field(dotted, annotation, optional, default, declared_range)


@functools.cache
def read_attribute_docs(cls: type) -> dict[str, str]:
    """Return the string literal below each attribute of a dataclass, by the attribute's name."""
    # Python does not keep these literals at run time. They are read from the source instead, which
    # takes a while. A rank that trains does not need them.
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


_SHOWN_VALUES = 8
"""A message shows at most this many values of a flag."""


@dataclass(frozen=True)
class ConfigWithOrigin:
    """A configuration and, for each dotted field, where its value came from.

    `origin` has the form of `LoadedConfig.origin`. It may lack fields or be empty. Messages then
    leave the origin out.
    """

    config: Config
    origin: dict[str, str]

    def __getitem__(self, dotted: str) -> Any:
        """Return the value of a field by its dotted name, as in 'model.hidden_size'."""
        group, _, name = dotted.partition(".")
        return getattr(getattr(self.config, group), name)

    def is_changed(self, dotted: str) -> bool:
        """Return whether the field's value differs from its default."""
        return bool(self[dotted] != all_fields()[dotted].default)

    def is_from_preset(self, dotted: str) -> bool:
        """Return whether the field's value is that of a preset."""
        return self.origin.get(dotted, "").startswith(PRESET_ORIGIN)

    def describe(self, *dotted: str) -> str:
        """Return flag, value and origin of fields, joined with 'and'.

        An example is '--seq-length 512 (run.yaml:9)'. The origin is left out if the value came from
        a flag.
        """
        return " and ".join(map(self._describe_field, dotted))

    def list_values(self) -> dict[str, Any]:
        """Return every value by its dotted name."""
        return flatten(self.config)

    def _describe_field(self, dotted: str) -> str:
        return describe_value(dotted, self[dotted], self.origin.get(dotted, ""))


def describe_value(dotted: str, value: Any, origin: str) -> str:
    """Return the flag, a value and its origin of a field, as `ConfigWithOrigin.describe` does."""
    # A mixture may have hundreds of values.
    if isinstance(value, tuple) and len(value) > _SHOWN_VALUES:
        value = (*value[:_SHOWN_VALUES], f"... ({len(value)} values)")
    shown = all_fields()[dotted].spell(value)
    # A value that came from a flag needs no origin, because the message shows that flag already.
    if origin and not origin.startswith("-"):
        return f"{shown} ({origin})"
    return shown


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration as it was loaded, the origin of each value, and the warnings."""

    config: Config
    origin: dict[str, str]
    """Dotted field -> 'default', 'preset llama2-7b', 'run.yaml:9', or the flag as it was typed."""
    warnings: list[str]
