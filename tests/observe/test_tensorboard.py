"""TensorBoard's tags and their step axes, read back with its own reader."""

import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from observe.reports import full_report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.base.errors import ConfigError
from megatron.config.logging import LoggingConfig
from megatron.observe import tensorboard
from megatron.observe.report import EvaluationReport
from megatron.observe.tensorboard import TensorBoard

ALL = LoggingConfig(
    log_timers_to_tensorboard=True,
    log_batch_size_to_tensorboard=True,
    log_validation_ppl_to_tensorboard=True,
)
REPORT = replace(
    full_report(), gigaflops_without_embeddings=123456.7, phase_seconds={"data-wait": 0.25}
)


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def point(accumulator: EventAccumulator, tag: str) -> tuple[int, float]:
    (scalar,) = accumulator.Scalars(tag)
    return scalar.step, scalar.value


def test_tags_and_axes(tmp_path: Path) -> None:
    board = TensorBoard(replace(ALL, tensorboard_dir=str(tmp_path / "tb")))
    board.write(replace(REPORT, decoupled_learning_rate=4e-3))
    board.write(EvaluationReport(at=REPORT.axes, loss=2.5))
    board.write(EvaluationReport(at=REPORT.axes, loss=3.5, name="wiki", is_one_of_several=True))
    board.close()
    events = read(tmp_path / "tb")
    axes = {
        "": 42,
        " vs samples": 672,
        " vs tokens": 344064,
        " vs gigaflos (without embeddings)": 123456,
    }
    for suffix, step in axes.items():
        assert point(events, "lm-loss-training/lm loss" + suffix) == (step, 6.5)
        assert point(events, "lm-loss-validation/lm loss validation" + suffix) == (step, 2.5)
        assert point(events, "lm-loss-validation/wiki/lm loss validation" + suffix) == (step, 3.5)
        assert point(events, "lm-loss-validation/lm loss validation ppl" + suffix) == (
            step,
            pytest.approx(12.1825, abs=1e-3),
        )
    groups = {
        "learning-rate/learning-rate": 1e-3,
        "learning-rate/decoupled-learning-rate": 4e-3,
        "batch-size/batch-size": 16,
        "loss-scale/loss-scale": 4096,
        "grad-norm/grad-norm": 1.5,
        "num-zeros/num-zeros": 17,
        "params-norm/params-norm": 33.25,
        "iteration-time/iteration-time": 0.5,
    }
    for tag, value in groups.items():
        for suffix in ("", " vs samples", " vs tokens"):
            assert point(events, tag + suffix) == (axes[suffix], pytest.approx(value))
    assert point(events, "curriculum_seqlen") == (42, 512)
    assert point(events, "data-wait-time") == (42, 0.25)
    assert point(events, "steps-vs-samples/y=steps,x=samples") == (672, 42)
    assert point(events, "steps-vs-samples/y=samples,x=steps") == (42, 672)
    assert point(events, "steps-vs-tokens/y=steps,x=tokens") == (344064, 42)
    assert point(events, "steps-vs-tokens/y=tokens,x=steps") == (42, 344064)


def test_loss_of_a_dropped_step_has_a_tag_of_its_own(tmp_path: Path) -> None:
    board = TensorBoard(LoggingConfig(tensorboard_dir=str(tmp_path)))
    board.write(replace(REPORT, lm_loss=None, dropped_loss=9.5))
    board.close()
    events = read(tmp_path)
    assert point(events, "lm-loss-training/lm loss of dropped steps") == (42, 9.5)
    assert "lm-loss-training/lm loss" not in events.Tags()["scalars"]


def test_only_requested_values_are_written_and_only_when_due(tmp_path: Path) -> None:
    off = LoggingConfig(
        tensorboard_dir=str(tmp_path),
        tensorboard_log_interval=5,
        log_learning_rate_to_tensorboard=False,
        log_loss_scale_to_tensorboard=False,
    )
    board = TensorBoard(off)
    board.write(replace(REPORT, iteration=4))
    bare = replace(
        REPORT,
        iteration=5,
        lm_loss=None,
        grad_norm=None,
        num_zeros=None,
        params_norm=None,
        curriculum_seqlen=None,
    )
    board.write(bare)
    board.close()
    tags = read(tmp_path).Tags()["scalars"]
    assert {tag.split("/")[0] for tag in tags} == {"steps-vs-samples", "steps-vs-tokens"}
    assert point(read(tmp_path), "steps-vs-samples/y=steps,x=samples") == (672, 5)


def test_one_event_file_for_each_launch_flushed_on_demand(tmp_path: Path) -> None:
    for _ in range(2):
        board = TensorBoard(LoggingConfig(tensorboard_dir=str(tmp_path)))
        board.write(REPORT)
        board.flush()
        assert read(tmp_path).Scalars("lm-loss-training/lm loss")
        board.close()
    files = list(tmp_path.iterdir())
    # Two launches of one process within one second may share a name. No launch makes two files.
    assert 1 <= len(files) <= 2


def test_truncated_record_is_written_again(tmp_path: Path) -> None:
    """A truncated record is written again once the disk accepts it, and no event is lost.

    The kernel's limit on a file's size truncates the record.
    """
    messages: list[str] = []
    board = TensorBoard(replace(ALL, tensorboard_dir=str(tmp_path)), log=messages.append)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        board.write(replace(REPORT, iteration=1))
        board.flush()
        (file,) = tmp_path.iterdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 1000, limit[1]))
        for iteration in (2, 3):
            board.write(replace(REPORT, iteration=iteration))
            board.flush()
        truncated_size = file.stat().st_size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert len(messages) == 1
    assert "cannot write TensorBoard events" in messages[0]
    board.write(replace(REPORT, iteration=4))
    board.close()
    assert file.stat().st_size > truncated_size
    assert "again; 0 were lost" in messages[1]
    assert [scalar.step for scalar in read(tmp_path).Scalars("lm-loss-training/lm loss")] == [
        1,
        2,
        3,
        4,
    ]


def test_events_dropped_from_memory_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_MEMORY_BYTES", 3000)
    messages: list[str] = []
    board = TensorBoard(replace(ALL, tensorboard_dir=str(tmp_path)), log=messages.append)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        (file,) = tmp_path.iterdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, limit[1]))
        for iteration in range(1, 9):
            board.write(replace(REPORT, iteration=iteration))
            board.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    board.write(replace(REPORT, iteration=9))
    board.close()
    lost = int(messages[-1].rpartition("; ")[2].split()[0])
    events = read(tmp_path)
    kept = sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"])
    reference = TensorBoard(replace(ALL, tensorboard_dir=str(tmp_path / "reference")))
    reference.write(REPORT)
    reference.close()
    assert lost > 0
    assert lost + kept == 9 * len(read(tmp_path / "reference").Tags()["scalars"])
    assert events.Scalars("data-wait-time")[-1].step == 9  # the last event of an iteration


def test_url_is_refused_as_a_folder() -> None:
    with pytest.raises(ConfigError, match="must be a folder"):
        TensorBoard(LoggingConfig(tensorboard_dir="s3://bucket/run"))


def test_statistics_of_layers_have_a_chart_each_and_their_own_interval(tmp_path: Path) -> None:
    """Numbers of layers have the same width, because TensorBoard sorts charts by their text."""
    board = TensorBoard(replace(ALL, tensorboard_dir=str(tmp_path), tensorboard_log_interval=5))
    norms = [float(layer) for layer in range(11)]
    board.write(
        replace(REPORT, layer_statistics={"layer_grad_norm": norms, "output_logit": float("inf")})
    )
    board.close()
    events = read(tmp_path)
    assert point(events, "layer-grad-norm/03") == (42, 3.0)
    assert point(events, "layer-grad-norm/10") == (42, 10.0)
    assert point(events, "output-logit/output-logit") == (42, float("inf"))
    assert "grad-norm/grad-norm" not in events.Tags()["scalars"]
