"""The positions of one new token of each sequence, after the tokens in a key-value cache.

b: sequences, n: heads, c: slots of the cache, t: tensor-parallel size.
"""

from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

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
        match config.position_embedding_type:
            case "absolute":
                # The embedding has the table.
                pass
            case "rotary":
                self._rotary = make_scaled_rotary_table(slots, shape, device)
            case "alibi":
                local = config.num_attention_heads // tp.size
                slopes = compute_alibi_slopes(config.num_attention_heads)
                own = torch.tensor(slopes[tp.rank * local : (tp.rank + 1) * local], device=device)
                self._alibi = (own.view(1, -1, 1, 1) * distance).to(dtype)
            case _:
                assert_never(config.position_embedding_type)
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
