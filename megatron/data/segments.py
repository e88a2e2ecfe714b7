"""The data's history: which seed, mixture and index hold from which consumed sample on.

Invariant: a sample once consumed keeps its place, and of what is not consumed nothing is lost or drawn twice, whatever changes
on a resume. Rules:

- nothing changed: the segments stay, and with them the index of the number of samples that they were made for;
- more samples are asked for than they cover: a further segment starts where they end, each data set going on where it stood and,
  when exhausted, with a fresh index;
- another seed: what is not consumed is shuffled anew by it;
- another mixture: data sets that were there before (same content, same documents) go on where they stood, others begin;
- another sequence length: samples are cut anew, so that nothing can go on; all data sets begin.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data import blend, order
from megatron.data.background import Background
from megatron.data.building import Say
from megatron.data.cache import WAIT_SECONDS, IndexCache, discard_entry, say_to_stderr
from megatron.data.gpt_dataset import GPTDataset, check_large_enough, count_tokens
from megatron.data.indexed import IndexedDataset
from megatron.data.splits import NamedMixture
from megatron.errors import DataError


@dataclasses.dataclass(frozen=True)
class SegmentDataset:
    """One data set of a segment's mixture."""

    prefix: str
    weight: float
    """Share of the mixture; all add up to 1."""
    documents: tuple[int, int]
    fingerprint: str
    order: order.Tree
    """The samples it gives, in order; see order.py."""

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        """What makes it the same data: content and documents, not the path."""
        return self.fingerprint, self.documents


@dataclasses.dataclass(frozen=True)
class Segment:
    """From `start_sample` on, until it ends or the next segment starts."""

    start_sample: int
    num_samples: int
    """Samples that were asked of it, from its start on; a single data set may cover more."""
    seed: int
    seq_length: int
    parts: tuple[SegmentDataset, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Segment":
        parts = tuple(
            SegmentDataset(**{**part, "documents": tuple(part["documents"])})
            for part in record["parts"]
        )
        return cls(**{**record, "parts": parts})


@dataclasses.dataclass(frozen=True)
class RequestedData:
    """What the configuration asks for: a mixture whose data sets are open (orders not yet chosen), a seed, an amount."""

    parts: tuple[SegmentDataset, ...]
    seed: int
    seq_length: int
    num_samples: int

    def can_continue(self, segment: Segment) -> bool:
        """Whether a segment was made for the same data, mixture, seed and sequence length."""
        return (self.seed, self.seq_length) == (
            segment.seed,
            segment.seq_length,
        ) and self.has_same_mixture(segment)

    def has_same_mixture(self, segment: Segment) -> bool:
        return [(part.key, part.weight) for part in self.parts] == [
            (part.key, part.weight) for part in segment.parts
        ]


class DatasetRegistry:
    """The data sets of a run, each opened once, found by content: a recorded segment finds its data at a new path too."""

    def __init__(
        self,
        data_cache_path: str | None,
        *,
        say: Say = say_to_stderr,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`say` and `wait_seconds`: see `IndexCache`."""
        self.notes: list[str] = []
        self.background = Background()
        """Verifies what is too large to be read before the first step."""
        self._data_cache_path = data_cache_path
        self._say = say
        self._wait_seconds = wait_seconds
        self._by_prefix: dict[str, IndexedDataset] = {}
        self._caches: dict[str, IndexCache] = {}

    @property
    def datasets(self) -> dict[str, IndexedDataset]:
        """The data sets that were opened, by their paths."""
        return dict(self._by_prefix)

    def open(self, prefix: str) -> IndexedDataset:
        """Raises DataError where it is missing or damaged."""
        if prefix not in self._by_prefix:
            self._by_prefix[prefix] = IndexedDataset(prefix)
        return self._by_prefix[prefix]

    def find(self, part: SegmentDataset) -> IndexedDataset:
        """The data that a segment was made of. Raises DataError where it is gone or has changed."""
        for opened in self._by_prefix.values():
            if opened.compute_fingerprint() == part.fingerprint:
                return opened
        rule = (
            "an order of samples that the checkpoint records is made of it; bring the data back, or start "
            "without that checkpoint's data position"
        )
        try:
            opened = self.open(part.prefix)
        except DataError as error:
            raise DataError(f"{error} {part.prefix} is needed: {rule}.") from error
        if opened.compute_fingerprint() != part.fingerprint:
            raise DataError(
                f"{part.prefix} has changed (fingerprint {opened.compute_fingerprint()}, recorded {part.fingerprint}), and {rule}."
            )
        return opened

    def cache(self, prefix: str) -> IndexCache:
        """The caches in --data-cache-path, or beside the data set."""
        folder = str(self.cache_folder(prefix))
        if folder not in self._caches:
            self._caches[folder] = IndexCache(
                folder,
                self.notes,
                background=self.background,
                say=self._say,
                wait_seconds=self._wait_seconds,
            )
        return self._caches[folder]

    def cache_folder(self, prefix: str | os.PathLike) -> Path:
        """Where what was derived from a data set is kept."""
        return Path(
            self._data_cache_path
            if self._data_cache_path is not None
            else f"{os.fspath(prefix)}.index-cache"
        )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn the RuntimeError of an index that is out of range into a DataError, and have all indices built again.

        Raises:
            DataError: an index, or the .idx of a data set, is not what it was when it was opened.
        """
        try:
            yield
        except RuntimeError as error:
            manifests = [
                manifest for cache in self._caches.values() for manifest in cache.manifests
            ]
            failed = [
                told
                for told in map(discard_entry, dict.fromkeys(manifests))
                if told.startswith("Remove")
            ]
            raise DataError(
                f"an index of the data is damaged ({error}): a file of the index cache, or the .idx of a data set, has changed "
                "since it was opened. Start again from the last checkpoint: the index caches of this run are built again. "
                + " ".join(failed)
            ) from error


class OpenSegment:
    """A segment whose orders can be read; data sets are opened, and indices built, when they are first needed."""

    def __init__(self, segment: Segment, registry: DatasetRegistry) -> None:
        self.segment, self._registry = segment, registry
        self._streams: dict[int, order.Order] = {}
        self._order: order.Order | None = None

    def stream(self, number: int) -> order.Order:
        """The order of one part."""
        if number not in self._streams:
            part = self.segment.parts[number]
            data, cache = self._registry.find(part), self._registry.cache(part.prefix)

            def open_index(seed: int, num_samples: int) -> GPTDataset:
                return GPTDataset(
                    data, part.documents, self.segment.seq_length, seed, num_samples, cache
                )

            self._streams[number] = order.build_order(part.order, open_index, cache)
        return self._streams[number]

    @property
    def order(self) -> order.Order:
        """The whole segment's order, from position 0 at its start."""
        if self._order is None:
            streams = [self.stream(number) for number in range(len(self.segment.parts))]
            self._order = (
                streams[0] if len(streams) == 1 else order.BlendedOrder(streams, *self._blend())
            )
        return self._order

    @property
    def end(self) -> int:
        """The consumed sample at which it has no more."""
        return self.segment.start_sample + len(self.order)

    def count_given_samples(self, samples: int) -> list[int]:
        """How many of its first `samples` each part gave."""
        if len(self.segment.parts) == 1:
            return [samples]
        with self._registry.guarded():
            return blend.count_drawn_samples(self._blend()[0][:samples], len(self.segment.parts))

    def _blend(self) -> tuple[NDArray, NDArray[np.int64]]:
        cache = self._registry.cache(self.segment.parts[0].prefix)
        return blend.blend(
            [part.weight for part in self.segment.parts], self.segment.num_samples, cache
        )


def open_mixture(
    mixture: NamedMixture, seed: int, seq_length: int, num_samples: int, registry: DatasetRegistry
) -> RequestedData | None:
    """Open a mixture's data sets; None where none of them has documents in its split. Raises DataError where one is too small."""
    found = []
    for part in mixture.parts:
        data = registry.open(part.prefix)
        first, last = part.select_documents(len(data))
        if first < last:
            check_large_enough(
                part.prefix, (first, last), count_tokens(data, (first, last)), seq_length
            )
            found.append((part, (first, last), data.compute_fingerprint()))
        else:
            registry.notes.append(
                f"{mixture.name}: the split {part.split} leaves no document of {part.prefix} ({len(data)} in all)"
            )
    if not found:
        return None
    weights = blend.normalise([part.weight for part, _, _ in found])
    parts = tuple(
        SegmentDataset(part.prefix, weight, documents, fingerprint, {})
        for (part, documents, fingerprint), weight in zip(found, weights, strict=True)
    )
    return RequestedData(parts, seed, seq_length, num_samples)


def make_first_segment(requested: RequestedData) -> Segment:
    """The order of a run that starts: the reference's."""
    asked = blend.compute_samples_per_dataset(
        requested.num_samples, [part.weight for part in requested.parts]
    )
    parts = [
        dataclasses.replace(part, order=order.make_index_tree(requested.seed, count))
        for part, count in zip(requested.parts, asked, strict=True)
    ]
    return Segment(0, requested.num_samples, requested.seed, requested.seq_length, tuple(parts))


class History:
    """The segments of a run, in order, as one long order of samples."""

    def __init__(self, segments: list[Segment], registry: DatasetRegistry) -> None:
        self._registry = registry
        self._open = [OpenSegment(segment, registry) for segment in segments]

    @property
    def segments(self) -> list[Segment]:
        return [opened.segment for opened in self._open]

    @property
    def end(self) -> int:
        """Samples that can be drawn, from the run's first on."""
        return self._open[-1].end

    def prepare(self, consumed: int) -> None:
        """Build or open the orders of all samples from `consumed` on; what lies behind is opened only if it is read."""
        with self._registry.guarded():
            for opened in self._open[self._open.index(self._find_segment(consumed)) :]:
                assert len(opened.order) > 0, "a segment without samples"

    def read(self, positions: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """out[i] = the first out.shape[1] tokens of the sample at positions[i]; positions are [k]."""
        starts = np.array([opened.segment.start_sample for opened in self._open])
        which = np.searchsorted(starts, positions, side="right") - 1
        with self._registry.guarded():
            for number in np.unique(which):
                rows = np.flatnonzero(which == number)
                order.read(self._open[number].order, positions[rows] - starts[number], rows, out)

    def locate(self, position: int) -> tuple[GPTDataset, int]:
        """Data set and sample at one position."""
        opened = self._find_segment(position)
        with self._registry.guarded():
            return order.locate(opened.order, position - opened.segment.start_sample)

    def extend(self, requested: RequestedData) -> tuple["History", list[str]]:
        """With further segments, until what is requested is covered; and what was done, in words."""
        history, notes = self, []
        while history.end < requested.num_samples:
            end = history.end
            segment, told = history._make_next_segment(end, requested)
            history = History([*history.segments, segment], self._registry)
            notes.append(
                f"data order: {requested.num_samples} samples are asked for, {end} are covered; from there on {told}"
            )
        return history, notes

    def resume(self, consumed: int, requested: RequestedData) -> tuple["History", list[str]]:
        """What a run that has consumed so many samples goes on with, given its configuration; and what was done, in words."""
        last = self.segments[-1]
        if consumed == 0 and not requested.can_continue(last):
            return History([make_first_segment(requested)], self._registry).extend(requested)
        notes: list[str] = []
        history = self
        if not requested.can_continue(last):
            segment, told = self._make_next_segment(consumed, requested)
            kept = [earlier for earlier in self.segments if earlier.start_sample < consumed]
            notes.append(
                f"data order: {self._describe_changes(last, requested)}; from sample {consumed} on {told}"
            )
            history = History([*kept, segment], self._registry)
        elif last.start_sample + last.num_samples != requested.num_samples:
            notes.append(
                f"data order: made for {last.start_sample + last.num_samples} samples, now {requested.num_samples} are asked for; "
                f"it is kept for the {self.end} samples that it covers"
            )
        history, further = history.extend(requested)
        return history, notes + further

    def _describe_changes(self, last: Segment, requested: RequestedData) -> str:
        changes = []
        if requested.seed != last.seed:
            changes.append(f"--seed {last.seed} has become {requested.seed}")
        if requested.seq_length != last.seq_length:
            changes.append(f"--seq-length {last.seq_length} has become {requested.seq_length}")
        if not requested.has_same_mixture(last):
            changes.append("the data or their weights have changed")
        return " and ".join(changes)

    def _find_segment(self, position: int) -> OpenSegment:
        return next(
            opened for opened in reversed(self._open) if opened.segment.start_sample <= position
        )

    def _make_next_segment(self, start: int, requested: RequestedData) -> tuple[Segment, str]:
        """The segment that begins at `start`, where its data sets go on or begin, and this in words."""
        missing = max(1, requested.num_samples - start)
        asked = blend.compute_samples_per_dataset(
            missing, [part.weight for part in requested.parts]
        )
        parts, told = [], []
        for number, (part, count) in enumerate(zip(requested.parts, asked, strict=True)):
            occurrence = sum(earlier.key == part.key for earlier in requested.parts[:number])
            tree, words = self._continue_dataset(part, occurrence, count, start, requested)
            parts.append(dataclasses.replace(part, order=tree))
            told.append(f"{part.prefix} {words}")
        return Segment(
            start, missing, requested.seed, requested.seq_length, tuple(parts)
        ), ", ".join(told)

    def _continue_dataset(
        self,
        part: SegmentDataset,
        occurrence: int,
        asked: int,
        start: int,
        requested: RequestedData,
    ) -> tuple[order.Tree, str]:
        found = self._find_last_use(part, occurrence, start, requested.seq_length)
        if found is None:
            return order.make_index_tree(requested.seed, asked), "begins"
        opened, number, used = found
        old, length = opened.segment.parts[number].order, len(opened.stream(number))
        fresh = requested.seed
        while fresh in order.collect_seeds(
            old
        ):  # the same seed would show the same order a second time
            fresh = (fresh + 1) % 2**32
        if used >= length:
            return order.make_index_tree(
                fresh, asked
            ), f"is exhausted and begins afresh with seed {fresh}"
        trees: list[order.Tree] = []
        words = f"goes on at its sample {used}"
        middle = min(length, used + asked)
        if requested.seed != opened.segment.seed:
            words += ", shuffled anew"
            trees.append({"permute": requested.seed, "of": {"cut": [used, middle], "of": old}})
            if middle < length:
                trees.append({"cut": [middle, length], "of": old})
        else:
            trees.append({"cut": [used, length], "of": old})
        if length - used < asked:
            trees.append(order.make_index_tree(fresh, asked - (length - used)))
            words += f", then afresh with seed {fresh}"
        return trees[0] if len(trees) == 1 else {"concat": trees}, words

    def _find_last_use(
        self, part: SegmentDataset, occurrence: int, start: int, seq_length: int
    ) -> tuple[OpenSegment, int, int] | None:
        """The latest segment before `start` that drew from the same data, which of its parts, and how much it had drawn."""
        end = start
        for opened in reversed(self._open):
            segment = opened.segment
            if segment.start_sample > start or (
                segment.start_sample == start and segment.start_sample > 0
            ):
                continue
            same = [
                number for number, earlier in enumerate(segment.parts) if earlier.key == part.key
            ]
            if segment.seq_length == seq_length and len(same) > occurrence:
                number = same[occurrence]
                return (
                    opened,
                    number,
                    opened.count_given_samples(end - segment.start_sample)[number],
                )
            end = segment.start_sample
        return None
