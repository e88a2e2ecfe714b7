"""A chat template of Jinja, rendered as transformers renders it, in a process with limits.

Source: transformers (https://huggingface.co/docs/transformers/chat_templating).
Text between `{% generation %}` and `{% endgeneration %}` is what the model writes.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import SETTINGS_BYTES, load_json, load_text
from megatron.config.data import TokenizerConfig
from megatron.extras.samples.chat.renderer import (
    CLOSE,
    OPEN,
    RenderError,
    RenderTimeoutError,
    TemplateProcess,
)
from megatron.tokenizer.build import HFTokenizer, Tokenizer, read_special_token
from megatron.tokenizer.hub import find_tokenizer_folder

Message = Mapping[str, Any]
SECONDS = 4.0
"""Longest time to compile a template, and to render one conversation in all ways."""
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a thought. A template reads one of them."""
_QUESTION = "PROBEQUESTION"
_process: TemplateProcess | None = None
"""The process that renders for this one."""


class ChatTemplate:
    """A template, and the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str) -> None:
        """Compile a template.

        Args:
            source: The template.
            tokens: Its variables, such as eos_token.
            origin: Where it is from, for messages.

        Raises:
            ConfigError: It is no template.
        """
        self.origin = origin
        self.is_tagged = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._source = source
        self._tokens = dict(tokens)
        self._compiled_in: TemplateProcess | None = None
        self._deadline: float | None = None
        try:
            self._compile()
        except RenderTimeoutError as error:
            raise ConfigError(f"{origin} needs more than {SECONDS:g} s to be compiled") from error
        except RenderError as error:
            raise ConfigError(f"{origin} is no chat template: {error}") from error

    def _compile(self) -> TemplateProcess:
        """Return a process that has the compiled template. It is a new one after a kill."""
        global _process
        if _process is None or not _process.runs:
            _process = TemplateProcess()
        if self._compiled_in is not _process:
            request = {"number": id(self), "source": self._source}
            _process.ask(request, time.monotonic() + SECONDS)
            self._compiled_in = _process
        return _process

    @contextlib.contextmanager
    def limit_time(self) -> Iterator[None]:
        """Give all renderings of a block `SECONDS` together."""
        before = self._deadline
        self._deadline = before or time.monotonic() + SECONDS
        try:
            yield
        finally:
            self._deadline = before

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False
    ) -> str:
        """Return the text of a conversation, with `OPEN` and `CLOSE` around generation blocks.

        Args:
            messages: The conversation.
            tools: Descriptions of functions.
            prompt: Whether the beginning of an answer follows the last message.

        Raises:
            DataError: The template refuses the conversation, fails, or exceeds a limit.
        """
        variables = {"messages": list(messages), "tools": tools, "add_generation_prompt": prompt}
        try:
            process = self._compile()
            request = {"number": id(self), "variables": {**variables, **self._tokens}}
            return process.ask(request, self._deadline or time.monotonic() + SECONDS)
        except RenderTimeoutError as error:
            raise RenderTimeoutError(
                f"{self.origin} needs more than {SECONDS:g} s for one conversation"
            ) from error
        except RenderError as error:
            raise DataError(f"{self.origin} cannot render it: {error}") from error

    def make_turn(
        self, messages: Sequence[Message], question: dict[str, str], answer: str
    ) -> list[dict[str, str]]:
        """Return a question and the answer that a model wrote, as two messages, or none.

        Args:
            messages: The conversation before.
            question: The question.
            answer: What the model wrote.
        """
        # A template with channels (gpt-oss) refuses a content that has one. An answer that ends in
        # a thought has no other content.
        for content in (self.probe.remove_header(answer), ""):
            turn = [question, {"role": "assistant", "content": content}]
            with contextlib.suppress(DataError):
                self.render([*messages, *turn, question], prompt=True)
                return turn
        return []

    @cached_property
    def probe(self) -> "Probe":
        """The texts of a question and an answer, and of another question after them."""
        question, answer, again = _QUESTION, "PROBEANSWER", "PROBEAGAIN"
        asked = {"role": "user", "content": question}
        answered = {"role": "assistant", "content": answer}
        texts = []
        for messages, prompt in (
            ([asked, answered], False),
            ([asked], False),
            ([asked], True),
            ([asked, answered, {"role": "user", "content": again}], False),
        ):
            try:
                texts.append(remove_tags(self.render(messages, prompt=prompt)))
            except RenderTimeoutError:
                raise
            except DataError:
                # Some templates refuse such a short conversation.
                texts.append("")
        # Without the answer, the others are empty, and nothing is known of the template.
        before, _, after = texts[0].partition(answer)
        next_turn = texts[3].partition(answer)[2].partition(again)[0]
        first, _, between = before.partition(question)
        return Probe(first, between, after, next_turn, texts[1], texts[2])


@dataclass(frozen=True)
class Probe:
    """What surrounds an answer. A text is empty if the template refuses the conversation."""

    first: str
    """Everything before the question."""
    between: str
    """Everything between the question and the answer."""
    after: str
    """Everything after the answer, if it is the last message."""
    next_turn: str
    """Everything between the answer and the next question."""
    asked: str
    """The question alone."""
    prompted: str
    """The question, and the beginning of an answer."""

    def remove_header(self, answer: str) -> str:
        """Return what follows the last header in an answer, or all of it if there is none.

        A header begins a plain answer, and is no part of the prompt. So the model writes it, and a
        template does.
        """
        prompt = self.prompted.rpartition(_QUESTION)[2]
        header = self.between[len(prompt) :] if self.between.startswith(prompt) else ""
        # White space is in the content too.
        return answer.rpartition(header)[2] if prompt and header.strip() else answer

    def find_ends(self, special: re.Pattern[str]) -> tuple[str, ...]:
        """Return the special tokens that end an answer: the last one of a text, and others.

        Args:
            special: Matches special tokens.
        """
        found = special.findall(self.after)[:1]
        # What begins the next question is no end. It begins an answer, or the first question too.
        begins = [*special.findall(self.prompted)[-1:], *special.findall(self.first)[-1:]]
        begins += special.findall(self.prompted.removeprefix(self.asked))[:1]
        found += [token for token in special.findall(self.next_turn)[:1] if token not in begins]
        return tuple(dict.fromkeys(found))


def end_process() -> None:
    """End the process that renders. The next rendering starts another one."""
    if _process is not None and _process.runs:
        _process.close()


def remove_tags(text: str) -> str:
    """Return a rendered text without the marks of generation blocks."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def name_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose thought has all names, since templates read different ones.

    Raises:
        DataError: It has two thoughts that differ.
    """
    thoughts = [message[name] for name in THOUGHTS if message.get(name) is not None]
    if any(each != thoughts[0] for each in thoughts):
        raise DataError(f"it has different thoughts under {', '.join(THOUGHTS)}. Keep one")
    if not thoughts:
        return message
    # Templates read it under different names.
    return {**message, **dict.fromkeys(THOUGHTS, thoughts[0])}


def load_chat_template(config: TokenizerConfig, file: str | None = None) -> ChatTemplate:
    """Return the template in a file, or that of the tokenizer.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    # A tokenizer of two files has no folder, and no names for its tokens.
    folder = find_tokenizer_folder(config.tokenizer_name_or_path)
    tokens = {}
    if folder is not None:
        read = {name: read_special_token(folder, name) for name in _NAMES}
        tokens = {name: token for name, token in read.items() if token is not None}
    if file is not None:
        try:
            return ChatTemplate(load_text(file, SETTINGS_BYTES), tokens, f"--chat-template {file}")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat-template {file} cannot be read: {error}") from error
    found = None if folder is None else _find_template(folder)
    if found is None:
        raise ConfigError(
            f"the tokenizer {config.tokenizer_name_or_path} has no chat template. Give "
            "--chat-template FILE, or a folder with chat_template.jinja, as "
            "examples/instruct/add_chat_tokens.py makes one."
        )
    return ChatTemplate(found[0], tokens, str(found[1]))


def _find_template(folder: Path) -> tuple[str, Path] | None:
    """Return the template of a tokenizer's folder, and its file."""
    path = folder / "chat_template.jinja"
    config = folder / "tokenizer_config.json"
    try:
        if path.is_file():
            return load_text(str(path), SETTINGS_BYTES), path
        if not config.is_file():
            return None
        found = load_json(str(config)).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the chat template in {folder} cannot be read: {error}") from error
    # A tokenizer may have several templates, each with a name. That for tools is rarely another
    # one today.
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return (found, config) if isinstance(found, str) else None


def read_special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the texts of a tokenizer's special tokens, and let texts have them.

    Raises:
        ConfigError: The tokenizer is of another type, or has no special tokens.
    """
    advice = "examples/instruct/add_chat_tokens.py adds two of them and a template."
    if not isinstance(tokenizer, HFTokenizer):
        raise ConfigError(
            "conversations need a tokenizer of the type PretrainedFromHF, whose tokenizer.json has "
            f"special tokens. {advice}"
        )
    if not tokenizer.backend.get_added_tokens_decoder():
        raise ConfigError(
            "the tokenizer has no special tokens (added_tokens of its tokenizer.json is empty), "
            f"and a template of conversations writes such tokens. {advice}"
        )
    # The template writes special tokens as text.
    tokenizer.backend.encode_special_tokens = False
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special)
