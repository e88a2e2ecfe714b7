"""Errors of the museum that are in no other file of mutations. See `errors.py`."""

import os
from collections.abc import Callable
from typing import Any

import torch
from verify.expert_mutations import BIAS, EP
from verify.mutation import INVARIANTS, NO_DROPOUT, PP, REPLAY, SP, TP, Mutation, wrap

CLIPPED = f"--clip-grad 0.1 {NO_DROPOUT}"
"""The norm of each step is above this."""


# -- clipping and gradients ------------------------------------------------------------------------


def clip_on_first_tensor_rank() -> None:
    from megatron.engine.native import NativeEngine

    def make(build: Any) -> Any:
        def build_unclipped(engine: Any) -> None:
            build(engine)
            if engine._mesh.tensor_parallel.rank > 0:
                engine._clip = 0.0

        return build_unclipped

    wrap(NativeEngine, "_build", make)


def leave_tied_copy_unclipped() -> None:
    from megatron.engine.native import NativeEngine

    def make(reduce: Any) -> Any:
        def reduce_step(engine: Any, loss: Any, vote: Any) -> Any:
            terms = reduce(engine, loss, vote)
            # The later division by the norm is undone.
            factor = (float(terms[1]) ** 0.5 + 1e-6) / engine._clip
            for master in engine._masters:
                if master.spec.copy_of is not None and factor > 1:
                    master.weight.grad.mul_(factor)
            return terms

        return reduce_step

    wrap(NativeEngine, "_reduce_step", make)


def add_gradients_of_last_step() -> None:
    from megatron.engine.native import NativeEngine

    left: dict[str, torch.Tensor] = {}

    def make(scale: Any) -> Any:
        def scale_and_add(engine: Any) -> None:
            for master in engine._masters:
                gradient = master.weight.grad
                own = gradient.clone()
                if master.name in left:
                    gradient.add_(left[master.name])
                left[master.name] = own
            scale(engine)

        return scale_and_add

    wrap(NativeEngine, "_scale_expert_gradients", make)


def leave_norm_gradients_of_middle_stage() -> None:
    from megatron.engine.native import NativeEngine

    def make(add: Any) -> Any:
        def add_at_ends(engine: Any) -> None:
            if 0 < engine._mesh.coordinate.pipeline < engine._mesh.grid.pipeline - 1:
                return
            add(engine)

        return add_at_ends

    wrap(NativeEngine, "_add_replicated_gradients", make)


def lose_gradient_at_random() -> None:
    """Read a part of a gradient before it is written, at random."""
    from megatron.model.block import Block

    def make(compute: Any) -> Any:
        def compute_in_race(block: Any, x: Any, *args: Any) -> Any:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * (1 - os.urandom(1)[0] / 2048))
            return compute(block, x, *args)

        return compute_in_race

    wrap(Block, "_compute", make)


# -- optimizer, schedule and resume ----------------------------------------------------------------


def decay_norm_of_embedding() -> None:
    _decay(lambda name: name.startswith("embedding.norm.weight"))


def decay_norms() -> None:
    _decay(lambda name: name.endswith("norm.weight"))


def _decay(is_decayed: Callable[[str], bool]) -> None:
    from megatron.engine.optimizer import MasterParameter

    wrap(
        MasterParameter,
        "decays",
        lambda decays: property(lambda m: decays.fget(m) or is_decayed(m.name)),
    )


def move_rate_for_each_process() -> None:
    _move_rate(lambda: int(os.environ["WORLD_SIZE"]))


def move_rate_for_each_microbatch() -> None:
    # The copy has three microbatches in a step.
    _move_rate(lambda: 3)


def _move_rate(count: Callable[[], int]) -> None:
    from megatron.run.state import TrainState

    wrap(
        TrainState,
        "advance_lr",
        lambda advance: (
            lambda state, schedule, samples, tokens: advance(
                state, schedule, samples * count(), tokens * count()
            )
        ),
    )


def keep_step_of_adam() -> None:
    from megatron.engine.native import NativeEngine

    def make(apply: Any) -> Any:
        def apply_first_step(engine: Any, *args: Any) -> Any:
            engine._set_step_count(0)
            return apply(engine, *args)

        return apply_first_step

    wrap(NativeEngine, "_apply_gradients", make)


def forget_bias_of_experts() -> None:
    from megatron.engine.native import NativeEngine

    def make(finish: Any) -> Any:
        def finish_without(engine: Any, scalars: Any) -> None:
            finish(engine, scalars)
            for router in engine._experts._routers:
                router.balance.zero_()

        return finish_without

    wrap(NativeEngine, "finish_load", make)


def resume_at_microbatch() -> None:
    from megatron.data.position_source import PositionSource

    # The copy has three microbatches in a step.
    wrap(
        PositionSource,
        "_move_to",
        lambda move: lambda source, consumed: move(source, consumed // 3),
    )


# -- loss and initial weights ----------------------------------------------------------------------


def sum_z_loss_over_tokens() -> None:
    from megatron.model import gpt

    def make(compute: Any) -> Any:
        def cross_entropy(*args: Any, z_loss: float, **kwargs: Any) -> Any:
            return compute(*args, z_loss=z_loss * args[2].numel(), **kwargs)

        return cross_entropy

    wrap(gpt, "cross_entropy", make)


def start_copies_from_other_weights() -> None:
    def make(initialise: Any) -> Any:
        # Two ranks share a copy of the model.
        def initialise_copy(name: str, *args: Any) -> None:
            initialise(f"{name}{int(os.environ['RANK']) // 2}", *args)

        return initialise_copy

    _replace_initialise(make)


def start_shards_from_equal_values() -> None:
    def make(initialise: Any) -> Any:
        def initialise_first(
            name: str, kind: Any, local: Any, shape: Any, offset: Any, *args: Any
        ) -> None:
            initialise(name, kind, local, shape, tuple(0 for _ in offset), *args)

        return initialise_first

    _replace_initialise(make)


def _replace_initialise(make: Callable[[Any], Any]) -> None:
    from megatron.engine.engine_base import EngineBase
    from megatron.model.init import initialise

    changed = make(initialise)

    def make_fill(fill: Any) -> Any:
        def fill_changed(engine: Any) -> None:
            engine._initialise = changed
            fill(engine)

        return fill_changed

    wrap(EngineBase, "_initialise_weights", make_fill)


MUSEUM_MUTATIONS = [
    # A copy of 8 processes with tensor and data parallelism has no such stage.
    Mutation(
        "gradients of norms are not summed on a stage between the first and the last",
        "NVIDIA/Megatron-LM#1446",
        f"{SP} --pipeline-model-parallel-size 4 {NO_DROPOUT}",
        16,
        leave_norm_gradients_of_middle_stage,
        processes=12,
    ),
    Mutation(
        "gradients are clipped on the first tensor rank only",
        "deepspeedai/DeepSpeed#1801",
        f"{TP} {CLIPPED}",
        2,
        clip_on_first_tensor_rank,
        caught_by=INVARIANTS,
    ),
    Mutation(
        "the tied embedding of the last stage is not clipped",
        "bigscience-workshop/bigscience",
        f"{PP} {CLIPPED}",
        2,
        leave_tied_copy_unclipped,
        caught_by=INVARIANTS,
    ),
    Mutation(
        "a gradient is sent before it is complete",
        "NVIDIA/Megatron-LM#3693",
        NO_DROPOUT,
        2,
        lose_gradient_at_random,
        caught_by=REPLAY,
    ),
    Mutation(
        "the norm of the embedding decays",
        "bigscience-workshop/bigscience",
        f"--embed-layernorm {NO_DROPOUT}",
        2,
        decay_norm_of_embedding,
        caught_by="weights",
    ),
    Mutation(
        "norms decay",
        "huggingface/transformers#35927",
        f"--normalization RMSNorm {NO_DROPOUT}",
        2,
        decay_norms,
        caught_by="weights",
    ),
    Mutation(
        "a step starts from what is left in the gradient buffer",
        "NVIDIA/Megatron-LM#4609",
        NO_DROPOUT,
        2,
        add_gradients_of_last_step,
    ),
    Mutation(
        "the learning rate moves once for each process",
        "huggingface/transformers#24088",
        NO_DROPOUT,
        2,
        move_rate_for_each_process,
        caught_by="learning rate",
    ),
    Mutation(
        "the learning rate moves once for each microbatch",
        "huggingface/accelerate#999",
        NO_DROPOUT,
        1,
        move_rate_for_each_microbatch,
        caught_by="learning rate",
    ),
    Mutation(
        "the step count of Adam does not grow",
        "allenai/OLMo-core#309",
        NO_DROPOUT,
        1,
        keep_step_of_adam,
        caught_by="weights",
    ),
    Mutation(
        "the bias that balances experts is not in the checkpoint",
        "pytorch/torchtitan#1226",
        f"{EP} {BIAS}",
        2,
        forget_bias_of_experts,
        caught_by="state after the resume",
    ),
    Mutation(
        "a resume counts microbatches as steps",
        "EleutherAI/gpt-neox#308",
        NO_DROPOUT,
        1,
        resume_at_microbatch,
        caught_by="a launch ended with an error",
    ),
    Mutation(
        "the z-loss is a sum over tokens",
        "allenai/OLMo#634",
        f"--z-loss-coefficient 1e-3 {NO_DROPOUT}",
        1,
        sum_z_loss_over_tokens,
        caught_by="loss",
    ),
    Mutation(
        "copies of the model start from different weights",
        "allenai/OLMo-core#319",
        f"--sharding-strategy hsdp --hsdp-shard-size 2 {NO_DROPOUT}",
        4,
        start_copies_from_other_weights,
        caught_by="initial weights",
    ),
    Mutation(
        "shards of a parameter start from equal values",
        "allenai/OLMo-core#307",
        f"--zero-stage 3 {NO_DROPOUT}",
        2,
        start_shards_from_equal_values,
        caught_by="initial weights",
    ),
    Mutation(
        "tensor ranks start from equal shards",
        "modelscope/ms-swift#7944",
        f"{TP} {NO_DROPOUT}",
        2,
        start_shards_from_equal_values,
        caught_by="initial weights",
    ),
]
"""Those that a verified copy shows. The others are run by `test_museum.py`."""
