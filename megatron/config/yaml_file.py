"""Reads and writes the configuration as YAML, which nests groups: `model: {hidden_size: 384}`.

Invariant: YAML gives the structure only. Values are read by `Field.convert`, as on the command
line, so that 1e-4, 1:30 and NO mean what they look like. YAML 1.1 reads them as text, as a number
of base 60, and as false. No tag is ever executed.
"""

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from megatron.base.errors import MOST_ERRORS
from megatron.base.outside_file import SETTINGS_BYTES, load_text
from megatron.base.plain_text import find_close_names, make_plain
from megatron.config.fields import Field, ValueWithOrigin, all_fields, flatten, list_groups
from megatron.config.tree import Config

# YAML resolves plain scalars to these tags by itself. Any other tag was written by the user.
PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp")
}
_PRESET_KEY = "preset"
"""The only key of a file that is not a group."""
_NULLS = ("", "~", "null", "Null", "NULL", "None")
_SPECIAL_FLOATS = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


@dataclasses.dataclass
class YamlContents:
    """What a file gives, and what is wrong with it."""

    given: dict[str, ValueWithOrigin] = dataclasses.field(default_factory=dict)
    """Dotted field -> its value."""
    preset: ValueWithOrigin | None = None
    """Name of the preset on which the file builds."""
    errors: list[str] = dataclasses.field(default_factory=list)


def read_file(path: str) -> YamlContents:
    """Return the contents of a file, with a message for each error in it."""
    try:
        text = load_text(path, SETTINGS_BYTES)
    except OSError as error:
        return YamlContents(errors=[f"--config {path} cannot be read: {error.strerror}."])
    return read_text(text, path)


def read_text(text: str, name: str, *, fast: bool = False) -> YamlContents:
    """Return the same as `read_file`, for text.

    Args:
        text: The text.
        name: Replaces the file's name in origins and messages.
        fast: Use libyaml if PyYAML has it. libyaml ends the process on a text that is nested too
            deeply, so the text must come from `dump_yaml` and not from a file.
    """
    root, broken = compose(text, name, fast=fast)
    if broken is not None:
        return YamlContents(errors=[broken])
    contents = YamlContents()
    for group, value in read_items(root, name, "the file", contents.errors):
        if len(contents.errors) > MOST_ERRORS:
            break
        if group.value == _PRESET_KEY:
            _read_preset_name(value, name, contents)
        elif group.value in list_groups():
            _read_group(group.value, value, name, contents)
        else:
            contents.errors.append(
                f"{name}:{get_line(group)} has an unknown group "
                f"'{group.value}'{_suggest_group(group.value)}"
            )
    return contents


def _read_group(group: str, node: yaml.Node, name: str, contents: YamlContents) -> None:
    """Read the keys of a group into `contents`."""
    for key, value in read_items(node, name, f"'{group}'", contents.errors):
        # To look for a name that is close takes time.
        if len(contents.errors) > MOST_ERRORS:
            break
        field = all_fields().get(f"{group}.{key.value}")
        if field is None:
            unknown = f"{group}.{key.value}"
            contents.errors.append(
                f"{name}:{get_line(key)} has an unknown key '{unknown}'{_suggest_key(unknown)}"
            )
            continue
        try:
            contents.given[field.dotted] = ValueWithOrigin(
                read_value(field, value), f"{name}:{get_line(key)}"
            )
        except ValueError as error:
            contents.errors.append(
                f"{field.dotted}: {_format_node(value)} ({name}:{get_line(value)}) {error}."
            )


def _read_preset_name(node: yaml.Node, name: str, contents: YamlContents) -> None:
    """Read the name of a preset, or add an error to `contents`. An empty value names none."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in PLAIN_TAGS:
        contents.errors.append(
            f"{name}:{get_line(node)} {_PRESET_KEY} must be the name of a preset, not "
            f"{_format_node(node)}; --list-presets lists all."
        )
    elif not is_null(node):
        contents.preset = ValueWithOrigin(node.value, f"{name}:{get_line(node)}")


def compose(text: str, name: str, *, fast: bool = False) -> tuple[yaml.Node | None, str | None]:
    """Return the tree of a YAML text, or None and a message if it is not YAML.

    No object is constructed, so no text can run code. Each scalar keeps its text and line. See
    `read_text` for the arguments.
    """
    if fast and hasattr(yaml, "CSafeLoader"):
        # libyaml refuses some texts that PyYAML writes, such as a path that is not UTF-8.
        with contextlib.suppress(yaml.YAMLError):
            return yaml.compose(text, Loader=yaml.CSafeLoader), None
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader), None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        # PyYAML quotes whatever follows one of these words.
        problem = re.sub("(alias|anchor|handle|directive) .*", r"\1", str(error.problem))
        return None, f"{name}:{line} is not YAML: {problem}."
    except yaml.YAMLError as error:
        return None, f"{name}:1 is not YAML: {str(error).splitlines()[0]}."
    except RecursionError:
        return None, f"{name} is nested too deeply; a configuration has groups and their keys."


def dump_yaml(config: Config) -> str:
    """Return the complete configuration as YAML, defaults included.

    `load_yaml` of the result returns an equal configuration.
    """
    tree: dict[str, dict[str, Any]] = {group: {} for group in list_groups()}
    for dotted, value in flatten(config).items():
        group, _, name = dotted.partition(".")
        tree[group][name] = _convert_for_dump(value)
    # The very large width keeps each value on one line.
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)


def dump_fields(
    values: Mapping[str, Any], origin: Mapping[str, str], chosen: Collection[str]
) -> str:
    """Return the chosen fields as YAML, each with its origin as a comment.

    Args:
        values: Dotted field -> value.
        origin: Dotted field -> where its value comes from.
        chosen: The dotted fields to write.
    """
    lines: list[str] = []
    for group in list_groups():
        named = [d for d in values if d in chosen and d.partition(".")[0] == group]
        if named:
            lines += ["", f"{group}:"]
        for dotted in named:
            item = {dotted.partition(".")[2]: _convert_for_dump(values[dotted])}
            text = yaml.dump(item, Dumper=_Dumper, allow_unicode=True, width=10**9).rstrip("\n")
            # Values of more than one line begin on the next one.
            first, *rest = text.split("\n")
            lines += [f"  {first}  # {make_plain(origin[dotted])}", *(f"  {line}" for line in rest)]
    return "\n".join([*lines, ""])


class _Text(str):
    """Text that is written in quotes, so that no reader takes 'null' or '1' for another type."""


class _Dumper(yaml.SafeDumper):
    """Dumper that repeats equal values instead of writing YAML anchors and aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that no object is written as a reference to another."""
        return True


_Dumper.add_representer(
    _Text,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"'),
)
# A tuple is written in one line, as in [1, 2]. PyYAML's safe dumper would write it as a block.
_Dumper.add_representer(
    tuple,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=True
    ),
)


def _convert_for_dump(value: Any) -> Any:
    """Return a value in the types that `_Dumper` writes, also inside of tuples."""
    if isinstance(value, tuple):
        return tuple(_convert_for_dump(item) for item in value)
    # A str of Python would be written without quotes where YAML permits it.
    if isinstance(value, str):
        return _Text(value)
    return value


def read_items(
    node: yaml.Node | None, name: str, what: str, errors: list[str]
) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Return keys and values of a mapping. An absent or empty one has none.

    Doubled keys are added to `errors`, because YAML itself would keep the last one without a
    message.
    """
    if node is None or (isinstance(node, yaml.ScalarNode) and is_null(node)):
        return []
    if not isinstance(node, yaml.MappingNode):
        # The value is not shown. A script may name any file, whose content is not for a log.
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "text"
        errors.append(
            f"{name}:{get_line(node)} {what} must be a mapping (key: value), and is {kind}."
        )
        return []
    items: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            errors.append(f"{name}:{get_line(key)} has a key that is not a word.")
        # PyYAML would keep the last of two equal keys without a message.
        elif key.value in items:
            first = get_line(items[key.value][0])
            errors.append(
                f"{name}:{get_line(key)} gives '{key.value}' again (first in line {first}); "
                "remove one."
            )
        else:
            items[key.value] = (key, value)
    return list(items.values())


def read_value(field: Field, node: yaml.Node) -> Any:
    """Return the value in `node`.

    Raises:
        ValueError: the value does not fit. The message describes what was expected.
    """
    if node.tag not in PLAIN_TAGS:
        raise ValueError(
            f"must be {field.expected}, without the tag "
            f"{node.tag.replace('tag:yaml.org,2002:', '!!')}"
        )
    if isinstance(node, yaml.SequenceNode):
        if field.arity in (0, 1) or not all(
            isinstance(item, yaml.ScalarNode) for item in node.value
        ):
            raise ValueError(f"must be {field.expected}")
        return field.convert([item.value for item in node.value])
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"must be {field.expected}")
    if is_null(node):
        if not field.optional:
            raise ValueError(f"must be {field.expected}; leave the key out for the default")
        return None
    text = node.value
    # `style` is None for a plain scalar and a quote character for a quoted one.
    if not node.style:
        # A user who writes `true` for a text field has probably taken it for a boolean.
        if field.annotation is str and text.lower() in ("true", "false"):
            raise ValueError(f"must be text; if the text is {text}, put it in quotes")
        # YAML spells infinity as .inf, and Python's float() reads inf.
        text = _SPECIAL_FLOATS.get(text.lower(), text)
    return field.convert([text])


def is_null(node: yaml.ScalarNode) -> bool:
    """Return whether a scalar is null. A quoted one is text."""
    return not node.style and node.value in _NULLS


def get_line(node: yaml.Node) -> int:
    """Return the 1-based line of a node. PyYAML counts from 0."""
    return node.start_mark.line + 1


def _format_node(node: yaml.Node) -> str:
    """Return a node's value for a message."""
    if isinstance(node, yaml.ScalarNode):
        return f"'{node.value[:200]}'"
    if isinstance(node, yaml.SequenceNode):
        return (
            "["
            + ", ".join(
                item.value if isinstance(item, yaml.ScalarNode) else "..." for item in node.value
            )
            + "]"
        )
    return "a mapping"


def _suggest_group(word: str) -> str:
    """Return the end of a message about an unknown group."""
    # A common mistake is a field at the top level of the file, without its group.
    owners = [field.dotted for field in all_fields().values() if field.name == word]
    if owners:
        return f"; write it under its group: {owners[0]}."
    close = difflib.get_close_matches(word, [*list_groups(), _PRESET_KEY], n=1)
    if close:
        return f"; perhaps you meant '{close[0]}'."
    return f"; the groups are {', '.join(list_groups())}."


def _suggest_key(dotted: str) -> str:
    """Return the end of a message about an unknown key."""
    group, _, name = dotted.partition(".")
    owners = [
        field.dotted for field in all_fields().values() if field.name == name.replace("-", "_")
    ]
    close = owners or find_close_names(dotted, all_fields())
    if close:
        return f"; perhaps you meant '{close[0]}'."
    return f"; --help lists the {group} options."
