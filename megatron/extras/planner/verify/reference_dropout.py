"""Dropout of the reference: the masks of the copy's layout, drawn in one process.

A mask belongs to a microbatch, a data-parallel rank and, where activations are sharded, a
tensor-parallel rank (`parallel/rng.py`). The reference has the complete activation. It draws the
mask of each slice with the key of the rank that holds the slice in the copy.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.attention import SelfAttention
from megatron.model.attention_core import attend, attend_by_document
from megatron.model.gpt import GPT
from megatron.model.positions import Positions
from megatron.parallel.rng import mix
from megatron.plan.run_plan import Plan


def list_microbatches(plan: Plan, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield the number, the data-parallel rank and the samples of each microbatch of a batch.

    Args:
        plan: The plan of the copy.
        size: Samples of the batch.
    """
    micro = plan.config.batch.micro_batch_size
    for number, start in enumerate(range(0, size, micro)):
        microbatch, data = divmod(number, plan.data_parallel_size)
        yield microbatch, data, slice(start, start + micro)


class LayoutMasks:
    """Draws the masks of a layout.

    Set `iteration`, and `size`, the samples of the batch, before a step.
    """

    def __init__(self, plan: Plan) -> None:
        """Create the masks of a copy's plan."""
        self._plan = plan
        self.iteration = 0
        self.size = 0

    def _seed(self, site: int, microbatch: int, data: int, tensor: int) -> None:
        key = (self._plan.config.batch.seed, self.iteration, microbatch, site, data, tensor)
        torch.default_generator.manual_seed(mix(*key) & 0xFFFFFFFF)

    def drop(self, x: Tensor, p: float, site: int) -> Tensor:
        """Apply the dropout of the residual stream, [s, B, h]."""
        parallel = self._plan.config.parallel
        # Without sequence parallelism, all tensor-parallel ranks draw the same mask.
        parts = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        mask = torch.empty_like(x)
        for microbatch, data, samples in list_microbatches(self._plan, self.size):
            for rank, part in enumerate(mask[:, samples].chunk(parts)):
                # The key 0 is for activations that all tensor-parallel ranks hold.
                self._seed(site, microbatch, data, rank + 1 if parts > 1 else 0)
                # The shape is that of the rank's slice. Another one would give other numbers.
                part.copy_(F.dropout(torch.ones(part.shape), p))
        return x * mask

    def attend(
        self,
        attention: SelfAttention,
        p: float,
        site: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Positions,
        _: object,
    ) -> Tensor:
        """Return attention [B, n, s, d], computed for each slice with the mask of its rank."""
        bias = attention._select_bias(positions)
        documents = positions.documents
        tensor_size = self._plan.config.parallel.tensor_model_parallel_size
        # Attention is always sharded by heads.
        heads = query.shape[1] // tensor_size
        groups = key.shape[1]
        out = []
        for microbatch, data, samples in list_microbatches(self._plan, self.size):
            row = []
            for rank in range(tensor_size):
                # Ranks share a group if there are fewer groups than ranks.
                first = rank * groups // tensor_size
                own = slice(first, max((rank + 1) * groups // tensor_size, first + 1))
                part = slice(rank * heads, (rank + 1) * heads)
                local_bias = bias
                if bias is not None and bias.shape[1] > 1:
                    local_bias = bias[:, part]
                q, k, v = query[samples, part], key[samples, own], value[samples, own]
                self._seed(site, microbatch, data, rank + 1)
                if documents is None:
                    row.append(attend(q, k, v, local_bias, p))
                else:
                    bounds = documents[samples]
                    row.append(attend_by_document(q, k, v, local_bias, bounds, p))
            out.append(torch.cat(row, dim=1))
        return torch.cat(out)


def use_masks_of_layout(model: GPT, plan: Plan) -> LayoutMasks:
    """Let the complete model draw the dropout masks that the ranks of a layout draw.

    Args:
        model: The reference's model.
        plan: The plan of the copy.
    """
    masks = LayoutMasks(plan)
    config = plan.config.model
    hidden = config.hidden_dropout
    if hidden > 0:
        assert model.embedding is not None, "the model is complete"
        _replace_forward(model.embedding.dropout, masks, hidden, 0)
    for number, block in model.get_blocks().items():
        # Site 0 is the embedding. Each block has three sites.
        site = 1 + 3 * number
        if hidden > 0:
            _replace_forward(block.attention_dropout, masks, hidden, site + 1)
            _replace_forward(block.mlp_dropout, masks, hidden, site + 2)
        if config.attention_dropout > 0:
            compute = partial(masks.attend, block.attention, config.attention_dropout, site)
            block.attention._compute_core = compute  # type: ignore[method-assign]
    return masks


def _replace_forward(dropout: Any, masks: LayoutMasks, p: float, site: int) -> None:
    dropout.forward = lambda x, key: masks.drop(x, p, site)
