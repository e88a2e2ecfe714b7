"""Choice of the data sets and documents for training, validation and test.

This module parses --data-path, --split and --*-weighted-split-paths.

Invariant: parsing reads no data. A `SplitPart` becomes a range of documents when their number is
known.

Source: the BigScience fork of Megatron-DeepSpeed.
"""

import dataclasses
import math
import shlex
from typing import Literal

from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_text
from megatron.config.data import DataConfig

GRAMMAR = (
    "'NAME: WEIGHT START:END PATH, WEIGHT START:END PATH, ...', "
    "as in 'train: 0.7 0:0.95 data/en, 0.3 0:0.95 data/fr'"
)

_MANY = 10**15
"""A number of documents so large that each share above 0 gets some."""


@dataclasses.dataclass(frozen=True)
class SplitPart:
    """One data set of a mixture, with its weight and the part of its documents."""

    weight: float
    prefix: str
    split: str
    """START:END as fractions of the documents, or the proportions of --split."""
    piece: int | None = None
    """Number of the piece of --split, 0 to 2. None for START:END."""

    def select_documents(self, count: int) -> tuple[int, int]:
        """Return the range [first, last) of `count` documents.

        Raises:
            ConfigError: the split does not follow its grammar.
        """
        if self.piece is None:
            return parse_range_bounds(self.split, count)
        # --split gives all three pieces at once.
        bounds = compute_split_bounds(self.split, count)
        return bounds[self.piece], bounds[self.piece + 1]

    @property
    def is_unused(self) -> bool:
        """Whether the split gives nothing to this part, as the last number of 95,5,0."""
        first, last = self.select_documents(_MANY)
        return first == last


@dataclasses.dataclass(frozen=True)
class NamedMixture:
    """A weighted mixture, with the name that it has in logs."""

    name: str
    parts: tuple[SplitPart, ...]


def find_train_mixture(data: DataConfig) -> NamedMixture | None:
    """Return the training data, or None if none are configured.

    Raises:
        ConfigError: a flag does not follow its grammar, or several mixtures are given.
    """
    mixtures = _read_mixtures(data, "train", 0)
    if len(mixtures) > 1:
        names = ", ".join(mixture.name for mixture in mixtures)
        raise ConfigError(
            f"--train-weighted-split-paths names {len(mixtures)} mixtures ({names}); training "
            "takes one. Join them with commas."
        )
    if mixtures:
        return mixtures[0]
    return None


def find_evaluation_mixtures(
    data: DataConfig, which: Literal["valid", "test"]
) -> tuple[NamedMixture, ...]:
    """Return the validation sets or the test sets.

    If --data-path and --split give the set, it is the only one, named "validation" or "test".

    Raises:
        ConfigError: a flag does not follow its grammar.
    """
    return _read_mixtures(data, which, 1 if which == "valid" else 2)


def parse_split(split: str) -> list[float] | None:
    """Return the proportions of a --split, or None if they are not one to three valid numbers."""
    try:
        # Slashes separate numbers too, as in Megatron-LM.
        shares = [float(share) for share in split.replace("/", ",").split(",")]
    except ValueError:
        return None
    valid = all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
    return shares if valid and len(shares) <= 3 else None


def compute_split_bounds(split: str, count: int) -> tuple[int, int, int, int]:
    """Return the bounds of the training, validation and test documents for a --split.

    Args:
        split: Proportions such as "949,50,1". Missing ones are 0.
        count: Number of documents.

    Returns:
        Four bounds. Piece i has the documents [bounds[i], bounds[i + 1]).

    Raises:
        ConfigError: `split` is anything else.
    """
    shares = parse_split(split)
    if shares is None:
        raise ConfigError(
            f"--split {split!r} must be up to three numbers, as in 949,50,1, none negative and not "
            "all 0."
        )
    total = sum(shares)
    bounds = [0]
    # Missing proportions are 0, so "1" uses everything for training.
    for share in [*shares, 0.0, 0.0][:3]:
        bounds.append(bounds[-1] + round(share / total * float(count)))
    # Each piece is rounded on its own, so the sum may differ from `count`. As in the reference, the
    # difference moves all bounds but the first. Other rounding would change the data order.
    excess = bounds[-1] - count
    train, valid_end, end = (max(0, bound - excess) for bound in bounds[1:])
    return 0, train, valid_end, end


def parse_range_bounds(text: str, count: int) -> tuple[int, int]:
    """Return the bounds of the documents for a range such as "0:0.95".

    Raises:
        ConfigError: `text` is anything else.
    """
    try:
        start, end = (float(bound) for bound in text.split(":"))
    except ValueError:
        # Not two numbers. This pair fails the check below, which reports the mistake.
        start = 1.0
        end = 0.0
    if not 0 <= start < end <= 1:
        raise ConfigError(
            f"the range {text!r} must be START:END with 0 <= START < END <= 1, as in 0:0.95."
        )
    return round(start * float(count)), round(end * float(count))


def parse_data_path(values: tuple[str, ...]) -> tuple[tuple[float, str], ...]:
    """Return pairs of weight and path for PATH or WEIGHT PATH WEIGHT PATH ...

    Raises:
        ConfigError: the values are neither of both, or a weight is not positive.
    """
    if len(values) == 1:
        return ((1.0, values[0]),)
    if len(values) % 2:
        raise ConfigError(
            f"--data-path has {len(values)} values; give one path, or pairs: WEIGHT PATH WEIGHT "
            "PATH ..."
        )
    return tuple(
        (_parse_weight(weight, f"--data-path ... {weight} {path}"), path)
        for weight, path in zip(values[::2], values[1::2], strict=True)
    )


def parse_weighted_split_paths(text: str) -> NamedMixture:
    """Return the mixture of one argument of --*-weighted-split-paths.

    Raises:
        ConfigError: the argument does not follow the grammar, which the message gives.
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon or not name or len(name.split()) > 1:
        raise ConfigError(
            f"{text!r} does not begin with a NAME and a colon; the form is {GRAMMAR}."
        )
    parts = []
    for entry in rest.split(","):
        # Only two splits, because a path may contain spaces.
        fields = entry.split(maxsplit=2)
        if len(fields) != 3 or ":" not in fields[1]:
            raise ConfigError(
                f"{entry.strip()!r} in {name!r} is not WEIGHT START:END PATH; the form is "
                f"{GRAMMAR}."
            )
        # Only checked here. The number of documents is not known yet.
        parse_range_bounds(fields[1], 1)
        parts.append(
            SplitPart(
                _parse_weight(fields[0], f"{name}: {entry.strip()}"), fields[2].strip(), fields[1]
            )
        )
    return NamedMixture(name, tuple(parts))


def read_weighted_split_paths(path: str) -> tuple[str, ...]:
    """Return the arguments in a file, quoted as on a command line or one in each line.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        # Quoted arguments may contain line ends, so they are split as on a command line.
        text = load_text(path).strip()
        if text[:1] in ("'", '"'):
            return tuple(shlex.split(text))
        return tuple(line for line in text.splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as weighted split paths ({error}). It must hold what the flag "
            f"takes: {GRAMMAR}."
        ) from error


def _read_mixtures(data: DataConfig, which: str, piece: int) -> tuple[NamedMixture, ...]:
    """Return the mixtures of one kind, from whichever flag gives them."""
    given: tuple[str, ...] = getattr(data, f"{which}_weighted_split_paths")
    path: str | None = getattr(data, f"{which}_weighted_split_paths_path")
    # A file may be empty.
    if (given or path is not None) and (weighted := _read_weighted(data, which, given, path)):
        return weighted
    if not data.data_path:
        return ()
    name = ("train", "validation", "test")[piece]
    return (
        NamedMixture(
            name,
            tuple(
                SplitPart(weight, prefix, data.split, piece)
                for weight, prefix in parse_data_path(data.data_path)
            ),
        ),
    )


def _read_weighted(
    data: DataConfig, which: str, given: tuple[str, ...], path: str | None
) -> tuple[NamedMixture, ...]:
    """Return the mixtures of --*-weighted-split-paths, or of the file of its -path."""
    flag = f"--{which}-weighted-split-paths"
    if given and path is not None:
        raise ConfigError(f"{flag} and {flag}-path {path} are both given; keep one.")
    # A file keeps long mixtures out of the command line.
    if path is not None:
        given = read_weighted_split_paths(path)
    if given and data.data_path:
        raise ConfigError(f"{flag} and --data-path are both given; keep one.")
    try:
        mixtures = tuple(parse_weighted_split_paths(text) for text in given)
    except ConfigError as error:
        # The error quotes the file. A script may name any file, whose content is not for a log.
        refusal = ConfigError(f"{flag}-path {path} does not hold what {flag} takes: {GRAMMAR}.")
        raise (error if path is None else refusal) from None
    names = [mixture.name for mixture in mixtures]
    # The name identifies a set in logs and in the recorded state.
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{flag} uses a name twice ({', '.join(names)}); each set needs a name of its own."
        )
    return mixtures


def _parse_weight(text: str, where: str) -> float:
    """Return a positive weight. `where` is the text around it, for the message."""
    try:
        weight = float(text)
    except ValueError:
        # Not a number. The check below reports the mistake.
        weight = -1.0
    if not (weight > 0 and math.isfinite(weight)):
        raise ConfigError(
            f"the weight {text!r} in {where!r} must be a positive number. Leave out data that must "
            "not be used."
        )
    return weight
