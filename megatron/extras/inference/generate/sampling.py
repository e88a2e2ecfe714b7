"""The choice of the next token from its logits.

The options have the meaning that they have in `transformers`, and apply in the same order.

b: sequences, v: vocabulary.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.plan.rules.finding import Finding, error

_BOUND = 2**63
"""Torch stores seeds and sizes in 64 bits, one of them for the sign."""
_LEAST = 1e-6
"""Logits that are divided by a smaller number could overflow in fp32."""


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. The default is the most likely token."""

    temperature: float = 0.0
    """Divides the logits. 0 takes the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to choose from. 0 means all."""
    top_p: float = 1.0
    """Choose from the most likely tokens that have this probability together
    (https://arxiv.org/abs/1904.09751)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the text has already, and multiplies the negative
    ones (https://arxiv.org/abs/1909.05858)."""
    seed: int = 1234


def check_sampling(options: SamplingOptions) -> Iterator[Finding]:
    """Check that each number is in its range."""
    # NaN fails these comparisons as well.
    if not (options.temperature == 0 or _LEAST <= options.temperature < math.inf):
        yield error(
            f"--temperature {options.temperature} must be 0, or at least {_LEAST:g} and finite. 0 "
            "takes the most likely token."
        )
    if not 0 < options.top_p <= 1:
        yield error(f"--top-p {options.top_p} must be above 0, and at most 1.")
    if not _LEAST <= options.repetition_penalty <= 1 / _LEAST:
        yield error(
            f"--repetition-penalty {options.repetition_penalty} must be from {_LEAST:g} to "
            f"{1 / _LEAST:g}. 1 has no effect."
        )
    for flag, value in (("--top-k", options.top_k), ("--seed", options.seed)):
        if not 0 <= value < _BOUND:
            yield error(f"{flag} {value} must be at least 0 and below {_BOUND}.")


def filter_logits(
    logits: Tensor, options: SamplingOptions, texts: Sequence[Sequence[int]]
) -> Tensor:
    """Return logits whose softmax is the distribution to draw from.

    Args:
        logits: [b, v] in fp32.
        options: How the next token is chosen.
        texts: The ids of each prompt and its continuation.

    Returns:
        [b, v], with -inf for tokens that are not drawn.
    """
    if options.repetition_penalty != 1:
        logits = _penalize(logits, options.repetition_penalty, texts)
    if options.temperature == 0:
        return logits
    logits = logits / options.temperature
    if 0 < options.top_k < logits.shape[1]:
        least = logits.topk(options.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if options.top_p < 1:
        ascending, order = logits.sort()
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - options.top_p
        # The most likely token remains, however small `top_p` is.
        unlikely[:, -1] = False
        logits = logits.masked_fill(unlikely.scatter(1, order, unlikely), float("-inf"))
    return logits


def _penalize(logits: Tensor, penalty: float, texts: Sequence[Sequence[int]]) -> Tensor:
    """Make the tokens that each text has already less likely."""
    logits = logits.clone()
    for row, text in zip(logits, texts, strict=True):
        used = torch.tensor(sorted(set(text)), device=logits.device)
        found = row[used]
        row[used] = torch.where(found < 0, found * penalty, found / penalty)
    return logits


def _derive_seed(seed: int, prompt: Sequence[int]) -> int:
    """Return the seed of a prompt, from 0 to 2^63 - 1."""
    digest = hashlib.blake2b(f"{seed} {list(prompt)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class Sampler:
    """Chooses the next tokens. Each sequence has its own random numbers.

    They depend on the seed and on the sequence's prompt, and not on the other prompts.
    """

    def __init__(
        self, options: SamplingOptions, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """Seed a generator for each sequence.

        Args:
            options: How tokens are chosen.
            prompts: The ids of each prompt.
            device: Device of the logits.
        """
        self._options = options
        self._generators = [
            torch.Generator(device).manual_seed(_derive_seed(options.seed, prompt))
            for prompt in prompts
        ]

    def draw(self, logits: Tensor, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Return a token id for each of some sequences, [b].

        Args:
            logits: [b, v] in fp32.
            rows: Indices of the sequences.
            texts: The ids of each sequence up to now.

        Raises:
            ConfigError: A logit is not finite. Any choice would be meaningless.
        """
        if not bool(logits.isfinite().all()):
            raise ConfigError(
                "the model computes logits that are not finite, because a number is too large for "
                "--dtype; use --dtype fp32, or bf16"
            )
        logits = filter_logits(logits, self._options, texts)
        # Division by 0 would make every probability NaN.
        if self._options.temperature == 0:
            return logits.argmax(-1)
        drawn = [
            torch.multinomial(probabilities, 1, generator=self._generators[row])
            for probabilities, row in zip(logits.softmax(-1), rows, strict=True)
        ]
        return torch.cat(drawn)
