"""What checkpoints record of streamed data, as JSON values.

The record of a data set has the cursor of each of its shards. A segment has the data sets, weights,
special tokens and filters that apply from a sample on.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.base.errors import DataError
from megatron.base.plain_text import redact
from megatron.extras.samples.stream.filters import NO_COUNTS, parse_counts
from megatron.extras.samples.stream.reader import Cursor
from megatron.extras.samples.stream.shard_order import MixturePhase
from megatron.extras.samples.stream.streamed_dataset import StreamedDataset

_NAMED_FILES = 5


def describe_dataset(dataset: StreamedDataset) -> dict[str, Any]:
    """Return what identifies a data set."""
    specials = dataset.specials
    described: dict[str, Any] = {
        "name": dataset.name,
        "fingerprint": dataset.fingerprint,
        "documents": list(dataset.documents),
        "specials": {"bos": specials.bos, "eos": specials.eos, "strip": list(specials.strip)},
    }
    if dataset.filters.active:
        described["filters"] = dataclasses.asdict(dataset.filters)
    return described


def make_record(
    dataset: StreamedDataset, samples: Sequence[int], cursors: Sequence[Cursor]
) -> dict[str, Any]:
    """Return the record of a data set.

    Args:
        dataset: The data set.
        samples: Samples before the position in each shard.
        cursors: The cursor of each shard.
    """
    record = {
        **describe_dataset(dataset),
        "sampled": dataset.sampled_digest,
        "last_change_ns": dataset.listing.find_last_change(),
        "samples": list(samples),
        "epoch": [cursor.epoch for cursor in cursors],
        "document": [cursor.document for cursor in cursors],
        "token": [cursor.token for cursor in cursors],
    }
    counts = [cursor.filter_counts for cursor in cursors]
    # The counts of a run whose filters were removed are kept as well.
    if dataset.filters.active or any(each != NO_COUNTS for each in counts):
        record["filter_counts"] = counts
    return record


def find_record(
    dataset: StreamedDataset, records: Sequence[dict[str, Any]], *, allow_changed_data: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the record of a data set, and a note for the user. Both may be None.

    There is no record if the data set is new.

    Args:
        dataset: The data set.
        records: The records of the checkpoint.
        allow_changed_data: Accept files whose contents have changed, with a note.

    Raises:
        DataError: its files or its range of rows have changed.
    """
    described = describe_dataset(dataset)
    matching = [
        record
        for record in records
        if all(record[key] == described[key] for key in ("fingerprint", "documents"))
    ]
    for record in matching:
        if _has_same_samples(dataset, record):
            return record, None
    if matching:
        what = _describe_change(dataset, matching[0])
        if allow_changed_data:
            return matching[0], f"{what}. --allow-changed-data accepts them"
        raise DataError(
            f"{what}. A run must continue with the data that it started with. Restore them, or "
            "accept them with --allow-changed-data."
        )
    if any(record["name"] == dataset.name for record in records):
        raise DataError(
            f"the files of data set {dataset.name} ({redact(dataset.listing.folder)}) or its "
            "--split have changed since the checkpoint, so its order cannot be continued. Restore "
            "them. Put new files into a folder of their own, and add it to --datasets."
        )
    return None, None


def _has_same_samples(dataset: StreamedDataset, record: dict[str, Any]) -> bool:
    """Return whether the sampled contents are those of a record, as far as they are known."""
    # An older version recorded none. ETags cannot be compared with bytes.
    recorded = record.get("sampled", dataset.sampled_digest)
    kinds = [digest.partition("-")[0] for digest in (recorded, dataset.sampled_digest)]
    return recorded == dataset.sampled_digest or kinds[0] != kinds[1]


def _describe_change(dataset: StreamedDataset, record: dict[str, Any]) -> str:
    """Return that the contents of files have changed, and which files."""
    changed = dataset.listing.list_changed_since(record["last_change_ns"])
    shown = ", ".join(changed[:_NAMED_FILES])
    if len(changed) > _NAMED_FILES:
        shown += f" and {len(changed) - _NAMED_FILES} more"
    if changed:
        shown = f". Modified since then: {shown}"
    else:
        shown = ". No modification time is later, so it is not known which files they are"
    return (
        f"the files of data set {dataset.name} ({redact(dataset.listing.folder)}) have the names, "
        f"sizes and row groups that the checkpoint records, and other contents{shown}"
    )


def parse_positions(dataset: StreamedDataset, record: dict[str, Any]) -> list[tuple[int, Cursor]]:
    """Return the number of the next sample of each shard, and its cursor."""
    # The cursor counts special tokens. One more or less before the document moves it.
    shift = (dataset.specials.bos is not None) - (record["specials"]["bos"] is not None)
    columns = (
        record["samples"],
        record["epoch"],
        record["document"],
        record["token"],
        # Without filters there is no such list.
        record.get("filter_counts", [NO_COUNTS] * dataset.shards),
    )
    positions = []
    for samples, epoch, document, token, counts in zip(*columns, strict=True):
        moved = max(0, token + shift) if token else 0
        positions.append((samples, Cursor(epoch, document, moved, parse_counts(counts))))
    return positions


def describe_segments(
    datasets: Sequence[StreamedDataset], phases: Sequence[MixturePhase], first_start: int
) -> list[dict[str, Any]]:
    """Return the segment of each phase.

    Args:
        datasets: The data sets of all phases.
        phases: The phases in order.
        first_start: The sample from which on the first phase applies.
    """
    described = {dataset.name: describe_dataset(dataset) for dataset in datasets}
    starts = [first_start, *(phase.start_sample for phase in phases[1:])]
    return [
        {
            "start_sample": start,
            "datasets": [
                {**described[name], "weight": share} for name, share in phase.shares.items()
            ],
        }
        for start, phase in zip(starts, phases, strict=True)
    ]


def continue_segments(
    recorded: Sequence[dict[str, Any]], requested: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the segments of a run that goes on, and whether it changes without being planned.

    Args:
        recorded: The segments of the checkpoint.
        requested: The segments of the configuration. The first one begins at the position.
    """
    present, *later = requested
    # Nothing was read of a segment that begins at the position or later.
    past = [each for each in recorded if each["start_sample"] < present["start_sample"]]
    if past and present["datasets"] == past[-1]["datasets"]:
        return [*past, *later], False
    # A phase that begins here as planned is recorded already.
    changed = bool(past) and present not in recorded
    return [*past, present, *later], changed
