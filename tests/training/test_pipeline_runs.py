"""Log lines of a run on a pipeline, and flags that are refused before training."""

import pytest
from training.runs import Runner

PIPELINE = "--num-layers 4 --pipeline-model-parallel-size 2"


def test_each_schedule_and_its_idle_time_are_printed_once(run: Runner) -> None:
    ramp = "--rampup-batch-size 2 2 8 --global-batch-size 6 --micro-batch-size 2"
    output = run(f"{PIPELINE} {ramp} --train-iters 8", ranks=2)
    gpipe, one_f_one_b = [line for line in output.splitlines() if line.startswith("pipeline:")]
    assert "GPipe, 1 microbatch for 2 stages" in gpipe
    assert "50 % of the time at batch size 2" in gpipe
    assert "1F1B, 2 microbatches for 2 stages" in one_f_one_b
    assert "33 % of the time at batch size 4" in one_f_one_b
    assert "layers of the stages: 2 2" in output


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (
            "--num-layers 2 --pipeline-model-parallel-size 4",
            4,
            "must not exceed --num-layers 2",
        ),
        (
            f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 3",
            2,
            "must divide --num-layers 4; use 1, 2",
        ),
        (
            f"{PIPELINE} --pp-partition-method by-weight",
            2,
            "--pp-partition-method by-weight is unknown",
        ),
        (
            f"{PIPELINE} --pp-partition-method parameters "
            "--num-layers-per-virtual-pipeline-stage 1",
            2,
            "--pp-partition-method",
        ),
        ("--fp16 --bf16", 1, "--fp16 and --bf16 exclude each other"),
        ("--checkpoint-activations --checkpoint-fraction 4/3", 1, "must be a fraction above 0"),
        (
            "--rampup-batch-size 2 2 8 --curriculum-schedule-type fixed_linear "
            "--curriculum-min-difficulty 8 --curriculum-total-step 5 --train-tokens 1000 "
            "--lr-decay-tokens 1000",
            1,
            "leave out --rampup-batch-size",
        ),
        (
            f"{PIPELINE} --tensor-model-parallel-size 2",
            2,
            "start 4 processes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("--") else "",
)
def test_wrong_flags_are_refused_before_training(
    flags: str, ranks: int, message: str, run: Runner
) -> None:
    error = run.error(flags, ranks=ranks)
    assert error.startswith("ConfigError")
    assert message in error
    assert not (run.folder / "latest").exists()
