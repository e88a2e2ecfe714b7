"""Known errors of products in float8. See `mutations.py`."""

from typing import Any

from verify.mutation import Mutation, wrap


def take_scales_from_own_shard() -> None:
    from megatron.extras.float8.weight_scales import WeightMaxima

    def make(initialise: Any) -> Any:
        def initialise_alone(maxima: Any, *args: Any, **kwargs: Any) -> None:
            initialise(maxima, *args, **kwargs | {"group": None})

        return initialise_alone

    wrap(WeightMaxima, "__init__", make)


FLOAT8_MUTATIONS = [
    Mutation(
        "the scales of a weight are those of the rank's own shard",
        "pytorch/torchtitan#3109",
        "--bf16 --zero-stage 3 --fp8-format e4m3 --fp8-recipe rowwise",
        2,
        take_scales_from_own_shard,
        caught_by="loss in the run's precision",
    ),
]
