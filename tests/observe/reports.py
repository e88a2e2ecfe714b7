"""A report with every field set, for the tests of log line, TensorBoard and metrics file."""

from dataclasses import replace
from typing import Any

from megatron.observe.report import EvaluationReport, IterationReport


def full_report() -> IterationReport:
    return IterationReport(
        iteration=42,
        train_iters=100,
        consumed_samples=672,
        consumed_tokens=344064,
        global_batch_size=16,
        learning_rate=1e-3,
        seconds=0.5,
        samples_per_second=32.0,
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
