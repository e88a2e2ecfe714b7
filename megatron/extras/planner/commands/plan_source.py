"""The training command of a plan: where it comes from, and the file of --write-config.

A command line, a launch script or a YAML file has the command. A contained shell follows the
branches and loops of a script. The file has the planned run in this trainer's names.

Invariants: no command in a script runs. `pretrain_gpt.py --config FILE` has the configuration that
was planned. The file is read again to check this.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_text
from megatron.base.plain_text import format_some, make_plain
from megatron.config.compare import compute_config_digest, find_config_differences
from megatron.config.fields import LoadedConfig, all_fields, flatten
from megatron.config.yaml_file import dump_fields
from megatron.console.parse import split_at_double_dash
from megatron.extras.interop.translators.launch_script import (
    SCRIPT_SUFFIXES,
    LaunchScript,
    parse_command,
    read_launch_script,
)
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.run_plan import Plan
from megatron.tokenizer.vocabulary import find_published_size

_SCHEDULER = re.compile(
    r"(SLURM_(?!JWT)|SBATCH_|PBS_|LSB_|COBALT_|FLUX_|OMPI_COMM_|PMI_)\w*"
    r"|MASTER_(ADDR|PORT)|(LOCAL_|NODE_)?RANK|WORLD_SIZE|NNODES"
)
"""The variables of schedulers and launchers, whose values a plan shows. Others may be secrets."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_LONGEST_SHOWN = 100
"""Characters that are shown of a value or a line in a script."""
_MOST_SHOWN = 10
"""Values or lines that a message shows."""


@dataclass(frozen=True)
class CommandSource:
    """The training arguments, the world size found with them, and warnings about reading them.

    `documents` has the files that the script writes before it starts training, by name. `command`
    is the training command of the script `script`. `notes` state how it was read.
    `assumed_vocabulary` is the number of ids that the name of the script stands for, if nothing
    else gives it.
    """

    arguments: tuple[str, ...]
    world_size: int | None
    warnings: tuple[str, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)
    ranks_per_node: int | None = None
    command: LaunchScript | None = None
    script: Path | None = None
    notes: tuple[str, ...] = ()
    assumed_vocabulary: int | None = None


OwnFlags = dict[str, Literal["switch", "one value", "any number"]]
"""Flag of a tool -> how many values it takes. Any number: whole numbers, until the first other
word."""


def list_own_flags(arguments: Any) -> OwnFlags:
    """Return the flags of a tool.

    Args:
        arguments: The dataclass of its command line.
    """
    found: OwnFlags = {"--help": "switch", "-h": "switch"}
    hints: dict[str, Any] = get_type_hints(arguments)
    for name, kind in hints.items():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            found[flag] = found[f"--no-{flag[2:]}"] = "switch"
        elif get_origin(kind) is tuple:
            found[flag] = "any number"
        elif is_dataclass(kind):
            # Its fields are flags without its own name.
            found |= list_own_flags(kind)
        else:
            found[flag] = "one value"
    return found


def split_arguments(argv: Sequence[str], arguments: type) -> tuple[list[str], list[str]]:
    """Split a command line into a tool's own arguments and the training command's.

    Arguments are recognised by name. Everything after '--' belongs to the training command.

    Args:
        argv: The words of the command line.
        arguments: The dataclass of the tool's command line.
    """
    # tyro would refuse the training flags, so each word is assigned here.
    flags = list_own_flags(arguments)
    words, after = split_at_double_dash(list(argv))
    own: list[str] = []
    training: list[str] = []
    while words:
        word = words.pop(0)
        name = _get_flag(word)
        takes = flags.get(name)
        if takes == "switch":
            own.append(word)
        elif takes == "one value":
            # The value is attached with '=', or it is the next word.
            if "=" not in word and words:
                word += f"={words.pop(0)}"
            own.append(word)
        elif takes == "any number":
            values = word.partition("=")[2].replace(",", " ").split()
            # The first word that is no number ends them. Negative numbers are taken too, so that
            # the message about them names this flag.
            while words and re.fullmatch(r"-?\d[\d_]*", words[0]):
                values.append(words.pop(0))
            own += [name, *values]
        else:
            training.append(word)
    return own, training + (after or [])


def read_source(training: list[str], *, script_args: str = "") -> CommandSource:
    """Find the arguments of pretrain_gpt.py in a command line, a script or a YAML file.

    Args:
        training: The words of the command line that belong to the training command.
        script_args: Arguments of the script, written as in a shell. Assignments may come before
            them, as in "LR=1e-4 small", and set variables that the script inherits.

    Raises:
        ConfigError: The file cannot be read or has no training command.
    """
    if training and not training[0].startswith("-"):
        first = Path(training[0])
    else:
        first = None
    is_script = first is not None and first.suffix in SCRIPT_SUFFIXES
    if script_args and not is_script:
        raise ConfigError(
            "--script-args needs a script as the first argument, a file that ends in "
            f"{' or '.join(SCRIPT_SUFFIXES)}."
        )
    if first is not None and first.suffix in (".yaml", ".yml"):
        return CommandSource(("--config", *training), None)
    # Anything that is no file with a known suffix is part of the training command itself.
    if first is None or not is_script:
        return _build_source(parse_command(training), (), None, ())
    parameters = list(takewhile(lambda word: not word.startswith("-"), training[1:]))
    further = tuple(training[1 + len(parameters) :])
    try:
        parameters += shlex.split(script_args)
    except ValueError as error:
        raise ConfigError(f"--script-args {script_args}: {error}.") from None
    environment = {name: v for name, v in os.environ.items() if _SCHEDULER.fullmatch(name)}
    while parameters and (assigned := _ASSIGNMENT.fullmatch(parameters[0])):
        environment[assigned[1]] = assigned[2]
        del parameters[0]
    found = read_launch_script(first, parameters=parameters, environment=environment)
    return _build_source(found, further, first, tuple(_describe_assumptions(found, first)))


def _describe_assumptions(found: LaunchScript, script: Path) -> Iterator[str]:
    """Yield how the contained shell read a script, and what it assumed."""
    yield f"{script} is read with its branches and loops, in a shell that runs no command."
    if found.sourced:
        yield f"the script is read with files that it sources: {format_some(found.sourced)}."
    if found.assumed_files:
        yield (
            f"{_show(found.assumed_files)}: assumed to exist, because the script ends without it."
        )
    if found.loop:
        yield (
            f"the script starts training in the loop `{_show([found.loop])}`. This plan is of its "
            "first pass. For another one, edit the loop, or give the flags that change after the "
            "script."
        )


def _build_source(
    command: LaunchScript, further: tuple[str, ...], script: Path | None, notes: tuple[str, ...]
) -> CommandSource:
    source = CommandSource(
        (*_drop_flags(command.arguments, further), *further),
        command.world_size,
        tuple(_describe_unknown(command, script)),
        command.documents,
        command.devices_per_node,
        command,
        script,
        notes,
    )
    if script is None:
        return source
    return _assume_vocabulary(source, script)


def _assume_vocabulary(source: CommandSource, script: Path) -> CommandSource:
    """Return the command with the vocabulary of the tokenizer in the name of a script.

    A script such as pretrain_llama2.sh may name only a file tokenizer.model, which is not here.
    """
    given = {_get_flag(flag): value for flag, value in pairwise(source.arguments)}
    file = given.get("--tokenizer-model") or given.get("--tokenizer-name-or-path") or ""
    is_named = Path(file).name in ("tokenizer.model", "tokenizer.json")
    if "--vocab-size" in given or not is_named or Path(file).exists() or find_published_size(file):
        return source
    found = next(filter(None, map(find_published_size, re.split("[_-]", script.stem))), None)
    if found is None:
        return source
    warning = (
        f"the tokenizer {file} is not on this machine: assuming the published vocabulary of "
        f"{found[0]} ({found[1]}), as {script.name} suggests; give --vocab-size N for another "
        "size."
    )
    return replace(
        source,
        arguments=(*source.arguments, "--vocab-size", str(found[0])),
        warnings=(*source.warnings, warning),
        assumed_vocabulary=found[0],
    )


def explain_errors(source: CommandSource, errors: Sequence[str], arguments: type) -> list[str]:
    """Return the errors of a plan with their fixes, or one error about what the script lacks.

    The other errors may follow from the missing values, so they come after these are given.

    Args:
        source: The training command.
        errors: The errors of its plan.
        arguments: The dataclass of the tool's command line.
    """
    command = source.command
    if command is None or source.script is None:
        own = list_own_flags(arguments)
        return [_explain_own_flag(error, own) for error in errors]
    text = "\n".join(errors)
    if any(_has_value(text, name) for name in command.parameters):
        return [_describe_arguments(command, source.script)]
    names = [name for name in command.unresolved if _has_value(text, name)]
    if names:
        every = [*names, *(n for n in command.tested if n not in names)]
        return [
            f"the script needs variables: {_show(f'${name}' for name in every)}. "
            f"{_advise_variables(names[0], source.script)}",
            *_describe_unread(command),
        ]
    unknown = [command_text for command_text in command.commands if command_text in text]
    if unknown:
        flags = [
            flag
            for flag, value in pairwise(source.arguments)
            if any(command_text in value for command_text in unknown)
        ]
        return [
            f"values of {_show(flags) or 'the script'} need commands, which do not run here: "
            f"{_show(unknown)}. Give these flags again with a value: megatron-plan "
            f"{source.script} {' '.join(f'{flag} VALUE' for flag in flags[:_MOST_SHOWN])}."
        ]
    if re.search(r"is required|no arguments were given", text):
        return [*errors, *_describe_unread(command)]
    return list(errors)


def _show(items: Iterable[str]) -> str:
    """Return some parts of a script, each on one line and not too long."""
    return format_some((make_plain(item, _LONGEST_SHOWN) for item in items), _MOST_SHOWN)


def _advise_variables(name: str, script: Path | None) -> str:
    """Return how to give the variable `name` of a script."""
    return (
        "Give them before the script's arguments, as in megatron-plan "
        f"{script} --script-args '{name}=VALUE'."
    )


def _describe_unread(command: LaunchScript) -> Iterator[str]:
    """Yield the message about files that the script sources and that were not read, if any."""
    if command.unread:
        yield (
            f"files that the script sources were not read: {_show(command.unread)}. A file is read "
            "if it lies near the script. Give what it sets with --script-args "
            "'NAME=VALUE', or the flags after the script."
        )


def _explain_own_flag(error: str, flags: OwnFlags) -> str:
    """Return an error, with its fix if it is about a flag of this tool after '--'."""
    found = re.match(r"unknown flag (--[\w-]+)", error)
    if found is None or found[1].replace("_", "-") not in flags:
        return error
    return f"{found[0]}; it is a flag of this tool, so write it before '--'."


def _has_value(text: str, name: str) -> bool:
    """Return whether a value in the errors `text` is an unknown variable, and not a part of it.

    A file name with an unknown part, as in `ds.$JOB.json`, is not the cause of an error.
    """
    variable = rf"(?:\${re.escape(name)}|\$\{{{re.escape(name)}\}})"
    return re.search(rf"(?<![^\s'\"]){variable}(?=[\s'\",;:]|\.?$)", text, re.MULTILINE) is not None


def _describe_arguments(command: LaunchScript, script: Path | None) -> str:
    """Return the message about the arguments that a script lacks."""
    listed = format_some(command.missing_arguments, 20)
    return (
        f"the script needs arguments: {listed or '$@'}. Give all arguments of the script in order: "
        f"megatron-plan {script} --script-args 'VALUE1 VALUE2 ...'."
    )


def _drop_flags(arguments: Sequence[str], further: Sequence[str]) -> Iterator[str]:
    """Yield `arguments` without the flags that `further` gives again, and without their values.

    The script's value of such a flag may be unknown, as in `--lr $(...)`, which is not a number.
    """
    given = {_get_flag(word) for word in further if word.startswith("--")}
    dropped = False
    for word in arguments:
        if word.startswith("--"):
            dropped = _get_flag(word) in given
        if not dropped:
            yield word


def _get_flag(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _describe_unknown(command: LaunchScript, script: Path | None) -> Iterator[str]:
    """Yield one warning for each kind of unknown value in the script, with the way to give them."""
    if command.unresolved:
        unset = _show(f"${name}" for name in command.unresolved)
        yield (
            f"variables without a value here stay as they are written: {unset}. "
            f"{_advise_variables(command.unresolved[0], script)}"
        )
    if command.parameters:
        yield _describe_arguments(command, script)
    if command.commands:
        yield (
            f"these need execution and stay as they are written: {_show(command.commands)}. "
            f"Give their flags again with a value: megatron-plan {script} --flag VALUE."
        )
    if command.placeholders:
        yield (
            f"placeholders stay as they are written: {_show(command.placeholders)}. Replace them "
            "before you train."
        )
    yield from _describe_unread(command)


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


_DEEPSPEED_CONFIG = "parallel.deepspeed_config"


def write_config(
    path: Path,
    plan: Plan,
    loaded: LoadedConfig,
    source: CommandSource,
    show: Callable[[str], str],
) -> str:
    """Write the values that differ from the defaults to `path`, and return the file's digest.

    A DeepSpeed JSON that the script itself writes becomes a file beside `path`.

    Args:
        path: The new file.
        plan: The plan of the run.
        loaded: The configuration of `plan`, with the origin of each value.
        source: Where the training command was found.
        show: Returns a text with the script's names of its documents.

    Raises:
        ConfigError: A file exists already or cannot be written, or the plan has errors.
    """
    if plan.errors:
        raise ConfigError(f"--write-config {path}: the plan has errors, so nothing is written.")
    values = flatten(loaded.config)
    origin = {dotted: show(text) for dotted, text in loaded.origin.items()}
    files = {path: ""}
    document = values[_DEEPSPEED_CONFIG]
    if source.documents and document and Path(document).is_file():
        beside = path.with_suffix(".deepspeed.json")
        files[beside] = load_text(document, decoding="surrogateescape")
        values[_DEEPSPEED_CONFIG] = str(beside)
    if existing := [file for file in files if file.exists()]:
        raise ConfigError(
            f"--write-config {path}: {existing[0]} exists already. Remove it, or name another file."
        )
    defaults = {field.dotted: field.default for field in all_fields().values()}
    chosen = {dotted for dotted, value in values.items() if value != defaults[dotted]}
    head = _write_head(path, plan, source)
    try:
        for file, text in files.items():
            file.write_text(text, errors="surrogateescape")
        # A value may follow from others if it is not given. Such a default is written too.
        while True:
            path.write_text(head + dump_fields(values, origin, chosen))
            written = load_config(["--config", str(path)])
            read = flatten(written.config)
            differing = {d for d, *_ in find_config_differences(loaded.config, written.config)}
            differing = {dotted for dotted in differing if read[dotted] != values[dotted]}
            if not differing - chosen:
                break
            chosen |= differing
    except OSError as failure:
        raise ConfigError(f"--write-config {path} cannot be written: {failure}.") from None
    if differing:
        raise ConfigError(
            f"--write-config {path}: {', '.join(sorted(differing))} differ from the planned values "
            "when the file is read. Report this as an error of the planner."
        )
    return compute_config_digest(written.config)


def _write_head(path: Path, plan: Plan, source: CommandSource) -> str:
    """Return the comments at the start of the file."""
    origin = "a command line" if source.script is None else source.script.name
    lines = [
        f"# Written by tools/plan.py --write-config from {origin}. It has only the values that",
        "# differ from the defaults. The comment of each value names the flag or file that gave",
        f"# it. Planned for {plan.world_size} processes. Start each with:",
        f"#   pretrain_gpt.py --config {path.name}",
    ]
    command = source.command
    if command is not None:
        missing = [
            *(f"${name}" for name in (*command.unresolved, *command.parameters)),
            *command.placeholders,
            *command.commands,
        ]
        text = " ".join(", ".join(missing).split())
        if missing:
            lines.append(f"# Replace before training: {text}")
    return "\n".join(lines) + "\n"
