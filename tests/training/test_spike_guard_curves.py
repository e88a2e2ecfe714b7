"""The default limits of the spike guard on curves that other trainers have recorded.

`gpt2_124m_curves.npz` has the printed numbers of two published runs of GPT-2 124M on FineWeb, with
0.5 million tokens a step: 19,560 losses and gradient norms of llm.c, and 9,536 losses of a PyTorch
trainer. Both logs are in the repository KellerJordan/modded-nanogpt (MIT licence), in
records/track_1_short/2024-10-13_llmc and 2024-06-06_AdamW.
"""

from pathlib import Path

import numpy as np
import pytest

from megatron.config.spike_guard import SpikeGuardConfig
from megatron.engine.base import StepOutcome, StepResult
from megatron.extras.watch.guard.spike_estimator import LASTING
from megatron.extras.watch.guard.spike_guard import SpikeGuard

CURVES = Path(__file__).resolve().parents[1] / "fixtures/published_runs/gpt2_124m_curves.npz"


def read_curve(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses and the gradient norms of a run. The second run printed no norms."""
    with np.load(CURVES, allow_pickle=False) as curves:
        losses = curves[f"{name}_loss"].astype(float)
        norms = curves["llm_c_grad_norm"].astype(float) if name == "llm_c" else np.ones(len(losses))
    return losses, norms


def find_spikes(losses: np.ndarray, norms: np.ndarray) -> list[int]:
    """Return the iterations that the guard drops with its default limits."""
    guard = SpikeGuard(SpikeGuardConfig(spike_guard="skip-step"), {})
    found = []
    for at, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        outcome = StepOutcome.APPLIED if guard.accepts(loss, norm) else StepOutcome.REJECTED
        result = StepResult(loss=loss, grad_norm=norm, outcome=outcome)
        if guard.observe(result, at) is not None:
            found.append(at)
    return found


@pytest.mark.parametrize("name", ["llm_c", "torch"])
def test_recorded_curve_has_no_spike(name: str) -> None:
    """Losses of single batches are up to 9.1 robust standard deviations above the level."""
    assert find_spikes(*read_curve(name)) == []


@pytest.mark.parametrize("first", [10, 60, 700, 2500, 5990])
@pytest.mark.parametrize("rise", [1.0, 3.0])
def test_jump_in_a_recorded_curve_is_dropped(first: int, rise: float) -> None:
    losses, norms = (values[:6000] for values in read_curve("llm_c"))
    spike = slice(first - 1, first + 4)
    # Before the noise is known, a loss must exceed its level by 20 %.
    losses[spike] += rise if first > 16 else 3 * rise
    assert find_spikes(losses, norms) == list(range(first, first + 5))


@pytest.mark.parametrize("length", [100, 400])
def test_slow_rise_in_a_recorded_curve_is_found(length: int) -> None:
    losses, norms = (values[:5000] for values in read_curve("llm_c"))
    losses[4000 : 4000 + length] += np.linspace(0, 1.0, length)
    found = find_spikes(losses, norms)
    assert 4000 < found[0] < 4000 + 0.6 * length
    # After LASTING spikes in a row, the new level is normal.
    assert len(found) >= min(LASTING, length // 2)
    assert max(found) <= 4000 + length


@pytest.mark.parametrize("at", [30, 3000])
def test_jump_of_the_norm_in_a_recorded_curve_is_dropped(at: int) -> None:
    losses, norms = (values[:3500] for values in read_curve("llm_c"))
    norms[at - 1] *= 20
    assert find_spikes(losses, norms) == [at]
