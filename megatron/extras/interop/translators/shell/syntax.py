"""The syntax tree of a bash script.

The parser follows bash's grammar for commands. Words stay as they are written, because their value
depends on the variables. Nothing is executed.

Invariant: a construct that the parser does not know is an error. It is never ignored.
"""

import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from megatron.base.errors import ConfigError

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=", re.ASCII)
OPERATOR = re.compile(
    r"&>>|&>|&&|&|\|\||\|&|\||;;&|;;|;&|;|<<<|<<-|<<|<&|<>|<|>>|>&|>\||>|\(|\)|\n"
)
REDIRECTIONS = frozenset(["&>>", "&>", "<<<", "<<-", "<<", "<&", "<>", "<", ">>", ">&", ">|", ">"])
SEPARATORS = frozenset([";", "&", "\n"])
CASE_ENDS = frozenset([";;", ";&", ";;&"])
DESCRIPTOR = re.compile(r"(?:\d+|\{[A-Za-z_]\w*\})(?=[<>])", re.ASCII)
END_OF_TEST = re.compile(r"\s\]\](?=[\s;)&|]|$)")
# Characters without a special meaning in any context. A sequence of them is read in one step.
PLAIN = re.compile(r"[\w./:,=+@%-]+", re.ASCII)
# These characters end a word unless they are quoted.
WORD_ENDS = frozenset(" \t\n;&|<>()")


@dataclass
class Redirection:
    """A redirection and its target word.

    For a here-document, `target` is the delimiter as it is written, and `document` is the body.
    """

    operator: str
    target: str
    document: str = ""

    @property
    def is_literal(self) -> bool:
        """Whether the here-document's delimiter is quoted. If so, its body is not expanded."""
        return any(quote in self.target for quote in "'\"\\")


@dataclass(frozen=True)
class Simple:
    """A command: assignments before its name, its words, its redirections and its line."""

    assignments: tuple[str, ...]
    words: tuple[str, ...]
    redirections: tuple[Redirection, ...]
    line: int


@dataclass(frozen=True)
class Pipeline:
    """Commands that are connected by `|`. `negated` is true after `!`."""

    commands: "tuple[Node, ...]"
    negated: bool


@dataclass(frozen=True)
class AndOr:
    """A list of pipelines. `rest` has the operator (`&&` or `||`) before each further pipeline."""

    first: "Node"
    rest: "tuple[tuple[str, Node], ...]"


@dataclass(frozen=True)
class If:
    """The conditions with their bodies, in order, and the body of `else`."""

    branches: "tuple[tuple[Block, Block], ...]"
    otherwise: "Block"


@dataclass(frozen=True)
class While:
    """A loop. `keyword` is `while` or `until`."""

    keyword: str
    condition: "Block"
    body: "Block"


@dataclass(frozen=True)
class For:
    """A loop over words. `words` is None for a loop over the script's arguments."""

    name: str
    words: tuple[str, ...] | None
    body: "Block"


@dataclass(frozen=True)
class ArithmeticFor:
    """The loop `for ((...))`. `header` is the text within the parentheses."""

    header: str
    body: "Block"


@dataclass(frozen=True)
class Case:
    """The word that is compared, and each item's patterns, body and end (`;;`, `;&` or `;;&`)."""

    word: str
    items: "tuple[tuple[tuple[str, ...], Block, str], ...]"


@dataclass(frozen=True)
class Group:
    """Commands in braces, or in parentheses if `subshell`."""

    body: "Block"
    subshell: bool


@dataclass(frozen=True)
class Function:
    """The definition of a function."""

    name: str
    body: "Node"


@dataclass(frozen=True)
class Test:
    """A condition `[[ ... ]]`. `text` is the text between the brackets."""

    text: str


@dataclass(frozen=True)
class Arithmetic:
    """A command `(( ... ))`. `text` is the text between the parentheses."""

    text: str


Node: TypeAlias = (
    Simple
    | Pipeline
    | AndOr
    | If
    | While
    | For
    | ArithmeticFor
    | Case
    | Group
    | Function
    | Test
    | Arithmetic
)
Block: TypeAlias = tuple[Node, ...]


def parse_script(text: str, source: str) -> Block:
    """Return the commands of the script `text`. `source` is its name in messages.

    Raises:
        ConfigError: A quote or a bracket is not closed, or a construct is unknown.
    """
    parser = _Parser(text.replace("\r\n", "\n"), source)
    try:
        block = parser.parse_block(frozenset())
    except RecursionError:
        raise ConfigError(f"{source}: its commands are nested too deeply.") from None
    if not parser.is_at_end():
        parser.fail("is not expected here")
    return block


def list_blocks(node: Node) -> list[Block]:
    """Return the blocks within a command."""
    if isinstance(node, AndOr):
        return [(node.first,), tuple(part for _, part in node.rest)]
    if isinstance(node, Pipeline):
        return [node.commands]
    if isinstance(node, If):
        return [block for branch in node.branches for block in branch] + [node.otherwise]
    if isinstance(node, While):
        return [node.condition, node.body]
    if isinstance(node, For | ArithmeticFor | Group):
        return [node.body]
    if isinstance(node, Function):
        return [(node.body,)]
    if isinstance(node, Case):
        return [body for _, body, _ in node.items]
    return []


def has_command(raw: str) -> bool:
    """Return whether a word or an arithmetic expression has a command substitution."""
    return "`" in raw or "$(" in raw.replace("$((", "")


def find_end_of_substitution(text: str, start: int, source: str) -> int:
    """Return the index after the `)` that closes the `$(` whose content begins at `start`."""
    parser = _Parser(text, source)
    parser.position = start
    parser.parse_block(frozenset(")"))
    parser.expect_operator(")")
    return parser.position


def find_end_of_arithmetic(text: str, start: int) -> int:
    """Return the index of the `))` that closes the `((` whose content begins at `start`.

    Return -1 if it is not arithmetic but a subshell within parentheses, as in `$((a; b) | c)`.
    """
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")" and depth:
            depth -= 1
        elif text[index] == ")":
            return index if text.startswith("))", index) else -1
    return -1


def find_end_of_backticks(raw: str, start: int) -> int:
    """Return the index of the backtick that closes the text at `start`."""
    position = start
    while position < len(raw) and raw[position] != "`":
        position = skip_character(raw, position)
    return position


def skip_character(raw: str, position: int) -> int:
    """Return the position after a character, or after a backslash and the character behind it."""
    return position + (2 if raw[position] == "\\" else 1)


def find_end_of_quotes(raw: str, start: int, source: str) -> int:
    """Return the index of the double quote that closes the text at `start`."""
    return _find_closing(raw, start, '"', source)


def find_end_of_braces(raw: str, start: int, source: str) -> int:
    """Return the index of the `}` that closes the `${` whose content begins at `start`."""
    return _find_closing(raw, start, "}", source)


def _find_closing(raw: str, start: int, closing: str, source: str) -> int:
    position = start
    while position < len(raw) and raw[position] != closing:
        if raw[position] == "\\":
            position += 2
        elif raw[position] == "`":
            position = find_end_of_backticks(raw, position + 1) + 1
        elif raw.startswith("$((", position) and find_end_of_arithmetic(raw, position + 3) >= 0:
            position = find_end_of_arithmetic(raw, position + 3) + 2
        elif raw.startswith("$(", position):
            position = find_end_of_substitution(raw, position + 2, source)
        elif raw.startswith("${", position):
            position = find_end_of_braces(raw, position + 2, source) + 1
        elif raw[position] == '"':
            position = find_end_of_quotes(raw, position + 1, source) + 1
        else:
            position += 1
    if position >= len(raw):
        raise ConfigError(f"{source}: {shlex.quote(raw[:40])} is not closed.")
    return position


class _Parser:
    """Reads one script from its first character to its last."""

    def __init__(self, text: str, source: str) -> None:
        self.position = 0
        self._text = text
        self._source = source
        self._pending: list[Redirection] = []
        """Here-documents whose bodies follow the current line."""
        self._in_double_quotes = False
        self._words: dict[int, tuple[str, int]] = {}
        """Start of a word -> the word and its end. A cache, as a word is read several times."""

    # ---- characters ----

    def is_at_end(self) -> bool:
        """Return whether only blanks and a comment remain before the end of the text."""
        self._skip_blanks()
        return self.position >= len(self._text)

    def fail(self, problem: str) -> NoReturn:
        """Raise the error `problem` about the text at the current position."""
        line = self._get_line(self.position)
        excerpt = self._text[self.position : self.position + 40].split("\n")[0]
        raise ConfigError(
            f"{self._source}:{line}: {excerpt!r} {problem}; `bash -n {self._source}` checks the "
            "script without running it."
        )

    def _get_line(self, position: int) -> int:
        return self._text.count("\n", 0, position) + 1

    def _skip_blanks(self) -> None:
        """Skip blanks, line continuations and a comment. A comment ends with its line."""
        while True:
            if self._text.startswith("\\\n", self.position):
                self.position += 2
            elif self._text[self.position : self.position + 1] in (" ", "\t", "\r"):
                self.position += 1
            elif self._text.startswith("#", self.position):
                # A backslash at the end of a comment does not continue it.
                end = self._text.find("\n", self.position)
                self.position = len(self._text) if end < 0 else end
            else:
                return

    def _skip_newlines(self) -> None:
        while self._peek_operator() == "\n":
            self._take_operator()

    def _peek_operator(self) -> str:
        self._skip_blanks()
        found = OPERATOR.match(self._text, self.position)
        # A process substitution is a word.
        if found is None or self._text.startswith(("<(", ">("), self.position):
            return ""
        return found[0]

    def _take_operator(self) -> str:
        operator = self._peek_operator()
        self.position += len(operator)
        if operator == "\n":
            self._read_documents()
        return operator

    def expect_operator(self, operator: str) -> None:
        """Read `operator`, which must come next."""
        if self._peek_operator() != operator:
            self.fail(f"stands where {operator!r} is expected")
        self._take_operator()

    def _read_documents(self) -> None:
        """Read the bodies of the here-documents that begin on this line."""
        for redirection in self._pending:
            delimiter = re.sub(r"['\"\\]", "", redirection.target)
            lines: list[str] = []
            while self.position < len(self._text):
                end = self._text.find("\n", self.position)
                end = len(self._text) if end < 0 else end
                line = self._text[self.position : end]
                self.position = end + 1
                if redirection.operator == "<<-":
                    line = line.lstrip("\t")
                if line == delimiter:
                    break
                lines.append(line + "\n")
            redirection.document = "".join(lines)
        self._pending = []

    # ---- words ----

    def _peek_word(self) -> str:
        position = self.position
        word = self._take_word()
        self.position = position
        return word

    def _take_word(self) -> str:
        """Read the next word as it is written. Return an empty string before an operator.

        A word that continues on the next line is joined.
        """
        self._skip_blanks()
        start = self.position
        if start not in self._words:
            word = self._read_word()
            self._words[start] = (word, self.position)
        word, self.position = self._words[start]
        return word

    def _read_word(self) -> str:
        start = self.position
        pieces: list[str] = []
        while self.position < len(self._text):
            char = self._text[self.position]
            if self._text.startswith("\\\n", self.position):
                self.position += 2
            elif self._text.startswith(("<(", ">("), self.position) and start == self.position:
                end = find_end_of_substitution(self._text, self.position + 2, self._source)
                pieces.append(self._take_until(end))
            elif char == "(" and ASSIGNMENT.fullmatch("".join(pieces)):
                pieces.append(self._take_array())
            elif char in WORD_ENDS:
                break
            else:
                pieces.append(self._take_piece())
        return "".join(pieces)

    def _take_until(self, end: int) -> str:
        taken = self._text[self.position : end]
        self.position = end
        return taken

    def _take_array(self) -> str:
        """Return an array's values in parentheses, separated by one blank, without comments."""
        self.position += 1
        words: list[str] = []
        self._skip_newlines()
        while word := self._take_word():
            words.append(word)
            self._skip_newlines()
        self.expect_operator(")")
        return f"({' '.join(words)})"

    def _take_piece(self) -> str:
        """Return a quoted string, an expansion or ordinary characters."""
        if plain := PLAIN.match(self._text, self.position):
            return self._take_until(plain.end())
        readers: tuple[tuple[str, Callable[[], str]], ...] = (
            ("\\", lambda: self._take_until(self.position + 2)),
            ("'", lambda: self._take_quoted("'")),
            ("$'", self._take_c_string),
            ('"', self._take_double_quoted),
            ("`", lambda: self._take_quoted("`")),
            ("$((", self._take_arithmetic),
            ("$(", self._take_substitution),
            ("${", self._take_braces),
        )
        for prefix, read in readers:
            if self._text.startswith(prefix, self.position):
                return read()
        return self._take_until(self.position + 1)

    def _take_quoted(self, quote: str) -> str:
        """Return a string in single quotes or backticks."""
        end = self.position + 1
        while end < len(self._text) and self._text[end] != quote:
            end += 2 if quote == "`" and self._text[end] == "\\" else 1
        if end >= len(self._text):
            self._fail_unclosed(quote)
        return self._take_until(end + 1)

    def _fail_unclosed(self, opening: str) -> NoReturn:
        line = self._get_line(self.position)
        excerpt = self._text[self.position : self.position + 40]
        raise ConfigError(
            f"{self._source}:{line}: a {opening} is not closed; it begins with {excerpt!r}."
        )

    def _take_c_string(self) -> str:
        end = self.position + 2
        while end < len(self._text) and self._text[end] != "'":
            end = skip_character(self._text, end)
        if end >= len(self._text):
            self._fail_unclosed("$'")
        return self._take_until(end + 1)

    def _take_double_quoted(self) -> str:
        return self._take_enclosed('"', '"')

    def _take_braces(self) -> str:
        return self._take_enclosed("${", "}")

    def _take_enclosed(self, opening: str, closing: str) -> str:
        """Return the text from `opening` to `closing`, with the expansions within it."""
        start = self.position
        was_in_double_quotes = self._in_double_quotes
        self._in_double_quotes |= opening == '"'
        self.position += len(opening)
        pieces = [opening]
        while not self._text.startswith(closing, self.position):
            if self.position >= len(self._text):
                self.position = start
                self._fail_unclosed(opening)
            if self._text.startswith("\\\n", self.position):
                self.position += 2
            elif self._in_double_quotes and self._text[self.position] == "'":
                # Between double quotes a single quote is an ordinary character.
                pieces.append(self._take_until(self.position + 1))
            else:
                pieces.append(self._take_piece())
        self.position += len(closing)
        self._in_double_quotes = was_in_double_quotes
        return "".join(pieces) + closing

    def _take_arithmetic(self) -> str:
        end = find_end_of_arithmetic(self._text, self.position + 3)
        if end < 0:
            return self._take_substitution()
        return self._take_until(end + 2)

    def _take_substitution(self) -> str:
        end = find_end_of_substitution(self._text, self.position + 2, self._source)
        return self._take_until(end)

    # ---- commands ----

    def parse_block(self, ends: Collection[str]) -> Block:
        """Parse commands up to a word or an operator in `ends`. The end itself is not read."""
        block: list[Node] = []
        while True:
            while self._peek_operator() in SEPARATORS:
                self._take_operator()
            operator = self._peek_operator()
            if operator in ends or self._peek_keyword() in ends or self.is_at_end():
                return tuple(block)
            block.append(self._parse_and_or())

    def _peek_keyword(self) -> str:
        """Return the next word where a reserved word is possible. It is never an empty string."""
        if self._peek_operator():
            return "an operator"
        return self._peek_word() or "the end"

    def _parse_and_or(self) -> Node:
        first = self._parse_pipeline()
        rest: list[tuple[str, Node]] = []
        while (operator := self._peek_operator()) in ("&&", "||"):
            self._take_operator()
            self._skip_newlines()
            rest.append((operator, self._parse_pipeline()))
        if not rest:
            return first
        return AndOr(first, tuple(rest))

    def _parse_pipeline(self) -> Node:
        negated = False
        while self._peek_keyword() in ("!", "time"):
            negated ^= self._take_word() == "!"
        commands = [self._parse_command()]
        while self._peek_operator() in ("|", "|&"):
            self._take_operator()
            self._skip_newlines()
            commands.append(self._parse_command())
        if len(commands) == 1 and not negated:
            return commands[0]
        return Pipeline(tuple(commands), negated)

    def _parse_command(self) -> Node:
        compound = self._parse_compound()
        if compound is None:
            return self._parse_simple()
        while self._parse_redirection() is not None:
            pass
        return compound

    def _parse_compound(self) -> Node | None:
        """Return the compound command that begins here, or None."""
        operator = self._peek_operator()
        if operator == "(":
            if self._text.startswith("((", self.position):
                end = find_end_of_arithmetic(self._text, self.position + 2)
                if end >= 0:
                    text = self._text[self.position + 2 : end]
                    self.position = end + 2
                    return Arithmetic(text)
            self._take_operator()
            body = self.parse_block(frozenset(")"))
            self.expect_operator(")")
            return Group(body, subshell=True)
        parsers: dict[str, Callable[[], Node]] = {
            "if": self._parse_if,
            "while": lambda: self._parse_while("while"),
            "until": lambda: self._parse_while("until"),
            "for": self._parse_for,
            "case": self._parse_case,
            "{": self._parse_braces,
            "function": self._parse_function,
            "[[": self._parse_test,
        }
        word = self._peek_keyword()
        if word in ("coproc", "select"):
            self.fail("is not supported")
        if word not in parsers:
            return None
        self._take_word()
        return parsers[word]()

    def _expect_word(self, word: str) -> None:
        if self._peek_keyword() != word:
            self.fail(f"stands where {word!r} is expected")
        self._take_word()

    def _parse_body(self, opening: str, closing: str) -> Block:
        self._expect_word(opening)
        body = self.parse_block(frozenset([closing]))
        self._expect_word(closing)
        return body

    def _parse_if(self) -> Node:
        branches: list[tuple[Block, Block]] = []
        otherwise: Block = ()
        word = "if"
        while word in ("if", "elif"):
            condition = self.parse_block(frozenset(["then"]))
            self._expect_word("then")
            branches.append((condition, self.parse_block(frozenset(["elif", "else", "fi"]))))
            word = self._take_word()
        if word == "else":
            otherwise = self.parse_block(frozenset(["fi"]))
            word = self._take_word()
        if word != "fi":
            self.fail("stands where 'fi' is expected")
        return If(tuple(branches), otherwise)

    def _parse_while(self, keyword: str) -> Node:
        condition = self.parse_block(frozenset(["do"]))
        return While(keyword, condition, self._parse_body("do", "done"))

    def _parse_for(self) -> Node:
        if self._peek_operator() == "(":
            start = self.position + 2
            end = find_end_of_arithmetic(self._text, start)
            if end < 0:
                self._fail_unclosed("((")
            self.position = end + 2
            self._skip_separators()
            return ArithmeticFor(self._text[start:end], self._parse_loop_body())
        name = self._take_word()
        if not NAME.fullmatch(name):
            self.fail("follows a name that is not a variable name")
        words: tuple[str, ...] | None = None
        self._skip_newlines()
        if self._peek_keyword() == "in":
            self._take_word()
            words = self.take_words()
        self._skip_separators()
        return For(name, words, self._parse_loop_body())

    def _skip_separators(self) -> None:
        while self._peek_operator() in (";", "\n"):
            self._take_operator()

    def _parse_loop_body(self) -> Block:
        if self._peek_keyword() == "{":
            return self._parse_body("{", "}")
        return self._parse_body("do", "done")

    def take_words(self) -> tuple[str, ...]:
        """Return the words before the next operator."""
        words: list[str] = []
        while word := self._take_word():
            words.append(word)
        return tuple(words)

    def _parse_case(self) -> Node:
        word = self._take_word()
        self._skip_newlines()
        self._expect_word("in")
        items: list[tuple[tuple[str, ...], Block, str]] = []
        self._skip_newlines()
        while self._peek_keyword() != "esac":
            items.append(self._parse_case_item())
            self._skip_newlines()
        self._take_word()
        return Case(word, tuple(items))

    def _parse_case_item(self) -> tuple[tuple[str, ...], Block, str]:
        if self._peek_operator() == "(":
            self._take_operator()
        patterns = [self._take_word()]
        while self._peek_operator() == "|":
            self._take_operator()
            patterns.append(self._take_word())
        self.expect_operator(")")
        body = self.parse_block(CASE_ENDS | {"esac"})
        end = ";;"
        if self._peek_operator() in CASE_ENDS:
            end = self._take_operator()
        return tuple(patterns), body, end

    def _parse_braces(self) -> Node:
        body = self.parse_block(frozenset("}"))
        self._expect_word("}")
        return Group(body, subshell=False)

    def _parse_function(self) -> Node:
        name = self._take_word()
        if self._peek_operator() == "(":
            self._take_operator()
            self.expect_operator(")")
        return self._parse_function_body(name)

    def _parse_function_body(self, name: str) -> Node:
        self._skip_newlines()
        body = self._parse_compound()
        if body is None:
            self.fail("stands where a function's body is expected")
        while self._parse_redirection() is not None:
            pass
        return Function(name, body)

    def _parse_test(self) -> Node:
        """Parse the rest of `[[ ... ]]`, where < and > compare and parentheses group."""
        pieces: list[str] = []
        while True:
            if END_OF_TEST.match(self._text, self.position):
                self.position += 3
                return Test("".join(pieces).strip())
            if self.position >= len(self._text):
                self._fail_unclosed("[[")
            if self._text.startswith(("<(", ">("), self.position):
                self.fail("is a process substitution, which is not supported in a condition")
            if self._text.startswith("\\\n", self.position):
                self.position += 2
            else:
                pieces.append(self._take_piece())

    def _parse_simple(self) -> Node:
        self._skip_blanks()
        line = self._get_line(self.position)
        assignments: list[str] = []
        words: list[str] = []
        redirections: list[Redirection] = []
        while True:
            redirection = self._parse_redirection()
            if redirection is not None:
                redirections.append(redirection)
                continue
            word = self._take_word()
            if not word:
                break
            if not words and ASSIGNMENT.match(word):
                assignments.append(word)
            else:
                words.append(word)
            if len(words) == 1 and self._peek_operator() == "(":
                self._take_operator()
                self.expect_operator(")")
                return self._parse_function_body(word)
        if not (assignments or words or redirections):
            self.fail("is not expected here")
        return Simple(tuple(assignments), tuple(words), tuple(redirections), line)

    def _parse_redirection(self) -> Redirection | None:
        """Return the redirection that begins here, or None."""
        self._skip_blanks()
        # A number or {name} immediately before the operator is its file descriptor.
        found = DESCRIPTOR.match(self._text, self.position)
        descriptor = found[0] if found else ""
        start = self.position
        self.position += len(descriptor)
        operator = self._peek_operator()
        if operator not in REDIRECTIONS:
            self.position = start
            return None
        self._take_operator()
        target = self._take_word()
        if not target:
            self.fail(f"stands where the target of {operator!r} is expected")
        redirection = Redirection(operator, target)
        if operator in ("<<", "<<-"):
            self._pending.append(redirection)
        return redirection
