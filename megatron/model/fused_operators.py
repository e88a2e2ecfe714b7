"""Interfaces of kernels that compute several operators of the model at once.

The model needs none of them. Without a kernel, it computes the same with PyTorch's operators. They
are the reference for each kernel, and the only path on a CPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from megatron.model.norm import Norm

if TYPE_CHECKING:
    from megatron.model.attention_core import Weighting
    from megatron.model.packed_attention import PackedDocuments


class RotateProjection(Protocol):
    """Divides the projection to queries, keys and values, normalises and rotates the former."""

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [s, b, g, n, d], and keys and values [s, b, g, 1, d].

        Args:
            qkv: [s, b, g, n + 2, d]. Each group has n queries, a key and a value.
            cos: See `Positions`.
            sin: See `Positions`.
            query_norm: The norm of queries before the rotation, or None.
            key_norm: That of keys. It is None if the first one is.
        """


class AddAndNormalise(Protocol):
    """Adds to the residual stream, and computes the norm of the sum."""

    def __call__(self, x: Tensor, branch: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return x + branch, and its norm in the dtype of the weights, each [..., h].

        The sum is rounded before the norm. Without a branch, the sum is x. Its other uses should
        read the returned sum, so that the kernel of the backward pass adds their gradient.
        """


class Drop(Protocol):
    """Applies dropout, and computes its masks again in the backward pass."""

    def __call__(self, x: Tensor, residual: Tensor | None, *place: Any) -> Tensor:
        """Return residual + dropout(x), as `Dropout.drop` does.

        Args:
            x: [rows, samples, columns] or [samples, heads, queries, columns].
            residual: Same shape. None: 0.
            place: The arguments dropout_key, site, threshold and place of `draw_mask`.
        """


class LossKernels(Protocol):
    """Computes softmax and gradient from logits that stay in the dtype of their product."""

    def reduce(
        self, logits: Tensor, real: int, local: Tensor, holds_target: Tensor, *, find_hits: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return this rank's part of what the ranks combine.

        Args:
            logits: [n', columns]. Columns after the real ones are padding.
            real: Number of real ids. It may be 0.
            local: [n'], the index of each target on this rank. It is 0 if another rank holds it.
            holds_target: [n'], whether this rank holds the target.
            find_hits: Whether to return the hits.

        Returns:
            The highest logit, the sum of exp(logit - highest), the target's logit, and 1 where the
            target has the highest logit, else 0. Each is [n'] in fp32. Without real ids the first
            is -inf, and the others are 0.
        """

    def write_gradient(
        self,
        logits: Tensor,
        real: int,
        local: Tensor,
        holds_target: Tensor,
        top: Tensor,
        factor: Tensor,
        mask: Tensor | None,
    ) -> None:
        """Replace the logits by (exp(logit - top) * factor - one_hot(target)) * mask.

        The result is 0 for padding. The other arguments are those of `reduce`.

        Args:
            logits: [n', columns], overwritten.
            real: See above.
            local: See above.
            holds_target: See above.
            top: [n'] in fp32, the highest logit of this rank.
            factor: [n'] in fp32. It turns exp(logit - top) into a softmax over all ranks.
            mask: [n'] in fp32. None means 1.
        """


class AttentionKernels(Protocol):
    """Causal attention with another softmax than that of the logits alone (`SoftmaxRow`)."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, weighting: "Weighting"
    ) -> Tensor | None:
        """Return the result of `attention_core.attend`, or None if no kernel takes these inputs."""

    def attend_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: "PackedDocuments",
        weighting: "Weighting",
    ) -> Tensor:
        """Return attention within each document, as `packed_attention.attend_packed` does."""


@dataclass(frozen=True)
class FusedOperators:
    """The kernels that a model and its optimizer use. None stands for PyTorch's operators."""

    rotate_projection: RotateProjection | None = None
    activations: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    """Name of an activation -> its kernel, with the arguments of the reference in `mlp.py`."""
    add_and_normalise: AddAndNormalise | None = None
    loss: LossKernels | None = None
    drop: Drop | None = None
    attention: AttentionKernels | None = None
    delta_rule: Callable[..., tuple[Tensor, Tensor]] | None = None
    """Has the arguments and the results of `delta_rule.apply_delta_rule`."""
    build_adamw: Callable[..., Any] | None = None
    """Takes the arguments of `AdamW`, which is in a higher layer, and returns a subclass of it."""
