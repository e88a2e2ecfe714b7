"""The roll call: which ranks still answer after a collective has failed.

A collective that times out does not report which rank was missing. So a thread of each rank answers
through the rendezvous store, even while the main thread waits in a collective. The rank whose
collective fails first calls the roll and names those that do not answer. Then the run ends. Each
rank ends by itself, whether or not the missing ones ever come back.

The thread needs Python's global interpreter lock. A rank whose main thread is in C code that holds
this lock cannot answer either.
"""

import contextlib
import json
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron.base import exit_codes
from megatron.base.errors import LayoutError, LostRanksError
from megatron.base.plain_text import print_to_stderr
from megatron.parallel.launcher import read_meeting_point
from megatron.parallel.messages import OutOfStepError
from megatron.parallel.rank_progress import TimeLimit, find_location, locate_thread
from megatron.parallel.store_values import parse_answer

CALLED = "roll_call/called"
"""The key in the store that is set when the roll is called."""
_CALLERS = "roll_call/callers"
"""The key that counts callers, so that only the first one evaluates the answers."""
FINISHED = "roll_call/finished"
"""The key that is set when the caller has read the answers."""
BEAT_SECONDS = 1.0
"""The longest time between two looks at the store."""
_NO_ANSWER = "does not answer: it hangs or has ended, or its host cannot be reached"
SHOWN = 8
"""Largest number of lines about ranks in a message."""


def store_is_rank_zeros() -> bool:
    """Return whether rank 0 keeps the rendezvous store.

    Under torchrun the launcher of the first node keeps it.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


class RollCall:
    """A context manager around the run that answers for this rank and asks the others."""

    _REPORTED = "a collective has failed; another rank reports which ranks are missing"
    """Why a rank exits that has answered another one."""

    def __init__(
        self, store: dist.Store, rank: int, names: Sequence[str], limit: TimeLimit
    ) -> None:
        """Connect to the store.

        Args:
            store: The rendezvous store.
            rank: This rank.
            names: The names of all ranks for messages.
            limit: The limit of `--distributed-timeout-minutes`.
        """
        self._rank = rank
        self._names = names
        self._limit = limit
        # A store connection serves one request at a time. A request that waits would block the
        # others, so this object and its thread have a connection each.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._window = limit.roll_call.total_seconds() * 2 / 5
        """Seconds in which a rank must answer."""
        # `_leaving` is set when the main thread is about to end. `_answered` is set when this
        # rank's thread has answered a call.
        self._leaving = threading.Event()
        self._answered = threading.Event()
        self._main = threading.get_ident()
        # A daemon thread does not keep the process alive.
        self._thread = threading.Thread(
            target=self._answer, args=(own,), name="roll call", daemon=True
        )

    def use_names(self, names: Sequence[str]) -> None:
        """Name the ranks in messages by these names from now on.

        The coordinates of the ranks are known only after the ranks have been divided.
        """
        self._names = names

    def __enter__(self) -> "RollCall":
        """Start to answer calls."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Stop answering. Replace an error of communication by one that names the missing ranks.

        Raises:
            LostRanksError: A collective has failed.
        """
        # Set it first, or the thread could end the process while this method writes its message.
        self._leaving.set()
        if isinstance(error, OutOfStepError) and error.places:
            raise self._build_out_of_step_error(error) from error
        cause = lost_connection(error)
        if cause is not None:
            raise self._build_error(cause) from error
        left = "it finished"
        if error is not None:
            left = f"{type(error).__name__}: {error}"
        call_in_thread(lambda: self._leave(left, last=error is None)).join(self._window)

    def _build_out_of_step_error(self, error: OutOfStepError) -> LostRanksError:
        """Return the error to raise when the ranks exchange different messages.

        All ranks know where all of them are, so nobody has to be asked.
        """
        return LostRanksError(self._describe_out_of_step(error))

    def _describe_out_of_step(self, error: OutOfStepError) -> str:
        lines = describe_places(error.places, self._names)
        return (
            "the ranks are out of step, because one has left out a collective:\n  "
            + "\n  ".join(lines)
            + "\ncheck the hosts that are named, and start the run again with the same command"
        )

    def _build_error(self, error: BaseException) -> LostRanksError:
        """Call the roll, unless another rank has called it. Return the error to raise.

        The rank that called first names the missing ranks. The errors of the others are short.
        """
        found = Found()
        where = find_location(traceback.walk_tb(error.__traceback__))
        if not self._answered.is_set():
            # A request to a store whose process hangs never returns. In a thread it can be
            # abandoned.
            call = call_in_thread(lambda: self._call(where, found))
            call.join(self._window)
            # A store that has answered once is only slow, so it gets more time.
            if found.reached:
                call.join(self._window)
        # This rank's thread may have answered another caller meanwhile. If that caller kept the
        # store and has ended, `found` is empty, and `first` still has its default True.
        if not self._answered.is_set() and found.first:
            return LostRanksError(self._describe(found, error))
        return LostRanksError(self._describe_exit())

    # -- through the store ------------------------------------------------------------------------

    def _answer(self, store: dist.Store) -> None:
        """Answer when the roll is called, then end this process.

        If the main thread is about to end the process itself, this thread only returns.
        """
        try:
            # The interval must be a fraction of the window, or a rank could answer too late.
            while not store.check([CALLED]):
                self.beat(store)
                if self._leaving.wait(min(BEAT_SECONDS, self._window / 4)):
                    return
            # The main thread is leaving as well, and it answers for this rank.
            if self._leaving.is_set():
                return
            _post_answer(store, self._rank, **self._describe_self())
            self._answered.set()
        # The store has ended. The main thread notices it in its next collective.
        except RuntimeError:
            return
        self._leave_after_answer(store)

    def beat(self, store: dist.Store) -> None:
        """Do what is due at each look at the store. It may block if the store hangs."""

    def _describe_self(self) -> dict[str, Any]:
        """Return the answer of this rank."""
        return {"at": locate_thread(self._main)}

    def _leave_after_answer(self, store: dist.Store) -> None:
        """End this process, unless the main thread does that in time."""
        # A main thread that waits in a collective may never return. `os._exit` ends the process
        # without it. The message is flushed first, because `os._exit` flushes nothing.
        if not self._leaving.wait(self._limit.roll_call.total_seconds()):
            print_to_stderr(f"{LostRanksError.__name__}: {self._describe_exit()}")
            os._exit(exit_codes.FOUND)

    def _leave(self, left: str, *, last: bool) -> None:
        """Report that this rank does not answer any more, and why.

        Args:
            left: The reason.
            last: Whether to wait until all ranks have answered or left, if this rank keeps the
                store.
        """
        # The thread must not overwrite the reason by an answer.
        self._thread.join(self._window)
        _post_answer(self._store, self._rank, left=left)
        if last and self._rank == 0 and store_is_rank_zeros():
            self._wait_until(set(map(_make_key, range(len(self._names)))), self._window)

    def _call(self, where: str, found: "Found") -> None:
        """Call the roll and put the answers into `found`. Only the first caller waits for them.

        Args:
            where: The line of this package at which the collective failed.
            found: What is known so far, updated in place.
        """
        # Count this caller before it answers. The first caller may end, and the store with it, as
        # soon as all ranks have answered.
        found.first = self._store.add(_CALLERS, 1) == 1
        found.reached = True
        _post_answer(self._store, self._rank, **self._describe_self() | {"at": where})
        if not found.first:
            return
        self._store.set(CALLED, self._describe_call())
        self._wait_until(set(map(_make_key, range(len(self._names)))), self._window)
        keys = {
            rank: _make_key(rank)
            for rank in range(len(self._names))
            if self._store.check([_make_key(rank)])
        }
        answers = self._store.multi_get(list(keys.values()))
        parsed = {rank: parse_answer(answer) for rank, answer in zip(keys, answers, strict=True)}
        # A rank whose answer cannot be read counts as one that does not answer.
        found.answers = {rank: answer for rank, answer in parsed.items() if answer is not None}
        self._store.set(FINISHED, self._conclude(found))

    def _describe_call(self) -> str:
        """Return what the ranks that answer must know about the call."""
        return "1"

    def _conclude(self, found: "Found") -> str:
        """Return what the ranks that have answered must know about the result."""
        return "1"

    def _wait_until(self, keys: set[str], seconds: float, store: dist.Store | None = None) -> bool:
        """Wait until the store has all keys, at most for `seconds`. Return whether it has them."""
        end = time.monotonic() + seconds
        while not (found := (store or self._store).check(list(keys))) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    # -- messages ---------------------------------------------------------------------------------

    def _describe_exit(self) -> str:
        """Wait until another rank has read the answers, and return why this one exits."""
        finished: list[bool] = []
        # Rank 0 may keep the store, which the other rank still needs.
        seconds = 2 * self._window
        call_in_thread(lambda: finished.append(self._wait_until({FINISHED}, seconds))).join(
            seconds + self._window
        )
        head = f"{self._names[self._rank]} exits, because"
        if finished != [False]:
            return f"{head} {self._REPORTED}"
        host, port = read_meeting_point()
        return (
            f"{head} the store at {host}:{port} says that a rank has called the roll, but no rank "
            "has called it or reports a reason. Either that rank has ended meanwhile, or another "
            "process has written into the store: find out which other jobs and users can reach "
            f"port {port} of {host}, and start the run again with the same command"
        )

    def _describe(self, found: "Found", error: BaseException) -> str:
        """Return the message of the rank that called first."""
        lines = [*self._list_missing(found), *self._list_left(found)] or self._list_locations(found)
        more = len(lines) - SHOWN
        if more > 0:
            lines = [*lines[:SHOWN], f"and {more} more"]
        return (
            "the ranks cannot continue together:\n  "
            + "\n  ".join(lines)
            + f"\n{self._names[self._rank]} noticed it (--distributed-timeout-minutes "
            f"{self._limit.minutes:g}): " + f"{str(error).splitlines()[0]}\n"
            "check the hosts that are named, and start the run again with the same command"
        )

    def _list_missing(self, found: "Found") -> list[str]:
        """Return a line for each rank that has not answered.

        Without any answer it is the store that cannot be reached, so the line names its keeper.
        """
        if found.answers:
            return [
                self._describe_missing(rank)
                for rank in range(len(self._names))
                if rank not in found.answers
            ]
        if store_is_rank_zeros():
            return [
                f"{self._describe_missing(0)}; it hosts the store of all ranks, "
                "so that no other rank could be asked"
            ]
        host = os.environ.get("MASTER_ADDR", "?")
        return [
            f"the launcher on {host} {_NO_ANSWER}; it hosts the store of all ranks, "
            "so that no rank could be asked"
        ]

    def _describe_missing(self, rank: int) -> str:
        """Return the name of a rank that does not answer, and what is known about it."""
        return f"{self._names[rank]} {_NO_ANSWER}"

    def _list_left(self, found: "Found") -> list[str]:
        """Return a line for each rank that has left the run, with the reason."""
        answers = sorted(found.answers.items())
        return [
            f"{self._names[rank]} has left the run: {answer['left']}"
            for rank, answer in answers
            if "left" in answer
        ]

    def _list_locations(self, found: "Found") -> list[str]:
        """Return the lines of code at which the main threads are, if all ranks answer.

        The rank that the others wait for is at another line than they are.
        """
        ranks: dict[str, list[int]] = {}
        for rank, answer in sorted(found.answers.items()):
            ranks.setdefault(answer["at"], []).append(rank)
        rarest_first = sorted(ranks.items(), key=lambda item: len(item[1]))
        return [
            "all ranks answer, but a collective did not finish in time; they are at:",
            *(f"{at}: {self._names[same[0]]}{_count_others(same)}" for at, same in rarest_first),
        ]


@dataclass
class Found:
    """What a roll call has found so far. It remains empty while the store does not answer."""

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The answer of each rank that has answered: `at` a line of code, or `left` with a reason."""
    reached: bool = False
    """Whether the store has answered."""
    first: bool = True
    """Whether no other rank has called earlier."""


def lost_connection(error: BaseException | None) -> BaseException | None:
    """Return the error of a collective or the store that caused `error`, or None.

    gloo has no error class of its own. A pipeline schedule raises another error from it, so the
    causes are searched too.
    """
    cause = error
    while cause is not None:
        of_gloo = isinstance(cause, RuntimeError) and "gloo" in str(cause)
        if of_gloo or isinstance(cause, dist.DistError | OutOfStepError):
            # A LayoutError names the group whose first message has failed.
            return error if isinstance(error, LayoutError) else cause
        cause = cause.__cause__
    return None


def describe_places(places: Mapping[int, Sequence[str]], names: Sequence[str]) -> list[str]:
    """Return a line for each rank that sends another message than most, and one for the others.

    Args:
        places: Rank -> the function and the line of code at which it sends.
        names: The names of all ranks.
    """
    rare = find_rare(places, lambda rank: places[rank][0])
    lines = [f"{names[rank]} is at {places[rank][1]}" for rank in rare[:SHOWN]]
    others = Counter(places[rank][1] for rank in places if rank not in rare)
    # Without a majority, this line has all ranks.
    for place, count in others.most_common():
        lines.append(f"{count} of the other ranks are at {place}")
    return lines


def find_rare(ranks: Mapping[int, object], key: Callable[[int], Hashable]) -> list[int]:
    """Return the ranks whose key is rarer than the most common one. There may be none."""
    counts = Counter(key(rank) for rank in ranks)
    most = max(counts.values(), default=0)
    rare = [rank for rank in sorted(ranks) if counts[key(rank)] < most]
    # With several rare keys, the ranks that wait may be among them.
    fewest = min(counts.values(), default=0)
    return [rank for rank in rare if counts[key(rank)] == fewest]


def call_in_thread(act: Callable[[], None]) -> threading.Thread:
    """Call `act` in a thread, because it may never return.

    A request to the store does not return if the process that keeps the store hangs.
    """

    def attempt() -> None:
        # The store may have ended. The caller sees that nothing was found.
        with contextlib.suppress(RuntimeError):
            act()

    thread = threading.Thread(target=attempt, name="roll call", daemon=True)
    thread.start()
    return thread


def _make_key(rank: int) -> str:
    return f"roll_call/answer/{rank}"


def _post_answer(store: dist.Store, rank: int, **answer: Any) -> None:
    store.set(_make_key(rank), json.dumps(answer))


def _count_others(ranks: Sequence[int]) -> str:
    if len(ranks) > 1:
        return f" and {len(ranks) - 1} more"
    return ""
