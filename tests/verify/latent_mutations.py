"""Known errors of latent attention, as changes in one process. See `mutations.py`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from verify.mutation import MEGATRON, NO_DROPOUT, SP, TP, Mutation, wrap

LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --position-embedding-type rotary "
    "--rope-scaling yarn --rope-scaling-factor 40 --mscale-all-dim 1 --no-add-bias-linear "
    f"--normalization RMSNorm {NO_DROPOUT}"
)
CP = f"--context-parallel-size 2 {LATENT}"
NOT_REPORTED = "no public report"
FIRST = "forward pass, output of blocks.0.attention on rank 0"


def leave_shared_key_apart() -> None:
    from megatron.model import latent_attention

    wrap(latent_attention, "enter_tensor_parallel", lambda _: lambda x, tp: x)


def leave_down_projections_apart() -> None:
    from megatron.parallel import layers

    def make(_: Any) -> Any:
        return lambda spec, tp: layers.make_parameter(spec.shape, spec)

    # Norms import it under a name of their own.
    wrap(layers, "make_replicated_outside_region", make)


def change_norms(change: Callable[[Any], Any]) -> None:
    """Give the weights of the norms of latent vectors other specs."""
    from megatron.model import latent_attention

    def make(build: Any) -> Any:
        def build_with(*arguments: Any) -> Any:
            norm = build(*arguments)
            norm.weight.spec = change(norm.weight.spec)
            return norm

        return build_with

    wrap(latent_attention, "_build_latent_norm", make)


def leave_norms_apart() -> None:
    change_norms(lambda spec: dataclasses.replace(spec, partial_gradient=False))


def decay_norms() -> None:
    change_norms(lambda spec: dataclasses.replace(spec, decays=True))


def change_shared_key(change: Callable[[Any, Any, Any, Any], Any]) -> None:
    """Rotate the key of all heads in another way. `change` gets `rotate` and its arguments."""
    from megatron.model import latent_attention

    def make(rotate: Any) -> Any:
        def rotate_with(x: Any, cos: Any, sin: Any) -> Any:
            if x.shape[3] > 1:
                return rotate(x, cos, sin)
            return change(rotate, x, cos, sin)

        return rotate_with

    wrap(latent_attention, "rotate", make)


def rotate_late_part_as_early_part() -> None:
    def change(rotate: Any, x: Any, cos: Any, sin: Any) -> Any:
        half = len(cos) // 2
        return rotate(x, *(table[:half].repeat(2, 1, 1, 1, 1) for table in (cos, sin)))

    change_shared_key(change)


def exchange_values_of_other_heads() -> None:
    from megatron.model import attention_core

    def make(exchange: Any) -> Any:
        return lambda query, key, value, context: exchange(query, key, value.roll(1, 1), context)

    wrap(attention_core, "exchange_heads", make)


def divide_by_parts_of_heads() -> None:
    """A rank takes the rows of all keys before those of all values."""
    from megatron.model.latent_attention import LatentAttention

    def make(expand: Any) -> Any:
        def expand_parts(layer: Any, shared: Any, latent: Any) -> Any:
            import torch

            keys, values = layer.latent_up(latent).split(
                (layer.heads * layer.plain_dim, layer.heads * layer.value_dim), dim=2
            )
            keys, values = (each.unflatten(2, (layer.heads, -1)) for each in (keys, values))
            shared = shared.unsqueeze(2).expand(-1, -1, layer.heads, -1)
            both = torch.cat((shared, keys), dim=3), values
            return tuple(each.permute(1, 2, 0, 3) for each in both)

        return expand_parts

    wrap(LatentAttention, "_expand", make)


def count_down_projections_on_each_rank() -> None:
    from megatron.engine.native import NativeEngine

    def make(count: Any) -> Any:
        def count_more(engine: Any) -> Any:
            found = count(engine)
            names = {m.name for m in found}
            more = [m for m in engine._masters if m.name.endswith("latent_down.weight")]
            return [*found, *(m for m in more if m.name not in names and m.weight.numel())]

        return count_more

    wrap(NativeEngine, "_list_counted", make)


LATENT_MUTATIONS = [
    Mutation(
        "the gradient of the rotary key is that of a tensor rank's heads",
        f"{MEGATRON}#1699",
        f"{TP} {LATENT}",
        2,
        leave_shared_key_apart,
    ),
    Mutation(
        "gradients of projections to latent vectors cover a slice of the sequence",
        NOT_REPORTED,
        f"{SP} {LATENT}",
        2,
        leave_down_projections_apart,
    ),
    Mutation(
        "gradients of norms of latent vectors cover a slice of the sequence",
        NOT_REPORTED,
        f"{SP} {LATENT}",
        2,
        leave_norms_apart,
    ),
    Mutation(
        "the rotary key has the positions of the early part",
        NOT_REPORTED,
        CP,
        2,
        rotate_late_part_as_early_part,
        caught_by="loss",
        first=FIRST,
    ),
    Mutation(
        "ranks of a sequence exchange values of other heads",
        NOT_REPORTED,
        f"--cp-comm-type a2a {CP}",
        2,
        exchange_values_of_other_heads,
        caught_by="loss",
        first=FIRST,
    ),
    Mutation(
        "rows of keys come before those of values on a tensor rank",
        NOT_REPORTED,
        f"{TP} {LATENT}",
        2,
        divide_by_parts_of_heads,
        caught_by="loss",
        first=FIRST,
    ),
    Mutation(
        "weight decay applies to norms of latent vectors",
        NOT_REPORTED,
        f"--weight-decay 0.5 {LATENT}",
        2,
        decay_norms,
        caught_by="weights",
    ),
    Mutation(
        "the gradient norm has projections to latent vectors of each tensor rank",
        NOT_REPORTED,
        f"{TP} {LATENT}",
        2,
        count_down_projections_on_each_rank,
    ),
]
