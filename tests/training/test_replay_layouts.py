"""Healthy runs in many layouts give no alarm in a replay of each iteration.

REPLAY_ITERATIONS sets their length. docs/replay.md says how many ran once.
"""

import os
from pathlib import Path

import pytest
from equivalence.corpus import NO_DROPOUT, command
from equivalence.layouts import PAIRS, Layout
from hypothesis import HealthCheck, given, settings
from process_pool import ProcessPool, pretrain, succeed
from verify.mutation import MODEL
from verify.random_runs import draw_expert_run

from megatron.base.errors import ConfigError
from megatron.commands.verify import VerifyArguments, resolve_command

pytestmark = pytest.mark.full
ITERATIONS = int(os.environ.get("REPLAY_ITERATIONS", "20"))
REPLAY = f"--replay-interval 1 --replay-action stop --exit-interval {ITERATIONS} --eval-iters 0"
LONGER = {"ramp": "--train-samples 648", "curriculum": "--train-iters 64"}
"""Flags that let the runs of ten iterations last longer."""
RUNS = 12
"""Random runs with experts."""


def check_replays(argv: list[str], ranks: int, pool: ProcessPool) -> None:
    printed = succeed(pool.run(ranks, pretrain, argv))
    assert f"replay: {ITERATIONS} replays in this launch, 0 with a difference" in printed
    # All kernels repeat their bits on CPUs.
    assert "does not repeat its bits" not in printed


@pytest.mark.parametrize("layout", PAIRS, ids=str)
@pytest.mark.parametrize("dropout", ["", NO_DROPOUT])
def test_each_layout(
    layout: Layout, dropout: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    flags = (layout.flags, layout.training, dropout, LONGER[layout.variation], REPLAY)
    argv = command(tmp_path / "run", corpus, layout.shape, layout.variation, *flags)
    check_replays(argv, layout.ranks, pool)


def test_random_runs_with_experts(pool: ProcessPool) -> None:
    runs: list[tuple[str, int]] = []

    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(run=draw_expert_run())
    def collect(run: tuple[str, int]) -> None:
        flags, ranks = run
        flags = f"{MODEL} {flags} {REPLAY} --mock-data".replace("--data-path data/absent ", "")
        try:
            resolve_command(VerifyArguments(world_size=ranks), flags.split())
        except ConfigError:
            return
        if ranks <= 8:
            runs.append((flags, ranks))

    collect()
    # The first ones of hypothesis are the simplest.
    chosen = runs[:: max(1, len(runs) // RUNS)][:RUNS]
    assert len(chosen) == RUNS
    for flags, ranks in chosen:
        check_replays(flags.split(), ranks, pool)
