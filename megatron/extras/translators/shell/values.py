"""Expands a script's words as bash does, as far as their values follow from assignments.

Invariant: a part whose value is known only at run time stays in the words as it is written. Until
the words are final, a mark stands for such a part. The mark consists of private characters, so it
is never split, and `Values.find_unknown` finds every part of a word that has no value.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from megatron.extras.translators.shell.arithmetic import NotStaticError, evaluate_arithmetic
from megatron.extras.translators.shell.syntax import (
    find_end_of_arithmetic,
    find_end_of_backticks,
    find_end_of_braces,
    find_end_of_quotes,
    find_end_of_substitution,
    split_words,
)

MARK = re.compile("\ue000(\\d+)\ue001")
MARK_CHARACTERS = ("\ue000", "\ue001")
WORDS_LIMIT = 10_000
"""Words that are made of one written word."""
WORD_COST = 64
"""Characters that a word counts for besides its own, because each takes some memory."""
CHARACTERS_LIMIT = 16 * 2**20
"""Characters of all values together that the expansions of a script may make."""
PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]", re.ASCII)
SUBSCRIPT = re.compile(r"\[([^][]*(?:\[[^]]*\])?[^][]*)\]")
BRACES = re.compile(r"\{(-?\d{1,18})\.\.(-?\d{1,18})\}|\{([^{},\s'\"$]*(?:,[^{},\s'\"$]*)+)\}")
# The pattern of ${X/pattern/replacement}, up to a slash that is not escaped or quoted.
REPLACED = re.compile(r"(?:\\.|'[^']*'|\"[^\"]*\"|\$\{[^}]*\}|[^/])*", re.DOTALL)
C_STRING = re.compile(r"((?:[^\\']|\\.)*)'", re.DOTALL)
C_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", re.DOTALL)
C_CHARACTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"e": b"\x1b"}


class LimitExceededError(Exception):
    """A script takes more time or memory to read than is allowed. The message has the limit."""


@dataclass(frozen=True)
class Unknown:
    """A part of a word whose value is not known.

    `kind` is `variable`, `argument` (of the script) or `command`. `name` is the variable's name, or
    the text of a command. `text` is the part as it is written. `is_alone` is true for an unquoted
    variable. If such a variable is a whole word and is unset, bash removes the word. For an
    arithmetic expression, `needs` has the unknown parts in it. Messages name those parts instead of
    the expression.
    """

    kind: str
    name: str
    text: str
    is_alone: bool = False
    needs: "tuple[Unknown, ...]" = ()


@dataclass
class Values:
    """The variables of a script at one point of it.

    The values of `variables` are strings, or lists for arrays. `exported` has the names of the
    variables that a child process inherits. `parameters` are the script's arguments, or None if
    they are not known. `unknown` has the parts that marks stand for. `read` collects the names of
    the variables that were used.
    """

    source: str
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    parameters: list[str] | None = None
    unknown: list[Unknown] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    _made: int = 0
    """Characters that expansions have made so far."""

    def count(self, characters: int) -> None:
        """Count characters before they are made.

        Raises:
            LimitExceededError: They are too many. `x=$x$x` doubles a value.
        """
        self._made += characters
        if self._made > CHARACTERS_LIMIT:
            raise LimitExceededError(f"its values have more than {CHARACTERS_LIMIT:,} characters")

    @classmethod
    def build(
        cls, source: str, environment: Mapping[str, str], parameters: list[str] | None
    ) -> "Values":
        """Return the variables that a script has at its start."""
        return cls(source, dict(environment), set(environment), parameters)

    def get(self, name: str) -> str | None:
        """Return the value of a variable, or the first one of an array. None if it is unset."""
        self.read.add(name)
        value = self.variables.get(name)
        if isinstance(value, list):
            return value[0] if value else None
        return value

    def mark(
        self,
        kind: str,
        name: str,
        text: str,
        *,
        is_alone: bool = False,
        needs: Sequence[Unknown] = (),
    ) -> str:
        """Return the mark that stands for a part whose value is not known. See `Unknown`."""
        self.count(len(text) + len(needs))
        self.unknown.append(Unknown(kind, name, text, is_alone, tuple(needs)))
        return f"\ue000{len(self.unknown) - 1}\ue001"

    def find_unknown(self, text: str) -> list[Unknown]:
        """Return the parts of `text` whose values are not known."""
        found = [self.unknown[int(number)] for number in MARK.findall(text)]
        return [part for unknown in found for part in unknown.needs or (unknown,)]

    def is_dropped(self, word: str) -> bool:
        """Return whether `word` is an unquoted variable without a value, and nothing else."""
        match = MARK.fullmatch(word)
        return match is not None and self.unknown[int(match[1])].is_alone

    def render(self, text: str) -> str:
        """Return `text` with each mark replaced by the part that it stands for, as written."""
        while found := MARK.search(text):
            # The text of one part may have the mark of another part.
            self.count(len(self.unknown[int(found[1])].text))
            text = text[: found.start()] + self.unknown[int(found[1])].text + text[found.end() :]
        return text

    def assign(self, raw: str) -> str:
        """Carry out `NAME=value`, `NAME+=value`, `NAME[i]=value` or `NAME=(...)`; return NAME."""
        match = re.match(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=", raw, re.ASCII)
        assert match is not None
        name, subscript, add = match[1], match[2], bool(match[3])
        text = raw[match.end() :]
        before = self.variables.get(name)
        if text.startswith("(") and subscript is None:
            words = self._split_array(text[1:-1])
            self.variables[name] = [*_as_list(before), *words] if add else words
            return name
        value = self.expand_to_text(text)
        if subscript is not None:
            self._assign_element(name, subscript, value, add)
        elif isinstance(before, list):
            head = before[0] if before and add else ""
            self.variables[name] = [head + value, *before[1:]]
        else:
            self.variables[name] = (before or "") + value if add else value
        return name

    def _assign_element(self, name: str, subscript: str, value: str, add: bool) -> None:
        elements = _as_list(self.variables.get(name))
        index = self.get_index(subscript, len(elements))
        if index is None or index > 100_000:
            return
        elements += [""] * (index + 1 - len(elements))
        elements[index] = (elements[index] if add else "") + value
        self.variables[name] = elements

    def get_index(self, subscript: str, length: int) -> int | None:
        """Return the index of an array's element, or None if it is unknown or not a number."""
        try:
            index = self.evaluate(self.expand_to_text(subscript))
        except NotStaticError:
            return None
        return index + length if index < 0 else index

    def _split_array(self, text: str) -> list[str]:
        """Return the values of an array. `text` has its words as the parser returned them."""
        words: list[str] = []
        for raw in split_words(text, self.source):
            element = re.match(r"\[[^]]*\]=", raw)
            if element:
                words.append(self.expand_to_text(raw[element.end() :]))
            else:
                words += self.expand(raw)
        return words

    def evaluate(self, text: str) -> int:
        """Return the value of an arithmetic expression.

        Raises:
            NotStaticError: It has a part without a value, or is invalid.
        """

        def assign(name: str, value: str) -> None:
            self.variables[name] = value

        return evaluate_arithmetic(text, lambda name: self.get(name) or "", assign)

    def expand(self, raw: str) -> list[str]:
        """Return the words that bash makes of one written word."""
        words: list[str] = []
        # A script may name more than any memory holds.
        for part in islice(_expand_braces(raw), WORDS_LIMIT):
            expansion = _Expansion(self, split=True)
            expansion.add_text(part)
            words += expansion.finish()
        return words

    def expand_to_text(self, raw: str) -> str:
        """Return the value of a written word without splitting, as in an assignment."""
        expansion = _Expansion(self, split=False)
        expansion.add_text(raw)
        return " ".join(expansion.finish())

    def expand_document(self, body: str) -> str:
        """Return the text of a here-document. Quotes are ordinary characters in it."""
        expansion = _Expansion(self, split=False)
        expansion.add_document(body)
        return " ".join(expansion.finish())


def _as_list(value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _expand_braces(raw: str) -> Iterator[str]:
    """Yield the words of a{b,c} and a{1..3}. Quoted braces, and those of ${ }, are not expanded."""
    match = next((m for m in BRACES.finditer(raw) if _is_unquoted(raw, m.start())), None)
    if match is None:
        yield raw
        return
    choices: Iterable[str]
    if match[3] is None:
        first, last = int(match[1]), int(match[2])
        step = 1 if last >= first else -1
        choices = (str(n) for n in range(first, last + step, step))
    else:
        choices = match[3].split(",")
    for choice in choices:
        yield from _expand_braces(raw[: match.start()] + choice + raw[match.end() :])


def _is_unquoted(raw: str, position: int) -> bool:
    before = raw[:position]
    quotes = re.sub(r"\\.", "", before)
    return (
        not before.endswith(("$", "\\"))
        and quotes.count('"') % 2 == 0
        and quotes.count("'") % 2 == 0
        and quotes.count("${") == quotes.count("}")
        and "$(" not in quotes
        and "`" not in quotes
    )


def _decode_escape(match: re.Match[bytes]) -> bytes:
    """Return the bytes of an escape within $'...'."""
    text = match[1]
    if text[:1] == b"x" and len(text) > 1:
        return bytes([int(text[1:], 16)])
    if text[:1].isdigit() and text[:1] < b"8":
        return bytes([int(text, 8) % 256])
    return C_CHARACTERS.get(text, text)


class _Expansion:
    """Expands one written word, from left to right."""

    def __init__(self, values: Values, *, split: bool) -> None:
        self._values = values
        self._split = split
        self._words: list[str] = []
        self._word: str | None = None
        """The word that is being built, or None between two words."""

    def finish(self) -> list[str]:
        """Return the words."""
        if self._word is not None:
            self._values.count(WORD_COST)
            self._words.append(self._word)
            self._word = None
        return self._words

    def _add(self, text: str) -> None:
        """Add text that is not split."""
        self._values.count(len(text))
        self._word = (self._word or "") + text

    def _add_value(self, text: str, quoted: bool) -> None:
        """Add the value of an expansion. Without quotes it is split at the characters of $IFS."""
        if quoted or not self._split:
            self._add(text)
            return
        separators = self._values.variables.get("IFS", " \t\n")
        blanks = "".join(c for c in separators if c in " \t\n")
        pieces = [text]
        if separators:
            pattern = f"[{re.escape(''.join(separators))}]"
            if blanks:
                pattern = f"[{re.escape(blanks)}]*{pattern}[{re.escape(blanks)}]*"
            pieces = re.split(pattern, text)
        for index, piece in enumerate(pieces):
            if index and self._word is not None:
                self.finish()
            if piece:
                self._add(piece)

    def _add_list(self, items: list[str], *, quoted: bool, joined: bool) -> None:
        """Add an array's values. In quotes, each value is one word. With `joined`, all are one."""
        if (joined and quoted) or not self._split:
            separator = self._values.variables.get("IFS", " ")
            self._add("".join(separator[:1]).join(items))
            return
        for index, item in enumerate(items):
            if index:
                self.finish()
            self._add_value(item, quoted)

    def add_document(self, body: str) -> None:
        """Add a here-document's body."""
        self._add_quoted(body, 0, len(body), escapes="$`\\\n")

    def add_text(self, raw: str) -> None:
        """Add a written word."""
        position = 0
        if raw == "~" or raw.startswith("~/"):
            self._add(self._values.get("HOME") or "~")
            position = 1
        while position < len(raw):
            char = raw[position]
            if char == "\\":
                self._add(raw[position + 1 : position + 2])
                position += 2
            elif char == "'":
                end = raw.index("'", position + 1)
                self._add(raw[position + 1 : end])
                position = end + 1
            elif raw.startswith("$'", position):
                position = self._add_c_string(raw, position + 2)
            elif char == '"' or raw.startswith('$"', position):
                start = position + len('$"' if char == "$" else '"')
                end = find_end_of_quotes(raw, start, self._values.source)
                before = len(self._words), self._word
                self._add_quoted(raw, start, end, escapes='$`"\\\n')
                self._keep_empty_word(raw[start:end], before)
                position = end + 1
            elif char in "$`":
                position = self._add_dollar(raw, position, quoted=False)
            elif raw.startswith(("<(", ">("), position):
                end = find_end_of_substitution(raw, position + 2, self._values.source)
                self._add(self._values.mark("command", raw[position:end], raw[position:end]))
                position = end
            else:
                self._add(char)
                position += 1

    def _keep_empty_word(self, inside: str, before: tuple[int, str | None]) -> None:
        """Begin an empty word for "" and for a quoted empty variable, but not for an empty "$@"."""
        unchanged = before == (len(self._words), self._word)
        if unchanged and not re.fullmatch(r"\$@|\$\{@\}|\$\{\w+\[@\]\}", inside):
            self._add("")

    def _add_c_string(self, raw: str, position: int) -> int:
        """Add a string $'...' whose content begins at `position`; return the index after it."""
        found = C_STRING.match(raw, position)
        assert found is not None
        content = C_ESCAPE.sub(_decode_escape, found[1].encode(errors="surrogateescape"))
        self._add(content.decode(errors="surrogateescape"))
        return found.end()

    def _add_quoted(self, raw: str, start: int, end: int, escapes: str) -> None:
        """Add text between double quotes. A backslash is special only before one of `escapes`."""
        position = start
        while position < end:
            char = raw[position]
            if char == "\\" and raw[position + 1 : position + 2] in tuple(escapes):
                if raw[position + 1] != "\n":
                    self._add(raw[position + 1])
                position += 2
            elif char in "$`":
                position = self._add_dollar(raw, position, quoted=True)
            else:
                self._add(char)
                position += 1

    def _add_dollar(self, raw: str, position: int, *, quoted: bool) -> int:
        """Add the expansion that begins at `position`, and return the index after it."""
        values = self._values
        if raw[position] == "`":
            end = find_end_of_backticks(raw, position + 1) + 1
            self._add(values.mark("command", raw[position:end], raw[position:end]))
            return end
        if raw.startswith("$((", position):
            end = find_end_of_arithmetic(raw, position + 3)
            if end >= 0:
                self._add_arithmetic(raw[position : end + 2], quoted)
                return end + 2
        if raw.startswith("$(", position):
            end = find_end_of_substitution(raw, position + 2, values.source)
            self._add(values.mark("command", raw[position:end], raw[position:end]))
            return end
        if raw.startswith("${", position):
            end = find_end_of_braces(raw, position + 2, values.source)
            self._add_parameter(raw[position + 2 : end], raw[position : end + 1], quoted)
            return end + 1
        name = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]", re.ASCII).match(raw, position + 1)
        if name is None:
            self._add("$")
            return position + 1
        self._add_variable(name[0], "", f"${name[0]}", quoted)
        return name.end()

    def _add_arithmetic(self, text: str, quoted: bool) -> None:
        expression = self._values.expand_to_text(f'"{text[3:-2]}"')
        needed = self._values.find_unknown(expression)
        try:
            if needed:
                raise NotStaticError
            self._add_value(str(self._values.evaluate(expression)), quoted)
        except NotStaticError:
            names = re.findall(r"[A-Za-z_]\w*", expression)
            values = (self._values.variables.get(name) for name in names)
            needed += [part for v in values for part in self._values.find_unknown(str(v))]
            mark = self._values.mark("command", text, text, needs=needed)
            self._add(mark)

    def _mark_command(self, text: str) -> str:
        return self._values.mark("command", text, text)

    def _add_parameter(self, inside: str, text: str, quoted: bool) -> None:
        """Add `${inside}`."""
        length = inside.startswith("#") and inside != "#"
        indirect = inside.startswith("!")
        rest = inside[length or indirect :]
        name = PARAMETER.match(rest)
        if name is None:
            self._add(self._mark_command(text))
            return
        subscript = SUBSCRIPT.match(rest, name.end())
        operation = rest[subscript.end() if subscript else name.end() :]
        if indirect:
            target = self._values.get(name[0])
            if target is None or subscript or not re.fullmatch(r"\w+", target):
                self._add(self._values.mark("variable", name[0], text))
                return
            self._add_variable(target, operation, text, quoted)
        elif length:
            self._add_length(name[0], subscript[1] if subscript else "", text)
        elif subscript:
            self._add_element(name[0], subscript[1], operation, text, quoted)
        else:
            self._add_variable(name[0], operation, text, quoted)

    def _add_length(self, name: str, subscript: str, text: str) -> None:
        """Add `${#name}` or `${#name[subscript]}`."""
        elements = _as_list(self._values.variables.get(name))
        self._values.read.add(name)
        if name in ("@", "*") and self._values.parameters is not None:
            self._add(str(len(self._values.parameters)))
            return
        if subscript in ("@", "*"):
            self._add(str(len(elements)))
            return
        index = self._values.get_index(subscript, len(elements)) if subscript else 0
        element = elements[index] if index is not None and 0 <= index < len(elements) else None
        if element is None or self._values.find_unknown(element):
            self._add(self._values.mark("variable", name, text))
        else:
            self._add(str(len(element)))

    def _add_element(
        self, name: str, subscript: str, operation: str, text: str, quoted: bool
    ) -> None:
        """Add `${name[subscript]...}`."""
        value = self._values.variables.get(name)
        self._values.read.add(name)
        elements = _as_list(value)
        if subscript in ("@", "*"):
            if value is None and not operation:
                self._add(self._values.mark("variable", name, text, is_alone=True))
            elif operation.startswith(":") and operation[1:2] not in "-+=?":
                self._add_list(self._slice(elements, operation), quoted=quoted, joined=False)
            elif operation and not (value is None and operation[:1] in ":-+="):
                changed = [self._modify(element, operation, text) for element in elements]
                self._add_list(changed, quoted=quoted, joined=subscript == "*")
            elif operation:
                self._add_variable(name, operation, text, quoted)
            else:
                self._add_list(elements, quoted=quoted, joined=subscript == "*")
            return
        index = self._values.get_index(subscript, len(elements))
        if index is None:
            self._add(self._mark_command(text))
            return
        element = elements[index] if 0 <= index < len(elements) else None
        self._add_operated(name, element, operation, text, quoted)

    def _slice(self, elements: list[str], operation: str) -> list[str]:
        offset, _, length = operation[1:].partition(":")
        try:
            start = self._values.evaluate(self._values.expand_to_text(offset))
            start += len(elements) if start < 0 else 0
            if not length:
                return elements[start:]
            count = self._values.evaluate(self._values.expand_to_text(length))
        except NotStaticError:
            return [self._mark_command("${" + operation + "}")]
        return elements[start : start + count] if count >= 0 else elements[start:count]

    def _add_variable(self, name: str, operation: str, text: str, quoted: bool) -> None:
        """Add a variable or a parameter of the script, with an operation as in ${X:-1}."""
        values = self._values
        if name in ("@", "*"):
            if values.parameters is None:
                self._add(values.mark("argument", name, text, is_alone=True))
            elif operation:
                items = self._slice(["", *values.parameters], operation)
                self._add_list(items, quoted=quoted, joined=name == "*")
            else:
                self._add_list(values.parameters, quoted=quoted, joined=name == "*")
            return
        value = self._get_parameter(name)
        if value is None and not operation and (name.isdigit() or name in "#?$!-"):
            kind = "argument" if name.isdigit() or name == "#" else "command"
            self._add(values.mark(kind, name, text, is_alone=not quoted))
            return
        self._add_operated(name, value, operation, text, quoted)

    def _get_parameter(self, name: str) -> str | None:
        values = self._values
        if name == "0":
            return values.source
        if not name.isdigit() and name != "#":
            return None if name in "?$!-" else values.get(name)
        if values.parameters is None:
            return None
        if name == "#":
            return str(len(values.parameters))
        number = int(name)
        # A script that is called with arguments has only those.
        return values.parameters[number - 1] if number <= len(values.parameters) else ""

    def _add_operated(
        self, name: str, value: str | None, operation: str, text: str, quoted: bool
    ) -> None:
        empty_is_unset = operation.startswith(":") and operation[1:2] in tuple("-=+?")
        own = operation[int(empty_is_unset) :]
        sign = own[:1]
        alternative = own[1:]
        is_set = value is not None and not (empty_is_unset and value == "")
        if sign == "+":
            if is_set:
                self._add_alternative(alternative, quoted)
        elif sign in ("-", "=") and sign and not is_set:
            if sign == "=":
                self._values.variables[name] = self._values.expand_to_text(alternative)
            self._add_alternative(alternative, quoted)
        elif value is None:
            self._add(self._values.mark("variable", name, text, is_alone=not quoted))
        elif sign in ("-", "=", "?") and sign:
            self._add_value(value, quoted)
        else:
            self._add_value(self._modify(value, operation, text), quoted)

    def _add_alternative(self, raw: str, quoted: bool) -> None:
        if quoted:
            self._add(self._values.expand_to_text(f'"{raw}"' if '"' not in raw else raw))
            return
        inner = _Expansion(self._values, split=self._split)
        # Blanks within the braces separate words.
        for index, piece in enumerate(_split_blanks(raw)):
            if index:
                inner.finish()
            inner.add_text(piece)
        self._add_list(inner.finish(), quoted=True, joined=False)

    def _modify(self, value: str, operation: str, text: str) -> str:
        """Return `value` after an operation such as `%.*`, `/a/b`, `:0:3` or `^^`."""
        if not operation:
            return value
        if self._values.find_unknown(value):
            return self._mark_command(text)
        if operation.startswith(":"):
            return "".join(self._slice(list(value), operation))
        if operation[0] in "%#":
            return self._remove_affix(value, operation)
        if operation.startswith("/"):
            return self._replace(value, operation[1:])
        cases = {"^^": value.upper(), ",,": value.lower()}
        cases["^"] = value[:1].upper() + value[1:]
        cases[","] = value[:1].lower() + value[1:]
        return cases.get(operation) or self._mark_command(text)

    def _remove_affix(self, value: str, operation: str) -> str:
        sign = operation[0]
        longest = operation.startswith(sign * 2)
        pattern = self._values.expand_to_text(operation[2 if longest else 1 :])
        lengths = range(len(value) + 1)
        for length in reversed(lengths) if longest else lengths:
            if sign == "#":
                affix = value[:length]
                rest = value[length:]
            else:
                affix = value[len(value) - length :]
                rest = value[: len(value) - length]
            if fnmatch.fnmatchcase(affix, pattern):
                return rest
        return value

    def _replace(self, value: str, operation: str) -> str:
        everywhere = operation.startswith("/")
        found = REPLACED.match(operation, int(everywhere))
        assert found is not None
        replacement = operation[found.end() :].removeprefix("/")
        pattern = self._values.expand_to_text(found[0])
        if not pattern:
            return value
        new = self._values.expand_to_text(replacement)
        anchor = pattern[0] if pattern[0] in "#%" and not everywhere else ""
        expression = re.sub(r"\\[Zz]$", "", fnmatch.translate(pattern[len(anchor) :]))
        expression = {"#": r"\A", "": "", "%": ""}[anchor] + expression
        if anchor == "%":
            expression += r"\Z"

        def replace(_: re.Match[str]) -> str:
            self._values.count(len(new))
            return new

        return re.sub(expression, replace, value, count=0 if everywhere else 1)


def _split_blanks(raw: str) -> list[str]:
    """Split at blanks outside quotes."""
    return re.findall(r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|\$\{[^}]*\}|[^\s])+", raw)
