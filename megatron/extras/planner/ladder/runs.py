"""The runs of a ladder: small models that are trained with the same flags, and their losses.

Invariant: a run that is complete is not trained again, and one that was interrupted is resumed.
"""

import csv
import io
import itertools
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import SETTINGS_BYTES, load_text
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.ladder.law import Runs
from megatron.model.flops import count_word_embedding_parameters
from megatron.observe.metrics import read_metrics
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

_KEYS = {"folder", "flags", "rungs", "seeds"}
_RUNG_KEYS = {"flags", "tokens", "lr"}
_OWN_FLAGS = ("--train-iters", "--train-samples", "--save", "--load", "--seed", "--lr")
"""Flags that the ladder sets."""
_NEAR = 5
"""Number of rates around the best one that the parabola is fitted to."""
_FLAGS = "flags.json"
"""File with the flags of a run, in its folder."""
_COLUMNS = ("name", "parameters", "tokens", "lr", "seed", "loss")


@dataclass(frozen=True)
class LadderRun:
    """What tells one run of a ladder from the others."""

    name: str
    parameters: float
    """N, without the embedding and the output matrix."""
    tokens: float
    lr: float
    seed: int


@dataclass(frozen=True)
class Rung(LadderRun):
    """One run of a ladder."""

    iterations: int
    argv: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class LadderRow(LadderRun):
    """The result of a run."""

    loss: float


def read_ladder(path: str) -> list[Rung]:
    """Return the runs that a file describes, the smallest first.

    Raises:
        ConfigError: The file is wrong, or a run has errors. The message has all of them.
    """
    found, common = _read_file(path)
    rungs: list[Rung] = []
    errors: list[str] = []
    for number, rung in enumerate(found["rungs"]):
        if not isinstance(rung, dict) or {*rung} != _RUNG_KEYS:
            raise ConfigError(f"{path}: rung {number} must have the keys flags, tokens and lr.")
        flags = [*common, *_split_flags(path, rung["flags"])]
        try:
            rungs += _build_rungs(flags, rung, found.get("seeds", [1234]), Path(found["folder"]))
        except (ConfigError, TypeError, ValueError) as error:
            errors.append(f"rung {number}: {error}")
    if errors:
        raise ConfigError("\n  ".join([f"{path} has errors:", *errors]))
    names = [rung.name for rung in rungs]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path} describes the run {twice} twice. Each needs its own size.")
    return sorted(rungs, key=lambda rung: rung.parameters * rung.tokens)


def read_common_flags(path: str) -> list[str]:
    """Return the flags that all runs of a ladder have.

    Raises:
        ConfigError: The file is wrong.
    """
    return _read_file(path)[1]


def _read_file(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return what a file has, and the flags of all runs."""
    try:
        found = yaml.safe_load(load_text(path, SETTINGS_BYTES))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a ladder: {error}") from error
    if not isinstance(found, dict) or {*found} - _KEYS or {"folder", "flags", "rungs"} - {*found}:
        raise ConfigError(f"{path} must have the keys folder, flags and rungs, and may have seeds.")
    if not isinstance(found["rungs"], list):
        raise ConfigError(f"{path}: rungs is {found['rungs']!r}, and must be a list of rungs.")
    common = _split_flags(path, found["flags"])
    # They would be given twice, and the later one would win.
    own = [flag for flag in common if flag.partition("=")[0] in _OWN_FLAGS]
    if own:
        raise ConfigError(f"{path}: flags has {' '.join(own)}, which the ladder sets for each run.")
    return found, common


def _split_flags(path: str, flags: object) -> list[str]:
    """Return the words of flags, as a shell would.

    Raises:
        ConfigError: A quotation is not closed.
    """
    try:
        return shlex.split(str(flags))
    except ValueError as error:
        raise ConfigError(f"{path}: the flags {flags!r} cannot be read: {error}.") from error


def _build_rungs(
    flags: list[str], rung: dict[str, Any], seeds: Sequence[int], folder: Path
) -> Iterator[Rung]:
    """Yield the runs of one size.

    Raises:
        ConfigError: A run has errors.
    """
    lists = [
        value if isinstance(value, list) else [value] for value in (rung["tokens"], rung["lr"])
    ]
    for tokens, lr, seed in itertools.product(*lists, seeds):
        # Sequence length and batch size are needed for the number of samples.
        plan = resolve(load_config([*flags, "--train-samples", "1000000"]).config, 1)
        length, batch = plan.config.model.seq_length, plan.batch_size.final
        samples = max(1, round(float(tokens) / length / batch)) * batch
        own = ["--train-samples", str(samples), "--lr", str(lr), "--seed", str(seed)]
        plan = resolve(load_config([*flags, *own]).config, 1)
        plan.raise_on_errors()
        size = count_inner_parameters(plan)
        # The name has all that tells two runs apart, and finds the folder again.
        name = f"n{size}-d{samples * length}-lr{float(lr):g}-s{seed}"
        where = folder / name
        paths = ["--save", str(where), "--load", str(where)]
        argv = (*flags, *own, *paths)
        yield Rung(
            name, size, samples * length, float(lr), int(seed), plan.train_iters, argv, where
        )


def count_inner_parameters(plan: Plan) -> int:
    """Return N: the parameters without the word embedding and the output matrix."""
    # An untied output matrix is as large as the embedding.
    tables = 1 + plan.config.model.untie_embeddings_and_output_weights
    return plan.parameters - tables * count_word_embedding_parameters(plan.shape)


def _write_flags(rung: Rung) -> str:
    """Return the flags of a run as JSON."""
    return json.dumps(rung.argv) + "\n"


def train(rung: Rung) -> LadderRow:
    """Train a run, or resume it, and return its result. Its output goes to log.txt in its folder.

    Raises:
        DataError: The run failed.
    """
    # The run itself resumes from its last checkpoint.
    rung.folder.mkdir(parents=True, exist_ok=True)
    replace_file(rung.folder / _FLAGS, _write_flags(rung))
    log = rung.folder / "log.txt"
    # A process of its own, so that a crash does not end the ladder.
    command = [sys.executable, "-m", "megatron.commands.pretrain", *rung.argv]
    with log.open("ab") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        # The last line of a log is the error.
        lines = load_text(log, decoding="replace").strip().splitlines()
        raise DataError(f"{rung.name} failed ({log}): {''.join(lines[-1:])}")
    found = read_result(rung)
    if found is None:
        raise DataError(
            f"{rung.name} has no validation loss ({log}). Give a --split with a part for it, and "
            "--eval-iters above 0."
        )
    return found


def read_result(rung: Rung) -> LadderRow | None:
    """Return the result of a run, or None if it is not complete.

    Raises:
        ConfigError: The run was trained with other flags.
    """
    path = rung.folder / "metrics.jsonl"
    # The loss of other flags would be a wrong point of the law. A start that failed has no metrics,
    # and may be tried again with other flags.
    flags = rung.folder / _FLAGS
    if (
        path.is_file()
        and flags.is_file()
        and load_text(flags, decoding="replace") != _write_flags(rung)
    ):
        raise ConfigError(
            f"the flags of {rung.name} are not those of its training ({flags}). Restore them, or "
            "give the ladder another folder."
        )
    losses = []
    if path.exists():
        losses = [
            float(next(iter(entry["validation"].values())))
            for entry in read_metrics(path)
            if entry["iteration"] == rung.iterations and entry.get("validation")
        ]
    # A run evaluates when it is complete.
    if not losses:
        return None
    return LadderRow(rung.name, rung.parameters, rung.tokens, rung.lr, rung.seed, losses[-1])


def write_table(path: Path, rows: Sequence[LadderRow]) -> None:
    """Write the results as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    replace_file(path, text.getvalue())


def read_table(path: str) -> list[LadderRow]:
    """Return the results in a CSV file. Of the columns, name, lr and seed may be missing.

    Raises:
        DataError: It cannot be read, or a number is missing.
    """
    try:
        found = list(csv.DictReader(load_text(path).splitlines()))
        return [
            LadderRow(
                row.get("name", str(number)), float(row["parameters"]), float(row["tokens"]),
                float(row.get("lr", "nan")), int(row.get("seed", 0)), float(row["loss"]),
            )
            for number, row in enumerate(found)
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = "a value is no number"
        if isinstance(error, OSError):
            reason = str(error)
        elif isinstance(error, KeyError):
            reason = f"it has no column {error.args[0]}"
        raise DataError(
            f"{path} cannot be read as results: {reason}. It must be CSV with numbers in the "
            "columns parameters, tokens and loss."
        ) from error


def _group(rows: Sequence[LadderRow]) -> dict[tuple[float, float], dict[float, list[float]]]:
    """Return the losses of all seeds by parameters and tokens, and by rate."""
    losses: dict[tuple[float, float], dict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        losses[row.parameters, row.tokens][row.lr].append(row.loss)
    return losses


def choose_best(rows: Sequence[LadderRow]) -> Runs:
    """Return a run for each size and number of tokens: that with the best rate, over its seeds."""
    # The mean over seeds, so that a lucky seed does not choose the rate.
    best = [(*key, min(map(mean, of_rates.values()))) for key, of_rates in _group(rows).items()]
    columns = np.array(best, float).reshape(-1, 3).T
    return Runs(*columns)


def measure_seeds(rows: Sequence[LadderRow]) -> float | None:
    """Return the standard deviation of a loss over seeds, or None without two seeds of a run."""
    groups: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.parameters, row.tokens, row.lr].append(row.loss)
    several = [np.var(each, ddof=1) for each in groups.values() if len(each) > 1]
    if not several:
        return None
    return float(np.sqrt(np.mean(several)))


def find_rates(rows: Sequence[LadderRow]) -> dict[tuple[float, float], float]:
    """Return the best rate of each size and number of tokens with three rates or more.

    It is the minimum of a parabola in the logarithm of the rate, within the rates around the best
    one that were tried.
    """
    rates = {}
    for key, of_rates in _group(rows).items():
        # Results of other programs may have no rates.
        if len(of_rates) < 3 or not np.isfinite([*of_rates]).all():
            continue
        # Losses near the best rate are a parabola in the logarithm of the rate.
        tried = sorted(of_rates)
        losses = [mean(of_rates[rate]) for rate in tried]
        best = int(np.argmin(losses))
        # At an end of the rates, the window has as many of them.
        first = max(0, min(best - _NEAR // 2, len(tried) - _NEAR))
        near = slice(first, first + _NEAR)
        x = np.log(tried[near])
        square, slope, _ = np.polyfit(x, losses[near], 2)
        # Otherwise the rates show no minimum.
        if square > 0:
            rates[key] = float(np.exp(np.clip(-slope / (2 * square), x[0], x[-1])))
    return rates
