"""Rows of conversations, read from JSON records and tables, and checked.

A row has `messages`, a list of {"role": ..., "content": ...}, and optionally `tools`. Or it has the
texts `prompt` and `completion`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import DataError
from megatron.base.outside_file import parse_json
from megatron.extras.preparation.preprocess.input_files import InputFormat, find_format
from megatron.extras.preparation.preprocess.inputs import open_table, read_blocks
from megatron.extras.samples.chat.renderer import CLOSE, OPEN
from megatron.extras.samples.chat.template import (
    THOUGHTS,
    Message,
    name_thoughts,
)

ROLES = ("system", "user", "assistant", "tool")
_COLUMNS = ("messages", "tools", "prompt", "completion")
_ROWS = 256
"""Rows that a worker gets at once."""
_BYTES = 1 << 24
"""Bytes of a table after which a worker gets fewer rows."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a file."""

    path: str
    first: int
    """Number of the first one, from 1."""
    values: list[Any]
    """A line of JSON as bytes, or the row of a table."""


def read_rows(paths: list[str]) -> Iterator[Rows]:
    """Yield the rows of all files.

    Raises:
        DataError: A file cannot be read, or has no columns of conversations.
    """
    for path in paths:
        format = find_format(path)
        if format is InputFormat.TEXT:
            raise DataError(f"{path} is plain text, and has no conversations. Leave it out.")
        if format in (InputFormat.PARQUET, InputFormat.ARROW):
            yield from _read_table(path)
            continue
        for block in read_blocks([path], ()):
            # Blocks are for text, and have thousands of rows. A worker gets fewer.
            lines = block.content.split(b"\n")
            for at in range(0, len(lines), _ROWS):
                yield Rows(path, block.first_line + at, lines[at : at + _ROWS])


def _read_table(path: str) -> Iterator[Rows]:
    """Yield the rows of a Parquet or an Arrow file."""
    with open_table(path) as table:
        names = table.schema.names
        columns = [name for name in _COLUMNS if name in names]
        if "messages" not in columns and not {"prompt", "completion"} <= {*columns}:
            raise DataError(
                f"{path} has the columns {', '.join(names)}, and neither messages nor prompt and "
                "completion. Rename them."
            )
        first = 1
        values: list[Any] = []
        size = 0
        # A worker gets as many rows as have few bytes.
        for _, batch, _ in table.read_rows(columns):
            values += batch.to_pylist()
            size += batch.nbytes
            if len(values) >= _ROWS or size > _BYTES:
                yield Rows(path, first, values)
                first += len(values)
                values = []
                size = 0
        if values:
            yield Rows(path, first, values)


@dataclass(frozen=True)
class Conversation:
    """A checked row: messages with tools, or a prompt with its completion."""

    messages: tuple[Message, ...] = ()
    tools: Any = None
    prompt: str = ""
    completion: str = ""


def parse_row(value: Any) -> Conversation | None:
    """Return the conversation of a row. None for an empty line.

    Raises:
        DataError: It is no conversation. The message is the reason.
    """
    if isinstance(value, bytes):
        if not value or value.isspace():
            return None
        try:
            value = parse_json(value.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
        except ValueError as error:
            raise DataError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"must be an object with messages, is {type(value).__name__}")
    if value.get("messages") is None:
        return _parse_completion(value)
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages is {str(messages)[:40]!r}, and must be a list that is not empty")
    checked = tuple(_check_message(each, number) for number, each in enumerate(messages, 1))
    # The order of users and answers is the template's affair. Many accept any.
    roles = [message["role"] for message in checked]
    if "system" in roles[1:]:
        at = roles.index("system", 1)
        raise DataError(
            f"message {at + 1} is a second system message, or a late one. Only the first message "
            "may be of the system"
        )
    if "assistant" not in roles:
        raise DataError("no message is of the assistant, so nothing counts")
    return Conversation(checked, _clean(value.get("tools"), keep_nulls=True) or None)


def _parse_completion(value: dict[str, Any]) -> Conversation:
    """Return a prompt with its completion.

    Raises:
        DataError: It has neither these keys nor messages, or one is no text.
    """
    if not {"prompt", "completion"} <= {*value}:
        raise DataError(
            f"it has the keys {', '.join(map(repr, value))}, and must have messages with roles "
            "and contents, or prompt and completion"
        )
    prompt, completion = (_get_text(value, key) for key in ("prompt", "completion"))
    if not completion:
        raise DataError("completion is empty, so nothing counts")
    return Conversation(prompt=prompt, completion=completion)


def list_contents(conversation: Conversation) -> Iterator[str]:
    """Yield all texts of a conversation."""
    yield conversation.prompt
    yield conversation.completion
    waiting: list[Any] = [*conversation.messages, conversation.tools]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value


def _check_message(message: Any, number: int) -> Message:
    """Return a message without keys that are null.

    Raises:
        DataError: A role or a content is wrong.
    """
    if not isinstance(message, dict):
        raise DataError(f"message {number} is {type(message).__name__}, and must be an object")
    # A table gives all rows the same keys. A template reads one name of a thought.
    found = name_thoughts(_clean(message))
    role = found.get("role")
    if role not in ROLES:
        raise DataError(f"message {number} has the role {role!r}, and must have one of "
                        f"{', '.join(ROLES)}")  # fmt: skip
    # The mask needs the names of the calls.
    calls = found.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_has_name, calls)):
        raise DataError(f"message {number}: tool_calls must be a list of objects with a name")
    if not calls:
        # Some templates ask whether the key is there.
        found.pop("tool_calls", None)
    elif "content" not in found and role == "assistant":
        found["content"] = ""
    content = found.get("content")
    texts = [found.get(THOUGHTS[0], "")]
    if isinstance(content, list):
        texts += [part.get("text") if isinstance(part, dict) else None for part in content]
    else:
        texts.append(content)
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"message {number}: a content is {type(text).__name__}, not a text")
    return found


def _has_name(call: Any) -> bool:
    """Return whether a call of a tool names it."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _clean(value: Any, *, keep_nulls: bool = False) -> Any:
    """Return a value without keys that are null, at all depths. A map of a table is an object."""
    # Only a map has pairs. An empty one is an empty list.
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):
        value = dict(value)
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if keep_nulls or each is not None}
        return {key: _clean(each, keep_nulls=keep_nulls) for key, each in kept.items()}
    if isinstance(value, list):
        return [_clean(each, keep_nulls=keep_nulls) for each in value]
    return value


def _get_text(value: dict[str, Any], key: str) -> str:
    """Return a text of a row."""
    if not isinstance(value[key], str):
        raise DataError(f"{key} is {type(value[key]).__name__}, and must be a text")
    return str(value[key])


def check_characters(conversation: Conversation) -> None:
    """Refuse characters that no tokenizer or template takes.

    Raises:
        DataError: A text has half a surrogate pair, or a mark of this program.
    """
    for text in list_contents(conversation):
        if OPEN in text or CLOSE in text:
            raise DataError("a text has U+FDD0 or U+FDD1, which are no characters")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError("a text has half a surrogate pair, which is not a character") from error
