"""Known errors of parametrizations, by which rates and factors depend on the size."""

import dataclasses
from typing import Any, cast

from verify.mutation import MEGATRON, NO_DROPOUT, PP, TP, Mutation, wrap

MUP = f"{NO_DROPOUT} --parametrization mup --base-width 16 --weight-decay 0.5"


def treat_tied_copy_as_matrix() -> None:
    from megatron.engine import native
    from megatron.engine.optimizer import Scaling

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


def divide_by_root_in_row() -> None:
    from megatron.config.optimizer import OPTIMIZERS

    row = dataclasses.replace(
        OPTIMIZERS.require("adam"), divide_rate=lambda width, config: width**0.5
    )
    cast(dict[str, Any], OPTIMIZERS.rows)["adam"] = row


def leave_projection_to_adamw_in_row() -> None:
    from megatron.config.optimizer import OptimizerRow

    def make(updates: Any) -> Any:
        return lambda row, name, dims: (
            updates(row, name, dims)
            and (not row.layer_matrices_only or "attention.qkv" not in name)
        )

    wrap(OptimizerRow, "updates", make)


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
    Mutation(
        "the row of AdamW divides rates and multiplies weight decay by the root of the width",
        "megatron/config/optimizer.py",
        MUP,
        1,
        divide_by_root_in_row,
        "weights",
    ),
    Mutation(
        "the row of Muon leaves the projection to queries, keys and values to AdamW",
        "megatron/config/optimizer.py",
        f"{NO_DROPOUT} --optimizer muon",
        1,
        leave_projection_to_adamw_in_row,
        "moments",
    ),
]
