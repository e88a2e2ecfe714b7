"""Known errors of mixtures of experts, as changes of this package in one process."""

from typing import Any

from verify.mutation import MEGATRON, NO_DROPOUT, TP, Mutation, wrap

EXPERTS = f"--num-experts 16 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 {NO_DROPOUT}"
EP = f"{EXPERTS} --expert-model-parallel-size 2"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"


def count_experts_of_one_rank() -> None:
    from megatron.engine.native import NativeEngine

    def make(is_counted: Any) -> Any:
        def is_counted_once(engine: Any, master: Any) -> bool:
            experts = engine._mesh.expert_parallel
            first = experts is None or experts.rank == 0
            return is_counted(engine, master) and (first or not master.spec.by_expert)

        return is_counted_once

    wrap(NativeEngine, "_is_counted", make)


def keep_gradients_of_routers() -> None:
    from megatron.model.experts import routing
    from megatron.parallel.layers import ParameterSpec, make_parameter

    def make_local(shape: tuple[int, ...], tp: Any, init: Any) -> Any:
        return make_parameter(shape, ParameterSpec(shape, init))

    wrap(routing, "make_replicated_inside_region", lambda _: make_local)


def divide_by_ranks_with_the_expert() -> None:
    from megatron.engine.native import NativeEngine

    wrap(NativeEngine, "_scale_expert_gradients", lambda _: lambda engine: None)


def leave_out_factor_of_losses() -> None:
    from megatron.model.experts import layer

    wrap(layer, "add_loss", lambda add: lambda x, loss, factor: add(x, loss, 1.0))


def move_bias_after_an_overflow() -> None:
    from megatron.engine.expert_state import ExpertState

    def make(end: Any) -> Any:
        return lambda state, microbatches, *, applied: end(state, microbatches, applied=True)

    wrap(ExpertState, "end_step", make)


def keep_counts_of_the_step_before() -> None:
    from megatron.engine.expert_state import ExpertState

    wrap(ExpertState, "begin_step", lambda _: lambda state: None)


EXPERT_MUTATIONS = [
    Mutation(
        "the norm counts the experts of one rank",
        f"{MEGATRON}#5916",
        EP,
        2,
        count_experts_of_one_rank,
    ),
    Mutation(
        "gradients of routers are not summed over tensor-parallel ranks",
        "pytorch/torchtitan#1878",
        f"{EXPERTS} {TP}",
        2,
        keep_gradients_of_routers,
    ),
    Mutation(
        "gradients of experts are divided by fewer ranks",
        "pytorch/pytorch#160285",
        EP,
        2,
        divide_by_ranks_with_the_expert,
    ),
    Mutation(
        "auxiliary losses are not divided by the number of microbatches",
        f"{MEGATRON}#5047",
        EP,
        2,
        leave_out_factor_of_losses,
    ),
    Mutation(
        "an overflow moves the bias of balancing",
        "docs/experts.md",
        f"{EP} {BIAS}",
        2,
        move_bias_after_an_overflow,
        caught_by="overflow",
    ),
    Mutation(
        "the choices of a step are counted again in the next one",
        "pytorch/torchtitan#4148",
        f"{EP} {BIAS}",
        2,
        keep_counts_of_the_step_before,
        caught_by="weights",
    ),
]
