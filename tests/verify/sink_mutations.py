"""Known errors of attention sinks, as changes in one process. See `mutations.py`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from verify.mutation import MEGATRON, NO_DROPOUT, TP, Mutation, wrap

# Larger weights, so that the sinks change the numbers by far more than rounding.
SINKS = f"--softmax-type learnable --init-method-std 0.3 {NO_DROPOUT}"
NOT_REPORTED = "no public report"
CP = f"--context-parallel-size 2 {SINKS}"


def change_sink(weighting: Any, change: Callable[[Any], Any]) -> Any:
    """Return a weighting with other sinks."""
    return dataclasses.replace(weighting, head_values=change(weighting.head_values))


def drop_sinks_of_shared_sequences() -> None:
    from megatron.model import attention

    def make(attend: Any) -> Any:
        def attend_without(query: Any, key: Any, value: Any, weighting: Any, *others: Any) -> Any:
            # A gradient that is missing would end the step.
            without = change_sink(weighting, lambda sink: 0 * sink - 30)
            return attend(query, key, value, without, *others)

        return attend_without

    wrap(attention, "attend_in_context", make)


def use_sinks_of_first_heads() -> None:
    from megatron.model.attention_core import Weighting

    def make(take: Any) -> Any:
        def take_first(weighting: Any, rank: int, heads: int) -> Any:
            return change_sink(
                take(weighting, rank, heads), lambda _: weighting.head_values[:heads]
            )

        return take_first

    wrap(Weighting, "take_heads", make)


def count_sinks_of_first_rank() -> None:
    from megatron.engine.native import NativeEngine

    def make(count: Any) -> Any:
        def count_others(engine: Any) -> Any:
            first = engine._mesh.tensor_parallel.rank == 0
            return [m for m in count(engine) if first or not m.name.endswith(".sink")]

        return count_others

    wrap(NativeEngine, "_list_counted", make)


def add_gradients_for_each_part_of_a_sequence() -> None:
    from megatron.model import attention

    def make(attend: Any) -> Any:
        def attend_twice(query: Any, key: Any, value: Any, weighting: Any, *others: Any) -> Any:
            scaled = change_sink(weighting, lambda sink: 2 * sink - sink.detach())
            return attend(query, key, value, scaled, *others)

        return attend_twice

    wrap(attention, "attend_in_context", make)


def lose_gradient_in_recomputation() -> None:
    from megatron.model.attention import SelfAttention

    def make(get: Any) -> Any:
        def get_detached(attention: Any, query: Any) -> Any:
            sink = get(attention, query)
            return sink.detach() + 0 * sink if attention.recompute_core else sink

        return get_detached

    wrap(SelfAttention, "_get_head_values", make)


def add_sink_gradients_of_tensor_ranks() -> None:
    from megatron.model.layer_parts import SoftmaxRow

    def make(list_all: Any) -> Any:
        def list_partial(row: Any, heads: int) -> Any:
            return {
                name: dataclasses.replace(spec, partial_gradient=True)
                for name, spec in list_all(row, heads).items()
            }

        return list_partial

    wrap(SoftmaxRow, "list_parameters", make)


def decay_sinks() -> None:
    from megatron.engine.optimizer import MasterParameter

    def make(decays: Any) -> Any:
        return property(lambda m: decays.fget(m) or m.name.endswith(".sink"))

    wrap(MasterParameter, "decays", make)


SINK_MUTATIONS = [
    Mutation(
        "context parallelism drops the sinks",
        "NVIDIA/TransformerEngine#3551",
        CP,
        2,
        drop_sinks_of_shared_sequences,
        caught_by="loss",
        first="forward pass, output of blocks.0.attention on rank 0",
    ),
    Mutation(
        "ranks that exchange heads take the sinks of the first heads",
        NOT_REPORTED,
        f"{CP} --cp-comm-type a2a",
        2,
        use_sinks_of_first_heads,
        caught_by="loss",
        first="forward pass, output of blocks.0.attention on rank 0",
    ),
    Mutation(
        "the gradient norm has the sinks of the first tensor rank only",
        f"{MEGATRON}#7452",
        f"{TP} {SINKS}",
        2,
        count_sinks_of_first_rank,
        caught_by="parts of the norm",
    ),
    Mutation(
        "the gradient of sinks is added once for each part of a query",
        NOT_REPORTED,
        CP,
        2,
        add_gradients_for_each_part_of_a_sequence,
    ),
    Mutation(
        "sinks get no gradient where attention is recomputed",
        NOT_REPORTED,
        f"--recompute-attention-core {SINKS}",
        2,
        lose_gradient_in_recomputation,
        caught_by="gradients",
    ),
    Mutation(
        "gradients of sinks are summed over tensor ranks with other heads",
        NOT_REPORTED,
        f"{TP} {SINKS}",
        2,
        add_sink_gradients_of_tensor_ranks,
        caught_by="gradients",
    ),
    Mutation(
        "sinks decay",
        NOT_REPORTED,
        f"--weight-decay 0.5 {SINKS}",
        2,
        decay_sinks,
        caught_by="weights",
    ),
]
