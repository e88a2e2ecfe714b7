"""A model that computes the logits of the next tokens of several sequences.

Invariant: the logits of a sequence do not depend on the other sequences. The prompts are computed
in groups of equal length, so that none is padded.

All ranks that hold the model call each method together. Only the last pipeline rank gets logits.
The others get None. Each rank keeps the keys and values of its own layers.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.extras.training.generate.staged_model import StagedModel
from megatron.extras.training.generate.token_positions import TokenPositions
from megatron.model.inputs import Inputs
from megatron.model.key_value_cache import KeyValueCache


class CachedModel:
    """A model with the keys and values of a batch of sequences."""

    def __init__(
        self, model: StagedModel, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> None:
        """Prepare a cache.

        Args:
            model: The model.
            prompts: The ids of each prompt, at least one for each.
            new_tokens: Largest number of tokens that are added to a prompt.
        """
        self._model = model
        self._prompts = prompts
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self._used = int(lengths.max())
        slots = self._used + new_tokens
        self._cache = KeyValueCache(len(prompts), slots)
        self._positions = TokenPositions(
            model.shape, model.tp, lengths.to(model.device), slots, model.dtype
        )

    def read_prompts(self) -> Tensor | None:
        """Compute all prompts, and return the logits of the tokens after them, [b, v] in fp32."""
        groups: dict[int, list[int]] = {}
        for row, prompt in enumerate(self._prompts):
            groups.setdefault(len(prompt), []).append(row)
        # Each stage computes a group while the next stage computes the group before it.
        found = [self._read_group(length, rows) for length, rows in groups.items()]
        parts = [logits for logits in found if logits is not None]
        if not parts:
            return None
        # The rows are in the order of the groups, and then sorted.
        order = torch.tensor([row for rows in groups.values() for row in rows])
        return torch.cat(parts)[order.argsort().to(self._model.device)]

    def _read_group(self, length: int, rows: list[int]) -> Tensor | None:
        """Compute prompts of equal length, and return their logits, [rows, v]."""
        device = self._model.device
        ids = [list(self._prompts[row]) for row in rows]
        inputs = Inputs(torch.tensor(ids, device=device))
        self._cache.expect_prompts(torch.tensor(rows, device=device), start=self._used - length)
        tables = self._model.stage.position_tables
        positions = replace(tables.make_positions(inputs, self._model.dtype), cache=self._cache)
        return self._compute_logits(self._model.run_blocks(inputs, positions))

    def add_tokens(self, tokens: Tensor) -> Tensor | None:
        """Add a token to each sequence, [b], and return the logits of the next ones, [b, v]."""
        slot = self._used
        self._used += 1
        self._cache.expect_token(slot)
        inputs = Inputs(tokens.unsqueeze(1), position_ids=self._positions.make_position_ids(slot))
        positions = self._positions.make_positions(slot, self._cache)
        return self._compute_logits(self._model.run_blocks(inputs, positions))

    def keep(self, rows: Tensor) -> None:
        """Remove all sequences but those with the indices `rows`."""
        self._cache.keep(rows)
        self._positions.keep(rows)

    def _compute_logits(self, stream: Tensor | None) -> Tensor | None:
        """Return the logits after the last token of the residual stream, [s, b, h] -> [b, v]."""
        if stream is None:
            return None
        return self._model.compute_logits(stream[-1:])[0]
