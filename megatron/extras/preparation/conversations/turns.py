"""What precedes and follows an answer, seen in a short conversation of the same shape.

A short conversation has the message before the answer and the answer, with other texts. It is
rendered up to the answer, with the beginning of an answer, with the answer at its end, and with
another message after it. What these have in common shows the prompt and the end of the turn. Words
around the texts of messages show where a template writes them.
"""

import collections
import copy
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


Window = tuple[int, int]
Try = Callable[..., tuple[str, Places] | None]
"""Renders messages, and returns the text with its places. None if the template refuses them."""
_QUESTION: Message = {"role": "user", "content": "PROBE"}
_ANSWER: Message = {"role": "assistant", "content": "PROBE"}
_IDS = ("id", "tool_call_id")
_SHORT_ID = 8
"""Ids with fewer characters are kept."""


@dataclass(frozen=True)
class Turn:
    """What surrounds an answer."""

    prompts: tuple[str, ...]
    """Texts that may end where an answer begins, the most certain one first."""
    is_asked: bool
    """Whether the template asks for an answer. Otherwise white space precedes it."""
    last: str | None = None
    """Everything after the last text of the answer, at the end of a conversation."""
    later: str | None = None
    """Everything between the last text of the answer and that of the next message."""


def replace_ids(turn: Turn, ids: Mapping[str, str]) -> Turn:
    """Return what surrounds an answer with the ids of its conversation."""

    def put(text: str | None) -> str | None:
        for real, short in ids.items():
            text = text and text.replace(short, real)
        return text

    prompts = tuple(map(str, map(put, turn.prompts)))
    return replace(turn, prompts=prompts, last=put(turn.last), later=put(turn.later))


def make_short(
    messages: Sequence[Message], number: int, *, keep_numbers: bool
) -> tuple[list[Message], dict[str, str]]:
    """Return a short conversation that ends with an answer and has its shape, and its ids.

    The ids are those of calls, each with the one that replaces it.

    Args:
        messages: The conversation.
        number: The number of the answer.
        keep_numbers: Whether the answer has its own numbers. Most ends do not depend on them.
    """
    first = number - 1
    # A result of a tool needs its call.
    while first > 0 and messages[first]["role"] == "tool":
        first -= 1
    context = [*messages[max(0, first) : number]]
    if not context or context[0]["role"] != "user":
        context = [_QUESTION, *(each for each in context if each["role"] != "system")]
    ids: dict[str, str] = {}
    short = [_shorten(each, ids, keep_numbers=False) for each in context]
    return [*short, _shorten(messages[number], ids, keep_numbers=keep_numbers)], ids


def _shorten(value: Any, ids: dict[str, str], key: str = "", *, keep_numbers: bool) -> Any:
    """Return a value with other texts. What a template may test stays the same."""
    if isinstance(value, dict):
        return {k: _shorten(each, ids, k, keep_numbers=keep_numbers) for k, each in value.items()}
    if isinstance(value, list):
        return [_shorten(each, ids, key, keep_numbers=keep_numbers) for each in value]
    if type(value) in (int, float) and not keep_numbers:
        return type(value)(7)
    if not isinstance(value, str) or key in ("role", "type"):
        return value
    if key in _IDS:
        # Some templates ask for a length. A short id may be a part of other texts.
        if len(value) < _SHORT_ID:
            return ids.setdefault(value, value)
        return ids.setdefault(value, f"Q{len(ids)}Z".ljust(len(value), "7"))
    if "</think>" in value:
        return "<think>\nPROBE\n</think>\n\nPROBE"
    # An empty value stays empty, because a template may test it.
    if not value.strip():
        return ""
    return "PROBE"


def see_turn(render: Try, special: re.Pattern[str], short: Sequence[Message], tools: Any) -> Turn:
    """Return what surrounds the last message of a short conversation.

    Args:
        render: Renders messages.
        special: Matches special tokens.
        short: The conversation.
        tools: Descriptions of functions.
    """
    context, answer = short[:-1], short[-1]
    at = len(context)

    def cut(
        messages: Sequence[Message], begin: int, end: int | None, *, prompt: bool = False
    ) -> str | None:
        """Return the text from the end of a message to the beginning of another one."""
        found = render(messages, tools, prompt=prompt)
        # A template may leave out the message at which the text should end.
        if found is None or end not in (None, *found[1]):
            return None
        text, places = found
        stop = len(text)
        if end is not None:
            stop = min(places[end])
        start: int | None = None
        if begin in places:
            start = max(places[begin])
        if start is None and begin == at:
            # Nothing of an empty answer can be found, so it begins where its prompt ends.
            start = find_start(text, prompts, (max(places.get(at - 1, [0])), stop), ())
        if start is None:
            return None
        return text[start:stop]

    # With and without the text that asks for an answer.
    asked = cut(context, at - 1, None, prompt=True)
    alone = cut(context, at - 1, None)
    # A plain answer at the end of a conversation, and one before another question.
    plain = [cut([*context, _ANSWER, *after], at - 1, at) for after in ([], [_QUESTION])]
    prompts = _find_prompts(special, asked, alone, [gap for gap in plain if gap is not None])
    # Some templates refuse a question after a call.
    follower = _QUESTION
    if answer.get("tool_calls"):
        follower = {"role": "tool", "content": "PROBE"}
    last = cut(short, at, None)
    later = cut([*short, follower], at, at + 1)
    return replace(prompts, last=last, later=later)


def _find_prompts(
    special: re.Pattern[str], asked: str | None, alone: str | None, gaps: Sequence[str]
) -> Turn:
    """Return what precedes an answer.

    Args:
        special: Matches special tokens.
        asked: What follows a message if an answer is asked for.
        alone: What follows it otherwise.
        gaps: What is between a message and a plain answer.
    """
    if asked is None or alone is None or asked == alone:
        # What precedes a plain answer is not generated, and what precedes a call may be.
        return Turn((*gaps, *filter(None, [asked])), False)
    # The end of the message before is no part of the prompt that is looked for.
    begin = measure_common(special, asked, alone)
    # Each answer has at least the role's header of its prompt.
    size = min((measure_same(asked, gap) for gap in gaps), default=0)
    if size < len(asked) and all(size < len(gap) for gap in gaps):
        # The header ends at a line break, or at a special token if it has one line.
        line = asked.rfind("\n", begin, size) + 1
        size = line or max([0, *(each.end() for each in special.finditer(asked, begin, size))])
    header = asked[begin : max(begin, size)]
    return Turn(tuple(filter(None, (asked[begin:], header))), True)


def find_start(text: str, turn: Turn, window: Window, found: Sequence[int]) -> int | None:
    """Return where an answer begins, or None if the text does not show it.

    Args:
        text: The conversation.
        turn: What surrounds the answer.
        window: From the end of the message before to the beginning of the next one.
        found: Where texts of the answer begin and end.
    """
    begin, end = window
    first = min(found, default=end)
    # The message before may imitate a prompt, so the search begins at its end.
    for prompt in turn.prompts:
        at = text.find(prompt, begin, min(end, first + len(prompt)))
        if 0 <= at <= first:
            start = at + len(prompt)
            if turn.is_asked or start >= first:
                return start
            # If the template writes no prompt, white space before the answer does not count.
            return first - len(text[start:first].lstrip())
    return None


def find_end(
    special: re.Pattern[str],
    text: str,
    window: Window,
    turn: Turn,
    ends: Sequence[str],
    *,
    is_last: bool,
) -> int | None:
    """Return where a turn ends, or None if the text does not show it.

    Args:
        special: Matches special tokens.
        text: The conversation.
        window: From the end of the last text of the answer to the next message.
        turn: What surrounds the answer.
        ends: Special tokens that end an answer.
        is_last: Whether no message follows.
    """
    gap = text[slice(*window)]
    inner = gap.lstrip()
    begin = window[0] + len(gap) - len(inner)
    other = ((turn.later if is_last else turn.last) or "").lstrip()
    size = measure_common(special, inner, other)
    found = [each.end() for each in special.finditer(inner, 0, size)]
    if found:
        return begin + found[-1]
    # Another special token may stand for the end, and tags and numbers of a call precede it.
    after = special.search(inner, size)
    if after is not None and after[0] in ends:
        # What follows it may be a second end.
        at = max(0, other.find(after[0]))
        more = measure_common(special, inner[after.start() :], other[at:])
        found = [
            each.end() for each in special.finditer(inner, after.start(), after.start() + more)
        ]
        return begin + max([after.end(), *found])
    # A template without such a token ends an answer with text, or with nothing.
    rest = inner
    if not is_last:
        rest = special.sub("", other)
    if turn.last is None or rest[size:].strip():
        return None
    # White space at the end of a turn does not count.
    own = inner[:size].rstrip()
    return max(window[0], (begin + len(own)) * bool(own))


def measure_common(special: re.Pattern[str], one: str, other: str) -> int:
    """Return how many characters two texts have in common, without a part of a special token."""
    size = measure_same(one, other)
    cuts = [each.start() for text in (one, other) for each in special.finditer(text)
            if each.start() < size < each.end()]  # fmt: skip
    return min([size, *cuts])


def measure_same(one: str, other: str) -> int:
    """Return how many characters are the same at the beginning of two texts."""
    # Both are short, except for the message about a template that changes texts.
    size = min(len(one), len(other))
    return next((at for at in range(size) if one[at] != other[at]), size)
