"""The tokens of a conversation that count in the loss.

An answer is what the model must generate: everything from the end of its prompt to the end of its
turn. A template with generation blocks says itself what that is. Otherwise the conversation is
rendered with a unique word before and after each text of each message. The text without these words
must be the plain rendering, or the conversation is refused. `turns` says what precedes and follows
an answer.

A token counts if at least one of its characters does. This is also transformers' rule.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from megatron.base.errors import DataError
from megatron.extras.preparation.conversations.turns import (
    WAYS,
    Places,
    Turn,
    find_end,
    find_start,
    make_short,
    mark,
    mark_calls,
    measure_same,
    replace_ids,
    see_turn,
    take_words,
)
from megatron.extras.samples.chat.renderer import CLOSE, OPEN, RenderTimeoutError
from megatron.extras.samples.chat.template import (
    ChatTemplate,
    Message,
    name_thoughts,
    remove_tags,
)

LossOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]
_SHOWN = 40
"""Characters of a text that a message shows."""
_TURNS = 10_000
"""Turns that are kept. Numbers in calls make many different ones."""
_REMEDY = (
    "so what counts is not known. Put {% generation %} and {% endgeneration %} around the answer "
    "in the template, or give --loss-on all"
)


@dataclass(frozen=True)
class Renderer:
    """Renders conversations, and finds the characters that count."""

    template: ChatTemplate
    specials: tuple[str, ...]
    """The texts of the tokenizer's special tokens."""
    loss_on: LossOn
    _turns: dict[str, Turn] = field(default_factory=dict)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self.specials, key=len, reverse=True)
        # Without special tokens, nothing matches.
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def ends_turns(self) -> bool:
        """Whether a special token ends an answer."""
        return bool(self.template.probe.find_ends(self._special))

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether the template writes the thought of a last answer."""
        answer = {
            "role": "assistant",
            "content": "x",
            **name_thoughts({"thinking": "PROBETHOUGHT"}),
        }
        try:
            text = self.template.render([{"role": "user", "content": "x"}, answer])
        except DataError:
            # It may refuse such a short conversation.
            return True
        return "PROBETHOUGHT" in text

    def render(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the ranges of characters that count, in order.

        Raises:
            DataError: The template refuses the conversation, leaves out a call, or does not show
                what counts.
        """
        with self.template.limit_time():
            return self._render(messages, tools)

    def _render(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        tagged = self.template.render(messages, tools)
        text = remove_tags(tagged)
        self._check_calls(messages, tools, text)
        if self.loss_on == "all":
            return text, [(0, len(text))]
        if self.template.is_tagged:
            spans = _find_tagged(tagged)
        else:
            places = self._find_words(messages, tools, text)
            spans = [*self._list_answers(messages, tools, places, text)]
        if not spans:
            raise DataError(f"{self.template.origin} writes no answer of this conversation")
        # An answer may have several ranges only in a template with generation blocks.
        if self.loss_on == "last":
            spans = spans[-1:]
        return text, spans

    def _check_calls(self, messages: Sequence[Message], tools: Any, text: str) -> None:
        """Refuse a conversation whose calls or tools are not in its text.

        Raises:
            DataError: One is missing, or arguments that are JSON are quoted once more.
        """
        missing = [name for name in list_names((), tools) if name not in text]
        names = list_names(messages, None)
        if names:
            # The description of a tool has its name too, so the calls get names of their own.
            word = _choose_word(messages, tools, text)
            marked = [mark_calls(each, f"{word}{at}p") for at, each in enumerate(messages)]
            given, found = (
                {*re.findall(f"{word}[0-9]+p[0-9]+z", each)}
                for each in (json.dumps(marked, default=str), self.template.render(marked, tools))
            )
            if given - found:
                missing.append(names[0])
        if missing:
            raise DataError(
                f"{self.template.origin} does not write the call or the description of the tool "
                f"{missing[0]!r}, or not all of it. Use a template for tools, or leave tools out"
            )
        for function in list_functions(messages, None):
            arguments = function.get("arguments")
            # A text without quotes is the same in JSON, but for its own.
            if not isinstance(arguments, str) or '"' not in arguments:
                continue
            # A model that learns the escaped text would call no tool.
            if json.dumps(arguments, ensure_ascii=False) in text:
                raise DataError(
                    f"{self.template.origin} quotes the arguments of the call of "
                    f"{function['name']!r} once more, because they are a text. Give them as an "
                    "object"
                )

    def _find_words(self, messages: Sequence[Message], tools: Any, text: str) -> Places:
        """Return where the texts of messages are.

        Raises:
            DataError: The template changes the text of an answer.
        """
        word = _choose_word(messages, tools, text)
        # The error of the first way is about the words in the simplest place.
        first_error = None
        # Words around questions too show where the window of an answer begins and ends. A template
        # may strip white space, or ask whether a content is empty or how a question begins.
        for of_answers, of_others in itertools.product(WAYS, (*WAYS, None)):
            by_role = {"assistant": of_answers, "user": of_others, "tool": of_others}
            marked = [
                mark(message, f"{word}{number}p", by_role.get(message["role"]))
                for number, message in enumerate(messages)
            ]
            try:
                found = self.template.render(marked, tools)
            except RenderTimeoutError:
                raise
            except DataError as error:
                first_error = first_error or error
                continue
            places, without = take_words(found, word)
            if without == text:
                return places
        if first_error is not None:
            raise first_error
        at = measure_same(text, without)
        raise DataError(
            f"{self.template.origin} changes the text of an answer, {_REMEDY}: the text after "
            f"{text[max(0, at - _SHOWN) : at]!r} is another one when words are put around the "
            "answers"
        )

    def _list_answers(
        self, messages: Sequence[Message], tools: Any, places: Places, text: str
    ) -> Iterator[Span]:
        """Yield the answers: from the end of the prompt to the end of the turn."""
        # Where the texts of later messages begin.
        firsts = [min(places.get(number, [len(text)])) for number in range(len(messages))]
        laters = [*itertools.accumulate([len(text), *firsts[:0:-1]], min)][::-1]
        # Each answer is looked for after the message before.
        cursor = 0
        for number, message in enumerate(messages):
            found = places.get(number, [])
            if message["role"] != "assistant":
                cursor = max([cursor, *found])
                continue
            later = laters[number]
            turn = self._see(messages, number, tools, keep_numbers=False)
            start = find_start(text, turn, (cursor, later), found)
            # Neither the answer nor its turn is in the text.
            if start is None and not found:
                continue
            if start is None or any(not cursor <= place <= later for place in found):
                raise DataError(
                    f"{self.template.origin} does not show where the answer of message "
                    f"{number + 1} begins, {_REMEDY}"
                )
            # A prompt may reach into the content.
            last = max([start, *found])
            ends = self.template.probe.find_ends(self._special)
            is_last = number == len(messages) - 1
            end = find_end(self._special, text, (last, later), turn, ends, is_last=is_last)
            if end is None:
                turn = self._see(messages, number, tools, keep_numbers=True)
                end = find_end(self._special, text, (last, later), turn, ends, is_last=is_last)
            if end is None:
                raise DataError(
                    f"{self.template.origin} does not show where the answer of message "
                    f"{number + 1} ends, {_REMEDY}"
                )
            cursor = end
            yield start, end

    def _see(
        self, messages: Sequence[Message], number: int, tools: Any, *, keep_numbers: bool
    ) -> Turn:
        """Return what surrounds an answer, seen in a short conversation of the same shape."""
        short, ids = make_short(messages, number, keep_numbers=keep_numbers)
        key = json.dumps([short, bool(tools)], default=str)
        if key not in self._turns:
            if len(self._turns) >= _TURNS:
                self._turns.clear()
            self._turns[key] = see_turn(self._try_words, self._special, short, tools)
        if not ids:
            return self._turns[key]
        return replace_ids(self._turns[key], ids)

    def _try_words(
        self, messages: Sequence[Message], tools: Any, *, prompt: bool
    ) -> tuple[str, Places] | None:
        """Return the text of a short conversation, and where texts are. None if that fails."""
        for way in WAYS:
            marked = [mark(each, f"mark{n}p", way) for n, each in enumerate(messages)]
            try:
                text = self.template.render(messages, tools, prompt=prompt)
                found = self.template.render(marked, tools, prompt=prompt)
            except RenderTimeoutError:
                raise
            except DataError:
                continue
            places, without = take_words(found, "mark")
            if without == text:
                return text, places
        return None


def list_names(messages: Sequence[Message], tools: Any) -> list[str]:
    """Return the names of the tools that a conversation calls and describes."""
    return [each["name"] for each in list_functions(messages, tools)]


def list_functions(messages: Sequence[Message], tools: Any) -> list[dict[str, Any]]:
    """Return the tools that a conversation calls and describes, if they have names."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    found = list(calls)
    # Some data sets have tools as one text, in which no name can be found.
    if isinstance(tools, list):
        found += tools
    functions = [each.get("function", each) for each in found if isinstance(each, dict)]
    return [each for each in functions if isinstance(each.get("name"), str)]


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
    everything = json.dumps([messages, tools], ensure_ascii=False, default=str) + text
    return next(word for n in range(1 << 30) if (word := f"mark{n}q") not in everything)
