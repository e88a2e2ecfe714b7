"""Tests that the ranks agree on the end of a run without a message of its own."""

import os
import signal
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from process_pool import pretrain
from training.runs import Runner

TWO = "--train-iters 5 --check-invariants-interval 0 --save-interval 100"


def pretrain_with_signal(argv: list[str], iteration: int, place: str) -> int:
    """Train, and let the last rank get a signal. Return the number of messages about the end.

    Args:
        argv: The command line.
        iteration: The iteration of the signal. 0: there is none.
        place: "step" or "evaluation", where it arrives.
    """
    from megatron.run import exits, loop

    messages = 0
    found: list[exits.Exits] = []
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    find_own_reason = exits.Exits._find_own_reason
    evaluate = loop.evaluate_validation

    def send(at: int, where: str) -> None:
        if last and at == iteration and where == place:
            found[0]._handle_signal(signal.SIGTERM, None)

    def find_reason_and_signal(self: exits.Exits, before: int, after: int) -> exits.StopReason:
        found.append(self)
        send(after, "step")
        return find_own_reason(self, before, after)

    def evaluate_and_signal(run: Any) -> None:
        evaluate(run)
        send(run.state.iteration, "evaluation")

    def count(*arguments: Any, **keywords: Any) -> None:
        nonlocal messages
        messages += 1
        exits_dist.all_reduce(*arguments, **keywords)

    exits_dist = exits.dist
    counting = SimpleNamespace(all_reduce=count, ReduceOp=exits_dist.ReduceOp)
    with (
        mock.patch.object(exits, "dist", counting),
        mock.patch.object(exits.Exits, "_find_own_reason", find_reason_and_signal),
        mock.patch.object(loop, "evaluate_validation", evaluate_and_signal),
    ):
        pretrain(argv)
    return messages


@pytest.mark.parametrize(
    ("flags", "iteration", "place", "last", "messages"),
    [
        ("", 0, "step", 5, 0),
        ("", 3, "step", 3, 0),
        ("--exit-interval 4", 0, "step", 4, 0),
        # An evaluation takes long, so the ranks ask each other again after it.
        ("--eval-interval 2 --eval-iters 1 --split 8,2,0", 2, "evaluation", 2, 1),
        ("--deepspeed", 3, "step", 3, 0),
        # Rank 0 decides about the next step by its clock, which needs a message.
        ("--save-interval-time 1h", 3, "step", 3, 3),
        # DeepSpeed's pipeline reduces the loss itself.
        ("--deepspeed --pipeline-model-parallel-size 2 --num-layers 2", 3, "step", 3, 3),
    ],
)
def test_a_signal_of_one_rank_ends_all(
    flags: str, iteration: int, place: str, last: int, messages: int, run: Runner
) -> None:
    if "deepspeed" in flags:
        pytest.importorskip("deepspeed")
    argv = run.argv(f"{TWO} {flags}")
    if "--save-interval-time" in flags:
        at = argv.index("--save-interval")
        del argv[at : at + 2]
    outcomes = run.pool.run(2, pretrain_with_signal, argv, iteration, place)
    for outcome in outcomes:
        assert outcome.value == messages, outcome.output
    assert max(run.losses()) == last
