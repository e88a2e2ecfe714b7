"""Finds the training command in a Slurm or shell script.

Invariant: no command of the script is executed. The result has the arguments that the shell would
pass to the training script, as far as they follow from assignments in the script and in the
environment.

`expand_launch_script` follows the control flow in a contained shell. `read_launch_script` reads the
script as text. It reads the commands in order and enters every branch. The last assignment before
the training command applies. A loop is read once, with its first value.

A value that is known only at run time stays as it is written, and the result names it.
"""

import re
import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_text
from megatron.extras.translators.shell.arithmetic import NotStaticError
from megatron.extras.translators.shell.needs import (
    Needs,
    describe_argument,
    find_needs,
    mark_placeholders,
)
from megatron.extras.translators.shell.rewrite import SCRIPT_READERS, SHELLS, rewrite_script
from megatron.extras.translators.shell.sandbox import trace_script
from megatron.extras.translators.shell.syntax import (
    NAME,
    AndOr,
    Arithmetic,
    ArithmeticFor,
    Block,
    Case,
    For,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Redirection,
    Simple,
    While,
    parse_script,
)
from megatron.extras.translators.shell.values import (
    MARK_CHARACTERS,
    LimitExceededError,
    Unknown,
    Values,
)

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
# Scripts use these to print their own command line. Such a command starts no training.
SILENT_COMMANDS = frozenset(["echo", "printf", "cat", "sed", "grep", "ls", "cp", "vim", "tee", "["])
DECLARATIONS = frozenset(["export", "declare", "typeset", "local", "readonly"])
DEPTH_LIMIT = 20
SECONDS_LIMIT = 10.0
"""Time in which a script must be read as text."""
SECONDS_BETWEEN_ENDS = 0.5
"""Time after which a reading that goes on in spite of its limit is ended again."""
BYTES_LIMIT = 4 * 2**20
"""Size of a script. The longest published ones have some 10 kB."""


@dataclass(frozen=True)
class LaunchScript:
    """The training command of a script.

    `arguments` are those of the training script. `nodes` and `devices_per_node` are the number of
    nodes and of devices that the script asks for, or None if it does not give them.

    The next fields list parts of the arguments whose values are not known. `unresolved` has the
    variables that the script does not set. `commands` has the substitutions whose results are known
    only at run time. `parameters` has the arguments of the script, such as `1` or `@`.
    `placeholders` has the texts such as `<path>` that a user must replace.

    `branches` has the variables that the script sets in a branch or a loop. `documents` has the
    files that the script writes itself, such as a DeepSpeed JSON, by name.

    `tested` has the variables without a value that the control flow depends on. `missing_arguments`
    describes each argument that is missing, in their order. `assumed_files` are the
    files that the script needs in order to go on. `loop` is the header of the loop whose first pass
    starts training, or empty.
    """

    arguments: tuple[str, ...]
    nodes: int | None
    devices_per_node: int | None
    unresolved: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    placeholders: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)
    tested: tuple[str, ...] = ()
    missing_arguments: tuple[str, ...] = ()
    assumed_files: tuple[str, ...] = ()
    loop: str = ""

    @property
    def world_size(self) -> int | None:
        """Number of processes, one for each device of each node. None if it is not given."""
        if self.devices_per_node is None:
            return None
        return (self.nodes or 1) * self.devices_per_node


def read_launch_script(
    path: Path,
    *,
    parameters: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LaunchScript:
    """Find the training command in the script at `path`.

    Args:
        path: The script.
        parameters: The script's arguments. If None, `$1` stays as it is written.
        environment: The variables that the script inherits.

    Raises:
        ConfigError: The file cannot be read, a quote is not closed, or no training is started.
    """
    text = read_text(path)
    inherited = build_environment(text, environment or {})
    values = Values.build(str(path), inherited, None if parameters is None else list(parameters))
    reader = _Reader(values)
    with _limit_reading(path):
        marked = mark_placeholders(text, lambda part: values.mark("placeholder", part, part))
        block = parse_script(marked, str(path))
        reader.read(block)
        needs = find_needs(block, inherited)
        found = _add_needs(reader.build(), needs, text, len(parameters or ()))
        return add_slurm_request(found, text)


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


def expand_launch_script(
    path: Path, *, parameters: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> LaunchScript:
    """Find the training command by following the control flow of the script at `path`.

    A contained shell carries out assignments and control flow. No command runs, no file is opened
    and nothing is redirected. Variables and arguments that are not given stay as they are written.
    If the control flow depends on an unset variable, it is empty, as in bash.

    Args:
        path: The script.
        parameters: The script's arguments.
        environment: The variables that the script inherits.

    Raises:
        ConfigError: The file cannot be read, the shell cannot be contained, or no training is
            started.
    """
    text = read_text(path)
    source = str(path)
    inherited = build_environment(text, environment or {})
    marks = Values(source)
    with _limit_reading(path):
        marked = mark_placeholders(text, lambda part: marks.mark("placeholder", part, part))
        block = parse_script(marked, source)
        needs = find_needs(block, inherited)
        unset = {
            name: marks.mark("variable", name, f"${name}", is_alone=True)
            for name in sorted(needs.passed)
        }
        rewritten = rewrite_script(
            block, source, lambda part: marks.mark("command", part, part), unset
        )
    trace = trace_script(
        rewritten.text,
        source,
        parameters=[*parameters, *_mark_missing_arguments(marks, needs, len(parameters))],
        environment=inherited,
        training=TRAINING_IN_SHELL,
    )
    for words, exported in trace.commands:
        with _limit_reading(path):
            reader = _Reader(Values(source, parameters=[], unknown=marks.unknown), trace.documents)
            reader.read(parse_script(exported, source))
            reader.find_training(list(words))
            found = reader.build() if reader.has_found() else None
        if found is not None:
            found = replace(
                _add_needs(found, needs, text, len(parameters)),
                assumed_files=tuple(map(marks.render, rewritten.assumed_files)),
                loop=marks.render(trace.loop),
            )
            return add_slurm_request(found, text)
    if trace.exit_line is not None:
        raise ConfigError(
            f"{path}:{trace.exit_line}: the script ends here (exit) before it starts training. "
            "Give the arguments or set the variables that it checks."
        )
    raise ConfigError(f"{path} starts no training script: {EXPECTED_COMMAND}")


def _mark_missing_arguments(marks: Values, needs: Needs, given: int) -> list[str]:
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


class _Reader:
    """Reads the commands of a script in order and keeps the first one that starts training."""

    def __init__(self, values: Values, documents: Mapping[str, str] | None = None) -> None:
        self._values = values
        self._functions: dict[str, Node] = {}
        self._called: set[str] = set()
        self._command: list[str] = []
        """The words of the training command."""
        self._in_assignment: list[str] = []
        """The words of a training command that is the value of a variable."""
        self._weak: list[str] = []
        """The words of a command that starts a main.py, which may be that of another program."""
        self._branch_depth = 0
        self._call_depth = 0
        self._documents = dict(documents or {})
        self._dependencies: dict[str, set[str]] = {}
        """Variable -> the variables set in branches that its value depends on."""
        self._command_dependencies: set[str] = set()

    def build(self) -> LaunchScript:
        """Return the training command that was found.

        Raises:
            ConfigError: There is none.
        """
        if not self._command:
            # A function may be called in a way that cannot be followed, such as by a name in `$1`.
            for name, body in list(self._functions.items()):
                if name not in self._called and not self._command:
                    self._read_node(body)
        words = self._command or self._weak or self._in_assignment
        if not words:
            raise ConfigError(
                f"{self._values.source} starts no training script: {EXPECTED_COMMAND}"
            )
        return self._render(words)

    def _render(self, words: list[str]) -> LaunchScript:
        values = self._values
        script = _find_script(words)
        rendered = [values.render(word) for word in words[: script + 1]]
        used: list[Unknown] = []
        for word in _split_quoted_options(words[script + 1 :]):
            used += values.find_unknown(word)
            # After a flag, an unset variable stays as it is written. If it were removed, the next
            # flag would be read as the value.
            after_flag = rendered[-1].startswith("--") and "=" not in rendered[-1]
            if not values.is_dropped(word) or after_flag:
                rendered.append(values.render(word))

        def names(kind: str) -> tuple[str, ...]:
            return tuple(sorted({unknown.name for unknown in used if unknown.kind == kind}))

        return replace(
            parse_command(rendered),
            unresolved=names("variable"),
            commands=tuple(sorted({values.render(name) for name in names("command")})),
            parameters=names("argument"),
            placeholders=names("placeholder"),
            branches=tuple(sorted(self._command_dependencies)),
            documents={values.render(k): values.render(v) for k, v in self._documents.items()},
        )

    def read(self, block: Block) -> None:
        """Read commands in order."""
        for node in block:
            if not self._command:
                self._read_node(node)

    def _read_node(self, node: Node) -> None:
        if isinstance(node, Simple):
            self._read_simple(node)
        elif isinstance(node, Function):
            self._functions[node.name] = node.body
        elif isinstance(node, Group):
            self.read(node.body)
        elif isinstance(node, Pipeline):
            self.read(node.commands)
        elif isinstance(node, Arithmetic):
            self._evaluate(node.text)
        else:
            self._read_branches(node)

    def _read_branches(self, node: Node) -> None:
        """Read a command whose parts may run once, several times or never."""
        if isinstance(node, AndOr):
            self._read_node(node.first)
        elif isinstance(node, For):
            self._assign_loop_variable(node)
        elif isinstance(node, ArithmeticFor):
            self._evaluate(node.header.partition(";")[0])
        self._branch_depth += 1
        for block in _iterate_branches(node):
            self.read(block)
        self._branch_depth -= 1

    def _assign_loop_variable(self, node: For) -> None:
        words = [word for raw in node.words or () for word in self._values.expand(raw)]
        if len(words) != 1:
            self._branch_depth += 1
        self._values.read = set()
        self._set(node.name, next(iter(words), ""))
        if len(words) != 1:
            self._branch_depth -= 1

    def _set(self, name: str, value: str) -> None:
        self._values.variables[name] = value
        self._note_assignment(name, keep=False)

    def _note_assignment(self, name: str, *, keep: bool) -> None:
        """Record on which variables that are set in branches the value of `name` depends.

        With `keep`, the assignment extends the value, so the earlier dependencies remain.
        """
        found = set(self._dependencies.get(name, ())) if keep else set()
        for read in self._values.read:
            found |= self._dependencies.get(read, set())
        if self._branch_depth:
            found.add(name)
        self._dependencies[name] = found

    def _evaluate(self, text: str) -> None:
        """Carry out the assignments of an arithmetic command. Its result is not used."""
        before = dict(self._values.variables)
        try:
            self._values.evaluate(self._values.expand_to_text(f'"{text}"'))
        except NotStaticError:
            return
        for name, value in self._values.variables.items():
            if before.get(name) != value:
                self._note_assignment(name, keep=True)

    def _assign(self, raw: str, *, exported: bool) -> None:
        self._values.read = set()
        name = self._values.assign(raw)
        self._note_assignment(name, keep=raw.startswith((f"{name}+=", f"{name}[")))
        if exported:
            self._values.exported.add(name)
        value = self._values.variables[name]
        # BigScience's scripts build their command in CMD. It has priority over other variables.
        if not isinstance(value, str) or not TRAINING_SCRIPT_WITHIN.search(value):
            return
        if not self._in_assignment or name == "CMD":
            self._in_assignment = self._values.expand(f"${name}")
            self._command_dependencies = set(self._dependencies[name])

    def _read_simple(self, node: Simple) -> None:
        for raw in node.assignments:
            self._assign(raw, exported=bool(node.words))
        if node.words and node.words[0] in DECLARATIONS:
            self._declare(node.words)
            return
        self._values.read = set()
        words = [word for raw in node.words for word in self._values.expand(raw)]
        read = set(self._values.read)
        if not words:
            return
        self._note_documents(words, node.redirections)
        if words[0] in self._functions:
            self._call(words)
        elif words[0] == "set":
            self._set_parameters(words)
        elif words[0] == "shift":
            count = int(words[1]) if words[1:] and words[1].isdecimal() else 1
            self._values.parameters = (self._values.parameters or [])[count:] or None
        elif words[0] == "unset":
            for name in words[1:]:
                self._values.variables.pop(name, None)
        elif words[0] in ("read", "mapfile", "readarray"):
            self._mark_names(words)
        else:
            self.find_training(words, node.redirections, read)

    def _declare(self, words: tuple[str, ...]) -> None:
        """Carry out `export`, `declare` and the other commands of DECLARATIONS."""
        exported = words[0] == "export" or "-x" in words
        for raw in words[1:]:
            if "=" in raw and NAME.match(raw):
                self._assign(raw, exported=exported)
            elif exported and NAME.fullmatch(raw):
                self._values.exported.add(raw)

    def _mark_names(self, words: list[str]) -> None:
        """Mark the values of the variables that `read` fills as unknown."""
        for name in words[1:]:
            if NAME.fullmatch(name):
                text = self._values.mark("command", " ".join(words), f"${name}")
                self._values.read = set()
                self._set(name, text)

    def _set_parameters(self, words: list[str]) -> None:
        if "--" in words:
            self._values.parameters = words[words.index("--") + 1 :]

    def _call(self, words: list[str]) -> None:
        """Read the body of a function with its arguments."""
        if self._call_depth >= DEPTH_LIMIT:
            return
        before = self._values.parameters
        self._values.parameters = words[1:]
        self._called.add(words[0])
        self._call_depth += 1
        self._read_node(self._functions[words[0]])
        self._call_depth -= 1
        self._values.parameters = before

    def _note_documents(self, words: list[str], redirections: Sequence[Redirection]) -> None:
        """Record a file that the command writes from a text in the script."""
        name = ""
        text: str | None = None
        for redirection in redirections:
            if redirection.operator in (">", ">|", ">>"):
                name = self._values.expand_to_text(redirection.target)
            elif redirection.operator in ("<<", "<<-"):
                text = self._expand_document(redirection)
        if words[0] == "tee" and len(words) > 1:
            name = words[-1]
        elif words[0] == "echo":
            text = " ".join(words[1:]) + "\n"
        elif words[0] != "cat":
            return
        if name and text is not None:
            self._documents[name] = text

    def _expand_document(self, redirection: Redirection) -> str:
        if redirection.is_literal:
            return redirection.document
        return self._values.expand_document(redirection.document)

    def has_found(self) -> bool:
        """Return whether a command that starts training was read."""
        return bool(self._command or self._weak)

    def find_training(
        self,
        words: list[str],
        redirections: Sequence[Redirection] = (),
        read: Collection[str] = (),
    ) -> None:
        """Keep `words` if they start training, or keep the command in them that does."""
        # A line of a binary file can have no words.
        name = next(iter(words), "").rpartition("/")[2]
        if not name or name in SILENT_COMMANDS:
            return
        for redirection in redirections:
            if redirection.operator in ("<<", "<<-") and name in SCRIPT_READERS:
                self._read_text(self._expand_document(redirection))
        text = find_command_text(words)
        if text is not None:
            self._read_text(text, keep_all=words[0] == "eval")
        elif (script := _find_script(words)) >= 0:
            if words[script].rpartition("/")[2] == "main.py" and not words[script].endswith(
                "src/main.py"
            ):
                self._weak = self._weak or words
            else:
                self._command = words
        else:
            within = next((w for w in words if TRAINING_SCRIPT_WITHIN.search(w)), None)
            if within is not None:
                self._read_text(within)
        if self._command or self._weak == words:
            for variable in read:
                self._command_dependencies |= self._dependencies.get(variable, set())

    def _read_text(self, text: str, *, keep_all: bool = False) -> None:
        """Read a command line that another shell would run with only the exported variables.

        With `keep_all`, as for `eval`, it has all variables.
        """
        if self._call_depth >= DEPTH_LIMIT:
            return
        values = self._values
        before = values.variables
        if not keep_all:
            values.variables = {k: v for k, v in before.items() if k in values.exported}
        self._call_depth += 1
        # The text may be for another program, such as a remote shell with its own quoting.
        with suppress(ConfigError):
            self.read(parse_script(text, values.source))
        self._call_depth -= 1
        if not keep_all:
            values.variables = before


def _iterate_branches(node: Node) -> Iterator[Block]:
    """Yield the parts of a compound command that may not run, or may run several times."""
    if isinstance(node, AndOr):
        yield tuple(part for _, part in node.rest)
    elif isinstance(node, If):
        for condition, body in node.branches:
            yield condition
            yield body
        yield node.otherwise
    elif isinstance(node, While):
        yield node.condition
        yield node.body
    elif isinstance(node, For | ArithmeticFor):
        yield node.body
    elif isinstance(node, Case):
        for _, body, _ in node.items:
            yield body
