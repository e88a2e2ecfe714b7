"""Words around the texts of messages, which show where a template writes them."""

import collections
import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

from megatron.extras.samples.chat.template import THOUGHTS, Message

Places = dict[int, list[int]]
"""Number of each message -> where its texts begin and end in the rendered text, in order."""
Surround = Callable[[str, str], str]
_END_OF_THOUGHT = "</think>"


def mark(message: Message, word: str, surround: Surround | None) -> Message:
    """Return a message with a word before and after each of its texts.

    Args:
        message: The message.
        word: The beginning of the words. The number of the text follows.
        surround: Puts a word around a content. None leaves the message as it is.
    """
    if surround is None:
        return message
    # The plain rendering uses the message too.
    marked = copy.deepcopy(dict(message))
    words = (f"{word}{number}z" for number in itertools.count())
    thought = next(words)
    marked.update({k: _surround_text(marked[k], thought) for k in THOUGHTS if k in marked})
    content = marked.get("content")
    if marked.get("tool_calls") and not content:
        # A call needs no content, and a template may ask for it.
        surround = _surround_text
    if isinstance(content, str):
        # A template may leave out a thought that is part of the content.
        head, end, answer = content.rpartition(_END_OF_THOUGHT)
        marked["content"] = surround(head + end + _surround_text(answer, next(words))
                                     if end else content, next(words))  # fmt: skip
    for part in content if isinstance(content, list) else ():
        part["text"] = _surround_text(part["text"], next(words))
    _mark_calls(marked, words)
    return marked


def mark_calls(message: Message, word: str) -> Message:
    """Return a message with words around the texts of its calls only."""
    marked = copy.deepcopy(dict(message))
    _mark_calls(marked, (f"{word}{number}z" for number in itertools.count()))
    return marked


def _mark_calls(message: dict[str, Any], words: Any) -> None:
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        for key in {"name", "arguments"} & {*function}:
            function[key] = map_texts(function[key], lambda text: _surround_text(text, next(words)))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with changed texts, at all depths. Keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [map_texts(each, change) for each in value]
    return value


def take_words(text: str, word: str) -> tuple[Places, str]:
    """Return the places of the words of each message, and the text without words."""
    places: Places = {}
    pieces = []
    size = 0
    at = 0
    counts: collections.Counter[str] = collections.Counter()
    for found in re.finditer(f"{word}([0-9]+)p[0-9]+z", text):
        pieces.append(text[at : found.start()])
        size += len(pieces[-1])
        at = found.end()
        counts[found[0]] += 1
        # The result of a tool may name the call again. That is no part of the answer.
        if counts[found[0]] <= 2:
            places.setdefault(int(found[1]), []).append(size)
    return places, "".join([*pieces, text[at:]])


def _surround_all(text: str, word: str) -> str:
    """Put a word before and after a text, which may be empty."""
    return f"{word}{text}{word}"


def _surround_begin(text: str, word: str) -> str:
    """Put a word before a text, and another one before its last white space."""
    inner = text.rstrip()
    return f"{word}{inner}{word}{text[len(inner) :]}"


def _surround_stripped(text: str, word: str) -> str:
    """Put a word before and after a text, inside of its outer white space."""
    inner = text.strip()
    start = text.index(inner)
    return f"{text[:start]}{_surround_all(inner, word)}{text[start + len(inner) :]}"


def _surround_text(text: str, word: str) -> str:
    """Put a word before and after a text, unless it is empty or white space."""
    # Nothing of such a text can be found again.
    if not text.strip():
        return text
    return _surround_stripped(text, word)


WAYS: tuple[Surround, ...] = (_surround_all, _surround_begin, _surround_stripped, _surround_text)
"""Ways to put words around a content. Templates strip texts, and ask whether they are empty."""
