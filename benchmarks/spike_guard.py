"""Train tiny models on good and bad data with and without the spike guard, and compare them.

    python benchmarks/spike_guard.py --corpus PREFIX --output FOLDER

Each run trains a GPT of 4 layers x 64 on real text. In the runs with bad data, some iterations have
bad batches in place of the text. The other runs have good data only, and another schedule. A run
that is in FOLDER/runs.jsonl already is not repeated, so the benchmark can be stopped and continued.
At the end it writes table.md, and a picture of a guarded and an unguarded run.

With `log`, the weights are those of a run without the guard, bit for bit. If it finds no spike, the
runs with `skip-step` and `rollback` are the same run too (tests/training/test_spike_guard_runs.py).
Such runs are not trained again.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from megatron.base.errors import MegatronError
from megatron.commands.parts import choose_parts
from megatron.data.batches import Microbatch
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.engine.native import NativeEngine
from megatron.extras.figure import make_figure, save_figure
from megatron.extras.translators.translator import load_config
from megatron.observe.metrics import read_metrics
from megatron.run.pretrain import pretrain

VOCABULARY = 5000
BATCH = 16
SEQUENCE = 64
BLANK = 198
"""The line break in the vocabulary of GPT-2."""
SEEDS = (1, 2, 3)
RATES = (1e-3, 3e-3)
MODES = ("log", "skip-step", "rollback")
COSTLY = ("random tokens", "permuted vocabulary", "repeated token")
"""Bad data whose cost the guard must recover."""
LEAST_COST = 0.05
LEAST_RECOVERED = 0.7
MOST_HARM = 0.02
SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --hidden-dropout 0 "
    f"--attention-dropout 0 --seq-length {SEQUENCE} --global-batch-size {BATCH} "
    f"--vocab-size {VOCABULARY} --clip-grad 1.0 --split 95,5,0 --eval-iters 20 "
    "--eval-interval 10000 --log-interval 100 --keep-latest-checkpoints 3"
)


@dataclass(frozen=True)
class Length:
    """How long the runs are."""

    iterations: int
    bad: range
    """Iterations with bad data."""
    flags: str

    @property
    def start(self) -> int:
        """Iterations that all runs with one learning rate and seed have in common."""
        return self.bad.start - 1


SHORT = Length(
    300,
    range(271, 291),
    "--save-interval 10 --spike-guard-skip-before 10 --spike-guard-skip-after 20",
)
LONG = Length(3000, range(2701, 2721), "--save-interval 100")
"""With the defaults of the guard."""

Rows = NDArray[np.int64]
"""[b, s + 1]: the tokens of a batch, with the last label."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    corpus: Path
    """Indexed data set of real text, tokenized with up to 5,000 tokens, without its suffix."""
    output: Path
    """Folder of the results."""
    cells: tuple[str, ...] = ()
    """Only these kinds of data or schedules. Default: all."""
    long: bool = False
    """Train for 3,000 iterations, in which a rollback skips as many iterations as by default."""
    seeds: tuple[int, ...] = SEEDS
    """Seeds of initialisation and order of the data."""
    modes: tuple[str, ...] = MODES
    """The modes of the guard."""

    @property
    def length(self) -> Length:
        """The length of the runs."""
        return LONG if self.long else SHORT


@dataclass(frozen=True)
class Cell:
    """What one run trains on, and how."""

    kind: str
    mode: str
    rate: float
    seed: int


# Bad data


def _repeat_token(rows: Rows, noise: np.random.Generator, fixed: np.random.Generator) -> Rows:
    token = fixed.choice(rows.ravel())
    return np.full_like(rows, token)


def _insert_blank_lines(rows: Rows, noise: np.random.Generator, fixed: np.random.Generator) -> Rows:
    blank = np.full_like(rows, BLANK)
    blank[:, ::16] = rows[:, ::16]
    return blank


BAD_DATA: dict[str, Callable[[Rows, np.random.Generator, np.random.Generator], Rows]] = {
    "random tokens": lambda rows, noise, fixed: noise.integers(0, VOCABULARY, rows.shape),
    "permuted vocabulary": lambda rows, noise, fixed: fixed.permutation(VOCABULARY)[rows],
    "repeated token": _repeat_token,
    "reversed documents": lambda rows, noise, fixed: rows[:, ::-1],
    "duplicated document": lambda rows, noise, fixed: np.broadcast_to(rows[0], rows.shape),
    "empty lines": _insert_blank_lines,
}
"""Functions of the good rows, a generator of the iteration, and a generator of the run."""


@contextlib.contextmanager
def spoil_data(kind: str, seed: int, bad: range) -> Iterator[None]:
    """Give the engine bad batches in some iterations. `kind` is a key of `BAD_DATA` or a schedule.

    The data are replaced after they were read, so a rollback skips them as it skips others.
    """
    if kind not in BAD_DATA:
        yield
        return
    original = NativeEngine.train_batch
    first: list[Rows] = []

    def train_batch(
        self: NativeEngine, microbatches: Sequence[Microbatch], *, iteration: int, **options: Any
    ) -> Any:
        if iteration in bad:
            (batch,) = microbatches
            rows = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1).numpy()
            # All bad iterations have the same document or token.
            first.append(rows)
            if kind in ("repeated token", "duplicated document"):
                rows = first[0]
            noise = np.random.default_rng([seed, iteration])
            spoiled = BAD_DATA[kind](rows, noise, np.random.default_rng(seed))
            tokens = torch.from_numpy(np.ascontiguousarray(spoiled))
            microbatches = [dataclasses.replace(batch, tokens=tokens[:, :-1], labels=tokens[:, 1:])]
        return original(self, microbatches, iteration=iteration, **options)

    NativeEngine.train_batch = train_batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        NativeEngine.train_batch = original  # type: ignore[method-assign]


# Good data with other schedules


def write_phases(corpus: Path, folder: Path) -> Path:
    """Divide the documents by how rare their tokens are, and return the file of two data phases."""
    file = folder / "phases.yaml"
    if file.exists():
        return file
    data = IndexedDataset(corpus)
    documents = [data[at] for at in range(len(data))]
    counts = np.bincount(np.concatenate(documents), minlength=VOCABULARY) + 1
    rarity = [-np.log(counts / counts.sum())[tokens].mean() for tokens in documents]
    border = np.median(rarity)
    for name, rare in (("common", False), ("rare", True)):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for tokens, value in zip(documents, rarity, strict=True):
                if (value > border) == rare:
                    writer.add_document(tokens)
    file.write_text(
        f"- data_path: [{folder / 'common'}]\n"
        f"- from_iteration: {SHORT.iterations // 2 + 1}\n  data_path: [{folder / 'rare'}]\n"
    )
    return file


GOOD_DATA = (
    "constant",
    "batch ramp-up",
    "curriculum",
    "data phase",
    "restart of the learning rate",
    "warm-up of 0",
)
FEWER = "fewer good data"
"""As many good data as the runs with bad data have."""
SHARED = (*BAD_DATA, "constant", FEWER)
"""The runs that have their first iterations in common."""


def list_launches(kind: str, length: Length) -> list[str]:
    """Return the flags of each launch of a run. Runs with bad data are `constant` besides."""
    iterations = f"--train-iters {length.iterations}"
    constant = f"--lr-decay-style constant --micro-batch-size {BATCH}"
    plain = f"{constant} --lr-warmup-iters 30 {iterations}"
    half = length.iterations // 2
    tokens = length.iterations * BATCH * SEQUENCE
    launches = {
        "batch ramp-up": [
            "--lr-warmup-samples 160 --lr-decay-style constant --micro-batch-size 4 "
            f"--rampup-batch-size 4 4 1600 --train-samples {length.iterations * BATCH - 1280}"
        ],
        "curriculum": [
            f"{plain} --curriculum-schedule-type fixed_linear --curriculum-min-difficulty 16 "
            f"--curriculum-max-difficulty {SEQUENCE} --curriculum-total-step {half} "
            f"--train-tokens {tokens} --lr-decay-tokens {tokens}"
        ],
        "restart of the learning rate": [
            f"--lr-warmup-iters 30 --lr-decay-style cosine --lr-decay-iters {half} "
            f"--micro-batch-size {BATCH} --exit-interval {half} {iterations}",
            f"{plain} --override-lr-scheduler",
        ],
        "warm-up of 0": [f"{constant} --lr-warmup-iters 0 {iterations}"],
        FEWER: [f"{plain} --skip-train-iteration-range {length.bad.start}-{length.bad.stop - 1}"],
    }
    return launches.get(kind, [plain])


# Runs


def list_cells(arguments: Arguments) -> list[Cell]:
    """Return all runs, those with `log` first."""
    kinds = (*BAD_DATA, *GOOD_DATA, FEWER)
    return [
        Cell(kind, mode, rate, seed)
        for mode in arguments.modes
        for seed in arguments.seeds
        for kind in kinds
        for rate in RATES
        if kind in (arguments.cells or kinds)
    ]


def train(
    cell: Cell, arguments: Arguments, folder: Path, launch: str
) -> tuple[str | None, list[str]]:
    """Make one launch of a run. Return its error, and what the guard printed."""
    data = f"--data-path {arguments.corpus}"
    if cell.kind == "data phase":
        data = f"--data-phases {write_phases(arguments.corpus, arguments.output)}"
    flags = (
        f"{SHAPE} --lr {cell.rate} {data} --data-cache-path {arguments.output / 'cache'} "
        f"--seed {cell.seed} --spike-guard {cell.mode} {arguments.length.flags} "
        f"--save {folder} --load {folder} {launch}"
    )
    output = io.StringIO()
    error = None
    with spoil_data(cell.kind, cell.seed, arguments.length.bad), contextlib.redirect_stdout(output):
        try:
            loaded = load_config(flags.split())
            pretrain(loaded, parts=choose_parts(loaded.config))
        except MegatronError as problem:
            error = str(problem)
    return error, [line for line in output.getvalue().splitlines() if "spike guard" in line]


def train_start(cell: Cell, arguments: Arguments) -> Path:
    """Train up to the bad data, unless it was done before, and return the folder of the run.

    The start does not depend on the kind of the bad data. As long as there is no spike, it does not
    depend on the mode of the guard either.
    """
    count = arguments.length.start
    (launch,) = list_launches("constant", arguments.length)
    for mode in ("log", cell.mode):
        folder = arguments.output / f"start-{mode}-{cell.rate}-{cell.seed}"
        pointer = folder / "latest"
        if not pointer.exists() or pointer.read_text() != f"global_step{count}":
            start = dataclasses.replace(cell, kind="constant", mode=mode)
            train(start, arguments, folder, f"{launch} --exit-interval {count}")
        if not (folder / "interventions.jsonl").exists():
            break
    return folder


def _link_or_copy(source: str, target: str) -> None:
    """Link the files of checkpoints, which never change, and copy those that a run appends to."""
    if "global_step" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def run_cell(cell: Cell, arguments: Arguments) -> dict[str, Any]:
    """Train one run, and return its record."""
    begin = time.monotonic()
    warnings = []
    error = None
    with tempfile.TemporaryDirectory(dir=arguments.output) as name:
        folder = Path(name) / "run"
        if cell.kind in SHARED:
            shutil.copytree(train_start(cell, arguments), folder, copy_function=_link_or_copy)
        for launch in list_launches(cell.kind, arguments.length):
            error, lines = train(cell, arguments, folder, launch)
            warnings += lines
            if error is not None:
                break
        entries = read_metrics(folder / "metrics.jsonl")
        decisions = []
        with contextlib.suppress(FileNotFoundError):
            lines = (folder / "interventions.jsonl").read_text().splitlines()
            decisions = [json.loads(line) for line in lines]
    steps = [entry for entry in entries if "lm_loss" in entry]
    return {
        **asdict(cell),
        "iterations": [entry["iteration"] for entry in steps],
        "losses": [entry["lm_loss"] for entry in steps],
        "grad_norms": [entry["grad_norm"] for entry in steps],
        "validation": entries[-1].get("validation", {}).get("validation"),
        "error": error,
        "warnings": warnings,
        "decisions": [
            {key: record.get(key) for key in ("decision", "iteration", "dropped", "skip", "reason")}
            for record in decisions
            if record["action"] == "spike-guard"
        ],
        "seconds": time.monotonic() - begin,
    }


def read_runs(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return the runs that were trained so far."""
    if not path.exists():
        return {}
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    return {Cell(run["kind"], run["mode"], run["rate"], run["seed"]): run for run in runs}


def run_all(arguments: Arguments) -> dict[Cell, dict[str, Any]]:
    """Train all runs that are not in the file yet. Return all of them."""
    path = arguments.output / "runs.jsonl"
    for cell in list_cells(arguments):
        # Read again each time, because several processes may train different cells.
        runs = read_runs(path)
        if cell in runs:
            continue
        logged = runs.get(dataclasses.replace(cell, mode="log"))
        if logged is not None and not logged["decisions"]:
            record = {**logged, "mode": cell.mode, "seconds": 0.0}
        else:
            record = run_cell(cell, arguments)
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        print(cell, record["validation"], record["error"], f"{record['seconds']:.0f} s", flush=True)
    return read_runs(path)


# The results


@dataclass(frozen=True)
class Row:
    """The means over the seeds of the runs of one kind and learning rate."""

    kind: str
    rate: float
    losses: dict[str, float]
    """Mode -> validation loss."""
    steps: int
    """Iterations of all seeds."""
    dropped: dict[str, int]
    """Mode -> dropped steps of all seeds. Steps that a rollback skips are not among them."""
    rollbacks: int
    ended: int
    """Runs that ended before their last iteration."""

    def recover(self, mode: str, good: float) -> float:
        """Return the part of the cost of bad data that a mode recovers.

        Args:
            mode: The mode.
            good: Validation loss without the bad data.
        """
        return (self.losses["log"] - self.losses[mode]) / (self.losses["log"] - good)


def summarize(runs: dict[Cell, dict[str, Any]]) -> dict[tuple[str, float], Row]:
    """Return the rows of all kinds whose runs are complete."""
    rows = {}
    for kind, rate in sorted({(cell.kind, cell.rate) for cell in runs}):
        group = {mode: [runs.get(Cell(kind, mode, rate, seed)) for seed in SEEDS] for mode in MODES}
        if any(run is None for each in group.values() for run in each):
            continue
        found = {mode: [run for run in each if run is not None] for mode, each in group.items()}
        every = [run for each in found.values() for run in each]
        rows[kind, rate] = Row(
            kind,
            rate,
            {
                mode: statistics.mean(run["validation"] for run in each)
                for mode, each in found.items()
            },
            sum(len(run["iterations"]) for run in found["log"]),
            {
                mode: sum(record["dropped"] for run in each for record in run["decisions"])
                for mode, each in found.items()
            },
            sum(
                record["decision"] == "rollback"
                for run in found["rollback"]
                for record in run["decisions"]
            ),
            sum(run["error"] is not None for run in every),
        )
    return rows


def format_tables(rows: dict[tuple[str, float], Row]) -> str:
    """Return the tables in Markdown, and the demands that are not met."""
    lines = [
        "| bad data | learning rate | no guard | skip-step | rollback | cost | recovered |"
        " dropped, rolled back |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in BAD_DATA:
        for rate in RATES:
            row = rows.get((kind, rate))
            if row is None:
                continue
            good = rows["constant", rate].losses["log"]
            fewer = rows[FEWER, rate].losses["log"]
            recovered = ", ".join(
                f"{row.recover(mode, good):.0%} ({row.recover(mode, fewer):.0%})"
                for mode in MODES[1:]
            )
            losses = " | ".join(f"{row.losses[mode]:.3f}" for mode in MODES)
            cost = row.losses["log"] - good
            lines.append(
                f"| {kind} | {rate:g} | {losses} | {cost:.3f} | {recovered} |"
                f" {row.dropped['skip-step']}, {row.rollbacks} |"
            )
    lines += [
        "",
        "| good data | learning rate | no guard | skip-step | rollback | steps | dropped |"
        " rolled back | ended |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (kind, rate), row in rows.items():
        if kind in GOOD_DATA:
            losses = " | ".join(f"{row.losses[mode]:.3f}" for mode in MODES)
            lines.append(
                f"| {kind} | {rate:g} | {losses} | {row.steps} | {row.dropped['skip-step']} |"
                f" {row.rollbacks} | {row.ended} |"
            )
    return "\n".join([*lines, "", *list_failures(rows)]) + "\n"


def list_failures(rows: dict[tuple[str, float], Row]) -> list[str]:
    """Return the demands that the results do not meet."""
    failures = []
    for (kind, rate), row in rows.items():
        for mode in MODES[1:]:
            harm = row.losses[mode] - row.losses["log"]
            if harm > MOST_HARM:
                failures.append(f"{kind}, {rate:g}: {mode} costs {harm:.3f}")
            good = rows["constant", rate].losses["log"]
            if kind in COSTLY and row.losses["log"] - good >= LEAST_COST:
                recovered = row.recover(mode, good)
                if recovered < LEAST_RECOVERED:
                    failures.append(f"{kind}, {rate:g}: {mode} recovers {recovered:.0%}")
        if row.ended:
            failures.append(f"{kind}, {rate:g}: {row.ended} runs ended")
    clean = [row for (kind, _), row in rows.items() if kind in GOOD_DATA]
    dropped = sum(row.dropped["skip-step"] for row in clean)
    steps = sum(row.steps for row in clean)
    if dropped * 1000 > steps:
        failures.append(f"{dropped} of {steps} steps with good data were dropped")
    return failures


def draw(runs: dict[Cell, dict[str, Any]], path: Path) -> None:
    """Draw the training loss of a run on random tokens, with and without the guard."""
    figure = make_figure(8, 4)
    axes = figure.subplots()
    axes.axvspan(
        SHORT.bad.start - 0.5, SHORT.bad.stop - 0.5, color="tab:red", alpha=0.12, label="bad data"
    )
    for mode, label in zip(MODES, ("no guard", "skip-step", "rollback"), strict=True):
        run = runs[Cell("random tokens", mode, RATES[1], SEEDS[0])]
        losses = dict(zip(run["iterations"], run["losses"], strict=True))
        # Dropped and skipped iterations are gaps.
        shown = [losses.get(at) for at in range(1, SHORT.iterations + 1)]
        values = [math.nan if loss is None else loss for loss in shown]
        axes.plot(range(1, SHORT.iterations + 1), values, label=f"{label}: {run['validation']:.3f}")
    axes.set(
        xlabel="iteration",
        ylabel="training loss",
        xlim=(230, SHORT.iterations),
        ylim=(5.4, None),
        title="20 iterations of random tokens, and the validation loss at the end",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    arguments.output.mkdir(parents=True, exist_ok=True)
    runs = run_all(arguments)
    rows = summarize(runs)
    if any((kind, RATES[1]) not in rows for kind in ("constant", FEWER)):
        return 0
    tables = format_tables(rows)
    (arguments.output / "table.md").write_text(tables)
    print(tables)
    if not arguments.long:
        draw(runs, arguments.output / "spike_guard.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
