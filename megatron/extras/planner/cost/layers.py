"""The time of one transformer layer, of the embedding and of the output layer on one rank.

Notation: T tokens of a microbatch on this rank, h hidden size, f feed-forward size, a heads of
width d, g query groups, q = a d and k = g d widths of queries and keys, t tensor-parallel size.
Widths are in elements. An element has 2 bytes, or 4 in fp32.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.config.table import Table
from megatron.extras.planner.cost.communication import (
    estimate_added_seconds,
    estimate_collective_seconds,
    estimate_small_all_reduce_seconds,
)
from megatron.extras.planner.cost.float8 import (
    Linear,
    Rounding,
    ScaleMessage,
    count_rounding,
    list_float8_linears,
    list_linears,
    list_scale_messages,
)
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.kernels import (
    Gemm,
    estimate_flash_seconds,
    estimate_gemm_seconds,
    estimate_memory_seconds,
)
from megatron.extras.planner.cost.layout import RankLayout, Software
from megatron.extras.planner.cost.parameters import get_widths
from megatron.extras.planner.cost.tensors import Kernel, choose_kernel
from megatron.model.layer_parts import get_activation
from megatron.model.shape import ModelShape


@dataclass(frozen=True)
class Seconds:
    """Seconds of a device, by what it does."""

    gemm: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tensor: float = 0.0
    """Tensor-parallel and context-parallel communication that computation waits for."""
    gaps: float = 0.0
    """Time between kernels."""
    rounding: float = 0.0
    """Rounding to float8, with the largest values that it needs."""
    scales: float = 0.0
    """Messages with largest values, which rounding to float8 waits for."""
    experts: float = 0.0
    """Messages with tokens on their way to experts and back."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        computed = self.gemm + self.attention + self.pointwise + self.tensor + self.gaps
        return computed + self.rounding + self.scales + self.experts

    def __add__(self, other: "Seconds") -> "Seconds":
        """Return the sum by parts."""
        return Seconds(*map(operator.add, vars(self).values(), vars(other).values()))

    def scale(self, factor: float) -> "Seconds":
        """Return each part multiplied by `factor`."""
        return Seconds(*(factor * part for part in vars(self).values()))


@dataclass(frozen=True)
class Passes:
    """The forward pass, and the backward pass with what it recomputes."""

    forward: Seconds
    backward: Seconds

    def __add__(self, other: "Passes") -> "Passes":
        """Return the sum of both passes."""
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def scale(self, factor: float) -> "Passes":
        """Return both passes multiplied by `factor`."""
        return Passes(self.forward.scale(factor), self.backward.scale(factor))


_COMPILED = 1.55
"""Time of a byte in kernels that Inductor makes, relative to a copy. Fitted on a step of a 7B."""
_NORM = 2.27
"""The same in PyTorch's kernels of norms, from a trace of a 1.3B."""
_EXPOSED = 0.43
"""Share of the bytes of a product's fp32 sum that it does not hide. Measured on single products:
0.6 microseconds for a million elements, of which each is read and written."""
_FLASH_BACKWARD = 1.2
"""Time of a FLOP of flash attention's backward pass relative to one of the forward pass."""
_PADDED = 8
"""Sizes of products are padded to multiples of this."""


@dataclass(frozen=True)
class _Accesses:
    """Values that an activation reads and writes for an inner channel of a token, in both passes.

    Without a kernel of its own, both numbers are those of PyTorch's operators.
    """

    of_kernel: int
    of_operators: int


_GATE = _Accesses(8, 14)
_ACCESSES = Table(
    "activation",
    {
        # Two accesses forward and three backward.
        "gelu": _Accesses(5, 5),
        "squared_relu": _Accesses(5, 10),
        "xielu": _Accesses(10, 10),
        "swiglu": _GATE,
        "geglu": _GATE,
        "reglu": _GATE,
        "liglu": _GATE,
        "clamped_swiglu": _GATE,
    },
    # Nobody has counted the others.
    otherwise=_Accesses(10, 14),
)


class LayerTimes:
    """The times of the parts of a model on one rank, for one microbatch."""

    def __init__(
        self,
        shape: ModelShape,
        layout: RankLayout,
        software: Software,
        hardware: Hardware,
        seq_length: int | None = None,
        gradient_bytes: float | None = None,
        microbatches: int = 1,
    ) -> None:
        """Take what determines the times.

        Args:
            shape: Sizes of the model.
            layout: The layout.
            software: The trainer.
            hardware: The devices.
            seq_length: Tokens of a sample. Default: that of `shape`.
            gradient_bytes: Bytes that a product reads and writes for an element of a weight's
                gradient. Default: those of an element.
            microbatches: Microbatches of a step. It matters only if weights are rounded once a
                step.
        """
        self._shape = shape
        self._layout = layout
        self._software = software
        self._hardware = hardware
        self._length = seq_length or shape.config.seq_length
        self._value = 2 if software.half else 4
        self._gradient_bytes = gradient_bytes
        self._tokens = self._length * layout.micro_batch // layout.context
        config = shape.config
        widths = get_widths(shape, layout.tensor)
        self._q, self._k, self._v, self._result = widths.q, widths.k, widths.v, widths.context
        self._entered = config.hidden_size
        """Width of what the entries of attention exchange."""
        self._latent = 0
        """Width of the latent vectors."""
        if shape.attention == "latent":
            self._latent = (config.q_lora_rank or 0) + config.kv_lora_rank
            # Without a latent vector of queries, the hidden states enter for them.
            self._entered = config.q_lora_rank or config.hidden_size
            self._entered += config.kv_lora_rank + config.qk_pos_emb_head_dim
        self._f = self._mlp_width // layout.tensor
        self._gated = get_activation(config).gated
        self._mlp_in = self._f * (1 + self._gated)
        self._microbatches = microbatches
        self._in_float8: list[Linear] = []
        """The linear layers with products in float8."""
        if software.float8 is not None:
            self._in_float8 = list_float8_linears(shape, layout.tensor)

    @property
    def _mlp_width(self) -> int:
        """Inner width of the MLP of a layer."""
        return self._shape.ffn_hidden_size

    def estimate_layer(self, window: int | None = None) -> Passes:
        """Estimate one layer without recomputation. `window` is that of its attention."""
        # These run one after the other, so their times add up.
        core = self._estimate_core(window)
        projections = self._estimate_projections()
        pointwise = self._estimate_pointwise()
        messages = self._estimate_tensor_parallel() + self._estimate_context_parallel(core)
        return core + projections + pointwise + messages + self._estimate_float8()

    def estimate_recomputed_layer(self, window: int | None = None) -> Passes:
        """Estimate one layer with the recomputation of the layout."""
        layer = self.estimate_layer(window)
        if self._layout.recompute == "full":
            return Passes(layer.forward, layer.backward + layer.forward)
        if self._layout.recompute == "selective":
            core = self._estimate_core(window)
            return Passes(layer.forward, layer.backward + core.forward)
        return layer

    def estimate_embedding(self) -> Passes:
        """Estimate the embedding: a lookup, and a scattered sum in the backward pass."""
        h = self._shape.config.hidden_size
        # A row of the table is read and written for each token.
        row = self._value * self._tokens * h
        lookup = estimate_memory_seconds(2 * row, self._hardware)
        summed = estimate_memory_seconds(4 * row, self._hardware, 2)
        reduced = 0.0
        if self._layout.tensor > 1:
            reduced = self._time_collective(self._value * self._tokens * h, passes=2)
        return Passes(Seconds(pointwise=lookup, tensor=reduced), Seconds(pointwise=summed))

    def estimate_output(self) -> Passes:
        """Estimate the final norm, the output layer and the loss."""
        h = self._shape.config.hidden_size
        # The vocabulary is sharded, and so are the logits and the loss.
        vocabulary = self._shape.padded_vocab_size // self._layout.tensor
        product = self._make_gemm(vocabulary, h)
        traffic = self._software.logit_bytes * self._tokens * vocabulary
        loss = estimate_memory_seconds(traffic, self._hardware, 12)
        forward = Seconds(gemm=self._time_gemms([product]), pointwise=loss / 2)
        backward = Seconds(gemm=self._time_gemms(product.derive_backward()), pointwise=loss / 2)
        if self._layout.tensor > 1:
            reduced = self._time_collective(self._value * self._tokens * h, passes=2)
            backward += Seconds(tensor=reduced)
        return Passes(forward, backward)

    def _time_gemms(self, products: Sequence[Gemm]) -> float:
        return sum(estimate_gemm_seconds(product, self._hardware) for product in products)

    def _list_projections(self) -> list[Gemm]:
        products = []
        for linear in list_linears(self._shape, self._layout.tensor):
            product = self._make_gemm(sum(linear.columns), linear.inner)
            if linear in self._in_float8:
                product = _put_into_float8(product, exact=False)
            products.append(product)
        return products

    def _derive_backward(self, product: Gemm) -> tuple[Gemm, Gemm]:
        """Return the products of the backward pass, for the input and for the weight."""
        if product.value != 1:
            return product.derive_backward(self._gradient_bytes)
        plain = replace(product, value=self._value, result=None)
        of_input, of_weight = plain.derive_backward(self._gradient_bytes)
        float8 = self._software.float8
        assert float8 is not None, "a product in float8 has a recipe"
        if not float8.rowwise:
            of_weight = _put_into_float8(of_weight, exact=True)
        return _put_into_float8(of_input, exact=True), of_weight

    def _estimate_float8(self) -> Passes:
        """Estimate what float8 adds to the products of a layer: rounding, and messages."""
        float8 = self._software.float8
        if float8 is None:
            return Passes(Seconds(), Seconds())
        rounded = count_rounding(
            self._in_float8, self._tokens, float8, self._microbatches, self._layout
        )
        sent = list_scale_messages(self._shape, self._layout, float8, self._tokens)
        forward, backward = (
            Seconds(
                rounding=estimate_rounding_seconds(each, self._hardware),
                scales=self._time_scales(messages),
            )
            for each, messages in zip(rounded, sent, strict=True)
        )
        if float8.rounding is None and not float8.rowwise and self._software.fused_gradients:
            # A product writes 16 bits, and another kernel adds them. `gradient_bytes` is for a
            # product that adds by itself, which moves 4 bytes less.
            added = 4 * sum(each.weights for each in self._in_float8)
            backward += Seconds(rounding=estimate_memory_seconds(added, self._hardware))
        return Passes(forward, backward)

    def _time_scales(self, messages: Iterable[ScaleMessage]) -> float:
        """Return the seconds of messages that computation waits for."""
        layout = self._layout
        rings = {"tensor": (layout.tensor, 1), "context": (layout.context, layout.tensor)}
        total = 0.0
        for message in messages:
            ranks, stride = rings[message.axis]
            total += estimate_small_all_reduce_seconds(
                message.bytes, ranks, self._hardware, stride=stride
            )
        return total

    def _make_gemm(self, columns: int, inner: int) -> Gemm:
        """Return the product of all tokens with a matrix."""
        if self._software.pads_products:
            columns, inner = (-(-size // _PADDED) * _PADDED for size in (columns, inner))
        return Gemm(self._tokens, columns, inner, value=self._value)

    def _estimate_projections(self) -> Passes:
        products = self._list_projections()
        gradients = [each for product in products for each in self._derive_backward(product)]
        forward = Seconds(gemm=self._time_gemms(products))
        # Without a product that adds to the fp32 sum by itself, the addition reads and writes the
        # gradients once more.
        accumulated = 0.0
        elements = sum(product.n * product.k for product in products)
        if self._gradient_bytes is not None:
            # A product hides a part of what it reads and writes for a sum in fp32.
            exposed = _EXPOSED * max(0.0, self._gradient_bytes - self._value)
            accumulated = estimate_memory_seconds(exposed * elements, self._hardware)
        return Passes(forward, Seconds(gemm=self._time_gemms(gradients), pointwise=accumulated))

    def _estimate_core(self, window: int | None) -> Passes:
        """Estimate the scores, the softmax and the sum of values."""
        heads = self._shape.config.num_attention_heads // self._layout.tensor
        width = self._shape.head_dim
        kernel = self._choose_kernel(window)
        if kernel == "none":
            return self._estimate_scores(heads)
        # Half of the square is masked. A window masks all keys before it as well.
        keys = min(self._length, window or self._length)
        seen = keys - keys * keys / (2 * self._length)
        bias = 0.0
        if self._has_bias(window):
            # A bias may have any values, so the kernel computes the complete square, and reads the
            # bias once for each sample.
            seen = self._length
            read = self._value * self._tokens * heads * self._length
            bias = estimate_memory_seconds(read, self._hardware)
        flops = 2 * self._tokens * seen * heads * (width + self._shape.value_dim)
        forward = estimate_flash_seconds(
            flops,
            width,
            self._hardware,
            half=self._software.half,
            keys=keys,
            cudnn=self._software.cudnn and kernel == "flash",
        )
        # Two products forward, five backward, which run at a lower share of the peak.
        backward = 2.5 * forward * _FLASH_BACKWARD
        return Passes(Seconds(attention=forward + bias), Seconds(attention=backward + bias))

    def _has_bias(self, window: int | None) -> bool:
        """Return whether a bias is added to the logits of a layer with this window."""
        return self._shape.has_alibi or (window is not None and window < self._length)

    def _choose_kernel(self, window: int | None) -> Kernel:
        """Return the attention kernel of a layer with this window."""
        windowed = window is not None and window < self._length
        return choose_kernel(self._shape, self._software, windowed=windowed)

    def _estimate_scores(self, heads: int) -> Passes:
        """Estimate attention without a fused kernel, on this rank's heads."""
        batch = self._layout.micro_batch * heads
        rows = self._length // self._layout.context
        # Each head of each sample is one product of the batch.
        scores = Gemm(rows, self._length, self._shape.head_dim, batch, self._value)
        values = Gemm(rows, self._shape.value_dim, self._length, batch, self._value)
        elements = batch * rows * self._length
        # Softmax reads and writes; dropout does so again and writes a mask of one byte.
        passed = self._value * elements
        traffic = 2 * passed
        traffic_backward = 3 * passed
        if self._software.dropout:
            traffic += 2 * passed + elements
            traffic_backward += 2 * passed + elements
        # ALiBi is added to the scores, which reads and writes them once more.
        if self._shape.has_alibi:
            traffic += 2 * passed
        gradients = [*scores.derive_backward(), *values.derive_backward()]
        return Passes(
            Seconds(
                attention=self._time_gemms([scores, values])
                + estimate_memory_seconds(traffic, self._hardware, 2)
            ),
            Seconds(
                attention=self._time_gemms(gradients)
                + estimate_memory_seconds(traffic_backward, self._hardware, 2)
            ),
        )

    def _estimate_pointwise(self) -> Passes:
        """Estimate norms, residual sums, activation functions and copies by the bytes of kernels.

        `benchmarks/bytes_per_operator.py` counts them. Numbers are values that are read or written
        for a token in both passes.
        """
        config = self._shape.config
        software = self._software
        operators, fused = software.pointwise, 1.0
        if software.compiled:
            operators = fused = _COMPILED
        h = config.hidden_size
        projected = self._q + self._k + self._v
        # Sums with the residual stream, and of the gradients of an input of two products.
        sums = (15 if self._gated else 12) * h
        # Two norms read and write, and then read two tensors and write one.
        size = _NORM * 10 * h + sums
        if software.compiled:
            # A norm is computed with the sum before it, and twice in the backward pass.
            size = _COMPILED * (20 * h + sums - 12 * h)
        if software.dropout:
            # A kernel adds as well, and computes the mask again in the backward pass.
            size += operators * (5 if software.compiled else 4) * h
        # With sequence parallelism, ranks share it.
        share = self._layout.tensor**self._layout.sequence_parallel
        size /= share
        size += _NORM * 5 * self._latent / share
        if config.qk_norm is not None:
            size += _NORM * 5 * (self._q + self._k)
        if not self._shape.rotary_dim:
            # The gradients of all three are joined.
            size += operators * 2 * projected
        elif software.compiled or (software.fused_rotation and not self._latent):
            size += fused * 4 * projected
        else:
            size += operators * 18 * projected
        accesses = _ACCESSES.require(config.activation_name)
        if self._gated and (software.fused_gate or software.compiled):
            size += fused * accesses.of_kernel * self._f
        elif software.fused_gate:
            size += operators * accesses.of_kernel * self._f
        else:
            size += operators * accesses.of_operators * self._f
        # The gradient of a bias is a sum over all tokens.
        size += operators * (self._mlp_in + h) * self._shape.has_mlp_bias
        size += operators * (projected + h) * self._shape.has_attention_bias
        # A sigmoid and a product, and their gradients.
        size += operators * 13 * self._q * (self._shape.gate_dim > 0)
        if self._k < self._q:
            # Queries of a group are copied to one piece.
            size += operators * 4 * self._q
        seconds = size * self._value * self._tokens / self._hardware.memory_rate
        # A forward pass moves less than half of it.
        return Passes(Seconds(pointwise=seconds / 3), Seconds(pointwise=2 * seconds / 3))

    def _estimate_tensor_parallel(self) -> Passes:
        """Estimate the collectives of a layer: two all-reduces in each pass.

        With sequence parallelism each is a reduce-scatter and an all-gather of the same bytes, and
        the backward pass gathers two inputs again. These are ten messages. The four at the entries
        of the backward pass are sent during matrix products, and without sequence parallelism both
        all-reduces.
        """
        if self._layout.tensor == 1:
            return Passes(Seconds(), Seconds())
        size = self._value * self._tokens * self._shape.config.hidden_size
        backward = self._estimate_entries()
        if self._layout.sequence_parallel:
            backward += 2 * self._time_collective(size, passes=1)
        forward = self._time_collective(size, passes=2) + self._time_attention_messages(size)
        return Passes(Seconds(tensor=forward), Seconds(tensor=backward))

    def _time_attention_messages(self, size: float) -> float:
        """Return the seconds of the messages of attention in a forward pass.

        Args:
            size: Bytes of the hidden states.
        """
        if not self._layout.sequence_parallel:
            return self._time_collective(size, passes=2)
        entered = self._value * self._tokens * self._entered
        return self._time_collective(size, passes=1) + self._time_collective(entered, passes=1)

    def _estimate_context_parallel(self, core: Passes) -> Passes:
        """Estimate the messages of a layer between context-parallel ranks.

        Half of the keys, and half of their gradients, are sent while attention of the early part is
        computed. On the first rank this part is shortest, and other ranks wait for that rank.

        Args:
            core: The times of the attention core for both parts.
        """
        size = self._layout.context
        sent = self.count_context_bytes()
        if self._layout.exchange_heads:
            forward = backward = self._time_context_message(sent)
        else:
            half = self._time_context_message(sent / 2)
            # A causal sequence of 2c parts has 4c^2 units of work if the first part has one. A rank
            # has 4c of them.
            forward, backward = (
                half + estimate_added_seconds(half, each / (4 * size), self._software.contention)
                for each in (core.forward.attention, core.backward.attention)
            )
        # The gradients are reduced. Only a recomputation gathers again.
        if self._layout.recompute == "selective":
            backward += forward
        return Passes(Seconds(tensor=forward), Seconds(tensor=backward))

    def _time_context_message(self, sent: float) -> float:
        return estimate_collective_seconds(
            sent, self._layout.context, self._hardware, stride=self._layout.tensor
        )

    def count_context_bytes(self) -> float:
        """Count the bytes of the messages of a layer's attention in one pass.

        With c context-parallel ranks, a rank receives (c - 1) / c of them.
        """
        if self._layout.exchange_heads:
            # Queries, keys and values, and the result on the way back.
            sent = self._q + self._k + self._v + self._result
            return self._value * self._tokens * sent
        # Keys and values of the complete sequence. A short window needs fewer, which is left out.
        return self._value * (self._k + self._v) * self._tokens * self._layout.context

    def _estimate_entries(self) -> float:
        """Estimate what the messages at the entries add to the backward pass.

        The entries are the projection to queries, keys and values, and that to the MLP. See
        `parallel/entered_linear.py`.
        """
        added = 0.0
        for products in self._list_entries():
            size = self._value * self._tokens * products[0].k
            once = self._time_collective(size, passes=1)
            # The sum of the input's gradient needs the product of the input.
            pairs = [self._derive_backward(product) for product in products]
            of_input, of_weight = (self._time_gemms(each) for each in zip(*pairs, strict=True))
            contention = self._software.contention
            if self._layout.sequence_parallel:
                added += estimate_added_seconds(once, of_input, contention)
                added += estimate_added_seconds(once, of_weight, contention)
            else:
                added += estimate_added_seconds(2 * once, of_weight, contention)
        return added

    def _list_entries(self) -> list[list[Gemm]]:
        """Return the products at each entry of a tensor-parallel region."""
        linears = list_linears(self._shape, self._layout.tensor)
        # The gradients of other inputs are complete on each rank.
        return [
            [product]
            for linear, product in zip(linears, self._list_projections(), strict=True)
            if not (linear.row_parallel or linear.replicated)
        ]

    def _time_collective(self, size: float, passes: int) -> float:
        return estimate_collective_seconds(size, self._layout.tensor, self._hardware, passes=passes)


def estimate_rounding_seconds(rounding: Rounding, hardware: Hardware) -> float:
    """Return the seconds of the kernels that round, and of those on single numbers."""
    small = rounding.small_kernels * hardware.launch_seconds
    return rounding.bytes / hardware.memory_rate + small


def _put_into_float8(product: Gemm, *, exact: bool) -> Gemm:
    """Return a product with both operands in float8, and the same result."""
    result = product.value if product.result is None else product.result
    return replace(product, value=1, result=result, exact=exact)
