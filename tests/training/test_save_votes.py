"""Tests that a save in the background costs no message while it is written."""

import errno
import os
import threading
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from process_pool import pretrain, succeed
from training.runs import Runner

FLAGS = (
    "--async-save --save-at 3 --save-interval 100 --train-iters 9 --num-layers 2 "
    "--check-invariants-interval 0"
)
WRITTEN = 6
"""The iteration in which the file of the last rank is written."""


@dataclass
class Seen:
    """What a rank did."""

    sent: dict[int, int] = field(default_factory=dict)
    """Iteration -> number of collectives and messages of all groups before it."""
    advanced: list[int] = field(default_factory=list)
    """The iterations in which the loop has ended a stage of the first save."""
    failed: list[int] = field(default_factory=list)
    """The iterations in which a save has failed."""

    def count(self, iteration: int) -> int:
        """Return the collectives and messages of an iteration."""
        return self.sent[iteration + 1] - self.sent[iteration]


def train_with_slow_write(argv: list[str], fails: bool) -> Seen:
    """Train, and let the last rank write its file of the first save in a later iteration."""
    from parallel.test_connections import Use, record_uses

    from megatron.checkpoint import stages
    from megatron.checkpoint.save import Saver
    from megatron.run import loop

    seen = Seen()
    uses: list[Use] = []
    writes = threading.Event()
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    poll = Saver.poll
    report_failure = Saver._report_failure
    advance = Saver._advance
    train_iteration = loop.train_iteration
    write = stages.write_shard_file

    def write_late(*arguments: Any) -> Any:
        if last:
            assert writes.wait(60)
        if last and fails and not seen.failed:
            raise OSError(errno.EIO, "planted")
        return write(*arguments)

    def train(run: Any) -> None:
        iteration = run.state.iteration + 1
        seen.sent[iteration] = len(uses)
        if iteration == WRITTEN:
            writes.set()
            run.saver._save.work.wait()
        train_iteration(run)

    def poll_and_note(saver: Saver, *iterations: int, **options: Any) -> bool:
        with mock.patch.object(Saver, "_advance", note_advance):
            return poll(saver, *iterations, **options)

    def note_advance(saver: Saver) -> None:
        seen.advanced.append(len(seen.sent))
        advance(saver)

    def note_failure(saver: Saver, *arguments: Any) -> None:
        seen.failed.append(len(seen.sent))
        report_failure(saver, *arguments)

    with (
        record_uses(uses),
        mock.patch.object(stages, "write_shard_file", write_late),
        mock.patch.object(loop, "train_iteration", train),
        mock.patch.object(Saver, "poll", poll_and_note),
        mock.patch.object(Saver, "_report_failure", note_failure),
    ):
        pretrain(argv)
    return seen


PIPELINE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
DEEPSPEED_PIPELINE = "--deepspeed --pipeline-model-parallel-size 2"
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("ranks", "flags", "fails"),
    [
        (1, "", False),
        pytest.param(1, "", True, marks=FULL),
        pytest.param(4, PIPELINE, False, marks=FULL),
        (4, PIPELINE, True),
        (2, "--zero-stage 3", False),
        pytest.param(2, "--zero-stage 3", True, marks=FULL),
        (2, "--deepspeed", False),
        pytest.param(2, "--deepspeed", True, marks=FULL),
        pytest.param(2, DEEPSPEED_PIPELINE, False, marks=FULL),
        (2, DEEPSPEED_PIPELINE, True),
    ],
)
def test_iteration_has_no_message_more_during_a_save(
    ranks: int, flags: str, fails: bool, run: Runner
) -> None:
    if "--deepspeed" in flags:
        pytest.importorskip("deepspeed")
    outcomes = run.pool.run(ranks, train_with_slow_write, run.argv(f"{FLAGS} {flags}"), fails)
    log = succeed(outcomes)
    assert ("saving iteration 3" in log) == fails
    for outcome in outcomes:
        seen = outcome.value
        # DeepSpeed's pipeline reduces the loss itself, so the votes are in the message at the end
        # of an iteration.
        ended = WRITTEN + (flags == DEEPSPEED_PIPELINE)
        assert seen.count(4) == seen.count(5) == seen.count(2)
        assert bool(seen.count(2)) == (ranks > 1)
        assert seen.advanced[0] == ended
        assert seen.failed == [ended] * fails
    assert run.losses_of_training() == list(range(1, 10))
    saved = sorted(path.name for path in run.folder.glob("global_step*"))
    assert saved == ["global_step3"] * (not fails) + ["global_step9"]
