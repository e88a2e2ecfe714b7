"""Rehearsals whose command runs in the pool's processes, which have imported torch already."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from process_pool import ProcessPool, pretrain, succeed

from megatron.commands.handover import main
from megatron.extras.operations.handover.rehearsal import ScratchFolder, find_program

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --hidden-dropout 0.1 --attention-dropout 0.1 --lr 2e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --eval-interval 1000 --eval-iters 0 --vocab-size 5000 "
    "--train-iters 12 --save-interval 4 --exit-interval 10 --log-interval 1 --log-format megatron"
)


class Handover:
    """A run in a folder, and rehearsals of it."""

    def __init__(self, pool: ProcessPool, data: str, folder: Path, sizes: str = SIZES) -> None:
        self.pool = pool
        self.folder = folder
        paths = f"--data-path {data} --data-cache-path {folder}-cache"
        self.flags = f"{sizes} {paths} --save {folder} --load {folder}".split()

    def train(self, flags: str = "", ranks: int = 1) -> str:
        """Train until the run ends, or at a multiple of --exit-interval. Return the log."""
        return succeed(self.pool.run(ranks, pretrain, [*self.flags, *flags.split()]))

    def rehearse(
        self,
        options: str,
        flags: str = "",
        ranks: int = 1,
        work: Callable[..., Any] = pretrain,
        more: Sequence[object] = (),
    ) -> tuple[int, dict[str, Any], list[list[str]]]:
        """Return the exit code, the answer, and the command lines of the trainings.

        Args:
            options: Options of the tool.
            flags: Flags of the training, besides those of the run.
            ranks: Number of processes of the training.
            work: What each of them calls with the command line and `more`.
            more: Further arguments.
        """
        trained = []

        def run(
            _: ScratchFolder, command: Sequence[str], limit: float | None
        ) -> tuple[int, list[str]]:
            argv = list(command[find_program(command) :])
            trained.append(argv)
            outcomes = self.pool.run(ranks, work, argv, *more)
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
            return (1 if errors else 0), [f"error: {error}" for error in errors]

        printed: list[str] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ScratchFolder, "run", run)
            patched.setattr("megatron.commands.handover.print_line", printed.append)
            words = [str(self.folder), *options.split(), "--json", "--"]
            code = main([*words, "pretrain_gpt.py", *self.flags, *flags.split()])
        return code, json.loads("\n".join(printed) or "{}"), trained
