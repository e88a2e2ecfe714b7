"""Comparison of the states of all ranks that answer, to find those that the others wait for."""

from collections import Counter
from collections.abc import Mapping, Sequence

from megatron.parallel.rank_progress import RankState
from megatron.parallel.roll_call import SHOWN, find_rare


def find_odd_ranks(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the ranks that the others wait for, each with the reason.

    Several signs are tried, the most reliable first.

    Args:
        states: The states of the ranks that answer.
    """
    for find in (
        _find_mixed_up,
        _find_busy,
        _find_other_phase,
        _find_behind,
        _find_other_operation,
        _find_elsewhere,
    ):
        found = find(states)
        if found:
            return found
    return dict.fromkeys(states, "no sign shows which rank the others wait for")


def describe_states(
    states: Mapping[int, RankState], names: Sequence[str], *, with_odd: bool
) -> list[str]:
    """Return a line for each rank that the others wait for, and one for the others.

    Args:
        states: The states of the ranks that answer.
        names: The names of all ranks.
        with_odd: Whether the rank that the others wait for may be among them.
    """
    odd: dict[int, str] = {}
    if with_odd:
        odd = find_odd_ranks(states)
    lines = []
    for rank, why in list(odd.items())[:SHOWN]:
        state = states[rank]
        lines.append(f"{names[rank]} is at {state.at} in {state.phase}: {why}")
    if len(odd) > SHOWN:
        lines.append(f"and {len(odd) - SHOWN} more")
    others = [state for rank, state in states.items() if rank not in odd]
    if others:
        place, count = Counter((state.at, state.collective) for state in others).most_common(1)[0]
        line = f"{count} of the other ranks are at {place[0]}"
        if place[1]:
            line += f"; their last collective is {place[1]}"
        lines.append(line)
    return lines


def _find_mixed_up(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the ranks that started another operation than most at a number that all have reached.

    A rank has then left out a collective, and gloo has taken its next message for the missing one.
    The other ranks may have gone on since.
    """
    for group in sorted({group for state in states.values() for group in state.recent}):
        members = {
            rank: state.recent[group] for rank, state in states.items() if group in state.recent
        }
        numbers = set.intersection(*(set(operations) for operations in members.values()))
        for number in sorted(numbers, key=int):
            own = {rank: operations[number] for rank, operations in members.items()}
            # The ranks may send different sizes in an exchange of all with all.
            if any("all_to_all" in operation for operation in own.values()):
                continue
            rare = find_rare(own, own.__getitem__)
            if rare:
                return {
                    rank: f"its collective number {number} of group {group} is {own[rank]}"
                    for rank in rare
                }
    return {}


def _find_busy(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the ranks that are not in a collective although others are."""
    busy = [rank for rank, state in states.items() if not state.waits]
    # No rank waits in a collective, so this difference says nothing.
    if len(busy) == len(states):
        return {}
    return dict.fromkeys(busy, "it is in no collective, and others wait for it in one")


def _find_other_phase(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the ranks that are in another phase than the others, as after a skipped collective."""
    rare = find_rare(states, lambda rank: states[rank].phase)
    return dict.fromkeys(rare, "the others are in another phase")


def _find_behind(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the ranks that have started fewer collectives of a group than its other members.

    A rank that skipped a collective of one group may be ahead in another one. The rank for which
    most others wait is then the one that skipped it.
    """
    waiting: Counter[int] = Counter()
    reasons: dict[int, str] = {}
    for state in states.values():
        for group, (number, operation) in state.collectives.items():
            for rank, other in states.items():
                own = other.collectives.get(group)
                if own is not None and own[0] < number:
                    waiting[rank] += 1
                    reasons[rank] = (
                        f"it has started {own[0]} collectives of group {group}, and others "
                        f"{number}, the last one {operation}"
                    )
    most = max(waiting.values(), default=0)
    found = {rank: reasons[rank] for rank, count in sorted(waiting.items()) if count == most}
    # If each rank waits for each other one, the numbers do not show who is the cause.
    return found if len(found) < len(states) else {}


def _find_other_operation(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the ranks whose last collective of a group is another operation than the others'."""
    groups = {group for state in states.values() for group in state.collectives}
    for group in sorted(groups):
        own = {
            rank: state.collectives[group][1]
            for rank, state in states.items()
            if group in state.collectives
        }
        rare = find_rare(own, own.__getitem__)
        if rare:
            return {rank: f"its last collective of group {group} is {own[rank]}" for rank in rare}
    return {}


def _find_elsewhere(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the ranks that are at another line of code than the others."""
    rare = find_rare(states, lambda rank: states[rank].at)
    return dict.fromkeys(rare, "the others are at another line")
