"""Operators of this package that a compiled graph calls without tracing them."""

from collections.abc import Callable
from typing import Any

import torch


def make_operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes `torch.ops.megatron.<name>` from a function without effects.

    `torch.library.custom_op` makes the same operator. A call of that one checks each time whether
    results share memory with arguments, and runs 60 more functions of Python. A training step calls
    such operators hundreds of times, so the checks are left to the tests. A result must not be an
    argument or a view of one. `torch.library.register_fake` and `register_autograd` add the rest.
    """

    def register(run: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(run, mutates_args=())
        # `custom_op` gives its operators the same tag.
        torch.library.define(f"megatron::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"megatron::{name}", "default", run)
        return getattr(torch.ops.megatron, name).default

    return register
