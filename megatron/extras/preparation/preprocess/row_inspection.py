"""What files of rows contain that --dataset-format reads, and what is suspicious in them.

Every file is opened. Documents are only sampled, from row groups that are spread over all files.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.plain_text import make_plain, redact
from megatron.extras.samples.stream.formats import FORMATS, FileGroups, Row
from megatron.extras.samples.stream.listing import find_files
from megatron.extras.samples.stream.table_files import FilePath

_SAMPLED_GROUPS = 32
_SAMPLED_ROWS = 64
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
# If at least this part of the documents has the same id at a place, a program has added it.
_CONSTANT = 0.9
_NAMED_FILES = 10


@dataclasses.dataclass(frozen=True)
class RowInspection:
    """The findings of an inspection."""

    path: str
    format: str
    column: str
    files: int
    columns: list[dict[str, str]]
    """The different sets of columns and types. One is usual."""
    rows: int
    row_groups: int
    rows_of_groups: tuple[int, int]
    """Rows of the smallest and of the largest row group."""
    kinds: list[str]
    """'text' or 'tokens'. Both is a problem."""
    tokens: int | None
    """Token ids of all documents, or None if the files do not tell."""
    sampled: int
    """Number of documents of which the following is known."""
    unit: str
    """Unit of the lengths: tokens or characters."""
    lengths: list[tuple[float, int]]
    """(quantile, length) of the sampled documents."""
    first_ids: list[tuple[int, float]]
    """The most frequent first ids, each with the part of the documents that have it."""
    last_ids: list[tuple[int, float]]
    damaged: list[str]
    """One message for each file that cannot be read."""
    problems: list[str]


def inspect_rows(
    path: str,
    format: str,
    column: str,
    *,
    vocab_size: int | None = None,
    encode: Callable[[list[str]], list[list[int]]] | None = None,
    cache_folder: str | None = None,
) -> RowInspection:
    """Inspect a file or a folder of rows, or a URL.

    Args:
        path: Where the data set is.
        format: parquet, arrow or jsonl.
        column: The column with texts or token ids.
        vocab_size: Ids at or above it are reported.
        encode: Tokenizes texts. Without it, texts are measured in characters.
        cache_folder: Folder on this machine. URLs need it.

    Raises:
        DataError: there are no files.
    """
    found = find_files(path, format, cache_folder, cache_gb=1)
    good: list[tuple[FilePath, FileGroups]] = []
    columns: list[dict[str, str]] = []
    damaged = []
    for record in found.records:
        file = found.get_path(record)
        try:
            described = FORMATS[format].describe_columns(file)
            if described not in columns:
                columns.append(described)
            good.append((file, FORMATS[format].list_groups(file, column)))
        except DataError as error:
            damaged.append(str(error))
    rows = np.concatenate([np.empty(0, np.int64), *(groups.rows for _, groups in good)])
    tokens = np.concatenate([np.empty(0, np.int64), *(groups.tokens for _, groups in good)])
    sample = _read_sample(good, format, column, damaged)
    texts = [row for row in sample if isinstance(row, str)]
    ids = [row for row in sample if not isinstance(row, str)]
    unit = "tokens"
    lengths = [len(row) for row in ids]
    if texts and encode is not None:
        lengths += [len(each) for each in encode(texts)]
    elif texts:
        unit = "characters"
        lengths = [len(text) for text in texts]
    kinds = sorted({groups.kind for _, groups in good if len(groups.rows)})
    # A single file without the number makes the sum unknown.
    total = None
    if kinds == ["tokens"] and tokens.min(initial=0) >= 0:
        total = int(tokens.sum())
    problems = _find_problems(ids, lengths, vocab_size)
    if len(kinds) > 1:
        problems.append("some files hold texts and others token ids: put them into two folders")
    largest = int(rows.max(initial=0))
    return RowInspection(
        path=redact(path),
        format=format,
        column=column,
        files=len(found.records),
        columns=columns,
        rows=int(rows.sum()),
        row_groups=len(rows),
        rows_of_groups=(int(rows.min(initial=largest)), largest),
        kinds=list(kinds),
        tokens=total,
        sampled=len(sample),
        unit=unit,
        lengths=_find_quantiles(lengths),
        first_ids=_find_common(ids, 0),
        last_ids=_find_common(ids, -1),
        damaged=damaged,
        problems=problems,
    )


def format_rows_report(found: RowInspection) -> str:
    """Return the findings as text."""
    tokens = "unknown without reading all"
    if found.tokens is not None:
        tokens = str(found.tokens)
    lines = [
        f"{found.path}: {found.files} files, {found.row_groups} row groups, {found.rows} rows, "
        f"tokens: {tokens}",
        f"rows of a row group: {found.rows_of_groups[0]} to {found.rows_of_groups[1]}",
        f"column {found.column}: {' and '.join(found.kinds) or 'no rows'}",
    ]
    for columns in found.columns:
        lines.append(f"columns: {', '.join(f'{name} {kind}' for name, kind in columns.items())}")
    lines.append(f"from {found.sampled} sampled documents:")
    quantiles = ", ".join(f"{length} ({quantile:.0%})" for quantile, length in found.lengths)
    lines.append(f"  length in {found.unit}: {quantiles or 'none'}")
    for place, common in (("first", found.first_ids), ("last", found.last_ids)):
        if common:
            shown = ", ".join(f"{token} in {part:.0%}" for token, part in common)
            lines.append(f"  {place} ids: {shown}")
    for message in found.damaged[:_NAMED_FILES]:
        lines.append(f"DAMAGED {message}")
    if len(found.damaged) > _NAMED_FILES:
        lines.append(f"DAMAGED and {len(found.damaged) - _NAMED_FILES} files more")
    lines += [f"PROBLEM {problem}" for problem in found.problems]
    if not found.problems and not found.damaged:
        lines.append("no problems found")
    # Names of files and columns are foreign text.
    return "\n".join(map(make_plain, lines))


def _read_sample(
    files: list[tuple[FilePath, FileGroups]], format: str, column: str, damaged: list[str]
) -> list[Row]:
    """Return the first documents of row groups that are spread over all files."""
    places = [
        (file, int(groups.begin[number]), int(groups.end[number]))
        for file, groups in files
        for number in range(len(groups.rows))
    ]
    # The first groups alone would say nothing about the other files.
    step = max(1, len(places) // _SAMPLED_GROUPS)
    sample: list[Row] = []
    for file, begin, end in places[::step][:_SAMPLED_GROUPS]:
        try:
            rows = next(FORMATS[format].read_rows(file, column, begin, end, 0), [])
            sample += rows[:_SAMPLED_ROWS]
        # A footer may be good while the rows are not.
        except DataError as error:
            damaged.append(str(error))
    return sample


def _find_quantiles(lengths: list[int]) -> list[tuple[float, int]]:
    """Return the quantiles of lengths."""
    if not lengths:
        return []
    found = np.quantile(lengths, _QUANTILES, method="nearest")
    return list(zip(_QUANTILES, found.astype(int).tolist(), strict=True))


def _find_common(ids: list[NDArray[np.int64]], place: int) -> list[tuple[int, float]]:
    """Return the most frequent ids at a place, each with the part of the documents that have it."""
    at_place = [int(each[place]) for each in ids if len(each) >= max(place + 1, -place)]
    counts = collections.Counter(at_place)
    return [(token, count / len(at_place)) for token, count in counts.most_common(3)]


def _find_problems(
    ids: list[NDArray[np.int64]], lengths: list[int], vocab_size: int | None
) -> list[str]:
    """Return what is suspicious in the sampled documents."""
    problems = []
    empty = lengths.count(0)
    if empty:
        problems.append(f"empty documents: {empty} of {len(lengths)}")
    # Without a vocabulary, only negative ids are known to be wrong.
    wrong = sum(len(each) > 0 and int(each.min()) < 0 for each in ids)
    if vocab_size is not None:
        wrong = sum(bool(((each < 0) | (each >= vocab_size)).any()) for each in ids)
    if wrong:
        problems.append(f"ids outside the vocabulary: in {wrong} of {len(ids)} documents")
    # Few documents may agree by accident.
    if len(ids) < 10:
        return problems
    for word, outer, inner in (("begin", 0, 1), ("end", -1, -2)):
        (token, part), *_ = _find_common(ids, outer) or [(0, 0.0)]
        doubled = sum(len(each) > 1 and int(each[inner]) == token for each in ids)
        if part >= _CONSTANT and doubled >= _CONSTANT * len(ids):
            problems.append(
                f"doubled separator: {doubled} of {len(ids)} documents {word} with {token} twice. "
                f"Train with --strip-tokens {token}"
            )
    commonest = [part for place in (0, -1) for _, part in _find_common(ids, place)[:1]]
    if max(commonest, default=0.0) < _CONSTANT:
        problems.append(
            "no separator: the documents have no common first or last id. Train with --eos-token"
        )
    return problems
