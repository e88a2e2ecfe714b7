"""Known errors of parametrizations, by which rates and factors depend on the size."""

import dataclasses
from typing import Any

from verify.mutation import MEGATRON, NO_DROPOUT, PP, TP, Mutation, wrap

MUP = f"{NO_DROPOUT} --parametrization mup --base-width 16 --weight-decay 0.5"


def treat_tied_copy_as_matrix() -> None:
    from megatron.engine import native
    from megatron.model.parametrization import Scaling

    def make(compute: Any) -> Any:
        def compute_scaling(name: str, spec: Any, shape: Any, config: Any) -> Scaling:
            if spec.copy_of is not None:
                return Scaling(1 / shape.width_ratio, shape.width_ratio, 1 / shape.width_ratio)
            found: Scaling = compute(name, spec, shape, config)
            return found

        return compute_scaling

    wrap(native, "compute_scaling", make)


def scale_logits_twice() -> None:
    from megatron.model.gpt import GPT

    def make(enter: Any) -> Any:
        def enter_output(model: Any, normalised: Any) -> Any:
            return enter(model, normalised * model.shape.output_factor)

        return enter_output

    wrap(GPT, "_enter_output", make)


def keep_decay() -> None:
    from megatron.engine import native

    def make(compute: Any) -> Any:
        def compute_scaling(*args: Any) -> Any:
            return dataclasses.replace(compute(*args), decay=1.0)

        return compute_scaling

    wrap(native, "compute_scaling", make)


PARAMETRIZATION_MUTATIONS = [
    Mutation(
        "the embedding's copy on the last stage gets the rate of a matrix",
        f"{MEGATRON}#4641",
        f"{MUP} {PP}",
        2,
        treat_tied_copy_as_matrix,
        "weights",
    ),
    Mutation(
        "a factor of muP is applied twice",
        "EleutherAI/gpt-neox#1087",
        f"{MUP} {TP}",
        2,
        scale_logits_twice,
        "loss",
    ),
    Mutation(
        "weight decay does not rise as the rate of muP falls",
        "microsoft/mup#73",
        f"{MUP} --zero-stage 1",
        2,
        keep_decay,
        "weights",
    ),
]
