"""Gradients of the declared autograd Functions (`parallel/spmd.py`) on 2 and 3 ranks.

`tools/verify.py --types` trusts the types of their gradients. Here each Function is compared with a
formula that one process differentiates. The formula's inputs are those of all ranks:

    I, R  one tensor, which all ranks have. The gradient of I is the formula's on each rank. That of
          R is the sum of the ranks' gradients.
    V     a tensor of each rank, whose gradient is the rank's own

So is the result. The gradient that a result I or V gets is the formula's. For a result R, the sum
of what the ranks get is.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from process_pool import ProcessPool, succeed
from torch import Tensor

from megatron.parallel.mesh import ContextParallel, TensorParallel
from megatron.parallel.rendezvous import start_process_group
from megatron.parallel.spmd import DECLARED

Value = Tensor | list[Tensor]
"""A tensor that all ranks have, or those of the ranks."""


@dataclass(frozen=True)
class Case:
    """A Function, a formula of the same results, and inputs that need gradients."""

    inputs: list[Any]
    run: Callable[..., Any]
    """Takes this rank's inputs. Calls the Function."""
    formula: Callable[..., Any]
    """Takes the inputs of all ranks."""
    types: str
    """The types of the inputs, and after a space that of the result."""
    extra: Callable[..., Any] | None = None
    """A term of the loss that the Function adds to its backward pass only."""


class Draw:
    """Draws inputs, the same ones on all ranks."""

    def __init__(self, size: int) -> None:
        self._generator = torch.Generator().manual_seed(size)
        self._size = size

    def one(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def each(self, *shape: int) -> list[Tensor]:
        return [self.one(*shape) for _ in range(self._size)]


def build_collectives(rank: int, size: int) -> dict[str, Case]:
    """Return the cases of Functions that only send, by the names of the Functions."""
    from megatron.model.experts import dispatch
    from megatron.parallel import collectives, context

    inputs = Draw(size)
    draw, draw_each = inputs.one, inputs.each
    group = dist.group.WORLD
    tp = TensorParallel(size, rank, group)
    ranks = ContextParallel(size, rank, group)
    n = size
    rows = 4 * n - 1
    """The last rank has fewer rows than the others."""
    return {
        "_Copy": Case([draw(4, 3)], lambda x: collectives._Copy.apply(x, tp), lambda x: x, "I R"),
        "_Reduce": Case(
            [draw_each(4, 3)], lambda x: collectives._Reduce.apply(x, tp), lambda x: sum(x), "V I"
        ),
        "_GatherSequence": Case(
            [draw_each(2, 3)],
            lambda x: collectives._GatherSequence.apply(x, tp),
            lambda x: torch.cat(x),
            "V R",
        ),
        "_ReduceScatterSequence": Case(
            [draw_each(2 * n, 3)],
            lambda x: collectives._ReduceScatterSequence.apply(x, tp),
            lambda x: list(torch.stack(x).sum(0).chunk(n)),
            "V V",
        ),
        "_JoinParts": Case(
            [list(draw(rows, 3).split(4))],
            lambda x: dispatch._JoinParts.apply(x, rows, tp),
            lambda x: torch.cat(x),
            "V I",
        ),
        "_TakePart": Case(
            [draw(rows, 3)],
            lambda x: dispatch._TakePart.apply(x, tp),
            lambda x: list(x.split(4)),
            "I V",
        ),
        "_Exchange": Case(
            [draw_each(n, 3)],
            lambda x: context._Exchange.apply(x, ranks),
            lambda x: list(torch.stack(x).transpose(0, 1)),
            "V V",
        ),
    }


def build_linears(rank: int, size: int) -> dict[str, Case]:
    """Return cases of two layers with biases, without and with a sharded sequence."""
    from megatron.parallel import entered_linear

    inputs = Draw(size)
    draw, draw_each = inputs.one, inputs.each
    group = dist.group.WORLD
    tp = TensorParallel(size, rank, group)
    sharded = TensorParallel(size, rank, group, sequence_parallel=True)
    cases = {}
    for name, region in (("plain", tp), ("sequence", sharded)):
        x: Value = draw_each(2, 2, 6) if region.sequence_parallel else draw(2, 2, 6)
        weights = [draw_each(5, 6), draw_each(4, 6)]
        biases = [draw_each(5), draw_each(4)]

        def run_linears(*given: Tensor, region: TensorParallel = region) -> tuple[Tensor, ...]:
            out = entered_linear._EnteredLinears.apply(given[0], region, False, None, *given[1:])
            return (torch.cat(out, dim=-1),)

        def apply_linears(x: Value, *given: list[Tensor]) -> list[Tensor]:
            whole = torch.cat(x) if isinstance(x, list) else x
            first, second, bias, other = given
            return [
                torch.cat(
                    (F.linear(whole, first[r], bias[r]), F.linear(whole, second[r], other[r])), -1
                )
                for r in range(size)
            ]

        types = ("V" if region.sequence_parallel else "I") + "VVVV V"
        cases[f"_EnteredLinears {name}"] = Case(
            [x, *weights, *biases], run_linears, apply_linears, types
        )

    return cases


def build_exchanges(rank: int, size: int) -> dict[str, Case]:
    """Return the cases of context parallelism and of uneven messages."""
    from megatron.model.experts import dispatch
    from megatron.parallel import context

    draw, draw_each = Draw(size).one, Draw(size).each
    group = dist.group.WORLD
    tp = TensorParallel(size, rank, group)
    ranks = ContextParallel(size, rank, group)
    n = size
    cases = {}

    def gather(x: Tensor) -> Tensor:
        message = context._Message(ranks)
        started = context._BeginGather.apply(x, message)
        return context._EndGather.apply(started, message)

    cases["_BeginGather _EndGather"] = Case(
        [draw_each(2, 3)], gather, lambda x: torch.cat(x), "V R"
    )
    length, window = 12 * n, 3

    def read(x: list[Tensor]) -> list[Tensor]:
        parts: list[Any] = [None] * length
        for owner in range(n):
            own = [p for part in context.list_parts(owner, n, length) for p in part]
            for place, position in enumerate(own):
                parts[position] = x[owner][place]
        found = []
        for reader in range(n):
            early, late = context._find_reaches(reader, n, length, window)
            found.append(torch.stack([parts[p] for p in sorted({*early, *late})]))
        return found

    cases["_ReadNeighbours"] = Case(
        [draw_each(12, 3)],
        lambda x: context._ReadNeighbours.apply(x, window, ranks),
        read,
        "V V",
    )
    sizes = [[1 + (i + 2 * j) % 3 for j in range(n)] for i in range(n)]
    """Rows from each rank to each rank."""
    cases["_ExchangeRows"] = Case(
        [[draw(sum(row), 3) for row in sizes]],
        lambda x: dispatch._ExchangeRows.apply(x, sizes[rank], [r[rank] for r in sizes], tp),
        lambda x: [torch.cat([x[i].split(sizes[i])[j] for i in range(n)]) for j in range(n)],
        "V V",
    )
    return cases


def build_loss(rank: int, size: int) -> dict[str, Case]:
    """Return the case of the loss, with a mask, z-loss, and padding on the last rank."""
    from megatron.model import loss

    inputs = Draw(size)
    tp = TensorParallel(size, rank, dist.group.WORLD)
    vocabulary = 5 * size
    labels = torch.arange(7) * 3 % (vocabulary - 1)
    mask = torch.tensor([1.0, 0, 1, 1, 1, 0, 1], dtype=torch.float64)
    real = min(5, vocabulary - 1 - 5 * rank)

    def run_loss(hidden: Tensor, weight: Tensor) -> Tensor:
        rows = loss.VocabSlice(5 * rank, real)
        total = loss._LinearCrossEntropy.apply(
            hidden, weight, labels, mask.float(), rows, tp, 0.1, True, None, None
        )
        return total.reshape(1)

    def compute_loss(hidden: Tensor, weight: list[Tensor]) -> Tensor:
        logits = F.linear(hidden, torch.cat(weight)[: vocabulary - 1])
        of_rows = F.cross_entropy(logits, labels, reduction="none")
        of_rows = of_rows + 0.1 * logits.logsumexp(dim=1).square()
        return (of_rows * mask.float()).sum().reshape(1)

    given = [inputs.one(7, 6).float(), [w.float() for w in inputs.each(5, 6)]]
    return {"_LinearCrossEntropy": Case(given, run_loss, compute_loss, "RV I")}


def build_local(size: int) -> dict[str, Case]:
    """Return the cases of Functions without messages."""
    from megatron.model import norm, positions
    from megatron.model.experts import dispatch, grouped, routing

    inputs = Draw(size)
    draw, draw_each = inputs.one, inputs.each
    generator = torch.Generator().manual_seed(1)
    cases = {}
    order = torch.randperm(8, generator=generator)
    inverse = order.argsort()
    cases["_Spread"] = Case(
        [draw_each(4, 3)],
        lambda x: dispatch._Spread.apply(x, order, inverse, 2),
        lambda x: [each.repeat_interleave(2, 0)[order] for each in x],
        "V V",
    )
    cases["_Reorder"] = Case(
        [draw_each(8, 3)],
        lambda x: dispatch._Reorder.apply(x, order, inverse),
        lambda x: [each[order] for each in x],
        "V V",
    )
    cases["_AddLoss"] = Case(
        [draw_each(4, 3), draw_each(1)],
        lambda x, auxiliary: routing._AddLoss.apply(x, auxiliary, 0.3),
        lambda x, auxiliary: x,
        "VV V",
        extra=lambda x, auxiliary: 0.3 * torch.stack(auxiliary).sum(),
    )
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    cases["_GroupedLinear"] = Case(
        [draw_each(5, 4), draw_each(3 * 6, 4)],
        lambda x, weight: grouped._GroupedLinear.apply(x, weight, ends),
        lambda x, weight: [
            torch.cat((a[:2] @ w[:6].t(), a[2:] @ w[12:].t()))
            for a, w in zip(x, weight, strict=True)
        ],
        "VV V",
    )
    cos, sin = draw(4, 1, 1, 1, 2), draw(4, 1, 1, 1, 2)
    cases["_Rotate"] = Case(
        [draw_each(4, 2, 3, 1, 5)],
        lambda x: positions._Rotate.apply(x, cos, sin),
        lambda x: [
            torch.cat(
                (
                    each[..., :2] * cos - each[..., 2:4] * sin,
                    each[..., 2:4] * cos + each[..., :2] * sin,
                    each[..., 4:],
                ),
                -1,
            )
            for each in x
        ],
        "V V",
    )
    cases["_RMSNormFunction"] = Case(
        [[each.float() for each in draw_each(4, 6)], draw(6).float()],
        lambda x, weight: norm._RMSNormFunction.apply(x, weight, 1e-5),
        lambda x, weight: [F.rms_norm(each, (6,), weight, 1e-5) for each in x],
        "VR V",
    )
    return cases


def compare(name: str, case: Case, rank: int, size: int) -> None:
    """Compare a Function's result and gradients with those of the formula."""
    generator = torch.Generator().manual_seed(7)
    *types, out_type = list(case.types.replace(" ", ""))
    leaves = [_require_gradient(value) for value in case.inputs]
    own = [
        _require_gradient(value[rank] if isinstance(value, list) else value)
        for value in case.inputs
    ]
    expected = case.formula(*leaves)
    out = case.run(*own)
    out = out[0] if isinstance(out, tuple) else out
    wanted = expected[rank] if isinstance(expected, list) else expected
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")

    def draw_like(value: Tensor) -> Tensor:
        return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)

    if isinstance(expected, list):
        weights: Value = [draw_like(each) for each in expected]
        own_weight = weights[rank]
        loss = sum((e * w).sum() for e, w in zip(expected, weights, strict=True))
    elif out_type == "R":
        of_ranks = [draw_like(expected) for _ in range(size)]
        own_weight = of_ranks[rank]
        loss = (expected * sum(of_ranks)).sum()
    else:
        own_weight = draw_like(expected)
        loss = (expected * own_weight).sum()
    if case.extra is not None:
        loss = loss + case.extra(*leaves)
    loss.backward()
    (out * own_weight).sum().backward()
    for number, (leaf, mine, type_) in enumerate(zip(leaves, own, types, strict=True)):
        assert mine.grad is not None, f"{name}: input {number} has no gradient"
        gradient = mine.grad
        if type_ == "R":
            dist.all_reduce(gradient)
        right = leaf[rank].grad if isinstance(leaf, list) else leaf.grad
        torch.testing.assert_close(
            gradient,
            right,
            rtol=1e-4,
            atol=1e-5,
            msg=functools.partial("{}, gradient of input {}: {}".format, name, number),
        )


def _require_gradient(value: Value) -> Any:
    if isinstance(value, list):
        return [_require_gradient(each) for each in value]
    return value.detach().clone().requires_grad_()


def check_all_functions() -> None:
    start_process_group("gloo", 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = {
        **build_collectives(rank, size),
        **build_linears(rank, size),
        **build_exchanges(rank, size),
        **build_loss(rank, size),
        **build_local(size),
    }
    for name, case in cases.items():
        compare(name, case, rank, size)
    tested = {word for name in cases for word in name.split() if word.startswith("_")}
    declared = {
        each.__name__ for each in DECLARED if not each.__module__.startswith("megatron.extras.")
    }
    assert tested == declared


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_gradient_of_each_declared_function_equals_one_process(
    ranks: int, pool: ProcessPool
) -> None:
    succeed(pool.run(ranks, check_all_functions))


def test_the_types_of_declarations_are_those_of_the_cases() -> None:
    for function, rule in DECLARED.items():
        letters: Sequence[str] = [*rule.inputs.values(), *([rule.out] if rule.out else [])]
        assert all(letter in ("I", "R", "V", "I/V") for letter in letters), function
