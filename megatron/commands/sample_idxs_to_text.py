"""Print the text of training samples, given by sample or by iteration.

    python tools/sample_idxs_to_text.py --samples 0-3 17 -- --config run.yaml
    python tools/sample_idxs_to_text.py --iterations 8401-8402 --checkpoint checkpoints/my-run

The arguments after '--' are the run's own. With --checkpoint, or if the run has a checkpoint to
--load, the order of samples is the recorded one. It has all changes of seed, mixture and length
that happened during the run.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.base.errors import ConfigError, DataError
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.checkpoint.load import Checkpoint, open_checkpoint
from megatron.checkpoint.start import find_start
from megatron.commands.parts import choose_parts, open_indexed
from megatron.config.tree import Config
from megatron.console.checkpoint_path import locate_checkpoint
from megatron.console.parse import parse_arguments, split_at_double_dash
from megatron.console.run_tool import run_tool
from megatron.data.batches import take_marks
from megatron.data.build_sources import build_sources
from megatron.data.indexed_source import IndexedSource
from megatron.data.segments import History
from megatron.data.source import BatchSlice, SourceRequest
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan
from megatron.run.start.job import build_starting_state
from megatron.run.start.launch import check_plan
from megatron.run.start.open_data import build_document_rules
from megatron.run.start.resume import read_bare_thresholds
from megatron.schedule.skip import find_range
from megatron.tokenizer.build import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class SampleArguments:
    """The samples to print. All arguments after '--' are the run's own."""

    samples: tuple[str, ...] = field(default=())
    """Samples by their position in training, from 0. Single ones (17) or inclusive ranges (0-3)."""
    iterations: tuple[str, ...] = field(default=())
    """Iterations, from 1: single ones or inclusive ranges."""
    checkpoint: str | None = None
    """Folder of the run's checkpoints, or one global_stepN in it. Configuration and order of
    samples are read from there."""
    world_size: int | None = None
    """Number of processes of the run. It is only needed if no global batch size is set."""


@dataclass(frozen=True)
class SampleRange:
    """A range of training samples and a remark to print with them."""

    first: int
    last: int
    seq_length: int
    """Tokens of a sample that were used. A curriculum uses fewer than --seq-length."""
    remark: str = ""


def main(argv: list[str] | None = None) -> int:
    """Print the text that `argv` (default: the command line) asks for and return the exit code."""
    own, training = split_at_double_dash(argv)
    options = parse_arguments(
        SampleArguments, args=own, prog="sample_idxs_to_text.py", description=__doc__
    )

    def work() -> int:
        for line in format_samples(options, training or []):
            print_line(line)
        return 0

    return run_tool(work)


def format_samples(options: SampleArguments, arguments: list[str]) -> Iterator[str]:
    """Yield the output, sample by sample.

    Raises:
        MegatronError: The run or its data cannot be read, or a sample does not exist.
    """
    if not options.samples and not options.iterations:
        raise ConfigError(
            "no samples are requested; give --samples 0-3 17 or --iterations 8401-8402."
        )
    config, checkpoint = read_run(options.checkpoint, arguments)
    # Old checkpoints counted bare thresholds in samples. The same reading is needed to find the
    # same samples.
    if checkpoint is not None:
        config, notes = read_bare_thresholds(config, checkpoint.read_config())
        for note in notes:
            print_to_stderr(f"warning: {note}")
    if options.iterations and config.batch.global_batch_size is None and options.world_size is None:
        raise ConfigError(
            "without --global-batch-size the batch depends on the number of processes; give "
            "--world-size."
        )
    parallel = config.parallel
    state = build_starting_state(checkpoint, config)
    plan = resolve(
        config,
        options.world_size
        or parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size,
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_tokens,
        iteration=state.iteration,
    )
    # Without its phases, the run would seem to have no data.
    if config.data.data_phases is not None and not plan.data_phases:
        check_plan(plan, choose_parts(config))
    wanted = [
        SampleRange(first, last, config.model.seq_length)
        for first, last in parse_numbers("--samples", options.samples, 0)
    ]
    wanted += find_samples_of_iterations(
        plan, checkpoint, parse_numbers("--iterations", options.iterations, 1)
    )
    history = open_history(plan, checkpoint)
    tokenizer = build_tokenizer(config.tokenizer)
    for stretch in wanted:
        yield from describe(stretch, history, tokenizer)


def read_run(checkpoint: str | None, arguments: list[str]) -> tuple[Config, Checkpoint | None]:
    """Return the run's configuration, and the checkpoint that records its order, if one exists."""
    if checkpoint is None:
        config = load_config(arguments, prog="pretrain_gpt.py").config
        return config, find_start(config.checkpoint).checkpoint
    opened = open_checkpoint(*locate_checkpoint(Path(checkpoint)))
    # The arguments override the checkpoint's configuration. Data files may have moved, for example.
    config = load_config(
        ["--config", str(opened.folder / "config.yaml"), *arguments], prog="pretrain_gpt.py"
    ).config
    return config, opened


def parse_numbers(flag: str, words: tuple[str, ...], lowest: int) -> list[tuple[int, int]]:
    """Parse `17 0-3` into [(17, 17), (0, 3)].

    Raises:
        ConfigError: A word is neither a number nor a range, or a number is below `lowest`.
    """
    ranges = []
    for word in words:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.replace("_", ""))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        # A word that does not match gives the range (0, -1), which fails here as well.
        if not lowest <= first <= last:
            raise ConfigError(
                f"{flag} {word} must be a number from {lowest} on, or a range as in 8401-8402."
            )
        ranges.append((first, last))
    return ranges


def find_samples_of_iterations(
    plan: Plan, checkpoint: Checkpoint | None, ranges: list[tuple[int, int]]
) -> list[SampleRange]:
    """Return the samples of iterations, computed from the plan's batch sizes.

    Raises:
        ConfigError: The run has fewer iterations.
        DataError: The run used other batch sizes.
    """
    if not ranges:
        return []
    latest = max(last for _, last in ranges)
    if latest > plan.train_iters:
        raise ConfigError(
            f"--iterations: {latest} is after the last iteration of this run, {plan.train_iters}."
        )
    forecast = plan.forecast()
    if checkpoint is not None:
        # A change of batch size during the run shifts all later samples. Then the arithmetic here
        # would print the wrong text without an error.
        (then,) = forecast.predict([checkpoint.iteration])
        recorded = checkpoint.state["consumed_samples"]
        if then.consumed_samples != recorded:
            raise DataError(
                f"with this configuration {then.consumed_samples} samples are consumed after "
                f"iteration {checkpoint.iteration}, but {checkpoint.folder} records {recorded}: "
                "the batch size changed during the run. Take the consumed samples from the log "
                "and give --samples."
            )
    iterations = sorted(
        {iteration for first, last in ranges for iteration in range(first, last + 1)}
    )
    ends = {progress.iteration: progress for progress in forecast.predict(iterations)}
    return [
        SampleRange(
            progress.consumed_samples - progress.global_batch_size,
            progress.consumed_samples - 1,
            progress.seq_length,
            f" (iteration {iteration}"
            f"{', skipped: not trained on' if find_range(plan.skip_ranges, iteration) else ''}"
            ")",
        )
        for iteration, progress in ends.items()
    ]


def open_history(plan: Plan, checkpoint: Checkpoint | None) -> History:
    """Return the order of the run's training samples."""
    config = plan.config
    indexed_only = "this tool shows samples of indexed data (.bin and .idx) only."
    if config.data.dataset_format is not None:
        raise ConfigError(indexed_only)
    sources = build_sources(
        SourceRequest(
            data=config.data,
            seq_length=config.model.seq_length,
            seed=config.batch.seed,
            train_samples=None if plan.train_seconds is not None else plan.train_samples,
            valid_samples=0,
            test_samples=0,
            # Conversations need the rules, and a data set of documents does not change with them.
            batch_slice=BatchSlice(1, document_rules=build_document_rules(config)),
            phases=plan.data_phases,
            open_indexed=open_indexed,
        )
    )
    if sources.train is None:
        # Without a number of samples no order of samples is defined.
        raise ConfigError("the run trains on no sample: give --train-iters or --train-samples.")
    # `--finetune` starts a new order of samples, so the recorded one does not apply.
    if checkpoint is not None and checkpoint.state.get("data") and not config.checkpoint.finetune:
        sources.load(checkpoint.state["data"])
    # Notes go to standard error, so that the output holds text only.
    for note in sources.take_notes():
        print_to_stderr(f"note: {note}")
    if not isinstance(sources.train, IndexedSource):
        raise ConfigError(indexed_only)
    return sources.train.history


def describe(wanted: SampleRange, history: History, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a heading and the text of each sample.

    Raises:
        DataError: A sample lies after the last one of the run.
    """
    if wanted.last >= history.end:
        raise DataError(
            f"sample {wanted.last} is not among the {history.end} of this run; the last is "
            f"{history.end - 1}."
        )
    # A sample has one more token than the sequence, which is the label of the last position.
    out = np.empty((1, wanted.seq_length + 1), np.int64)
    for sample in range(wanted.first, wanted.last + 1):
        # The history maps a position in training to a data set and a number in it.
        history.read(np.array([sample], np.int64), out)
        packed = take_marks(out) is not None
        dataset, number = history.locate(sample)
        (first, offset), (last, _) = (
            dataset.locate(number, column) for column in (0, wanted.seq_length)
        )
        where = f"from token {offset} of document {first}"
        if packed:
            where = f"conversation {first + 1} and others that are packed with it"
        elif last != first:
            where += f" to document {last}"
        yield f"=== sample {sample}{wanted.remark}: {dataset.indexed.prefix}, {where}"
        yield tokenizer.decode(out[0].tolist())


if __name__ == "__main__":
    sys.exit(main())
