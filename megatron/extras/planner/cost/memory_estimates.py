"""Estimates of the memory of a model on one rank, from its configuration alone.

Sources:
- Bytes per parameter: the notes of BigScience's 104B run. ZeRO stages:
  https://arxiv.org/abs/1910.02054.
- Activations: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.

The notation is that of `megatron.model.flops`.
"""

from dataclasses import dataclass

from megatron.model.flops import get_widths
from megatron.model.shape import ModelShape


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes of everything that scales with the parameters. Activations and buffers are extra."""

    master_weights: int
    working_weights: int
    """The weights that the model computes with, if they are not the master weights themselves."""
    optimizer_states: int
    gradients: int

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return self.master_weights + self.working_weights + self.optimizer_states + self.gradients


def estimate_parameter_memory(
    parameters: int, *, half: bool, state_bytes: int | None = None
) -> ParameterMemory:
    """Estimate the memory of parameters. With Adam it is the rule of 18 bytes for each.

    These are 4 for fp32 weights, 2 for half-precision weights, 8 for Adam's moments and 4 for fp32
    gradients.

    Args:
        parameters: Number of parameters.
        half: The model computes in bf16 or fp16. In fp32 there is no second copy of the weights,
            and the rule has 16 bytes.
        state_bytes: Bytes of the optimizer's states. Default: those of Adam.
    """
    if state_bytes is None:
        state_bytes = 8 * parameters
    return ParameterMemory(
        4 * parameters, 2 * parameters if half else 0, state_bytes, 4 * parameters
    )


def estimate_parameter_memory_per_rank(
    rank_parameters: int,
    *,
    half: bool,
    data_parallel_size: int,
    zero_stage: int,
    shard_size: int | None = None,
    state_bytes: int | None = None,
) -> ParameterMemory:
    """Estimate the memory of parameters on one rank with ZeRO, rounded up.

    `state_bytes` are those before ZeRO shards them. See `estimate_parameter_memory`.

    Stage 1 shards optimizer states and master weights over the data-parallel ranks. Stage 2 also
    shards gradients. Stage 3 also shards the weights that the model computes with. `shard_size` is
    the number of ranks that share one copy of the model. By default it is all of them.

    In fp32 the model computes with the master weights, unless stage 1 or 2 shards them. Then the
    rank also has a complete copy.
    """
    ranks = shard_size or data_parallel_size
    whole = estimate_parameter_memory(rank_parameters, half=half, state_bytes=state_bytes)
    if not half and data_parallel_size > 1 and zero_stage in (1, 2):
        fp32_copies = 4 * rank_parameters
    else:
        fp32_copies = 0

    def shard_from(stage: int, size: int) -> int:
        # Rounded up, because the last shard is padded.
        if zero_stage >= stage:
            return -(-size // ranks)
        return size

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
    """Estimate the activations that one layer keeps for the backward pass of one microbatch.

    The estimate is for one rank, without any recomputation. For GPT-2's shape in half precision it
    is s b h (10 + 24/t), or s b h 34/t with sequence parallelism. Without a
    flash kernel the attention scores are kept as well, which are 5 a s^2 b / t. Source: 2205.05198,
    equations 1, 2 and 4, and table 2.
    """
    w = get_widths(shape)
    t = tensor_parallel_size
    if half:
        value = 2
    else:
        value = 4
    # Inputs of norms and column-parallel linear layers, and the masks of dropout at one byte each.
    replicated = value * 4 * w.h + (2 * w.h if shape.config.hidden_dropout else 0)
    # Queries, keys, values, the attention's output and the MLP's inner activations.
    sharded = value * (w.q + 2 * w.k + w.q + w.mlp_in + w.f)
    if scores_kept:
        # Scores before and after the dropout, and its mask.
        sharded += (
            shape.config.num_attention_heads
            * shape.config.seq_length
            * (2 * value + 1 if shape.config.attention_dropout else value)
        )
    # Sequence parallelism also shards what every tensor-parallel rank holds otherwise.
    per_token = replicated // (t if sequence_parallel else 1) + sharded // t
    return shape.config.seq_length * micro_batch_size * per_token


def estimate_layer_input_bytes(
    shape: ModelShape,
    micro_batch_size: int,
    tensor_parallel_size: int = 1,
    *,
    sequence_parallel: bool = False,
    half: bool = True,
) -> int:
    """Estimate what full recomputation keeps of a layer for one microbatch, which is its input.

    In half precision this is 2 s b h (2205.05198, section 5).
    """
    values = shape.config.seq_length * micro_batch_size * shape.config.hidden_size
    if half:
        bytes_of_value = 2
    else:
        bytes_of_value = 4
    if sequence_parallel:
        ranks = tensor_parallel_size
    else:
        ranks = 1
    return bytes_of_value * values // ranks


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
    """Estimate what one microbatch keeps of a stage until its backward pass, on one rank.

    A layer keeps all its activations, or only its input if it is recomputed.
    """
    sharing = {"sequence_parallel": sequence_parallel, "half": half}
    whole = estimate_layer_activation_bytes(
        shape, micro_batch_size, tensor_parallel_size, scores_kept=scores_kept, **sharing
    )
    kept = estimate_layer_input_bytes(shape, micro_batch_size, tensor_parallel_size, **sharing)
    return (layers - recomputed_layers) * whole + recomputed_layers * kept


def estimate_logits_bytes(
    shape: ModelShape, micro_batch_size: int, tensor_parallel_size: int = 1
) -> int:
    """Estimate the last stage's fp32 logits of one microbatch, 4 s b V / t (2205.05198, 4.3)."""
    return (
        4
        * shape.config.seq_length
        * micro_batch_size
        * shape.padded_vocab_size
        // tensor_parallel_size
    )
