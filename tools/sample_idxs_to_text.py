"""Print the text that training saw, or will see, at given samples or iterations.

    python tools/sample_idxs_to_text.py --samples 0-3 17 -- --config run.yaml
    python tools/sample_idxs_to_text.py --iterations 8401-8402 --checkpoint checkpoints/my-run

The arguments after '--' are the run's own. Where they --load a checkpoint, or with --checkpoint, the order of samples is the
recorded one, with all changes of seed, mixture and length on the way.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

from megatron.checkpoint.folder import locate_checkpoint
from megatron.checkpoint.load import Checkpoint, open_checkpoint
from megatron.checkpoint.start import find_start
from megatron.config.cli import load_config
from megatron.config.tree import Config
from megatron.data.segments import History
from megatron.data.source import BatchSlice, build_sources
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.plan import Plan, resolve
from megatron.schedule.skip import find_range
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.resume import read_bare_thresholds


@dataclass(frozen=True)
class SampleArguments:
    """Which samples; all arguments after '--' are the run's own."""

    samples: tuple[str, ...] = field(default=())
    """Samples by their place in training, from 0: single ones (17) or inclusive ranges (0-3)."""
    iterations: tuple[str, ...] = field(default=())
    """Iterations, from 1: single ones or inclusive ranges."""
    checkpoint: str | None = None
    """Folder of the run's checkpoints, or one global_stepN in it: takes configuration and order of samples from there."""
    world_size: int | None = None
    """Number of processes of the run; needed only where no global batch size is set."""


@dataclass(frozen=True)
class SampleRange:
    """A stretch of training samples and what is said of it."""

    first: int
    last: int
    seq_length: int
    """Tokens of a sample that were used: fewer than --seq-length under a curriculum."""
    remark: str = ""


def main(argv: list[str] | None = None) -> int:
    """Print the text of `argv` (default: the command line). Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    options = tyro.cli(
        SampleArguments, args=words[:end], prog="sample_idxs_to_text.py", description=__doc__
    )
    try:
        for line in format_samples(options, words[end + 1 :]):
            print(line)
    except MegatronError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    return 0


def format_samples(options: SampleArguments, arguments: list[str]) -> Iterator[str]:
    """The output, sample by sample. Raises MegatronError."""
    if not options.samples and not options.iterations:
        raise ConfigError("nothing is asked for; give --samples 0-3 17 or --iterations 8401-8402.")
    config, checkpoint = read_run(options.checkpoint, arguments)
    config, notes = read_bare_thresholds(config, checkpoint)
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    if options.iterations and config.batch.global_batch_size is None and options.world_size is None:
        raise ConfigError(
            "without --global-batch-size the batch depends on the number of processes; give --world-size."
        )
    parallel = config.parallel
    plan = resolve(
        config,
        options.world_size
        or parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size,
    )
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
    """The run's configuration, and the checkpoint that records its order, if there is one."""
    if checkpoint is None:
        config = load_config(arguments, prog="pretrain_gpt.py").config
        return config, find_start(config.checkpoint).checkpoint
    opened = open_checkpoint(*locate_checkpoint(Path(checkpoint)))
    config = load_config(
        ["--config", str(opened.folder / "config.yaml"), *arguments], prog="pretrain_gpt.py"
    ).config
    return config, opened


def parse_numbers(flag: str, words: tuple[str, ...], lowest: int) -> list[tuple[int, int]]:
    """[(17, 17), (0, 3)] for 17 0-3. Raises ConfigError for anything else."""
    ranges = []
    for word in words:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.replace("_", ""))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not lowest <= first <= last:
            raise ConfigError(
                f"{flag} {word} must be a number from {lowest} on, or a range as in 8401-8402."
            )
        ranges.append((first, last))
    return ranges


def find_samples_of_iterations(
    plan: Plan, checkpoint: Checkpoint | None, ranges: list[tuple[int, int]]
) -> list[SampleRange]:
    """The samples of iterations, by the plan's batch sizes. Raises DataError where the run's were others."""
    if not ranges:
        return []
    forecast = plan.forecast()
    if checkpoint is not None:
        (then,) = forecast.predict([checkpoint.iteration])
        recorded = checkpoint.state["consumed_samples"]
        if then.consumed_samples != recorded:
            raise DataError(
                f"by this configuration {then.consumed_samples} samples are consumed after iteration {checkpoint.iteration}, but "
                f"{checkpoint.folder} records {recorded}: the batch size changed in mid-run. Take the consumed samples from "
                "the log and give --samples."
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
            f" (iteration {iteration}{', skipped: not trained on' if find_range(plan.skip_ranges, iteration) else ''})",
        )
        for iteration, progress in ends.items()
    ]


def open_history(plan: Plan, checkpoint: Checkpoint | None) -> History:
    """The order of the run's training samples."""
    config = plan.config
    sources = build_sources(
        config.data,
        seq_length=config.model.seq_length,
        seed=config.batch.seed,
        train_samples=plan.train_samples,
        valid_samples=0,
        test_samples=0,
        batch_slice=BatchSlice(1),
    )
    if sources.train is None:
        raise ConfigError("the run trains on no sample: give --train-iters or --train-samples.")
    if checkpoint is not None and checkpoint.state.get("data") and not config.checkpoint.finetune:
        sources.load(checkpoint.state["data"])
    for note in sources.take_notes():
        print(f"note: {note}", file=sys.stderr)
    return sources.train.history


def describe(wanted: SampleRange, history: History, tokenizer: Tokenizer) -> Iterator[str]:
    """A heading and the text of each sample. Raises DataError past the last one."""
    if wanted.last >= history.end:
        raise DataError(
            f"sample {wanted.last} is not among the {history.end} of this run; the last is {history.end - 1}."
        )
    out = np.empty((1, wanted.seq_length + 1), np.int64)
    for sample in range(wanted.first, wanted.last + 1):
        history.read(np.array([sample], np.int64), out)
        dataset, number = history.locate(sample)
        (first, offset), (last, _) = (
            dataset.locate(number, column) for column in (0, wanted.seq_length)
        )
        where = f"from token {offset} of document {first}" + (
            f" to document {last}" if last != first else ""
        )
        yield f"=== sample {sample}{wanted.remark}: {dataset.indexed.prefix}, {where}"
        yield tokenizer.decode(out[0].tolist())


if __name__ == "__main__":
    sys.exit(main())
