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


def change_attention(name: str, change: Callable[..., Any]) -> Callable[[], None]:
    """Return a mutation that changes a spec of the attention's row, from it and the rank."""

    def apply() -> None:
        from megatron.model.layer_parts import ATTENTIONS

        row: Any = ATTENTIONS.rows["dot_product"]

        def list_parameters(shape: Any, tensor_size: int, rank: int) -> dict[str, Any]:
            specs: dict[str, Any] = row.list_parameters(shape, tensor_size, rank)
            if name in specs and tensor_size > 1:
                specs[name] = change(specs[name], rank)
            return specs

        changed = replace(row, list_parameters=list_parameters)
        ATTENTIONS.rows["dot_product"] = changed  # type: ignore[index]

    return apply


def take_rows_of_first_rank(spec: Any, rank: int) -> Any:
    return replace(spec, pieces=tuple(replace(piece, start=0) for piece in spec.pieces))


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
    Mutation(
        "a row gives all ranks the same rows of a matrix",
        "none",
        f"{NO_DROPOUT} --num-query-groups 1 {TP}",
        2,
        change_attention("qkv.weight", take_rows_of_first_rank),
        "loss",
    ),
    Mutation(
        "a row says that a rank has all of a matrix's rows and some of its columns",
        "none",
        f"{NO_DROPOUT} --num-query-groups 4 {TP}",
        2,
        change_attention("qkv.weight", lambda spec, rank: replace(spec, shard_dim=1)),
        # The product does not fit its input, so no step is compared.
        "a launch ended with an error",
    ),
]
