"""Evaluation without training: batches of each validation and test set, and --eval-tasks."""

from collections.abc import Mapping

from megatron.data.source import Source
from megatron.engine.base import Engine
from megatron.errors import ConfigError
from megatron.observe.timers import EVALUATE
from megatron.scoring.in_loop import EngineScorer
from megatron.training.run import Run


def evaluate_validation(run: Run) -> None:
    """Evaluate every validation set and report the losses under the current iteration."""
    batch = run.plan.config.batch
    if not run.sources.valid or batch.eval_iters == 0:
        return
    run.reporter.report_validation(run.state, _evaluate(run, run.sources.valid))
    # Evaluation uses the final batch size even during ramp-up, so that each evaluation covers the
    # same number of samples.
    run.state.consumed_valid_samples += batch.eval_iters * run.plan.batch_size.final


def evaluate_test(run: Run) -> None:
    """Evaluate every test set once, at the end of training."""
    if run.sources.test and run.plan.config.batch.eval_iters > 0:
        run.reporter.report_validation(run.state, _evaluate(run, run.sources.test), test=True)


def evaluate_tasks(run: Run) -> None:
    """Evaluate the tasks of --eval-tasks, unless this iteration was evaluated already.

    Only the weights are read. No data are consumed, and no counter of the run changes.

    Raises:
        TrainingError: The scores of a task cannot be computed. Every rank raises it.
    """
    tasks = run.tasks
    if tasks is None or tasks.evaluated_at == run.state.iteration:
        return
    with run.timers(EVALUATE):
        likelihoods = EngineScorer(run.engine, run.plan, run.mesh).score(tasks.requests)
        scores = tasks.compute_scores(likelihoods, run.reporter.say)
    for task, values in scores.items():
        run.reporter.report_task(run.state.iteration, task, values)
    tasks.evaluated_at = run.state.iteration


def evaluate_only(run: Run) -> None:
    """Evaluate every validation and test set, and the tasks, without training.

    The samples are always the first ones of each set. The same checkpoint therefore gives the same
    loss, and the losses of several checkpoints can be compared.

    Raises:
        ConfigError: There is nothing to evaluate.
    """
    samples = run.plan.config.batch.eval_iters * run.plan.batch_size.final
    if samples and (run.sources.valid or run.sources.test):
        run.reporter.say(f"--eval-only: evaluating the first {samples} samples of each set")
    elif run.tasks is None:
        raise ConfigError(
            "--eval-only has nothing to evaluate: give validation data (--split, "
            "--valid-weighted-split-paths) and --eval-iters, or --eval-tasks"
        )
    evaluate_validation(run)
    evaluate_test(run)
    evaluate_tasks(run)


def _evaluate(run: Run, sources: Mapping[str, Source]) -> dict[str, float]:
    iterations = run.plan.config.batch.eval_iters
    batch_size = run.plan.batch_size.final
    with run.timers(EVALUATE):
        return {
            name: compute_mean_loss(run.engine, source, iterations, batch_size)
            for name, source in sources.items()
        }


def compute_mean_loss(engine: Engine, source: Source, iterations: int, batch_size: int) -> float:
    """Return the mean loss over the next `iterations` batches of `batch_size` samples.

    The samples always have the full sequence length, also during curriculum learning. Losses of
    different iterations can be compared only for this reason.
    """
    return (
        sum(engine.eval_batch(source.read_batch(batch_size)) for _ in range(iterations))
        / iterations
    )
