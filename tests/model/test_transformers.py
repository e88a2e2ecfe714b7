"""Tests of logits, loss and gradients against the classes of `transformers`, on one and two ranks.

The bound is 1e-5 of the largest element of each tensor.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from model.builders import tiny_config
from model.reference_models import (
    FAMILIES,
    LAYERS,
    LENGTH,
    VOCAB,
    Expected,
    Family,
    compute_expected,
    make_tokens,
)
from process_pool import ProcessPool, succeed

from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.model.shape import ModelShape
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import TensorParallel, build_mesh
from megatron.parallel.rendezvous import start_process_group
from megatron.parallel.rng import RandomStreams

pytest.importorskip("transformers")
BOUND = 1e-5
PADDED = 128


@dataclass(frozen=True)
class Computed:
    """What one rank computed. Arrays and not tensors, because they are sent between processes."""

    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]
    shard_dims: dict[str, int | None]


def build_model(changes: dict[str, Any], tp: TensorParallel) -> GPT:
    config = tiny_config(num_layers=LAYERS, seq_length=LENGTH, **changes)
    shape = ModelShape(config, VOCAB, PADDED)
    return GPT(shape, tp, RandomStreams(7, torch.device("cpu")))


def list_parameters(family: Family) -> list[str]:
    return [name for name, _ in build_model(dict(family.ours), TensorParallel()).named_parameters()]


def compute_ours(
    changes: dict[str, Any],
    weights: dict[str, np.ndarray],
    tensor_parallel: int,
    sequence_parallel: bool,
) -> Computed:
    """Run our model with given weights on this rank's part."""
    tp = TensorParallel()
    if tensor_parallel > 1:
        start_process_group("gloo", 1)
        mesh = build_mesh(
            Grid(1, 1, tensor_parallel),
            torch.device("cpu"),
            sequence_parallel=sequence_parallel,
        )
        tp = mesh.tensor_parallel
    model = build_model(changes, tp)
    for name, parameter in model.named_parameters():
        parameter.data.zero_()
        part = torch.from_numpy(weights[name])
        dim = parameter.spec.shard_dim  # type: ignore[attr-defined]
        if dim is not None:
            size = parameter.shape[dim]
            part = part.narrow(dim, *_clip(tp.rank * size, size, part.shape[dim]))
        parameter.data[: part.shape[0]].copy_(part)
    with torch.no_grad():
        logits = model.compute_logits(make_tokens(1))
    loss = model(None, Inputs(make_tokens(1), make_tokens(2)))
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if parameter.spec.partial_gradient:  # type: ignore[attr-defined]
            torch.distributed.all_reduce(parameter.grad, group=tp.group)
        gradients[name] = parameter.grad.numpy()
    dims = {n: p.spec.shard_dim for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    return Computed(logits.numpy(), loss.item(), gradients, dims)


def _clip(start: int, size: int, total: int) -> tuple[int, int]:
    """Return start and length of a slice without the padding of the vocabulary."""
    return min(start, total), max(0, min(size, total - start))


def check(ranks: list[Computed], expected: Expected) -> None:
    """Compare what all ranks computed with `transformers`."""
    logits = np.concatenate([rank.logits for rank in ranks], axis=-1)
    assert_close(logits, expected.logits, "logits")
    for rank in ranks:
        assert rank.loss == pytest.approx(expected.loss, rel=BOUND)
        for name, dim in rank.shard_dims.items():
            if dim is None:
                assert_close(rank.gradients[name], expected.gradients[name], name)
    for name, dim in ranks[0].shard_dims.items():
        if dim is not None:
            whole = np.concatenate([rank.gradients[name] for rank in ranks], axis=dim)
            rows = expected.gradients[name].shape[0]
            assert_close(whole[:rows], expected.gradients[name], name)


def assert_close(ours: np.ndarray, theirs: torch.Tensor, what: str) -> None:
    assert ours.shape == tuple(theirs.shape), what
    largest = theirs.abs().max().item()
    assert largest > 1e-4, f"{what}: too small to be compared"
    worst = np.abs(ours - theirs.numpy()).max() / largest
    assert worst < BOUND, f"{what}: {worst:.2g} of the largest element"


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_equals_transformers(name: str) -> None:
    family = FAMILIES[name]
    expected = compute_expected(family, list_parameters(family))
    weights = {n: t.numpy() for n, t in expected.weights.items()}
    check([compute_ours(dict(family.ours), weights, 1, False)], expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_transformers(name: str, pool: ProcessPool) -> None:
    """With sequence parallelism, which makes the gradients of norms partial."""
    family = FAMILIES[name]
    expected = compute_expected(family, list_parameters(family))
    weights = {n: t.numpy() for n, t in expected.weights.items()}
    for sequence_parallel in (False, True):
        outcomes = pool.run(2, compute_ours, dict(family.ours), weights, 2, sequence_parallel)
        succeed(outcomes)
        check([outcome.value for outcome in outcomes], expected)
