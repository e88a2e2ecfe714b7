"""The choice between the attention kernels of PyTorch's scaled_dot_product_attention (SDPA).

SDPA has several kernels, and each of them computes only some inputs. Without a choice, PyTorch
takes the first possible one in an order of its own, which differs between GPUs and versions.

s: sequence, g: query groups, n: heads, d: head width, t: tensor-parallel size.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.base.errors import ConfigError
from megatron.model.shape import ModelShape

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "unfused": SDPBackend.MATH,
}
"""Value of --attention-backend -> torch's name. "auto" has none."""
_REFUSALS = ("No available kernel", "No viable backend")
"""Parts of torch's errors if none of the chosen kernels can compute an input."""


def use_attention_kernels(names: Sequence[str]) -> AbstractContextManager[Any]:
    """Return a context in which SDPA uses the first of these kernels that can compute its input.

    The choice is global. So the context has to be around each call, in a recomputation too.

    Args:
        names: Keys of `_BACKENDS`. If it is empty, PyTorch chooses.
    """
    if not names:
        return nullcontext()
    return sdpa_kernel([_BACKENDS[name] for name in names], set_priority=True)


def pads_values(names: Sequence[str], device: torch.device) -> bool:
    """Return whether values that are narrower than keys get zeros up to the width of keys.

    Only flash kernels need that. On a GPU other fused kernels take both widths, so flash has to be
    the first choice. Without flash, a CPU computes all logits.

    Args:
        names: See `use_attention_kernels`.
        device: Where the model computes.
    """
    return names[0] == "flash" if names else device.type == "cpu"


def install_torch_order(device: torch.device) -> None:
    """Let torch set its own order of kernels now.

    On a GPU, torch does so in the first call of a process. Within `use_attention_kernels`, it would
    replace the order of the context. Measured on an H200, that call took cuDNN's kernel instead of
    flash. Later calls do not change the order.
    """
    if device.type == "cuda":
        one = torch.zeros((1, 1, 1, 8), device=device)
        F.scaled_dot_product_attention(one, one, one)


def require_attention_kernels(
    names: Sequence[str],
    shape: ModelShape,
    *,
    tensor_parallel_size: int,
    dtype: torch.dtype,
    device: torch.device,
    by_document: bool,
) -> None:
    """Check that SDPA has a kernel among these for each layer, by calls with its sizes.

    Args:
        names: Keys of `_BACKENDS`. If it is empty, nothing is checked.
        shape: Sizes of the model.
        tensor_parallel_size: t.
        dtype: The dtype of queries and keys.
        device: Where the model computes.
        by_document: Whether there is a call for each document, which may have a single token. Not
            every kernel takes that.

    Raises:
        ConfigError: None of them can compute a layer. The message has torch's reasons.
    """
    # Unfused attention takes every input, and would need the most memory here.
    if "unfused" in names:
        return
    config = shape.config
    lengths = [config.seq_length]
    if by_document:
        lengths.append(1)
    # The heads of a rank that share a key. Other groups make no difference.
    heads = config.num_attention_heads // max(shape.query_groups, tensor_parallel_size)
    windows = {shape.describe_layer(layer).window for layer in range(config.num_layers)}
    # Layers differ only in whether they need a bias.
    biases = sorted({_needs_bias(shape, window) for window in windows})
    for biased, length in product(biases, lengths):
        value_dim = shape.value_dim
        if pads_values(names, device):
            value_dim = max(shape.head_dim, value_dim)
        sizes = ((heads, shape.head_dim), (1, shape.head_dim), (1, value_dim))
        query, key, value = (
            torch.zeros((1, n, length, width), dtype=dtype, device=device) for n, width in sizes
        )
        # Some kernels have no backward pass on some GPUs.
        query.requires_grad_()
        bias = None
        if biased:
            bias = torch.zeros((1, 1, length, length), dtype=dtype, device=device)
        with use_attention_kernels(names), warnings.catch_warnings(record=True) as reasons:
            warnings.simplefilter("always")
            try:
                F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=bias,
                    dropout_p=config.attention_dropout,
                    is_causal=bias is None,
                    enable_gqa=heads > 1,
                )
            except RuntimeError as failure:
                if not any(text in str(failure) for text in _REFUSALS):
                    raise
                raise ConfigError(
                    _describe_refusal(names, shape, biased, length, dtype, device, reasons)
                ) from failure


def _needs_bias(shape: ModelShape, window: int | None) -> bool:
    """Return whether the layers with this window add a bias to their logits."""
    return shape.has_alibi or (window is not None and window < shape.config.seq_length)


def _describe_refusal(
    names: Sequence[str],
    shape: ModelShape,
    biased: bool,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    reasons: Sequence[warnings.WarningMessage],
) -> str:
    """Return the message for kernels that cannot compute a layer."""
    bias = "a bias (ALiBi or a sliding window)" if biased else "no bias"
    if length == 1:
        bias += ", in a document of one token"
    # torch ends each reason with the place in its source.
    given = [str(reason.message).partition(" (Triggered internally")[0] for reason in reasons]
    why = " ".join(dict.fromkeys(given)) or "this PyTorch has none of them for this device."
    return (
        f"--attention-backend {' '.join(names)}: none of these kernels computes attention on "
        f"{device.type} in {str(dtype).removeprefix('torch.')} with heads of {shape.head_dim}, "
        f"{bias} and --attention-dropout {shape.config.attention_dropout}. PyTorch's reasons: "
        f"{why} Add unfused at the end, which computes all layers, or give auto"
    )
