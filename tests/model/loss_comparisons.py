"""Comparisons of the loss's kernels with PyTorch's operators, on a CPU or a GPU.

They run where Triton can: on a GPU, or in a process of `triton_interpreter.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.extras.step.kernels.cross_entropy import CrossEntropyKernels
from megatron.model import loss
from megatron.model.loss import VocabSlice, cross_entropy
from megatron.model.tally import Tally
from megatron.parallel.collectives import copy_to_tensor_parallel
from megatron.parallel.mesh import TensorParallel


@dataclass(frozen=True)
class LogitCase:
    """Logits of a chunk of rows on one rank."""

    rows: int
    columns: int
    real: int
    scale: float = 3.0
    ties: bool = False
    """Round logits to whole numbers, so that many of a row are equal."""
    held: float = 0.7
    """Share of the targets that this rank holds."""
    kept: float | None = 0.6
    """Share of the rows that the mask keeps. None: there is no mask."""
    further: int = 0
    """Columns of the matrix in memory after those of the logits."""


def count_units(found: Tensor, expected: Tensor, exact: float | Tensor = 0.0) -> float:
    """Return the largest difference, in units of rounding or in fp32 of 1e-6 of the number.

    Args:
        found: Result of a kernel.
        expected: Result of PyTorch's operators.
        exact: A difference that is always allowed.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    # NaN and infinities have no difference.
    assert torch.isfinite(found[torch.isfinite(expected)]).all()
    differs = ~torch.isclose(found, expected, rtol=0, atol=0, equal_nan=True)
    limits = torch.finfo(expected.dtype)
    larger = torch.maximum(found.double().abs(), expected.double().abs())
    unit = max(limits.eps, 1e-6) * larger + limits.smallest_normal * limits.eps
    units = ((found.double() - expected.double()).abs() - exact) / unit
    return max(units[differs].tolist(), default=0.0)


def compare_logits(case: LogitCase, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Return the difference of each result, in units of `count_units`."""
    generator = torch.Generator().manual_seed(case.rows + case.columns)
    whole = torch.randn(case.rows, case.columns + case.further, generator=generator) * case.scale
    if case.ties:
        whole = whole.round()
    # Padding must not be seen, whatever it is.
    whole[:, case.real : case.columns] = 1e4
    in_memory = whole.to(device, dtype, copy=True)
    logits = in_memory[:, : case.columns]
    here = (torch.rand(case.rows, generator=generator) < case.held) & (case.real > 0)
    local = torch.randint(0, max(case.real, 1), (case.rows,), generator=generator)
    if case.real:
        local[::2] = logits[::2, : case.real].float().argmax(1).cpu()
    here, local = here.to(device), local.where(here, 0).to(device)
    mask = None
    if case.kept is not None:
        mask = (torch.rand(case.rows, generator=generator) < case.kept).float().to(device)
    factor = (torch.rand(case.rows, generator=generator) + 0.1).to(device)

    exponentials = logits[:, : case.real].to(torch.float32, copy=True)
    hit = loss._find_hits(exponentials, local, here)
    expected = loss._reduce_in_place(exponentials, local, here)
    factor /= expected[1].clamp(min=1.0)
    distances = (logits[:, : case.real].float() - expected[0][:, None]).abs().double()
    probabilities = (exponentials * factor[:, None]).double()
    loss._write_gradient(exponentials, local, here, factor, mask)
    gradient = torch.zeros_like(logits)
    gradient[:, : case.real] = exponentials

    kernels = CrossEntropyKernels()
    *found, found_hit = kernels.reduce(logits, case.real, local, here, find_hits=True)
    *again, no_hit = kernels.reduce(logits, case.real, local, here, find_hits=False)
    assert found_hit is not None
    assert no_hit is None
    assert all(map(torch.equal, found, again))
    kernels.write_gradient(logits, case.real, local, here, found[0], factor, mask)
    # A GPU computes exp(x) as 2^(x log2 e). Both the factor and the product are rounded, with an
    # error of at most 2^-24 each, which changes the power by up to 2^-23 |x| of itself.
    allowed = torch.zeros_like(gradient, dtype=torch.float64)
    allowed[:, : case.real] = 2.0**-23 * distances * probabilities
    # softmax - 1 has the error of numbers near 1, but may be small.
    allowed[here, local[here]] += 1.2e-7
    # The memory after the logits belongs to others.
    after = whole[:, case.columns :].to(device, dtype)
    assert torch.equal(in_memory[:, case.columns :], after)
    names = ("maximum", "sum", "target")
    units = {name: count_units(*pair) for name, *pair in zip(names, found, expected, strict=True)}
    units["hit"] = count_units(found_hit, hit)
    units["gradient"] = count_units(logits, gradient, allowed)
    return units


def compare_loss(
    dtype: torch.dtype,
    device: str,
    *,
    masked: bool,
    z_loss: float,
    rows: int = 320,
    tp: TensorParallel | None = None,
) -> dict[str, float]:
    """Compute the complete loss of 301 ids with and without kernels.

    Args:
        dtype: That of the hidden states and of the output matrix.
        device: Where they are.
        masked: Whether no position counts. Otherwise some of them count.
        z_loss: Coefficient of the z-loss.
        rows: Rows of the output matrix on each rank. The last ones of all ranks are padding.
        tp: The tensor-parallel ranks. Default: there is one.

    Returns:
        The difference of the loss, and of the gradients relative to their largest element. The
        sums of an evaluation must be equal.
    """
    tp = tp or TensorParallel()
    vocab = 301
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows * tp.size, 24, generator=generator)[tp.rank * rows :][:rows]
    hidden = torch.randn(7, 3, 24, generator=generator)
    labels = torch.randint(0, vocab, (7, 3), generator=generator).to(device)
    mask = (torch.rand(7, 3, generator=generator) > 0.4).float() * (not masked)
    mine = VocabSlice(tp.rank * rows, max(0, min(vocab - tp.rank * rows, rows)))
    results = []
    for kernels in (None, CrossEntropyKernels()):
        leaf = hidden.to(device, dtype).requires_grad_()
        matrix = weight.to(device, dtype).requires_grad_()
        value = cross_entropy(
            copy_to_tensor_parallel(leaf, tp),
            matrix,
            labels,
            mine,
            tp,
            mask.to(device),
            z_loss=z_loss,
            kernels=kernels,
        )
        value.backward()
        tally = Tally()
        with torch.no_grad():
            evaluated = cross_entropy(
                leaf, matrix, labels, mine, tp, mask.to(device), tally=tally, kernels=kernels
            )
        sums = torch.stack([tally.nats, tally.correct, tally.positions]).float()
        assert leaf.grad is not None
        assert matrix.grad is not None
        results.append((value.detach(), leaf.grad, matrix.grad, evaluated, sums))
    differences = {}
    names = ("loss", "hidden", "weight", "evaluation", "sums")
    for name, expected, found in zip(names, *results, strict=True):
        assert torch.isfinite(found).all()
        largest = expected.double().abs().amax().clamp(min=1e-30)
        differences[name] = float((found.double() - expected.double()).abs().amax() / largest)
    if masked:
        assert not any(each.any() for each in results[1][:3])
    return differences


def compare_loss_on_ranks(dtype: torch.dtype, rows: int) -> dict[str, float]:
    """Call `compare_loss` as one of two tensor-parallel ranks on CPUs."""
    from parallel.test_tensor_parallel import join

    tp = join(2, False).tensor_parallel
    return compare_loss(dtype, "cpu", masked=False, z_loss=1e-2, rows=rows, tp=tp)
