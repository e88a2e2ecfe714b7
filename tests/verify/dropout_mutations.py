"""Known errors of dropout: masks of another element, or of another pass."""

import dataclasses
from typing import Any

from verify.mutation import MEGATRON, PP, SP, TP, Mutation, wrap

HIDDEN = "--attention-dropout 0"
WEIGHTS = "--hidden-dropout 0"
CP = "--context-parallel-size 2"
EMBEDDING = "forward pass, output of embedding on rank 0"
ATTENTION = "forward pass, output of blocks.0.attention on rank 0"


def _change_key(column: int, change: Any) -> None:
    """Change a number of the key of each microbatch."""
    from megatron.engine import engine_base

    def make(build: Any) -> Any:
        def build_inputs(*args: Any, **kwargs: Any) -> Any:
            inputs = build(*args, **kwargs)
            for number, each in enumerate(inputs):
                each.dropout_key[column] = change(int(each.dropout_key[column]), number)
            return inputs

        return build_inputs

    wrap(engine_base, "build_inputs", make)


def leave_out_iteration() -> None:
    _change_key(1, lambda iteration, number: 1)


def count_microbatches_for_samples() -> None:
    _change_key(2, lambda sample, number: number)


def draw_masks_of_next_microbatch() -> None:
    _change_key(2, lambda sample, number: sample + 4)


def _change_build(change: Any) -> None:
    """Change the arguments (p, site, width) of each dropout, and the ranks after them."""
    from megatron.model.dropout import Dropout

    def make(build: Any) -> Any:
        return lambda dropout, *args: build(dropout, *change(*args))

    wrap(Dropout, "__init__", make)


def repeat_site() -> None:
    _change_build(lambda p, site, *rest: (p, site - 1 if site and site % 3 == 0 else site, *rest))


def count_sites_of_stage() -> None:
    _change_build(lambda p, site, *rest: (p, (site - 1) % 6 + 1 if site else 0, *rest))


def give_all_tensor_ranks_the_first_rows() -> None:
    def change(p: float, site: int, width: int, tp: Any, context: Any) -> tuple[Any, ...]:
        return p, site, width, dataclasses.replace(tp, rank=0), context

    _change_build(change)


def use_width_of_own_row() -> None:
    from megatron.model.dropout import WeightDropout

    def make(call: Any) -> Any:
        def drop(weights: Any, x: Any, query: int) -> Any:
            # The width of a row is the length of the sample, which a curriculum changes.
            weights.dropout.width = x.shape[3]
            return call(weights, x, query)

        return drop

    wrap(WeightDropout, "__call__", make)


def start_masks_at_each_document() -> None:
    from megatron.model import attention_core

    def make(change: Any) -> Any:
        return lambda drop, **values: change(drop, **{**values, "query": 0, "key": 0})

    wrap(attention_core, "replace", make)


def take_late_part_for_early() -> None:
    from megatron.model import dropout

    def make(locate: Any) -> Any:
        def locate_first(*args: Any) -> Any:
            first, _, length = locate(*args)
            return first, length, length

        return locate_first

    wrap(dropout, "locate_rows", make)


def give_all_context_ranks_the_first_heads() -> None:
    from megatron.model import attention_core

    def make(change: Any) -> Any:
        def keep_head(drop: Any, /, **values: Any) -> Any:
            values.pop("head", None)
            return change(drop, **values)

        return keep_head

    wrap(attention_core, "replace", make)


def draw_other_masks_in_recomputation() -> None:
    from megatron.model.block import Block

    seen = set()

    def make(compute: Any) -> Any:
        def compute_with_new_masks(block: Any, x: Any, positions: Any, key: Any, *rest: Any) -> Any:
            call = (id(block), *key.tolist())
            if call in seen:
                key = key + key.new_tensor((0, 1000, 0))
            seen.add(call)
            return compute(block, x, positions, key, *rest)

        return compute_with_new_masks

    wrap(Block, "_compute", make)


def multiply_gradient_by_another_mask() -> None:
    from megatron.model.dropout import Dropout

    def make(drop: Any) -> Any:
        def drop_and_roll(dropout: Any, x: Any, *args: Any) -> Any:
            out = drop(dropout, x, *args)
            # The gradient of each element is that of its neighbour.
            other = drop(dropout, x.roll(1, -1), *args)
            return out.detach() + other - other.detach()

        return drop_and_roll

    wrap(Dropout, "drop", make)


DROPOUT_MUTATIONS = [
    Mutation(
        "the masks of all iterations are equal",
        "docs/decisions/004",
        f"{TP} {HIDDEN}",
        2,
        leave_out_iteration,
        caught_by="loss",
        first=EMBEDDING,
    ),
    Mutation(
        "masks count microbatches instead of samples",
        "docs/decisions/004",
        "",
        2,
        count_microbatches_for_samples,
        caught_by="loss",
    ),
    Mutation(
        "dropout has the key of the next microbatch",
        "allenai/OLMo-core#828",
        "",
        2,
        draw_masks_of_next_microbatch,
        caught_by="loss",
        first=EMBEDDING,
    ),
    Mutation(
        "the MLP has the masks of attention's output",
        "docs/decisions/004",
        f"{TP} {HIDDEN}",
        2,
        repeat_site,
        caught_by="loss",
    ),
    Mutation(
        "sites are counted in each stage",
        "docs/decisions/004",
        f"{PP} {HIDDEN}",
        2,
        count_sites_of_stage,
        caught_by="loss",
    ),
    Mutation(
        "tensor ranks draw equal masks for different heads",
        "PaddlePaddle/PaddleFleetX#1005",
        TP,
        2,
        give_all_tensor_ranks_the_first_rows,
        caught_by="loss",
        first=ATTENTION,
    ),
    Mutation(
        "tensor ranks draw equal masks for different parts of the sequence",
        f"{MEGATRON}#1446",
        f"{SP} {HIDDEN}",
        2,
        give_all_tensor_ranks_the_first_rows,
        caught_by="loss",
    ),
    Mutation(
        "the stride of a mask is the length of a curriculum",
        "docs/decisions/004",
        "--curriculum-schedule-type fixed_linear --curriculum-min-difficulty 16 "
        f"--curriculum-total-step 20 --train-tokens 100000 --lr-decay-tokens 90000 {WEIGHTS}",
        1,
        use_width_of_own_row,
        caught_by="loss",
        first=ATTENTION,
    ),
    Mutation(
        "masks start again at each document",
        "docs/decisions/004",
        f"--reset-attention-mask {WEIGHTS}",
        1,
        start_masks_at_each_document,
        caught_by="loss",
        first=ATTENTION,
        documents=True,
    ),
    Mutation(
        "the two parts of a sequence have consecutive masks",
        "docs/decisions/004",
        f"{CP} {HIDDEN}",
        2,
        take_late_part_for_early,
        caught_by="loss",
    ),
    Mutation(
        "context ranks draw equal masks for different heads",
        "docs/decisions/004",
        f"{CP} --cp-comm-type a2a {WEIGHTS}",
        2,
        give_all_context_ranks_the_first_heads,
        caught_by="loss",
    ),
    Mutation(
        "the recomputation draws other dropout masks",
        "allenai/OLMo-core#828",
        "--checkpoint-activations",
        1,
        draw_other_masks_in_recomputation,
    ),
    Mutation(
        "the gradient has another mask than the value",
        "docs/decisions/004",
        f"{TP} {HIDDEN}",
        2,
        multiply_gradient_by_another_mask,
    ),
]
