"""Find the rank on which two passes began to differ.

An error spreads with collectives and messages, so many ranks differ at the end. The entries of the
ranks are ordered by dependence: an entry depends on all earlier ones of its rank, and on what the
other members of earlier collectives have sent. The first entry that differs depends on none that
differs.

The invariant: only the order of the entries within a rank and within a group counts. Clocks and
counters of different ranks are not compared.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.extras.watch.replay.recorder import Entry


@dataclass(frozen=True)
class RankDifference:
    """How the passes of one rank differ."""

    label: str
    """Where its first difference is."""
    received: dict[str, int]
    """Link -> how many messages of it have arrived before the first difference."""
    wrong: dict[str, int]
    """Link -> the index, from 0, of this rank's first message whose values differ."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def describe_difference(entries: Sequence[Entry], differs: Sequence[bool]) -> RankDifference | None:
    """Return the difference of this rank, or None if no entry differs."""
    order = sort_messages(entries)
    first = next((number for number in order if differs[number]), None)
    if first is None:
        return None
    received: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    wrong: dict[str, int] = {}
    # Messages are counted to the end, because an error spreads with those after the first
    # difference.
    is_before = True
    for number in order:
        is_before = is_before and number != first
        link = entries[number].link
        if not link:
            continue
        if differs[number]:
            wrong.setdefault(link, passed[link])
        passed[link] += 1
        if is_before and entries[number].receives:
            received[link] = passed[link]
    return RankDifference(entries[first].label, dict(received), wrong)


def sort_messages(entries: Sequence[Entry]) -> list[int]:
    """Return the indices of the entries, with sends before the receives of the same batch.

    A schedule starts a send and a receive together. What it sends was computed before.
    """
    order: list[int] = []
    waiting: list[int] = []
    for number, entry in enumerate(entries):
        if entry.receives and not entry.sends:
            waiting.append(number)
            continue
        # Anything but a send may depend on what was received.
        if not (entry.link and entry.sends and not entry.receives):
            order += waiting
            waiting = []
        order.append(number)
    return order + waiting


def find_first_ranks(differences: Sequence[RankDifference | None]) -> list[int]:
    """Return the ranks whose first difference depends on no difference of another rank.

    Args:
        differences: The difference of each rank, or None if its passes agree.
    """
    # Link -> the ranks that sent wrong numbers over it, each with the index of the first message.
    senders: dict[str, list[tuple[int, int]]] = {}
    for rank, difference in enumerate(differences):
        if difference is not None:
            for link, number in difference.wrong.items():
                senders.setdefault(link, []).append((rank, number))
    first = []
    for rank, difference in enumerate(differences):
        if difference is None:
            continue
        # A message with an index below the count had arrived before the first difference.
        caused = any(
            sender != rank and number < count
            for link, count in difference.received.items()
            for sender, number in senders.get(link, ())
        )
        if not caused:
            first.append(rank)
    return first
