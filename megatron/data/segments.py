"""The history of the data order: which seed, mixture and index are used from which sample on.

Invariant: a sample that was consumed keeps its position. Of the samples that are not consumed, none
is lost or drawn twice, whatever changes on a resume. The rules are:

- Nothing changed: the segments are kept. They keep the index that was made for their number of
  samples.
- The number of samples is not known (--train-time): each segment is a pass over the data, and a
  further one is added when it is needed. The order does not depend on the speed of the run.
- More samples are requested than they cover: a further segment starts where they end. Each data set
  continues at its next sample. When it is exhausted, it starts again with a new index.
- Another seed: the samples that are not consumed are shuffled again with it.
- Another mixture: data sets that were used before (same content, same documents) continue at their
  next sample. Others start at their first one.
- A phase of --data-phases that has not started: its segments are those of a run that starts with
  the same phases, if nothing changed before them.
- Another sequence length: the documents are split into other samples. No data set can continue, so
  all of them start again.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data import blend, order
from megatron.data.gpt_dataset import GPTDataset, check_large_enough, count_tokens
from megatron.data.indexed import Samples
from megatron.data.registry import DatasetRegistry
from megatron.data.splits import NamedMixture


@dataclasses.dataclass(frozen=True)
class SegmentDataset:
    """One data set of a segment's mixture."""

    prefix: str
    weight: float
    """Share of the mixture. The shares of all parts add up to 1."""
    documents: tuple[int, int]
    """The range [first, last) of documents."""
    fingerprint: str
    """See `IndexedDataset.compute_fingerprint`."""
    order: order.Tree
    """The samples that it gives, in order. See order.py."""

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        """What identifies the data: content and documents, but not the path."""
        return self.fingerprint, self.documents


@dataclasses.dataclass(frozen=True)
class Segment:
    """Part of the data order, from `start_sample` on until it ends or the next segment starts."""

    start_sample: int
    num_samples: int
    """Number of samples that were requested when it was made. A single data set may have more."""
    seed: int
    seq_length: int
    parts: tuple[SegmentDataset, ...]


@dataclasses.dataclass(frozen=True)
class RequestedData:
    """What the configuration requests, for a run or for one of its phases.

    The data sets of the mixture are open. Their orders are not chosen yet.
    """

    parts: tuple[SegmentDataset, ...]
    seed: int
    seq_length: int
    num_samples: int
    """Number of samples of the run up to the end of the phase."""
    start_sample: int = 0
    """Number of samples of the run before the phase."""
    endless: bool = False
    """Whether the number of samples is not known in advance.

    `num_samples` is then the end of the first pass, which has as many samples as the data sets.
    """

    def count_missing(self, start: int) -> int:
        """Return the number of samples of a segment that begins at `start`."""
        if self.endless:
            return self.num_samples - self.start_sample
        # A segment needs at least one sample, even if all requested ones are consumed.
        return max(1, self.num_samples - start)

    def can_continue(self, segment: Segment) -> bool:
        """Return whether a segment has the same mixture, seed and sequence length."""
        return (self.seed, self.seq_length) == (
            segment.seed,
            segment.seq_length,
        ) and self.has_same_mixture(segment)

    def is_start_of(self, segments: Sequence[Segment]) -> bool:
        """Return whether the first of these segments is the first one that this phase makes."""
        return (
            len(segments) > 0
            and segments[0].start_sample == self.start_sample
            and segments[0].num_samples == self.num_samples - self.start_sample
            and self.can_continue(segments[0])
        )

    def has_same_mixture(self, segment: Segment) -> bool:
        """Return whether a segment has the same data sets with the same weights."""
        return [(part.key, part.weight) for part in self.parts] == [
            (part.key, part.weight) for part in segment.parts
        ]


class OpenSegment:
    """A segment whose order can be read.

    Data sets are opened, and indices are built, when they are first needed.
    """

    def __init__(self, segment: Segment, registry: DatasetRegistry) -> None:
        """Remember the segment. Nothing is opened yet."""
        self.segment = segment
        self._registry = registry
        self._streams: dict[int, order.Order] = {}
        self._order: order.Order | None = None

    def stream(self, number: int) -> order.Order:
        """Return the order of one part of the mixture."""
        if number not in self._streams:
            part = self.segment.parts[number]
            data = self._registry.find(part.prefix, part.fingerprint)
            cache = self._registry.cache(part.prefix)

            def open_index(seed: int, num_samples: int) -> Samples:
                # Data that must not be cut say themselves how they become samples.
                open_samples = GPTDataset if data.packing is None else data.packing.open
                return open_samples(
                    data, part.documents, self.segment.seq_length, seed, num_samples, cache
                )

            self._streams[number] = order.build_order(part.order, open_index, cache)
        return self._streams[number]

    @property
    def order(self) -> order.Order:
        """The order of the complete segment. Its position 0 is the segment's first sample."""
        if self._order is None:
            # A single data set needs no mixture. Its order may be longer than was requested.
            streams = [self.stream(number) for number in range(len(self.segment.parts))]
            if len(streams) == 1:
                self._order = streams[0]
            else:
                self._order = order.BlendedOrder(streams, *self._blend())
        return self._order

    @property
    def end(self) -> int:
        """Number of consumed samples at which the segment ends."""
        return self.segment.start_sample + len(self.order)

    def count_given_samples(self, samples: int) -> list[int]:
        """Return how many of the segment's first `samples` samples each part gave."""
        if len(self.segment.parts) == 1:
            return [samples]
        with self._registry.guarded():
            return blend.count_drawn_samples(self._blend()[0][:samples], len(self.segment.parts))

    def _blend(self) -> tuple[NDArray, NDArray[np.int64]]:
        """Return the data set of each sample, and the sample's number in that data set."""
        cache = self._registry.cache(self.segment.parts[0].prefix)
        return blend.blend(
            [part.weight for part in self.segment.parts], self.segment.num_samples, cache
        )


def open_mixture(
    mixture: NamedMixture,
    seed: int,
    seq_length: int,
    num_samples: int | None,
    registry: DatasetRegistry,
    start_sample: int = 0,
) -> RequestedData | None:
    """Open the data sets of a mixture.

    Args:
        mixture: The data sets with their weights.
        seed: Seed of the data order.
        seq_length: Tokens of a sample, without the last label.
        num_samples: See `RequestedData`. None if it is not known in advance.
        registry: Opens the data sets.
        start_sample: See `RequestedData`.

    Returns:
        The mixture without the data sets whose split has no documents. None if none is left.

    Raises:
        DataError: a data set has documents, but too few tokens for one sample.
    """
    found = []
    samples = 0
    for part in mixture.parts:
        data = registry.open(part.prefix)
        first, last = part.select_documents(len(data))
        # A split of a few percent may contain no document of a small data set.
        if first < last:
            if data.packing is not None:
                samples += data.packing.count_samples(data, (first, last), seq_length)
            else:
                tokens = count_tokens(data, (first, last))
                check_large_enough(part.prefix, (first, last), tokens, seq_length)
                samples += (tokens - 1) // seq_length
            found.append((part, (first, last), data.compute_fingerprint()))
        # Many runs need no test set, so a share of 0 is not noted for it.
        elif mixture.name != "test" or not part.is_unused:
            registry.notes.append(
                f"{mixture.name}: the split {part.split} leaves no document of {part.prefix} "
                f"({len(data)} in all)"
            )
    if not found:
        return None
    # The weights of the data sets that are left must add up to 1 again.
    weights = blend.normalise([part.weight for part, _, _ in found])
    parts = tuple(
        SegmentDataset(part.prefix, weight, documents, fingerprint, {})
        for (part, documents, fingerprint), weight in zip(found, weights, strict=True)
    )
    endless = num_samples is None
    if num_samples is None:
        num_samples = start_sample + samples
    return RequestedData(parts, seed, seq_length, num_samples, start_sample, endless)


def make_first_segment(requested: RequestedData) -> Segment:
    """Return the first segment of a new run. Its order is that of Megatron-DeepSpeed."""
    counts = blend.compute_samples_per_dataset(
        requested.num_samples, [part.weight for part in requested.parts]
    )
    parts = [
        dataclasses.replace(part, order=order.make_index_tree(requested.seed, count))
        for part, count in zip(requested.parts, counts, strict=True)
    ]
    return Segment(0, requested.num_samples, requested.seed, requested.seq_length, tuple(parts))


class History:
    """The segments of a run as one long order of samples."""

    def __init__(
        self, segments: list[Segment], registry: DatasetRegistry, notes: Sequence[str] = ()
    ) -> None:
        """Take the segments in order, and messages about them. Nothing is opened yet."""
        self._registry = registry
        self.notes = list(notes)
        """Messages for the user about what was added or has changed."""
        self._open = [OpenSegment(segment, registry) for segment in segments]

    @property
    def segments(self) -> list[Segment]:
        """The segments in order."""
        return [opened.segment for opened in self._open]

    @property
    def end(self) -> int:
        """Number of samples that the run can consume, counted from its first one."""
        return self._open[-1].end

    def prepare(self, consumed: int) -> None:
        """Build or open the orders of all samples from `consumed` on.

        Earlier segments are opened only when they are read.

        Raises:
            DataError: an index is damaged or cannot be built, or data have changed.
        """
        with self._registry.guarded():
            for opened in self._open[self._open.index(self._find_segment(consumed)) :]:
                # Asking for the length opens the order.
                assert len(opened.order) > 0, "a segment without samples"

    def read(self, positions: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Read samples into `out`.

        Args:
            positions: int64[k], positions in the order.
            out: int64[k, n]. Row i receives the first n tokens of the sample at positions[i].

        Raises:
            DataError: an index has changed since it was opened.
        """
        # The last segment that starts at or before a position holds it.
        starts = np.array([opened.segment.start_sample for opened in self._open])
        which = np.searchsorted(starts, positions, side="right") - 1
        with self._registry.guarded():
            for number in sorted(set(which.tolist())):
                rows = np.flatnonzero(which == number)
                order.read(self._open[number].order, positions[rows] - starts[number], rows, out)

    def locate(self, position: int) -> tuple[Samples, int]:
        """Return the data set and the sample at a position."""
        opened = self._find_segment(position)
        with self._registry.guarded():
            return order.locate(opened.order, position - opened.segment.start_sample)

    def extend(self, requested: RequestedData, needed: int) -> "History":
        """Return the history with segments of the requested data until `needed` are covered."""
        # One more segment may not be enough. A mixture ends when one of its data sets is exhausted.
        history = self
        while history.end < needed:
            end = history.end
            segment, description = history._make_next_segment(end, requested)
            why = f"{requested.num_samples} samples are requested, {end} are covered"
            if requested.endless:
                why = f"the data were read up to sample {end}"
            note = f"data order: {why}; from sample {end} on {description}"
            history = history._replace([*history.segments, segment], note)
        return history

    def _replace(self, segments: list[Segment], *notes: str) -> "History":
        """Return a history of other segments, with further messages."""
        return History(segments, self._registry, [*self.notes, *notes])

    @classmethod
    def start(cls, phases: Sequence[RequestedData], registry: DatasetRegistry) -> "History":
        """Return the history of a new run.

        Args:
            phases: The phases in order. A run without phases has one.
            registry: Opens the data sets.
        """
        first, *later = phases
        history = cls([make_first_segment(first)], registry).extend(first, first.num_samples)
        return history._append_phases(later, [])

    def resume(self, consumed: int, phases: Sequence[RequestedData]) -> "History":
        """Return the history with which a run continues.

        Args:
            consumed: Samples that the run has consumed.
            phases: What the configuration requests now: the phase at the position, and the phases
                after it.
        """
        requested, *later = phases
        past = self._drop_later_phases(consumed, requested, [phase.start_sample for phase in later])
        last = past.segments[-1]
        # Nothing was consumed. The result must equal that of a run that starts with this data.
        if consumed == 0 and not requested.can_continue(last):
            return History.start(phases, self._registry)
        history = past
        if not requested.can_continue(last):
            segment, description = past._make_next_segment(consumed, requested)
            # Segments that start later were never read, and the new segment replaces them.
            kept = [earlier for earlier in past.segments if earlier.start_sample < consumed]
            history = past._replace(
                [*kept, segment],
                f"data order: {self._describe_changes(last, requested)}; from sample {consumed} on "
                f"{description}",
            )
        # An index made for another number of samples has another order. The recorded one is kept,
        # since samples that were consumed must keep their positions.
        elif (
            last.start_sample + last.num_samples != requested.num_samples and not requested.endless
        ):
            past.notes.append(
                f"data order: made for {last.start_sample + last.num_samples} samples, now "
                f"{requested.num_samples} are requested; it is kept for the {past.end} samples "
                "that it covers"
            )
        history = history.extend(requested, requested.num_samples)
        return history._append_phases(later, self.segments)

    def _drop_later_phases(
        self, consumed: int, requested: RequestedData, starts: Sequence[int]
    ) -> "History":
        """Return the history without the segments of phases that have not started.

        Args:
            consumed: Samples that the run has consumed.
            requested: The phase at this position.
            starts: The first samples of the phases after it.
        """
        segments = self.segments
        end = sum(segment.start_sample <= consumed for segment in segments)
        newest = segments[end - 1]
        # Nothing was read of a phase that began here. If it was moved, the one before it goes on.
        if newest.start_sample == consumed > 0 and not requested.can_continue(newest):
            end -= 1
        limit = min(starts, default=None)
        # The present phase may have further segments, because its data are read several times.
        while (
            end < len(segments)
            and requested.can_continue(segments[end])
            and (limit is None or segments[end].start_sample < limit)
        ):
            end += 1
        if end == len(segments):
            return self
        return History(segments[:end], self._registry)

    def _append_phases(
        self, phases: Sequence[RequestedData], recorded: Sequence[Segment]
    ) -> "History":
        """Return the history with the segments of phases that have not started.

        Args:
            phases: The phases in order.
            recorded: The segments of the checkpoint. They are kept up to the first change.
        """
        history = self
        for phase in phases:
            count = len(history.segments)
            if history.segments == list(recorded[:count]) and phase.is_start_of(recorded[count:]):
                history = history._replace([*history.segments, recorded[count]])
            else:
                segment, description = history._make_next_segment(phase.start_sample, phase)
                history = history._replace(
                    [*history.segments, segment],
                    f"data order: a phase begins at sample {phase.start_sample}; from there on "
                    f"{description}",
                )
            history = history.extend(phase, phase.num_samples)
        # An earlier launch has reported these.
        if history.segments == list(recorded):
            history.notes = list(self.notes)
        return history

    def _describe_changes(self, last: Segment, requested: RequestedData) -> str:
        """Return the differences between the last segment and the request, in words."""
        changes = []
        if requested.seed != last.seed:
            changes.append(f"--seed changed from {last.seed} to {requested.seed}")
        if requested.seq_length != last.seq_length:
            changes.append(f"--seq-length changed from {last.seq_length} to {requested.seq_length}")
        if not requested.has_same_mixture(last):
            changes.append("the data, their weights or --split have changed")
        return " and ".join(changes)

    def _find_segment(self, position: int) -> OpenSegment:
        """Return the segment that holds a position."""
        return next(
            opened for opened in reversed(self._open) if opened.segment.start_sample <= position
        )

    def _make_next_segment(self, start: int, requested: RequestedData) -> tuple[Segment, str]:
        """Return the segment that begins at `start`, and its description in words."""
        missing = requested.count_missing(start)
        counts = blend.compute_samples_per_dataset(
            missing, [part.weight for part in requested.parts]
        )
        parts = []
        descriptions = []
        for number, (part, count) in enumerate(zip(requested.parts, counts, strict=True)):
            # A mixture may name the same data twice. Its n-th use then continues the n-th use in
            # the earlier segment.
            occurrence = sum(earlier.key == part.key for earlier in requested.parts[:number])
            tree, words = self._continue_dataset(part, occurrence, count, start, requested)
            parts.append(dataclasses.replace(part, order=tree))
            descriptions.append(f"{part.prefix} {words}")
        segment = Segment(start, missing, requested.seed, requested.seq_length, tuple(parts))
        return segment, ", ".join(descriptions)

    def _continue_dataset(
        self,
        part: SegmentDataset,
        occurrence: int,
        count: int,
        start: int,
        requested: RequestedData,
    ) -> tuple[order.Tree, str]:
        """Return the order with which a data set continues, and its description in words.

        Args:
            part: The data set.
            occurrence: How often the mixture names the same data before this part.
            count: Number of samples that it has to give.
            start: The position at which the new segment begins.
            requested: What the configuration requests.
        """
        found = self._find_last_use(part, occurrence, start, requested.seq_length)
        if found is None:
            return order.make_index_tree(requested.seed, count), "starts at its first sample"
        opened, number, used = found
        old = opened.segment.parts[number].order
        length = len(opened.stream(number))
        fresh = requested.seed
        # The same seed would give the same order a second time.
        while fresh in order.collect_seeds(old):
            fresh = (fresh + 1) % 2**32
        if used >= length:
            words = f"is exhausted and starts again with seed {fresh}"
            return order.make_index_tree(fresh, count), words
        trees: list[order.Tree] = []
        words = f"continues at its sample {used}"
        middle = min(length, used + count)
        if requested.seed != opened.segment.seed:
            # Only the samples that will be used are shuffled. The rest is appended in the old
            # order, so that a later segment can continue there and no sample is lost.
            words += ", shuffled again"
            trees.append({"permute": requested.seed, "of": {"cut": [used, middle], "of": old}})
            if middle < length:
                trees.append({"cut": [middle, length], "of": old})
        else:
            trees.append({"cut": [used, length], "of": old})
        # If the data set has too few samples left, a new index provides the rest.
        if length - used < count:
            trees.append(order.make_index_tree(fresh, count - (length - used)))
            words += f", then starts again with seed {fresh}"
        return trees[0] if len(trees) == 1 else {"concat": trees}, words

    def _find_last_use(
        self, part: SegmentDataset, occurrence: int, start: int, seq_length: int
    ) -> tuple[OpenSegment, int, int] | None:
        """Find the last use of the same data before `start`.

        Returns:
            The segment, the number of the part in it, and how many samples the part had given. None
            if no segment used the data with this sequence length.
        """
        end = start
        for opened in reversed(self._open):
            segment = opened.segment
            # Segments that start at or after `start` will never be read. The first one, which
            # starts at sample 0, counts with 0 samples given.
            if segment.start_sample > start or (
                segment.start_sample == start and segment.start_sample > 0
            ):
                continue
            same = [
                number for number, earlier in enumerate(segment.parts) if earlier.key == part.key
            ]
            # With another sequence length, the data set has other samples.
            if segment.seq_length == seq_length and len(same) > occurrence:
                number = same[occurrence]
                return (
                    opened,
                    number,
                    opened.count_given_samples(end - segment.start_sample)[number],
                )
            end = segment.start_sample
        return None
