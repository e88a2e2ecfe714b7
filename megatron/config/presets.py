"""Presets: the architectures of published models, by name.

Each file of `megatron/presets` is a preset. It begins with comments, which say what the model is
and where its numbers come from. Groups and keys follow, as in a --config file.

If the script or the configuration of the pretraining is published, the values are from there.
Otherwise they are from the config.json of the released model. A preset has nothing that only
training needs, such as batch sizes, learning rates and additions to the loss.

Invariant: a preset has only fields of the groups `model` and `tokenizer`. Its values replace
defaults. The --config file and flags replace its values.
"""

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.code_version import PACKAGE
from megatron.config.fields import PRESET_ORIGIN, ValueWithOrigin
from megatron.config.yaml_file import read_text

_FOLDER = PACKAGE / "presets"
_SOURCE = "# Source: "
_MOST_HINTS = 6
"""Number of presets that a message about an unknown name lists."""


@dataclass(frozen=True)
class Preset:
    """A published architecture."""

    name: str
    sources: tuple[str, ...]
    """Addresses of what the numbers were taken from."""
    values: dict[str, ValueWithOrigin]
    """Dotted field -> its value. The origin is 'preset NAME'."""


@functools.cache
def list_preset_names() -> tuple[str, ...]:
    """Return the names of all presets. Numbers in names are ordered by their values."""
    return tuple(sorted((path.stem for path in _FOLDER.glob("*.yaml")), key=_split_at_numbers))


def read_preset(name: str) -> Preset:
    """Return the preset with this name.

    Raises:
        ValueError: There is none. The message lists those with similar names.
    """
    if name not in list_preset_names():
        raise ValueError(f"is unknown{_suggest_preset(name)}")
    contents = read_text(_read_file(name), f"{name}.yaml")
    assert not contents.errors, contents.errors
    comments = _read_comments(name).splitlines()
    sources = [line.removeprefix(_SOURCE) for line in comments if line.startswith(_SOURCE)]
    values = {
        dotted: ValueWithOrigin(item.value, PRESET_ORIGIN + name)
        for dotted, item in contents.given.items()
    }
    return Preset(name, tuple(sources), values)


def _read_file(name: str) -> str:
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def _read_comments(name: str) -> str:
    """Return the comments at the beginning of a preset's file, which an empty line ends."""
    return _read_file(name).partition("\n\n")[0]


def _split_at_numbers(name: str) -> list[str | float]:
    """Return the words and numbers of a name in turn, as in ['qwen', 3.0, '-', 0.6, 'b']."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [float(part) if index % 2 else part for index, part in enumerate(parts)]


def _suggest_preset(name: str) -> str:
    """Return the end of a message about an unknown preset."""
    typed = name.lower().replace("_", "-")
    names = list_preset_names()
    containing = [known for known in names if typed and typed in known]
    # The comments have other names of the model, such as BLOOM for tr11-176b.
    described = [known for known in names if typed and typed in _read_comments(known).lower()]
    close = difflib.get_close_matches(typed, names, n=3)
    # With no similar name, those of the same family are listed, as for gpt2-1.5b.
    family = [known for known in names if known.split("-")[0] == typed.split("-")[0]]
    hints = list(dict.fromkeys([*containing, *described, *close, *family]))[:_MOST_HINTS]
    if hints:
        return f"; perhaps you meant {', '.join(hints)}; --list-presets lists all"
    return "; --list-presets lists all"


def read_chosen_preset(
    choice: ValueWithOrigin | None,
) -> tuple[dict[str, ValueWithOrigin], list[str]]:
    """Return the values of the chosen preset and the errors. Without a choice, both are empty."""
    if choice is None or choice.value is None:
        return {}, []
    try:
        return dict(read_preset(choice.value).values), []
    except ValueError as error:
        note = ""
        if not choice.origin.startswith("-"):
            note = f" ({choice.origin})"
        return {}, [f"--preset {choice.value}{note} {error}."]


def wants_preset_list(argv: Sequence[str]) -> bool:
    """Return whether a command line has --list-presets."""
    return any(word.replace("_", "-") == "--list-presets" for word in argv)
