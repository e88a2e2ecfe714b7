"""Known errors of products in float8. See `mutations.py`."""

import os
from typing import Any

from verify.mutation import Mutation, wrap

OPERANDS = "scales and values of float8"


def take_scales_from_own_shard() -> None:
    from megatron.extras.step.float8.weight_scales import WeightMaxima

    def make(initialise: Any) -> Any:
        def initialise_alone(maxima: Any, *args: Any, **kwargs: Any) -> None:
            initialise(maxima, *args, **kwargs | {"group": None})

        return initialise_alone

    wrap(WeightMaxima, "__init__", make)


def take_scales_from_own_part() -> None:
    from megatron.extras.step.float8 import products

    wrap(products, "all_reduce", lambda _: lambda largest, group, *operation: None)


def keep_scales_of_first_step() -> None:
    from megatron.extras.step.float8.weight_scales import WeightMaxima

    def make(refresh: Any) -> Any:
        def refresh_once(maxima: Any) -> None:
            if not maxima._values.any():
                refresh(maxima)

        return refresh_once

    wrap(WeightMaxima, "refresh", make)


def halve_gradients_of_weights() -> None:
    from megatron.extras.step.float8.products import _Gradients

    def make(multiply: Any) -> Any:
        def multiply_input(gradients: Any, number: int, x: Any) -> Any:
            # An error that one process does not have.
            return multiply(gradients, number, x) / int(os.environ["WORLD_SIZE"])

        return multiply_input

    wrap(_Gradients, "multiply_input", make)


TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
FLOAT8_MUTATIONS = [
    Mutation(
        "the scales of activations are those of the rank's own channels",
        "NVIDIA/TransformerEngine#74",
        f"{TENSORWISE} --tensor-model-parallel-size 2",
        2,
        take_scales_from_own_part,
        caught_by=OPERANDS,
    ),
    Mutation(
        "the scales of rows are those of the rank's own channels",
        "NVIDIA/TransformerEngine#74",
        "--bf16 --fp8-format e4m3 --fp8-recipe rowwise --tensor-model-parallel-size 2",
        2,
        take_scales_from_own_part,
        caught_by=OPERANDS,
    ),
    Mutation(
        "the scales of weights stay those of the first step",
        "NVIDIA/TransformerEngine#567",
        TENSORWISE,
        2,
        keep_scales_of_first_step,
        caught_by=OPERANDS,
    ),
    Mutation(
        "gradients of float8 weights are divided by the number of ranks",
        "meta-pytorch/torchtune#2687",
        f"{TENSORWISE} --tensor-model-parallel-size 2",
        2,
        halve_gradients_of_weights,
        caught_by="gradient norm in the run's precision",
    ),
    Mutation(
        "the scales of a weight are those of the rank's own shard",
        "pytorch/torchtitan#3109",
        "--bf16 --zero-stage 3 --fp8-format e4m3 --fp8-recipe rowwise",
        2,
        take_scales_from_own_shard,
        caught_by=OPERANDS,
    ),
]
