"""The process that compiles and renders chat templates. It limits its own memory.

`renderer` starts this module as a program, asks it, and kills it after the time limit. The module
imports little, so that it starts quickly.

Source: transformers (https://huggingface.co/docs/transformers/chat_templating).
"""

import datetime
import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.extras.samples.chat.renderer import CLOSE, OPEN
from megatron.parallel.launcher import die_with_parent

_MEMORY = 3 << 29
"""Bytes that the process may have, 1.5 GiB."""
_CHARACTERS = 1 << 24
"""Longest text of one conversation."""
_BITS = 1 << 12
"""Largest number that a template may compute."""
_REASON = 300
"""Characters of an error that are reported."""


class _Generation(Extension):
    """The tag of what the model writes."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block, with a call of `_mark` around it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of Jinja, without operators whose result may be of any size."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator.

        Raises:
            SecurityError: The result may be too large.
        """
        is_product = all(isinstance(each, (int, float)) for each in (left, right))
        # A text times a number, or a power, can fill the memory. The message names the operator.
        if operator == "**" or (operator == "*" and not is_product):
            raise SecurityError(f"the operator {operator} is not allowed for such values")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("the operator % is not allowed for texts")
        # A loop may square a number again and again.
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _BITS:
            raise SecurityError(f"a number of {result.bit_length()} bits is not allowed")
        return result


def _compile(source: str) -> Template:
    """Return a compiled template, with the functions that transformers gives to it."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    # One date for all conversations, also if a day ends during the work.
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    return environment.from_string(source)


def _render(template: Template, variables: dict[str, Any]) -> str:
    pieces = []
    size = 0
    # A text that never ends is noticed while it is written.
    for piece in template.generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > _CHARACTERS:
            raise TemplateError(f"it writes more than {_CHARACTERS:,} characters")
    return "".join(pieces)


def _raise(message: str) -> None:
    """Let a template refuse a conversation."""
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Jinja's own filter would escape characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _answer(templates: dict[int, Template], request: dict[str, Any]) -> dict[str, str]:
    """Compile or render, and return the text or the reason why there is none."""
    try:
        if "source" in request:
            templates[request["number"]] = _compile(request["source"])
            return {"text": ""}
        return {"text": _render(templates[request["number"]], request["variables"])}
    except MemoryError:
        return {"error": "it needs too much memory"}
    # A template may raise any error, and Python's compiler has limits of its own.
    except Exception as error:
        return {"error": " ".join(str(error).split())[:_REASON] or type(error).__name__}


def serve(channel: Connection) -> None:
    """Answer requests until the other end is closed."""
    # A template may end the process, and its memory belongs in no file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Other systems than Linux may refuse this limit.
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # Ctrl-C in the terminal is handled by the program that asks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    templates: dict[int, Template] = {}
    channel.send_bytes(b"ready")
    while True:
        try:
            request = json.loads(channel.recv_bytes())
        except EOFError:
            return
        try:
            reply = json.dumps(_answer(templates, request)).encode()
        except MemoryError:
            reply = b'{"error": "it needs too much memory"}'
        channel.send_bytes(reply)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    serve(Connection(int(sys.argv[2])))
    # A normal exit would first free everything that templates have made.
    os._exit(0)
