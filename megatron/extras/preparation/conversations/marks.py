"""The tokens of a conversation that count in the loss.

An answer is what the model writes: everything after the text that asks for an answer, up to the
special token that ends the turn, which is included. A template with generation blocks says itself
what that is. Otherwise the conversation is rendered with a unique word before and after the content
of each message. The text without these words must be the plain rendering, or the template is
refused.

A token counts if at least one of its characters does. This is also transformers' rule.
"""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.base.errors import DataError
from megatron.extras.training.chat.template import CLOSE, OPEN, ChatTemplate, Message, remove_tags

LossOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]
_SHOWN = 40
"""Characters of a text that a message shows."""


@dataclass(frozen=True)
class Renderer:
    """Renders conversations, and finds the characters that count."""

    template: ChatTemplate
    specials: tuple[str, ...]
    """The texts of the tokenizer's special tokens."""
    loss_on: LossOn

    @property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self.specials, key=len, reverse=True)
        # Without special tokens, nothing matches.
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def ends_turns(self) -> bool:
        """Whether a special token ends an answer."""
        return bool(self.template.probe.find_ends(self._special))

    def render(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the ranges of characters that count, in order.

        Raises:
            DataError: The template refuses the conversation, or changes an answer.
        """
        tagged = self.template.render(messages, tools)
        text = remove_tags(tagged)
        for name in list_names(messages, tools):
            if name not in text:
                raise DataError(
                    f"{self.template.origin} does not write the call or the description of the "
                    f"tool {name!r}. Use a template for tools, or leave tools out"
                )
        if self.loss_on == "all":
            return text, [(0, len(text))]
        if self.template.is_tagged:
            spans = _find_tagged(tagged)
        else:
            spans = self._find_marked(messages, tools, text)
        if not spans:
            raise DataError(f"{self.template.origin} writes no answer of this conversation")
        # An answer may have several ranges only in a template with generation blocks.
        if self.loss_on == "last":
            spans = spans[-1:]
        return text, spans

    def _find_marked(self, messages: Sequence[Message], tools: Any, text: str) -> list[Span]:
        """Return the answers of a template without generation blocks."""
        word = _choose_word(messages, tools, text)
        # The error of the first way is about the words in the simplest place.
        first_error = None
        # Words around questions too show where the window of an answer begins and ends. A template
        # may strip white space, or ask whether a content is empty or how a question begins.
        ways = (_surround_all, _surround_begin, _surround_stripped, _surround_text)
        for of_answers, of_others in itertools.product(ways, (*ways, None)):
            by_role = {"assistant": of_answers, "user": of_others, "tool": of_others}
            marked = [
                _mark(message, f"{word}{number}z", by_role.get(message["role"]))
                for number, message in enumerate(messages)
            ]
            try:
                found = self.template.render(marked, tools)
            except DataError as error:
                first_error = first_error or error
                continue
            places, without = _take_words(found, word)
            if without == text:
                return [*self._extend(messages, places, text)]
        if first_error is not None:
            raise first_error
        at = next((i for i, (a, b) in enumerate(zip(text, without, strict=False)) if a != b), 0)
        raise DataError(
            f"{self.template.origin} changes the text of an answer, so what counts is not known: "
            f"the text after {text[max(0, at - _SHOWN) : at]!r} is another one when words are put "
            "around the answers. Put {% generation %} and {% endgeneration %} around the answer in "
            "the template, or give --loss-on all"
        )

    def _extend(
        self, messages: Sequence[Message], places: dict[int, list[int]], text: str
    ) -> Iterator[Span]:
        """Yield the answers: from the end of the prompt to the end of the turn.

        Args:
            messages: The conversation.
            places: Number of each message -> where its contents begin and end in the text.
            text: The text.
        """
        special = self._special
        probe = self.template.probe
        openings = special.findall(probe.before)
        ends = probe.find_ends(special)
        # Not each template writes its prompt before each answer. A special token may be left of it.
        headers = [probe.find_prompt(special)]
        headers += [token for token in special.findall(probe.between)[-1:] if token not in ends]
        # Each answer is looked for after the message before.
        cursor = 0
        for number, message in enumerate(messages):
            found = places.get(number, [])
            if message["role"] != "assistant":
                cursor = max([cursor, *found])
                continue
            later = min(
                (min(others) for other, others in places.items() if other > number),
                default=len(text),
            )
            # After a question, the first header is that of the answer. Otherwise the nearest one.
            nearest = number > 0 and number - 1 not in places
            start = _find_header(
                text, headers, (cursor, min(found, default=later)), nearest=nearest
            )
            if start is None and not found:
                # Neither the answer nor its turn is in the text.
                continue
            if start is None and len(found) % 2:
                raise DataError(
                    f"{self.template.origin} leaves out the beginning of message {number + 1}, so "
                    "what counts is not known. Put {% generation %} and {% endgeneration %} around "
                    "the answer in the template, or give --loss-on all"
                )
            first = min(found, default=0) if start is None else start
            last = max([first, *found])
            last = _find_end(special, text, (last, later), ends, openings)
            cursor = last
            yield first, last


def _find_end(
    special: re.Pattern[str], text: str, window: Span, ends: Sequence[str], openings: Sequence[str]
) -> int:
    """Return where a turn ends: after the first token that ends turns, or where the window begins.

    A turn may also end with another special token, but not with one that begins a turn.
    """
    other = window[0]
    for found in special.finditer(text, *window) if ends else ():
        if found[0] in ends:
            return found.end()
        if found[0] in openings:
            break
        other = found.end()
    return other


def _find_header(text: str, headers: Sequence[str], window: Span, *, nearest: bool) -> int | None:
    """Return where the text before an answer ends, or None if there is no such text.

    Args:
        text: The conversation.
        headers: What may precede an answer.
        window: From the end of the message before to the answer, or to the next message.
        nearest: Whether the last header of the window is that of the answer, and not the first.
    """
    for header in filter(None, headers):
        at = text.rfind(header, *window) if nearest else text.find(header, *window)
        if at >= 0:
            return at + len(header)
    return None


def list_names(messages: Sequence[Message], tools: Any) -> list[str]:
    """Return the names of the tools that a conversation calls and describes."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    found = list(calls)
    # Some data sets have tools as one text, in which no name can be found.
    if isinstance(tools, list):
        found += tools
    functions = [each.get("function", each) for each in found if isinstance(each, dict)]
    return [each["name"] for each in functions if isinstance(each.get("name"), str)]


def find_counted(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return whether each token counts.

    Args:
        offsets: The range of characters of each token, in order.
        spans: The ranges of characters that count, in order.
    """
    # Both are sorted, so one pass is enough.
    counted = [False] * len(offsets)
    first = 0
    for start, end in spans:
        while first < len(offsets) and offsets[first][1] <= start:
            first += 1
        at = first
        while at < len(offsets) and offsets[at][0] < end:
            counted[at] = True
            at += 1
    return counted


def _find_tagged(text: str) -> list[Span]:
    """Return the ranges between `OPEN` and `CLOSE`, in the text without them."""
    spans = []
    start = 0
    for removed, found in enumerate(re.finditer(f"[{OPEN}{CLOSE}]", text)):
        place = found.start() - removed
        if found[0] == OPEN:
            start = place
        elif place > start:
            spans.append((start, place))
    return spans


def _choose_word(messages: Sequence[Message], tools: Any, text: str) -> str:
    """Return a word that the conversation does not have. JSON does not change it."""
    # Any key or text of the conversation may be rendered.
    everything = json.dumps([messages, tools], ensure_ascii=False) + text
    return next(word for n in range(1 << 30) if (word := f"mark{n}q") not in everything)


def _mark(message: Message, word: str, surround: Callable[[str, str], str] | None) -> Message:
    """Return a message with a word before and after each of its contents.

    Args:
        message: The message.
        word: The word.
        surround: Puts a word around the content of a message. None leaves the message as it is.
    """
    if surround is None:
        return message
    # The plain rendering uses the message too.
    marked = copy.deepcopy(dict(message))
    for key in ("content", "reasoning_content"):
        value = marked.get(key)
        if isinstance(value, str):
            marked[key] = (surround if key == "content" else _surround_text)(value, word)
        for part in value if isinstance(value, list) else ():
            part["text"] = _surround_text(part["text"], word)
    for call in marked.get("tool_calls") or ():
        function = call.get("function", call)
        function["name"] = _surround_text(function["name"], word)
    return marked


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


def _take_words(text: str, word: str) -> tuple[dict[int, list[int]], str]:
    """Return the places of the words of each message, and the text without words."""
    places: dict[int, list[int]] = {}
    pieces = []
    size = 0
    at = 0
    for found in re.finditer(f"{word}([0-9]+)z", text):
        pieces.append(text[at : found.start()])
        size += len(pieces[-1])
        at = found.end()
        places.setdefault(int(found[1]), []).append(size)
    return places, "".join([*pieces, text[at:]])
