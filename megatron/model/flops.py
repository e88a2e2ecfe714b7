"""Parameters and FLOPs of a model, from its configuration alone.

Invariant: counts are exact integers for the model that `megatron.model` builds.

Sources:
- Parameters and FLOPs of an iteration: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473,
  section 5.1 and appendix.
- GLU: https://arxiv.org/abs/2002.05202. Grouped queries: https://arxiv.org/abs/2305.13245.

Notation: s sequence length, b micro-batch size, h hidden size, f feed-forward size, a attention
heads, d width of a head, q = a d, k = (query groups) d, l layers, V padded vocabulary, t
tensor-parallel size.

FLOPs conventions: a multiply-add counts as 2. Attention has two conventions. Full attention counts
all pairs of tokens, as most published numbers and the log do. Causal attention counts only the
pairs that the mask leaves, which is what flash kernels compute. Model FLOPs are forward and
backward, which are 3 forward passes. Hardware FLOPs also count full activation recomputation, a
4th forward pass of the recomputed layers but not of the logits. They do not count the recomputation
of the attention core, since flash kernels always do it.
"""

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from megatron.config.model import AttentionKind, MLPKind
from megatron.config.optimizer import OPTIMIZERS, OptimizerConfig
from megatron.model.layer_parts import (
    ATTENTIONS,
    list_expert_parameters,
    list_layer_parameters,
    list_norm_parameters,
)
from megatron.model.shape import LayerDescription, ModelShape
from megatron.parallel.parameter_spec import ParameterSpec

# Parameters


def _count(specs: Iterable[ParameterSpec], tensor_size: int = 1, expert_size: int = 1) -> int:
    """Return the elements that a rank holds of some parameters."""
    return sum(math.prod(spec.compute_local_shape(tensor_size, expert_size)) for spec in specs)


@lru_cache(maxsize=256)
def _list_specs(
    shape: ModelShape,
    tensor_size: int = 1,
    mlp: MLPKind = "dense",
    attention: AttentionKind | None = None,
) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a layer with these kinds of parts."""
    kind = attention or shape.attention
    layer = LayerDescription(0, rotary=False, window=None, attention=kind, mlp=mlp)
    return tuple(list_layer_parameters(shape, layer, tensor_size).values())


def count_norm_parameters(shape: ModelShape) -> int:
    """Return the parameters of one norm over the hidden size."""
    return _count(list_norm_parameters(shape.config, shape.config.hidden_size).values())


def count_layer_matrix_parameters(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Return the elements of a layer's matrices on one tensor-parallel rank.

    For GPT-2 on one rank these are 12 h^2.
    """
    matrices = [spec for spec in _list_specs(shape, tensor_parallel_size) if spec.decays]
    return _count(matrices, tensor_parallel_size)


def count_matrix_parameters(shape: ModelShape) -> int:
    """Return the elements of the matrices of all layers, with those of every expert."""
    number = len(shape.expert_layers)
    mixture = 0
    if number:
        mixture = sum(math.prod(s.shape) for s in _list_specs(shape, mlp="experts") if s.decays)
    others = shape.config.num_layers - number
    linear = len(shape.linear_layers)
    more = linear and linear * count_linear_surplus(shape, matrices=True)
    return others * count_layer_matrix_parameters(shape) + number * mixture + more


def count_layer_parameters(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Return the parameters of one transformer layer with an MLP on one tensor-parallel rank.

    For GPT-2 on one rank these are 12 h^2 + 13 h.
    """
    return _count(_list_specs(shape, tensor_parallel_size), tensor_parallel_size)


@lru_cache(maxsize=256)
def count_linear_surplus(
    shape: ModelShape, tensor_parallel_size: int = 1, *, matrices: bool = False
) -> int:
    """Return the parameters that a gated delta net has more than attention, on one rank.

    Args:
        shape: Sizes of the model.
        tensor_parallel_size: Number of tensor-parallel ranks.
        matrices: Count only those to which weight decay applies.
    """
    if not shape.linear_layers:
        return 0
    # Norms and MLP are the same, whatever the kind of attention is.
    kinds: tuple[AttentionKind, ...] = ("gated_delta_net", "dot_product")
    linear, other = (
        _count(
            [
                spec
                for spec in _list_specs(shape, tensor_parallel_size, attention=kind)
                if spec.decays or not matrices
            ],
            tensor_parallel_size,
        )
        for kind in kinds
    )
    return linear - other


def count_expert_parameters(shape: ModelShape, expert_parallel_size: int = 1) -> int:
    """Return the parameters of the experts of one layer on one rank.

    Experts are whole, and the expert-parallel ranks divide their number.
    """
    return _count(list_expert_parameters(shape).values(), 1, expert_parallel_size)


def count_expert_layer_parameters(
    shape: ModelShape, tensor_parallel_size: int = 1, expert_parallel_size: int = 1
) -> int:
    """Return the parameters of one layer with experts on one rank."""
    specs = _list_specs(shape, tensor_parallel_size, "experts")
    return _count(specs, tensor_parallel_size, expert_parallel_size)


def count_word_embedding_parameters(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Return the parameters of the word embedding on one tensor-parallel rank, V h / t.

    An untied output projection has the same number.
    """
    return shape.padded_vocab_size * shape.config.hidden_size // tensor_parallel_size


def count_first_stage_extra_parameters(shape: ModelShape) -> int:
    """Return the parameters of the embedding apart from the words.

    These are the learned positions and the embedding's norm. The norm is always a LayerNorm, also
    if the other norms are not.
    """
    h = shape.config.hidden_size
    vectors = 0
    if shape.config.embed_layernorm:
        vectors = 2 if shape.config.norm_bias else 1
    return (shape.position_table_size + vectors) * h


def count_parameters(shape: ModelShape) -> int:
    """Return the number of all parameters, each counted once.

    The vocabulary is counted with its padding, as in published numbers (tr11: 176,247,271,424). The
    padding has (padded - real) x h parameters, and twice that if the output projection is untied.
    """
    linear = len(shape.linear_layers)
    # One stage on one rank has all of them, and no replica of the word embedding.
    return count_stage_parameters(
        shape, 1, (shape.config.num_layers,), (len(shape.expert_layers),), 1, (linear,)
    )[0]


def count_active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token uses: all but those of the experts not chosen for it."""
    config = shape.config
    if config.num_experts is None:
        return count_parameters(shape)
    unused = config.num_experts - config.moe_router_topk
    of_unused = count_expert_parameters(shape) // config.num_experts * unused
    return count_parameters(shape) - len(shape.expert_layers) * of_unused


def count_stage_parameters(
    shape: ModelShape,
    tensor_parallel_size: int,
    layers_per_rank: tuple[int, ...],
    expert_layers_per_rank: tuple[int, ...] | None = None,
    expert_parallel_size: int = 1,
    linear_layers_per_rank: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Return the parameters of one rank at each pipeline rank, before ZeRO shards them.

    All virtual stages of the rank are included. The first rank has the embedding, the last the
    final norm and the output projection. If the projection is tied, the last rank holds a replica
    of the word embedding. The sum over ranks then exceeds `count_parameters` by that replica.
    """
    per_layer = count_layer_parameters(shape, tensor_parallel_size)
    words = count_word_embedding_parameters(shape, tensor_parallel_size)
    stages = [layers * per_layer for layers in layers_per_rank]
    if expert_layers_per_rank is not None and any(expert_layers_per_rank):
        more = count_expert_layer_parameters(shape, tensor_parallel_size, expert_parallel_size)
        for rank, layers in enumerate(expert_layers_per_rank):
            stages[rank] += layers * (more - per_layer)
    if linear_layers_per_rank is not None and any(linear_layers_per_rank):
        surplus = count_linear_surplus(shape, tensor_parallel_size)
        for rank, layers in enumerate(linear_layers_per_rank):
            stages[rank] += layers * surplus
    stages[0] += words + count_first_stage_extra_parameters(shape)
    stages[-1] += count_norm_parameters(shape)
    # In a pipeline of one stage, a tied output projection is the embedding itself.
    if len(stages) > 1 or shape.config.untie_embeddings_and_output_weights:
        stages[-1] += words
    return tuple(stages)


# FLOPs


# Each step asks for it, and the layers are counted one by one.
@lru_cache(maxsize=256)
def count_forward_flops_per_token(
    shape: ModelShape, seq_length: int | None = None, *, causal: bool = False
) -> tuple[int, int]:
    """Return the FLOPs of one token's forward pass as (all layers, logits).

    Only matrix products count. Scores and their weighted sum cost 2 s q each, with the window in
    place of s in layers with a sliding window. In the causal convention, the mean number of keys
    that a token attends to replaces s.

    Args:
        shape: Sizes of the model.
        seq_length: The current length, for curriculum learning. The default is s.
        causal: Use the causal convention, rounded down.
    """
    s = seq_length or shape.config.seq_length
    all_layers = 0
    pairs = 0
    for index in range(shape.config.num_layers):
        layer = shape.describe_layer(index)
        window = min(s, layer.window or s)
        seen = _count_causal_pairs(s, window) if causal else s * window
        attention = ATTENTIONS.require(layer.attention)
        pairs += seen * attention.count_pair_flops(shape)
        # A product with an m x n matrix costs 2 m n for each token.
        all_layers += 2 * _count_used_matrices(shape, layer.mlp, layer.attention)
        all_layers += attention.count_token_flops(shape)
    logits = 2 * shape.config.hidden_size * shape.padded_vocab_size
    return all_layers + pairs // s, logits


@lru_cache(maxsize=256)
def _count_used_matrices(shape: ModelShape, mlp: MLPKind, attention: AttentionKind) -> int:
    """Return the elements of a layer's matrices that a token is multiplied with."""
    elements = 0
    for spec in _list_specs(shape, mlp=mlp, attention=attention):
        if spec.decays and spec.by_expert:
            assert shape.config.num_experts is not None, "the layer has experts"
            # A token uses some of the experts.
            of_one = math.prod(spec.shape) // shape.config.num_experts
            elements += of_one * shape.config.moe_router_topk
        elif spec.decays:
            elements += math.prod(spec.shape)
    return elements


def _count_causal_pairs(seq_length: int, window: int) -> int:
    """Return the pairs of a query and a key of one sequence, itself and `window` - 1 before it."""
    return window * (window + 1) // 2 + (seq_length - window) * window


def count_model_flops_per_token(
    shape: ModelShape, seq_length: int | None = None, *, causal: bool = False
) -> int:
    """Return the FLOPs of forward and backward of one token, which MFU is measured in.

    The convention of attention is full unless `causal` is given.
    """
    layers, logits = count_forward_flops_per_token(shape, seq_length, causal=causal)
    return 3 * (layers + logits)


def count_hardware_flops_per_token(
    shape: ModelShape,
    seq_length: int | None = None,
    *,
    recompute: Fraction | float = 0,
    causal: bool = False,
) -> int:
    """Return the model FLOPs of one token and those of the recomputed layers' second forward pass.

    Megatron's log prints TFLOPs by this count.

    Args:
        shape: Sizes of the model.
        seq_length: The current length. The default is s.
        recompute: Share of recomputed layers, from 0 to 1. False and True are none and all.
        causal: Use the causal convention of attention.
    """
    layers, logits = count_forward_flops_per_token(shape, seq_length, causal=causal)
    # The product comes before the division, so that the count stays an exact integer.
    again = (
        count_recomputed_layers(range(shape.config.num_layers), recompute)
        * layers
        // shape.config.num_layers
    )
    return 3 * layers + again + 3 * logits


def compute_causal_share(shape: ModelShape, recompute: Fraction | float = 0) -> float:
    """Return the hardware FLOPs with causal attention relative to those with full attention."""
    causal = count_hardware_flops_per_token(shape, recompute=recompute, causal=True)
    return causal / count_hardware_flops_per_token(shape, recompute=recompute)


@lru_cache(maxsize=65536)
def count_recomputed_layers(layers: range, share: Fraction | float) -> int:
    """Return how many of `layers` (global numbers) are recomputed.

    `share` is that of the complete model. The rule is that of fms-fsdp. The k-th recomputed layer
    is the first whose number, counted from 1, times `share` reaches k - 1/2. This is the middle of
    each run of 1 / share layers. For 1/5 these are layers 3, 8, 13 and so on. All layers of the
    model count, so every pipeline layout recomputes the same ones.
    """
    return _recomputed_before(layers.stop, share) - _recomputed_before(layers.start, share)


def _recomputed_before(layer: int, share: Fraction | float) -> int:
    """Return how many layers with a number below `layer` are recomputed."""
    # The product is in floating point, as in fms-fsdp. At 7/10 its rounding takes layer 46, not 45.
    return math.floor(Fraction(layer * float(share)) + Fraction(1, 2))


def count_iteration_flops(
    shape: ModelShape,
    batch_size: int,
    seq_length: int | None = None,
    *,
    recompute: Fraction | float = 0,
    causal: bool = False,
) -> int:
    """Return the hardware FLOPs of one iteration over all ranks.

    With recompute=0 these are the model FLOPs. For GPT-2's shape and B samples they are
    96 B s l h^2 (1 + s/(6h) + V/(16 l h)) with recomputation. Without it, 72 replaces 96, and
    V/(12 l h) replaces V/(16 l h) (2104.04473).

    Args:
        shape: Sizes of the model.
        batch_size: Global batch size in samples.
        seq_length: The current length. The default is s.
        recompute: Share of recomputed layers, from 0 to 1.
        causal: Use the causal convention of attention.
    """
    tokens = batch_size * (seq_length or shape.config.seq_length)
    return tokens * count_hardware_flops_per_token(
        shape, seq_length, recompute=recompute, causal=causal
    )


# The states of optimizers


MOMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Value of --exp-avg-dtype and --exp-avg-sq-dtype -> bytes of a number."""


def count_state_bytes(config: OptimizerConfig, parameters: int, layer_matrices: int) -> int:
    """Return the bytes of an optimizer's states.

    Args:
        config: The optimizer and the precision of its moments.
        parameters: Number of parameters.
        layer_matrices: How many of them are in the matrices of the layers.
    """
    row = OPTIMIZERS.require(config.optimizer)
    own = layer_matrices if row.layer_matrices_only else parameters
    others = OPTIMIZERS.require("adam").states
    return sum(
        number * MOMENT_BYTES[state.get_dtype(config)]
        for number, states in ((own, row.states), (parameters - own, others))
        for state in states
    )
