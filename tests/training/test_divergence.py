"""The warning about a loss that stays far above the one at the start."""

import pytest
from training.runs import Runner

from megatron.run.state import DivergenceWatch


def observe_all(losses: list[float]) -> list[int]:
    """Return the iterations after which there was a warning."""
    watch = DivergenceWatch()
    return [at for at, loss in enumerate(losses, 1) if watch.observe(loss, at) is not None]


def test_divergence_is_one_warning() -> None:
    assert observe_all([10.0] + [12.5] * 200) == [51]


@pytest.mark.parametrize(
    "losses",
    [
        [10.0] + [11.9] * 200,
        [10.0] + ([13.0] * 49 + [9.0]) * 4,
        [10.0, *(9.5 - at / 100 for at in range(200))],
        [0.01] + [0.5] * 200,
    ],
    ids=["slightly above", "spikes that recover", "training", "noise of a small loss"],
)
def test_other_curves_are_not_reported(losses: list[float]) -> None:
    assert observe_all(losses) == []


def test_run_with_a_far_too_high_learning_rate_is_reported_once(run: Runner) -> None:
    output = run("--lr 3 --clip-grad 0 --train-iters 120")
    assert output.count("has probably diverged") == 1
    assert run.losses()[120] > run.losses()[1] + 2
