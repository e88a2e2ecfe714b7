"""Reader of the training command in a Slurm or shell script. Nothing is executed.

Invariant: the result is what the shell would pass to the training script, as far as it follows from
assignments in the script itself. Understood are VAR=..., export, +=, arrays, "$VAR", ${VAR},
${VAR:-default}, line continuations and bash -c "... $CMD". Branches are not followed. The last
assignment before the command applies. Variables that only the environment sets stay as written, and
are listed as unresolved.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.errors import ConfigError

TRAINING_SCRIPT = re.compile(r"pretrain_\w+\.py$")
ASSIGNMENT = re.compile(r"(?:(?:export|local|readonly|then|else|do)\s+)*([A-Za-z_]\w*)(\+?)=")
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(\[[@*]\])?(?::?[-=]([^}]*))?\})")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
# An unquoted operator ends the words of a command.
OPERATORS = frozenset("|&;<>")
# Scripts print their own command line with these. Such a line starts no training.
SILENT_COMMANDS = ("echo", "printf")


@dataclass(frozen=True)
class LaunchScript:
    """The training command of a script.

    `arguments` are those of the training script. `nodes` and `devices_per_node` are the world that
    the script asks for, or None if it does not name them. `unresolved` are the names of variables
    that the arguments use but the script does not set.
    """

    arguments: tuple[str, ...]
    nodes: int | None
    devices_per_node: int | None
    unresolved: tuple[str, ...]

    @property
    def world_size(self) -> int | None:
        """Number of processes, one for each device of each node. None if it is not given."""
        if self.devices_per_node is None:
            return None
        return (self.nodes or 1) * self.devices_per_node


def read_launch_script(path: Path) -> LaunchScript:
    """Find the training command in the script at `path`.

    Raises:
        ConfigError: The file cannot be read, a quote is not closed, or no pretrain_*.py is started.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(f"{path} cannot be read as a script: {failure}.") from None
    shell = _Shell(str(path))
    nodes, devices = _read_slurm_request(text)
    # Slurm sets these variables from the request, so the script may use them without setting them.
    for name, value in (
        ("SLURM_NNODES", nodes),
        ("SLURM_JOB_NUM_NODES", nodes),
        ("SLURM_GPUS_ON_NODE", devices),
    ):
        if value is not None:
            shell.variables[name] = str(value)
    found = parse_command(shell.find_training_command(text))
    unresolved = tuple(sorted({*found.unresolved, *shell.dropped}))
    # The request to Slurm has priority over the launcher's options, which may be variables.
    return LaunchScript(
        found.arguments, nodes or found.nodes, devices or found.devices_per_node, unresolved
    )


def parse_command(words: Sequence[str]) -> LaunchScript:
    """Split a command line into launcher, training script and arguments.

    Without a training script, all words are arguments.
    """
    script = next((i for i, word in enumerate(words) if TRAINING_SCRIPT.search(word)), -1)
    launcher = list(words[: max(0, script)])
    arguments = tuple(words[script + 1 :])
    unresolved = {
        first or second for word in arguments for first, second, *_ in VARIABLE.findall(word)
    }
    return LaunchScript(
        arguments=arguments,
        nodes=_read_launcher_option(launcher, "nnodes"),
        devices_per_node=_read_launcher_option(launcher, "nproc-per-node"),
        unresolved=tuple(sorted(unresolved)),
    )


def _read_slurm_request(text: str) -> tuple[int | None, int | None]:
    """Return (nodes, devices per node) of the #SBATCH lines."""
    options: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+([^#\n]*)", text, re.MULTILINE):
        for name, value in re.findall(r"(--[\w-]+|-N)[=\s]\s*(\S+)", line):
            options[name.lstrip("-")] = value
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


def _read_launcher_option(words: list[str], name: str) -> int | None:
    """Return the integer value of torchrun's --NAME.

    The name may be spelled with dashes or underscores, and followed by '=' or a space.
    """
    for i, word in enumerate(words):
        option, _, value = word.replace("_", "-").partition("=")
        if option == f"--{name}":
            return _parse_last_number(value or " ".join(words[i + 1 : i + 2]))
    return None


class _StatementSplitter:
    """Splits a script into the commands between newlines, semicolons, && and ||.

    Continuation lines are joined. Comments and here-documents are left out.
    """

    def __init__(self, text: str, source: str) -> None:
        """Create a splitter of `text`. `source` is the script's name in messages."""
        # The shell joins continuation lines before it looks at quotes and operators.
        self._text = text.replace("\\\n", " ")
        self._source = source
        self._position = 0
        self._start = 0
        """Start of the current statement."""
        self._quote = ""
        """The quote character that is open, or nothing."""
        self._depth = 0
        """Number of parentheses that are open."""
        self._heredoc = ""
        """The word that ends the here-document which starts on the next line, or nothing."""

    def split(self) -> Iterator[str]:
        """Yield the statements.

        Raises:
            ConfigError: A quote is not closed.
        """
        while self._position <= len(self._text):
            char = self._get_char()
            if self._quote:
                self._read_quoted(char)
            elif self._is_comment():
                self._remove_comment()
            elif self._text.startswith(("&&", "||"), self._position) and not self._depth:
                yield self._take_statement(length=2)
            elif char == "\n" or (char == ";" and not self._depth):
                # Within parentheses a newline does not end the statement (arrays, subshells).
                if not self._depth or self._is_at_end():
                    yield self._take_statement(length=1)
                else:
                    self._position += 1
                self._skip_heredoc(char)
            else:
                self._read_other(char)

    def _is_at_end(self) -> bool:
        return self._position == len(self._text)

    def _get_char(self) -> str:
        """Return the current character. A newline after the end closes the last statement."""
        if self._is_at_end():
            return "\n"
        return self._text[self._position]

    def _take_statement(self, length: int) -> str:
        """Return the statement before the current position, and pass over its end of `length`."""
        statement = self._text[self._start : self._position].strip()
        self._position += length
        self._start = self._position
        return statement

    def _read_quoted(self, char: str) -> None:
        """Pass over one character within quotes."""
        if char == "\\" and self._quote == '"':
            self._position += 1
        elif char == self._quote:
            self._quote = ""
        elif self._is_at_end():
            raise ConfigError(
                f"{self._source}: a {self._quote} is not closed; the statement begins "
                f"with {self._text[self._start : self._start + 40]!r}."
            )
        self._position += 1

    def _is_comment(self) -> bool:
        """Return whether a comment starts here. Within a word, # is an ordinary character."""
        before = self._text[self._position - 1 : self._position]
        return self._get_char() == "#" and (self._position == 0 or before in " \t\n;(")

    def _remove_comment(self) -> None:
        """Remove the comment, but not the end of its line. The position stays."""
        end = self._text.find("\n", self._position)
        if end < 0:
            end = len(self._text)
        self._text = self._text[: self._position] + self._text[end:]

    def _read_other(self, char: str) -> None:
        """Pass over a character that neither ends a statement nor starts a comment."""
        if char in "'\"":
            self._quote = char
        elif char == "\\":
            # The next character is literal.
            self._position += 1
        elif char == "(":
            self._depth += 1
        elif char == ")":
            self._depth = max(0, self._depth - 1)
        elif char == "<" and (match := HEREDOC.match(self._text, self._position)):
            self._heredoc = match[2]
        self._position += 1

    def _skip_heredoc(self, char: str) -> None:
        """Pass over a here-document, whose start is the newline `char` that was just read."""
        if char != "\n" or not self._heredoc:
            return
        word = re.compile(rf"^\s*{self._heredoc}\s*$", re.MULTILINE)
        # The search starts at the newline itself, because `^` also matches after it.
        end = word.search(self._text, self._position - 1)
        if end:
            self._position = end.end()
        else:
            self._position = len(self._text)
        self._start = self._position
        self._heredoc = ""


@dataclass
class _Shell:
    """The assignments read so far.

    Values are the shell's strings. An array is kept quoted for `shlex.split`. `dropped` has the
    names of unset variables whose words disappear.
    """

    source: str
    variables: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def find_training_command(self, text: str) -> list[str]:
        """Return the words of the first command that starts a training script.

        The launcher is included. If there is no such command, an assignment that contains one is
        used.

        Raises:
            ConfigError: The script starts no training script, or a quote is not closed.
        """
        in_assignment: list[str] = []
        for statement in _StatementSplitter(text, self.source).split():
            rest = statement
            # Several assignments may precede a command on the same line, as in A=1 B=2 command.
            while match := ASSIGNMENT.match(rest):
                value, rest = self._read_assigned_value(rest[match.end() :])
                self.variables[match[1]] = (
                    self.variables.get(match[1], "") + " " if match[2] else ""
                ) + value
                # BigScience's scripts build their command in CMD. It has priority over others.
                if not in_assignment or match[1] == "CMD":
                    in_assignment = _find_training_words([value]) or in_assignment
            words = self._split_words(rest)
            if (
                words
                and words[0] not in SILENT_COMMANDS
                and (command := _find_training_words(words))
            ):
                return command
        if not in_assignment:
            raise ConfigError(
                f"{self.source} starts no training script: expected a command with pretrain_gpt.py "
                "and its arguments."
            )
        return in_assignment

    def _read_assigned_value(self, text: str) -> tuple[str, str]:
        """Return (value, text after it) for the text after 'NAME='."""
        if text.startswith("("):
            inside, _, rest = text[1:].rpartition(")")
            return " ".join(shlex.quote(word) for word in self._split_words(inside)), rest
        end = _find_end_of_word(text)
        return self._remove_quotes(text[:end]), text[end:].lstrip()

    def _split_words(self, text: str) -> list[str]:
        """Split `text` into words as the shell does, up to a pipe, redirection or operator."""
        words: list[str] = []
        while text := text.lstrip():
            if text[0] in OPERATORS or re.match(r"\d+[<>]", text):
                break
            end = _find_end_of_word(text)
            # After a flag, an unset variable stays as written. If it disappeared, the next flag
            # would be read as the value.
            after_flag = bool(words) and words[-1].startswith("--") and "=" not in words[-1]
            words += self._expand_word(text[:end], after_flag)
            text = text[end:]
        return words

    def _expand_word(self, raw: str, after_flag: bool) -> list[str]:
        """Return the words of one raw word after expansion.

        An unquoted variable on its own splits into words. It gives none if it is unset.
        """
        match = VARIABLE.fullmatch(raw.strip('"'))
        name = match and (match[1] or match[2])
        if match and (match[3] or not raw.startswith('"')):
            if name in self.variables or match[4] is not None:
                return self._split(self.variables.get(name or "", match[4] or ""))
            if not after_flag:
                self.dropped.append(name or "")
                return []
        return [self._remove_quotes(raw)]

    def _split(self, value: str) -> list[str]:
        try:
            return shlex.split(value)
        except ValueError:
            # Unbalanced quotes in a value. The shell splits at blanks and leaves the quotes.
            return value.split()

    def _remove_quotes(self, raw: str) -> str:
        """Return a raw word without its quotes and with its variables expanded.

        Variables in single quotes are not expanded.
        """
        parts = re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|[^'\"]+", raw, re.DOTALL)
        return "".join(
            part[1:-1] if part[0] == "'" else self._expand_variables(part.strip('"'))
            for part in parts
        )

    def _expand_variables(self, text: str) -> str:
        def get_value(match: re.Match[str]) -> str:
            if match[0].startswith("\\"):
                # A backslash makes the next character literal, so "\$VAR" is no variable.
                return match[0][1:]
            name = match[1] or match[2]
            default = match[4]
            return self.variables.get(name, match[0] if default is None else default)

        return re.sub(r"\\[\s\S]|" + VARIABLE.pattern, get_value, text)


def _find_end_of_word(text: str) -> int:
    """Return the index of the first blank or operator outside quotes, backticks and $( )."""
    i = 0
    quote = ""
    depth = 0
    while i < len(text):
        char = text[i]
        if char == "\\" and quote != "'":
            i += 1
        elif quote:
            if char == quote:
                quote = ""
        elif char in "'\"`":
            quote = char
        elif char == "(":
            depth += 1
        elif char == ")":
            depth = max(0, depth - 1)
        elif not depth and (char.isspace() or char in OPERATORS):
            return i
        i += 1
    return i


def _find_training_words(words: list[str]) -> list[str]:
    """Return `words` if they start a training script, and an empty list otherwise.

    A word that is itself a command line, as after bash -c, is split and returned.
    """
    for word in words:
        if TRAINING_SCRIPT.search(word):
            return words
        if re.search(r"pretrain_\w+\.py\s", word):
            return _Shell("")._split_words(word)
    return []
