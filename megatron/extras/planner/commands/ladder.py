"""Train small models, fit a law to their losses, and foretell the loss of a large one.

    python tools/ladder.py check -- --config base.yaml --parametrization mup
    python tools/ladder.py run ladder.yaml
    python tools/ladder.py fit ladder.yaml
    python tools/ladder.py predict ladder.yaml -- --config large.yaml
    python tools/ladder.py design ladder.yaml --depth 12 --write large.yaml

`check` shows whether a learning rate of a small model is right for larger ones. `run` trains what
is not complete yet, one run after the other. `design` chooses everything from a number of layers.
`fit`, `predict` and `design` also read a CSV file with the columns parameters, tokens and loss.
docs/ladder.md describes the files and the law.
"""

import json
import math
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tqdm import tqdm

from megatron.base import exit_codes
from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError, DataError
from megatron.base.plain_text import format_count, print_line, print_to_stderr
from megatron.console.parse import parse_arguments, split_at_double_dash
from megatron.console.run_tool import run_tool
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.operations.chronicle.records import (
    PredictedLoss,
    write_predicted_loss,
)
from megatron.extras.planner.ladder.prediction import (
    Fit,
    Prediction,
    build_json,
    design,
    find_optimal_tokens,
    fit_rows,
    predict,
)
from megatron.extras.planner.ladder.runs import (
    LadderRow,
    Rung,
    count_inner_parameters,
    read_common_flags,
    read_ladder,
    read_result,
    read_table,
    train,
    write_table,
)
from megatron.plan.resolve import resolve

if TYPE_CHECKING:
    from megatron.extras.planner.ladder.coordinates import Slope


@dataclass(frozen=True)
class RunRungs:
    """Train the runs that are not complete, the smallest first."""

    ladder: tyro.conf.Positional[str]
    """The YAML file of the ladder."""
    only: int | None = None
    """Train only the run with this number, as in a job array: --only $SLURM_ARRAY_TASK_ID."""
    list: bool = False
    """Print the runs with their numbers, and train nothing."""
    submit: str | None = None
    """Submit what is not complete as a job array, with these arguments of sbatch, such as
    --submit="--gpus=1 --time=4:00:00"."""


@dataclass(frozen=True)
class FitLaw:
    """Fit the law to the results, and show how far each run is from it."""

    results: tyro.conf.Positional[str]
    """The YAML file of the ladder, or a CSV file of results."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class PredictLoss:
    """Foretell the loss of a run: give --parameters and --tokens, or its flags after --."""

    results: tyro.conf.Positional[str]
    """The YAML file of the ladder, or a CSV file of results."""
    parameters: float | None = None
    """Parameters of the run, without the embedding and the output matrix."""
    tokens: float | None = None
    """Tokens of its training. Default: those with which the model uses its compute best."""
    run: str | None = None
    """The --save folder of the run, with its flags after --. The prediction is stored there, and
    tools/chronicle.py draws it beside the real loss and says when the loss leaves the range."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class DesignRun:
    """Choose a complete configuration from a number of layers. Flags after -- win."""

    depth: int
    """Number of layers. Width, feed-forward, batch, length and rates follow from it."""
    results: tyro.conf.Positional[str | None] = None
    """The YAML file of a ladder, whose flags are kept, or a CSV file of results. Without one, all
    choices are those of published rules, and no loss is foretold."""
    tokens_per_parameter: float = 20.0
    """Tokens of the training for each parameter, without the embedding and the output matrix."""
    write: str | None = None
    """Write the configuration into this YAML file."""


@dataclass(frozen=True)
class CheckCoordinates:
    """Train larger models for a few steps, and show whether their activations change more.

    The flags after -- describe the base model. The models are up to 8 times as wide and 4 times as
    deep, so give a small one.
    """

    seeds: int = 4
    """Number of seeds."""
    picture: str | None = None
    """Draw the sizes into this file, such as check.png."""
    json: bool = False
    """Print JSON."""


Arguments = (
    Annotated[CheckCoordinates, tyro.conf.subcommand("check")]
    | Annotated[RunRungs, tyro.conf.subcommand("run")]
    | Annotated[FitLaw, tyro.conf.subcommand("fit")]
    | Annotated[PredictLoss, tyro.conf.subcommand("predict")]
    | Annotated[DesignRun, tyro.conf.subcommand("design")]
)


def main(argv: list[str] | None = None) -> int:
    """Do what `argv` asks for and return the exit code."""
    own, training = split_at_double_dash(sys.argv[1:] if argv is None else argv)
    kinds: Any = Arguments
    given: CheckCoordinates | RunRungs | FitLaw | PredictLoss | DesignRun
    given = parse_arguments(kinds, args=own, prog="ladder.py", description=__doc__)

    def act() -> int:
        if isinstance(given, CheckCoordinates):
            return _check(given, training or [])
        if isinstance(given, DesignRun):
            return _design(given, training or [])
        if training and not isinstance(given, PredictLoss):
            raise ConfigError("flags after -- are those of check, predict and design.")
        if isinstance(given, RunRungs):
            return _run(given)
        # The other two begin with the fit.
        fitted = _fit(given.results)
        found = None
        if isinstance(given, PredictLoss):
            found = _predict(given, fitted, training or [])
        if given.json:
            print_line(json.dumps(build_json(fitted, found), indent=1))
        else:
            print_line(_describe_fit(fitted) if found is None else _describe(fitted, found))
        return 0

    return run_tool(act)


def _check(given: CheckCoordinates, training: list[str]) -> int:
    """Print the slopes. The exit code says whether a change grows."""
    # torch, which the other commands do without.
    from megatron.extras.planner.ladder import coordinates

    if given.seeds < 1:
        raise ConfigError(f"--seeds {given.seeds} must be at least 1.")
    config = load_config(training).config
    # Neighbouring seeds give independent weights.
    seeds = [config.batch.seed + number for number in range(given.seeds)]
    count = sum(map(len, coordinates.RATIOS.values())) * len(seeds)
    found = tqdm(coordinates.measure(config, seeds), "models", count, file=sys.stderr)
    slopes = coordinates.fit_slopes(list(found))
    if given.picture is not None:
        coordinates.draw(slopes, Path(given.picture))
    if given.json:
        print_line(json.dumps([{**asdict(s), "verdict": s.verdict} for s in slopes], indent=1))
    else:
        print_line(_describe_slopes(slopes, coordinates.describe_base(config.model)))
    # muP makes no promise about the depth.
    promised = {"mup": {"width"}}.get(config.model.parametrization, {"width", "depth"})
    grows = any(each.verdict == "grows" and each.direction in promised for each in slopes)
    return exit_codes.FOUND if grows else 0


def _describe_slopes(slopes: "list[Slope]", base: str) -> str:
    """Return a table of slopes."""
    lines = [base, f"{'':6} {'part':16} {'size':13} {'slope':>6}"]
    for each in slopes:
        sizes = " ".join(f"{size:9.3g}" for size in each.sizes)
        row = f"{each.direction:6} {each.part:16} {each.what:13} {each.slope:+6.2f} {sizes}"
        # Sizes at the start are not judged.
        lines.append(f"{row}  {each.verdict}".rstrip())
    lines.append("slope: of the logarithm of the size, by that of width or depth")
    return "\n".join(lines)


def _design(given: DesignRun, training: list[str]) -> int:
    """Print each choice with its reason, and write the configuration."""
    # Before the fit, which may take a minute.
    if given.write is not None and not Path(given.write).absolute().parent.is_dir():
        raise ConfigError(f"--write {given.write}: its folder does not exist.")
    if given.write is not None and Path(given.write).exists():
        raise ConfigError(f"--write {given.write} exists. Give another name, or delete the file.")
    fitted = None
    flags: list[str] = []
    if given.results is not None:
        fitted = _fit(given.results)
        # A table of results has no flags.
        if Path(given.results).suffix != ".csv":
            flags = read_common_flags(given.results)
    found = design(
        given.depth,
        given.tokens_per_parameter,
        [*flags, *training],
        fitted,
        keep_architecture=bool(flags),
    )
    for choice in found.choices:
        print_line(f"{choice.flags}\n    {choice.reason}")
    print_line(f"{found.parameters:,} parameters and {found.tokens:,} tokens")
    if fitted is not None:
        print_line(_describe(fitted, predict(fitted, found.parameters, found.tokens)))
    if given.write is not None:
        replace_file(Path(given.write), found.write())
        print_line(f"next: python tools/plan.py --config {given.write}")
    return 0


def _submit(given: RunRungs, numbers: list[int]) -> int:
    """Submit runs as a job array."""
    command = [*shlex.split(given.submit or ""), f"--array={','.join(map(str, numbers))}"]
    # The task has the interpreter of this environment.
    own = shlex.join([sys.executable, os.path.abspath(sys.argv[0]), "run", given.ladder])
    task = f"{own} --only $SLURM_ARRAY_TASK_ID"
    try:
        return subprocess.run(["sbatch", *command, f"--wrap={task}"], check=False).returncode
    except OSError as error:
        raise ConfigError(f"--submit needs the command sbatch: {error}.") from error


def _run(given: RunRungs) -> int:
    rungs = read_ladder(given.ladder)
    if given.submit is not None:
        left = [number for number, rung in enumerate(rungs) if read_result(rung) is None]
        # A ladder that is complete needs no job.
        if not left:
            return 0
        return _submit(given, left)
    if given.only is not None and not 0 <= given.only < len(rungs):
        raise ConfigError(f"--only {given.only} must be one of 0 to {len(rungs) - 1}.")
    failed = 0
    for number, rung in enumerate(rungs):
        # An earlier call, or another task of the array, may have trained it.
        done = read_result(rung)
        if given.list or done is not None:
            state = "not complete" if done is None else f"loss {done.loss:.4f}"
            print_line(f"{number:3} {rung.name}: {state}")
        elif given.only in (None, number):
            print_line(f"{number:3} {rung.name}: training, see {rung.folder / 'log.txt'}")
            try:
                print_line(f"    loss {train(rung).loss:.4f}")
            # The other runs may succeed.
            except DataError as error:
                failed += 1
                print_to_stderr(f"error: {error}")
    # Tasks of a job array collect what the others have finished.
    rows = _collect(rungs)
    if rows and not given.list:
        path = rungs[0].folder.parent / "results.csv"
        write_table(path, rows)
        print_line(f"{len(rows)} of {len(rungs)} runs are complete: {path}")
    return exit_codes.FOUND if failed else 0


def _collect(rungs: list[Rung]) -> list[LadderRow]:
    return [row for rung in rungs if (row := read_result(rung)) is not None]


def _read_rows(path: str) -> tuple[list[LadderRow], str]:
    """Return the results of a file, or those that the runs of a ladder have so far.

    The second value is the parametrization of the runs. A table of results does not have it.

    Raises:
        DataError: No run is complete.
    """
    # Results of other programs, and published ones.
    if Path(path).suffix == ".csv":
        return read_table(path), "standard"
    rungs = read_ladder(path)
    rows = _collect(rungs)
    if len(rows) < len(rungs):
        print_to_stderr(f"note: {len(rungs) - len(rows)} of {len(rungs)} runs are not complete")
    if not rows:
        raise DataError(f"no run of {path} is complete. Start them with: ladder.py run {path}")
    # `flags` of the ladder gives it for all runs.
    config = load_config(list(rungs[0].argv)).config
    return rows, config.model.parametrization


def _fit(path: str) -> Fit:
    """Return the fit of a ladder or of a CSV file. Runs that diverged are left out, with a note."""
    found, parametrization = _read_rows(path)
    rows = [row for row in found if math.isfinite(row.loss)]
    if len(rows) < len(found):
        print_to_stderr(f"note: {format_count(len(found) - len(rows), 'run')} with no finite loss")
    return fit_rows(rows, parametrization)


def _predict(given: PredictLoss, fitted: Fit, training: list[str]) -> Prediction:
    """Return the prediction for the run that the command line describes.

    Raises:
        ConfigError: Its size is given twice or not at all, or its flags have errors.
    """
    parameters, tokens = given.parameters, given.tokens
    plan = None
    if training:
        if parameters is not None:
            raise ConfigError("--parameters and flags after -- are both given. Keep one.")
        plan = resolve(load_config(training).config, 1)
        parameters = count_inner_parameters(plan)
        tokens = tokens or plan.train_tokens or None
    if parameters is None or parameters <= 0 or (tokens is not None and tokens <= 0):
        raise ConfigError(
            "give the size of the run: its flags after --, or --parameters and --tokens, both "
            "above 0."
        )
    # A question about a size alone is one about its best use.
    if tokens is None:
        tokens = find_optimal_tokens(fitted, parameters)
    if tokens is None:
        raise ConfigError(
            "the runs of the ladder do not say how many tokens are best for this size: give "
            "--tokens."
        )
    found = predict(fitted, parameters, tokens)
    # The chronicle judges the end of the run, so its length must be known.
    if given.run is not None:
        if plan is None:
            raise ConfigError("--run needs the flags of the run after --.")
        kept = PredictedLoss(plan.train_iters, found.loss, found.low, found.high)
        write_predicted_loss(Path(given.run), kept)
    return found


def _describe_fit(fitted: Fit) -> str:
    """Return the law, and its distance from each run."""
    law, runs = fitted.law, fitted.runs
    lines = [
        f"loss = {law.e:.4g} + {law.a_factor:.4g} / N^{law.a:.3f} "
        f"+ {law.b_factor:.4g} / D^{law.b:.3f}",
        f"runs differ from it by {fitted.noise:.2%} (root mean square)",
    ]
    if fitted.seeds is not None:
        lines.append(f"a loss differs by {fitted.seeds:.4f} between seeds (standard deviation)")
    lines.append(f"{'parameters':>14} {'tokens':>16} {'loss':>8} {'law':>8} {'difference':>10}")
    predicted = law.predict(runs.parameters, runs.tokens)
    table = zip(runs.parameters, runs.tokens, runs.loss, predicted, strict=True)
    for size, tokens, loss, found in table:
        numbers = f"{loss:8.4f} {found:8.4f} {found / loss - 1:+10.2%}"
        lines.append(f"{size:14,.0f} {tokens:16,.0f} {numbers}")
    return "\n".join(lines)


def _describe(fitted: Fit, found: Prediction) -> str:
    """Return a prediction for people."""
    rows = {
        "parameters": f"{found.parameters:,.0f} without the embedding and the output matrix",
        "tokens": f"{found.tokens:,.0f}, {found.tokens / found.parameters:.3g} for each parameter",
        "loss": f"{found.loss:.4f}, between {found.low:.4f} and {found.high:.4f} (95 %)",
        "best use of compute": "not known, as it is far from the runs of the ladder",
        "learning rate": f"{found.lr:.3g}, from {found.lr_reason}",
        "batch": f"{found.batch_tokens:,.0f} tokens, by the published step law",
        "law": f"of {len(fitted.runs.loss)} runs, which differ from it by {fitted.noise:.2%}",
    }
    if found.optimal_tokens is not None:
        rows["best use of compute"] = f"{found.optimal_tokens:,.0f} tokens"
    lines = [f"{name:20} {value}" for name, value in rows.items()]
    if found.warning is not None:
        lines.append(f"warning: {found.warning}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
