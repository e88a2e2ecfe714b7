"""Softmax, target and gradient of logits, with one kernel before and one after the all-gather.

The logits stay in the dtype of the product. The first kernel reads them once for the maximum, the
sum of exp(logit - maximum) and the logit of the target. The second one reads them once more and
writes their gradient in place. In 16 bits, these are 6 bytes for each logit. PyTorch's operators
move 44 bytes, because they work on fp32 logits (docs/benchmarks.md). All arithmetic is in fp32,
and the gradient is rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.parallel.torch_private import make_operator


def _make_results(logits: Tensor, *others: Any) -> Tensor:
    find_hits = others[-1]
    return logits.new_empty((3 + find_hits, logits.shape[0]), dtype=torch.float32)


@make_operator("reduce_logits", _make_results)
def _reduce(
    logits: Tensor, real: int, local: Tensor, holds_target: Tensor, find_hits: bool
) -> Tensor:
    """Return what `LossKernels.reduce` returns for each row, [3 or 4, n'] in fp32."""
    from megatron.extras.step.kernels.cross_entropy_kernel import launch_reduction

    results = _make_results(logits, find_hits)
    launch_reduction(logits, real, local, holds_target, results)
    return results


@torch.library.custom_op("megatron::write_logit_gradient", mutates_args=("logits",))
def _write_gradient(
    logits: Tensor,
    real: int,
    local: Tensor,
    holds_target: Tensor,
    top: Tensor,
    factor: Tensor,
    mask: Tensor | None,
) -> None:
    """Replace logits by their gradient."""
    from megatron.extras.step.kernels.cross_entropy_kernel import launch_gradient

    launch_gradient(logits, real, local, holds_target, top, factor, mask=mask)


# It allocates nothing.
_write_gradient.register_fake(lambda *_: None)


class CrossEntropyKernels:
    """The kernels of the loss. See `megatron.model.fused_operators.LossKernels`."""

    def reduce(
        self, logits: Tensor, real: int, local: Tensor, holds_target: Tensor, *, find_hits: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return this rank's part of what the ranks combine. See `LossKernels.reduce`."""
        results = _reduce(logits, real, local, holds_target, find_hits)
        return results[0], results[1], results[2], results[3] if find_hits else None

    def write_gradient(self, *arguments: Any) -> None:
        """Replace logits by their gradient. See `LossKernels.write_gradient`."""
        _write_gradient(*arguments)
