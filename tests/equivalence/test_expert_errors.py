"""Public errors of other trainers with experts, planted here, and found.

docs/experts.md has the table. The method that finds an error was written down before it was tried.
Here are the errors that a comparison with one process finds. `tests/model/test_experts.py` has the
formulas of auxiliary losses, recomputation and evaluation, and `test_expert_resumes.py` overflows.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from equivalence.test_context_layouts import BOUND, find_worst, join_state, train_cases
from equivalence.test_expert_layouts import EP, FIRST, MODELS, SIZES, TP2
from process_pool import ProcessPool, succeed


def count_experts_once() -> Any:
    """Count experts for the norm as if all ranks had the same ones."""
    from megatron.engine.native import NativeEngine

    is_counted = NativeEngine._is_counted

    def is_counted_wrongly(engine: Any, master: Any) -> bool:
        first = engine._mesh.expert_parallel.rank == 0
        return is_counted(engine, master) and (first or not master.spec.by_expert)

    return mock.patch.object(NativeEngine, "_is_counted", is_counted_wrongly)


def keep_router_gradients_apart() -> Any:
    """Leave out the sum of the routers' gradients over tensor-parallel ranks."""
    from megatron.model.experts import routing
    from megatron.parallel.layers import make_parameter

    def make(spec: Any, tp: Any) -> Any:
        return make_parameter(spec.shape, spec)

    return mock.patch.object(routing, "make_replicated_inside_region", make)


def divide_by_fewer_ranks() -> Any:
    """Divide the gradients of experts only by the ranks that have them."""
    from megatron.engine.native import NativeEngine

    return mock.patch.object(NativeEngine, "_scale_expert_gradients", return_value=None)


def leave_out_context_ranks() -> Any:
    """Give each context-parallel rank the gradient of its own tokens' share only."""
    from megatron.model.experts.routing import Router

    compute = Router._compute_losses

    def compute_less(router: Any, *args: Any) -> Any:
        loss = compute(router, *args)
        return None if loss is None else loss / router._context.size

    return mock.patch.object(Router, "_compute_losses", compute_less)


def forget_microbatches() -> Any:
    """Do not divide the gradients of auxiliary losses by the number of microbatches."""
    from megatron.model.experts import layer

    add_loss = layer.add_loss
    return mock.patch.object(layer, "add_loss", lambda x, loss, factor: add_loss(x, loss, 1.0))


def balance_each_rank_alone() -> Any:
    """Compute shares from the tokens of one tensor-parallel rank."""
    from megatron.model.experts import routing

    return mock.patch.object(routing, "all_reduce", lambda x, ranks: x)


def route_again() -> Any:
    """Count, and choose, in a recomputation as in a first pass."""
    from megatron.model.experts.routing import Router

    forward = Router.forward

    def forget(router: Any, x: Any, first: int, total: int, routing: Any) -> Any:
        routing.choices.pop(router.layer, None)
        routing.shares.pop(router.layer, None)
        return forward(router, x, first, total, routing)

    return mock.patch.object(Router, "forward", forget)


def keep_counts() -> Any:
    """Start a step with the counts of the step before."""
    from megatron.engine.native import ExpertState

    return mock.patch.object(ExpertState, "begin_step", return_value=None)


ERRORS: dict[str, tuple[Callable[[], Any], int, str, str]] = {
    "norm counts experts of one rank (Megatron-LM #5916, DeepSpeed #8475)": (
        *(count_experts_once, 2, f"{EP} 2"),
        "steps",
    ),
    "router loses a reduction (torchtitan #1878, #4054)": (
        *(keep_router_gradients_apart, 2, TP2),
        "steps",
    ),
    "expert gradients are EP times too large (pytorch #160285)": (
        *(divide_by_fewer_ranks, 2, f"{EP} 2"),
        "steps",
    ),
    "auxiliary losses shrink with context parallelism (Megatron-LM #1652)": (
        *(leave_out_context_ranks, 2, "--context-parallel-size 2"),
        "exp_avg",
    ),
    "auxiliary losses grow with microbatches (Megatron-LM #5047)": (
        *(forget_microbatches, 2, f"{EP} 2"),
        "exp_avg",
    ),
    "each rank balances its own tokens (Megatron-LM #3768)": (
        *(balance_each_rank_alone, 2, TP2),
        "steps",
    ),
    "a recomputation counts again (torchtitan #1593)": (
        *(route_again, 1, "--checkpoint-activations"),
        "steps",
    ),
    "counts are kept over steps (torchtitan #4148)": (*(keep_counts, 2, ""), "steps"),
}
"""Error -> how it is planted, the ranks and flags, and the kind of number that shows it."""


def train_with_error(cases: Sequence[str], error: str | None) -> Any:
    """Train on this rank, with an error if one is named."""
    if error is None:
        return train_cases(cases)
    with ERRORS[error][0]():
        return train_cases(cases)


@pytest.fixture(scope="module")
def train(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains the first model in a world, with or without an error."""
    cache = tmp_path_factory.mktemp("cache")
    paths = f"--data-path {corpus} --data-cache-path {cache} --micro-batch-size 1"
    kept: dict[tuple[int, str], Any] = {}

    def run(ranks: int, flags: str, error: str | None = None) -> Any:
        key = (ranks, flags)
        if error is None and key in kept:
            return kept[key]
        case = f"{SIZES} {paths} {MODELS[FIRST]} {flags}"
        outcomes = pool.run(ranks, train_with_error, [case], error)
        succeed(outcomes)
        result = join_state([each.value[0] for each in outcomes])
        if error is None:
            kept[key] = result
        return result

    return run


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_found_and_a_healthy_run_is_not(error: str, train: Any) -> None:
    _, ranks, flags, kind = ERRORS[error]
    alone = train(1, "")
    healthy = find_worst(train(ranks, flags), alone)
    assert max(healthy.values()) < BOUND, healthy
    wrong = find_worst(train(ranks, flags, error), alone)
    # A hundred times the bound, so that no rounding can hide it.
    assert wrong[kind] > 100 * BOUND, wrong
