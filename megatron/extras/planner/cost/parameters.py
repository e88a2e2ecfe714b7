"""The parameters of a rank, the rows that its experts get, and the memory traffic of gradients.

Ranks share experts in other groups than the rest of a block, so both are counted by themselves.

The memory traffic is that of this trainer for weights and gradients, outside of kernels that
compute. A gradient is converted to fp32, added to that of earlier microbatches, and with several
data-parallel ranks copied to the buffer that FSDP2 sends. FSDP2 also copies the weights that it has
gathered. What it does on streams of its own is left out, because it overlaps with computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.extras.planner.cost.layout import RankLayout, Software, StepJob
from megatron.model import flops
from megatron.model.layer_parts import get_activation
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape


@dataclass(frozen=True)
class Widths:
    """Widths of a layer on a rank, by the notation of `megatron.model.flops`."""

    h: int
    f: int
    q: int
    k: int
    v: int
    """Width of all values."""
    context: int
    """Width of what the attention core returns."""
    mlp_in: int
    """Outputs of the MLP's first linear layer: f, or 2f with a GLU."""


def get_widths(shape: ModelShape, tensor: int = 1) -> Widths:
    """Return the widths of a layer on one of `tensor` ranks."""
    f = shape.ffn_hidden_size // tensor
    heads = shape.config.num_attention_heads // tensor
    # With fewer groups than ranks, several ranks share a group.
    groups = max(1, shape.query_groups // tensor)
    return Widths(
        h=shape.config.hidden_size,
        f=f,
        q=heads * shape.head_dim,
        k=groups * shape.head_dim,
        v=groups * shape.value_dim,
        context=heads * shape.value_dim,
        mlp_in=f * (1 + get_activation(shape.config).gated),
    )


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
    return sum_layers(shape, layout, range(layer, layer + 1))


def count_mixtures(shape: ModelShape, layers: range) -> int:
    """Return how many of these layers have experts."""
    # A search asks so often that the key of a cache takes longer than this answer.
    if shape.config.num_experts is None:
        return 0
    return _count_mixtures(shape, layers)


@lru_cache(maxsize=4096)
def _count_mixtures(shape: ModelShape, layers: range) -> int:
    return sum(layer in shape.expert_layers for layer in layers)


def count_linear_layers(shape: ModelShape, layers: range) -> int:
    """Return how many of these layers have a gated delta net."""
    if len(shape.config.attention_kinds) == 1:
        return 0
    return len(shape.linear_layers.intersection(layers))


def describe_layers(shape: ModelShape, layers: range) -> tuple[int, int, int]:
    """Return how many layers there are, how many have experts, and how many a gated delta net."""
    return len(layers), count_mixtures(shape, layers), count_linear_layers(shape, layers)


def sum_layers(shape: ModelShape, layout: RankLayout, layers: range) -> LayerParameters:
    """Return the parameters of several layers on one rank."""
    number = count_mixtures(shape, layers)
    dense = _count_layer(shape, layout.tensor, None)
    mixture = dense if not number else _count_layer(shape, layout.tensor, layout.expert or 1)
    plain = len(layers) - number
    linear = count_linear_layers(shape, layers)
    # A search asks most often for models without such layers, and a cached count still costs.
    more = linear and linear * flops.count_linear_surplus(shape, layout.tensor)
    return LayerParameters(
        plain * dense.dense + number * mixture.dense + more,
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
    w = get_widths(shape)
    of_layer = flops.count_layer_matrix_parameters(shape, layout.tensor)
    number = count_mixtures(shape, layers)
    shared = shape.config.moe_shared_expert_intermediate_size or 0
    # The MLP of these layers has the width of the shared expert.
    narrower = w.h * (w.mlp_in + w.f) // w.f * (w.f - shared) // layout.tensor
    linear = count_linear_layers(shape, layers)
    more = linear and linear * flops.count_linear_surplus(shape, layout.tensor, matrices=True)
    return len(layers) * of_layer - number * narrower + more


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


_CAST = 6
"""Bytes moved to convert a gradient from 16 bits to fp32: a read and a write."""
_ADD = 12
"""Bytes that add an fp32 gradient to an fp32 sum: two reads and a write."""
_ADD_ROUNDED = 10
"""Bytes that add a gradient in 16 bits to an fp32 sum."""
_COPY = 8
"""Bytes that copy an fp32 gradient."""
_JOIN = 4
"""Bytes that put a gradient in 16 bits into one tensor with others."""


def uses_fsdp(layout: RankLayout) -> bool:
    """Return whether FSDP2 holds the parameters. It does not if no other rank has the same."""
    # Tensor-parallel ranks may have the same experts.
    return layout.data * layout.context > 1 or (layout.expert is not None and layout.tensor > 1)


def reduces_each_microbatch(layout: RankLayout, microbatches: int) -> bool:
    """Return whether gradients are sent after each microbatch, and not only after the last one."""
    return uses_fsdp(layout) and (layout.zero_stage >= 2 or microbatches == 1)


def count_head_parameters(shape: ModelShape, tensor: int, stage: Stage) -> int:
    """Return the parameters of a final norm and an output matrix that FSDP2 shards by themselves.

    There are none if the stage has no output matrix of its own.
    """
    # On one stage, a tied output matrix is the embedding.
    if not stage.last or (stage.first and not shape.config.untie_embeddings_and_output_weights):
        return 0
    return flops.count_norm_parameters(shape) + flops.count_word_embedding_parameters(shape, tensor)


def count_root_parameters(shape: ModelShape, tensor: int, stage: Stage) -> int:
    """Return the parameters of a stage outside of its layers that FSDP2 shards with the embedding.

    A tied output matrix is one of them, and the final norm before it.
    """
    size = 0
    if stage.first:
        size += flops.count_word_embedding_parameters(shape, tensor)
        size += flops.count_first_stage_extra_parameters(shape)
    if stage.last and not count_head_parameters(shape, tensor, stage):
        size += flops.count_norm_parameters(shape)
    return size


def count_outside_parameters(shape: ModelShape, tensor: int, stage: Stage) -> int:
    """Return the parameters of a stage outside of its layers on one tensor-parallel rank."""
    return sum(
        count(shape, tensor, stage) for count in (count_head_parameters, count_root_parameters)
    )


def count_product_bytes(layout: RankLayout, software: Software, microbatches: int) -> float:
    """Return the bytes that a product reads and writes for each element of a weight's gradient.

    It is the mean over the microbatches of a step.
    """
    if not software.half:
        return 4
    if not software.fused_gradients:
        return 2
    if reduces_each_microbatch(layout, microbatches):
        return 4
    # The first product only writes the sum. The others read it as well.
    return 8 - 4 / microbatches


def count_gather_bytes(job: StepJob, stage: Stage) -> int:
    """Return the bytes moved to copy the gathered weights of a stage in a step."""
    shape, layout, microbatches = job.shape, job.layout, job.schedule.microbatches
    if max(layout.shard_size, layout.expert_shards) == 1:
        return 0
    layers = sum_layers(shape, layout, stage.layers).whole
    outside = count_outside_parameters(shape, layout.tensor, stage)
    # A read and a write of each weight.
    copied = 2 * (2 if job.software.half else 4)
    if layout.zero_stage < 3:
        return copied * (layers + outside)
    # Layers are gathered for both passes. What is outside of them is kept in between.
    return copied * microbatches * (2 * layers + outside)


def count_sum_bytes(job: StepJob, stage: Stage) -> float:
    """Return the bytes that the sums of a stage's gradients move in a step."""
    shape, layout, microbatches = job.shape, job.layout, job.schedule.microbatches
    outside = count_outside_parameters(shape, layout.tensor, stage)
    inside = sum_layers(shape, layout, stage.layers).whole
    copied = _count_copied(layout, microbatches)
    if not job.software.half:
        # No product is rounded to 16 bits.
        return (inside + outside) * (_count_added(layout, microbatches) + copied)
    fused = 0
    if job.software.fused_gradients:
        fused = count_dense_matrices(shape, layout, stage.layers)
    converted = _count_rounded(layout, microbatches, in_fp32=job.software.fused_gradients)
    # Those outside of layers are computed in 16 bits in any case.
    others = _count_rounded(layout, microbatches, in_fp32=False)
    total = fused * copied + (inside - fused) * converted + outside * others
    if uses_fsdp(layout) or not (stage.first and stage.last):
        return total
    # The vectors of a complete model are joined in each microbatch, and converted or added then.
    together = _CAST + _ADD_ROUNDED * (microbatches - 1) + _JOIN * microbatches
    return total + _count_vectors(shape, layout, stage) * (together - converted)


def _count_vectors(shape: ModelShape, layout: RankLayout, stage: Stage) -> int:
    """Return the elements of biases and norms of a stage with all layers."""
    # Embeddings of positions are matrices, so what is left beside matrices are vectors.
    of_layer = flops.count_layer_parameters(shape, layout.tensor)
    of_layer -= flops.count_layer_matrix_parameters(shape, layout.tensor)
    linear = count_linear_layers(shape, stage.layers)
    every, matrices = (
        flops.count_linear_surplus(shape, layout.tensor, matrices=only) for only in (False, True)
    )
    more = linear * (every - matrices)
    return len(stage.layers) * of_layer + more + flops.count_norm_parameters(shape)


def _count_rounded(layout: RankLayout, microbatches: int, *, in_fp32: bool) -> int:
    """Return the bytes for a parameter whose gradient is computed in 16 bits.

    `in_fp32` tells that FSDP2 takes the gradients of its module in fp32.
    """
    if not uses_fsdp(layout) or in_fp32:
        # Autograd converts each gradient to fp32.
        summed = _CAST * microbatches + _count_added(layout, microbatches)
        return summed + _count_copied(layout, microbatches)
    if reduces_each_microbatch(layout, microbatches):
        # The copy to the buffer converts it.
        return _CAST * microbatches
    # FSDP2 converts the first gradient, and adds the others to it in 16 bits.
    return _CAST + _ADD_ROUNDED * (microbatches - 1) + _COPY


def _count_added(layout: RankLayout, microbatches: int) -> int:
    """Return the bytes that add up a parameter's gradients in fp32 before they are sent."""
    if reduces_each_microbatch(layout, microbatches):
        return 0
    return _ADD * (microbatches - 1)


def _count_copied(layout: RankLayout, microbatches: int) -> int:
    """Return the bytes that copy a parameter's fp32 gradient to the buffer that is sent."""
    if not uses_fsdp(layout):
        return 0
    return _COPY * (microbatches if reduces_each_microbatch(layout, microbatches) else 1)
