"""Known errors of state that a dropped step changes, or that only fp16 has. See `mutations.py`."""

import dataclasses
import os
from typing import Any

from verify.mutation import NO_DROPOUT, PP, Mutation, wrap


def _is_last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def count_dropped_step_in_adam() -> None:
    from megatron.engine.engine_base import EngineBase

    def make(finish: Any) -> Any:
        def finish_step(engine: Any, *args: Any, applied: bool, **further: Any) -> Any:
            if not applied and _is_last_rank():
                engine._set_step_count(engine._get_step_count() + 1)
            return finish(engine, *args, applied=applied, **further)

        return finish_step

    wrap(EngineBase, "_finish_step", make)


def move_rate_in_dropped_step() -> None:
    from megatron.run import loop

    def make(count: Any) -> Any:
        def count_step(plan: Any, state: Any, result: Any, *args: Any) -> None:
            applied = result.applied or _is_last_rank()
            count(plan, state, dataclasses.replace(result, applied=applied), *args)

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


DROPPED_STEP_MUTATIONS = [
    Mutation(
        "a dropped step counts in the bias correction of the last stage",
        "allenai/OLMo-core#309",
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
