"""The watchdog of `--hang-timeout`: a roll call that also starts when a phase takes too long.

Each rank publishes its phase and its line of code in the rendezvous store once a second. A second
thread, which never asks the store, compares the time of the phase with its limit. The rank that
notices a hang first calls the roll: through the store it asks each rank for its state. All ranks
that answer write their stacks and their collectives into the run's folder. The caller compares the
states and names the ranks that the others wait for. Then all ranks end.

The thread that publishes may block if the store hangs. The second thread then reports that the
process that keeps the store does not answer.
"""

import contextlib
import faulthandler
import functools
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron.base import exit_codes
from megatron.base.durable import replace_file
from megatron.base.errors import HungRanksError, LostRanksError
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.extras.watch.watchdog.hang_verdict import describe_states, find_odd_ranks
from megatron.extras.watch.watchdog.stopwatch import Stopwatch, is_compiling
from megatron.parallel.messages import OutOfStepError
from megatron.parallel.rank_progress import (
    FILE_THREAD,
    FIRST_SECONDS,
    RankProgress,
    RankState,
    TimeLimit,
    find_location,
    is_waiting,
    locate_thread,
)
from megatron.parallel.roll_call import (
    BEAT_SECONDS,
    CALLED,
    FINISHED,
    SHOWN,
    Found,
    RollCall,
    call_in_thread,
    store_is_rank_zeros,
)
from megatron.parallel.store_values import (
    make_call_name,
    parse_seconds,
    parse_state,
    read_call_name,
    read_text,
)
from megatron.parallel.torch_private import read_flight_recorder

_RECENT = 4
"""Number of collectives of a group that the state of a rank has."""
_DISTRIBUTED = str(Path(dist.__file__).parent)


def read_state(main: int, progress: RankProgress, *, with_collectives: bool) -> RankState:
    """Return what this rank does.

    Args:
        main: Identifier of the main thread.
        progress: The phases of this rank.
        with_collectives: Whether to read the flight recorder, which takes milliseconds.
    """
    frame = sys._current_frames().get(main)
    at = find_location(reversed(list(traceback.walk_stack(frame))))
    waits = frame is not None and (
        frame.f_code.co_filename.startswith(_DISTRIBUTED) or is_waiting(frame)
    )
    if progress.phase.in_threads:
        # The main thread alternates between its thread and short collectives.
        busy = [each for each in threading.enumerate() if each.name == FILE_THREAD]
        waits = not busy
        for each in busy:
            if each.ident is not None:
                at = locate_thread(each.ident)
    state = RankState(at, waits, progress.phase.name, progress.sequence, published=time.time())
    if not with_collectives:
        return state
    recent, collective = find_last_collectives(read_flight_recorder())
    last = {group: [max(found), found[max(found)]] for group, found in recent.items()}
    # The state is sent as JSON, which has no numbers as keys.
    named = {
        group: {str(number): operation for number, operation in found.items()}
        for group, found in recent.items()
    }
    return replace(state, collectives=last, recent=named, collective=collective)


def find_last_collectives(entries: list[dict[str, Any]]) -> tuple[dict[str, dict[int, str]], str]:
    """Return the last collectives of each group, and the last one of all groups in words.

    The first result is group -> number in the group -> operation with sizes.

    Args:
        entries: What `read_flight_recorder` returned.
    """
    last: dict[str, dict[int, str]] = {}
    text = ""
    for entry in entries:
        # Two ranks may have sent each other a different number of messages.
        if entry["is_p2p"]:
            continue
        group = entry["process_group"][0]
        sizes = " ".join(str(size) for size in entry["input_sizes"])
        operation = f"{entry['profiling_name']} {sizes}"
        found = last.setdefault(group, {})
        found[entry["collective_seq_id"]] = operation
        if len(found) > _RECENT:
            del found[min(found)]
        text = f"{operation}, number {entry['collective_seq_id']} of group {group}"
    return last, text


def write_state(folder: Path, rank: int) -> None:
    """Write the stacks of all threads and the flight recorder of this rank.

    Args:
        folder: It is created if it does not exist.
        rank: This rank.

    Raises:
        OSError: The files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"rank_{rank:06d}_stacks.txt", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    text = json.dumps(read_flight_recorder())
    (folder / f"rank_{rank:06d}_collectives.json").write_text(text)


TICK_SECONDS = 0.25
"""Seconds between two comparisons of the phase with its limit."""
_LONGEST_WINDOW_SECONDS = 3.0
"""The longest time in which a rank must answer."""
_WRITE_SECONDS = 1.0
"""The longest time for the files of a rank. The file system may be what hangs."""
_LINGER_SECONDS = 1.0
"""Time for which rank 0 keeps the store after the verdict."""
_BEATS = 2.5
"""A rank that publishes nothing in the time of this many heartbeats does not run."""
_RANKS_PER_BEAT = 4000
"""With more ranks, heartbeats are rarer than one in BEAT_SECONDS, because one store gets all."""
_REGULAR_THREADS = ("watchdog", "roll call", "lease", "index build")
"""Threads that run at intervals, also if this rank hangs."""
_HUNG = "roll_call/hung"
"""The key in the store that is set if no rank has crashed, before the roll is called."""
FOLDER = "hangs"
"""Folder of the files about hangs, in the folder of `--save`."""


class Watchdog(RollCall):
    """A context manager around the run that ends it when a phase exceeds its limit."""

    _REPORTED = (
        "the run hangs or a collective has failed; another rank reports which ranks the others "
        "wait for"
    )

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        names: Sequence[str],
        limit: TimeLimit,
        *,
        progress: RankProgress,
        hang_timeout: float | None,
        folder: Path | None,
        report: Callable[[HungRanksError, str], None],
    ) -> None:
        """Connect to the store.

        Args:
            store: The rendezvous store.
            rank: This rank.
            names: The names of all ranks for messages.
            limit: The limit of `--distributed-timeout-minutes`.
            progress: The phases of this rank.
            hang_timeout: Seconds that a step may take. See `Phase.factor` for other phases. None:
                auto, see `Stopwatch`.
            folder: The folder of `--save`. Without one, only the stacks are printed.
            report: Reports an error to the launcher, and prints a message.
        """
        super().__init__(store, rank, names, limit)
        self._window = min(self._window, _LONGEST_WINDOW_SECONDS)
        self._progress = progress
        self._stopwatch = Stopwatch(progress, hang_timeout, TICK_SECONDS)
        self._folder = folder
        self._report = report
        self._beats: dict[int, RankState] = {}
        """The last known state of the ranks that do not answer, and of rank 0."""
        self._hang_timeout = hang_timeout
        self._spacing = BEAT_SECONDS * max(1.0, len(names) / _RANKS_PER_BEAT)
        self._next_beat = 0.0
        self._asking: threading.Thread | None = None
        self._asked = (0, 0.0)
        """The last number of the phase and the limit about which the others were asked."""
        self._verdict = ""
        self._call_name = ""
        # The thread that holds it reports for this rank and ends the process. It is never released.
        self._acting = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        """Start to answer calls and to watch."""
        super().__enter__()
        self._watcher.start()
        return self

    # -- in the thread of the store ---------------------------------------------------------------

    def beat(self, store: dist.Store) -> None:
        """Publish this rank's state, and remember rank 0's in case its store stops answering."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self._spacing
        watch = self._stopwatch
        limit = watch.limit
        # Most phases are over before anybody asks.
        if watch.seconds > BEAT_SECONDS and is_compiling():
            limit = max(limit, FIRST_SECONDS)
        elif watch.is_first:
            # A rank that works again gets the time back that the ranks took from it.
            idle = watch.is_idle(self._list_workers())
            limit = watch.silent_limit if idle else watch.own_limit
        state = read_state(self._main, self._progress, with_collectives=False)
        state = replace(state, limit=limit)
        store.set(_make_beat_key(self._rank), json.dumps(asdict(state)))
        if store_is_rank_zeros():
            self._read_beat(store, 0)

    def _list_workers(self) -> list[threading.Thread]:
        """Return the threads whose work shows that this rank does not hang."""
        others = {*_REGULAR_THREADS}
        if self._progress.phase.in_threads:
            # It only waits for its thread, and exchanges messages meanwhile.
            others.add(threading.main_thread().name)
        # The meter of emissions starts a timer for each of its measurements.
        return [
            each
            for each in threading.enumerate()
            if each.name not in others and not isinstance(each, threading.Timer)
        ]

    def _read_beat(self, store: dist.Store, rank: int) -> None:
        """Remember the state that a rank has published, if there is one."""
        key = _make_beat_key(rank)
        if store.check([key]) and (state := parse_state(store.get(key))) is not None:
            self._beats[rank] = state

    def _describe_self(self) -> dict[str, Any]:
        state = read_state(self._main, self._progress, with_collectives=True)
        if self._leaving.is_set():
            # The main thread was in a collective, which has failed.
            state = replace(state, waits=True)
        return asdict(state)

    def _leave_after_answer(self, store: dist.Store) -> None:
        """End this process with the caller's verdict, unless another thread does that."""
        if self._leaving.is_set():
            super()._leave_after_answer(store)
        if self._acting.acquire(blocking=False):
            self._follow(store)

    # -- in the thread that watches ---------------------------------------------------------------

    def _watch(self) -> None:
        """Call the roll when a phase exceeds its limit, then end this process."""
        while not self._exceeds_limit():
            if self._leaving.wait(TICK_SECONDS):
                return
        if not self._acting.acquire(blocking=False):
            return
        found = Found()

        def call_roll() -> None:
            self._store.set(_HUNG, "1")
            self._call(self._describe_self()["at"], found)

        # A request to a store whose process hangs never returns.
        call = call_in_thread(call_roll)
        call.join(self._window)
        if found.reached:
            call.join(self._window)
        if not found.first:
            follow = call_in_thread(lambda: self._follow(self._store))
            follow.join(3 * self._window)
            # The process of the store has ended, and with it the verdict.
            self._report(HungRanksError(self._describe_exit()), self._describe_exit())
            os._exit(exit_codes.FOUND)
        # A silent store has not asked for the name.
        name = self._call_name or self._describe_call()
        verdict = self._verdict or self._describe_hang(found)
        self._write_files(name)
        self._write_verdict(verdict)
        self._report(HungRanksError(verdict, self._find_hosts(found)), verdict)
        self._end()

    def _exceeds_limit(self) -> bool:
        """Return whether the run must end. With auto, ask the other ranks and warn before that."""
        watch = self._stopwatch
        watch.tick(time.monotonic())
        if self._hang_timeout is not None:
            return watch.seconds > watch.limit
        if math.isinf(watch.limit):
            return False
        patience = max(_BEATS * self._spacing, watch.quiet_seconds)
        # With nccl, torch ends the process after this time-out, without a name.
        first = min(watch.silent_limit, 0.9 * self._limit.collective.total_seconds())
        if watch.is_first:
            # A rank may become idle later.
            step = 2 * patience
            first += step * max(0, math.ceil((watch.seconds - first) / step))
        number = watch.number
        for limit in (first, watch.limit, 2 * watch.limit):
            asked = (number, limit)
            if watch.seconds > limit - patience and asked > self._asked:
                self._asked = asked
                ask = functools.partial(self._ask_others, number, limit)
                self._asking = call_in_thread(ask)
        if watch.seconds <= 2 * watch.limit:
            return False
        # The answer may allow more time. A store that hangs gives none.
        waits = self._asking is not None and self._asking.is_alive()
        return not waits or watch.seconds > 2 * watch.limit + 4 * patience

    def _ask_others(self, number: int, due: float) -> None:
        """Find out how long the phases of the other ranks may take, and change the limit.

        The first rank that asks reads the heartbeats of all. The others read its answer.

        Args:
            number: The number of the phase.
            due: The seconds of the phase after which it must be known. Up to the limit, a warning
                says that the run will end.

        Raises:
            RuntimeError: The store has ended.
        """
        watch = self._stopwatch
        warns = due <= watch.limit
        # The end comes at twice the limit, and not before the time that a warning has named.
        least = min(due, watch.limit)
        # Read now, because the phase may be over when the others have answered.
        limit = watch.silent_limit if watch.is_first else watch.limit
        patience = max(_BEATS * self._spacing, watch.quiet_seconds)
        # A phase may begin again within the same iteration.
        key = f"asked/{self._progress.sequence}/{watch.phase.name}/{warns}/{due:.0f}"
        if self._store.add(key, 1) > 1:
            time.sleep(1.5 * patience)
            end = time.monotonic() + 2 * patience
            while not self._store.check([f"{key}/limit"]):
                if time.monotonic() > end:
                    return
                time.sleep(self._spacing)
            watch.change_limit(number, parse_seconds(self._store.get(f"{key}/limit")))
            return
        before = self._read_all_beats()
        time.sleep(patience)
        after = self._read_all_beats()
        live = {
            rank: state
            for rank, state in after.items()
            if rank not in before or state.published != before[rank].published
        }
        is_complete = len(live) == len(self._names)
        if is_complete:
            limit = max(state.limit for state in live.values())
        limit = max(limit, least)
        self._store.set(f"{key}/limit", repr(limit))
        # The phase may be over.
        if not watch.change_limit(number, limit) or not warns:
            return
        if is_complete and watch.seconds + patience < limit:
            return
        # Ranks in parts with other limits ask as well.
        if self._store.add(f"warned/{self._progress.iteration}/{watch.phase.kind}", 1) > 1:
            return
        missing = [rank for rank in range(len(self._names)) if rank not in live]
        lines = [self._describe_missing(rank) for rank in missing[:SHOWN]]
        lines += describe_states(live, self._names, with_odd=is_complete)
        print_line(
            f"warning: {watch.name} has taken {watch.seconds:.0f} s; the limit of --hang-timeout "
            f"auto is {watch.limit:.0f} s, and the run ends after twice that time, or when a "
            "collective times out:\n  " + "\n  ".join(lines)
        )

    def _read_all_beats(self) -> dict[int, RankState]:
        keys = [_make_beat_key(rank) for rank in range(len(self._names))]
        # One request in place of two for each rank. It would wait for a key that is not there.
        if self._store.check(keys):
            states = map(parse_state, self._store.multi_get(keys))
            self._beats |= {rank: state for rank, state in enumerate(states) if state is not None}
        else:
            for rank in range(len(keys)):
                self._read_beat(self._store, rank)
        return dict(self._beats)

    def _follow(self, store: dist.Store) -> None:
        """Write this rank's files, wait for the caller's verdict, and end this process.

        Raises:
            RuntimeError: The store has ended.
        """
        verdict = None
        is_hang = False
        try:
            is_hang = store.check([_HUNG])
            # Without a valid name, this rank uses one of its own.
            self._write_files(read_call_name(store, CALLED) or self._describe_call())
            self._wait_until({FINISHED}, 2 * self._window, store)
            if store.check([FINISHED]):
                verdict = read_text(store, FINISHED)
        finally:
            # The caller has printed the verdict. The launcher reads it from any rank's file.
            message = self._describe_exit()
            if is_hang:
                self._report(HungRanksError(verdict or message), message)
            else:
                # A rank has crashed. A report would count as a hang.
                print_to_stderr(f"{LostRanksError.__name__}: {message}")
            self._end()

    def _build_out_of_step_error(self, error: OutOfStepError) -> LostRanksError:
        """Report the error to the launcher as a hang is, and end this process."""
        # If another thread reports a hang already, that report is at least as good.
        if not self._acting.acquire(blocking=False):
            time.sleep(6 * self._window)
            return LostRanksError(self._describe_exit())
        text = self._describe_out_of_step(error)
        call_in_thread(lambda: self._store.set(_HUNG, "1")).join(self._window)
        self._describe_call()
        self._write_files(self._call_name)
        if self._rank == 0:
            self._write_verdict(text)
        others = f"{self._names[self._rank]} exits, because {self._REPORTED}"
        self._report(HungRanksError(text), text if self._rank == 0 else others)
        self._end()

    def _build_error(self, error: BaseException) -> LostRanksError:
        if self._acting.acquire(blocking=False):
            return super()._build_error(error)
        # Another thread is about to report the hang and to end this process. A collective fails as
        # soon as another rank has ended.
        time.sleep(6 * self._window)
        return LostRanksError(self._describe_exit())

    def _end(self) -> NoReturn:
        """End this process. Rank 0 stays until the others have read the verdict in its store."""
        if self._rank == 0 and len(self._names) > 1 and store_is_rank_zeros():
            time.sleep(_LINGER_SECONDS)
        os._exit(exit_codes.FOUND)

    # -- files ------------------------------------------------------------------------------------

    def _describe_call(self) -> str:
        """Return the name of the folder for the files of all ranks: iteration and time."""
        self._call_name = make_call_name(self._progress.iteration)
        return self._call_name

    def _write_files(self, name: str) -> None:
        """Write this rank's stacks and collectives, within a time limit."""
        if self._folder is None:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            return
        folder = self._folder / FOLDER / name
        _write_in_thread(lambda: write_state(folder, self._rank))

    def _write_verdict(self, verdict: str) -> None:
        if self._folder is not None:
            path = self._folder / FOLDER / self._call_name / "verdict.txt"
            _write_in_thread(lambda: replace_file(path, f"{verdict}\n"))

    # -- messages ---------------------------------------------------------------------------------

    def _conclude(self, found: Found) -> str:
        """Compare the states of all ranks, and return the verdict."""
        for rank in range(len(self._names)):
            if rank not in found.answers:
                self._read_beat(self._store, rank)
        self._verdict = self._describe_hang(found)
        return self._verdict

    def _describe_hang(self, found: Found) -> str:
        phase = self._progress.phase
        lines = [*self._list_missing(found), *self._list_left(found)]
        if self._leaving.is_set():
            # gloo and NCCL fail at once when a process ends, so no limit was exceeded.
            lost = ""
            if lines:
                lost = "the run has lost ranks: "
            what = f"{lost}a collective of {phase.name} failed"
        else:
            watch = self._stopwatch
            factor = "" if phase.is_repeated else f"{phase.factor:g} x "
            limit = f"{factor}--hang-timeout {self._hang_timeout or 0.0:g} s"
            if self._hang_timeout is None:
                limit = f"twice the {watch.limit:.0f} s of --hang-timeout auto"
            what = (
                f"the run hangs: {watch.name} has taken {watch.seconds:.0f} s, and the limit is "
                f"{limit}"
            )
        lines += self._list_locations(found)
        text = f"{what}:\n  " + "\n  ".join(lines)
        if self._folder is not None:
            text += (
                "\nthe stacks and collectives of the ranks that answer are in "
                f"{self._folder / FOLDER / self._call_name}"
            )
        return f"{text}\ncheck the hosts that are named, and start again with the same command"

    def _describe(self, found: Found, error: BaseException) -> str:
        """Return the message after a failed collective, and write this rank's files as well."""
        text = super()._describe(found, error)
        self._write_files(self._call_name or self._describe_call())
        self._write_verdict(text)
        return text

    def _describe_missing(self, rank: int) -> str:
        text = super()._describe_missing(rank)
        beat = self._beats.get(rank)
        if beat is None:
            return text
        # The clocks of two hosts may differ by a little.
        age = max(0.0, time.time() - beat.published)
        text = f"{text}; {age:.0f} s ago, it was at {beat.at} in {beat.phase}"
        if beat.phase == self._progress.phase.name:
            return text
        return f"{text}, but others are in {self._progress.phase.name}, so it may have gone on"

    def _find_hosts(self, found: Found) -> list[str]:
        """Return the hosts of the ranks that the others wait for, each once.

        The list is empty if nothing shows which host is the cause.
        """
        if not found.answers:
            # The store is silent. Under torchrun the launcher keeps it, which is not a rank.
            ranks = []
            if store_is_rank_zeros():
                ranks = [0]
        else:
            ranks = [rank for rank in range(len(self._names)) if rank not in found.answers]
        # A rank that has left has reported its own error.
        if not ranks and not self._list_left(found):
            states = _parse_states(found)
            ranks = sorted(find_odd_ranks(states))
            if len(ranks) == len(states):
                return []
        return sorted({_parse_host(self._names[rank]) for rank in ranks})

    def _list_locations(self, found: Found) -> list[str]:
        states = _parse_states(found)
        # A rank that is missing or has left is the one that the others wait for.
        missing = len(states) < len(self._names)
        return describe_states(states, self._names, with_odd=not missing)


def _write_in_thread(write: Callable[[], None]) -> None:
    """Write files, within a time limit. Their file system may be what hangs."""

    def attempt() -> None:
        # The verdict is printed as well.
        with contextlib.suppress(OSError):
            write()

    call_in_thread(attempt).join(_WRITE_SECONDS)


def _parse_states(found: Found) -> dict[int, RankState]:
    """Return the states of the ranks that have answered and have not left."""
    return {
        rank: RankState(**answer) for rank, answer in found.answers.items() if "sequence" in answer
    }


def _parse_host(name: str) -> str:
    """Return the host in a rank's name, such as "rank 2 on n7 (pipeline 0, data 1, tensor 0)"."""
    return name.partition(" on ")[2].partition(" ")[0]


def _make_beat_key(rank: int) -> str:
    return f"heartbeat/{rank}"
