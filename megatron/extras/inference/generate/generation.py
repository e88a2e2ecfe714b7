"""Generation of text for a batch of prompts, also piece by piece while the tokens arrive.

Invariant: the returned pieces together are the text of the continuation up to its first stop
string. A piece never ends within a character, and never has a part of a stop string.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.extras.inference.generate.cached_model import CachedModel
from megatron.extras.inference.generate.sampling import Sampler, SamplingOptions
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.tokenizer.build import Tokenizer

_REPLACEMENT = "\ufffd"
"""What decoders give for the bytes of an incomplete character."""
_CONTEXT = 6
"""Tokens before the continuation that are decoded with it. Some decoders remove the space at the
start of a text."""


class IncrementalText:
    """The text of one continuation."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
    ) -> None:
        """Start after a prompt.

        Args:
            decode: Returns the text of ids.
            prompt: The ids of the prompt.
            stop_strings: Strings that end the continuation. They are not part of its text.
        """
        self._decode = decode
        self._stop_strings = stop_strings
        # The ids that are decoded together, and how many of them have been returned as text.
        self._ids = list(prompt[-_CONTEXT:])
        self._returned = len(self._ids)
        # Text that may be the beginning of a stop string.
        self._held = ""
        self.stopped = False
        """Whether a stop string was found."""

    def add(self, token: int) -> str:
        """Add a token and return the text that is certain now."""
        self._ids.append(token)
        text = self._take_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._forget_returned()
        return self._cut_at_stop_string(text)

    def finish(self) -> str:
        """Return the rest of the text, which no further token can change."""
        if self.stopped:
            return ""
        text = self._cut_at_stop_string(self._take_text())
        self._forget_returned()
        if self.stopped:
            return text
        return text + self._held

    def _take_text(self) -> str:
        """Return the text of the tokens that were not returned yet."""
        before = self._decode(self._ids[: self._returned])
        return self._decode(self._ids)[len(before) :]

    def _forget_returned(self) -> None:
        """Keep only the tokens of the last piece, as the context of the next one."""
        self._ids = self._ids[self._returned :]
        self._returned = len(self._ids)

    def _cut_at_stop_string(self, text: str) -> str:
        """Return the text before a stop string, and hold back what may be the beginning of one."""
        text = self._held + text
        found = [text.find(stop) for stop in self._stop_strings if stop in text]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = max((_count_beginning(text, stop) for stop in self._stop_strings), default=0)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]


def _count_beginning(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop string."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


END_OF_DOCUMENT = "end-of-document"
STOP_STRING = "stop-string"
MAX_NEW_TOKENS = "max-new-tokens"
CONTEXT_LENGTH = "context-length"


@dataclass(frozen=True)
class GenerationOptions:
    """What to generate."""

    max_new_tokens: int
    """Largest number of tokens that are added to a prompt."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop_strings: tuple[str, ...] = ()
    """Strings that end a text. They are not part of it."""


@dataclass
class Continuation:
    """What was generated for a prompt."""

    ids: list[int]
    """The new tokens, without the end of the document."""
    text: str
    """Their text up to the stop string."""
    reason: str = ""
    """Why it ended: one of the constants of this module."""


def check_prompt(prompt: Sequence[int], model: StagedModel, name: str) -> None:
    """Check that a prompt has tokens, and that the model can continue it.

    Raises:
        ConfigError: It does not. The message starts with `name`.
    """
    context = model.shape.config.seq_length
    if not prompt:
        raise ConfigError(f"{name} is empty; give some text to continue")
    if len(prompt) >= context:
        raise ConfigError(
            f"{name} has {len(prompt)} tokens, and the model has a context of {context} tokens "
            "(--seq-length of the training) for prompt and continuation; give a shorter one"
        )


def generate(
    model: StagedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    on_text: Callable[[int, str], None] = lambda index, text: None,
) -> list[Continuation]:
    """Continue each prompt.

    All ranks that hold the model call it with the same arguments and get the same result.

    Args:
        model: The model.
        tokenizer: The tokenizer of the training.
        prompts: The ids of each prompt. `check_prompt` accepts them.
        options: What to generate.
        on_text: Gets the index of a prompt and the next piece of its continuation.
    """
    # No cache and no pass through the model is needed. An evaluation may ask for it.
    if options.max_new_tokens == 0:
        return [Continuation([], "", MAX_NEW_TOKENS) for _ in prompts]
    with torch.no_grad():
        return _Batch(model, tokenizer, prompts, options, on_text).run()


class _Batch:
    """The sequences that are generated together."""

    def __init__(
        self,
        model: StagedModel,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        on_text: Callable[[int, str], None],
    ) -> None:
        self._model = model
        self._eod = tokenizer.eod
        self._prompts = prompts
        self._on_text = on_text
        context = model.shape.config.seq_length
        self._limits = [min(options.max_new_tokens, context - len(prompt)) for prompt in prompts]
        self._limit_reasons = [
            MAX_NEW_TOKENS if limit == options.max_new_tokens else CONTEXT_LENGTH
            for limit in self._limits
        ]
        self._cached = CachedModel(model, prompts, max(self._limits))
        self._device = model.device
        self._sampler = Sampler(options.sampling, prompts, self._device)
        self._texts = [
            IncrementalText(tokenizer.decode, prompt, options.stop_strings) for prompt in prompts
        ]
        self._results = [Continuation([], "") for _ in prompts]

    def run(self) -> list[Continuation]:
        """Generate until all sequences have ended."""
        logits = self._cached.read_prompts()
        active = list(range(len(self._prompts)))
        while True:
            tokens = self._draw(logits, active)
            remaining = [
                place
                for place, (row, token) in enumerate(zip(active, tokens.tolist(), strict=True))
                if not self._add(row, token)
            ]
            if not remaining:
                return self._results
            # The others go on without the sequences that have ended.
            if len(remaining) < len(active):
                kept = torch.tensor(remaining, device=self._device)
                tokens = tokens[kept]
                self._cached.keep(kept)
                active = [active[place] for place in remaining]
            logits = self._cached.add_tokens(tokens)

    def _draw(self, logits: Tensor | None, active: list[int]) -> Tensor:
        """Return the next token of each active sequence, [b].

        Args:
            logits: [b, v] on the last pipeline rank, which draws for all. None on the others.
            active: Indices of the sequences.
        """
        if logits is None:
            tokens = torch.empty(len(active), dtype=torch.int64, device=self._device)
        else:
            texts = [[*self._prompts[row], *self._results[row].ids] for row in active]
            tokens = self._sampler.draw(logits, active, texts)
        return self._model.broadcast_result(tokens)

    def _add(self, row: int, token: int) -> bool:
        """Add a token to a sequence and return whether the sequence has ended."""
        result = self._results[row]
        text = self._texts[row]
        if token == self._eod:
            result.reason = END_OF_DOCUMENT
        else:
            result.ids.append(token)
            self._emit(row, text.add(token))
            if text.stopped:
                result.reason = STOP_STRING
            # A stop string that ends with the last token is the reason, not the limit.
            elif len(result.ids) == self._limits[row]:
                result.reason = self._limit_reasons[row]
        if not result.reason:
            return False
        self._emit(row, text.finish())
        # The last tokens may complete a stop string only now.
        if text.stopped:
            result.reason = STOP_STRING
        return True

    def _emit(self, row: int, text: str) -> None:
        if text:
            self._results[row].text += text
            self._on_text(row, text)
