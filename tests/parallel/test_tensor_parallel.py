"""Tests of parallel layers, collectives and the loss on four ranks, against one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from process_pool import ProcessPool, succeed

from megatron.base.errors import LayoutError
from megatron.parallel.grid import Grid, GridCoordinate
from megatron.parallel.rendezvous import choose_device, start_process_group


def test_ranks_and_coordinates_match() -> None:
    grid = Grid(pipeline=2, data=3, tensor=4)
    coordinates = [grid.get_coordinate(rank) for rank in range(24)]
    assert len(set(coordinates)) == 24
    assert [grid.get_rank(coordinate) for coordinate in coordinates] == list(range(24))
    assert coordinates[0] == GridCoordinate(pipeline=0, data=0, tensor=0)
    # Tensor-parallel ranks are neighbours.
    assert coordinates[1] == GridCoordinate(pipeline=0, data=0, tensor=1)
    assert coordinates[4] == GridCoordinate(pipeline=0, data=1, tensor=0)
    assert coordinates[12] == GridCoordinate(pipeline=1, data=0, tensor=0)
    with pytest.raises(LayoutError, match="tensor-parallel size 0"):
        Grid(pipeline=1, data=1, tensor=0)


def test_nccl_without_gpus_is_refused() -> None:
    if choose_device(0).type == "cuda":
        pytest.skip("this machine has a GPU")
    with pytest.raises(LayoutError, match="--distributed-backend gloo"):
        start_process_group("nccl", 1)


def join(tensor: int, sequence_parallel: bool):
    import os

    from megatron.parallel.mesh import build_mesh

    start_process_group("gloo", 1)
    world = int(os.environ["WORLD_SIZE"])
    return build_mesh(
        Grid(pipeline=1, data=world // tensor, tensor=tensor),
        torch.device("cpu"),
        sequence_parallel=sequence_parallel,
    )


def check_linears(sequence_parallel: bool) -> None:
    """Compare a column- and a row-parallel layer with two linear layers, forward and backward."""
    from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.parallel.parameter_spec import Init, make_linear_specs

    tp = join(4, sequence_parallel).tensor_parallel
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(24, 12, generator=generator)
    down = torch.randn(12, 24, generator=generator)
    up_bias = torch.randn(24, generator=generator)
    down_bias = torch.randn(12, generator=generator)
    x = torch.randn(8, 2, 12, generator=generator)
    specs = make_linear_specs("up", 24, 12, Init.NORMAL, bias=True, shard_dim=0)
    specs |= make_linear_specs("down", 12, 24, Init.NORMAL, bias=True, shard_dim=1)
    column = ColumnParallelLinear(specs, "up", tp)
    row = RowParallelLinear(specs, "down", tp)
    assert column.bias is not None
    assert row.bias is not None
    own = slice(tp.rank * 6, tp.rank * 6 + 6)
    for target, value in (
        (column.weight, up[own]),
        (column.bias, up_bias[own]),
        (row.weight, down[:, own]),
        (row.bias, down_bias),
    ):
        target.data.copy_(value)
    positions = slice(tp.rank * 2, tp.rank * 2 + 2) if sequence_parallel else slice(None)
    mine = x[positions].clone().requires_grad_()
    out = row(torch.relu(column(mine)))
    reference = x.clone().requires_grad_()
    up_reference = up.clone().requires_grad_()
    expected = F.linear(torch.relu(F.linear(reference, up_reference, up_bias)), down, down_bias)
    torch.testing.assert_close(out, expected[positions], rtol=1e-4, atol=1e-4)
    weights = torch.randn(expected.shape, generator=generator)
    (out * weights[positions]).sum().backward()
    (expected * weights).sum().backward()
    assert reference.grad is not None
    assert up_reference.grad is not None
    torch.testing.assert_close(mine.grad, reference.grad[positions], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(column.weight.grad, up_reference.grad[own], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parallel_linear_layers_equal_linear_layers(
    sequence_parallel: bool, pool: ProcessPool
) -> None:
    succeed(pool.run(4, check_linears, sequence_parallel))


def check_loss(vocab: int, padded: int, z_loss: float) -> float:
    """Compare the loss over a sharded, padded vocabulary with F.cross_entropy over the real one."""
    from megatron.model.loss import VocabSlice, cross_entropy
    from megatron.parallel.collectives import copy_to_tensor_parallel

    tp = join(4, False).tensor_parallel
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(padded, 16, generator=generator) * 3
    hidden = torch.randn(6, 2, 16, generator=generator)
    labels = torch.randint(0, vocab, (6, 2), generator=generator)
    mask = (torch.rand(6, 2, generator=generator) > 0.4).float()
    rows = padded // 4
    first = tp.rank * rows
    mine = hidden.clone().requires_grad_()
    local = weight[first : first + rows].clone().requires_grad_()
    slice_ = VocabSlice(first=first, real=min(max(vocab - first, 0), rows))
    entered = copy_to_tensor_parallel(mine, tp)
    loss = cross_entropy(entered, local, labels, slice_, tp, mask, z_loss=z_loss)
    loss.backward()
    reference = hidden.clone().requires_grad_()
    real = weight[:vocab].clone().requires_grad_()
    logits = F.linear(reference, real).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    losses = losses + z_loss * torch.logsumexp(logits, dim=-1).square()
    expected = (losses * mask.flatten()).sum() / mask.sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-6)
    assert real.grad is not None
    padding = F.pad(real.grad, (0, 0, 0, padded - vocab))
    torch.testing.assert_close(local.grad, padding[first : first + rows], rtol=1e-4, atol=1e-6)
    return loss.item()


@pytest.mark.parametrize(
    ("vocab", "padded", "z_loss"),
    [(64, 64, 0.0), (61, 64, 0.0), (40, 64, 0.0), (10, 64, 0.0), (40, 64, 0.1)],
    ids=str,
)
def test_the_loss_of_a_sharded_vocabulary_equals_cross_entropy(
    vocab: int, padded: int, z_loss: float, pool: ProcessPool
) -> None:
    """The smallest vocabulary leaves three of four ranks with padding only."""
    outcomes = pool.run(4, check_loss, vocab, padded, z_loss)
    succeed(outcomes)
    assert len({outcome.value for outcome in outcomes}) == 1


def check_wrong_world() -> None:
    from megatron.parallel.mesh import build_mesh

    start_process_group("gloo", 1)
    # A rank that ends closes its connections, also to those that have not seen them open yet.
    dist.barrier()
    build_mesh(Grid(pipeline=1, data=1, tensor=4), torch.device("cpu"))


def test_a_world_of_another_size_is_refused(pool: ProcessPool) -> None:
    outcome = pool.run(2, check_wrong_world)[0]
    assert outcome.kind == "LayoutError"
    assert "2 ranks were started" in str(outcome.error)
