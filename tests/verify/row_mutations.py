"""Wrong rows in the core's tables of parts. The reference takes only the names from the core."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from verify.mutation import NO_DROPOUT, TP, Mutation

OLMO = (
    f"{NO_DROPOUT} --normalization RMSNorm --qk-norm full --norm-placement output "
    "--position-embedding-type rotary --weight-decay 0.5"
)


def change_specs(specs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: replace(spec, **changes) for name, spec in specs.items()}


def change_norm(name: str, **changes: Any) -> Callable[[], None]:
    """Return a mutation that changes the specs of a norm's row."""

    def apply() -> None:
        from megatron.model.layer_parts import NORMS

        row: Any = NORMS.rows[name]
        changed = replace(
            row, list_parameters=lambda size: change_specs(row.list_parameters(size), **changes)
        )
        NORMS.rows[name] = changed  # type: ignore[index]

    return apply


def start_xielu_at_one() -> None:
    from megatron.model.layer_parts import ACTIVATIONS
    from megatron.parallel.parameter_spec import Init

    row: Any = ACTIVATIONS.rows["xielu"]
    changed = replace(row, parameters=change_specs(row.parameters, init=Init.ONE))
    ACTIVATIONS.rows["xielu"] = changed  # type: ignore[index]


ROW_MUTATIONS = [
    Mutation(
        "a row says that weight decay applies to a norm",
        "huggingface/transformers#35927",
        OLMO,
        1,
        change_norm("RMSNorm", decays=True),
        "weights",
    ),
    Mutation(
        "a row has another initial value for the weights of an activation",
        "none",
        f"{NO_DROPOUT} --activation xielu {TP}",
        2,
        start_xielu_at_one,
        "initial weights",
    ),
]
