"""Attention with sinks equals its formula, on all paths, and so do all gradients.

The kernel of GPUs does not run here. A function of its name and arguments takes its place, so what
is shown is how it is called, and what follows from its results.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.extras.step.kernels import attention as sinks
from megatron.model.attention_core import Weighting, attend, attend_by_document
from megatron.model.layer_parts import SOFTMAXES
from megatron.model.packed_attention import pack_documents
from megatron.model.positions import make_window_bias

SINKS = (0.0, 3.0, 20.0, -2.0)
KERNELS = sinks.SinkKernels()
WEIGH = SOFTMAXES.require("learnable").weigh


def compute(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
    """Return attention by its formula. `seen` is bool[queries, keys]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    weights = logits.masked_fill(~seen, -math.inf).exp()
    return weights @ value / (weights.sum(3, keepdim=True) + sink.exp().view(-1, 1, 1))


def see(queries: int, keys: int, window: int | None, bounds: Sequence[int] = ()) -> Tensor:
    """Return which keys each of the last queries sees."""
    places = torch.arange(keys)
    distance = places[keys - queries :, None] - places
    seen = (distance >= 0) & (distance < (window or keys))
    for border in bounds:
        seen &= (places[keys - queries :, None] >= border) == (places >= border)
    return seen


def make_inputs(
    queries: int, keys: int, groups: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    sizes = ((2, 4, queries, 8), (2, groups, keys, 8), (2, groups, keys, 8))
    inputs = [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]
    return [x.requires_grad_() for x in (*inputs, torch.tensor(SINKS, dtype=dtype))]


def check(found: Tensor, expected: Tensor, inputs: Sequence[Tensor], bound: float) -> None:
    assert (found - expected).abs().max() <= bound
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).to(found)
    # Without a repetition the gradient of a sink of 20 is 0 in both.
    ours = torch.autograd.grad(found, inputs, gradient, retain_graph=True)
    theirs = torch.autograd.grad(expected, inputs, gradient)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() <= bound * max(1.0, float(other.abs().max()))
    assert all(bool((other != 0).any()) for other in theirs)


@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (5, 13), (1, 13), (1, 1)])
@pytest.mark.parametrize("window", [None, 4, 1])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_whole_samples_equal_the_formula(
    queries: int, keys: int, window: int | None, groups: int
) -> None:
    inputs = make_inputs(queries, keys, groups)
    query, key, value, sink = inputs
    bias = None
    if window is not None:
        bias = make_window_bias(window, keys, query.device, query.dtype, queries)
    found = attend(query, key, value, Weighting(bias, window, None, sink, WEIGH, KERNELS))
    expected = compute(query, key, value, sink, see(queries, keys, window))
    # One key alone has no gradient of its logit without a sink, and has one with it.
    check(found, expected, inputs, 1e-10)


@pytest.mark.parametrize("window", [None, 3])
def test_without_a_fused_kernel_numbers_are_equal_in_fp32(window: int | None) -> None:
    inputs = make_inputs(9, 9, dtype=torch.float32)
    query, key, value, sink = inputs
    bias = None
    if window is not None:
        bias = make_window_bias(window, 9, query.device, query.dtype)
    with sdpa_kernel([SDPBackend.MATH]):
        assert not sinks.has_sink_kernel(query, only_window=True)
        found = attend(query, key, value, Weighting(bias, window, None, sink, WEIGH, KERNELS))
    check(found, compute(query, key, value, sink, see(9, 9, window)), inputs, 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("kernels", [None, KERNELS])
@pytest.mark.parametrize("window", [None, 1])
def test_numbers_of_16_bits_are_finite_and_near(
    dtype: torch.dtype, bound: float, kernels: sinks.SinkKernels | None, window: int | None
) -> None:
    """A sink of 20 leaves 2e-9 of an output, less than a number of fp16."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in make_inputs(13, 13)]
    query, key, value, sink = inputs
    bias = None
    if window is not None:
        bias = make_window_bias(window, 13, query.device, dtype)
    found = attend(query, key, value, Weighting(bias, window, None, sink, WEIGH, kernels))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = compute(exact[0], exact[1], exact[2], exact[3], see(13, 13, window))
    ours = torch.autograd.grad(found.sum(), inputs)
    theirs = torch.autograd.grad(expected.sum(), exact)
    for mine, other in zip((found, *ours), (expected, *theirs), strict=True):
        assert mine.isfinite().all()
        assert (mine - other).abs().max() <= bound * max(1.0, float(other.detach().abs().max()))


DOCUMENTS = ((0, 1, 2, 9, 13), (0, 12, 13))


@pytest.mark.parametrize("window", [None, 4])
def test_documents_equal_the_formula(window: int | None) -> None:
    inputs = make_inputs(13, 13)
    query, key, value, sink = inputs
    bias = None
    if window is not None:
        bias = make_window_bias(window, 13, query.device, query.dtype)
    found = attend_by_document(
        query, key, value, Weighting(bias, window, None, sink, WEIGH, KERNELS), DOCUMENTS
    )
    expected = torch.cat(
        [
            compute(query[i : i + 1], key[i : i + 1], value[i : i + 1], sink, seen)
            for i, seen in enumerate(see(13, 13, window, bounds) for bounds in DOCUMENTS)
        ]
    )
    check(found, expected, inputs, 1e-10)


@pytest.mark.parametrize("kernels", [None, KERNELS])
def test_a_new_token_equals_the_formula(kernels: sinks.SinkKernels | None) -> None:
    inputs = make_inputs(1, 7)
    query, key, value, sink = inputs
    hidden = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    hidden[1, ..., :3] = -math.inf
    found = attend(query, key, value, Weighting(hidden, None, None, sink, WEIGH, kernels))
    seen = (hidden == 0)[:, :, 0]
    expected = torch.cat(
        [
            compute(query[i : i + 1], key[i : i + 1], value[i : i + 1], sink, seen[i])
            for i in range(2)
        ]
    )
    # Without a kernel the softmax is in fp32.
    assert (found - expected).abs().max() < (1e-6 if kernels is None else 1e-10)


# ---- The kernel of GPUs ----


def attend_as_flash(query: Tensor, key: Tensor, window: int, stop: int) -> Tensor:
    """Return the logits of one sequence, [heads, queries, keys], that the kernel computes."""
    repeats = query.shape[1] // key.shape[1]
    logits = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1))
    seen = see(query.shape[0], key.shape[0], None if window < 0 else window + 1)
    return (logits / math.sqrt(query.shape[2])).masked_fill(~seen, -math.inf)


def list_sequences(x: Tensor, bounds: Tensor | None) -> list[Tensor]:
    if bounds is None:
        return list(x)
    return [x[start:stop] for start, stop in pairwise(bounds.tolist())]


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert (dropout, causal, debug) == (0.0, True, False)
    assert options.pop("window_size_right") == 0
    window = options.pop("window_size_left")
    assert options == {}
    parts = [list_sequences(x, cum_q) for x in (query, key, value)]
    assert (max_q, max_k) == tuple(max(map(len, each)) for each in parts[:2])
    outs, sums = [], []
    for q, k, v in zip(*parts, strict=True):
        logits = attend_as_flash(q, k, window, 0)
        sums.append(logits.logsumexp(2))
        repeated = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(2), repeated))
    state = torch.tensor([max_q, max_k]), torch.tensor([7])
    if cum_q is None:
        return torch.stack(outs), torch.stack(sums), *state, torch.empty(0)
    return torch.cat(outs), torch.cat(sums, 1), *state, torch.empty(0)


def run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    first: Tensor,
    second: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    assert (first.tolist(), second.tolist()) == ([max_q, max_k], [7])
    window = options["window_size_left"]
    sums = list(logsumexp)
    if cum_q is not None:
        sums = [logsumexp[:, start:stop] for start, stop in pairwise(cum_q.tolist())]
    found = []
    sequences = [list_sequences(x, cum_q) for x in (grad, query, key, value, out)]
    for g, q, k, v, o, total in zip(*sequences, sums, strict=True):
        repeats = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        p = (attend_as_flash(q, k, window, 0) - total[..., None]).exp()
        change = torch.einsum("qhd,khd->hqk", g, wide_v) - (g * o).sum(2).t()[..., None]
        ds = p * change / math.sqrt(q.shape[2])
        wide = (torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, g))
        dk, dv = (x.unflatten(1, (-1, repeats)).sum(2) for x in wide)
        found.append((torch.einsum("hqk,khd->qhd", ds, wide_k), dk, dv))
    join = torch.stack if cum_q is None else torch.cat
    return tuple(join(each) for each in zip(*found, strict=True))


@pytest.fixture
def gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ops:
        _flash_attention_forward = staticmethod(run_forward)
        _flash_attention_backward = staticmethod(run_backward)

    monkeypatch.setattr(sinks, "_ops", Ops)
    monkeypatch.setattr(
        sinks, "_choose_cpu_kernel", lambda bias: pytest.fail("the kernel of CPUs was taken")
    )


@pytest.mark.usefixtures("gpu_kernel")
@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (5, 13)])
@pytest.mark.parametrize("window", [None, 4, 1])
def test_the_kernel_of_gpus_is_called_for_whole_samples(
    queries: int, keys: int, window: int | None
) -> None:
    inputs = make_inputs(queries, keys)
    query, key, value, sink = inputs
    found = sinks.run_with_sink(query, key, value, sink, sinks.choose_gpu_kernel(window))
    check(found, compute(query, key, value, sink, see(queries, keys, window)), inputs, 1e-10)


@pytest.mark.usefixtures("gpu_kernel")
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_of_gpus_is_called_once_for_all_documents(window: int | None) -> None:
    inputs = make_inputs(13, 13)
    query, key, value, sink = inputs
    packed = pack_documents(DOCUMENTS, query.device)
    weighting = Weighting(None, window, None, sink, WEIGH, KERNELS)
    found = KERNELS.attend_packed(query, key, value, packed, weighting)
    expected = torch.cat(
        [
            compute(query[i : i + 1], key[i : i + 1], value[i : i + 1], sink, seen)
            for i, seen in enumerate(see(13, 13, window, bounds) for bounds in DOCUMENTS)
        ]
    )
    check(found, expected, inputs, 1e-10)


def test_which_inputs_the_kernel_of_gpus_takes() -> None:
    # A tensor on a GPU cannot be made here.
    right = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 4, 8, 16)}

    def takes(only_window: bool = True, **changes: Any) -> bool:
        query: Any = SimpleNamespace(**(right | changes))
        return sinks.has_sink_kernel(query, only_window=only_window)

    assert takes()
    assert not takes(only_window=False)
    assert not takes(dtype=torch.float32)
    assert not takes(shape=(1, 4, 8, 12))


def test_the_compiler_traces_a_kernel() -> None:
    inputs = make_inputs(13, 13, dtype=torch.float32)
    query, key, value, sink = inputs

    def compute_with_kernel() -> Tensor:
        return attend(query, key, value, Weighting(None, None, None, sink, WEIGH, KERNELS))

    compiled = torch.compile(compute_with_kernel, backend="aot_eager", fullgraph=True)
    check(compiled(), compute_with_kernel(), inputs, 1e-6)
