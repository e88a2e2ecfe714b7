"""Runs with --fp8-format: switches at a resume, the first iteration in float8, and refusals."""

import pytest
from training.runs import Runner

from megatron.observe.log_line import parse_validation_log_line

MODEL = (
    "--num-layers 3 --num-query-groups 1 --position-embedding-type rotary --glu-activation swiglu "
    "--ffn-hidden-size 72 --bf16 --micro-batch-size 1"
)
FLOAT8 = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-emulate"
GRID = (
    "--pipeline-model-parallel-size 2 --zero-stage 3 --optimizer muon --async-save "
    "--save-interval 2"
)
STAGES = "--pipeline-model-parallel-size 3 --num-layers 4"


def numbers(run: Runner) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each iteration."""
    return [(e["lm_loss"], e["grad_norm"]) for e in run.metrics() if "lm_loss" in e]


def test_a_run_switches_at_resumes(run: Runner, other: Runner) -> None:
    """The switches give the same bits, however the launches are divided. A stage has two layers."""
    model = f"{MODEL} {STAGES}"
    log = run(f"{model} {FLOAT8} --exit-interval 2", ranks=3)
    # 72 is no multiple of 16.
    assert "mlp.up [72, 32], mlp.gate [72, 32], mlp.down [32, 72]" in log
    log = run(f"{model} --exit-interval 4 --require-load", ranks=3)
    assert "--fp8-format" in log
    assert "not set" in log
    run(f"{model} {FLOAT8} --exit-interval 5 --require-load", ranks=3)
    run(f"{model} {FLOAT8} --train-iters 6 --require-load", ranks=3)
    other(f"{model} {FLOAT8} --exit-interval 1", ranks=3)
    other(f"{model} {FLOAT8} --exit-interval 2 --require-load", ranks=3)
    other(f"{model} --exit-interval 4 --require-load", ranks=3)
    other(f"{model} {FLOAT8} --train-iters 6 --require-load", ranks=3)
    assert len(numbers(run)) == 6
    assert numbers(run) == numbers(other)


def test_the_first_iterations_in_bf16(run: Runner, other: Runner) -> None:
    """Three stages on two ranks, of which the last layer stays in bf16."""
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 0"
    log = run(f"{MODEL} {FLOAT8} {ends} {GRID} --fp8-start-iteration 3 --train-iters 5", ranks=4)
    assert "transformer layers 1 to 2, from iteration 3 on" in log
    other(f"{MODEL} {GRID} --exit-interval 2", ranks=4)
    other(f"{MODEL} {FLOAT8} {ends} {GRID} --require-load --train-iters 5", ranks=4)
    assert numbers(run) == numbers(other)
    assert len(numbers(run)) == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8-format e4m3 --fp8-recipe rowwise", "add --fp8-emulate to compute"),
        (f"{FLOAT8} --hidden-size 40", "--hidden-size 40: it is a size of each weight"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "use --fp8-recipe tensorwise"),
        (f"{FLOAT8} --deepspeed", "float8 runs in the native engine only"),
    ],
)
def test_what_does_not_run_is_refused(flags: str, message: str, run: Runner) -> None:
    assert message in run.error(f"{MODEL} {flags}")


def test_fused_gradients_are_those_of_operands_in_bf16(run: Runner, other: Runner) -> None:
    """They differ from others in the rounding of each microbatch's gradient only."""
    rowwise = f"{MODEL} --train-iters 3 --fp8-format e4m3 --fp8-recipe rowwise --fp8-emulate"
    run(rowwise)
    other(f"{rowwise} --gradient-accumulation-fusion")
    assert numbers(other)[0][0] == numbers(run)[0][0]
    assert numbers(other)[0] != numbers(run)[0]
    assert numbers(other) == [pytest.approx(each, rel=1e-2) for each in numbers(run)]


def evaluate(run: Runner, flags: str) -> tuple[str, float]:
    """Return the log and the loss of an evaluation of the run's checkpoint by two stages."""
    flags = f"{MODEL} --pipeline-model-parallel-size 2 --num-layers 4 {flags}"
    log = run(f"{flags} --eval-only --eval-iters 1 --split 80,20,0", ranks=2)
    (found,) = [entry for entry in map(parse_validation_log_line, log.splitlines()) if entry]
    return log, float(found["lm_loss"])


def test_an_evaluation_uses_the_format_of_the_checkpoints_iteration(run: Runner) -> None:
    run(f"{MODEL} {FLOAT8} --num-layers 4 --train-iters 3 --clip-grad 0.5")
    _, without = evaluate(run, "")
    _, with_state = evaluate(run, FLOAT8)
    assert with_state != without
    for flags in ("--no-load-optim", "--no-load-optim --fp8-start-iteration 3", "--finetune"):
        log, loss = evaluate(run, f"{FLOAT8} {flags}")
        assert loss == with_state, flags
        assert "is without float8" not in log
    # A new run would begin without float8.
    log, loss = evaluate(run, f"{FLOAT8} --finetune --fp8-start-iteration 2")
    assert loss == without
    assert "this evaluation, at iteration 1, is without float8" in " ".join(log.split())
    log, loss = evaluate(run, f"{FLOAT8} --no-load-optim --fp8-start-iteration 4")
    assert loss == without
    assert "this evaluation, at iteration 3, is without float8" in " ".join(log.split())
