"""Values of YAML in the types of Python, for files whose keys are not those of this trainer."""

import contextlib
import math
from typing import Any

import yaml

from megatron.config.yaml_file import PLAIN_TAGS, is_null, read_items


def get_plain_value(node: yaml.Node) -> Any:
    """Return the value of a node in the types of Python: dict, list, bool, number, text or None.

    A number such as 1e-8, which YAML 1.1 reads as text, is a number. A word that is no number,
    such as 1:30, stays text.

    Raises:
        ValueError: the node has a tag, a key that is not a word, or a list or mapping twice.
    """
    return _get_plain_part(node, set())


def _get_plain_part(node: yaml.Node, seen: set[int]) -> Any:
    if node.tag not in PLAIN_TAGS:
        raise ValueError(f"must not have the tag {node.tag}")
    if isinstance(node, yaml.ScalarNode):
        return _get_plain_scalar(node)
    # Aliases of aliases would make a short text huge.
    if id(node) in seen:
        raise ValueError("must not have the same list or mapping twice, by an alias")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_get_plain_part(item, seen) for item in node.value]
    errors: list[str] = []
    items = read_items(node, "", "it", errors)
    if errors:
        raise ValueError(errors[0].removeprefix(":").removesuffix("."))
    return {key.value: _get_plain_part(value, seen) for key, value in items}


def _get_plain_scalar(node: yaml.ScalarNode) -> Any:
    if node.style:
        return node.value
    if is_null(node):
        return None
    if node.tag == "tag:yaml.org,2002:bool":
        return node.value.lower() in ("true", "yes", "on")
    # Python reads the words nan and inf as numbers.
    if any(letter.isdigit() for letter in node.value):
        for convert in (int, float):
            with contextlib.suppress(ValueError):
                number = convert(node.value)
                # A number that no float can hold stays text, which is no number to any key.
                return number if abs(number) < math.inf else node.value
    return node.value
