"""Text for people: foreign text made safe to print, URLs, counts, lists, sizes and likely names.

A terminal obeys control characters. An escape sequence, a carriage return or a line break in the
name of a file could hide a line of a log, or forge one.

Invariant: what `redact` returns has no user, password or query of a URL. Any of them may be a
secret.
"""

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

_WORD = re.compile(r"[^\s'\"]+")
# A password may have slashes, as secret keys of S3 do. A port is no password, and S3 has no port.
_USER = re.compile(r"(\w://)(?:[^/]*|[^/:@]+:(?!\d+/).*|(?<=s3://)[^/:@]+:.*)@")


def is_url(path: str) -> bool:
    """Return whether a path is a URL, as in s3://bucket/folder."""
    return "://" in path


def has_secret(url: str) -> bool:
    """Return whether a URL has a user, a password or a query."""
    return redact(url) != url


def find_address_mistake(path: str) -> str | None:
    """Return what is wrong with an address of checkpoints. None for a right one and for a folder.

    The text begins with the address, without secrets.
    """
    shown = redact_address(path)
    if re.match(r"s3:/?(?!/)", path):
        return f"{shown} must be s3://bucket/run, with two slashes"
    if not is_url(path):
        return None
    scheme, _, rest = path.partition("://")
    if "@" in rest or "?" in rest:
        return (
            f"{shown} must have no user, password or query. Credentials come from the environment, "
            "~/.aws or the role of the machine"
        )
    if scheme != "s3":
        return (
            f"{shown} is not on a store with the interface of S3: conditional writes of other "
            "stores are different, and are not supported. Give an address s3://bucket/run, or a "
            "folder"
        )
    if not rest or any(part in ("", ".", "..") for part in rest.rstrip("/").split("/")):
        return f"{shown} must be s3://bucket/run, with the name of a bucket"
    bucket = rest.partition("/")[0]
    # The rule of the client. A name that it refuses is no matter of the network.
    if re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket) is None:
        allowed = "letters, digits, '.', '_' and '-'"
        return f"{shown} has {bucket!r} as bucket, whose name may have {allowed}"
    return None


def redact(text: str) -> str:
    """Return a text in which the users, passwords and queries of all URLs are replaced."""
    return _WORD.sub(lambda word: _redact_word(word[0]), text)


def redact_address(text: str) -> str:
    """As `redact`, for addresses and endpoints of stores, and what the client says about them.

    Nothing before an `@` or after a `?` is shown, also without a scheme. In the path of a data set,
    these may be part of a name.
    """

    def hide(word: re.Match[str]) -> str:
        secret, at, shown = word[0].rpartition("@")
        if at:
            scheme = re.match(r"\w+:/+", secret)
            shown = f"{scheme[0] if scheme else ''}***@{shown}"
        before, mark, query = shown.partition("?")
        return f"{before}{mark}***" if query else shown

    # The client encodes an @ that it takes for part of a path.
    return _WORD.sub(hide, text.replace("%40", "@"))


def _redact_word(word: str) -> str:
    """Redact a text without spaces and quotes."""
    # A search behind the last @ would read all of the rest at each URL there.
    end = word.rfind("@") + 1
    word = _USER.sub(r"\1***@", word[:end]) + word[end:]
    url = re.search(r"\w://", word)
    query = word.find("?", url.end()) + 1 if url else 0
    return f"{word[:query]}***" if 0 < query < len(word) else word


def find_close_names(
    typed: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return the known names that are spelled nearly as a typed one, the nearest first.

    Each word of `typed` must be among the words of the other name, perhaps in another spelling.
    Otherwise, a name for evaluations would lead to one that changes the training.
    """

    def has_each_word(name: str) -> bool:
        words = re.findall(r"[^\W_]+", name)
        return all(difflib.get_close_matches(word, words) for word in typed_words)

    # No name is longer, and the search among thousands of words would take minutes.
    typed = typed[:100]
    typed_words = re.findall(r"[^\W_]+", typed)
    return difflib.get_close_matches(typed, filter(has_each_word, known), most, cutoff)


def format_bytes(size: float) -> str:
    """Return a size with at most two decimals, in units of 1000 as disks and quotas are sold."""
    unit = "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        # 999.5 would be rounded to 1000, which has four digits.
        if size < 999.5:
            break
        size = size / 1000
        unit = larger
    if unit == "bytes" or size >= 99.95:
        decimals = 0
    else:
        decimals = 1 if size >= 9.995 else 2
    return f"{size:,.{decimals}f} {unit}"


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, as in "1 file" and "2 files".

    Args:
        number: How many.
        noun: The word for one.
        plural: The word for several. Default: `noun` with an s.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"


def format_alternatives(options: Sequence[object]) -> str:
    """Format a list of alternatives, as in '1, 2 or 4'."""
    words = [str(option) for option in options]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def format_some(items: Iterable[object], shown: int = 3) -> str:
    """Join the first items and count the others, as in 'a, b, c and 110 more'.

    A message with thousands of file names could not be read.
    """
    words = [str(item) for item in items]
    text = ", ".join(words[:shown])
    if len(words) > shown:
        text += f" and {len(words) - shown:,} more"
    return text


def make_plain(text: object, longest: int | None = None) -> str:
    r"""Return a text on one line, without characters that a terminal obeys.

    White space becomes a space. Every other character that cannot be printed, such as ESC or a mark
    that reverses the direction of the text, is written as an escape: "\x1b".

    Args:
        text: The text, or an object that is printed as text.
        longest: Largest number of characters. The rest is replaced by "...". None: no limit.
    """
    given = str(text)
    if longest is not None and len(given) > longest:
        given = given[:longest] + "..."
    if given.isprintable():
        return given
    return "".join(map(_make_plain_character, given))


def _make_plain_character(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    return character.encode("unicode_escape").decode()


def make_plain_lines(text: object, longest: int | None = None) -> str:
    """Return a text of several lines as `make_plain` does, with its line breaks.

    Use it for messages of this program that contain foreign text.
    """
    given = str(text)
    if longest is not None and len(given) > longest:
        given = given[:longest] + "..."
    return "\n".join(map(make_plain, given.split("\n")))


def print_line(line: object, file: TextIO | None = None) -> None:
    """Print a message as `make_plain_lines` returns it, immediately (default: to stdout)."""
    print(make_plain_lines(line), file=file or sys.stdout, flush=True)


def print_to_stderr(line: object) -> None:
    """Print a message as `print_line` does, to standard error."""
    print_line(line, sys.stderr)
