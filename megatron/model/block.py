"""A transformer layer: attention and MLP, each with a norm and added to the residual stream.

| norms  | residuals  | y =                                         |
|--------|------------|---------------------------------------------|
| input  | sequential | z + MLP(norm(z)), z = x + attention(norm(x)) |
| output | sequential | z + norm(MLP(z)), z = x + norm(attention(x)) |
| input  | parallel   | x + attention(norm(x)) + MLP(norm(x))       |
| output | parallel   | x + norm(attention(x)) + norm(MLP(x))       |

Each of the two norms of a layer has its own weights. GPT-2 is the first row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.loss import LossConfig
from megatron.config.table import Table
from megatron.model.attention import SelfAttention
from megatron.model.dropout import Dropout
from megatron.model.experts.layer import MixtureMLP
from megatron.model.experts.routing import Routing
from megatron.model.gated_delta_net import GatedDeltaNet
from megatron.model.latent_attention import LatentAttention
from megatron.model.mlp import MLP
from megatron.model.norm import Norm, build_norm
from megatron.model.positions import Positions
from megatron.model.recompute import Recomputation
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import ContextParallel, ExpertParallel, TensorParallel

# One block has three dropouts: attention probabilities, attention output and MLP output.
_SITES_PER_BLOCK = 3

ATTENTION_MODULES: Table[type[SelfAttention] | type[LatentAttention] | type[GatedDeltaNet]] = Table(
    "attention",
    {
        "dot_product": SelfAttention,
        "latent": LatentAttention,
        "gated_delta_net": GatedDeltaNet,
    },
)
"""Kind of attention -> its module."""
Half = Callable[..., Any]


class Block(nn.Module):
    """One transformer layer. Its number counts the layers of all pipeline stages."""

    def __init__(
        self,
        shape: ModelShape,
        index: int,
        tp: TensorParallel,
        loss: LossConfig | None = None,
        context: ContextParallel | None = None,
        ranks: ExpertParallel | None = None,
    ) -> None:
        """Build the layer.

        Args:
            shape: Sizes of the model.
            index: Number of the layer in the complete model, from 0.
            tp: The tensor-parallel ranks.
            loss: The auxiliary losses of experts. Default: none.
            context: The context-parallel ranks. Default: one.
            ranks: The expert-parallel ranks. Default: one.
        """
        super().__init__()
        config = shape.config
        layer = shape.describe_layer(index)
        # Site 0 is the embedding's dropout. The numbers are global, so a run that resumes with
        # another pipeline layout draws the same masks.
        site = 1 + _SITES_PER_BLOCK * index
        # Attention and MLP each have one norm, in one of two places.
        self.input_norm: Norm | None = None
        self.attention_output_norm: Norm | None = None
        self.post_attention_norm: Norm | None = None
        self.mlp_output_norm: Norm | None = None
        norm_first = {"input": True, "output": False}[layer.norms]
        if norm_first:
            self.input_norm = build_norm(config, tp)
        self.parallel_residual = config.parallel_residual
        self.residual_factor = shape.residual_factor
        core_dropout = Dropout(config.attention_dropout, site, config.seq_length, tp, context)
        build_attention = ATTENTION_MODULES.require(layer.attention)
        self.attention = build_attention(shape, layer, core_dropout, tp)
        p, width = config.hidden_dropout, config.hidden_size
        self.attention_dropout = Dropout(p, site + 1, width, tp, context)
        if norm_first:
            self.post_attention_norm = build_norm(config, tp)
        else:
            self.attention_output_norm = build_norm(config, tp)
            self.mlp_output_norm = build_norm(config, tp)
        self.mlp: MLP | MixtureMLP
        if layer.experts:
            self.mlp = MixtureMLP(
                *(shape, index, loss or LossConfig(), tp),
                *(context or ContextParallel(), ranks or ExpertParallel()),
            )
        else:
            self.mlp = MLP(shape, tp)
        self.mlp_dropout = Dropout(p, site + 2, width, tp, context)
        self.recomputation: Recomputation | None = None
        self._first_half: Half = Block._attend
        self._second_half: Half = Block._feed_forward
        self._both_halves: Half | None = None
        """One graph of both halves. None: each half has its own, or none."""

    def enable_recomputation(self, recomputation: Recomputation) -> None:
        """Compute this block again in the backward pass."""
        self.recomputation = recomputation

    def compile_halves(self, *, dynamic: bool) -> None:
        """Compile both halves of the layer, for any sequence length if `dynamic` is set.

        They are one graph, unless a half cannot be compiled.
        """
        # The functions are compiled, not the module. So FSDP2's hooks and the recomputation stay
        # outside of the graphs, and all blocks share the graphs. `fullgraph` makes a graph break an
        # error. Otherwise it would only make the run slow.
        self._first_half = torch.compile(Block._attend, fullgraph=True, dynamic=dynamic)
        # The messages between the ranks of experts have sizes that differ in every batch.
        if isinstance(self.mlp, MLP):
            self._second_half = torch.compile(Block._feed_forward, fullgraph=True, dynamic=dynamic)
            # A call of a graph costs the host as much as ten operators.
            self._both_halves = torch.compile(Block._run_both, fullgraph=True, dynamic=dynamic)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        dropout_key: Tensor,
        routing: Routing | None = None,
    ) -> Tensor:
        """Map [s, b, h] to [s, b, h]. With sequence parallelism both are [s/t, b, h].

        With context parallelism, read s/c for s.

        Args:
            x: The residual stream.
            positions: The tables of positions.
            dropout_key: See `Inputs`.
            routing: What routers share. Default: that of one sequence.
        """
        routing = routing or Routing()
        # A recomputation gets the same objects, so experts find what they chose before.
        if self.recomputation is not None and torch.is_grad_enabled():
            return self.recomputation(self._compute, x, positions, dropout_key, routing)
        return self._compute(x, positions, dropout_key, routing)

    def find_largest_attention_logit(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the largest attention logit of this rank's heads, a scalar in fp32.

        Args:
            x: The input of the layer, [s, b, h], or [s/t, b, h] with sequence parallelism.
            positions: The tables of positions.
        """
        read = _normalise_input(self.input_norm, self.attention_output_norm, x)
        return self.attention.find_largest_logit(read, positions)

    def _compute(
        self, x: Tensor, positions: Positions, dropout_key: Tensor, routing: Routing
    ) -> Tensor:
        """Compute both halves of the layer."""
        # The documents differ in every batch. Each batch would compile a new graph. The messages
        # between context-parallel ranks are no part of a graph.
        is_fixed = positions.documents is None and positions.context.size == 1
        if self._both_halves is not None and is_fixed:
            return self._both_halves(self, x, positions, dropout_key)
        attend = Block._attend
        if is_fixed:
            attend = self._first_half
        x, attended = attend(self, x, positions, dropout_key)
        return self._second_half(self, x, attended, dropout_key, routing)

    def _run_both(self, x: Tensor, positions: Positions, dropout_key: Tensor) -> Tensor:
        x, attended = self._attend(x, positions, dropout_key)
        return self._feed_forward(x, attended, dropout_key, Routing())

    def _attend(
        self, x: Tensor, positions: Positions, dropout_key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the input for the residual connection, and the output of attention."""
        x, read = self._add_and_normalise(x, None, self.input_norm, self.attention_output_norm)
        attended = self.attention(read, positions, dropout_key)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        if self.residual_factor != 1.0:
            attended = attended * self.residual_factor
        return x, attended

    def _feed_forward(
        self, x: Tensor, attended: Tensor, dropout_key: Tensor, routing: Routing
    ) -> Tensor:
        norms = self.post_attention_norm, self.mlp_output_norm
        if self.parallel_residual:
            # Attention and MLP read the same input.
            after = self.attention_dropout(attended, dropout_key, x)
            read = _normalise_input(*norms, x)
        # Its kernel adds to the residual stream, so the norm's kernel has nothing to add.
        elif self.attention_dropout.is_on:
            after = self.attention_dropout(attended, dropout_key, x)
            after, read = self._add_and_normalise(after, None, *norms)
        else:
            after, read = self._add_and_normalise(x, attended, *norms)
        if isinstance(self.mlp, MixtureMLP):
            out = self.mlp(read, routing)
        else:
            out = self.mlp(read)
        if self.mlp_output_norm is not None:
            out = self.mlp_output_norm(out)
        if self.residual_factor != 1.0:
            out = out * self.residual_factor
        return self.mlp_dropout(out, dropout_key, after)

    def _add_and_normalise(
        self, x: Tensor, branch: Tensor | None, before: Norm | None, after: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + branch, and the input of attention or MLP that is made from it."""
        fuse = self.mlp.operators.add_and_normalise
        if fuse is not None and before is not None:
            return fuse(x, branch, before)
        if branch is not None:
            x = x + branch
        return x, _normalise_input(before, after, x)


def _normalise_input(before: Norm | None, after: Norm | None, x: Tensor) -> Tensor:
    """Return the input of attention or MLP, in the dtype of the computation.

    Args:
        before: The norm before attention or MLP, or None.
        after: The norm after it, or None. Exactly one of the two norms exists.
        x: The residual stream.
    """
    if before is not None:
        return before(x)
    # A residual stream in fp32 must be cast here, because no norm does it.
    assert after is not None, "attention and MLP each need one norm"
    return x.to(after.weight.dtype)
