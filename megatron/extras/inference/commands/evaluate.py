"""Evaluate a checkpoint: tasks of lm-evaluation-harness, and the loss of text files.

    python tools/evaluate.py --load DIR --text-files held_out.txt other.txt
    python tools/evaluate.py --load DIR --tasks hellaswag piqa --num-fewshot 0 --out scores.json
    python tools/evaluate.py --load DIR --tasks my_task --task-folder my_tasks
    python tools/evaluate.py --load AFTER --compare-with BEFORE --text-files held_out.txt
        --by-position loss.png
    torchrun --nproc-per-node 4 tools/evaluate.py --load DIR --text-files held_out.txt
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

A checkpoint of any parallel layout can be loaded. Tasks need pip install -e '.[eval]'. The
harness downloads the data of its own tasks. Tasks in --task-folder may have their data in local
files, and need no network.

Exit code 0 means success. Exit code 2 means that nothing was evaluated.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError
from megatron.base.outside_file import INDEX_BYTES, load_bytes
from megatron.base.plain_text import print_line
from megatron.console.figure import make_figure, save_figure
from megatron.console.parse import parse_arguments
from megatron.console.run_on_ranks import run_on_ranks
from megatron.extras.inference.generate.load import SIZES, ModelArguments, check_at_least, load
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.extras.inference.scoring.likelihood import Scorer, TextLoss
from megatron.extras.inference.scoring.tasks import find_tasks, harden_manager, select_metrics
from megatron.parallel.mesh import Mesh
from megatron.plan.rules.finding import Finding, apply_rules, error, refuse_errors
from megatron.tokenizer.build import Tokenizer


@dataclass(frozen=True)
class EvaluateArguments(ModelArguments):
    """The command line."""

    text_files: tuple[Path, ...] = ()
    """UTF-8 text files. Each gives a loss, a perplexity and bits per byte."""
    by_position: Path | None = None
    """Picture of the loss of the text files against the position in the sample. It shows what a
    model makes of a long context. Needs matplotlib."""
    compare_with: str | None = None
    """Folder of another run, such as the one before longer sequences. --by-position shows it too,
    at the same positions."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness."""
    task_folder: Path | None = None
    """Folder with further tasks as YAML files."""
    num_fewshot: int | None = None
    """Examples in each prompt. Default: that of the task."""
    limit: int | None = None
    """Evaluate only the first items of each task."""
    batch_size: int = 8
    """Sequences that are computed together."""
    out: Path | None = None
    """JSON file of all results, with each item of the tasks."""
    tensorboard_dir: Path | None = None
    """Also write the results as TensorBoard events, at the checkpoint's iteration."""


_MEASURES = ("loss", "perplexity", "bits_per_byte")
"""What is reported of `TextLoss`."""


@dataclass
class Evaluation:
    """The results of a checkpoint."""

    iteration: int
    """Iteration of the checkpoint."""
    texts: dict[str, TextLoss] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task -> metric -> value."""
    items: dict[str, list[Any]] = field(default_factory=dict)
    """Task -> what the harness records of each item."""
    positions: dict[str, list[float]] = field(default_factory=dict)
    """Folder of a run -> the loss at each position."""

    def list_numbers(self) -> list[tuple[str, str, float]]:
        """Return task or file, measure, and value of each result."""
        rows = []
        for name, loss in self.texts.items():
            rows += [(name, key.replace("_", " "), getattr(loss, key)) for key in _MEASURES]
        for task, metrics in self.tasks.items():
            rows += [
                (task, metric, float(value))
                for metric, value in metrics.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            ]
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return all results as plain data."""
        texts = {
            name: {key: getattr(loss, key) for key in ("tokens", "bytes", *_MEASURES)}
            for name, loss in self.texts.items()
        }
        record = {"texts": texts, "tasks": self.tasks, "items": self.items}
        if self.positions:
            record["loss_by_position"] = self.positions
        return record


def check_arguments(arguments: EvaluateArguments) -> Iterator[Finding]:
    """Check that there is something to evaluate, and that each value is in its range."""
    if not arguments.tasks and not arguments.text_files:
        yield error("there is nothing to evaluate: give --text-files or --tasks")
    yield from check_at_least(arguments, {**SIZES, "limit": 1, "num_fewshot": 0})


def check_outputs(arguments: EvaluateArguments) -> Iterator[Finding]:
    """Check what is drawn, and where the results go, before hours are spent on them."""
    if arguments.by_position is not None and not arguments.text_files:
        yield error("--by-position draws the loss of text files: give --text-files.")
    if arguments.compare_with is not None and arguments.by_position is None:
        yield error("--compare-with has an effect with --by-position only; give both.")
    out = arguments.out
    # The file is replaced, which would remove a device such as /dev/stdout.
    if out is not None and ((out.exists() and not out.is_file()) or not out.parent.is_dir()):
        yield error(f"--out {out} must be a file in a folder that exists.")
    events = arguments.tensorboard_dir
    if events is not None and events.exists() and not events.is_dir():
        yield error(f"--tensorboard-dir {events} is not a folder.")


def read_texts(arguments: EvaluateArguments) -> dict[Path, str]:
    """Return the texts of the files.

    Raises:
        ConfigError: A file cannot be read, or is empty.
    """
    texts = {}
    for path in arguments.text_files:
        try:
            # Text mode would change the ends of lines, and so the number of bytes.
            texts[path] = load_bytes(path, INDEX_BYTES).decode()
        except OSError as error:
            raise ConfigError(f"--text-files {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--text-files {path} is not UTF-8 text: {error}.") from error
        if not texts[path]:
            raise ConfigError(f"--text-files {path} is empty.")
    return texts


def evaluate(
    arguments: EvaluateArguments, mesh: Mesh, texts: dict[Path, str], manager: Any
) -> Evaluation:
    """Compute all results. All ranks that hold the model call it.

    Raises:
        CheckpointError: There is no checkpoint to load.
        ConfigError: The tokenizer is not the one of the training, or cannot be read.
    """
    model, tokenizer, iteration, _ = load(arguments, mesh)
    found = Evaluation(iteration)
    scorer = Scorer(model, arguments.batch_size)
    for path, text in texts.items():
        ids = tokenizer.encode(text)
        found.texts[str(path)] = scorer.measure_text(ids, text, tokenizer.eod)
    if arguments.tasks:
        run_tasks(arguments, mesh, model, tokenizer, manager, found)
    if arguments.by_position is not None:
        # The files are one text, so that short ones have a sample together.
        text = "".join(texts.values())
        length = scorer.context
        for folder in filter(None, (arguments.load, arguments.compare_with)):
            if folder == arguments.compare_with:
                other = replace(arguments, load=folder, iteration=None)
                model, tokenizer, *_ = load(other, mesh)
                scorer = Scorer(model, arguments.batch_size)
            if scorer.context < length and model.shape.position_table_size:
                raise ConfigError(
                    f"--compare-with {folder}: its {scorer.context} learned positions end before "
                    f"the samples of {length} tokens; leave it out."
                )
            found.positions[folder] = scorer.measure_positions(
                tokenizer.encode(text), tokenizer.eod, length
            )
    return found


def draw_positions(positions: dict[str, list[float]], path: Path) -> None:
    """Draw the loss against the position, as means over positions that grow with it.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format of `path`.
        OSError: The file cannot be written.
    """
    figure = make_figure(8, 5)
    axes = figure.add_subplot()
    for folder, losses in positions.items():
        # Single positions are noisy.
        # Each mean is over about a tenth of the positions before it, so late ones are steady.
        bounds = [0]
        while bounds[-1] < len(losses):
            bounds.append(min(len(losses), bounds[-1] + 1 + bounds[-1] // 10))
        means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(bounds)]
        axes.plot(bounds[1:], means, label=folder)
    axes.set_xscale("log")
    axes.set_xlabel("position in the sample, tokens")
    axes.set_ylabel("loss, nats")
    axes.legend()
    save_figure(figure, path)


def run_tasks(
    arguments: EvaluateArguments,
    mesh: Mesh,
    model: StagedModel,
    tokenizer: Tokenizer,
    manager: Any,
    found: Evaluation,
) -> None:
    """Run the tasks of the harness, and add their results to `found`."""
    from lm_eval import simple_evaluate

    from megatron.extras.inference.scoring.harness import CheckpointLM

    harden_manager(manager)
    results = simple_evaluate(
        model=CheckpointLM(model, tokenizer, arguments.batch_size, quiet=mesh.rank > 0),
        tasks=list(arguments.tasks),
        task_manager=manager,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        log_samples=True,
        confirm_run_unsafe_code=False,
    )
    # The harness returns the results to the first process of each host only. Rank 0 is one of them.
    if results is None:
        return
    found.tasks = select_metrics(results["results"])
    found.items = {
        task: [
            {name: item[name] for name in ("doc_id", "target", "filtered_resps")} for item in items
        ]
        for task, items in results["samples"].items()
    }


def write_results(
    arguments: EvaluateArguments, found: Evaluation, log: Callable[[str], None]
) -> None:
    """Print the table of results, and write the files.

    Raises:
        OSError: A file cannot be written.
    """
    rows = found.list_numbers()
    name_width = max(len(name) for name, _, _ in rows)
    measure_width = max(len(measure) for _, measure, _ in rows)
    for name, measure, value in rows:
        log(f"{name:<{name_width}}  {measure:<{measure_width}}  {value:.6g}")
    if arguments.out is not None:
        record = {"load": arguments.load, "iteration": found.iteration, **found.to_json()}
        replace_file(arguments.out, json.dumps(record, indent=1, default=str) + "\n")
    if arguments.by_position is not None:
        draw_positions(found.positions, arguments.by_position)
    if arguments.tensorboard_dir is not None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(arguments.tensorboard_dir)) as writer:
            for name, measure, value in rows:
                writer.add_scalar(f"eval/{name}/{measure}", value, found.iteration)


def run(arguments: EvaluateArguments) -> None:
    """Evaluate what the command line asks for.

    Raises:
        MegatronError: An argument, the checkpoint or the tokenizer is at fault.
        OSError: A file of the results cannot be written.
    """
    refuse_errors(apply_rules((check_arguments, check_outputs), arguments))
    texts = read_texts(arguments)
    manager = None
    if arguments.tasks:
        # A wrong name of a task is found before the model is loaded.
        manager = find_tasks(
            arguments.tasks,
            arguments.task_folder,
            names_flag="--tasks",
            folder_flag="--task-folder",
        )
    with arguments.join_ranks() as mesh:
        found = evaluate(arguments, mesh, texts, manager)
        if mesh.rank == 0:
            write_results(arguments, found, print_line)


def main(argv: list[str] | None = None) -> int:
    """Evaluate what `argv` names and return the exit code."""
    arguments = parse_arguments(EvaluateArguments, args=argv, description=__doc__)
    return run_on_ranks(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
