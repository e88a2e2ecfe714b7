"""Errors of the formula of sinks are found by the comparison with gpt-oss of `transformers`.

The reference of the verification has the same layer, so it cannot find them. For each error, what
finds it is written down: the logits, the gradients, or the cache of generation.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from generate.test_cached_model import PROMPTS, TOKENS, compute_cached, make_model
from model.reference_models import FAMILIES, Expected, compute_expected
from model.test_transformers import BOUND, compute_ours, list_parameters
from torch import Tensor

from megatron.extras.step.kernels import attention as kernels
from megatron.extras.step.kernels.kind import add_attention
from megatron.model import attention, attention_core

FAMILY = FAMILIES["gpt-oss"]


@contextmanager
def change_backward(change: Callable[..., Any]) -> Iterator[None]:
    """Let `change` see the arguments of the kernel's backward pass, and return what it gets."""
    choose = kernels._choose_cpu_kernel

    def choose_changed(bias: Tensor | None) -> kernels.Kernel:
        kernel = choose(bias)
        return dataclasses.replace(
            kernel, backward=lambda *saved: kernel.backward(*change(kernel, *saved))
        )

    with patch.object(kernels, "_choose_cpu_kernel", choose_changed):
        yield


def leave_out_the_gradient_of_the_factor() -> Any:
    """Differentiate the factor as a constant, so queries and keys lose a part."""

    def change(
        kernel: Any, grad: Any, query: Any, key: Any, value: Any, out: Any, total: Any
    ) -> Any:
        plain, logsumexp, _ = kernel.forward(query, key, value)
        factor = torch.exp(logsumexp - total).unsqueeze(3)
        return grad * factor, query, key, value, plain, logsumexp

    return change_backward(change)


def use_the_sum_without_the_sink() -> Any:
    def change(kernel: Any, *saved: Any) -> Any:
        *others, _ = saved
        _, logsumexp, _ = kernel.forward(*saved[1:4])
        return *others, logsumexp

    return change_backward(change)


@contextmanager
def apply_the_sink_for_each_part() -> Iterator[None]:
    """A query whose keys are read in two parts gets the sink in both."""
    apply = kernels.run_with_sink

    def apply_twice(query: Any, key: Any, value: Any, sink: Any, kernel: Any) -> Tensor:
        return apply(query, key, value, sink + torch.tensor(2.0).log(), kernel)

    with patch.object(kernels, "run_with_sink", apply_twice):
        yield


@contextmanager
def add_the_sink_to_the_logits() -> Iterator[None]:
    """A sink that is added to all logits of a head changes nothing: the softmax removes it."""
    attend = attention_core.attend

    def attend_modified(query: Any, key: Any, value: Any, weighting: Any) -> Tensor:
        return attend(
            query, key, value, dataclasses.replace(weighting, head_values=None, weigh=None)
        )

    with (
        patch.object(attention_core, "attend", attend_modified),
        patch.object(attention, "attend", attend_modified),
    ):
        yield


@contextmanager
def forget_the_sink_of_new_tokens() -> Iterator[None]:
    attend = attention.attend

    def attend_forgetful(query: Any, key: Any, value: Any, weighting: Any) -> Tensor:
        if query.shape[2] < key.shape[2]:
            weighting = dataclasses.replace(weighting, head_values=None, weigh=None)
        return attend(query, key, value, weighting)

    with patch.object(attention, "attend", attend_forgetful):
        yield


@pytest.fixture(scope="module")
def expected() -> Expected:
    return compute_expected(FAMILY, list_parameters(FAMILY))


def find_wrong(expected: Expected) -> set[str]:
    """Return whether logits, the gradients of sinks and those of the other weights differ."""
    weights = {name: each.numpy() for name, each in expected.weights.items()}
    # The model gets the kernels that a run has.
    with patch.object(attention, "FusedOperators", lambda: add_attention("learnable")):
        ours = compute_ours(dict(FAMILY.ours), weights, 1, False)
    found = set()
    if abs(ours.logits - expected.logits.numpy()).max() > BOUND * expected.logits.abs().max():
        found.add("logits")
    for name, index, gradient in ours.slices:
        whole = expected.gradients[name].numpy()
        if abs(gradient - whole[index]).max() > BOUND * abs(whole).max():
            found.add("sinks" if name.endswith("sink") else "weights")
    return found


def test_without_an_error_nothing_differs(expected: Expected) -> None:
    assert find_wrong(expected) == set()


@pytest.mark.parametrize(
    ("error", "finds"),
    [
        (leave_out_the_gradient_of_the_factor, {"weights", "sinks"}),
        (use_the_sum_without_the_sink, {"weights", "sinks"}),
        (apply_the_sink_for_each_part, {"logits", "weights", "sinks"}),
    ],
)
def test_an_error_of_the_formula_is_found(
    error: Callable[[], Any], finds: set[str], expected: Expected
) -> None:
    with error():
        assert find_wrong(expected) == finds


def test_sinks_that_are_added_to_all_logits_are_found(expected: Expected) -> None:
    weights = {name: each.numpy() for name, each in expected.weights.items()}
    with add_the_sink_to_the_logits(), pytest.raises(AssertionError, match=r"attention\.sink"):
        # The sinks have no gradient at all.
        compute_ours(dict(FAMILY.ours), weights, 1, False)


def test_a_sink_that_the_cache_forgets_is_found() -> None:
    model = make_model("gpt-oss")
    with torch.no_grad():
        complete = model.compute_logits(TOKENS)
        with forget_the_sink_of_new_tokens():
            cached = compute_cached(model, [0])
    difference = (cached[0] - complete[0, PROMPTS[0] - 1 :]).abs().amax(-1)
    # The prompt's last token is right, and all later ones are not.
    assert difference[0] < 1e-5
    assert difference[1:].min() > 1e-3
