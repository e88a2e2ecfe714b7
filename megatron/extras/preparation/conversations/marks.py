"""The tokens of a conversation that count in the loss.

An answer is what the model must generate: everything from the end of its prompt to the end of its
turn. A template with generation blocks says itself what that is. Otherwise the conversation is
rendered with a unique word before and after each text of each message. The text without these words
must be the plain rendering, or the conversation is refused.

What precedes and follows an answer is seen in a short conversation of the same shape. It has the
message before the answer and the answer, with other texts. It is rendered up to the answer, with
the beginning of an answer, with the answer at its end, and with another message after it. What
these have in common shows the prompt and the end of the turn.

A token counts if at least one of its characters does. This is also transformers' rule.
"""

import collections
import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from megatron.base.errors import DataError
from megatron.extras.samples.chat.renderer import CLOSE, OPEN, RenderTimeoutError
from megatron.extras.samples.chat.template import (
    THOUGHTS,
    ChatTemplate,
    Message,
    name_thoughts,
    remove_tags,
)

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
