"""Log-likelihoods of token sequences, computed in batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.generate.staged_model import StagedModel
from megatron.model.inputs import Inputs

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
    """Computes likelihoods with a model.

    All ranks that hold the model call each method together, and get the same results.
    """

    def __init__(self, model: StagedModel, batch_size: int) -> None:
        """Remember the model.

        Args:
            model: The model.
            batch_size: Sequences that are computed together.
        """
        self._model = model
        self._batch_size = batch_size
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
            on_batch: Receives the number of requests that this rank's stage has computed.

        Raises:
            ConfigError: A continuation is longer than the context. Nothing was computed.
        """
        longest = max((len(following) for _, following in requests), default=0)
        if longest > self.context:
            raise ConfigError(
                f"a text to score has {longest} tokens, and the model has a context of "
                f"{self.context} tokens (--seq-length of the training); leave its task out"
            )
        # Sequences of similar length are computed together, so that little is padded. The longest
        # come first, so that a lack of memory shows at the start.
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
        # Per request, the log-likelihood and 1 if it is greedy. On a rank without logits they stay
        # 0 until the end, so that no stage waits for the last one after each batch.
        found = torch.zeros((len(requests), 2), dtype=torch.float64, device=self._model.device)
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            scored = self._score_batch([requests[i] for i in chosen])
            if scored is not None:
                found[chosen] = scored
            on_batch(len(chosen))
        if requests:
            self._model.broadcast_result(found)
        return [Likelihood(value, bool(greedy)) for value, greedy in found.tolist()]

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

    def _score_batch(self, batch: Sequence[Continuation]) -> Tensor | None:
        """Return log-likelihood and greediness of each request, [b, 2] in fp64.

        It is None on all pipeline ranks but the last.
        """
        # The last token of a continuation is predicted, and is no input.
        inputs = [[*context, *following][-(self.context + 1) : -1] for context, following in batch]
        longest = max(map(len, inputs))
        # Later tokens do not influence earlier ones, so any padding on the right does.
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in inputs])
        device = self._model.device
        with torch.no_grad():
            stream = self._model.run_blocks(Inputs(padded.to(device)))
            if stream is None:
                return None
            logits = self._model.compute_logits(stream).transpose(0, 1)
        found = []
        for row, (ids, (_, following)) in enumerate(zip(inputs, batch, strict=True)):
            predicted = logits[row, len(ids) - len(following) : len(ids)].log_softmax(-1)
            wanted = torch.tensor(list(following), device=device)
            each = predicted.gather(-1, wanted[:, None]).squeeze(-1)
            greedy = (predicted.argmax(-1) == wanted).all()
            found.append(torch.stack([each.double().sum(), greedy.double()]))
        return torch.stack(found)


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
