"""What a script needs from its user: variables, arguments, and values in place of placeholders.

Invariant: everything here is read from the text. A variable that the script sets somewhere, or that
has a default, is not needed.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from megatron.extras.interop.translators.shell.syntax import (
    ASSIGNMENT,
    NAME,
    Arithmetic,
    ArithmeticFor,
    Block,
    Case,
    For,
    Function,
    Node,
    Simple,
    Test,
    has_command,
    list_blocks,
)

_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_ARGUMENT = re.compile(r"\$(?:([1-9])|\{([1-9]\d?)\})")
_ALL_ARGUMENTS = re.compile(r"\$\{?[#@*]|\$\{[@*!]")
# `${X:-1}` and the other operations that give a value to an unset variable.
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?[-=+]", re.ASCII)
# `${X:?message}` ends the script if X is not set. It does not depend on the value.
_CHECK = re.compile(r"\$\{([A-Za-z_]\w*):?\?", re.ASCII)
_OPERATION = re.compile(r"\$\{[#!]?([A-Za-z_]\w*)(?!:?\?)[^\w}]", re.ASCII)
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_EMPTY_TEST = re.compile(r"-[nz]\s+\"?\$\{?([A-Za-z_]\w*)", re.ASCII)
# `NAME=<Specify path>` or `--save <path to the folder>`, as in published scripts, where the user
# must write a value. bash itself reads redirections. A token such as <pad> is none.
_PLACEHOLDER = re.compile(
    r"(?:(?<==)|(?<=['\"=])|(?<=\s))<(?=[^<>\n]*(?:\s|path|name|dir|file|your|here|data))"
    r"[A-Za-z](?:[^<>\n|&;]*[^<>\s|&;])?>(?=[\w./:\"'-]|\s|$)",
    re.IGNORECASE,
)


@dataclass
class Needs:
    """The variables and arguments that a script uses and does not set itself.

    `passed` has the variables that only become part of words. The control flow depends on those in
    `tested`. `arguments` has the numbers of the arguments. It is empty if the script counts or
    shifts its arguments. `computed` has the variables that only ever get results of commands.
    """

    passed: set[str] = field(default_factory=set)
    tested: set[str] = field(default_factory=set)
    arguments: set[int] = field(default_factory=set)
    computed: set[str] = field(default_factory=set)


def mark_placeholders(text: str, mark: Callable[[str], str]) -> str:
    """Return a script with marks in place of its placeholders, which `mark` returns."""
    return _PLACEHOLDER.sub(lambda found: mark(found[0]), text)


def find_needs(block: Block, given: Collection[str]) -> Needs:
    """Return what the script with the commands `block` needs besides the variables in `given`."""
    uses = _Uses()
    uses.read(block)
    uses.follow_assignments()
    unset = uses.names - uses.assigned - uses.defaulted - set(given)
    arguments: set[int] = set()
    if not uses.all_arguments:
        arguments = uses.arguments - uses.list_optional_arguments()
    return Needs(unset - uses.decided, unset & uses.decided, arguments, uses.find_computed())


def describe_argument(text: str, argument: int) -> str:
    """Return the variable that gets an argument, and the line of its first use.

    Examples are "NODES ($3, line 4)", and "$3 (line 4)" without a variable.
    """
    written = f"${{{argument}}}"
    use = rf"\$\{{{argument}[:}}]"
    if argument < 10:
        written = f"${argument}"
        use = rf"(?:{use}|\${argument})"
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines()]
    first = next((n for n, line in enumerate(lines, start=1) if re.search(use, line)), 0)
    if assigned := re.search(rf"\b(\w+)=[\"']?{use}", "\n".join(lines)):
        return f"{assigned[1]} ({written}, line {first})"
    return f"{written} (line {first})"


class _Uses:
    """Collects how the commands of a script use names."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.assigned: set[str] = set()
        self.decided: set[str] = set()
        self.defaulted: set[str] = set()
        self.arguments: set[int] = set()
        self.all_arguments = False
        self._sources: list[tuple[str, str]] = []
        """(name, value as written) of each assignment."""

    def read(self, block: Block, *, in_function: bool = False) -> None:
        """Read the commands of a block."""
        for node in block:
            for raw, is_condition in _list_words(node):
                self._read_word(raw, is_condition=is_condition, in_function=in_function)
            if isinstance(node, For):
                self.assigned.add(node.name)
                self.all_arguments |= node.words is None
            for inner in list_blocks(node):
                self.read(inner, in_function=in_function or isinstance(node, Function))

    def _read_word(self, raw: str, *, is_condition: bool, in_function: bool) -> None:
        names = _list_names(raw)
        self.names |= names
        if is_condition:
            self.decided |= names
            self.defaulted |= set(_EMPTY_TEST.findall(raw))
        for text in _ARITHMETIC.findall(raw):
            self.decided |= set(NAME.findall(text))
            self.names |= set(NAME.findall(text))
        self.decided |= set(_OPERATION.findall(raw))
        self.defaulted |= set(_DEFAULT.findall(raw))
        if assignment := ASSIGNMENT.match(raw):
            self.assigned.add(assignment[1])
            self._sources.append((assignment[1], raw[assignment.end() :]))
        if not in_function:
            self.arguments |= {int(a or b) for a, b in _ARGUMENT.findall(raw)}
            self.all_arguments |= bool(_ALL_ARGUMENTS.search(raw)) or raw in ("shift", "getopts")

    def follow_assignments(self) -> None:
        """Add to `decided` the variables whose values other decided variables get."""
        before = -1
        while len(self.decided) != before:
            before = len(self.decided)
            for name, value in self._sources:
                if name in self.decided:
                    self.decided |= _list_names(value)

    def find_computed(self) -> set[str]:
        """Return the variables whose every value is the result of a command, or contains one."""
        values: dict[str, list[str]] = {}
        for name, value in self._sources:
            values.setdefault(name, []).append(value)
        computed: set[str] = set()
        before = -1
        while len(computed) != before:
            before = len(computed)
            computed |= {
                name
                for name, texts in values.items()
                if all(has_command(text) or computed & _list_used(text) for text in texts)
            }
        return computed

    def list_optional_arguments(self) -> set[int]:
        """Return the arguments that become the value of a variable that has a default."""
        return {
            int(a or b)
            for name, value in self._sources
            if name in self.defaulted
            for a, b in _ARGUMENT.findall(value)
        }


def _list_names(raw: str) -> set[str]:
    return {a or b for a, b in _VARIABLE.findall(raw)} | set(_CHECK.findall(raw))


def _list_used(raw: str) -> set[str]:
    """Return the names in a word, with those within `$(( ))`, which need no dollar sign."""
    inside = " ".join(_ARITHMETIC.findall(raw))
    return _list_names(raw) | set(NAME.findall(inside))


def _list_words(node: Node) -> list[tuple[str, bool]]:
    """Return the words of one command, and whether the control flow depends on each of them."""
    if isinstance(node, Simple):
        return [*_list_words_of_command(node), *_list_redirected(node)]
    if isinstance(node, Test):
        return [(node.text, True)]
    if isinstance(node, Case):
        return [(node.word, True)]
    if isinstance(node, For):
        return [(raw, True) for raw in node.words or ()]
    if isinstance(node, Arithmetic | ArithmeticFor):
        text = node.text if isinstance(node, Arithmetic) else node.header
        assigned = re.findall(r"([A-Za-z_]\w*)\s*[-+*/]?=(?!=)", text)
        return [(f"$(({text}))", True), *((f"{name}=", False) for name in assigned)]
    return []


def _list_words_of_command(node: Simple) -> list[tuple[str, bool]]:
    words = [(raw, False) for raw in node.assignments]
    name = next(iter(node.words), "")
    if name in ("[", "test", "let"):
        return [*words, (" ".join(node.words), True)]
    if name in ("read", "mapfile", "readarray", "getopts"):
        # These set the variables that they name.
        words += [(f"{raw}=", False) for raw in node.words if NAME.fullmatch(raw)]
    return [*words, *((raw, False) for raw in node.words)]


def _list_redirected(node: Simple) -> Iterator[tuple[str, bool]]:
    for redirection in node.redirections:
        yield redirection.target, False
        if not redirection.is_literal:
            yield redirection.document, False
