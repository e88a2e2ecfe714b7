"""YAML in and out. A file nests groups: `model: {hidden_size: 384}`.

Invariant: YAML gives the structure only. Values are read by `Field.convert`, as on the command line, so that 1e-4, 1:30 and NO
mean what they look like (YAML 1.1 reads them as text, a number of base 60, and false). No tag is ever executed.
"""

import difflib
from pathlib import Path
from typing import Any

import yaml

from megatron.config.fields import Field, ValueWithOrigin, all_fields, flatten, list_groups
from megatron.config.tree import Config

_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp")
}
_NULLS = ("", "~", "null", "Null", "NULL", "None")
_SPECIAL_FLOATS = {".inf": "inf", "-.inf": "-inf", ".nan": "nan"}


def read_file(path: str) -> tuple[dict[str, ValueWithOrigin], list[str]]:
    """The values that a file gives by dotted name, and a message for each thing that is wrong with it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return {}, [f"--config {path} cannot be read: {reason}."]
    return read_text(text, path)


def read_text(text: str, name: str) -> tuple[dict[str, ValueWithOrigin], list[str]]:
    """As `read_file`, for text; `name` stands for the file in origins and messages."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return {}, [f"{name}:{line} is not YAML: {error.problem}."]
    except yaml.YAMLError as error:
        return {}, [f"{name}:1 is not YAML: {str(error).splitlines()[0]}."]
    given: dict[str, ValueWithOrigin] = {}
    errors: list[str] = []
    for group, value in _read_items(root, name, "the file", errors):
        if group.value not in list_groups():
            errors.append(
                f"{name}:{_get_line(group)} has an unknown group '{group.value}'{_suggest_group(group.value)}"
            )
            continue
        for key, node in _read_items(value, name, f"'{group.value}'", errors):
            field = all_fields().get(f"{group.value}.{key.value}")
            if field is None:
                unknown = f"{group.value}.{key.value}"
                errors.append(
                    f"{name}:{_get_line(key)} has an unknown key '{unknown}'{_suggest_key(unknown)}"
                )
                continue
            try:
                given[field.dotted] = ValueWithOrigin(
                    _read_value(field, node), f"{name}:{_get_line(key)}"
                )
            except ValueError as error:
                errors.append(
                    f"{field.dotted}: {_format_node(node)} ({name}:{_get_line(node)}) {error}."
                )
    return given, errors


def dump_yaml(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load_yaml` gives back an equal one."""
    tree: dict[str, dict[str, Any]] = {group: {} for group in list_groups()}
    for dotted, value in flatten(config).items():
        group, _, name = dotted.partition(".")
        tree[group][name] = _convert_for_dump(value)
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)


class _Text(str):
    """Text that is written in quotes, so that 'null' or '1' stay text whoever reads the file."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Text,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"'),
)
_Dumper.add_representer(
    tuple,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=True
    ),
)


def _convert_for_dump(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_convert_for_dump(item) for item in value)
    return _Text(value) if isinstance(value, str) else value


def _read_items(
    node: yaml.Node | None, name: str, what: str, errors: list[str]
) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Keys and values of a mapping; an absent or empty one has none."""
    if node is None or (isinstance(node, yaml.ScalarNode) and _is_null(node)):
        return []
    if not isinstance(node, yaml.MappingNode):
        errors.append(
            f"{name}:{_get_line(node)} {what} must be a mapping (key: value), not {_format_node(node)}."
        )
        return []
    items: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            errors.append(f"{name}:{_get_line(key)} has a key that is not a word.")
        elif key.value in items:
            first = _get_line(items[key.value][0])
            errors.append(
                f"{name}:{_get_line(key)} gives '{key.value}' again (first in line {first}); take one out."
            )
        else:
            items[key.value] = (key, value)
    return list(items.values())


def _read_value(field: Field, node: yaml.Node) -> Any:
    """The value in `node`. Raises ValueError saying what was expected."""
    if node.tag not in _PLAIN_TAGS:
        raise ValueError(
            f"must be {field.expected}, without the tag {node.tag.replace('tag:yaml.org,2002:', '!!')}"
        )
    if isinstance(node, yaml.SequenceNode):
        if field.arity in (0, 1) or not all(
            isinstance(item, yaml.ScalarNode) for item in node.value
        ):
            raise ValueError(f"must be {field.expected}")
        return field.convert([item.value for item in node.value])
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"must be {field.expected}")
    if _is_null(node):
        if not field.optional:
            raise ValueError(f"must be {field.expected}; leave the key out for the default")
        return None
    text = node.value
    if not node.style:
        if field.annotation is str and text.lower() in ("true", "false"):
            raise ValueError(f"must be text; if the text is {text}, put it in quotes")
        text = _SPECIAL_FLOATS.get(text.lower(), text)
    return field.convert([text])


def _is_null(node: yaml.ScalarNode) -> bool:
    return not node.style and node.value in _NULLS


def _get_line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _format_node(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"'{node.value}'"
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
    owners = [field.dotted for field in all_fields().values() if field.name == word]
    if owners:
        return f"; write it under its group: {owners[0]}."
    close = difflib.get_close_matches(word, list_groups(), n=1)
    return (
        f"; perhaps you meant '{close[0]}'."
        if close
        else f"; the groups are {', '.join(list_groups())}."
    )


def _suggest_key(dotted: str) -> str:
    group, _, name = dotted.partition(".")
    owners = [
        field.dotted for field in all_fields().values() if field.name == name.replace("-", "_")
    ]
    close = owners or difflib.get_close_matches(dotted, all_fields(), n=1)
    return f"; perhaps you meant '{close[0]}'." if close else f"; --help lists the {group} options."
