"""The phases of the training data: the mixture and the seed that apply from a position on.

This module has a phase as data, reads the file of --data-phases and finds where each phase begins.

Invariant: a phase begins with an iteration. The data order that a checkpoint records has the real
start of each phase that has started, so a resume with other batch sizes does not move it.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megatron.base.errors import ConfigError
from megatron.base.outside_file import SETTINGS_BYTES, load_text
from megatron.config.data import DataConfig
from megatron.config.fields import all_fields
from megatron.config.yaml_file import compose, get_line, read_items, read_value
from megatron.data.blend import parse_shares
from megatron.data.splits import NamedMixture, find_train_mixture
from megatron.schedule.batch_size import parse_amount
from megatron.schedule.position import Progress, Steps


@dataclass(frozen=True)
class DataPhase:
    """A phase as the file describes it."""

    origin: str
    """Where the file describes it, as in phases.yaml:7. Messages begin with it."""
    data_path: tuple[str, ...] = ()
    """As --data-path. Its documents are divided by --split."""
    train_weighted_split_paths: tuple[str, ...] = ()
    """As --train-weighted-split-paths, instead of `data_path`."""
    seed: int | None = None
    """Seed of the order of samples. None is --seed."""
    from_iteration: int | None = None
    """The first iteration of the phase, from 1."""
    from_tokens: int | None = None
    """The phase begins with the first iteration that starts after this many consumed tokens."""
    datasets: str | None = None
    """As --datasets, for data with --dataset-format."""
    weights: str | None = None
    """As --weights, for data with --dataset-format."""


@dataclass(frozen=True)
class PlannedPhase:
    """A phase whose beginning is known."""

    phase: DataPhase
    first_iteration: int
    start_sample: int
    """Samples that the run has consumed when the phase begins. For a phase that has started, this
    is an estimate: the value of a run whose batch sizes never changed, and at most the position."""
    started: bool
    """Whether the run has reached the start of the phase."""


_FIRST = {"from_iteration": 1, "from_tokens": 0}
"""Key -> the value with which a run starts."""
_STARTS = ("from_iteration", "from_tokens")
_INDEXED_KEYS = (*_STARTS, "data_path", "train_weighted_split_paths", "seed")
_STREAMED_KEYS = (*_STARTS, "datasets", "weights")
_WRONG_KIND = {
    "data_path": "with --dataset-format, name folders below --data-path with datasets and weights",
    "train_weighted_split_paths": "with --dataset-format, use datasets and weights",
    "seed": "with --dataset-format, the whole run has one seed, because each data set continues "
    "in its order",
    "datasets": "it needs --dataset-format",
    "weights": "it needs --dataset-format",
}
"""Keys of the other kind of data -> what to do instead."""


def read_phases(path: str, *, streamed: bool = False) -> tuple[DataPhase, ...]:
    """Read the file of --data-phases, a list of phases.

    Args:
        path: The file.
        streamed: Whether the run has --dataset-format. The phases then have other keys.

    Raises:
        ConfigError: the file cannot be read, or a phase has a wrong key or value. The message lists
            every error.
    """
    try:
        text = load_text(path, SETTINGS_BYTES)
    except OSError as error:
        raise ConfigError(f"--data-phases {path} cannot be read: {error.strerror}.") from error
    root, broken = compose(text, path)
    if broken is not None:
        raise ConfigError(broken)
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        raise ConfigError(
            f"--data-phases {path} must be a list with an item for each phase, as in "
            f"'- {'datasets: web,code' if streamed else 'data_path: data/web'}'."
        )
    errors: list[str] = []
    phases = []
    for node in root.value:
        before = len(errors)
        phase = _read_phase(
            node, path, first=node is root.value[0], streamed=streamed, errors=errors
        )
        if len(errors) == before:
            phases.append(phase)
    _check_order(phases, errors)
    if errors:
        raise ConfigError("\n  - ".join(["--data-phases has errors:", *errors]))
    return tuple(phases)


def _read_phase(
    node: yaml.Node, path: str, *, first: bool, streamed: bool, errors: list[str]
) -> DataPhase:
    """Read one phase. Everything that is wrong with it is added to `errors`."""
    keys = _STREAMED_KEYS if streamed else _INDEXED_KEYS
    origin = f"{path}:{get_line(node)}"
    values: dict[str, Any] = {}
    before = len(errors)
    for key, value in read_items(node, path, "a phase", errors):
        if key.value not in keys:
            errors.append(f"{path}:{get_line(key)} {_describe_wrong_key(key.value, keys)}.")
            continue
        try:
            values[key.value] = _read_key(key.value, value)
        except ValueError as error:
            errors.append(f"{path}:{get_line(value)} {key.value} {error}.")
    # A key with an error counts as missing below, which would be a second message about it.
    if len(errors) > before:
        return DataPhase(origin)
    mixtures = [key for key in ("data_path", "train_weighted_split_paths") if values.get(key)]
    if streamed and not values.get("datasets"):
        errors.append(f"{origin} must have datasets, as in datasets: [web, code].")
    if not streamed and len(mixtures) != 1:
        errors.append(
            f"{origin} must have either data_path or train_weighted_split_paths, and not both."
        )
    starts = [key for key in ("from_iteration", "from_tokens") if values.get(key) is not None]
    if first and any(values[key] > start for key, start in _FIRST.items() if key in starts):
        errors.append(
            f"{origin} is the first phase, so it begins with the run; leave {starts[0]} out."
        )
    if not first and len(starts) != 1:
        errors.append(f"{origin} must have either from_iteration or from_tokens, and not both.")
    return DataPhase(origin, **values)


def _describe_wrong_key(key: str, keys: Sequence[str]) -> str:
    """Return the end of a message about a key that a phase does not have."""
    if key in _WRONG_KIND:
        return f"has the key '{key}', which is for the other kind of data; {_WRONG_KIND[key]}"
    close = difflib.get_close_matches(key, keys, n=1)
    if close:
        return f"has an unknown key '{key}'; perhaps you meant '{close[0]}'"
    return f"has an unknown key '{key}'; the keys of a phase are {', '.join(keys)}"


def _check_order(phases: Sequence[DataPhase], errors: list[str]) -> None:
    """Add an error for each phase that begins no later than an earlier one, in the same unit."""
    for key, latest in _FIRST.items():
        for phase in phases[1:]:
            value = getattr(phase, key)
            if value is None:
                continue
            if value <= latest:
                errors.append(
                    f"{phase.origin}: {key} {value} must be above {latest}, where an earlier phase "
                    "begins; sort the phases."
                )
            latest = max(latest, value)


def _read_key(key: str, node: yaml.Node) -> Any:
    """Return the value of a key of a phase.

    Raises:
        ValueError: the value is wrong. The message continues a sentence that begins with the key.
    """
    if key == "seed":
        field = all_fields()["batch.seed"]
        seed = read_value(field, node)
        if not field.range.contains(seed):
            raise ValueError(f"{seed} must be {field.range.describe()}")
        return seed
    if key in ("from_iteration", "from_tokens"):
        amount = _read_amount(node)
        if amount < _FIRST[key]:
            raise ValueError(f"{amount} must be at least {_FIRST[key]}")
        return amount
    field = all_fields()[f"data.{key}"]
    if key in ("datasets", "weights") and isinstance(node, yaml.SequenceNode):
        # A list in brackets means the same as the flag's value, which has commas.
        entries = [read_value(field, item) for item in node.value]
        if None in entries:
            raise ValueError("has an entry without a value")
        return ",".join(entries)
    return read_value(field, node)


def _read_amount(node: yaml.Node) -> int:
    """Return a number that may have a suffix, as in 7T.

    Raises:
        ValueError: as in `_read_key`.
    """
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("must be a number, as in 500_000 or 7T")
    try:
        return parse_amount(node.value)
    except ValueError as error:
        raise ValueError(f"'{node.value}' must be a number, as in 500_000 or 7T") from error


def find_phase_mixture(data: DataConfig, phase: DataPhase) -> NamedMixture:
    """Return the training data of a phase.

    Raises:
        ConfigError: its paths do not follow their grammar.
    """
    try:
        mixture = find_train_mixture(use_phase(data, phase))
    except ConfigError as error:
        raise ConfigError(f"{phase.origin}: {error}") from error
    # `read_phases` refuses a phase without data.
    assert mixture is not None
    return mixture


def find_phase_shares(data: DataConfig, phase: DataPhase) -> dict[str, float]:
    """Return the share of each streamed data set of a phase.

    Raises:
        ConfigError: its datasets or weights cannot be parsed.
    """
    try:
        return parse_shares(use_phase(data, phase))
    except ConfigError as error:
        raise ConfigError(f"{phase.origin}: {error}") from error


def check_phase_data(data: DataConfig, phase: DataPhase) -> None:
    """Check that the data of a phase can be parsed.

    Raises:
        ConfigError: they cannot.
    """
    if data.dataset_format is not None:
        find_phase_shares(data, phase)
    else:
        find_phase_mixture(data, phase)


def use_phase(data: DataConfig, phase: DataPhase) -> DataConfig:
    """Return the data section with the training data of a phase."""
    if data.dataset_format is not None:
        return dataclasses.replace(
            data, data_phases=None, datasets=phase.datasets, weights=phase.weights
        )
    return dataclasses.replace(
        data,
        data_phases=None,
        data_path=phase.data_path,
        train_weighted_split_paths=phase.train_weighted_split_paths,
    )


def select_phases(
    phases: Sequence[PlannedPhase], train_samples: int | None
) -> Sequence[PlannedPhase]:
    """Return the present phase and those after it that are read.

    Args:
        phases: All phases. There is at least one.
        train_samples: Samples of the run, or None if the number is not known in advance.
    """
    # The data of phases that are over may have been removed.
    present = max(0, sum(planned.started for planned in phases) - 1)
    # A phase after the last sample is not read. The plan warns about it.
    ahead = [
        planned
        for planned in phases[present:]
        if train_samples is None or planned.start_sample < train_samples
    ]
    return ahead or [phases[present]]


def plan_phases(
    phases: Sequence[DataPhase], steps: Steps, position: Progress
) -> tuple[PlannedPhase, ...]:
    """Return the phases with their first iterations and first samples.

    Args:
        phases: The phases in the order of the file.
        steps: Batch size and sequence length of each iteration.
        position: What the run has consumed.

    Raises:
        ConfigError: a phase does not begin after the one before it.
    """
    planned: list[PlannedPhase] = []
    for phase in phases:
        found = _plan_phase(phase, steps, position)
        before = planned[-1] if planned else found
        if found.started and before.started:
            # Their starts are estimates from the present sizes of iterations. These may put them in
            # another order than the run had.
            found = dataclasses.replace(
                found,
                first_iteration=max(found.first_iteration, before.first_iteration),
                start_sample=max(found.start_sample, before.start_sample),
            )
        elif found.first_iteration <= before.first_iteration:
            raise ConfigError(
                f"{phase.origin}: the phase begins with iteration {found.first_iteration}, and the "
                f"one before it with iteration {before.first_iteration}; sort the phases, and "
                "let each begin with an iteration of its own."
            )
        planned.append(found)
    return tuple(planned)


def _plan_phase(phase: DataPhase, steps: Steps, position: Progress) -> PlannedPhase:
    if phase.from_tokens is not None:
        started = phase.from_tokens <= position.tokens
    else:
        started = (phase.from_iteration or 1) <= position.iteration + 1
    # For a phase that has started, this estimate is enough. The checkpoint records the real start,
    # and a resume keeps it.
    start = position
    if started:
        start = Progress()
    if phase.from_tokens is not None:
        at = steps.find_tokens(start, phase.from_tokens)
    else:
        at = steps.find_iteration(start, (phase.from_iteration or 1) - 1)
    if started:
        first = min(at.iteration, position.iteration) + 1
        return PlannedPhase(phase, first, min(at.samples, position.samples), started)
    return PlannedPhase(phase, at.iteration + 1, at.samples, started)
