"""A process that has imported the training once, and forks one process for each verification."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from process_pool import start_fork_server
from tiny_corpus import MERGES, VOCAB
from verify.mutation import ITERATIONS, MODEL, RUN_CHECKS, wrap
from verify.mutations import MUTATIONS


def verify_in_this_process(
    flags: str,
    world_size: int,
    mutation: int | Callable[[], None] | None,
    result: Path,
    *,
    check: str | None,
    processes: int,
) -> None:
    """Verify a command line, with a mutation of the package, and write the report.

    With `check`, the copy also has this check of a run, which reduced copies turn off.
    """
    import torch

    torch.set_num_threads(1)
    from megatron.commands.verify import VerifyArguments, preload, resolve_command, train
    from megatron.extras.planner.verify.report import build_report
    from megatron.extras.planner.verify.verification import verify

    began = time.monotonic()
    preload()
    plan, _ = resolve_command(VerifyArguments(world_size=world_size), flags.split())
    if check is not None:
        turn_on(check)
    if callable(mutation):
        mutation()
    elif mutation is not None:
        MUTATIONS[mutation].apply()
    report = build_report(plan, verify(plan, train, most_processes=processes))
    report["seconds"] = time.monotonic() - began
    result.write_text(json.dumps(report))


def turn_on(check: str) -> None:
    """Give reduced copies a check of `RUN_CHECKS`."""
    from megatron.extras.planner.verify import reduction

    settings, _ = RUN_CHECKS[check]
    wrap(
        reduction,
        "_reduce_parallel",
        lambda reduce: lambda *args: reduce(*args) | settings,
    )


def call_command_in_this_process(words: list[str], output: Path) -> None:
    """Call the command, and end the process with its exit code."""
    from megatron.commands.verify import main

    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = main(words)
    sys.exit(code)


class Verifier:
    """Verifies command lines, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._context = start_fork_server()
        self._folder = folder
        self._number = 0

    def run(
        self,
        flags: str,
        world_size: int,
        mutation: int | Callable[[], None] | None = None,
        *,
        check: str | None = None,
        processes: int = 8,
    ) -> dict[str, Any]:
        """Return the report of the flags, which are added to those of the small model."""
        self._number += 1
        result = self._folder / f"{self._number}.json"
        process = self._context.Process(
            target=verify_in_this_process,
            args=(f"{MODEL} {flags}", world_size, mutation, result),
            kwargs={"check": check, "processes": processes},
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        report: dict[str, Any] = json.loads(result.read_text())
        return report

    def call(self, flags: str) -> tuple[int | None, str]:
        """Return the exit code and the output of the command with these flags."""
        output = self._folder / "output.txt"
        words = f"{flags} -- {MODEL} {ITERATIONS}".split()
        process = self._context.Process(target=call_command_in_this_process, args=(words, output))
        process.start()
        process.join()
        return process.exitcode, output.read_text()

    def run_mutation(self, number: int, *, healthy: bool = False) -> dict[str, Any]:
        """Return the report of a mutation, or of its run without the mutation."""
        mutation = MUTATIONS[number]
        flags = f"{ITERATIONS} {mutation.flags}"
        if mutation.documents:
            flags += f" --vocab-file {VOCAB} --merge-file {MERGES} --vocab-size 5000"
        return self.run(
            flags,
            mutation.world_size,
            None if healthy else number,
            check=mutation.caught_by if mutation.caught_by in RUN_CHECKS else None,
            processes=mutation.processes,
        )
