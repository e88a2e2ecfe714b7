"""Kernels of attention, by --softmax-type.

A sink is one more logit of a head, which has no value:

    out = softmax([q k / sqrt(d), sink]) without the sink's column, times v

A head can then attend to nothing. The sink is learned (gpt-oss, https://arxiv.org/abs/2508.10925),
or 0 (https://www.evanmiller.org/attention-is-off-by-one.html). With the logsumexp L of the other
logits, the result is that of attention without a sink times exp(L - M) = sigmoid(L - sink), where
M = logaddexp(L, sink) is the logsumexp of all logits.

Fused kernels return their logsumexp, but have no gradient for it. Their backward pass computes the
probabilities again from it, P = exp(S - L), and the gradient of the logits from the result,
dS = P (dP - sum(dout out)). With M for L, and with the result that includes the sink, the same
kernel computes the gradients with the sink, of queries and keys too. The sink has the probability
exp(sink - M) and no value, so its gradient is -exp(sink - M) sum(dout out), added up over queries.

b: micro-batch, g: query groups, n: heads, d: head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.config.table import Absent, Table
from megatron.model.attention_core import Weighting
from megatron.model.packed_attention import PackedDocuments
from megatron.parallel.spmd import declare

_ops = torch.ops.aten
_FLASH_WIDTH = 8
"""Flash attention on GPUs reads heads whose width is a multiple of this."""


@dataclass(frozen=True)
class Kernel:
    """A fused kernel that returns its logsumexp. Queries, keys and values are [b, heads, s, d]."""

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, tuple[Any, ...]]]
    """Returns the result [b, n, queries, d], the logsumexp [b, n, queries], and what the backward
    pass needs."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Maps (gradient, query, key, value, result, logsumexp, *needed) to three gradients."""


@declare()
class _WithSink(torch.autograd.Function):
    """Attention with a sink by a fused kernel. See the module."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor, kernel: Kernel
    ) -> Tensor:
        out, logsumexp, needed = kernel.forward(query, key, value)
        total = torch.logaddexp(logsumexp, sink.to(logsumexp.dtype)[:, None])
        # The factor is at most 1, so it cannot overflow.
        out = out * torch.exp(logsumexp - total).unsqueeze(3).to(out.dtype)
        ctx.save_for_backward(query, key, value, sink, out, total)
        ctx.kernel, ctx.needed = kernel, needed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, total = ctx.saved_tensors
        # The result and the sum include the sink, so these gradients do too.
        of_kernel = ctx.kernel.backward(grads[0], query, key, value, out, total, *ctx.needed)
        product = (grads[0] * out).sum(3, dtype=total.dtype)
        share = torch.exp(sink.to(total.dtype)[:, None] - total)
        return *of_kernel, -(share * product).sum((0, 2)).to(sink.dtype), None


def run_with_sink(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, kernel: Kernel
) -> Tensor:
    """Return attention with a sink by a kernel, [b, n, queries, d]."""
    out: Tensor = _WithSink.apply(query, key, value, sink, kernel)
    return out


# torch's compiler cannot trace this call.
@torch.compiler.assume_constant_result
def _allows_flash() -> bool:
    return bool(torch.backends.cuda.flash_sdp_enabled())


def has_sink_kernel(query: Tensor, *, only_window: bool) -> bool:
    """Return whether a fused kernel computes attention with a sink.

    That of a CPU takes all inputs. That of a GPU takes 16 bits, and no bias but a window.

    Args:
        query: [b, n, queries, d].
        only_window: Whether the bias has nothing but the causal mask and a window.
    """
    # --attention-backend may turn off the kernels of both. See `use_attention_kernels`.
    if not _allows_flash():
        return False
    if not query.is_cuda:
        return True
    return only_window and query.dtype.itemsize == 2 and query.shape[3] % _FLASH_WIDTH == 0


class SinkKernels:
    """Attention with sinks by fused kernels. See `AttentionKernels`."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting
    ) -> Tensor | None:
        """See `AttentionKernels.attend`."""
        sink, bias = _get_sink(weighting), weighting.bias
        if not has_sink_kernel(query, only_window=bias is None or weighting.only_window):
            return None
        if query.is_cuda:
            return run_with_sink(query, key, value, sink, choose_gpu_kernel(weighting.window))
        queries, keys = query.shape[2], key.shape[2]
        if bias is None and queries != keys:
            # The kernel aligns queries and keys at their starts.
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            bias = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -torch.inf)
        return run_with_sink(query, key, value, sink, _choose_cpu_kernel(bias))

    def attend_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: PackedDocuments,
        weighting: Weighting,
    ) -> Tensor:
        """See `AttentionKernels.attend_packed`."""
        samples, _, length, _ = query.shape
        kernel = choose_gpu_kernel(weighting.window, documents.bounds, documents.longest)
        # The samples become one, [1, heads, b s, d].
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
        out = run_with_sink(query, key, value, _get_sink(weighting), kernel)
        return out[0].unflatten(1, (samples, length)).transpose(0, 1)


ATTENTION_KERNELS = Table(
    "--softmax-type",
    {"off-by-one": SinkKernels, "learnable": SinkKernels},
    otherwise=Absent("is computed by the kernels of PyTorch alone"),
)
"""Value of --softmax-type -> its kernels."""


def _get_sink(weighting: Weighting) -> Tensor:
    """Return the logit of each head that has no value, [n]."""
    assert weighting.head_values is not None, "the table of kernels has the row of this softmax"
    return weighting.head_values


def _choose_cpu_kernel(mask: Tensor | None) -> Kernel:
    def forward(query: Tensor, key: Tensor, value: Tensor) -> Any:
        run = _ops._scaled_dot_product_flash_attention_for_cpu
        return *run(query, key, value, 0.0, mask is None, attn_mask=mask), ()

    def backward(grad: Tensor, *saved: Tensor) -> Any:
        run = _ops._scaled_dot_product_flash_attention_for_cpu_backward
        return run(grad, *saved, 0.0, mask is None, attn_mask=mask)

    return Kernel(forward, backward)


def choose_gpu_kernel(
    window: int | None, bounds: Tensor | None = None, longest: int | None = None
) -> Kernel:
    """Return the kernel of 16 bits on GPUs. It aligns queries and keys at their ends.

    Args:
        window: Number of keys that a query reads, up to its position. None: all of them.
        bounds: int32, the bounds of documents, if the sequence has several.
        longest: Number of tokens of the longest one.
    """
    # The window is counted without the query itself. -1 is no limit.
    limits = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}

    def arrange(x: Tensor) -> Tensor:
        # The kernel reads [b, s, heads, d], and [tokens, heads, d] if there are bounds.
        x = x.transpose(1, 2)
        return x if bounds is None else x[0]

    def restore(x: Tensor) -> Tensor:
        return (x if bounds is None else x[None]).transpose(1, 2)

    def count(query: Tensor, key: Tensor) -> tuple[int, int]:
        return longest or query.shape[2], longest or key.shape[2]

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, logsumexp, *state = _ops._flash_attention_forward(
            *map(arrange, (query, key, value)),
            bounds,
            bounds,
            *count(query, key),
            0.0,
            True,
            False,
            **limits,
        )
        if bounds is not None:
            logsumexp = logsumexp[None]
        return restore(out), logsumexp, tuple(state[:2])

    def backward(*saved: Tensor) -> Any:
        grad, query, key, value, out, logsumexp, *state = saved
        grads = _ops._flash_attention_backward(
            *map(arrange, (grad, query, key, value, out)),
            logsumexp if bounds is None else logsumexp[0],
            bounds,
            bounds,
            *count(query, key),
            0.0,
            True,
            *state,
            **limits,
        )
        return tuple(map(restore, grads))

    return Kernel(forward, backward)
