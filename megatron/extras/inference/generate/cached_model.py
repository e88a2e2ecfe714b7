"""A model that computes the logits of the next tokens of several sequences.

Invariant: the logits of a sequence do not depend on the other sequences. The prompts are computed
in groups of equal length, so that none is padded.

All ranks that hold the model call each method together. Only the last pipeline rank gets logits.
The others get None. Each rank keeps the keys and values of its own layers.

b: sequences, n: heads, c: slots of the key-value cache, t: tensor-parallel size.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.model.inputs import Inputs
from megatron.model.key_value_cache import KeyValueCache, make_slot_bias
from megatron.model.positions import (
    Positions,
    compute_alibi_slopes,
    make_scaled_rotary_table,
)
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel


class TokenPositions:
    """Builder of `Positions` for new tokens. Its tables are made once for a batch of sequences."""

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        lengths: Tensor,
        slots: int,
        dtype: torch.dtype,
    ) -> None:
        """Make the tables.

        Args:
            shape: Sizes of the model.
            tp: The tensor-parallel ranks.
            lengths: Tokens of each prompt, [b]. The last token of each is in the same slot.
            slots: Number of slots, c.
            dtype: Dtype of the activations.
        """
        config = shape.config
        device = lengths.device
        self._empty = lengths.max() - lengths
        self._slots = slots
        self._slot_bias = make_slot_bias(lengths, slots, dtype)
        # Distances of the keys from a query in the last slot. For an earlier query they are the
        # last ones of this row.
        distance = torch.arange(slots, device=device) - (slots - 1)
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._alibi: Tensor | None = None
        # The embedding has the table of learned positions.
        if shape.rotary_dim:
            self._rotary = make_scaled_rotary_table(slots, shape, device)
        if shape.has_alibi:
            local = config.num_attention_heads // tp.size
            slopes = compute_alibi_slopes(config.num_attention_heads)
            own = torch.tensor(slopes[tp.rank * local : (tp.rank + 1) * local], device=device)
            self._alibi = (own.view(1, -1, 1, 1) * distance).to(dtype)
        self._window: Tensor | None = None
        if config.sliding_window is not None:
            window = torch.zeros(slots, dtype=dtype, device=device)
            window.masked_fill_(distance <= -config.sliding_window, float("-inf"))
            self._window = window.view(1, 1, 1, slots)

    def make_position_ids(self, slot: int) -> Tensor:
        """Return the position of each sequence's token in a slot, [b, 1]."""
        return (slot - self._empty).unsqueeze(1)

    def make_positions(self, slot: int, cache: KeyValueCache) -> Positions:
        """Return the positions of the tokens in a slot, which attend to all slots up to it."""
        end = slot + 1
        positions = Positions(cache=cache)
        if self._rotary is not None:
            cos, sin = (table[slot - self._empty].transpose(0, 1) for table in self._rotary)
            positions = replace(positions, cos=cos, sin=sin)
        bias = None
        if self._slot_bias is not None:
            bias = self._slot_bias[..., :end]
        bias = _add(bias, self._alibi, end)
        return replace(positions, bias=bias, window_bias=_add(bias, self._window, end))

    def keep(self, rows: Tensor) -> None:
        """Remove all sequences but those with the indices `rows`."""
        self._empty = self._empty[rows]
        if self._slot_bias is not None:
            self._slot_bias = self._slot_bias[rows]


def _add(bias: Tensor | None, table: Tensor | None, end: int) -> Tensor | None:
    """Add the last `end` entries of a table to a bias. None stands for zeros."""
    if table is None:
        return bias
    last = table[..., table.shape[-1] - end :]
    if bias is None:
        return last
    return bias + last


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
