"""The tensors that this trainer holds for one microbatch, counted from its modules.

`megatron.extras.planner.cost.peak` adds them up to the peak of a step. The modules are those of
`megatron.model`. Each formula here names what it counts, so that a change of a module has one place
to follow. `tests/cuda/test_predicted_memory.py` compares the sums with steps on fake GPUs.

Notation: T = s b / c tokens of a microbatch on one of c context-parallel ranks, h hidden size, f
feed-forward size, a heads of width d, g query groups, q = a d and k = g d widths of queries and
keys, v padded vocabulary, t tensor-parallel size. All results are bytes.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, cast

from megatron.extras.planner.cost.float8 import list_attention_linears
from megatron.extras.planner.cost.layout import RankLayout, Software
from megatron.extras.planner.cost.parameters import get_widths
from megatron.model.layer_parts import NORMS, get_activation
from megatron.model.shape import ModelShape

LOGIT_CHUNK_BYTES = 256 << 20
"""Largest size of the fp32 logits that the loss has at once on a GPU. See `megatron.model.loss`."""
LOGIT_TILE_ROWS = 256
"""Divisor of the rows of such a chunk."""

Kernel = Literal["flash", "efficient", "none"]
"""flash takes 16 bits without a bias. cuDNN's kernel keeps the same tensors, and takes a bias. The
memory-efficient kernel takes a bias and fp32, but no grouped queries. Without a kernel, the
probabilities are in memory."""


def choose_kernel(shape: ModelShape, software: Software, *, windowed: bool = False) -> Kernel:
    """Return the attention kernel that torch chooses on a GPU.

    Args:
        shape: Sizes of the model.
        software: The trainer.
        windowed: Whether the layer has a sliding window that is shorter than the sequence.
    """
    if software.attends_in_blocks:
        return "none"
    biased = windowed or shape.has_alibi
    # Torch's flash kernel takes values that are as wide as keys.
    flash = software.flash and (software.cudnn or shape.value_dim == shape.head_dim)
    if flash and software.half and (software.cudnn or not biased):
        return "flash"
    if shape.query_groups == shape.config.num_attention_heads:
        return "efficient"
    return "none"


@dataclass(frozen=True)
class TensorSizes:
    """Bytes of the tensors of one microbatch on one rank."""

    stream: float
    """The hidden states between two layers, or this rank's slice of them."""
    layer: float
    """What a layer keeps for its backward pass, with its input."""
    recomputed_layer: float
    """What a recomputed layer keeps: its input, and results of operators."""
    in_backward: float
    """Most that exists while the backward pass of a layer runs: what the layer keeps, gradients of
    activations, and gradients of its weights that are not accumulated yet."""
    in_first_backward: float
    """The same in the first backward pass of a step, in which the fp32 gradients are allocated."""
    unread_result: float
    """What also exists in the backward pass of a recomputed layer: a result that it keeps and
    does not read again."""
    after_backward: float
    """What of this is left at the end of the layer: the gradient of its input, and the gradients of
    weights that FSDP2 has not accumulated yet."""
    embedding: float
    """What the embedding keeps."""
    embedding_backward: float
    """Most that the embedding's backward pass adds to what it keeps: hidden states, and the
    gradient of the table."""
    table_gradient: float
    """Gradient of the table of words, as autograd computes it."""
    tables: float
    """Tables of positions, which all layers of a stage share."""
    loss_kept: float
    """What the final norm and the loss keep: the last hidden states, and two gradients."""
    loss_forward: float
    """Most that exists during the forward pass of the final norm and the loss."""
    loss_backward: float
    """The same during the backward pass of the loss."""
    loss_gradient: float
    """Gradient of the output matrix that stays until FSDP2 accumulates it at the end."""


@dataclass(frozen=True)
class TensorCase:
    """What determines the tensors of a layer."""

    shape: ModelShape
    layout: RankLayout
    software: Software
    """The trainer. Only its precision, `kept_operators` and what is fused are used."""
    holds: bool
    """Whether FSDP2 holds gradients as autograd computes them until the end of a layer."""
    holds_outside: bool
    """The same for parameters outside of layers."""
    windowed: bool = False
    """Whether the layer has a sliding window that is shorter than the sequence."""


def measure_tensors(case: TensorCase, kind: "type[LayerTensors] | None" = None) -> TensorSizes:
    """Return the sizes of the tensors of one microbatch.

    Args:
        case: What determines them.
        kind: What counts a layer. Default: that of layers with attention and an MLP.
    """
    kind = kind or LayerTensors
    layout = case.layout
    # Only these fields matter, so many layouts of a search have the same sizes.
    key = layout.keep(
        *("tensor", "context", "exchange_heads", "micro_batch", "sequence_parallel", "zero_stage"),
        *("partition_inputs", "host_inputs", "imbalance"),
    )
    key = replace(
        key,
        recompute="selective" if layout.recompute == "selective" else "none",
        data=min(2, layout.data),
        expert=layout.expert if kind.has_experts else None,
    )
    # A class can be a part of the cache's key, which mypy does not see.
    return _measure(replace(case, layout=key), cast(Hashable, kind))


@lru_cache(maxsize=4096)
def _measure(case: TensorCase, kind: "type[LayerTensors]") -> TensorSizes:
    tensors = kind(case)
    first = kind(case, starts=True)
    return TensorSizes(
        stream=tensors.x,
        layer=tensors.layer,
        recomputed_layer=_choose_input(tensors.x, case.layout) + tensors.kept_results,
        in_backward=_find_highest(tensors.list_backward_steps()),
        in_first_backward=_find_highest(first.list_backward_steps()),
        unread_result=tensors.unread_result,
        after_backward=2 * tensors.x + tensors.pending_gradients,
        embedding=tensors.embedding,
        embedding_backward=2 * tensors.whole + tensors.value * tensors.output_matrix,
        table_gradient=tensors.value * tensors.output_matrix,
        tables=tensors.tables,
        loss_kept=tensors.x + tensors.whole + tensors.output_gradient,
        loss_forward=tensors.loss_forward,
        loss_backward=tensors.loss_backward,
        loss_gradient=tensors.value * tensors.output_matrix * case.holds_outside,
    )


def _choose_input(stream: float, layout: RankLayout) -> float:
    """Return what a recomputed layer keeps of its input on the device."""
    if layout.host_inputs:
        return 0.0
    return stream / layout.tensor if layout.partition_inputs else stream


def _find_highest(steps: Iterable[tuple[float, float]]) -> float:
    """Return the most bytes that exist during steps of (allocated bytes, bytes freed then)."""
    held = 0.0
    highest = 0.0
    for allocated, freed in steps:
        held += allocated
        highest = max(highest, held)
        held -= freed
    return highest


class LayerTensors:
    """The tensors of a layer, of the embedding and of the loss."""

    has_experts: ClassVar[bool] = False

    def __init__(self, case: TensorCase, *, starts: bool = False) -> None:
        """Take what determines the sizes.

        Args:
            case: What determines them.
            starts: Whether the sums of gradients over microbatches start in this backward pass.
        """
        shape, layout, software = case.shape, case.layout, case.software
        config = shape.config
        self._case = case
        self._starts = starts
        self._shape = shape
        self._config = config
        self._layout = layout
        self._software = software
        self._selective = layout.recompute == "selective"
        self._in_float8 = software.float8 is not None
        self._tensorwise = software.float8 is not None and not software.float8.rowwise
        self._rounds_gathered = layout.zero_stage == 3 and layout.data * layout.context > 1
        """Whether weights are rounded for each pass, because they are gathered for it."""
        # The norms of heads are between the projection and the rotation.
        self._fused_rotation = (
            software.fused_rotation
            and shape.rotary_dim > 0
            and config.qk_norm is None
            and shape.attention == "dot_product"
        )
        # The projection to queries, keys and values has two weights if ranks share query groups.
        self._fused_projection = software.fused_gradients and shape.query_groups >= layout.tensor
        self._heads = config.num_attention_heads // layout.tensor
        # Tokens of this rank. Context-parallel ranks share the sequence.
        self._tokens = config.seq_length * layout.micro_batch // layout.context
        self.value = software.value_bytes
        self.gradient_value = 4 if software.fused_gradients else self.value
        """Bytes of an element of a weight's gradient that FSDP2 holds."""
        self._kernel = choose_kernel(shape, software, windowed=case.windowed)
        widths = get_widths(shape, layout.tensor)
        per_value = self.value * self._tokens
        self._q: float = per_value * widths.q
        self._k: float = per_value * widths.k
        self._v: float = per_value * widths.v
        self._qkv: float = self._q + self._k + self._v
        """Queries, keys and values."""
        self._result: float = per_value * widths.context
        """What the attention core returns."""
        self._f = per_value * widths.f
        self._gate: float = per_value * self._heads * shape.gate_dim
        self.whole = per_value * config.hidden_size
        """Hidden states of all tokens."""
        share = layout.tensor**layout.sequence_parallel
        self._n = self.whole / share
        # A residual stream in fp32 is cast by the norms.
        self.x = self._n * (2 if software.fp32_residual and software.half else 1)
        """The residual stream."""
        self._gathered: float = self.whole * layout.sequence_parallel
        self._mask = self._dropped = 0.0
        if config.hidden_dropout:
            # A kernel computes the mask again. A compiled graph keeps it.
            self._mask = software.compiled * self._tokens * config.hidden_size / share
            self._dropped = self._n
        self._activation = get_activation(config)
        self._halves = 1 + self._activation.gated
        self._statistics = 4 * NORMS.require(config.normalization).statistics * self._tokens / share
        self.output_matrix = shape.padded_vocab_size * config.hidden_size // layout.tensor
        """Elements of the output matrix."""

    # -- what is kept -----------------------------------------------------------------------------

    @cached_property
    def layer(self) -> float:
        """What a layer keeps: two norms, attention, MLP and two dropouts."""
        # The input of the layer and the sum after attention, and what the norms make of them.
        streams = 2 * self.x + self._entered + 2 * self._statistics
        if self._config.parallel_residual:
            # Both norms read the input of the layer.
            streams -= self.x
        return streams + self._attention + self._feed_forward + 2 * self._mask

    @cached_property
    def _feed_forward(self) -> float:
        """What the MLP keeps, with its input."""
        return self._entered + self._mlp - self._f + self._keep_input(self._f)

    def _keep_input(self, size: float) -> float:
        """Return what a product keeps of an input in 16 bits. One scale keeps it in float8."""
        return size / self.value if self._tensorwise else size

    @cached_property
    def _entered(self) -> float:
        """What the products keep of the input of a column-parallel layer."""
        # A slice is gathered again, and then rounded again.
        if self._layout.sequence_parallel:
            return self._n
        return self._keep_input(self._n)

    @cached_property
    def _projected(self) -> float:
        """Queries, keys and values, and the forms of them that the kernel reads."""
        if self._layout.context > 1 and not self._selective:
            return self._shared
        copied = (
            self._kernel == "none" and not self._selective and not self._software.attends_in_blocks
        )
        if copied and self._config.qk_norm is None:
            # The core keeps copies of all three.
            return 0.0
        if self._shape.attention == "latent":
            # Values are a part of what one product returns, with keys that are copied.
            pairs = self._config.qk_head_dim + self._shape.value_dim
            return self._q + self._k + self.value * self._tokens * self._heads * pairs
        size: float = self._qkv
        if self._fused_rotation:
            # The kernel writes all three, and the projection is not kept.
            return size
        grouped = self._shape.query_groups < self._config.num_attention_heads
        size += self._norms_in_fp32
        if copied:
            return size
        # The rotation and the norms of heads write queries and keys to a new tensor.
        if self._shape.rotary_dim or self._config.qk_norm is not None:
            size += self._q + self._k
        # Queries of several heads of a group are not in one piece, so they are copied. The norms of
        # heads write them to a tensor of their own.
        if grouped and self._config.qk_norm is None:
            size += self._q
        return size

    @property
    def _received(self) -> float:
        """The keys and values that a context-parallel rank has received, and keeps.

        They are those of the first half of the sequence, and those of the late part. On the first
        rank these are all. Ranks that exchange heads have queries, keys and values of their heads.
        """
        if self._layout.exchange_heads:
            return self._qkv
        return 1.5 * (self._k + self._v) * self._layout.context

    @property
    def _shared(self) -> float:
        """What attention keeps of queries, keys and values if ranks share the sequence.

        Messages have copies of them, so the projection itself is not kept.
        """
        # The kernel keeps views of what was received.
        size = self._received + self._norms_in_fp32
        if self._layout.exchange_heads:
            return size
        if self._shape.query_groups < self._config.num_attention_heads:
            return self._q + size
        if self._shape.attention == "latent":
            return self._q + size
        # The queries are a view of what the rotation wrote, or of the projection.
        others = 2
        if self._shape.rotary_dim:
            others = 1
        if self._fused_rotation or self._norms_in_fp32:
            others = 0
        return self._q + others * self._k + size

    @property
    def _norms_in_fp32(self) -> float:
        """What a norm over all heads keeps: its input in fp32, and that divided by its norm."""
        tensors = {None: 0, "head": 0, "full": 2}[self._config.qk_norm]
        if self._software.compiled:
            return 0.0
        return tensors * (self._q + self._k) * 4 / self.value

    @property
    def _in_single_block(self) -> bool:
        """Whether attention with dropout is computed for all queries at once."""
        square = self._heads * self._tokens * self._config.seq_length
        return self._software.attends_in_blocks and 4 * square <= LOGIT_CHUNK_BYTES

    @property
    def _block_rows(self) -> int:
        """Queries of a block of attention with dropout. See `megatron.model.loss.split_rows`."""
        row = 4 * self._heads * self._layout.micro_batch * self._config.seq_length
        rows = max(1, LOGIT_CHUNK_BYTES // row)
        return rows - rows % LOGIT_TILE_ROWS if rows > LOGIT_TILE_ROWS else rows

    @cached_property
    def _core(self) -> float:
        """What the attention core keeps beside queries, keys, values and its result."""
        rows = self._heads * self._tokens
        if self._kernel != "none":
            # An fp32 number of each query and head.
            return 4 * rows
        # Without a kernel, torch computes in fp32 for half precision too.
        square = rows * self._config.seq_length
        if self._software.attends_in_blocks:
            # Keys and values are copied for each query head. With several blocks, nothing is kept.
            # A single block keeps queries, and probabilities before and after dropout.
            grouped = self._shape.query_groups < self._config.num_attention_heads
            single = self._in_single_block * ((4 + self.value) * square + self._q)
            return 2 * self._q * grouped + single
        probabilities = 4 * square
        # Scaled queries, and scaled keys and values of which each query head has a copy.
        return probabilities + 3 * self._q * 4 / self.value

    @cached_property
    def _context_copies(self) -> float:
        """The attention's result as the kernel keeps it, and as the next product reads it."""
        # The memory-efficient kernel writes [b, s, n, d], and the product reads [s, b, n d]. The
        # flash kernel writes the order of the queries, which is the one that the product reads.
        if self._layout.context > 1 and not self._selective:
            # The results of the parts, or of some heads, are joined to a new tensor.
            return self._result + self._keep_input(self._result)
        if self._kernel == "efficient" and self._layout.micro_batch > 1 and not self._selective:
            return self._result + self._keep_input(self._result)
        if self._tensorwise:
            # The kernel keeps its own result, unless it is computed again.
            return self._keep_input(self._result) + self._result * (not self._selective)
        return self._result

    @property
    def _latents(self) -> float:
        """The latent vectors before and after their norms, the rotary key, and the statistics."""
        if self._shape.attention != "latent":
            return 0.0
        config = self._config
        queries = config.q_lora_rank or 0
        width = 2 * queries + 2 * config.kv_lora_rank + config.qk_pos_emb_head_dim
        share = self._layout.tensor**self._layout.sequence_parallel
        return self.value * self._tokens * width / share + 2 * self._statistics

    @cached_property
    def _attention(self) -> float:
        # The gate keeps its sigmoid, and its product with the result of attention.
        kept = self._projected + self._latents + self._context_copies + 2 * self._gate
        if self._selective:
            return kept
        return kept + self._core

    @cached_property
    def _mlp(self) -> float:
        """The inner activations of the MLP."""
        row = self._activation
        if row.gated and (self._software.fused_gate or self._software.compiled):
            # Gate, other factor and product. The activation is computed again.
            return 3 * self._f
        return row.kept_values * self._f + row.kept_bytes * self._f / self.value

    @cached_property
    def kept_results(self) -> float:
        """Results of operators that a recomputed layer keeps. See `megatron.model.recompute`."""
        size = 0.0
        if "matmul" in self._software.kept_operators:
            # The projections, and what both row-parallel products return before they are added up.
            size += self._qkv + self._halves * self._f + 2 * self.whole
        if "matmul" in self._software.kept_operators and self._software.attends_in_blocks:
            # Logits for the keys up to the end of each block, and results. Only fp16 is converted.
            s = self._config.seq_length
            square = self._heads * self._tokens * (s + min(s, self._block_rows)) / 2
            size += (4 if self._software.fp16 else self.value) * square + self._result
        elif "matmul" in self._software.kept_operators and self._kernel == "none":
            # Logits and results of attention are products in fp32.
            square = self._heads * self._tokens * self._config.seq_length
            size += 4 * square + self._result * 4 / self.value
        if "attention" in self._software.kept_operators and self._kernel != "none":
            size += self._result + self._core
        return size

    @cached_property
    def unread_result(self) -> float:
        """The result of a layer's last product, if nothing after it keeps a tensor.

        The recomputation ends before this product then, so torch drops its result only after the
        backward pass of the layer. A fused product tells torch what it keeps after it has run.
        """
        software = self._software
        is_kept = "matmul" in software.kept_operators and not software.fused_gradients
        is_last = self._config.has_norms_first and not self._dropped
        return self.whole * (is_kept and is_last)

    @cached_property
    def embedding(self) -> float:
        """What the embedding keeps."""
        size = self._mask
        if self._config.embed_layernorm:
            size += self._n + self._statistics
        if self._layout.tensor > 1:
            # Ids as int64, and whether another rank has them.
            size += 9 * self._tokens
        return size

    @cached_property
    def tables(self) -> float:
        """Tables of rotary or ALiBi positions and of the window."""
        config = self._config
        s = config.seq_length
        square = self.value * s * s
        if self._layout.context > 1 and not self._layout.exchange_heads:
            # The queries of one part, and all keys.
            square = self.value * s * (s // (2 * self._layout.context))
        elif self._layout.context > 1 and self._shape.has_alibi:
            square //= self._layout.context
        # Cosine and sine of half of the rotated channels, in fp32.
        size: float = 4 * s * self._shape.rotary_dim
        if self._shape.has_alibi:
            size += self._heads * square
        if config.sliding_window is not None and config.sliding_window < s:
            size += square * (self._heads if self._shape.has_alibi else 1)
        return size

    # -- the backward pass of a layer -------------------------------------------------------------

    @cached_property
    def _weights(self) -> tuple[float, float, float, float]:
        """Gradients of the matrices: qkv, output, MLP input and output, in this order.

        Those before latent attention are counted together.
        """
        # An activation [T, width] belongs to a matrix [h, width] of the same dtype.
        h = self._config.hidden_size
        qkv, context, inner = (
            size * h / self._tokens for size in (self._qkv + self._gate, self._result, self._f)
        )
        if self._shape.attention == "latent":
            linears = list_attention_linears(self._shape, self._layout.tensor)[:-1]
            qkv = self.value * sum(each.weights for each in linears)
        return qkv, context, self._halves * inner, inner

    @cached_property
    def pending_gradients(self) -> float:
        """Gradients of a layer's weights that stay until the end of the layer."""
        # Otherwise autograd adds each of them to the fp32 sum immediately.
        size = sum(self._weights) * self._case.holds
        return size * self.gradient_value / self.value

    def _compute_weight(self, size: float, *, fused: bool) -> tuple[float, float]:
        """Return what the gradient of a matrix allocates, and what is freed right after.

        Args:
            size: Bytes of the gradient in the dtype of the matrix.
            fused: Whether the product itself adds to the gradient in fp32.
        """
        # Otherwise a gradient in half precision is converted before it is added to a sum in fp32.
        converted = 2 * size * self._software.half
        if self._starts and not self._case.holds:
            # What is converted stays as the sum. Products that add write into it directly.
            if fused and not self._tensorwise:
                return converted, 0.0
            return size + converted, size * self._software.half
        if fused and self._tensorwise:
            # Another kernel adds the product.
            return size + converted * self._case.holds, size
        if fused:
            return converted * self._case.holds, 0.0
        if not self._case.holds:
            return size + converted, size + converted
        summed = self._software.fused_gradients
        return size + converted * summed, size * summed

    def list_backward_steps(self) -> Iterable[tuple[float, float]]:
        """Yield what each step of the backward pass of a layer allocates, and what it then frees.

        All that the layer keeps and the gradient of its output exist before.
        """
        yield self.layer + self.x, 0.0
        yield from self._list_feed_forward_steps()
        yield from self._list_norm_steps(kept=self.x * (not self._config.parallel_residual))
        yield from self._list_output_steps()
        yield from self._list_core_steps()
        projected = self._compute_weight(self._weights[0], fused=self._fused_projection)
        gates = [self._gate] if self._gate else []
        yield from self._list_entry_steps([self._qkv, *gates], projected)
        yield from self._list_norm_steps(kept=self.x)

    def _list_feed_forward_steps(self) -> Iterable[tuple[float, float]]:
        """Yield the steps of the second half of a layer, up to its norm."""
        if self._in_float8:
            # Before that, the layer's last product rounds its input, which is still there.
            rounded = self._f / self.value
            if self._tensorwise:
                rounded += self._f
            yield rounded, rounded
        yield from self._list_mlp_steps()

    def _list_mlp_steps(self) -> Iterable[tuple[float, float]]:
        """Yield the steps from the gradient of the layer's output to that of the MLP's input."""
        gated = self._activation.gated
        dropped = self._dropped
        down = self._compute_weight(self._weights[3], fused=self._software.fused_gradients)
        up = self._compute_weight(self._weights[2], fused=self._software.fused_gradients)
        yield dropped, self._mask
        # The gradient of the last product's input takes the place of that input.
        yield self._gathered, 0.0
        yield from self._list_rounded_gradients([self.whole], self._f)
        yield self._f, 0.0
        left = self._count_rounded([self.whole])
        kept = self._keep_input(self._f)
        yield down[0], kept + down[1] + dropped + self._gathered + left
        if gated:
            fused = self._software.fused_gate or self._software.compiled
            # Gradients of both factors. Then the one of the gate passes its activation function,
            # unless a kernel computes both.
            yield 2 * self._f, self._mlp - self._f * (not fused)
            if not fused:
                yield self._f, 2 * self._f
            yield from self._list_entry_steps([self._f, self._f], up)
        else:
            yield self._f, self._mlp
            yield from self._list_entry_steps([self._f], up)

    def _list_norm_steps(self, kept: float) -> Iterable[tuple[float, float]]:
        """Yield the steps of a norm that keeps its input, and of the residual connection."""
        yield self.x, self._n + kept + self._statistics
        # The sum with the gradient that the residual connection passes on is a new tensor.
        yield self.x, 2 * self.x

    def _list_output_steps(self) -> Iterable[tuple[float, float]]:
        """Yield the steps of the dropout after attention and of the output projection."""
        dropped = self._dropped
        weight = self._compute_weight(self._weights[1], fused=self._software.fused_gradients)
        yield dropped + self._gathered, self._mask
        copies = max(0.0, self._context_copies - self._result)
        yield from self._list_rounded_gradients([self.whole], self._result)
        yield self._result, 0.0
        left = self._count_rounded([self.whole])
        yield weight[0], weight[1] + dropped + self._gathered + copies + left
        # Gradients of the gate and of the result take the place of what the gate keeps.
        yield 2 * self._gate, 3 * self._gate

    def _list_core_steps(self) -> Iterable[tuple[float, float]]:
        """Yield the steps from the gradient of the attention's result to that of the projection."""
        projected = self._qkv
        again = 0.0
        if self._selective:
            again = self._result
            if self._layout.context > 1:
                again = self._q + self._result + self._received
            yield self._core + again, 0.0
        if self._kernel == "none":
            # Gradients of the probabilities and of the logits.
            square = self._heads * self._tokens * self._config.seq_length
            both: float = 2 * 4 * square
            if self._in_single_block:
                # The product freed its input before, which is what dropout made of them.
                both -= self.value * square
            elif self._software.attends_in_blocks:
                # A block has probabilities and both gradients. Slices add to those of its inputs.
                row = 4 * self._heads * self._layout.micro_batch * self._config.seq_length
                both = min(both, 3 * self._block_rows * row) + 2 * self._q
            yield both, both
        if self._layout.context > 1:
            # Gradients of what was received, before they are sent.
            yield self._received, self._received
        results: float = 2 * self._result
        if self._tensorwise and self._selective:
            # The product keeps its input, but not the result of attention.
            results = self._result + self._keep_input(self._result)
        yield projected, self._projected + self._core + results + again
        # The gradients of queries, keys and values are joined to that of the projection. This takes
        # at most two more tensors of its size: the gradients before the rotation, and the result.
        # A kernel writes the result only.
        tensors = 2 - self._fused_rotation
        yield tensors * projected, tensors * projected

    def _list_entry_steps(
        self, gradients: list[float], weights: tuple[float, float]
    ) -> Iterable[tuple[float, float]]:
        """Yield the steps of the products that read the same input.

        Args:
            gradients: Bytes of the gradient of the result of each product.
            weights: Bytes that the gradients of their matrices allocate, and that are then freed.
        """
        matrices = len(gradients)
        # The ranks' slices of the input are gathered after the messages of the scales.
        yield from self._list_rounded_gradients(gradients, self.whole, self._gathered)
        # The second product is added to the first one.
        yield matrices * self.whole, (matrices - 1) * self.whole
        if self._layout.sequence_parallel:
            yield self._n, self.whole
        again = 0.0
        if self._tensorwise and self._layout.sequence_parallel:
            again = self.whole / self.value
        yield again, 0.0
        allocated, freed = weights
        freed += self._count_rounded(gradients) + again
        yield allocated, freed + sum(gradients) + self._gathered + self._entered

    # -- float8 -----------------------------------------------------------------------------------

    def _count_matrix(self, gradient: float, inner: float) -> float:
        """Return the elements of a matrix, from the bytes of its output and of its input."""
        return gradient * inner / (self.value * self._tokens) ** 2

    def _list_rounded_gradients(
        self, gradients: list[float], inner: float, gathered: float = 0.0
    ) -> Iterable[tuple[float, float]]:
        """Yield the steps up to the products for the input's gradient.

        Args:
            gradients: Bytes of the gradient of the result of each product.
            inner: Bytes of their input in 16 bits.
            gathered: Bytes of the input that is gathered.
        """
        if not self._in_float8:
            yield gathered, 0.0
            return
        yield self._count_rounded(gradients), 0.0
        yield gathered, 0.0
        # The results of earlier products are there, which the caller counts afterwards.
        done = 0.0
        before = 0.0
        for size in gradients:
            matrix = 0.0
            if self._rounds_gathered:
                matrix = self._count_matrix(size, inner)
            yield done + before + matrix, before
            yield inner, matrix + inner + done
            done += inner
            before = matrix

    def _count_rounded(self, gradients: list[float]) -> float:
        """Return the bytes of rounded gradients, which exist until the end of the products."""
        if not self._in_float8:
            return 0.0
        orders = 1 + self._tensorwise
        return orders * sum(gradients) / self.value

    # -- embedding and loss -----------------------------------------------------------------------

    @cached_property
    def output_gradient(self) -> float:
        """The gradient of the output matrix that the loss keeps. In fp16 it is in fp32."""
        return (4 if self._software.fp16 else self.value) * self.output_matrix

    @cached_property
    def loss_forward(self) -> float:
        """Most that exists in the forward pass of the final norm and the loss."""
        # The stream, the output of the norm, the gradient of it, and that of the logits.
        columns = self._shape.padded_vocab_size // self._layout.tensor
        held = self.x + self._n + self._gathered + self.whole + self.value * self._tokens * columns
        rows = max(1, LOGIT_CHUNK_BYTES // (4 * columns))
        if rows > LOGIT_TILE_ROWS:
            rows -= rows % LOGIT_TILE_ROWS
        chunks = -(-self._tokens // rows)
        last = 4 * (self._tokens - (chunks - 1) * rows) * columns
        chunk = 4 * min(rows, self._tokens) * columns
        # The product of a chunk, with its fp32 logits or with those of the chunk before.
        computed = 1.5 * chunk
        # Products of odd widths have a padded copy of the matrix.
        copied = 0
        if self._software.half and columns % 8:
            copied = self.value * self.output_matrix
        if not self._software.half or self._software.fused_loss:
            # In fp32 and for kernels they are in the place of their gradient.
            computed = last = 0
        return held + max(computed + copied, last + self.output_gradient)

    @cached_property
    def loss_backward(self) -> float:
        """Most that exists in the backward pass of the loss."""
        # The gradients of the hidden states and of the matrix are multiplied by the loss's factor.
        scaled = self.output_gradient + self._converted_output_gradient
        return self.x + 2 * self.whole + self.output_gradient + scaled

    @property
    def _converted_output_gradient(self) -> float:
        """The gradient of the output matrix after its conversion. 0 if it is not converted."""
        if self._software.fp16:
            return self.value * self.output_matrix
        # Autograd's sum is in fp32.
        return 4 * self.output_matrix * (self._software.half and not self._case.holds_outside)
