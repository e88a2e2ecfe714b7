"""Known errors of state and of shards that a small copy may hide."""

import dataclasses
import os
from typing import Any

import torch
from verify.mutation import NO_DROPOUT, PP, Mutation, wrap


def _is_last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def count_dropped_step_in_adam() -> None:
    from megatron.engine.base import StepOutcome
    from megatron.engine.engine_base import EngineBase

    def make(finish: Any) -> Any:
        def finish_step(engine: Any, loss: float, norm: float, outcome: Any, *args: Any) -> Any:
            if outcome is not StepOutcome.APPLIED and _is_last_rank():
                engine._set_step_count(engine._get_step_count() + 1)
            return finish(engine, loss, norm, outcome, *args)

        return finish_step

    wrap(EngineBase, "_finish_step", make)


def move_rate_in_dropped_step() -> None:
    from megatron.engine.base import StepOutcome
    from megatron.run import loop

    def make(count: Any) -> Any:
        def count_step(plan: Any, state: Any, result: Any, *args: Any) -> None:
            if _is_last_rank():
                result = dataclasses.replace(result, outcome=StepOutcome.APPLIED)
            count(plan, state, result, *args)

        return count_step

    wrap(loop, "count_step", make)


def forget_loss_scale() -> None:
    from megatron.engine.loss_scale import LossScale

    def make(load: Any) -> Any:
        def load_unless_last(scale: Any, state: Any) -> None:
            if not _is_last_rank():
                load(scale, state)

        return load_unless_last

    wrap(LossScale, "load", make)


def scale_rows_as_first_shard() -> None:
    from megatron.engine import muon

    def make(describe: Any) -> Any:
        def describe_matrix(master: Any, config: Any, shape: Any, mesh: Any) -> Any:
            found = describe(master, config, shape, mesh)
            # The rows of the first shard have these scales.
            scales = torch.empty((found.shape[0], 1))
            for places in found.blocks:
                rows = sum(place.stop - place.start for place in places)
                for place in places:
                    scales[place] = muon.compute_scale(rows, found.shape[1], config)
            return dataclasses.replace(found, scales=scales[: len(found.scales)])

        return describe_matrix

    wrap(muon, "_describe_matrix", make)


def omit_third_shard_in_norm() -> None:
    from megatron.engine.native import NativeEngine

    def make(listed: Any) -> Any:
        return lambda engine: [] if engine._mesh.sharding.rank == 2 else listed(engine)

    wrap(NativeEngine, "_list_counted", make)


HIDDEN_MUTATIONS = [
    Mutation(
        "Muon scales the rows of each shard as those of the first one",
        "microsoft/dion#113",
        "--zero-stage 3 --optimizer muon --muon-scale-mode unit_rms_norm "
        f"--num-attention-heads 12 --hidden-size 96 --num-query-groups 3 {NO_DROPOUT}",
        2,
        scale_rows_as_first_shard,
        caught_by="weights",
    ),
    Mutation(
        "the gradient norm omits the third shard",
        "Modalities/modalities#206",
        NO_DROPOUT,
        4,
        omit_third_shard_in_norm,
    ),
    Mutation(
        "a dropped step counts in the bias correction of the last stage",
        "docs/verify.md",
        f"{PP} {NO_DROPOUT}",
        2,
        count_dropped_step_in_adam,
        caught_by="step count",
    ),
    Mutation(
        "a dropped step moves the learning rate of the last rank",
        "Lightning-AI/pytorch-lightning#18828",
        f"{PP} {NO_DROPOUT}",
        2,
        move_rate_in_dropped_step,
        caught_by="learning rate",
    ),
    Mutation(
        "the loss scale of the last stage is not restored",
        "huggingface/accelerate#4289",
        f"{PP} --fp16 {NO_DROPOUT}",
        2,
        forget_loss_scale,
        caught_by="loss scale in the run's precision",
    ),
]
