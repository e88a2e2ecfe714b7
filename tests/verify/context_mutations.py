"""Known errors of context parallelism, as changes of this package in one process."""

import dataclasses
from typing import Any

import torch
from verify.mutation import MEGATRON, NO_DROPOUT, Mutation, wrap

CP = f"--context-parallel-size 2 {NO_DROPOUT}"


def keep_gradients_of_own_queries() -> None:
    from megatron.parallel import context
    from megatron.parallel.collectives import PendingTensor

    def take_own(x: torch.Tensor, ranks: Any) -> PendingTensor:
        return PendingTensor(x.chunk(ranks.size)[ranks.rank].clone())

    wrap(context, "begin_reduce_scatter", lambda _: take_own)


def divide_by_count_of_own_part() -> None:
    from megatron.model import gpt

    def make(compute: Any) -> Any:
        def cross_entropy(*args: Any, divisor: Any, **kwargs: Any) -> Any:
            mask = args[5]
            own = divisor if mask is None else mask.sum().clamp(min=1.0)
            return compute(*args, divisor=own, **kwargs)

        return cross_entropy

    wrap(gpt, "cross_entropy", make)


def rotate_by_consecutive_positions() -> None:
    from megatron.model import positions

    def take_slice(x: torch.Tensor, ranks: Any, dim: int) -> torch.Tensor:
        return x.chunk(ranks.size, dim)[ranks.rank]

    wrap(positions, "take_own", lambda _: take_slice)


def ignore_window() -> None:
    from megatron.model import attention

    def make(attend: Any) -> Any:
        def attend_to_all(*args: Any) -> Any:
            query, key, value, weighting, *others = args
            without = dataclasses.replace(weighting, bias=None, window=None)
            return attend(query, key, value, without, *others)

        return attend_to_all

    wrap(attention, "attend_in_context", make)


CONTEXT_MUTATIONS = [
    Mutation(
        "gradients of keys are not summed over the ranks of a sequence",
        "NVIDIA/TransformerEngine#1557",
        CP,
        2,
        keep_gradients_of_own_queries,
    ),
    Mutation(
        "masked losses are divided by the count of the rank's part of a sequence",
        f"{MEGATRON}#7513",
        f"--eod-mask-loss --loss-mean microbatch {CP}",
        2,
        divide_by_count_of_own_part,
        caught_by="loss",
        documents=True,
    ),
    Mutation(
        "positions of a slice rotate the two parts of a rank",
        "ISEEKYAN/Megatron-LM#208",
        f"--position-embedding-type rotary {CP}",
        2,
        rotate_by_consecutive_positions,
        caught_by="loss",
        first="forward pass, output of blocks.0.attention on rank 0",
    ),
    Mutation(
        "context parallelism drops the sliding window",
        "huggingface/accelerate#4177",
        f"--sliding-window 16 --cp-comm-type a2a {CP}",
        2,
        ignore_window,
        caught_by="loss",
        first="forward pass, output of blocks.0.attention on rank 0",
    ),
]
