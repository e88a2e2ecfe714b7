"""Reports of an iteration, for the tests of log line, TensorBoard, metrics file and tools."""

from dataclasses import replace
from typing import Any

from megatron.observe.report import EvaluationReport, IterationReport


def make_report(**more: Any) -> IterationReport:
    """Return a report, in which a test names only what it is about."""
    report = {
        "iteration": 1,
        "train_iters": 6,
        "consumed_samples": 16,
        "consumed_tokens": 2048,
        "global_batch_size": 16,
        "learning_rate": 1e-3,
        "seconds": 0.5,
        "samples_per_second": 32.0,
        "tokens_per_second": 4096.0,
        "tflops": 0.1,
    }
    return IterationReport(**{**report, **more})


def full_report() -> IterationReport:
    """Return a report with every field that the log line shows."""
    return make_report(
        iteration=42,
        train_iters=100,
        consumed_samples=672,
        consumed_tokens=344064,
        tokens_per_second=16384.0,
        tflops=0.0123,
        skipped_iterations=1,
        nan_iterations=2,
        lm_loss=6.5,
        grad_norm=1.5,
        loss_scale=4096.0,
        num_zeros=17.0,
        params_norm=33.25,
        curriculum_seqlen=512,
    )


def make_evaluation(iteration: int, loss: float, **further: Any) -> EvaluationReport:
    """Return the result of a validation set at an iteration."""
    at = replace(full_report(), iteration=iteration).axes
    return EvaluationReport(at=at, loss=loss, **further)
