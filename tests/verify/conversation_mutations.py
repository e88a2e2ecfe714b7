"""Known errors of packed conversations, as changes of this package in one process."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from verify.mutation import wrap


def change_marks(change: Callable[[Any], Any]) -> None:
    """Change the microbatches that have marks."""
    from megatron.data import position_source

    wrap(
        position_source,
        "apply_marks",
        lambda apply: lambda microbatch, marks: change(apply(microbatch, marks)),
    )


def shift_masks_by_one() -> None:
    change_marks(lambda m: dataclasses.replace(m, loss_mask=m.loss_mask.roll(1, dims=1)))


def count_all_tokens() -> None:
    change_marks(lambda m: dataclasses.replace(m, loss_mask=torch.ones_like(m.loss_mask)))


def let_positions_run_on() -> None:
    def change(m: Any) -> Any:
        positions = torch.arange(m.tokens.shape[1]).expand_as(m.tokens).contiguous()
        return dataclasses.replace(m, position_ids=positions)

    change_marks(change)


def change_bounds(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    def join(m: Any) -> Any:
        return dataclasses.replace(m, documents=tuple(map(change, m.documents)))

    change_marks(join)


def see_the_neighbour() -> None:
    change_bounds(lambda bounds: (0, *bounds[2:]) if len(bounds) > 2 else bounds)


def see_all_conversations_of_a_sample() -> None:
    change_bounds(lambda bounds: (0, bounds[-1]))


def end_one_token_early() -> None:
    change_bounds(lambda bounds: (0, *(at - (at > 1) for at in bounds[1:-1]), bounds[-1]))


def ignore_bounds_across_context_ranks() -> None:
    from megatron.model import attention_core

    def make(list_pieces: Any) -> Any:
        def changed(query: Any, parts: Any, documents: Any, window: Any) -> Any:
            whole = documents and tuple((0, bounds[-1]) for bounds in documents)
            return list_pieces(query, parts, whole, window)

        return changed

    wrap(attention_core, "list_pieces", make)


def mask_the_part_of_another_context_rank() -> None:
    from megatron.model import gpt

    def take(mask: torch.Tensor, context: Any, dim: int) -> torch.Tensor:
        return mask.chunk(context.size, dim)[context.rank]

    wrap(gpt, "take_own", lambda _: take)


CONVERSATION_MUTATIONS: dict[Callable[[], None], str] = {
    shift_masks_by_one: "labels, masks and positions",
    count_all_tokens: "labels, masks and positions",
    let_positions_run_on: "labels, masks and positions",
    see_the_neighbour: "labels, masks and positions",
    see_all_conversations_of_a_sample: "labels, masks and positions",
    end_one_token_early: "labels, masks and positions",
    ignore_bounds_across_context_ranks: "loss",
    mask_the_part_of_another_context_rank: "loss",
}
"""Each error, and the comparison that fails first."""
