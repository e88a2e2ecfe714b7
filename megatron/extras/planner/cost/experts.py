"""Mixtures of experts: their parameters on a rank, and the sizes of their messages.

Ranks share experts in other groups than the rest of a block, so both are counted by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.extras.planner.cost.layout import RankLayout
from megatron.model import flops
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape


@dataclass(frozen=True)
class Held:
    """Parameters of a rank."""

    whole: int = 0
    """Those that it computes with."""
    shard: float = 0.0
    """Those whose fp32 masters it owns, if the ranks with the same parameters share them."""

    def __add__(self, other: "Held") -> "Held":
        """Return both together."""
        return Held(self.whole + other.whole, self.shard + other.shard)


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of a layer on one rank, before ranks with the same ones share them."""

    dense: int
    """All but experts."""
    experts: int = 0

    @property
    def whole(self) -> int:
        """All of them."""
        return self.dense + self.experts


@lru_cache(maxsize=4096)
def _count_layer(shape: ModelShape, tensor: int, expert: int | None) -> LayerParameters:
    """Return the parameters of a layer. `expert`: ranks that divide its experts, if it has any."""
    if expert is None:
        return LayerParameters(flops.count_layer_parameters(shape, tensor))
    experts = flops.count_expert_parameters(shape, expert)
    every = flops.count_expert_layer_parameters(shape, tensor, expert)
    return LayerParameters(every - experts, experts)


def count_layer(shape: ModelShape, layout: RankLayout, layer: int) -> LayerParameters:
    """Return the parameters of the layer with this number on one rank."""
    if layer not in shape.expert_layers:
        return _count_layer(shape, layout.tensor, None)
    return _count_layer(shape, layout.tensor, layout.expert or 1)


def count_mixtures(shape: ModelShape, layers: range) -> int:
    """Return how many of these layers have experts."""
    # A search asks so often that the key of a cache takes longer than this answer.
    if shape.config.num_experts is None:
        return 0
    return _count_mixtures(shape, layers)


@lru_cache(maxsize=4096)
def _count_mixtures(shape: ModelShape, layers: range) -> int:
    return sum(layer in shape.expert_layers for layer in layers)


def sum_layers(shape: ModelShape, layout: RankLayout, layers: range) -> LayerParameters:
    """Return the parameters of several layers on one rank."""
    number = count_mixtures(shape, layers)
    dense = _count_layer(shape, layout.tensor, None)
    mixture = dense if not number else _count_layer(shape, layout.tensor, layout.expert or 1)
    plain = len(layers) - number
    return LayerParameters(
        plain * dense.dense + number * mixture.dense,
        plain * dense.experts + number * mixture.experts,
    )


def sum_stages(shape: ModelShape, layout: RankLayout, stages: Sequence[Stage]) -> LayerParameters:
    """Return the parameters of the layers of several stages on one rank."""
    blocks = [sum_layers(shape, layout, stage.layers) for stage in stages]
    return LayerParameters(sum(each.dense for each in blocks), sum(each.experts for each in blocks))


def count_dense_matrices(shape: ModelShape, layout: RankLayout, layers: range) -> int:
    """Return the elements of the matrices of linear layers, without those of experts and routers.

    Only their products can add to gradients in fp32.
    """
    w = flops.get_widths(shape)
    of_layer = flops.count_layer_matrix_parameters(shape, layout.tensor)
    number = count_mixtures(shape, layers)
    shared = shape.config.moe_shared_expert_intermediate_size or 0
    # The MLP of these layers has the width of the shared expert.
    narrower = w.h * (w.mlp_in + w.f) // w.f * (w.f - shared) // layout.tensor
    return len(layers) * of_layer - number * narrower


def share_parameters(block: LayerParameters, layout: RankLayout) -> Held:
    """Return what a rank holds of layers with these parameters."""
    return Held(block.whole, block.dense / layout.shard_size + block.experts / layout.expert_shards)


def count_rows(
    shape: ModelShape, layout: RankLayout, seq_length: int | None = None
) -> tuple[int, int, float]:
    """Return the tokens that a rank routes, the rows that it sends, and those of its experts.

    A row is a token on its way to one expert. They are those of one microbatch and layer.

    Args:
        shape: Sizes of the model.
        layout: The layout.
        seq_length: Tokens of a sample. Default: that of `shape`.
    """
    length = seq_length or shape.config.seq_length
    tokens = length * layout.micro_batch // layout.context
    # Tensor-parallel ranks route a part of the tokens each.
    own = -(-tokens // layout.tensor)
    sent = own * shape.config.moe_router_topk
    # At most, all rows of all ranks are for one of them.
    received = sent * min(layout.imbalance, layout.expert or 1)
    return own, sent, received


def count_message_bytes(
    shape: ModelShape, layout: RankLayout, value: int, seq_length: int | None = None
) -> float:
    """Return the bytes of an all-to-all: the larger of what the fullest rank sends and receives.

    A forward pass has two of them in each layer with experts, and so has a backward pass.

    Args:
        shape: Sizes of the model.
        layout: The layout.
        value: Bytes of an activation.
        seq_length: See `count_rows`.
    """
    if (layout.expert or 1) == 1:
        return 0.0
    _, sent, received = count_rows(shape, layout, seq_length)
    return value * shape.config.hidden_size * max(sent, received)
