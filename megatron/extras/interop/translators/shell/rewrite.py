"""Reduces a script to its assignments and its control flow.

Every command becomes a call of `__plan_command`, which reports its words. Redirections, pipes,
background processes and subshells are left out. A mark replaces each substitution.

`sandbox.py` needs this to learn which commands the script would run. The safety does not depend on
it: the sandbox also contains a script that was not rewritten.

A file that the script reads with `source` becomes a function, whose name the command calls.
"""

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.shell.syntax import (
    ASSIGNMENT,
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
    Test,
    While,
    find_end_of_arithmetic,
    find_end_of_backticks,
    find_end_of_braces,
    find_end_of_substitution,
    has_command,
    list_blocks,
    parse_script,
    skip_character,
)

# Builtins that only change the shell's own state.
KEPT = frozenset(
    [
        "export",
        "declare",
        "typeset",
        "local",
        "readonly",
        "unset",
        "shift",
        "let",
        "getopts",
        "return",
        "break",
        "continue",
        "test",
        "[",
        ":",
        "true",
        "false",
    ]
)
# These only print, or fill variables from a file, or change the folder or the traps.
WITHOUT_EFFECT = frozenset(["echo", "printf", "read", "mapfile", "readarray", "cd", "trap"])
# Scripts use these to print or copy their own command line. Such a command starts no training.
SILENT_COMMANDS = frozenset(["cat", "sed", "grep", "ls", "cp", "vim", "tee"])
SHELLS = frozenset(["bash", "sh", "zsh"])
# These read a script from a here-document.
SCRIPT_READERS = frozenset([*SHELLS, "sbatch", "srun", "qsub", "ssh"])
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)
FILE_TESTS = frozenset(["-d", "-e", "-f", "-h", "-L", "-r", "-s", "-w", "-x"])
FILE_TEST = re.compile(r"(?:(?<=\s)|^)(!\s+)?(-[defhLrswx])\s+(?=(\S+))")
VARIABLE = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)
LOOP_VARIABLE = "__plan_loop"
SOURCE_COMMANDS = frozenset(["source", "."])
OWN_FILE = re.compile(r"BASH_SOURCE(\[0\])?")
# Parts of a word that names a file by the folder of the script.
PART_OF_PATH = re.compile(
    r"\$\{?(0|BASH_SOURCE(?:\[0\])?|[A-Za-z_]\w*)\}?|([\w./+@:=%-]+)", re.ASCII
)


@dataclass(frozen=True)
class SourcedFile:
    """A file that a script reads with `source`.

    `word` is its name as the shell has it at the command, and `path` is the file that was read.
    """

    word: str
    path: str
    block: Block


@dataclass
class Rewritten:
    """A rewritten script, and the files that it assumes to exist, as they are written."""

    text: str = ""
    assumed_files: list[str] = field(default_factory=list)


def rewrite_script(
    block: Block,
    source: str,
    mark: Callable[[str], str],
    unset: Mapping[str, str] | None = None,
    computed: Collection[str] = (),
    sourced: Sequence[SourcedFile] = (),
) -> Rewritten:
    """Return the script that has only the assignments and the control flow of `block`.

    A file test that guards an `exit` passes, because the shell works in an empty folder.

    Args:
        block: The commands.
        source: The script's name in messages.
        mark: Takes a substitution as it is written, and returns the mark that replaces it.
        unset: The marks of variables, which take the place of their values where these are unset.
        computed: The variables whose values are results of commands. bash cannot compute with them.
        sourced: The files that the script reads. A report names each other one.

    Raises:
        ConfigError: The name of a function or the header of a loop cannot be rewritten.
    """
    rewriter = _Rewriter(source, mark, unset or {}, computed, sourced)
    for each in (block, *(file.block for file in sourced)):
        rewriter.note_functions(each)
    parts = [f"__plan_file={shlex.quote(source)}", rewriter.write_block(block)]
    parts[1:1] = [rewriter.write_sourced(number) for number in range(len(sourced))]
    return Rewritten("\n".join(parts), list(dict.fromkeys(rewriter.assumed_files)))


class _Rewriter:
    def __init__(
        self,
        source: str,
        mark: Callable[[str], str],
        unset: Mapping[str, str],
        computed: Collection[str],
        sourced: Sequence[SourcedFile],
    ) -> None:
        self.assumed_files: list[str] = []
        self._script = source
        self._source = source
        """The file whose commands are written."""
        self._sourced = sourced
        self._folders: dict[str, str | None] = {}
        """The variables with a value that follows from the script's own path. None: several."""
        self._mark = mark
        self._unset = unset
        self._computed = frozenset(computed)
        self._functions: set[str] = set()
        self._exiting_functions: set[str] = set()
        self._loop = ""
        """The header of the loop around the current command."""

    def note_functions(self, block: Block) -> None:
        """Record all functions of the script, because a call may come before the definition."""
        for node in block:
            if isinstance(node, Function):
                if not FUNCTION_NAME.fullmatch(node.name):
                    raise ConfigError(
                        f"{self._source}: calls of the function {node.name!r} cannot be "
                        "followed; rename it."
                    )
                self._functions.add(node.name)
                if self._exits((node.body,)):
                    self._exiting_functions.add(node.name)
            for inner in list_blocks(node):
                self.note_functions(inner)

    # ---- commands ----

    def write_sourced(self, number: int) -> str:
        """Return a function with the commands of a file that the script reads."""
        file = self._sourced[number]
        self._source = file.path
        body = self.write_block(file.block)
        self._source = self._script
        own = f"local __plan_file={shlex.quote(file.path)}"
        return f"__plan_call_:{number}() {{\n{own}\n{body}\n}}"

    def write_block(self, block: Block) -> str:
        """Return the commands of a block, one per line. bash refuses an empty block, so `:`."""
        return "\n".join(self._write(node) for node in block) or ":"

    def _write(self, node: Node) -> str:
        if isinstance(node, Simple):
            return self._write_simple(node)
        if isinstance(node, AndOr):
            node = self._assume_in_list(node)
            rest = (f" {operator} {self._write(part)}" for operator, part in node.rest)
            return self._write(node.first) + "".join(rest)
        if isinstance(node, Pipeline):
            return ("! " if node.negated else "") + self._write_braces(node.commands)
        if isinstance(node, Group):
            return self._write_braces(node.body)
        if isinstance(node, Test):
            return f"[[ {self.rewrite_word(node.text)} ]]"
        if isinstance(node, Arithmetic):
            if has_command(node.text):
                return ":"
            return f"(( {node.text} ))"
        if isinstance(node, Function):
            return f"__plan_call_{node.name}() {self._write_braces((node.body,))}"
        return self._write_compound(node)

    def _write_braces(self, block: Block) -> str:
        return f"{{\n{self.write_block(block)}\n}}"

    def _write_compound(self, node: If | While | For | ArithmeticFor | Case) -> str:
        if isinstance(node, If):
            node = self._assume_in_branches(node)
            keywords = ["if", *["elif"] * (len(node.branches) - 1)]
            parts = [
                f"{keyword} {self.write_block(condition)}\nthen\n{self.write_block(body)}\n"
                for keyword, (condition, body) in zip(keywords, node.branches, strict=True)
            ]
            return f"{''.join(parts)}else\n{self.write_block(node.otherwise)}\nfi"
        if isinstance(node, Case):
            items = (
                f"({' | '.join(map(self.rewrite_word, patterns))})\n"
                f"{self.write_block(body)}\n{end}\n"
                for patterns, body, end in node.items
            )
            return f"case {self.rewrite_word(node.word)} in\n{''.join(items)}esac"
        if isinstance(node, While):
            head = f"{node.keyword} {self.write_block(node.condition)}"
        elif isinstance(node, ArithmeticFor):
            if has_command(node.header):
                raise ConfigError(
                    f"{self._source}: the loop (({node.header})) cannot be followed, because it "
                    "runs a command."
                )
            head = f"for (({node.header}))"
        elif node.words is None:
            head = f"for {node.name}"
        else:
            head = f"for {node.name} in {' '.join(map(self.rewrite_word, node.words))}"
        return self._write_loop(head, node.body)

    def _write_loop(self, head: str, body: Block) -> str:
        """Return a loop that reports its header together with the training command."""
        outer = self._loop
        self._loop = outer or re.sub(r"\s+", " ", head)
        lines = [
            head,
            "do",
            f"{LOOP_VARIABLE}={shlex.quote(self._loop)}",
            self.write_block(body),
            "done",
            f"{LOOP_VARIABLE}={shlex.quote(outer)}",
        ]
        self._loop = outer
        return "\n".join(lines)

    # ---- file tests ----

    def _exits(self, block: Block) -> bool:
        """Return whether a block always ends the script."""
        return any(
            (isinstance(node, Simple) and node.words[:1] == ("exit",))
            or (isinstance(node, Simple) and bool(self._exiting_functions & {*node.words[:1]}))
            or (isinstance(node, Group) and self._exits(node.body))
            for node in block
        )

    def _assume_in_list(self, node: AndOr) -> AndOr:
        """Return `[ -f F ] || exit` with a test that passes, and `[ ! -f F ] && exit` without."""
        for index, (operator, part) in enumerate(node.rest):
            if self._exits((part,)):
                holds = operator == "||"
                rest = [(o, self._assume(n, holds)) for o, n in node.rest[:index]]
                return AndOr(self._assume(node.first, holds), (*rest, *node.rest[index:]))
        names = _list_sourced([part for operator, part in node.rest if operator == "&&"])
        if not names:
            return node
        return replace(node, first=self._assume(node.first, True, names))

    def _assume_in_branches(self, node: If) -> If:
        """Return an `if` whose conditions do not lead to a branch that ends the script."""
        branches = []
        for condition, body in node.branches:
            if self._exits(body):
                condition = tuple(self._assume(part, False) for part in condition)
            elif self._exits(node.otherwise):
                condition = tuple(self._assume(part, True) for part in condition)
            elif names := _list_sourced(body):
                condition = tuple(self._assume(part, True, names) for part in condition)
            branches.append((condition, body))
        return If(tuple(branches), node.otherwise)

    def _assume(self, node: Node, holds: bool, sourced: Collection[str] = ()) -> Node:
        """Return a condition in which files exist, as far as that makes it `holds`.

        If names are given in `sourced`, only these files exist. Their command reports them.
        """
        if isinstance(node, Pipeline) and node.negated:
            parts = tuple(self._assume(n, not holds, sourced) for n in node.commands)
            return Pipeline(parts, negated=True)
        if isinstance(node, AndOr):
            rest = tuple((op, self._assume(part, holds, sourced)) for op, part in node.rest)
            return AndOr(self._assume(node.first, holds, sourced), rest)
        if isinstance(node, Test):
            return Test(
                FILE_TEST.sub(lambda found: self._assume_file(found, holds, sourced), node.text)
            )
        if not isinstance(node, Simple) or node.words[:1] not in (("[",), ("test",)):
            return node
        words = list(node.words)
        for index in range(1, len(words) - 1):
            if words[index] in FILE_TESTS and (words[index - 1] == "!") != holds:
                if sourced and words[index + 1].replace('"', "") not in sourced:
                    continue
                if not sourced:
                    self.assumed_files.append(words[index + 1])
                words[index : index + 2] = ["-n", f"x{words[index + 1]}"]
        return replace(node, words=tuple(words))

    def _assume_file(self, found: re.Match[str], holds: bool, sourced: Collection[str]) -> str:
        """Return a file test within `[[ ]]`, or a test that passes in its place."""
        if bool(found[1]) == holds or (sourced and found[3].replace('"', "") not in sourced):
            return found[0]
        if not sourced:
            self.assumed_files.append(found[3])
        return f"{found[1] or ''}-n x"

    def _write_simple(self, node: Simple) -> str:
        assignments = [self.rewrite_word(raw) for raw in node.assignments]
        words = [self.rewrite_word(raw) for raw in node.words]
        if not words:
            return " ".join(assignments) or ":"
        name = node.words[0]
        if name in self._functions:
            return " ".join([*assignments, f"__plan_call_{name}", *words[1:]])
        document = self._write_document(name, words, node.redirections)
        if document:
            return document
        if name in SOURCE_COMMANDS and len(words) > 1:
            return self._write_source(node, words)
        if name == "exit":
            return f"__plan_exit {shlex.quote(f'{self._source}:{node.line}')}"
        if name == "set" and "--" in words:
            return " ".join(words[:1]) + " " + " ".join(words[words.index("--") :])
        if name in ("set", *WITHOUT_EFFECT) or name.rpartition("/")[2] in SILENT_COMMANDS:
            return ":"
        if name in KEPT and (name != "export" or len(words) > 1):
            # A file that is read becomes a function, where these would set a local variable.
            if self._source != self._script and name in ("declare", "typeset"):
                words.insert(1, "-g")
            return " ".join([*assignments, *words])
        return " ".join([*assignments, "__plan_command", *words])

    def _write_source(self, node: Simple, words: list[str]) -> str:
        """Return the command that reads the file words[1], or reports it if it is not known."""
        line = f"{os.path.basename(self._source)}:{node.line}: {' '.join(node.words)}"
        arguments = " ".join(words[2:]) or '"$@"'
        items = [
            f"{shlex.quote(file.word)}) __plan_call_:{number} {arguments} ;;"
            for number, file in enumerate(self._sourced)
        ]
        report = f"*) __plan_command source {shlex.quote(line)} {words[1]} ;;"
        return "\n".join([f"case {words[1]} in", *items, report, "esac"])

    def _write_document(
        self, name: str, words: list[str], redirections: tuple[Redirection, ...]
    ) -> str:
        """Return the report of a text that the command writes to a file or runs as a script.

        Return an empty string for any other command.
        """
        target = ""
        body: str | None = None
        for redirection in redirections:
            if redirection.operator in (">", ">|", ">>"):
                target = self.rewrite_word(redirection.target)
            elif redirection.operator in ("<<", "<<-") and redirection.is_literal:
                body = shlex.quote(redirection.document)
            elif redirection.operator in ("<<", "<<-"):
                body = f'"{self._rewrite_document(redirection.document)}"'
        if body is not None and name in SCRIPT_READERS:
            return f"__plan_command bash -c {body}"
        if name == "tee" and len(words) > 1:
            target = words[-1]
        elif name == "echo":
            return f"__plan_document {target} {' '.join(words[1:])}" if target else ""
        elif name != "cat":
            return ""
        if not target or body is None:
            return ""
        return f"__plan_document {target} {body}"

    # ---- the script's own path ----

    def _note_folder(self, raw: str) -> None:
        """Record the value of an assignment if it follows from the path of the script."""
        if assignment := ASSIGNMENT.match(raw):
            name = assignment[1]
            value = self._find_path(raw[assignment.end() :])
            # Two different values leave it unknown which of them holds.
            if self._folders.setdefault(name, value) != value:
                self._folders[name] = None

    def _find_path(self, raw: str) -> str | None:
        """Return the value of a word that is made of the path of the script, or None."""
        text = raw.strip()
        if len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1]
        pieces: list[str] = []
        position = 0
        while position < len(text):
            part = PART_OF_PATH.match(text, position)
            piece: str | None = None
            end = position
            if text.startswith("$(", position) and not text.startswith("$((", position):
                end = find_end_of_substitution(text, position + 2, self._source)
                piece = self._find_printed_path(text[position + 2 : end - 1])
            elif part:
                end = part.end()
                piece = part[2] or self._get_own_path(part[1])
            if piece is None:
                return None
            pieces.append(piece)
            position = end
        return "".join(pieces)

    def _get_own_path(self, name: str) -> str | None:
        """Return the path that `$name` is, if it follows from the path of the script."""
        if name == "0":
            return self._script
        if OWN_FILE.fullmatch(name):
            return self._source
        return self._folders.get(name)

    def _find_printed_path(self, text: str) -> str | None:
        """Return what commands such as `dirname "$0"` print about the script's path, or None."""
        (node, *more) = parse_script(text, self._source) or (None,)
        if isinstance(node, AndOr):
            more = [part for _, part in node.rest]
            node = node.first
        commands = [each.words for each in (node, *more) if isinstance(each, Simple)]
        if len(commands) != 1 + len(more) or not commands[0]:
            return None
        name, *arguments = commands[0]
        arguments = [word for word in arguments if not word.startswith("-")]
        if len(arguments) != 1:
            return None
        path = self._find_path(arguments[0])
        if path is None or "$" not in arguments[0]:
            return None
        if name == "cd" and [words[:1] for words in commands[1:]] == [("pwd",)]:
            return os.path.abspath(path)
        if name in ("realpath", "readlink") and not more:
            return os.path.abspath(path)
        if name == "dirname" and not more:
            return os.path.dirname(path) or "."
        return None

    # ---- words ----

    def rewrite_word(self, raw: str) -> str:
        """Return a word with marks in place of its command substitutions."""
        self._note_folder(raw)
        return self._rewrite(raw, quoted=False)

    def _rewrite_document(self, body: str) -> str:
        """Return a here-document's body in the form that it needs between double quotes."""
        pieces: list[str] = []
        position = 0
        while position < len(body):
            end, text = self._rewrite_dollar(body, position, quoted=True)
            if end > position:
                pieces.append(text)
                position = end
            elif body[position] == "\\" and body[position + 1 : position + 2] in tuple("$`\\\n"):
                pieces.append(body[position : position + 2])
                position += 2
            else:
                pieces.append("\\" + body[position] if body[position] in '"\\' else body[position])
                position += 1
        return "".join(pieces)

    def _rewrite(self, raw: str, *, quoted: bool) -> str:
        pieces: list[str] = []
        position = 0
        while position < len(raw):
            end, text = self._rewrite_dollar(raw, position, quoted=quoted)
            if end > position:
                pieces.append(text)
                position = end
                continue
            end = position + 1
            if raw[position] == "\\":
                end = position + 2
            elif raw[position] == "'" and not quoted:
                end = raw.index("'", position + 1) + 1
            elif raw.startswith("$'", position) and not quoted:
                end = _find_end_of_c_string(raw, position + 2)
            elif raw[position] == '"':
                quoted = not quoted
            elif raw.startswith(("<(", ">("), position) and not quoted:
                end = find_end_of_substitution(raw, position + 2, self._source)
                pieces.append(self._mark(raw[position:end]))
                position = end
                continue
            pieces.append(raw[position:end])
            position = end
        return "".join(pieces)

    def _rewrite_dollar(self, raw: str, position: int, *, quoted: bool) -> tuple[int, str]:
        """Return the end and the new text of an expansion. If there is none, return `position`."""
        if raw[position] == "`":
            end = find_end_of_backticks(raw, position + 1)
            return end + 1, self._write_substitution(raw[position : end + 1], quoted=quoted)
        if raw.startswith("$((", position):
            end = find_end_of_arithmetic(raw, position + 3) + 2
            if end > position:
                text = raw[position:end]
                names = NAME.findall(text)
                if has_command(text[3:-2]) or not self._computed.isdisjoint(names):
                    text = self._mark(text)
                return end, text
        if raw.startswith("$(", position):
            end = find_end_of_substitution(raw, position + 2, self._source)
            return end, self._write_substitution(raw[position:end], quoted=quoted)
        if raw.startswith("${", position):
            end = find_end_of_braces(raw, position + 2, self._source)
            written = OWN_FILE.sub("__plan_file", raw[position + 2 : end])
            # `${NAME:?message}` would end the script here, where the variable is set later.
            name = re.sub(r":?\?.*", "", written, flags=re.DOTALL)
            if name in self._unset:
                return end + 1, f"${{{name}-{self._unset[name]}}}"
            return end + 1, f"${{{self._rewrite(written, quoted=quoted)}}}"
        variable = VARIABLE.match(raw, position)
        if variable and variable[1] == "BASH_SOURCE":
            return variable.end(), "${__plan_file}"
        if variable and variable[1] in self._unset:
            return variable.end(), f"${{{variable[1]}-{self._unset[variable[1]]}}}"
        return position, ""

    def _write_substitution(self, raw: str, *, quoted: bool) -> str:
        """Return the path that a substitution prints, or a mark."""
        if raw.startswith("$("):
            inner = raw[2:-1]
        else:
            # Between backquotes, a backquote of an inner substitution has a backslash.
            inner = raw[1:-1].replace("\\`", "`")
        path = self._find_printed_path(inner)
        if path is None:
            return self._mark(raw)
        if quoted:
            return re.sub(r'([\\"$`])', r"\\\1", path)
        return shlex.quote(path)


def _list_sourced(block: Collection[Node]) -> frozenset[str]:
    """Return the files, as they are written without quotes, that commands of a block read."""
    return frozenset(
        node.words[1].replace('"', "")
        for node in block
        if isinstance(node, Simple) and node.words[:1] in (("source",), (".",)) and node.words[1:]
    )


def _find_end_of_c_string(raw: str, position: int) -> int:
    while raw[position] != "'":
        position = skip_character(raw, position)
    return position + 1
