"""Known errors of mixtures of experts, as changes of this package in one process."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
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
    from megatron.parallel.layers import make_parameter

    def make_local(spec: Any, tp: Any) -> Any:
        return make_parameter(spec.shape, spec)

    wrap(routing, "make_replicated_inside_region", lambda _: make_local)


def divide_by_ranks_with_the_expert() -> None:
    from megatron.engine.native import NativeEngine

    wrap(NativeEngine, "_scale_expert_gradients", lambda _: lambda engine: None)


def leave_out_factor_of_losses() -> None:
    from megatron.model.experts import layer

    wrap(layer, "add_loss", lambda add: lambda x, loss, factor: add(x, loss, 1.0))


def move_bias_after_an_overflow() -> None:
    from megatron.engine.native import ExpertState

    def make(end: Any) -> Any:
        return lambda state, microbatches, *, applied: end(state, microbatches, applied=True)

    wrap(ExpertState, "end_step", make)


def keep_counts_of_the_step_before() -> None:
    from megatron.engine.native import ExpertState

    wrap(ExpertState, "begin_step", lambda _: lambda state: None)


def change_sharding_of_experts(change: Callable[[Any], None]) -> None:
    """Change the FSDP2 modules of experts after they were built."""
    from megatron.engine.sharding import ShardedModel
    from megatron.model.experts.layer import Experts

    def make(create: Any) -> Any:
        def create_and_change(model: Any, *args: Any, **kwargs: Any) -> None:
            create(model, *args, **kwargs)
            for module in model._sharded:
                if isinstance(module, Experts):
                    change(module)

        return create_and_change

    wrap(ShardedModel, "__init__", make)


def keep_own_gradients_of_experts() -> None:
    from megatron.engine import sharding

    class KeepOwn(sharding._TimedReduceScatter):
        def __call__(self, **given: Any) -> None:  # type: ignore[override]
            parts = given["input_tensor"].chunk(given["group"].size())
            given["output_tensor"].copy_(parts[given["group"].rank()])

    change_sharding_of_experts(
        lambda module: module.set_custom_reduce_scatter(
            KeepOwn(contextlib.nullcontext, torch.float32)
        )
    )


def add_up_shards_of_experts() -> None:
    from megatron.engine import sharding

    class AddUp(sharding._TimedReduceScatter):
        def __call__(self, **given: Any) -> Any:  # type: ignore[override]
            given["input_tensor"].mul_(given["group"].size())
            return super().__call__(**given)

    timer = contextlib.nullcontext
    change_sharding_of_experts(
        lambda module: module.set_custom_reduce_scatter(AddUp(timer, torch.float32))
    )


def forget_tensor_ranks() -> None:
    from megatron.engine.native import NativeEngine

    def scale(engine: Any) -> None:
        for master in engine._masters:
            if master.spec.by_expert and master.weight.grad.numel():
                master.weight.grad.div_(engine._mesh.expert_parallel.size)

    wrap(NativeEngine, "_scale_expert_gradients", lambda _: scale)


def divide_by_context_ranks_again() -> None:
    from megatron.engine.native import NativeEngine

    def make(scale: Any) -> Any:
        def scale_twice(engine: Any) -> None:
            scale(engine)
            for master in engine._masters:
                if master.spec.by_expert and master.weight.grad.numel():
                    master.weight.grad.div_(engine._mesh.grid.context)

        return scale_twice

    wrap(NativeEngine, "_scale_expert_gradients", make)


def add_over_tensor_ranks_too() -> None:
    from megatron.engine import native

    def make(scale: Any) -> Any:
        def scale_and_add(engine: Any) -> None:
            scale(engine)
            group = engine._mesh.tensor_parallel.group
            for master in engine._masters:
                if master.spec.by_expert and group is not None:
                    torch.distributed.all_reduce(master.weight.grad, group=group)

        return scale_and_add

    wrap(native.NativeEngine, "_scale_expert_gradients", make)


def leave_out_copies_of_experts() -> None:
    change_sharding_of_experts(lambda module: module.set_all_reduce_hook(lambda reduced: None))


def change_reduction_of_copies(change: Callable[[Any, Any, Any], None]) -> None:
    """Change how `_CopyReduction` averages the gradients of experts."""
    from megatron.engine import sharding

    class Changed(sharding._CopyReduction):
        def __call__(self, reduced: Any) -> None:
            change(self, reduced, super().__call__)

    def replace_hook(module: Any) -> None:
        state = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            group._all_reduce_hook.__class__ = Changed

    change_sharding_of_experts(replace_hook)


def add_up_copies_of_experts() -> None:
    def change(hook: Any, reduced: Any, reduce: Any) -> None:
        reduce(reduced)
        if hook.last:
            reduced.mul_(hook._group.size())

    change_reduction_of_copies(change)


def forget_earlier_microbatches() -> None:
    def change(hook: Any, reduced: Any, reduce: Any) -> None:
        # The copies average the last microbatch only. The others stay those of one copy.
        if hook.last:
            hook._earlier = None
        reduce(reduced)

    change_reduction_of_copies(change)


def regroup_copies_of_experts(find_members: Callable[[Any, int], list[list[int]]]) -> None:
    """Average experts over other ranks, which `find_members` lists for a grid and a shard size."""
    from megatron.parallel import mesh

    def make(build: Any) -> Any:
        def build_other(grid: Any, rank: int, device: str, shard: int, *args: Any) -> Any:
            experts = build(grid, rank, device, shard, *args)
            replicas = mesh._own_group(find_members(grid, shard), rank, args[-1])
            sharding = replace(experts.sharding, replicas=replicas)
            return replace(experts, sharding=sharding)

        return build_other

    wrap(mesh, "_build_expert_parallel", make)


def average_over_copies_of_the_model() -> None:
    def find(grid: Any, shard: int) -> list[list[int]]:
        ranks = torch.arange(grid.world_size).view(grid.pipeline, -1, shard, grid.tensor)
        return ranks.movedim(1, -1).flatten(0, -2).tolist()

    regroup_copies_of_experts(find)


def average_over_data_ranks_only() -> None:
    def find(grid: Any, _shard: int) -> list[list[int]]:
        ranks = torch.arange(grid.world_size).view(-1, grid.data, grid.context * grid.tensor)
        return ranks.movedim(1, -1).flatten(0, -2).tolist()

    regroup_copies_of_experts(find)


FOUR = f"{EXPERTS} --expert-model-parallel-size 4"
OVER_TENSOR = f"{FOUR} {TP}"
OVER_SEQUENCES = f"{FOUR} --context-parallel-size 2"
SHARDED_COPIES = f"{EP} --sharding-strategy hsdp --hsdp-shard-size 4 --micro-batch-size 1"
OVER_COPIES = f"{FOUR} --sharding-strategy hsdp --hsdp-shard-size 2 --micro-batch-size 1"
COPIED_SEQUENCES = f"{EP} --context-parallel-size 4 --sharding-strategy ddp"
REDUCTIONS = "reductions of experts"
"""The source of errors that were thought out for the ranks that have the same experts."""

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
    Mutation(
        "shards of experts keep the gradient of their rank",
        REDUCTIONS,
        OVER_TENSOR,
        8,
        keep_own_gradients_of_experts,
    ),
    Mutation(
        "shards of experts are added up and not averaged",
        REDUCTIONS,
        OVER_TENSOR,
        8,
        add_up_shards_of_experts,
    ),
    Mutation(
        "gradients of experts are divided by tensor-parallel ranks too",
        REDUCTIONS,
        OVER_TENSOR,
        8,
        forget_tensor_ranks,
    ),
    Mutation(
        "gradients of experts are added over tensor-parallel ranks too",
        REDUCTIONS,
        OVER_TENSOR,
        8,
        add_over_tensor_ranks_too,
    ),
    Mutation(
        "copies of experts are not averaged",
        REDUCTIONS,
        SHARDED_COPIES,
        8,
        leave_out_copies_of_experts,
    ),
    Mutation(
        "copies of experts are added up and not averaged",
        REDUCTIONS,
        SHARDED_COPIES,
        8,
        add_up_copies_of_experts,
    ),
    Mutation(
        "copies of experts average the last microbatch only",
        REDUCTIONS,
        SHARDED_COPIES,
        8,
        forget_earlier_microbatches,
    ),
    Mutation(
        "experts are averaged over copies of the model",
        REDUCTIONS,
        OVER_COPIES,
        16,
        average_over_copies_of_the_model,
    ),
    Mutation(
        "shards of experts over sequences keep the gradient of their rank",
        REDUCTIONS,
        OVER_SEQUENCES,
        8,
        keep_own_gradients_of_experts,
    ),
    Mutation(
        "gradients of experts are divided by the ranks of a sequence twice",
        REDUCTIONS,
        OVER_SEQUENCES,
        8,
        divide_by_context_ranks_again,
    ),
    Mutation(
        "experts are averaged over data-parallel ranks only",
        REDUCTIONS,
        COPIED_SEQUENCES,
        8,
        average_over_data_ranks_only,
    ),
]
