"""Finds the training command in a Slurm or shell script.

Invariant: no command of the script is executed. A contained shell follows the control flow. The
result has the arguments that the shell would pass to the training script, as far as they follow
from assignments in the script and in the environment.

A value that is known only at run time stays as it is written, and the result names it.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_text
from megatron.extras.interop.translators.shell.needs import (
    Needs,
    describe_argument,
    find_needs,
    mark_placeholders,
)
from megatron.extras.interop.translators.shell.rewrite import (
    SHELLS,
    SourcedFile,
    rewrite_script,
)
from megatron.extras.interop.translators.shell.sandbox import Trace, trace_script
from megatron.extras.interop.translators.shell.syntax import Block, parse_script

MARK = re.compile("\ue000(\\d+)\ue001")
MARK_CHARACTERS = ("\ue000", "\ue001")
CHARACTERS_LIMIT = 16 * 2**20
"""Characters of all unknown parts together."""


class LimitExceededError(Exception):
    """A script takes more time or memory to read than is allowed. The message has the limit."""


@dataclass(frozen=True)
class Unknown:
    """A part of a word whose value is not known.

    `kind` is `variable`, `argument` (of the script), `command` or `placeholder`. `name` is the
    variable's name, or the text of a command. `text` is the part as it is written.
    """

    kind: str
    name: str
    text: str


class Marks:
    """The unknown parts of a script, and the marks that stand for them.

    Invariant: a mark consists of private characters, so bash never splits it. `find_unknown` finds
    every part of a word that has no value.
    """

    def __init__(self) -> None:
        self._unknown: list[Unknown] = []
        self._numbers: dict[Unknown, int] = {}
        self._characters = 0

    def _count(self, characters: int) -> None:
        """Count characters before they are made, because parts can contain other parts."""
        self._characters += characters
        if self._characters > CHARACTERS_LIMIT:
            raise LimitExceededError(f"its values have more than {CHARACTERS_LIMIT:,} characters")

    def mark(self, kind: str, name: str, text: str) -> str:
        """Return the mark that stands for a part whose value is not known. See `Unknown`.

        Equal parts have one mark, so a second reading of a script has the words of the first one.
        """
        part = Unknown(kind, name, text)
        if part not in self._numbers:
            self._count(len(text))
            self._numbers[part] = len(self._unknown)
            self._unknown.append(part)
        return f"\ue000{self._numbers[part]}\ue001"

    def find_unknown(self, text: str) -> list[Unknown]:
        """Return the parts of `text` whose values are not known."""
        return [self._unknown[int(number)] for number in MARK.findall(text)]

    def is_dropped(self, word: str) -> bool:
        """Return whether `word` is an unset variable and nothing else. bash removes such a word."""
        match = MARK.fullmatch(word)
        return match is not None and self._unknown[int(match[1])].kind == "variable"

    def render(self, text: str) -> str:
        """Return `text` with each mark replaced by the part that it stands for, as written."""
        while found := MARK.search(text):
            # The text of one part may have the mark of another part.
            part = self._unknown[int(found[1])].text
            self._count(len(part))
            text = text[: found.start()] + part + text[found.end() :]
        return text


SCRIPT_SUFFIXES = (".slurm", ".sh", ".sbatch", ".bash")
"""Endings of the names of launch scripts."""
# The programs of Megatron, of trainers that derive from it, and of fms-fsdp. `main.py` is the
# program of llm-baselines.
TRAINING_SCRIPT = re.compile(r"(?:^|[/\s])(?:(?:pretrain|finetune|main_training)\w*|main)\.py$")
# A command line within one word, as after bash -c.
TRAINING_SCRIPT_WITHIN = re.compile(
    r"(?:^|[/\s])(?:(?:pretrain|finetune|main_training)\w*|main)\.py(?=[\s\"'])"
)
# The same as an extended regular expression, for the contained shell.
TRAINING_IN_SHELL = r"[/ ](((pretrain|finetune|main_training)[A-Za-z0-9_]*)|src/main)\.py[ \"']"
EXPECTED_COMMAND = (
    "expected a command with pretrain_gpt.py, main_training_llama.py or src/main.py and its "
    "arguments. If another script starts it, plan that one."
)
DEPTH_LIMIT = 20
"""Depth to which command lines within command lines are followed, as in `bash -c`."""
SECONDS_LIMIT = 10.0
"""Time for parsing a script, and time for all shells that follow it."""
SECONDS_BETWEEN_ENDS = 0.5
"""Time after which a reading that goes on in spite of its limit is ended again."""
BYTES_LIMIT = 4 * 2**20
"""Size of a script. The longest published ones have some 10 kB."""
SOURCED_LIMIT = 30
"""Number of files that a script may read with `source`."""
FOLDERS_UP = 2
"""Levels above the script's folder in which a file is still read. It counts as the same project."""
WORKING_FOLDER = re.compile(r"(\$\(pwd\)|`pwd`)/")


@dataclass(frozen=True)
class LaunchScript:
    """The training command of a script.

    `arguments` are those of the training script. `nodes` and `devices_per_node` are the number of
    nodes and of devices that the script asks for, or None if it does not give them.

    The next fields list parts of the arguments whose values are not known. `unresolved` has the
    variables that the script does not set. `commands` has the substitutions whose results are known
    only at run time. `parameters` has the arguments of the script, such as `1` or `@`.
    `placeholders` has the texts such as `<path>` that a user must replace.

    `documents` has the files that the script writes itself, such as a DeepSpeed JSON, by name.

    `tested` has the variables without a value that the control flow depends on. `missing_arguments`
    describes each argument that is missing, in their order. `assumed_files` are the files that the
    script needs in order to go on. `sourced` are the files that were read with the script
    (`source FILE`), and `unread` has the line of each other such command. `loop` is the header of
    the loop whose first pass starts training, or empty.
    """

    arguments: tuple[str, ...]
    nodes: int | None
    devices_per_node: int | None
    unresolved: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    placeholders: tuple[str, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)
    tested: tuple[str, ...] = ()
    missing_arguments: tuple[str, ...] = ()
    assumed_files: tuple[str, ...] = ()
    sourced: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    loop: str = ""

    @property
    def world_size(self) -> int | None:
        """Number of processes, one for each device of each node. None if it is not given."""
        if self.devices_per_node is None:
            return None
        return (self.nodes or 1) * self.devices_per_node


def read_launch_script(
    path: Path, *, parameters: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> LaunchScript:
    """Find the training command by following the control flow of the script at `path`.

    A contained shell carries out assignments and control flow. No command runs, and nothing is
    redirected. Files near the script that it reads with `source` are read with it. Variables and
    arguments that are not given stay as they are written. If the control flow depends on an unset
    variable, it is empty, as in bash.

    Args:
        path: The script.
        parameters: The script's arguments.
        environment: The variables that the script inherits.

    Raises:
        ConfigError: The file cannot be read, the shell cannot be contained, or no training is
            started.
    """
    text = read_text(path)
    inherited = build_environment(text, environment or {})
    follower = _Follower(path)
    if "#SBATCH" in text:
        # A script may submit itself if it is not in a job.
        for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
            inherited.setdefault(name, follower.marks.mark("variable", name, f"${name}"))
    marked = mark_placeholders(text, lambda part: follower.marks.mark("placeholder", part, part))
    needs, trace = follower.trace(marked, inherited, parameters)
    words = follower.find_training(trace)
    if not words and trace.exit_at:
        raise ConfigError(
            f"{trace.exit_at}: the script ends here (exit) before it starts training. "
            "Give the arguments or set the variables that it checks."
        )
    if not words and not trace.is_complete:
        raise ConfigError(
            f"{path}: bash ends this script before it starts training. It checks a variable that "
            "is not set, as in ${NAME:?}, or its values need more than 1 GB. Set the variables."
        )
    if not words:
        raise ConfigError(f"{path} starts no training script: {EXPECTED_COMMAND}")
    with _limit_reading(path):
        found = _add_needs(follower.render(words), needs, text, len(parameters))
        return add_slurm_request(found, text)


class _Follower:
    """Follows a script, and the command lines that it passes to other shells."""

    def __init__(self, path: Path) -> None:
        self.marks = Marks()
        self._path = path
        self._end: float | None = None
        """The time at which all shells must have ended. It is set when the first one starts."""
        self._documents: dict[str, str] = {}
        self._assumed_files: tuple[str, ...] = ()
        self._sourced: dict[str, SourcedFile] = {}
        """The files that were read with the script, by their names in the shell."""
        self._unread: dict[str, str] = {}
        """The commands `source FILE` whose file was not read, by the file's name in the shell."""
        self._loop = ""
        self._weak: tuple[str, ...] = ()
        """The words of a command that starts a main.py, which may be that of another program."""

    def trace(
        self, text: str, environment: Mapping[str, str], parameters: Sequence[str] = ()
    ) -> tuple[Needs, Trace]:
        """Run the control flow of `text` in the contained shell.

        Returns:
            What the text needs from its user, and what it would have done.
        """
        with _limit_reading(self._path):
            block = parse_script(text, str(self._path))
        needs, trace = self._trace_once(block, environment, parameters)
        while self._read_sourced(trace):
            needs, trace = self._trace_once(block, environment, parameters)
        return needs, trace

    def _trace_once(
        self, block: Block, environment: Mapping[str, str], parameters: Sequence[str]
    ) -> tuple[Needs, Trace]:
        """Run the control flow of the commands with the files that are known so far."""
        marks = self.marks
        source = str(self._path)
        files = list(self._sourced.values())
        with _limit_reading(self._path):
            needs = find_needs((*block, *(n for file in files for n in file.block)), environment)
            unset = {
                name: marks.mark("variable", name, f"${name}") for name in sorted(needs.passed)
            }
            rewritten = rewrite_script(
                block,
                source,
                lambda part: marks.mark("command", part, part),
                unset,
                needs.computed,
                files,
            )
        now = time.monotonic()
        self._end = self._end or now + SECONDS_LIMIT
        trace = trace_script(
            rewritten.text,
            source,
            parameters=[*parameters, *_mark_missing_arguments(marks, needs, len(parameters))],
            environment=environment,
            training=TRAINING_IN_SHELL,
            seconds=max(0.01, self._end - now),
        )
        self._documents.update(trace.documents)
        self._assumed_files = self._assumed_files or tuple(rewritten.assumed_files)
        self._loop = self._loop or trace.loop
        return needs, trace

    def _read_sourced(self, trace: Trace) -> bool:
        """Read the files that the shell reports. Return whether there is one that can be read."""
        found = False
        for words, _ in trace.commands:
            # A script of NUL bytes has commands without words.
            if words[:1] != ("source",) or words[2] in self._sourced or words[2] in self._unread:
                continue
            name = self.marks.render(words[2])
            path = None
            if len(self._sourced) < SOURCED_LIMIT:
                path = self._find_sourced(name, bool(self.marks.find_unknown(words[2])))
            block = None
            if path:
                with _limit_reading(self._path):
                    block = _parse_sourced(path, self.marks)
            if path is None or block is None:
                self._unread[words[2]] = self.marks.render(words[1])
            else:
                self._sourced[words[2]] = SourcedFile(words[2], str(path), block)
                found = True
        return found

    def _find_sourced(self, name: str, is_partly_unknown: bool) -> Path | None:
        """Return the file that a command `source NAME` reads, if it lies near the script.

        A folder that is not known may be that of the script.
        """
        folder = self._path.parent
        is_partly_unknown = is_partly_unknown and not WORKING_FOLDER.match(name)
        name = WORKING_FOLDER.sub("", name)
        if is_partly_unknown:
            paths = [folder / Path(name).name]
        else:
            paths = [folder / name, Path(name)]
        # A link may lead out of the project.
        here = Path(os.path.realpath(folder))
        top = [here, *(up for up in here.parents[:FOLDERS_UP] if up != up.parent)][-1]
        near = [path for path in paths if Path(os.path.realpath(path)).is_relative_to(top)]
        # The name may be too long, or a folder may be closed. `Path.is_file` raises an error then.
        return next((path for path in near if os.path.isfile(path)), None)

    def find_training(self, trace: Trace, depth: int = 0) -> tuple[str, ...]:
        """Return the words of the first command that starts training, or none."""
        for words, exported in trace.commands:
            if words[:1] == ("source",):
                continue
            found = self._find_in_command(words, exported, depth)
            if found:
                return found
        return self._weak

    def _find_in_command(
        self, words: tuple[str, ...], exported: str, depth: int
    ) -> tuple[str, ...]:
        text = find_command_text(words)
        script = _find_script(words)
        if text is None and script >= 0:
            is_other = words[script].rpartition("/")[2] == "main.py"
            if not is_other or words[script].endswith("src/main.py"):
                return words
            self._weak = self._weak or words
            return ()
        if text is None:
            text = next((word for word in words if TRAINING_SCRIPT_WITHIN.search(word)), None)
        if text is None or depth >= DEPTH_LIMIT:
            return ()
        # The text may be for another program, such as a remote shell with its own quoting.
        with suppress(ConfigError):
            _, trace = self.trace(f"{exported}\n{text}", {})
            return self.find_training(trace, depth + 1)
        return ()

    def render(self, words: Sequence[str]) -> LaunchScript:
        """Return the training command with its unknown parts as they are written."""
        marks = self.marks
        script = _find_script(words)
        rendered = [marks.render(word) for word in words[: script + 1]]
        used: list[Unknown] = []
        for word in _split_quoted_options(words[script + 1 :]):
            used += marks.find_unknown(word)
            # After a flag, an unset variable stays as it is written. If it were removed, the next
            # flag would be read as the value.
            after_flag = rendered[-1].startswith("--") and "=" not in rendered[-1]
            if not marks.is_dropped(word) or after_flag:
                rendered.append(marks.render(word))

        def names(kind: str) -> tuple[str, ...]:
            return tuple(
                sorted({marks.render(unknown.name) for unknown in used if unknown.kind == kind})
            )

        return replace(
            parse_command(rendered),
            unresolved=names("variable"),
            commands=names("command"),
            parameters=names("argument"),
            placeholders=names("placeholder"),
            documents={marks.render(k): marks.render(v) for k, v in self._documents.items()},
            assumed_files=tuple(map(marks.render, self._assumed_files)),
            sourced=tuple(file.path for file in self._sourced.values()),
            unread=tuple(self._unread.values()),
            loop=marks.render(self._loop),
        )


def _add_needs(found: LaunchScript, needs: Needs, text: str, given: int) -> LaunchScript:
    """Return the training command with what the script `text` needs from its user.

    `given` is the number of its arguments that the user gives.
    """
    missing = {int(name) for name in found.parameters if name.isdecimal()}
    # If one argument is missing, all of them are named, because they are given together.
    if missing:
        missing |= {number for number in needs.arguments if number > given}
    described = tuple(describe_argument(text, number) for number in sorted(missing))
    return replace(found, tested=tuple(sorted(needs.tested)), missing_arguments=described)


def _mark_missing_arguments(marks: Marks, needs: Needs, given: int) -> list[str]:
    """Return the marks of the arguments after the first `given` ones. Optional ones are empty."""
    missing = []
    for number in range(given + 1, max(needs.arguments, default=0) + 1):
        written = f"${number}" if number < 10 else f"${{{number}}}"
        is_needed = number in needs.arguments
        missing.append(marks.mark("argument", str(number), written) if is_needed else "")
    return missing


@contextmanager
def _limit_reading(path: Path) -> Iterator[None]:
    """Limit the time, the memory and the nesting of what reads a script within this context.

    Raises:
        ConfigError: A limit is exceeded.
    """
    is_over = False

    def expire(number: int, frame: object) -> None:
        if not is_over:
            raise LimitExceededError(f"reading it takes more than {SECONDS_LIMIT:g} s")

    # Python drops an exception that is raised while it destroys an object. So the timer repeats.
    # Only the main thread receives signals. One also interrupts a search by a regular expression.
    in_main = threading.current_thread() is threading.main_thread()
    try:
        if in_main:
            before = signal.signal(signal.SIGALRM, expire)
            signal.setitimer(signal.ITIMER_REAL, SECONDS_LIMIT, SECONDS_BETWEEN_ENDS)
        yield
    except RecursionError:
        raise ConfigError(f"{path}: its commands or expansions are nested too deeply.") from None
    except (LimitExceededError, MemoryError) as error:
        raise ConfigError(
            f"{path} cannot be read as a script: {error}. Plan the command line that it starts."
        ) from None
    finally:
        is_over = True
        if in_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _parse_sourced(path: Path, marks: Marks) -> Block | None:
    """Return the commands of a file that a script reads, or None if it cannot be parsed.

    A message about its syntax would quote it, and it may be any file.
    """
    with suppress(ConfigError):
        text = mark_placeholders(
            read_text(path), lambda part: marks.mark("placeholder", part, part)
        )
        return parse_script(text, str(path))
    return None


def read_text(path: Path) -> str:
    """Return the text of the script at `path`.

    Raises:
        ConfigError: It cannot be read, or has characters with a meaning of their own here.
    """
    try:
        text = load_text(path, BYTES_LIMIT)
    except OSError as failure:
        raise ConfigError(f"{path} cannot be read as a script: {failure}.") from None
    for character in MARK_CHARACTERS:
        if character in text:
            raise ConfigError(
                f"{path} has the private character U+{ord(character):X}, which stands for unknown "
                "parts here; remove it."
            )
    return text


def build_environment(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the script `text` inherits, with those that Slurm sets for it.

    Slurm sets them from the request in the script's header.
    """
    nodes, devices = _read_slurm_request(text)
    options = _read_slurm_options(text)
    requested = (
        ("SLURM_NNODES", nodes),
        ("SLURM_JOB_NUM_NODES", nodes),
        ("SLURM_GPUS_ON_NODE", devices),
        ("SLURM_GPUS_PER_NODE", options.get("gpus-per-node")),
        ("SLURM_NTASKS_PER_NODE", options.get("ntasks-per-node")),
        ("SLURM_CPUS_PER_TASK", options.get("cpus-per-task")),
    )
    return {
        **environment,
        **{name: str(value) for name, value in requested if value is not None},
    }


def add_slurm_request(found: LaunchScript, text: str) -> LaunchScript:
    """Return the training command with the nodes and devices that the script's header asks for.

    The header has priority over the launcher's options, which may be variables.
    """
    nodes, devices = _read_slurm_request(text)
    return replace(
        found,
        nodes=nodes or found.nodes,
        devices_per_node=devices or found.devices_per_node,
    )


def parse_command(words: Sequence[str]) -> LaunchScript:
    """Split a command line into launcher, training script and arguments.

    Without a training script, all words are arguments.
    """
    script = _find_script(words)
    launcher = list(words[: max(0, script)])
    return LaunchScript(
        arguments=tuple(words[script + 1 :]),
        nodes=_read_launcher_option(launcher, "nnodes", "num-nodes"),
        devices_per_node=_read_launcher_option(launcher, "nproc-per-node", "num-gpus"),
    )


def _split_quoted_options(words: Sequence[str]) -> Iterator[str]:
    """Yield the words after the training script. A launcher may get all options as one word."""
    for word in words:
        # One option with a value that has spaces is a single word, and stays one.
        if re.match(r"\s*--\w\S*\s.*\s--\w", word, re.DOTALL):
            yield from word.split()
        else:
            yield word


def _find_script(words: Sequence[str]) -> int:
    """Return the index of the training script, or -1.

    The first word that names a training script counts. A word `main.py` counts only if there is no
    other, because it may be another program or an argument.
    """
    found = [i for i, word in enumerate(words) if TRAINING_SCRIPT.search(word)]
    named = [i for i in found if not words[i].endswith("main.py")]
    return (named or found or [-1])[0]


def _read_slurm_options(text: str) -> dict[str, str]:
    """Return the options of the #SBATCH lines, without their hyphens."""
    options: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+([^#\n]*)", text, re.MULTILINE):
        for name, value in re.findall(r"(--[\w-]+|-N)[=\s]\s*(\S+)", line):
            options[name.lstrip("-")] = value
    return options


def _read_slurm_request(text: str) -> tuple[int | None, int | None]:
    """Return (nodes, devices per node) of the #SBATCH lines."""
    options = _read_slurm_options(text)
    nodes = _parse_last_number(options.get("nodes") or options.get("N"))
    devices = _parse_last_number(options.get("gpus-per-node"))
    if devices is None and "gpu" in options.get("gres", ""):
        devices = _parse_last_number(options["gres"])
    tasks = _parse_last_number(options.get("ntasks-per-node"))
    each = _parse_last_number(options.get("gpus-per-task"))
    if devices is None and tasks is not None and each is not None:
        devices = tasks * each
    if devices is None and tasks is not None and tasks > 1:
        # srun with one task for each device.
        devices = tasks
    return nodes, devices


def _parse_last_number(text: str | None) -> int | None:
    """Return 8 for '8', 'gpu:8', 'gpu:a100:8' and '4-8', and None for anything else."""
    match = re.search(r"(?:^|[:-])(\d+)$", text or "")
    if match:
        return int(match[1])
    return None


def _read_launcher_option(words: list[str], *names: str) -> int | None:
    """Return the integer value of a launcher's option, which has one of `names`.

    The option may be spelled with hyphens or underscores, and followed by '=' or a space.
    """
    for i, word in enumerate(words):
        option, _, value = word.replace("_", "-").partition("=")
        if option.removeprefix("--") in names and option.startswith("--"):
            return _parse_last_number(value or " ".join(words[i + 1 : i + 2]))
    return None


def find_command_text(words: Sequence[str]) -> str | None:
    """Return the text that `bash -c TEXT` or `eval TEXT` would run as a command line, or None."""
    for i, word in enumerate(words):
        if word == "eval" and i == 0:
            return " ".join(words[1:])
        if word.rpartition("/")[2] in SHELLS:
            options = [o for o in words[i + 1 :] if re.fullmatch(r"-\w*c", o)]
            if options:
                start = list(words).index(options[0], i) + 1
                return " ".join(words[start : start + 1])
    return None
