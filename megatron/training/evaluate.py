"""Evaluation on the next batches of each validation and test set, without a backward pass."""

from collections.abc import Mapping

from megatron.data.source import GPTValidSource, MockSource
from megatron.engine.base import Engine
from megatron.errors import ConfigError
from megatron.observe.timers import EVALUATE
from megatron.training.run import Run


def evaluate_validation(run: Run) -> None:
    """Evaluate every validation set and report the losses under the current iteration."""
    batch = run.plan.config.batch
    if not run.sources.valid or batch.eval_iters == 0:
        return
    with run.clock.measure_evaluation():
        losses = _evaluate(run, run.sources.valid)
    run.reporter.report_validation(run.state, losses)
    # Evaluation uses the final batch size even during ramp-up, so that each evaluation covers the
    # same number of samples.
    run.state.consumed_valid_samples += batch.eval_iters * run.plan.batch_size.final


def evaluate_test(run: Run) -> None:
    """Evaluate every test set once, at the end of training."""
    if run.sources.test and run.plan.config.batch.eval_iters > 0:
        run.reporter.report_validation(run.state, _evaluate(run, run.sources.test), test=True)


def evaluate_only(run: Run) -> None:
    """Evaluate every validation and test set without training.

    The samples are always the first ones of each set. The same checkpoint therefore gives the same
    loss, and the losses of several checkpoints can be compared.

    Raises:
        ConfigError: There is nothing to evaluate.
    """
    if run.plan.config.batch.eval_iters == 0 or not (run.sources.valid or run.sources.test):
        raise ConfigError(
            "--eval-only has nothing to evaluate: give validation data (--split, "
            "--valid-weighted-split-paths) and --eval-iters"
        )
    samples = run.plan.config.batch.eval_iters * run.plan.batch_size.final
    run.reporter.say(f"--eval-only: evaluating the first {samples} samples of each set")
    evaluate_validation(run)
    evaluate_test(run)


def _evaluate(run: Run, sources: Mapping[str, GPTValidSource | MockSource]) -> dict[str, float]:
    iterations = run.plan.config.batch.eval_iters
    batch_size = run.plan.batch_size.final
    with run.timers(EVALUATE):
        return {
            name: compute_mean_loss(run.engine, source, iterations, batch_size)
            for name, source in sources.items()
        }


def compute_mean_loss(
    engine: Engine, source: GPTValidSource | MockSource, iterations: int, batch_size: int
) -> float:
    """Return the mean loss over the next `iterations` batches of `batch_size` samples.

    The samples always have the full sequence length, also during curriculum learning. Losses of
    different iterations can be compared only for this reason.
    """
    return (
        sum(engine.eval_batch(source.read_batch(batch_size)) for _ in range(iterations))
        / iterations
    )
