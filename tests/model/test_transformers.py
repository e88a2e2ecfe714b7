"""Tests of logits, loss and gradients against the classes of `transformers`.

They run on one, two and four ranks. The bound is 1e-5 of the largest element of each tensor.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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

from megatron.model.flops import count_parameters
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.model.shape import ModelShape
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import ExpertParallel, TensorParallel, build_mesh
from megatron.parallel.rendezvous import start_process_group

pytest.importorskip("transformers")
BOUND = 1e-5
PADDED = 128
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Computed:
    """The results of one rank, as arrays that can be sent between processes."""

    logits: np.ndarray
    loss: float
    slices: list[tuple[str, Index, np.ndarray]]
    """Gradients: name of a global tensor, index of a part of it, and the gradient of this part."""


def build_model(
    changes: dict[str, Any], tp: TensorParallel, ranks: ExpertParallel | None = None
) -> GPT:
    config = tiny_config(num_layers=LAYERS, seq_length=LENGTH, **changes)
    shape = ModelShape(config, VOCAB, PADDED)
    return GPT(shape, tp, ranks=ranks)


def list_parameters(family: Family) -> list[str]:
    return [name for name, _ in build_model(dict(family.ours), TensorParallel()).named_parameters()]


def compute_ours(
    changes: dict[str, Any],
    weights: dict[str, np.ndarray],
    tensor_parallel: int,
    sequence_parallel: bool,
) -> Computed:
    """Return the results of our model on this rank, with this rank's part of given weights."""
    tp = TensorParallel()
    ranks = ExpertParallel()
    if tensor_parallel > 1:
        start_process_group("gloo", 1)
        experts = changes.get("num_experts")
        # With sequence parallelism, the ranks divide the experts, if they can.
        divided = sequence_parallel and experts is not None and experts % tensor_parallel == 0
        mesh = build_mesh(
            Grid(1, 1, tensor_parallel),
            torch.device("cpu"),
            sequence_parallel=sequence_parallel,
            expert_size=tensor_parallel if divided else 1,
        )
        tp = mesh.tensor_parallel
        ranks = mesh.expert_parallel or ranks
    model = build_model(changes, tp, ranks)
    for name, parameter in model.named_parameters():
        parameter.data.zero_()
        for whole, index, rows in list_slices(name, parameter, tp, ranks):
            parameter.data[rows].copy_(torch.from_numpy(weights[whole][index]))
    with torch.no_grad():
        logits = model.compute_logits(make_tokens(1))
    loss = model(None, Inputs(make_tokens(1), make_tokens(2)))
    loss.backward()
    slices = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        spec = parameter.spec  # type: ignore[attr-defined]
        # Each rank routes a part of the tokens through its copy of an expert.
        copied = spec.by_expert and ranks.size == 1 and tp.size > 1
        if spec.partial_gradient or copied:
            torch.distributed.all_reduce(parameter.grad, group=tp.group)
        for whole, index, rows in list_slices(name, parameter, tp, ranks):
            slices.append((whole, index, parameter.grad[rows].numpy()))
    return Computed(logits.numpy(), loss.item(), slices)


def list_slices(
    name: str, parameter: torch.nn.Parameter, tp: TensorParallel, ranks: ExpertParallel
) -> Iterator[tuple[str, Index, slice]]:
    """Yield a global tensor's name, the index of a part, and the rows of `parameter` that hold it.

    It does not use the engine's own functions, so the test also finds errors in those.
    """
    spec = parameter.spec  # type: ignore[attr-defined]
    if spec.pieces is not None:
        whole = f"{name.rpartition('.')[0]}.{spec.rows_of}"
        for piece in spec.pieces:
            index = (slice(piece.start, piece.start + piece.rows),)
            yield whole, index, slice(piece.local, piece.local + piece.rows)
    elif spec.by_expert:
        start = ranks.rank * len(parameter)
        yield name, (slice(start, start + len(parameter)),), slice(None)
    elif spec.shard_dim is None:
        yield name, (), slice(None)
    else:
        size = parameter.shape[spec.shard_dim]
        start = tp.rank * size
        # Rows after the last are padding of the vocabulary.
        stop = max(start, min(start + size, spec.shape[spec.shard_dim]))
        index = (slice(None),) * spec.shard_dim + (slice(start, stop),)
        yield name, index, slice(0, stop - start) if spec.shard_dim == 0 else slice(None)


def check(ranks: list[Computed], expected: Expected, bound: float = BOUND) -> None:
    """Compare what all ranks computed with `transformers`."""
    logits = np.concatenate([rank.logits for rank in ranks], axis=-1)
    assert_close(logits, expected.logits.numpy(), "logits", bound)
    gradients = {name: np.full(t.shape, np.nan) for name, t in expected.gradients.items()}
    for rank in ranks:
        assert rank.loss == pytest.approx(expected.loss, rel=bound)
        for name, index, values in rank.slices:
            # Replicas on other ranks have the same index. They must be equal.
            before = gradients[name][index]
            assert np.isnan(before).all() or np.array_equal(before, values), name
            gradients[name][index] = values
    for name, values in gradients.items():
        assert_close(values, expected.gradients[name].numpy(), name, bound)


def assert_close(ours: np.ndarray, theirs: np.ndarray, what: str, bound: float) -> None:
    assert ours.shape == theirs.shape, what
    largest = np.abs(theirs).max()
    assert largest > 1e-4, f"{what}: too small to be compared"
    worst = np.abs(ours - theirs).max() / largest
    assert worst < bound, f"{what}: {worst:.2g} of the largest element"


def get_family(name: str) -> Family:
    """Return a family whose rounding in fp32 is small.

    The output norm of Olmo-Hybrid has a constant, with which rounding exceeds the bound in both
    models. The test in fp64 has the constant.
    """
    family = FAMILIES[name]
    if name == "olmo-hybrid":
        return replace(family, ours={**family.ours, "linear_norm_epsilon": 1e-2})
    return family


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_equals_transformers(name: str) -> None:
    family = get_family(name)
    expected = compute_expected(family, list_parameters(family))
    weights = {n: t.numpy() for n, t in expected.weights.items()}
    check([compute_ours(dict(family.ours), weights, 1, False)], expected)


class InDouble:
    """The module torch, in which fp32 is fp64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        (
            "qwen3-next",
            {"layernorm_epsilon": 1e-6},
            {"rms_norm_eps": 1e-6, "experts_implementation": "eager"},
        ),
        ("olmo-hybrid", {}, {}),
    ],
)
def test_hybrids_equal_transformers_in_fp64(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of positions stay in fp32, so rotated models differ by 1e-7 and others by 1e-14."""
    import transformers

    family = FAMILIES[name]
    family = replace(family, theirs={**family.theirs, **theirs}, ours={**family.ours, **ours})
    module = getattr(transformers, f"{family.model}ForCausalLM").__module__
    monkeypatch.setattr(sys.modules[module], "torch", InDouble())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim)
    )
    monkeypatch.setattr(
        *("megatron.model.norm._compute_rstd",),
        lambda x, eps: x.square().mean(-1, keepdim=True).add(eps).rsqrt(),
    )
    monkeypatch.setattr(
        *("megatron.model.norm.RMSNorm._multiply",),
        lambda norm, x, weight: F.rms_norm(x, weight.shape, weight, norm.eps),
    )
    torch.set_default_dtype(torch.float64)
    try:
        expected = compute_expected(family, list_parameters(family))
        weights = {n: t.numpy() for n, t in expected.weights.items()}
        check([compute_ours(dict(family.ours), weights, 1, False)], expected, 1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_transformers(name: str, pool: ProcessPool) -> None:
    """Test without and with sequence parallelism, which makes the gradients of norms partial."""
    family = get_family(name)
    expected = compute_expected(family, list_parameters(family))
    weights = {n: t.numpy() for n, t in expected.weights.items()}
    for sequence_parallel in (False, True):
        outcomes = pool.run(2, compute_ours, dict(family.ours), weights, 2, sequence_parallel)
        succeed(outcomes)
        check([outcome.value for outcome in outcomes], expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_as_many_as_those_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    config = tiny_config(num_layers=LAYERS, seq_length=LENGTH, **family.ours)
    theirs = sum(parameter.numel() for parameter in family.build().parameters())
    assert count_parameters(ModelShape(config, VOCAB, VOCAB)) == theirs


@pytest.mark.parametrize("name", ["qwen3-multi-query", "qwen3", "qwen3-next"])
def test_four_ranks_share_query_groups(name: str, pool: ProcessPool) -> None:
    family = FAMILIES[name]
    expected = compute_expected(family, list_parameters(family))
    weights = {n: t.numpy() for n, t in expected.weights.items()}
    outcomes = pool.run(4, compute_ours, dict(family.ours), weights, 4, True)
    succeed(outcomes)
    check([outcome.value for outcome in outcomes], expected)
