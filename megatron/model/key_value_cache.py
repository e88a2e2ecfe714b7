"""The keys and values of tokens that were computed before, for text generation.

A layer with a recurrent state stores that in their place.

The slots of a sequence are aligned at its end: the last token of each sequence is in the same slot.
A shorter sequence leaves its first slots empty, and a bias hides them. Distances between tokens are
then distances between slots, in every sequence.

b: sequences, n: heads, g: query groups, d: head width, c: slots, t: tensor-parallel size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class KeyValueCache:
    """The keys and values of all layers of a stage."""

    def __init__(self, sequences: int, slots: int) -> None:
        """Create a cache. Its memory is allocated when the first keys are stored.

        Args:
            sequences: Number of sequences, b.
            slots: Largest number of tokens of a sequence, c.
        """
        self._sequences = sequences
        self._slots = slots
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._rows: Tensor | None = None
        self._start = 0

    def expect_prompts(self, rows: Tensor, start: int) -> None:
        """Store the tokens of the next forward pass as the first ones of some sequences.

        Args:
            rows: Indices of the sequences.
            start: Slot of their first token.
        """
        self._rows = rows
        self._start = start

    def expect_token(self, slot: int) -> None:
        """Store the tokens of the next forward pass as the next ones of all sequences.

        Args:
            slot: Slot of the tokens. All slots before it are used.
        """
        self._rows = None
        self._start = slot

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store keys and values, and return those that the queries of the same tokens attend to.

        Args:
            layer: Number of the layer in the complete model.
            new: Keys and values, or what the layer computes them from, [b, g/t, s, width] each,
                with s = 1 after the prompts.

        Returns:
            Those of the prompts themselves, or of all tokens up to the new ones.
        """
        if layer not in self._layers:
            # Unused slots must be finite: a hidden value is multiplied by 0.
            self._layers[layer] = tuple(
                x.new_zeros(self._sequences, x.shape[1], self._slots, x.shape[3]) for x in new
            )
        stored = self._layers[layer]
        end = self._start + new[0].shape[2]
        rows: slice | Tensor = slice(None)
        if self._rows is not None:
            rows = self._rows
        for each, x in zip(stored, new, strict=True):
            each[rows, :, self._start : end] = x
        if self._rows is not None:
            return new
        return tuple(each[:, :, :end] for each in stored)

    def read_state(self, layer: int) -> tuple[Tensor, ...] | None:
        """Return what a layer keeps of all tokens so far, [b, ...] each. Prompts have None."""
        if self._rows is not None:
            return None
        return self._states[layer]

    def write_state(self, layer: int, state: tuple[Tensor, ...]) -> None:
        """Store what a layer keeps of the tokens up to these ones.

        Args:
            layer: Number of the layer in the complete model.
            state: [b, ...] each, for the sequences of this forward pass.
        """
        if self._rows is None:
            self._states[layer] = state
            return
        if layer not in self._states:
            size = self._sequences
            self._states[layer] = tuple(x.new_zeros(size, *x.shape[1:]) for x in state)
        # Prompts of equal length are read together, so a pass has some of the sequences.
        for stored, new in zip(self._states[layer], state, strict=True):
            stored[self._rows] = new

    def keep(self, rows: Tensor) -> None:
        """Remove all sequences but those with the indices `rows`."""
        self._sequences = len(rows)
        for layer, stored in self._layers.items():
            self._layers[layer] = tuple(x[rows] for x in stored)
        for layer, state in self._states.items():
            self._states[layer] = tuple(x[rows] for x in state)


def attend_with_new_token(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None = None
) -> Tensor:
    """Compute attention of the newest token of each sequence to all of its tokens.

    Args:
        query: [b, n/t, 1, d].
        key: [b, g/t, c, d].
        value: [b, g/t, c, width of a value].
        bias: [1 or b, 1 or n/t, 1, c], or None.
        scale: Factor on the logits. Default: 1 / sqrt(d).

    Returns:
        The context, [b, n/t, 1, width of a value].
    """
    b, heads, _, width = query.shape
    groups = key.shape[1]
    # The queries of a group attend to the same keys. As a sequence of queries they need no copy of
    # the keys for each head.
    if bias is not None and bias.shape[1] > 1:
        bias = bias.reshape(bias.shape[0], groups, heads // groups, bias.shape[3])
    context = F.scaled_dot_product_attention(
        *(query.reshape(b, groups, heads // groups, width), key, value),
        attn_mask=bias,
        scale=scale,
    )
    return context.reshape(b, heads, 1, value.shape[3])


def make_slot_bias(lengths: Tensor, slots: int, dtype: torch.dtype) -> Tensor | None:
    """Return the bias that hides the empty slots at the start of shorter sequences.

    Args:
        lengths: Tokens of each sequence in the first `lengths.max()` slots, [b].
        slots: Number of slots, c.
        dtype: Dtype of the activations.

    Returns:
        0 or -inf, [b, 1, 1, c]. None if all sequences have the same length.
    """
    empty = lengths.max() - lengths
    if not bool(empty.any()):
        return None
    hidden = torch.arange(slots, device=lengths.device) < empty.unsqueeze(1)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=lengths.device)
    return bias.masked_fill_(hidden, float("-inf"))[:, None, None]
