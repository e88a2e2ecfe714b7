"""Attention within documents in one call for all documents of a microbatch.

The samples are packed one after the other. A kernel for sequences of different lengths gets the
bounds of the documents, and computes each of them separately. On a GPU it is torch's `varlen_attn`,
which is FlashAttention-2 (https://arxiv.org/abs/2307.08691). It needs 16 bits, and has neither a
bias nor dropout. A CPU has no such kernel. The reference here computes the same in a loop.

b: micro-batch, s: sequence, g: query groups, n: heads, d: head width, t: tensor-parallel size.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.model.inputs import Documents
from megatron.parallel.padding import trim_columns, widen

_OLDEST_GPU = (8, 0)
"""Compute capability that the kernel needs, that of an A100."""


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of a microbatch, whose samples are packed one after the other."""

    bounds: Tensor
    """int32[documents + 1], on the device of the model. Document i is [bounds[i], bounds[i + 1])
    of the b s tokens. A sample's end is a bound too."""
    longest: int
    """Number of tokens of the longest document. The kernel needs it on the host."""


def pack_documents(documents: Documents, device: torch.device) -> PackedDocuments:
    """Return the documents of a microbatch in packed form. The host does not wait for the device.

    Args:
        documents: The bounds of each sample's documents. All samples have the same length.
        device: Where the model computes.
    """
    bounds = [0]
    for sample in documents:
        first = bounds[-1]
        bounds += [first + stop for stop in sample[1:]]
    longest = max(stop - start for start, stop in pairwise(bounds))
    on_host = torch.tensor(bounds, dtype=torch.int32)
    if device.type == "cuda":
        # The host would wait for a copy from memory that is not pinned.
        on_host = on_host.pin_memory()
    return PackedDocuments(on_host.to(device, non_blocking=True), longest)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, window: int | None
) -> Tensor:
    """Compute causal attention within each document.

    Args:
        query: [b, n/t, s, d].
        key: [b, g/t, s, d].
        value: [b, g/t, s, width of a value]. The kernel gets zeros up to d.
        documents: The documents of the b samples.
        window: Number of tokens that a token attends to, itself included. None: no limit.

    Returns:
        The context, [b, n/t, s, width of a value].
    """
    samples, _, length, _ = query.shape
    # The kernel reads [b s, n/t, d]. This is a copy if there are several samples.
    packed = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, widen(value, key))]
    attend: Callable[..., Tensor] = _load_kernel() if query.is_cuda else attend_one_by_one
    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1] and _has_option(attend, "enable_gqa"):
        options["enable_gqa"] = True
    # The window is (keys before the query, keys after it). -1 means all of them.
    before = -1 if window is None else window - 1
    context = attend(
        *packed,
        documents.bounds,
        documents.bounds,
        documents.longest,
        documents.longest,
        window_size=(before, 0),
        **options,
    )
    return trim_columns(context.unflatten(0, (samples, length)).transpose(1, 2), value.shape[3])


def attend_one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the same as torch's `varlen_attn`, one sequence after the other.

    It is the reference for the kernel, with the same interface, and runs on any device and in any
    dtype. It reads the bounds on the host, so on a GPU the host would wait.

    Args:
        query: [tokens, n, d].
        key: [tokens, g, d].
        value: [tokens, g, d].
        cu_seq_q: int32[sequences + 1], the bounds of the sequences in `query`, first 0.
        cu_seq_k: The same for `key` and `value`. A sequence has as many keys as queries.
        max_q: Number of tokens of the longest sequence.
        max_k: The same as `max_q`.
        window_size: How many keys before and after its own a query sees. -1: all of them.
        enable_gqa: Whether several query heads share a key.

    Returns:
        The context, [tokens, n, d].
    """
    bounds = cu_seq_q.tolist()
    assert bounds == cu_seq_k.tolist(), "a sequence has as many keys as queries"
    assert max_q == max_k == max(stop - start for start, stop in pairwise(bounds)), "wrong maximum"
    parts = []
    for start, stop in pairwise(bounds):
        # SDPA reads [1, n, tokens, d].
        q, k, v = (each[None, start:stop].transpose(1, 2) for each in (query, key, value))
        mask = None
        # A mask would keep SDPA from its fused kernel.
        if window_size != (-1, 0):
            mask = _make_mask(stop - start, window_size, query.device)
        context = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=enable_gqa
        )
        parts.append(context[0].transpose(0, 1))
    return torch.cat(parts)


def _make_mask(length: int, window_size: tuple[int, int], device: torch.device) -> Tensor:
    """Return bool[length, length], True where a query sees a key."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    before, after = window_size
    mask = torch.ones_like(distance, dtype=torch.bool)
    if before >= 0:
        mask &= distance <= before
    if after >= 0:
        mask &= distance >= -after
    return mask


def _load_kernel() -> Callable[..., Any]:
    """Return torch's kernel, which runs on GPUs only."""
    # The import takes a while, and most runs do not need it.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@functools.cache
def _has_option(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter.

    `varlen_attn` of torch 2.11 takes grouped queries as they are. Later versions have an option.
    """
    return name in inspect.signature(function).parameters


def require_packed_attention(device: torch.device) -> None:
    """Check that the kernel runs on this device. A CPU has the reference.

    Raises:
        ConfigError: The GPU is too old.
    """
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _OLDEST_GPU:
        raise ConfigError(
            f"--use-varlen-attention: {torch.cuda.get_device_name(device)} has compute capability "
            f"{found[0]}.{found[1]}, and the kernel needs at least {_OLDEST_GPU[0]}."
            f"{_OLDEST_GPU[1]}; leave the flag out"
        )
