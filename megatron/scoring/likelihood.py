"""Log-likelihoods of token sequences, computed in batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.parallel.collectives import all_gather

Continuation = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, at least one, and ids that follow it."""


@dataclass(frozen=True)
class Likelihood:
    """How likely a continuation is."""

    log_likelihood: float
    """Sum over the tokens of the continuation, in nats."""
    greedy: bool
    """Whether each of its tokens is the most likely one."""


@dataclass(frozen=True)
class TextLoss:
    """The loss of a text."""

    tokens: int
    bytes: int
    """Length of the text in UTF-8."""
    nats: float
    """Sum over all tokens of -log(probability)."""

    @property
    def loss(self) -> float:
        """Mean over the tokens, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Loss that does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.bytes


class Scorer:
    """Computes likelihoods with a model. Under tensor parallelism, all ranks call each method."""

    def __init__(self, model: GPT, batch_size: int) -> None:
        """Remember the model, which is in evaluation mode and has all layers.

        Args:
            model: The model, or this rank's part of it.
            batch_size: Sequences that are computed together.
        """
        self._model = model
        self._batch_size = batch_size
        self._device = next(model.parameters()).device
        self.context = model.shape.config.seq_length
        """Largest number of tokens of an input."""

    def score(
        self,
        requests: Sequence[Continuation],
        on_batch: Callable[[int], None] = lambda count: None,
    ) -> list[Likelihood]:
        """Return the likelihood of each continuation after its context.

        If both are longer than the model's context, the first tokens are left out.

        Args:
            requests: Contexts and continuations. A continuation has 1 to `context` tokens.
            on_batch: Receives the number of requests that were computed.
        """
        # Sequences of similar length are computed together, so that little is padded. The longest
        # come first, so that a lack of memory shows at the start.
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
        results: dict[int, Likelihood] = {}
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            batch = [requests[i] for i in chosen]
            results |= dict(zip(chosen, self._score_batch(batch), strict=True))
            on_batch(len(chosen))
        return [results[i] for i in range(len(requests))]

    def measure_text(self, tokens: Sequence[int], text: str, first: int) -> TextLoss:
        """Return the loss of a text, in windows of the model's context.

        Args:
            tokens: The ids of the text.
            text: The text.
            first: Id before the text, usually the end of a document.
        """
        windows = list(iterate_windows(tokens, first, self.context))
        nats = -sum(found.log_likelihood for found in self.score(windows))
        return TextLoss(len(tokens), len(text.encode()), nats)

    def _score_batch(self, batch: Sequence[Continuation]) -> list[Likelihood]:
        # The last token of a continuation is predicted, and is no input.
        inputs = [[*context, *following][-(self.context + 1) : -1] for context, following in batch]
        longest = max(map(len, inputs))
        # Later tokens do not influence earlier ones, so any padding on the right does.
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in inputs])
        with torch.no_grad():
            logits = self._compute_logits(padded.to(self._device))
        found = []
        for row, (ids, (_, following)) in enumerate(zip(inputs, batch, strict=True)):
            predicted = logits[row, len(ids) - len(following) : len(ids)].float().log_softmax(-1)
            wanted = torch.tensor(list(following), device=self._device)
            each = predicted.gather(-1, wanted[:, None]).squeeze(-1)
            greedy = bool((predicted.argmax(-1) == wanted).all())
            found.append(Likelihood(float(each.double().sum()), greedy))
        return found

    def _compute_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of all ids, [b, s, v]."""
        logits = self._model.compute_logits(tokens)
        tp = self._model.tp
        if tp.size == 1:
            return logits
        # The last ranks may have fewer real ids, and a gather needs equal shapes.
        shape = self._model.shape
        padding = shape.padded_vocab_size // tp.size - logits.shape[-1]
        padded = torch.nn.functional.pad(logits, (0, padding)).movedim(-1, 0)
        return all_gather(padded.contiguous(), tp)[: shape.vocab_size].movedim(0, -1)


def iterate_windows(
    tokens: Sequence[int], first: int, context: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield contexts and continuations that cover each token of a text once.

    The first token follows `first`. Each window has as much of the text before it as fits, as in
    lm-evaluation-harness.

    Args:
        tokens: The ids of the text.
        first: Id before the text.
        context: Largest number of tokens of an input.
    """
    for start in range(0, len(tokens), context):
        end = min(start + context, len(tokens))
        if start == 0:
            before = [first]
        else:
            before = list(tokens[end - context - 1 : start])
        yield before, list(tokens[start:end])
