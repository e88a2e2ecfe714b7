"""What functions with messages do to the types of tensors: declarations, as plain data.

The type of a tensor over a group of ranks says how the ranks' tensors, and their gradients, relate
(https://arxiv.org/abs/1909.08053 uses these relations, and `spmd_types` names them):

    I   equal, and so are the gradients ("invariant")
    R   equal, and each rank has a part of the sum that is the gradient ("replicated")
    V   different, and so are the gradients ("varying")

A declaration costs nothing when training. `tools/verify.py --types` reads it (docs/verify.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

OUTSIDE = "I/V"
"""The type of the residual stream outside of a tensor-parallel region."""


@dataclass(frozen=True)
class SpmdRule:
    """The declaration of an autograd Function.

    In each text, a slash separates what holds without and with sequence parallelism.
    """

    inputs: Mapping[str, str]
    """Argument of `forward` -> its type over the group. Other arguments need no gradient."""
    out: str | None
    """The type of the results over the group. None: that of an operator without messages."""
    group: str | None
    """The argument of `forward` that has the group. None: there is no message."""
    forward: str = ""
    """The messages of the forward pass, in order. A `+` after one: at least one."""
    backward: str = ""
    """Those of the backward pass."""


DECLARED: dict[type[torch.autograd.Function], SpmdRule] = {}
"""All autograd Functions of the modules that are imported."""
_F = TypeVar("_F", bound=type[torch.autograd.Function])


def declare(
    group: str | None = None,
    out: str | None = None,
    forward: str = "",
    backward: str = "",
    **inputs: str,
) -> Callable[[_F], _F]:
    """Return a decorator that declares an autograd Function. See `SpmdRule`."""

    # The Function itself does not change, so a training step has no cost from it.
    def add(function: _F) -> _F:
        DECLARED[function] = SpmdRule(inputs, out, group, forward, backward)
        return function

    return add
