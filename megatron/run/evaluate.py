"""Evaluation without training: batches of each validation and test set, and --eval-tasks."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron.base.errors import ConfigError, MegatronError
from megatron.data.batches import Microbatch
from megatron.data.source import Source
from megatron.model.tally import Tally
from megatron.observe.report import EvaluationResult
from megatron.observe.timers import EVALUATE
from megatron.parallel.mesh import Mesh
from megatron.parallel.ranks import Work
from megatron.run.run import Run
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.vocabulary import count_token_bytes


def evaluate_validation(run: Run) -> None:
    """Evaluate every validation set and report the results under the current iteration."""
    batch = run.plan.config.batch
    if not run.sources.valid or batch.eval_iters == 0:
        return
    with run.clock.measure_evaluation():
        results = _evaluate(run, run.sources.valid)
    run.reporter.report_validation(run.state, results)
    # Evaluation uses the final batch size even during ramp-up, so that each evaluation covers the
    # same number of samples.
    run.state.consumed_valid_samples += batch.eval_iters * run.plan.batch_size.final
    run.state.validated_at = run.state.iteration


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
    # Without tasks, the time of an evaluation must not appear among the phases.
    is_asked = run.plan.config.batch.eval_tasks
    if not is_asked or tasks.evaluated_at == run.state.iteration:
        return
    with run.timers(EVALUATE), run.mesh.progress.return_after():
        scores = tasks.evaluate(run.engine, run.plan, run.mesh, run.reporter.log)
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
        run.reporter.log(f"--eval-only: evaluating the first {samples} samples of each set")
    elif not run.plan.config.batch.eval_tasks:
        raise ConfigError(
            "--eval-only has nothing to evaluate: give validation data (--split, "
            "--valid-weighted-split-paths) and --eval-iters, or --eval-tasks"
        )
    evaluate_validation(run)
    evaluate_test(run)
    evaluate_tasks(run)


def wait_for_batch(run: Run, source: Source, *sizes: int) -> None:
    """Wait until all ranks have read the next batch of a source.

    Args:
        run: The run.
        source: The source.
        sizes: The arguments of `read_ahead`.

    Raises:
        StopRequested: A rank has received a signal.
    """
    reading = Work(lambda: source.read_ahead(*sizes), in_thread=True)
    what = f"reading a batch of {source.name}"
    repeated = run.mesh.progress.phase.is_repeated
    ranks = run.mesh.ranks
    ranks.wait_for(reading, what, run.reporter.log, until_failure=True, is_repeated=repeated)


def _evaluate(run: Run, sources: Mapping[str, Source]) -> dict[str, EvaluationResult]:
    iterations = run.plan.config.batch.eval_iters
    batch_size = run.plan.batch_size.final
    run.valid_data = {name: source.state() for name, source in run.sources.valid.items()}
    # Found at the first evaluation, because a run may have none.
    if run.token_bytes is None:
        run.token_bytes = _find_token_bytes(run)
    with run.timers(EVALUATE), run.mesh.progress.return_after():
        return {
            name: _evaluate_set(run, source, iterations, batch_size, run.token_bytes)
            for name, source in sources.items()
        }


def _evaluate_set(
    run: Run,
    source: Source,
    iterations: int,
    batch_size: int,
    token_bytes: torch.Tensor,
) -> EvaluationResult:
    """Return the results over the next `iterations` batches of `batch_size` samples.

    The samples always have the full sequence length, also during curriculum learning. Losses of
    different iterations can be compared only for this reason.

    Args:
        run: The run.
        source: The samples.
        iterations: Number of batches.
        batch_size: Samples of each batch.
        token_bytes: Bytes of each id, int64 [v], or nothing if they are not known.
    """
    tally = Tally()
    losses = 0.0
    text_bytes = 0
    for number in range(1, iterations + 1):
        run.mesh.progress.begin_step("evaluation batch", number)
        wait_for_batch(run, source, batch_size)
        microbatches = source.read_batch(batch_size)
        losses += run.engine.eval_batch(microbatches, tally)
        if len(token_bytes):
            text_bytes += sum(_count_bytes(each, token_bytes) for each in microbatches)
    nats, correct, positions, counted = _sum_over_ranks(run.mesh, tally, text_bytes)
    if positions == 0:
        run.reporter.log(
            "warning: no token of the evaluation counts, so its loss of 0 means nothing"
        )
    loss = losses / iterations
    # Batches may have different numbers of tokens that count.
    if run.plan.counts_tokens_of_step(training=False):
        loss = nats / max(positions, 1.0)
    return EvaluationResult(
        loss,
        # All positions may be masked.
        accuracy=correct / max(positions, 1.0),
        bits_per_byte=nats / math.log(2) / counted if counted else None,
    )


def _count_bytes(microbatch: Microbatch, token_bytes: torch.Tensor) -> int:
    """Return the bytes of the predicted tokens of a microbatch that count in the loss."""
    found = token_bytes[microbatch.labels]
    if microbatch.loss_mask is not None:
        found = found * (microbatch.loss_mask != 0)
    return int(found.sum())


def _sum_over_ranks(mesh: Mesh, tally: Tally, text_bytes: int) -> list[float]:
    """Return nats, correct and counted positions, and bytes, summed over the global batches."""
    numbers = torch.zeros(4, dtype=torch.float64)
    # Tensor-parallel ranks have the same sums. Ranks without the last stage have none.
    if mesh.coordinate.tensor == 0:
        numbers[:3] = torch.stack([tally.nats, tally.correct, tally.positions]).cpu()
    # All ranks of a pipeline and of a context-parallel group read the same samples.
    coordinate = mesh.coordinate
    if (coordinate.pipeline, coordinate.context, coordinate.tensor) == (0, 0, 0):
        numbers[3] = text_bytes
    if mesh.control is not None:
        dist.all_reduce(numbers, group=mesh.control)
    return numbers.tolist()


def _find_token_bytes(run: Run) -> torch.Tensor:
    """Return the bytes of each id, int64 [v], or an empty tensor with a message that says why.

    All ranks call it together. Only rank 0 needs the tokenizer.
    """
    config = run.plan.config
    found: list[str] = []

    def find() -> list[int]:
        if config.data.mock_data:
            found.append("--mock-data has no text")
            return []
        # A run on tokenised data needs no tokenizer, so its absence must not end the run.
        try:
            counts = count_token_bytes(build_tokenizer(config.tokenizer))
        except (MegatronError, OSError) as error:
            found.append(str(error).splitlines()[0])
            return []
        if counts is None:
            found.append("the tokenizer does not show which bytes its tokens stand for")
            return []
        # Ids of a larger --vocab-size are in no text.
        return counts + [0] * (run.plan.vocab_size - len(counts))

    counts = run.mesh.ranks.call_on_rank_0(
        find, "counting the bytes of each token", run.reporter.log
    )
    for reason in found:
        run.reporter.log(f"bits per byte are left out of the evaluation: {reason}")
    return torch.tensor(counts, dtype=torch.int64)
