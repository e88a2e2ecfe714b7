"""The decisions of the spike guard, and its records, without a run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from megatron.base.errors import CheckpointError, OperationsError
from megatron.checkpoint.load import Checkpoint
from megatron.config.batch import BatchConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import ModelConfig
from megatron.config.spike_guard import SpikeGuardConfig
from megatron.config.tree import Config
from megatron.engine.base import StepOutcome, StepResult
from megatron.extras.watch.guard.spike_estimator import LASTING
from megatron.extras.watch.guard.spike_guard import Response, Spike, SpikeGuard
from megatron.extras.watch.guard.spike_response import (
    GuardRecords,
    build_record,
    find_guard_windows,
    finish_interrupted_rollback,
    read_guard_records,
)
from megatron.parallel.ranks import Ranks

CONFIG = SpikeGuardConfig(
    spike_guard="rollback",
    spike_guard_reach=100,
    spike_guard_max_skips=10,
    spike_guard_max_rollbacks=2,
)
SKIP = replace(CONFIG, spike_guard="skip-step")
LOG = replace(CONFIG, spike_guard="log")


def make_step(loss: float = 5.0, grad_norm: float = 1.0, *, overflow: bool = False) -> StepResult:
    """Return an applied step, or a step that was dropped because it is not finite."""
    outcome = StepOutcome.APPLIED
    if overflow:
        outcome = StepOutcome.OVERFLOW
    elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
        outcome = StepOutcome.NOT_FINITE
    return StepResult(loss=loss, grad_norm=grad_norm, outcome=outcome)


def run_steps(guard: SpikeGuard, steps: list[StepResult], start: int = 1) -> list[Spike | None]:
    """Pass steps to the guard as the loop and the engine do."""
    found = []
    for iteration, step in enumerate(steps, start):
        judged = step
        if step.applied and not guard.accepts(step.loss, step.grad_norm):
            judged = replace(step, outcome=StepOutcome.REJECTED)
        found.append(guard.observe(judged, iteration))
    return found


def list_responses(spikes: list[Spike | None]) -> list[str | None]:
    return [None if spike is None else spike.response.value for spike in spikes]


def make_guard(config: SpikeGuardConfig = CONFIG, steps: int = 40) -> SpikeGuard:
    """Return a guard that has seen clean steps."""
    guard = SpikeGuard(config, {})
    assert run_steps(guard, make_clean(steps)) == [None] * steps
    return guard


def make_clean(steps: int) -> list[StepResult]:
    return [make_step(5 + 0.01 * (at % 3), 1 + 0.02 * (at % 5)) for at in range(steps)]


def test_third_spike_in_a_row_is_a_rollback() -> None:
    guard = make_guard()
    spikes = run_steps(guard, [make_step(9.0), make_step(math.nan), make_step(9.0)], 41)
    assert list_responses(spikes) == ["skip-step", "skip-step", "rollback"]
    last = spikes[-1]
    assert last is not None
    assert (last.first, last.last_normal, last.dropped) == (41, 40, True)
    assert "the loss is 9" in last.reason


def test_clean_step_ends_a_row() -> None:
    guard = make_guard()
    high = make_step(9.0)
    spikes = run_steps(guard, [high, high, make_step(), high, high, make_step()], 41)
    assert list_responses(spikes) == ["skip-step"] * 2 + [None] + ["skip-step"] * 2 + [None]


@pytest.mark.parametrize(
    ("step", "phrase"),
    [
        (make_step(9.0), "the loss is 9"),
        (make_step(5.0, 50.0), "the gradient norm is 50"),
        (make_step(math.inf), "the loss is inf"),
        (make_step(5.0, math.nan), "the gradient norm is nan"),
    ],
)
def test_reason_names_the_signal(step: StepResult, phrase: str) -> None:
    (spike,) = run_steps(make_guard(), [step], 41)
    assert spike is not None
    assert phrase in spike.reason
    assert spike.dropped


def test_search_for_a_loss_scale_is_no_spike() -> None:
    guard = make_guard()
    spikes = run_steps(guard, [make_step(5.0, math.inf, overflow=True)] * 20, 41)
    assert spikes == [None] * 20


def test_gradient_norm_may_be_left_out() -> None:
    guard = make_guard(replace(CONFIG, spike_guard_signals="loss"))
    assert run_steps(guard, [make_step(5.0, 50.0)], 41) == [None]


def test_step_without_a_known_norm_is_judged_by_its_loss() -> None:
    """DeepSpeed computes the norm within the update."""
    guard = make_guard()
    assert guard.accepts(5.0, None)
    assert not guard.accepts(9.0, None)
    spike = guard.observe(replace(make_step(9.0, math.inf), outcome=StepOutcome.REJECTED), 41)
    assert spike is not None
    assert "norm" not in spike.reason


def test_log_drops_nothing_and_follows_a_lasting_change() -> None:
    guard = make_guard(LOG)
    spikes = [guard.observe(make_step(7.0), at) for at in range(41, 140)]
    found = [spike for spike in spikes if spike is not None]
    assert [spike.iteration for spike in found] == list(range(41, 41 + LASTING))
    assert {(spike.response, spike.dropped) for spike in found} == {(Response.LOG, False)}


def test_guard_only_logs_after_too_many_dropped_steps() -> None:
    guard = make_guard(SKIP)
    steps = [make_step(9.0)] * 14
    spikes = run_steps(guard, steps, 41)
    assert list_responses(spikes) == ["skip-step"] * 10 + ["switch-to-log"] + ["log"] * 3
    assert [spike.dropped for spike in spikes if spike is not None] == [True] * 10 + [False] * 4
    # The next phase has other data.
    guard.start_phase()
    run_steps(guard, make_clean(40), 55)
    assert list_responses(run_steps(guard, [make_step(9.0)], 95)) == ["skip-step"]


def test_dropped_steps_beyond_the_reach_do_not_count() -> None:
    guard = make_guard(SKIP)
    steps = ([make_step(9.0)] + [make_step(5.0)] * 10) * 30
    assert "switch-to-log" not in list_responses(run_steps(guard, steps, 41))


@pytest.mark.parametrize("loss", [5.0, 5.9])
def test_high_norm_on_other_data_is_applied(loss: float) -> None:
    """The weights are the cause, and a clipped step is what changes them."""
    guard = make_guard(SKIP)
    high = make_step(loss, 57.0)
    spikes = run_steps(guard, [high, high, high, make_step(), high], 41)
    assert list_responses(spikes) == ["skip-step", "log", "log", None, "log"]
    assert ("loss" in str(spikes[0] and spikes[0].reason)) == (loss > 5.0)
    # Much later, another single batch may be bad.
    run_steps(guard, make_clean(SKIP.spike_guard_window), 46)
    assert list_responses(run_steps(guard, [high], 200)) == ["skip-step"]


def test_single_raised_loss_is_applied() -> None:
    """Text has some batches with a higher loss. More of them in a row are bad data."""
    guard = make_guard(SKIP)
    steps = [make_step(5.6), make_step(), make_step(5.6), make_step(5.6), make_step(5.6)]
    spikes = run_steps(guard, steps, 41)
    assert list_responses(spikes) == ["log", None, "log", "skip-step", "skip-step"]


@pytest.mark.parametrize("step", [make_step(5.0, 57.0), make_step(5.6, 57.0), make_step(2.0)])
def test_high_norms_and_low_losses_cause_no_rollback(step: StepResult) -> None:
    spikes = run_steps(make_guard(), [step] * 9, 41)
    assert "rollback" not in list_responses(spikes)
    assert spikes[0] is not None
    assert spikes[0].dropped


@pytest.mark.parametrize("config", [LOG, SKIP, CONFIG], ids=["log", "skip-step", "rollback"])
@pytest.mark.parametrize("step", [make_step(math.nan), make_step(5.0, math.inf)])
@pytest.mark.parametrize("starts_phase", [False, True])
def test_first_step_may_be_not_finite(
    config: SpikeGuardConfig, step: StepResult, starts_phase: bool
) -> None:
    guard = SpikeGuard(config, {})
    if starts_phase:
        run_steps(guard, make_clean(20), 1)
        guard.start_phase()
    (spike,) = run_steps(guard, [step], 21)
    assert spike is not None
    assert spike.last_normal == 20


def test_diverged_run_ends() -> None:
    untrained = 4.0
    for config in (SKIP, CONFIG):
        guard = SpikeGuard(config, {}, untrained)
        run_steps(guard, [make_step(4.0)] * 40)
        responses = list_responses(run_steps(guard, [make_step(6.0)] * 100, 41))
        assert responses.index("stop") == CONFIG.spike_guard_reach - 1
    # A loss below that of an untrained model may be a run that learns other data.
    guard = SpikeGuard(SKIP, {}, untrained)
    run_steps(guard, [make_step(2.0)] * 40)
    assert "stop" not in list_responses(run_steps(guard, [make_step(4.9)] * 300, 41))
    # The losses of --spike-guard log never end the run.
    guard = SpikeGuard(LOG, {}, untrained)
    assert "stop" not in list_responses(run_steps(guard, [make_step(9.0)] * 300))


def test_state_of_an_older_version_continues() -> None:
    """It lacks the keys that were added since."""
    guard = make_guard()
    state = guard.state()
    for added in ("since_norm_spike", "diverged_in_a_row", "only_logs"):
        del state[added]
    for signal in ("loss", "grad_norm"):
        kept = ("recent", "differences", "medians", "since_median")
        state[signal] = {key: state[signal][key] for key in kept}
    resumed = SpikeGuard(CONFIG, state)
    assert resumed.state() == guard.state()


def test_only_rollbacks_within_the_reach_count() -> None:
    windows = [[10, 20], [30, 60]]
    state = {**make_guard().state(), "windows": windows}
    high = [make_step(9.0)] * 3
    assert list_responses(run_steps(SpikeGuard(CONFIG, state), high, 100))[-1] == "switch-to-log"
    # At iteration 141, the second window is 81 iterations back and the first one 121.
    assert list_responses(run_steps(SpikeGuard(CONFIG, state), high, 139))[-1] == "rollback"


def test_resumed_guard_decides_as_an_uninterrupted_one() -> None:
    steps = make_clean(30) + [make_step(9.0)] * 2 + make_clean(5) + [make_step(9.0)] * 20
    for split in range(28, len(steps)):
        whole = SpikeGuard(CONFIG, {})
        first = SpikeGuard(CONFIG, {})
        expected = run_steps(whole, steps)
        before = run_steps(first, steps[:split])
        resumed = SpikeGuard(CONFIG, json.loads(json.dumps(first.state())))
        assert before + run_steps(resumed, steps[split:], split + 1) == expected
        assert resumed.state() == whole.state()


def test_next_phase_of_data_starts_the_estimates_again() -> None:
    guard = make_guard()
    assert not guard.accepts(9.0, 1.0)
    guard.start_phase()
    assert guard.accepts(9.0, 1.0)


def make_spike() -> Spike:
    (spike,) = run_steps(make_guard(), [make_step(math.nan)], 41)
    assert spike is not None
    return spike


def test_record_is_written_once(tmp_path: Path) -> None:
    """A run that is killed repeats its iterations and their decisions."""
    record = build_record(make_spike(), 1e-3)
    for _ in range(2):
        records = GuardRecords(tmp_path)
        records.append(record)
        records.append(record)
    (written,) = read_guard_records(tmp_path)
    assert written["action"] == "spike-guard"
    assert written["decision"] == "skip-step"
    assert (written["iteration"], written["loss"]) == (41, "NaN")
    assert written["learning_rate"] == 1e-3


def test_record_after_a_torn_line_and_a_rollback_is_written(tmp_path: Path) -> None:
    record = build_record(make_spike(), 1e-3)
    GuardRecords(tmp_path).append(record)
    with open(tmp_path / "interventions.jsonl", "a") as file:
        file.write('{"action": "rollback"}\n{"action": "spike-gu')
    GuardRecords(tmp_path).append(record)
    assert len(read_guard_records(tmp_path)) == 2


@pytest.mark.parametrize("windows", [5, [[1]], [["a", 2]], None])
def test_damaged_windows_of_a_rollback_are_named(windows: object, tmp_path: Path) -> None:
    """Without its windows, the run would train on the data of the spike again."""
    digest = "0" * 8
    record = {"action": "spike-guard", "digest": digest, "to": 3, "windows": windows}
    (tmp_path / "interventions.jsonl").write_text(json.dumps(record) + "\n")
    checkpoint = SimpleNamespace(manifest=SimpleNamespace(digest=digest))
    with pytest.raises(CheckpointError, match=r"interventions\.jsonl.*correct that line"):
        find_guard_windows(tmp_path, cast(Checkpoint, checkpoint))


def test_damaged_record_of_a_rollback_is_named(tmp_path: Path) -> None:
    record = {"action": "spike-guard", "decision": "rollback", "iteration": 7}
    (tmp_path / "interventions.jsonl").write_text(json.dumps(record) + "\n")
    # An unfinished rollback, whose plan is compared with the record.
    aside = tmp_path / "rolled-back" / "now"
    aside.mkdir(parents=True)
    plan = {
        "name": "now",
        "time": "",
        "request": {"to": 3},
        "stood_at": 7,
        "trained_to": 7,
        "digest": "",
        "moment": None,
        "axes": {},
        "files": [],
        "checkpoints": [],
        "chronicles": None,
        "pointers": True,
        "flags": "",
        "notes": [],
    }
    (aside / "plan.json").write_text(json.dumps(plan))
    text = "rollback now to global_step3 is unfinished; give again: x"
    (tmp_path / "latest").write_text(text)
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8),
        batch=BatchConfig(micro_batch_size=1),
        checkpoint=CheckpointConfig(save=str(tmp_path), load=str(tmp_path)),
    )
    with pytest.raises(OperationsError, match="lacks a value"):
        finish_interrupted_rollback(config, Ranks(), print)
    assert (tmp_path / "latest").read_text() == text


def test_a_step_in_which_no_token_counts_is_no_spike() -> None:
    guard = make_guard(SKIP)
    run_steps(guard, [make_step()] * 5, 41)
    state = guard.state
    empty = replace(make_step(0.0, 0.0), outcome=StepOutcome.EMPTY)
    assert guard.observe(empty, 46) is None
    assert guard.state == state


@pytest.mark.parametrize(
    ("train_iters", "before", "after", "skipped"),
    [
        (3_000, None, None, (15, 30)),
        (100, None, None, (0, 1)),
        (95_000, None, None, (100, 200)),
        (3_000, 100, 200, (100, 200)),
        (95_000, None, 0, (100, 0)),
    ],
)
def test_short_run_skips_fewer_iterations(
    train_iters: int, before: int | None, after: int | None, skipped: tuple[int, int]
) -> None:
    config = SpikeGuardConfig(spike_guard_skip_before=before, spike_guard_skip_after=after)
    assert config.find_skipped(train_iters) == skipped
