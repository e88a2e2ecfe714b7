"""Questions to a model, put into its chat template."""

from collections.abc import Sequence

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.extras.samples.chat.template import (
    load_chat_template,
    read_special_tokens,
    remove_tags,
)
from megatron.tokenizer.build import Tokenizer


class ChatSession:
    """Makes prompts of questions. With a history, each follows the earlier turns."""

    def __init__(
        self, config: TokenizerConfig, tokenizer: Tokenizer, file: str | None, *, history: bool
    ) -> None:
        """Load the template, and let texts have special tokens.

        Args:
            config: Settings of the tokenizer.
            tokenizer: The tokenizer. A text that spells a special token has it from now on.
            file: The template. None: the tokenizer's own.
            history: Whether questions belong together.

        Raises:
            ConfigError: There is no template, or the tokenizer has no special tokens.
        """
        # A prompt has the special tokens of its template.
        read_special_tokens(tokenizer)
        self._template = load_chat_template(config, file)
        self._history = history
        self._messages: list[dict[str, str]] = []

    @property
    def stop(self) -> tuple[str, ...]:
        """The text that ends an answer, or nothing if only the end of a document does."""
        # A template may end the text after the turn. A turn ends at its first line.
        end = self._template.probe.after.strip().partition("\n")[0]
        return tuple(filter(None, [end]))

    def make_prompts(self, questions: Sequence[str]) -> list[str]:
        """Return the prompt of each question.

        Raises:
            ConfigError: The template refuses one.
        """
        try:
            return [
                remove_tags(self._template.render([*self._messages, ask(question)], prompt=True))
                for question in questions
            ]
        except DataError as error:
            raise ConfigError(str(error)) from error

    def keep(self, question: str, answer: str) -> None:
        """Remember an answer, if there is a history."""
        # The prompts of a file are independent questions.
        if self._history:
            self._messages += [ask(question), {"role": "assistant", "content": answer}]


def ask(question: str) -> dict[str, str]:
    """Return the message of a question."""
    return {"role": "user", "content": question}
