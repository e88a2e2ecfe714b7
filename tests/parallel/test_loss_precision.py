"""The loss of large logits, against float64 and torch.

The idea is that of Megatron-LM's test of its cross entropy: logits of scale 1000, bound 1e-6. The
hidden states are the logits and the output matrix is the identity, so the logits are exact in
every dtype.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from process_pool import ProcessPool, succeed
from torch import Tensor

from megatron.parallel.mesh import TensorParallel

SEQUENCE = 13
BATCH = 17
VOCAB_PER_RANK = 11
SCALE = 1000.0
BOUND = 1e-6
GRADIENT_BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-5, torch.bfloat16: 1e-4}
"""Gradients are at most 1 / (13 x 17) here, and are kept in the dtype of the logits."""


def some_logits(
    vocab: int,
    close: bool,
    dtype: torch.dtype,
    seed: int = 1234,
) -> tuple[Tensor, Tensor]:
    """Return logits [s, b, v] of scale 1000 and targets [s, b].

    With `close`, each target's logit is at most 2 below the highest one, so the loss is small.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(SEQUENCE, BATCH, vocab, generator=generator) * SCALE
    labels = torch.randint(0, vocab, (SEQUENCE, BATCH), generator=generator)
    if close:
        below = torch.rand(SEQUENCE, BATCH, 1, generator=generator) * 2
        logits.scatter_(2, labels[..., None], logits.amax(dim=2, keepdim=True) - below)
    return logits.to(dtype), labels


def join() -> TensorParallel:
    """Make one tensor-parallel group of all ranks."""
    import os

    from megatron.parallel.grid import Grid
    from megatron.parallel.mesh import build_mesh
    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 1)
    grid = Grid(pipeline=1, data=1, tensor=int(os.environ["WORLD_SIZE"]))
    return build_mesh(grid, torch.device("cpu")).tensor_parallel


def loss_on_ranks(logits: Tensor, labels: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the logits [s, b, v], of which each rank has a part."""
    from megatron.model.loss import VocabSlice, cross_entropy
    from megatron.parallel.collectives import copy_to_tensor_parallel

    vocab = logits.shape[2]
    rows = vocab // tp.size
    first = tp.rank * rows
    hidden = logits.clone().requires_grad_()
    weight = torch.eye(vocab, dtype=logits.dtype)[first : first + rows].requires_grad_()
    entered = copy_to_tensor_parallel(hidden, tp)
    loss = cross_entropy(entered, weight, labels, VocabSlice(first=first, real=rows), tp)
    loss.backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad


def check_against_float64(chunk_rows: int | None) -> None:
    """Compare loss and gradient with float64, `chunk_rows` rows at a time."""
    from megatron.model import loss as module

    tp = join()
    vocab = VOCAB_PER_RANK * tp.size
    limit = module._CHUNK_BYTES_CPU
    if chunk_rows is not None:
        module._CHUNK_BYTES_CPU = chunk_rows * 4 * VOCAB_PER_RANK
    try:
        for dtype, bound in GRADIENT_BOUNDS.items():
            logits, labels = some_logits(vocab, True, dtype)
            loss, gradient = loss_on_ranks(logits, labels, tp)
            exact = logits.double().requires_grad_()
            expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten())
            expected.backward()
            assert exact.grad is not None
            assert 0.1 < expected.item() < 10
            assert abs(loss.double() - expected).item() < BOUND, dtype
            assert (gradient.double() - exact.grad).abs().max().item() < bound, dtype
            for row in range(SEQUENCE):  # one position by itself, whose error no mean hides
                alone = logits[row : row + 1, :1]
                label = labels[row : row + 1, :1]
                expected = F.cross_entropy(alone.double().flatten(0, 1), label.flatten())
                loss, _ = loss_on_ranks(alone, label, tp)
                assert abs(loss.double() - expected).item() < BOUND, dtype
    finally:
        module._CHUNK_BYTES_CPU = limit


@pytest.mark.parametrize(("ranks", "chunk_rows"), [(1, None), (4, None), (4, 50)])
def test_a_small_loss_of_large_logits_is_exact(
    ranks: int,
    chunk_rows: int | None,
    pool: ProcessPool,
) -> None:
    """A loss that is computed as a log-sum-exp minus the target's logit is wrong by 1e-4 here."""
    succeed(pool.run(ranks, check_against_float64, chunk_rows))


def check_against_torch() -> None:
    """Compare loss and gradient with torch's."""
    tp = join()
    for seed in range(5):
        logits, labels = some_logits(VOCAB_PER_RANK * tp.size, False, torch.float32, seed)
        loss, gradient = loss_on_ranks(logits, labels, tp)
        reference = logits.clone().requires_grad_()
        expected = F.cross_entropy(
            reference.flatten(0, 1), labels.flatten(), reduction="none"
        ).mean()
        expected.backward()
        assert reference.grad is not None
        assert expected.item() > SCALE
        assert abs(loss - expected).item() < BOUND
        assert (gradient - reference.grad).abs().max().item() < BOUND


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_loss_of_random_targets_equals_torchs(ranks: int, pool: ProcessPool) -> None:
    """Use Megatron-LM's own setting. A loss above 1000 meets the bound only if it is equal."""
    succeed(pool.run(ranks, check_against_torch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [8, 6], ids=["without padding", "with padding"])
def test_a_frequent_token_does_not_overflow(dtype: torch.dtype, vocab: int) -> None:
    """The sum of (p - y) h over all positions is about 140,000, and fp16 ends at 65,504."""
    from megatron.model.loss import VocabSlice, cross_entropy

    positions = 4096
    hidden = torch.full((positions, 1, 4), 40.0, dtype=dtype, requires_grad=True)
    weight = torch.zeros(8, 4, dtype=dtype, requires_grad=True)
    labels = torch.zeros(positions, 1, dtype=torch.long)
    loss = cross_entropy(hidden, weight, labels, VocabSlice(0, vocab), TensorParallel())
    # As the search for a loss scale does.
    (loss * 4).backward()
    assert weight.grad is not None
    assert weight.grad.dtype == dtype
    # Every token has the probability 1 / vocab.
    expected = torch.zeros(8, 4)
    expected[:vocab] = 4 * 40 / vocab
    expected[0] -= 4 * 40
    torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("real", [1, 37, 64])
def test_padding_in_the_products_never_reaches_the_loss(dtype: torch.dtype, real: int) -> None:
    """A GPU multiplies with all rows. The rows of padding are the largest ones here."""
    from megatron.model import loss as module

    generator = torch.Generator().manual_seed(3)
    values = torch.randn(64, 16, generator=generator)
    values[real:] = 100.0
    labels = torch.randint(0, real, (50, 2), generator=generator)
    states = torch.randn(50, 2, 16, generator=generator)
    mask = (torch.rand(50, 2, generator=generator) > 0.3).float()
    results = []
    for padded in (False, True):
        hidden = states.to(dtype).requires_grad_()
        weight = values.to(dtype).requires_grad_()
        columns = mock.patch.object(
            module, "_count_product_columns", return_value=64 if padded else real
        )
        rows = module.VocabSlice(0, real)
        with columns, mock.patch.object(module, "_CHUNK_BYTES_CPU", 4 * 64 * 30):
            loss = module.cross_entropy(
                hidden, weight, labels, rows, TensorParallel(), mask, z_loss=0.1
            )
            loss.backward()
        assert weight.grad is not None
        assert hidden.grad is not None
        assert torch.equal(weight.grad[real:], torch.zeros(64 - real, 16, dtype=dtype))
        results.append((loss.detach(), hidden.grad, weight.grad))
    for plain, found in zip(*results, strict=True):
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, plain, rtol=bound, atol=bound / 100)


def test_products_are_padded_on_a_gpu_only() -> None:
    from megatron.model.loss import VocabSlice, _count_product_columns

    weight = torch.empty(64, 4)
    assert _count_product_columns(weight, VocabSlice(0, 37), on_gpu=True) == 64
    assert _count_product_columns(weight, VocabSlice(0, 37), on_gpu=False) == 37
    # A rank with nothing but padding has nothing to multiply.
    assert _count_product_columns(weight, VocabSlice(64, 0), on_gpu=True) == 0
