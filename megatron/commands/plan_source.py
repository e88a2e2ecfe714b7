"""Where the plan's training command comes from: a command line, a launch script or a YAML file.

Invariant: a script is read as text, and no command in it runs.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from megatron.commands.double_dash import split_at_double_dash
from megatron.errors import ConfigError
from megatron.launch_script import (
    SCRIPT_SUFFIXES,
    LaunchScript,
    expand_launch_script,
    parse_command,
    read_launch_script,
)

_SWITCHES = frozenset(
    {
        "--dry-run",
        "--expand",
        "--help",
        "--json",
        "--no-dry-run",
        "--no-expand",
        "--no-json",
        "--no-search",
        "--search",
        "-h",
    }
)
"""The tool's own flags without a value."""
_WITH_VALUE = frozenset(
    {
        "--carbon-intensity",
        "--consumed-samples",
        "--device-memory-gib",
        "--dry-run-microbatches",
        "--explain",
        "--failures-per-1000-node-days",
        "--hardware",
        "--pareto",
        "--picture",
        "--pue",
        "--ranks-per-node",
        "--restart-minutes",
        "--save-gb-per-second",
        "--trace",
        "--usable-share",
        "--world-size",
    }
)
"""The tool's own flags with one value."""


@dataclass(frozen=True)
class CommandSource:
    """The training arguments, the world size found with them, and warnings about reading them.

    `documents` has the files that the script writes before it starts training, by name.
    """

    arguments: tuple[str, ...]
    world_size: int | None
    warnings: tuple[str, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)
    ranks_per_node: int | None = None


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into this tool's own arguments and the training command's.

    Arguments are recognised by name. Everything after '--' belongs to the training command.
    """
    # tyro would refuse the training flags, so each word is assigned here.
    words, after = split_at_double_dash(argv)
    own: list[str] = []
    training: list[str] = []
    while words:
        word = words.pop(0)
        name = word.partition("=")[0].replace("_", "-")
        if name in _SWITCHES:
            own.append(word)
        elif name in _WITH_VALUE:
            # The value is attached with '=', or it is the next word.
            own.append(word)
            if "=" not in word:
                own += words[:1]
                words = words[1:]
        elif name == "--at":
            values = word.partition("=")[2].replace(",", " ").split()
            # `--at` takes any number of values. The first word that is no number ends them.
            # Negative numbers are taken too, so that the message about them names this flag.
            while words and re.fullmatch(r"-?\d[\d_]*", words[0]):
                values.append(words.pop(0))
            own += ["--at", *values]
        else:
            training.append(word)
    return own, training + (after or [])


def read_source(training: list[str], *, expand: bool = False) -> CommandSource:
    """Find the arguments of pretrain_gpt.py in a command line, a script or a YAML file.

    Args:
        training: The words of the command line that belong to the training command.
        expand: Follow the script's control flow in a contained shell.

    Raises:
        ConfigError: The file cannot be read or has no training command, the shell cannot be
            contained, or `expand` is set without a script.
    """
    if training and not training[0].startswith("-"):
        first = Path(training[0])
    else:
        first = None
    is_script = first is not None and first.suffix in SCRIPT_SUFFIXES
    if expand and not is_script:
        raise ConfigError(
            "--expand needs a script as the first argument, a file that ends in "
            f"{' or '.join(SCRIPT_SUFFIXES)}."
        )
    if first is not None and first.suffix in (".yaml", ".yml"):
        return CommandSource(("--config", *training), None)
    # Anything that is no file with a known suffix is part of the training command itself.
    if first is None or not is_script:
        return _build_source(parse_command(training), ())
    parameters = list(takewhile(lambda word: not word.startswith("-"), training[1:]))
    further = tuple(training[1 + len(parameters) :])
    if expand:
        found = expand_launch_script(first, parameters=parameters, environment=os.environ)
    else:
        found = read_launch_script(first, parameters=parameters or None, environment=os.environ)
    return _build_source(found, further, script=first, expanded=expand)


def _build_source(
    command: LaunchScript,
    further: tuple[str, ...],
    *,
    script: Path | None = None,
    expanded: bool = False,
) -> CommandSource:
    return CommandSource(
        (*_drop_flags(command.arguments, further), *further),
        command.world_size,
        tuple(_describe_unknown(command, script, expanded)),
        command.documents,
        command.devices_per_node,
    )


def _drop_flags(arguments: Sequence[str], further: Sequence[str]) -> list[str]:
    """Return `arguments` without the flags that `further` gives again, and without their values.

    The script's value of such a flag may be unknown, as in `--lr $(...)`, which is not a number.
    """
    given = {_get_flag(word) for word in further if word.startswith("--")}
    kept: list[str] = []
    dropped = False
    for word in arguments:
        if word.startswith("--"):
            dropped = _get_flag(word) in given
        if not dropped:
            kept.append(word)
    return kept


def _get_flag(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _describe_unknown(command: LaunchScript, script: Path | None, expanded: bool) -> Iterator[str]:
    """Yield one warning for each kind of unknown value in the script, with the way to give them."""
    if command.unresolved:
        unset = ", ".join(f"${name}" for name in command.unresolved)
        first = command.unresolved[0]
        fate = "are empty, as in bash" if expanded else "stay as they are written"
        yield (
            f"variables without a value here {fate}: {unset}. Set them in the environment, as in "
            f"{first}=... megatron-plan {script}."
        )
    if command.parameters:
        names = ", ".join(f"${name}" for name in command.parameters)
        yield (
            f"{names}: the script needs arguments. Write them after its name: "
            f"megatron-plan {script} ARGUMENT ..."
        )
    if command.commands:
        yield (
            f"these need execution and stay as they are written: {', '.join(command.commands)}. "
            f"Give their flags again with a value: megatron-plan {script} --flag VALUE."
        )
    if command.branches and not expanded:
        names = ", ".join(command.branches)
        yield (
            f"the script sets {names} in a branch or a loop. This plan uses the last branch and "
            "the first pass of the loop. With --expand it follows the branches and loops."
        )


@contextmanager
def write_documents(source: CommandSource) -> Iterator[dict[str, str]]:
    """Write the documents that the arguments name to a temporary folder.

    Yields:
        The script's name of each document, and its path in the folder.
    """
    paths: dict[str, str] = {}
    # Most commands have none, and a process that is killed would leave the folder.
    if not source.documents:
        yield paths
        return
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        for number, (name, text) in enumerate(source.documents.items()):
            # Two documents may have one name in two folders.
            safe = re.sub(r"[^\w.-]|^\.+$", "_", Path(name).name)[-100:]
            path = Path(folder) / str(number) / (safe or "document")
            if any(name in (word, word.partition("=")[2]) for word in source.arguments):
                path.parent.mkdir()
                path.write_text(text, errors="surrogateescape")
                paths[name] = str(path)
        yield paths


def rename_document(word: str, paths: Mapping[str, str]) -> str:
    """Return a word of the arguments with the path of the document that it names.

    Args:
        word: A file name or --flag=FILE. Other words are returned as they are.
        paths: What `write_documents` yields.
    """
    flag, mark, value = word.partition("=")
    if mark and value in paths:
        return f"{flag}={paths[value]}"
    return paths.get(word, word)
