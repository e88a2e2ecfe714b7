"""Evaluates `$(( ))` and `(( ))` as bash does, with the operators and integers of C."""

import re
from collections.abc import Callable

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#\w+|0[xX][0-9a-fA-F]+|\d+)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator>\*\*|<<=?|>>=?|[-+*/%&|^]=|\+\+|--|[<>=!]=|&&|\|\||[-+*/%<>=!~&|^?:(),]))",
    re.ASCII,
)
# Binary operators by precedence, lowest first.
LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
WORD = 2**64

_STEPS = {"++": 1, "--": -1}
"""What an operator adds to its variable."""


class NotStaticError(Exception):
    """An expression whose value is known only at run time, or that bash refuses."""


def evaluate_arithmetic(
    text: str, read: Callable[[str], str], assign: Callable[[str, str], None]
) -> int:
    """Return the value of the expression `text`, a signed number of 64 bits.

    Args:
        text: The expression after expansion of its `$` words.
        read: Returns a variable's value, which may itself be an expression. The value of an unset
            variable is an empty string.
        assign: Sets a variable. `=`, `+=`, `++` and other operators need it.

    Raises:
        NotStaticError: The expression is invalid, or its value is known only at run time.
    """
    try:
        return _Expression(text, read, assign, depth=0).evaluate()
    except RecursionError:
        raise NotStaticError(f"{text[:40]!r} is nested too deeply") from None


class _Expression:
    def __init__(
        self,
        text: str,
        read: Callable[[str], str],
        assign: Callable[[str, str], None],
        depth: int,
    ) -> None:
        if depth > 20:
            raise NotStaticError("a variable refers to itself")
        self._text = text
        self._read = read
        self._assign = assign
        self._depth = depth
        self._tokens = self._split()
        self._position = 0
        self._skipped = 0
        """Above 0 in an operand that is not evaluated, as on the right of a false `&&`."""

    def _split(self) -> list[tuple[str, str]]:
        tokens: list[tuple[str, str]] = []
        position = 0
        end = len(self._text.rstrip())
        while position < end:
            match = TOKEN.match(self._text, position)
            if match is None:
                raise NotStaticError(f"{self._text!r} is no integer expression")
            kind = match.lastgroup or ""
            tokens.append((kind, match[kind]))
            position = match.end()
        return [*tokens, ("end", "")]

    def evaluate(self) -> int:
        if self._tokens[0][0] == "end":
            return 0
        value = self._read_sequence()
        if self._tokens[self._position][0] != "end":
            raise NotStaticError(f"{self._text!r} is no integer expression")
        return value

    def _peek(self) -> str:
        kind, text = self._tokens[self._position]
        return text if kind == "operator" else ""

    def _take(self, *operators: str) -> str:
        """Read the next operator if it is one of `operators`. Otherwise return an empty string."""
        operator = self._peek()
        if operator and operator in operators:
            self._position += 1
            return operator
        return ""

    def _read_sequence(self) -> int:
        value = self._read_assignment()
        while self._take(","):
            value = self._read_assignment()
        return value

    def _read_assignment(self) -> int:
        kind, name = self._tokens[self._position]
        operator = self._tokens[self._position + 1][1] if kind == "name" else ""
        if operator not in ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="):
            return self._read_choice()
        self._position += 2
        value = self._read_assignment()
        if operator != "=":
            value = _apply(operator[:-1], self._get(name), value)
        return self._set(name, value)

    def _get(self, name: str) -> int:
        if self._skipped:
            return 0
        return _Expression(self._read(name), self._read, self._assign, self._depth + 1).evaluate()

    def _set(self, name: str, value: int) -> int:
        if not self._skipped:
            self._assign(name, str(value))
        return value

    def _read_choice(self) -> int:
        condition = self._read_binary(0)
        if not self._take("?"):
            return condition
        first = self._read_operand(self._read_assignment, evaluated=bool(condition))
        if not self._take(":"):
            raise NotStaticError(f"{self._text!r} has '?' without ':'")
        second = self._read_operand(self._read_choice, evaluated=not condition)
        return first if condition else second

    def _read_operand(self, read: Callable[[], int], *, evaluated: bool) -> int:
        self._skipped += not evaluated
        value = read()
        self._skipped -= not evaluated
        return value

    def _read_binary(self, level: int) -> int:
        if level == len(LEVELS):
            return self._read_power()
        value = self._read_binary(level + 1)
        while operator := self._take(*LEVELS[level]):
            needed = {"&&": bool(value), "||": not value}.get(operator, True)
            right = self._read_operand(lambda: self._read_binary(level + 1), evaluated=needed)
            if self._skipped:
                value = 0
            else:
                value = _apply(operator, value, right)
        return value

    def _read_power(self) -> int:
        base = self._read_unary()
        if self._take("**"):
            # The operator is right-associative, and its sign is part of the exponent.
            return _apply("**", base, self._read_power())
        return base

    def _read_unary(self) -> int:
        operator = self._take("+", "-", "!", "~", "++", "--")
        if operator in ("++", "--"):
            name = self._take_name()
            return self._set(name, self._get(name) + _STEPS[operator])
        if operator:
            value = self._read_unary()
            results = {"+": value, "-": -value, "!": int(not value), "~": ~value}
            return results[operator]
        return self._read_primary()

    def _take_name(self) -> str:
        kind, name = self._tokens[self._position]
        if kind != "name":
            raise NotStaticError(f"{self._text!r} needs a variable")
        self._position += 1
        return name

    def _read_primary(self) -> int:
        if self._take("("):
            value = self._read_sequence()
            if not self._take(")"):
                raise NotStaticError(f"{self._text!r} has an open parenthesis")
            return value
        kind, text = self._tokens[self._position]
        if kind == "number":
            self._position += 1
            return _parse_number(text)
        name = self._take_name()
        value = self._get(name)
        if operator := self._take("++", "--"):
            self._set(name, value + _STEPS[operator])
        return value


def _parse_number(text: str) -> int:
    """Return the value of 10, 0x1F, 017 (octal) or 2#101."""
    base, mark, digits = text.partition("#")
    try:
        if mark:
            return int(digits, int(base))
        if text[:2].lower() == "0x":
            return int(text, 16)
        return int(text, 8 if text.startswith("0") else 10)
    except ValueError:
        raise NotStaticError(f"{text} is no integer") from None


def _apply(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%"):
        if right == 0:
            raise NotStaticError("division by 0")
        # Python rounds down, C towards 0.
        quotient = abs(left) // abs(right)
        if (left < 0) != (right < 0):
            quotient = -quotient
        value = quotient if operator == "/" else left - quotient * right
    elif operator == "**":
        if not 0 <= right < 64:
            raise NotStaticError(f"the exponent {right} must be between 0 and 63")
        value = left**right
    elif operator in ("<<", ">>"):
        value = left << (right % 64) if operator == "<<" else left >> (right % 64)
    else:
        value = _combine(operator, left, right)
    return (value + WORD // 2) % WORD - WORD // 2


def _combine(operator: str, left: int, right: int) -> int:
    results: dict[str, int] = {
        "+": left + right,
        "-": left - right,
        "*": left * right,
        "&": left & right,
        "|": left | right,
        "^": left ^ right,
        "&&": int(bool(left and right)),
        "||": int(bool(left or right)),
        "==": int(left == right),
        "!=": int(left != right),
        "<": int(left < right),
        "<=": int(left <= right),
        ">": int(left > right),
        ">=": int(left >= right),
    }
    return results[operator]
