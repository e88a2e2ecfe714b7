"""A model that computes the logits of the next tokens of several sequences.

Invariant: the logits of a sequence do not depend on the other sequences. The prompts are computed
in groups of equal length, so that none is padded.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.generate.token_positions import TokenPositions
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.model.key_value_cache import KeyValueCache
from megatron.parallel.collectives import all_gather


class CachedModel:
    """A model in evaluation mode, with the keys and values of a batch of sequences."""

    def __init__(self, model: GPT, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Prepare a cache.

        Args:
            model: The complete model, or this rank's part of it under tensor parallelism.
            prompts: The ids of each prompt, at least one for each.
            new_tokens: Largest number of tokens that are added to a prompt.
        """
        self._model = model
        self._prompts = prompts
        parameter = next(model.parameters())
        self._device = parameter.device
        self._dtype = parameter.dtype
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self._used = int(lengths.max())
        slots = self._used + new_tokens
        self._cache = KeyValueCache(len(prompts), slots)
        self._positions = TokenPositions(
            model.shape, model.tp, lengths.to(self._device), slots, self._dtype
        )

    def read_prompts(self) -> Tensor:
        """Compute all prompts, and return the logits of the tokens after them, [b, v] in fp32."""
        groups: dict[int, list[int]] = {}
        for row, prompt in enumerate(self._prompts):
            groups.setdefault(len(prompt), []).append(row)
        # The rows are returned in the order of the groups, and then sorted.
        parts = [self._read_group(length, rows) for length, rows in groups.items()]
        order = torch.tensor([row for rows in groups.values() for row in rows])
        return torch.cat(parts)[order.argsort().to(self._device)]

    def _read_group(self, length: int, rows: list[int]) -> Tensor:
        """Compute prompts of equal length, and return their logits, [rows, v]."""
        ids = [list(self._prompts[row]) for row in rows]
        inputs = Inputs(torch.tensor(ids, device=self._device))
        self._cache.expect_prompts(
            torch.tensor(rows, device=self._device), start=self._used - length
        )
        positions = self._model.position_tables.make_positions(inputs, self._dtype)
        stream = self._model.run_blocks(None, inputs, replace(positions, cache=self._cache))
        return self._compute_logits(stream)

    def add_tokens(self, tokens: Tensor) -> Tensor:
        """Add a token to each sequence, [b], and return the logits of the next ones, [b, v]."""
        slot = self._used
        self._used += 1
        self._cache.expect_token(slot)
        inputs = Inputs(tokens.unsqueeze(1), position_ids=self._positions.make_position_ids(slot))
        positions = self._positions.make_positions(slot, self._cache)
        return self._compute_logits(self._model.run_blocks(None, inputs, positions))

    def keep(self, rows: Tensor) -> None:
        """Remove all sequences but those with the indices `rows`."""
        self._cache.keep(rows)
        self._positions.keep(rows)

    def _compute_logits(self, stream: Tensor) -> Tensor:
        """Return the logits after the last token of the residual stream, [s, b, h] -> [b, v]."""
        logits = self._model.project_to_logits(stream[-1:])[0]
        tp = self._model.tp
        if tp.size == 1:
            return logits
        # The last ranks may have fewer real ids, and a gather needs equal shapes.
        shape = self._model.shape
        padding = shape.padded_vocab_size // tp.size - logits.shape[1]
        gathered = all_gather(torch.nn.functional.pad(logits, (0, padding)).t(), tp)
        return gathered[: shape.vocab_size].t()
