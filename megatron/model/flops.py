"""Parameters, FLOPs and memory of a model, from its configuration alone.

Invariant: counts are exact integers of what `megatron.model` builds; only memory is an estimate, and says so.
Sources: parameters and iteration FLOPs, Narayanan et al. 2021, https://arxiv.org/abs/2104.04473 (section 5.1 and appendix);
GLU, https://arxiv.org/abs/2002.05202; grouped queries, https://arxiv.org/abs/2305.13245; bytes a parameter, the BigScience 104B
run's notes; ZeRO stages, https://arxiv.org/abs/1910.02054; activations, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.

Notation: s sequence length, b micro-batch size, h hidden size, f feed-forward size, a attention heads, d width of a head,
q = a d, k = (query groups) d, l layers, V padded vocabulary, t tensor-parallel size.

FLOPs conventions, both counting a multiply-add as 2 and causal attention as if it were full (as published numbers do):
model FLOPs are forward + backward (3 forwards); hardware FLOPs also count what full activation recomputation does again (a 4th
forward of the layers that it is for, not of the logits), and not the attention core's, as flash kernels do that always.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from megatron.model.shape import ModelShape


@dataclass(frozen=True)
class _Widths:
    """The widths that every formula here is made of; see the module's notation."""

    h: int
    f: int
    q: int
    k: int
    mlp_in: int  # outputs of the MLP's first linear: f, or 2f with a GLU


def _get_widths(shape: ModelShape) -> _Widths:
    f = shape.ffn_hidden_size
    return _Widths(
        h=shape.config.hidden_size,
        f=f,
        q=shape.config.num_attention_heads * shape.head_dim,
        k=shape.query_groups * shape.head_dim,
        mlp_in=2 * f if shape.config.glu_activation else f,
    )


# Parameters


def count_norm_parameters(shape: ModelShape) -> int:
    """One norm: weight h, and for LayerNorm a bias h."""
    return shape.config.hidden_size * (2 if shape.config.normalization == "LayerNorm" else 1)


def count_layer_parameters(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """One transformer layer as one tensor-parallel rank holds it: 12 h^2 + 13 h for GPT-2 on one rank.

    Column-parallel weights and biases and row-parallel weights are cut by t; row-parallel biases and norms are on every rank.
    """
    w, t = _get_widths(shape), tensor_parallel_size
    weights = w.h * (w.q + 2 * w.k) + w.q * w.h + w.h * w.mlp_in + w.f * w.h
    column_biases, row_biases = (
        ((w.q + 2 * w.k) + w.mlp_in, 2 * w.h) if shape.config.add_bias_linear else (0, 0)
    )
    return (weights + column_biases) // t + row_biases + 2 * count_norm_parameters(shape)


def count_word_embedding_parameters(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """The word embedding, or an untied output projection, as one tensor-parallel rank holds it: V h / t."""
    return shape.padded_vocab_size * shape.config.hidden_size // tensor_parallel_size


def count_first_stage_extra_parameters(shape: ModelShape) -> int:
    """What the embedding has beside the words: learned positions, and its norm, which is a LayerNorm whatever the others are."""
    h = shape.config.hidden_size
    return shape.position_table_size * h + (2 * h if shape.config.embed_layernorm else 0)


def count_parameters(shape: ModelShape) -> int:
    """All parameters, each once. The vocabulary is counted with its padding, as published numbers do (tr11: 176,247,271,424);
    the padding's part is (padded - real) x h, twice that where the output projection is untied."""
    words = count_word_embedding_parameters(shape) * (
        2 if shape.config.untie_embeddings_and_output_weights else 1
    )
    return (
        words
        + count_first_stage_extra_parameters(shape)
        + count_parameters_without_embeddings(shape)
    )


def count_parameters_without_embeddings(shape: ModelShape) -> int:
    """The layers and the final norm: 6 x these x tokens are TensorBoard's "gigaflos (without embeddings)"."""
    return shape.config.num_layers * count_layer_parameters(shape) + count_norm_parameters(shape)


def count_stage_parameters(
    shape: ModelShape, tensor_parallel_size: int, layers_per_rank: tuple[int, ...]
) -> tuple[int, ...]:
    """Parameters of one rank at each place in the pipeline, over all its virtual stages, before ZeRO shards them.

    The first rank has the embedding, the last the final norm and the output projection: where that is tied, a copy of the word
    embedding, so that the sum over ranks exceeds `count_parameters` by it.
    """
    per_layer = count_layer_parameters(shape, tensor_parallel_size)
    words = count_word_embedding_parameters(shape, tensor_parallel_size)
    stages = [layers * per_layer for layers in layers_per_rank]
    stages[0] += words + count_first_stage_extra_parameters(shape)
    stages[-1] += count_norm_parameters(shape)
    if len(stages) > 1 or shape.config.untie_embeddings_and_output_weights:
        stages[-1] += words
    return tuple(stages)


# FLOPs


def count_forward_flops_per_token(
    shape: ModelShape, seq_length: int | None = None
) -> tuple[int, int]:
    """(all layers, logits): matrix products of one token's forward pass.

    `seq_length`: the present one, for curriculum learning; default s. Scores and their weighted sum cost 2 s q each.
    """
    w, s = _get_widths(shape), seq_length or shape.config.seq_length
    per_layer = 2 * (w.h * (w.q + 2 * w.k) + w.q * w.h + w.h * w.mlp_in + w.f * w.h) + 4 * s * w.q
    return shape.config.num_layers * per_layer, 2 * w.h * shape.padded_vocab_size


def count_model_flops_per_token(shape: ModelShape, seq_length: int | None = None) -> int:
    """Forward and backward of one token; what MFU is measured in."""
    layers, logits = count_forward_flops_per_token(shape, seq_length)
    return 3 * (layers + logits)


def count_hardware_flops_per_token(
    shape: ModelShape, seq_length: int | None = None, *, recompute: Fraction | float = 0
) -> int:
    """`count_model_flops_per_token` and the second forward of the layers that are recomputed; what Megatron's log prints.

    `recompute`: their share of all layers, from 0 to 1 (False and True are none and all).
    """
    layers, logits = count_forward_flops_per_token(shape, seq_length)
    again = (
        count_recomputed_layers(range(shape.config.num_layers), recompute)
        * layers
        // shape.config.num_layers
    )
    return 3 * layers + again + 3 * logits


def count_recomputed_layers(layers: range, share: Fraction | float) -> int:
    """Return how many of `layers` (global numbers) are recomputed.

    `share` is that of the whole model. The rule is fms-fsdp's: the k-th recomputed layer is the first
    whose number, counted from 1, times `share` reaches k - 1/2. It takes the middle of each run of
    1 / share layers: of 1/5, layers 3, 8, 13 and so on. All layers of the model count, so every
    pipeline layout recomputes the same ones.
    """
    return _recomputed_before(layers.stop, share) - _recomputed_before(layers.start, share)


def _recomputed_before(layer: int, share: Fraction | float) -> int:
    # The product is a floating one, as in fms-fsdp: at 7/10 its rounding takes layer 46, not 45.
    return math.floor(Fraction(layer * float(share)) + Fraction(1, 2))


def count_iteration_flops(
    shape: ModelShape,
    batch_size: int,
    seq_length: int | None = None,
    *,
    recompute: Fraction | float = 0,
) -> int:
    """Hardware FLOPs of one iteration over all ranks; model FLOPs with recompute=0. `batch_size` in samples.

    For GPT-2's shape this is 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) with recomputation, and 72 and V/(12 l h) in place of 96 and
    V/(16 l h) without (2104.04473).
    """
    tokens = batch_size * (seq_length or shape.config.seq_length)
    return tokens * count_hardware_flops_per_token(shape, seq_length, recompute=recompute)


# Memory


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes of everything that scales with the parameters; activations and buffers come on top."""

    master_weights: int
    working_weights: int
    """What the model computes with, where that is not the masters themselves."""
    optimizer_states: int
    gradients: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.master_weights + self.working_weights + self.optimizer_states + self.gradients


def estimate_parameter_memory(parameters: int, *, half: bool) -> ParameterMemory:
    """The rule of 18 bytes a parameter: 4 fp32 weights, 2 half-precision weights, 8 Adam's moments, 4 fp32 gradients.

    `half`: bf16 or fp16; in fp32 there is no second copy of the weights and the rule has 16.
    """
    return ParameterMemory(
        4 * parameters, 2 * parameters if half else 0, 8 * parameters, 4 * parameters
    )


def estimate_parameter_memory_per_rank(
    rank_parameters: int, *, half: bool, data_parallel_size: int, zero_stage: int
) -> ParameterMemory:
    """What of that one rank keeps (rounded up): stage 1 shards optimizer states and master weights over data-parallel ranks,
    2 also gradients, 3 also the weights that the model computes with.

    In fp32 the masters are what the model computes with, until stages 1 and 2 cut them: then it has whole ones beside the shard.
    """
    whole = estimate_parameter_memory(rank_parameters, half=half)
    fp32_copies = (
        4 * rank_parameters if not half and data_parallel_size > 1 and zero_stage in (1, 2) else 0
    )

    def shard_from(stage: int, size: int) -> int:
        return -(-size // data_parallel_size) if zero_stage >= stage else size

    return ParameterMemory(
        master_weights=shard_from(1, whole.master_weights),
        working_weights=shard_from(3, whole.working_weights) + fp32_copies,
        optimizer_states=shard_from(1, whole.optimizer_states),
        gradients=shard_from(2, whole.gradients),
    )


def estimate_layer_activation_bytes(
    shape: ModelShape,
    micro_batch_size: int,
    tensor_parallel_size: int = 1,
    *,
    sequence_parallel: bool = False,
    half: bool = True,
    scores_kept: bool = False,
) -> int:
    """Estimate of the activations that one layer keeps for the backward pass of one microbatch, on one rank, nothing recomputed.

    For GPT-2's shape in half precision: s b h (10 + 24/t), or s b h 34/t with sequence parallelism, and 5 a s^2 b / t more where
    the attention scores are kept, that is without a flash kernel (2205.05198, equations 1, 2 and 4; table 2).
    """
    w, t, value = _get_widths(shape), tensor_parallel_size, 2 if half else 4
    replicated = value * 4 * w.h + (
        2 * w.h if shape.config.hidden_dropout else 0
    )  # inputs of norms and column-parallel linears; masks
    cut = value * (w.q + 2 * w.k + w.q + w.mlp_in + w.f)
    if scores_kept:
        cut += (
            shape.config.num_attention_heads
            * shape.config.seq_length
            * (2 * value + 1 if shape.config.attention_dropout else value)
        )
    per_token = replicated // (t if sequence_parallel else 1) + cut // t
    return shape.config.seq_length * micro_batch_size * per_token


def estimate_layer_input_bytes(
    shape: ModelShape,
    micro_batch_size: int,
    tensor_parallel_size: int = 1,
    *,
    sequence_parallel: bool = False,
    half: bool = True,
) -> int:
    """All that full recomputation keeps of a layer for one microbatch: its input, 2 s b h in half precision (2205.05198, 5)."""
    values = shape.config.seq_length * micro_batch_size * shape.config.hidden_size
    return (2 if half else 4) * values // (tensor_parallel_size if sequence_parallel else 1)


def estimate_stage_activation_bytes(
    shape: ModelShape,
    micro_batch_size: int,
    tensor_parallel_size: int = 1,
    *,
    layers: int,
    recomputed_layers: int = 0,
    sequence_parallel: bool = False,
    half: bool = True,
    scores_kept: bool = False,
) -> int:
    """What one microbatch keeps of a stage with that many layers until its backward pass, on one rank: all activations of a layer,
    or its input only where it is recomputed."""
    sharing = {"sequence_parallel": sequence_parallel, "half": half}
    whole = estimate_layer_activation_bytes(
        shape, micro_batch_size, tensor_parallel_size, scores_kept=scores_kept, **sharing
    )
    kept = estimate_layer_input_bytes(shape, micro_batch_size, tensor_parallel_size, **sharing)
    return (layers - recomputed_layers) * whole + recomputed_layers * kept


def estimate_logits_bytes(
    shape: ModelShape, micro_batch_size: int, tensor_parallel_size: int = 1
) -> int:
    """The last stage's fp32 logits of one microbatch: 4 s b V / t (2205.05198, 4.3)."""
    return (
        4
        * shape.config.seq_length
        * micro_batch_size
        * shape.padded_vocab_size
        // tensor_parallel_size
    )
