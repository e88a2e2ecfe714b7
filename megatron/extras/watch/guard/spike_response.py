"""The spike guard as a part of a run: what follows a spike is a record, a rollback or the end.

The data that its rollbacks skip are stored apart from the ranges of --skip-train-iteration-range.
That flag replaces the checkpoint's ranges, and must not bring back the data of a spike.

The records are in `SAVE/interventions.jsonl`. That of a rollback is on the disk before anything
else changes. So a run that is killed after that makes the same rollback at its next start.

A record is one JSON object a line. Its keys are

- time: in UTC. action: "spike-guard". decision: a value of `Response`.
- iteration, loss, grad_norm, learning_rate, dropped, reason.
- loss_limit, loss_lower_limit, grad_norm_limit: of normal values, or null if there is none.
- With the decision "rollback" also: to and digest (of the checkpoint that the run goes back to),
  from_digest (of its newest checkpoint), first, last_normal, skip ([first, last] iteration that is
  skipped), windows (of all rollbacks so far, `skip` included), and request (of the rollback).

Numbers that JSON lacks are strings, as in the metrics file. tools/rollback.py writes records of its
own into the same file, with the action "rollback".
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.base.durable import append_lines
from megatron.base.errors import CheckpointError, OperationsError, TrainingError
from megatron.checkpoint.folder import find_stored_folder, read_pointer
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import Lineage, LineageEntry, is_entry_on_disk
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.save import Saver
from megatron.config.tree import Config
from megatron.engine.base import AcceptOnDevice, StepResult
from megatron.extras.object_store.objects import find_address
from megatron.extras.operations.chronicle.records import read_objects
from megatron.extras.operations.rollback.execution import (
    INTERVENTIONS,
    find_unfinished,
    roll_back,
    roll_back_address,
    roll_back_within_run,
)
from megatron.extras.operations.rollback.rollback_plan import NOTHING, RollbackRequest, read_target
from megatron.extras.watch.guard.spike_guard import Response, Spike, SpikeGuard
from megatron.observe.metrics import encode_non_finite
from megatron.parallel.mesh import Mesh
from megatron.parallel.ranks import Ranks
from megatron.plan.run_plan import Plan
from megatron.run.parts import Guard, GuardKind
from megatron.run.state import TrainState
from megatron.schedule.skip import merge_ranges

ACTION = "spike-guard"
"""The action of the guard's records."""


def read_guard_records(root: Path) -> list[dict[str, Any]]:
    """Return the guard's records in a run's folder, in order. Lines that are cut off are left out.

    Raises:
        OSError: The file cannot be read.
    """
    return [record for record in _read_records(root) if record.get("action") == ACTION]


def _read_records(root: Path) -> list[dict[str, Any]]:
    path = root / INTERVENTIONS
    # Appending explains better what is wrong with another kind of file.
    if not path.is_file():
        return []
    return read_objects(path)


class GuardRecords:
    """Appends the guard's records, each once. Rank 0 uses it.

    After a kill, a run repeats iterations and makes the same decisions again.
    """

    def __init__(self, root: Path) -> None:
        """Use the file in a run's folder."""
        self._root = root

    def append(self, record: dict[str, Any]) -> None:
        """Append a record, unless the file has it already, and wait until it is on the disk.

        Raises:
            OSError: The file cannot be read or written.
        """
        record = {"action": ACTION, **record}
        key = _make_key(record)
        if key in self._known:
            return
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        append_lines(self._root / INTERVENTIONS, [json.dumps({"time": time, **record})])
        self._known.add(key)

    @cached_property
    def _known(self) -> set[str]:
        """The records since the last rollback, without their times."""
        known: set[str] = set()
        for record in _read_records(self._root):
            # Iterations after a rollback do not repeat those before it, so all of them are new.
            if record.get("action") == "rollback":
                known = set()
            known.add(_make_key(record))
        return known


def _make_key(record: dict[str, Any]) -> str:
    return json.dumps({**record, "time": ""}, sort_keys=True)


def build_record(spike: Spike, learning_rate: float) -> dict[str, Any]:
    """Return the record of a spike, without the keys that `GuardRecords` adds."""
    record: dict[str, Any] = {
        "decision": spike.response.value,
        "iteration": spike.iteration,
        "loss": spike.loss,
        "grad_norm": spike.grad_norm,
        "loss_limit": spike.loss_limit,
        "loss_lower_limit": spike.loss_lower_limit,
        "grad_norm_limit": spike.grad_norm_limit,
        "learning_rate": learning_rate,
        "dropped": spike.dropped,
        "reason": spike.reason,
    }
    encoded: dict[str, Any] = encode_non_finite(record)
    return encoded


# The decision to roll back


def choose_target(
    root: Path, lineage: Lineage, spike: Spike, skip_before: int
) -> LineageEntry | None:
    """Return the checkpoint to go back to, or None if there is none before the spike.

    It is the newest valid one before the data that will be skipped. If all are newer, it is the
    newest one before the spike.

    Args:
        root: The run's folder.
        lineage: The checkpoints that the run came through.
        spike: The spike.
        skip_before: Iterations before the spike that are skipped.

    Raises:
        OSError: A checkpoint cannot be read.
    """
    for newest in (spike.last_normal - skip_before, spike.last_normal):
        for entry in reversed(lineage):
            if entry.iteration <= newest and _is_usable(root, entry):
                return entry
    return None


def _is_usable(root: Path, entry: LineageEntry) -> bool:
    if not is_entry_on_disk(root, entry):
        return False
    try:
        read_target(root, entry.iteration)
    except (CheckpointError, OperationsError):
        return False
    return True


def decide_rollback(
    plan: Plan,
    lineage: Lineage,
    spike: Spike,
    windows: list[tuple[int, int]],
    record: dict[str, Any],
    records: GuardRecords,
) -> dict[str, Any] | None:
    """Choose the checkpoint and the data to skip, and write the record of the rollback.

    Rank 0 calls it. When this returns a record, the rollback takes place even after a kill.

    Args:
        plan: The run's plan.
        lineage: The checkpoints that the run came through, without one that is being saved.
        spike: The spike.
        windows: The ranges that earlier rollbacks skip.
        record: The record of the spike.
        records: Writes the record of the rollback.

    Returns:
        The record, or None if there is no checkpoint to go back to. In this case nothing is
        written.

    Raises:
        OSError: A checkpoint cannot be read, or the record cannot be written.
    """
    config = plan.config
    root = Path(str(config.checkpoint.save_folder))
    before, after = config.guard.find_skipped(plan.train_iters)
    target = choose_target(root, lineage, spike, before)
    if target is None:
        return None
    window = (
        max(target.iteration + 1, spike.last_normal + 1 - before),
        max(spike.iteration, spike.first + after),
    )
    request = RollbackRequest(
        to=target.iteration,
        skip=(f"{window[0]}-{window[1]}",),
        reason=f"spike guard at iteration {spike.iteration}: {spike.reason}",
        tensorboard_dir=_find_given(config.logging.tensorboard_dir),
        metrics_file=_find_given(config.logging.metrics_file or str(root / "metrics.jsonl")),
    ).make_absolute()
    record = {
        **record,
        "to": target.iteration,
        "digest": target.digest,
        "from_digest": lineage[-1].digest,
        "first": spike.first,
        "last_normal": spike.last_normal,
        "skip": list(window),
        "windows": [list(each) for each in [*windows, window]],
        "request": request.convert_to_record(),
    }
    records.append(record)
    return record


def _find_given(path: str | None) -> str:
    """Return the path of the run's records if it exists, and otherwise the word for no records."""
    if path is None or not Path(path).exists():
        return NOTHING
    return path


# The rollback


def execute_rollback(
    root: Path, record: dict[str, Any], lease: Lease, log: Callable[[str], None]
) -> None:
    """Roll this run's folder back according to a record. Rank 0 calls it and holds the lease.

    Raises:
        OperationsError, CheckpointError: The folder cannot be rolled back.
    """
    try:
        roll_back_within_run(root, _read_request(record), lease, log)
    except OSError as error:
        raise CheckpointError(
            f"the rollback of {root} to global_step{record['to']} was interrupted: {error}; start "
            "again with the same command, which continues it"
        ) from error


def finish_interrupted_rollback(config: Config, ranks: Ranks, log: Callable[[str], None]) -> bool:
    """Complete the rollback that an earlier launch decided on and did not complete.

    All ranks call it together, before they look for the checkpoint to start from.

    Returns:
        Whether there was one.

    Raises:
        OperationsError, CheckpointError: The folder cannot be rolled back.
    """
    if not config.checkpoint.resumes_itself or config.batch.eval_only:
        return False
    root = Path(str(config.checkpoint.save_folder))

    def finish() -> bool:
        try:
            record = None
            # Most runs have no such file.
            if (root / INTERVENTIONS).is_file():
                record = find_pending_rollback(root)
            if record is not None:
                log(
                    f"the spike guard of an earlier launch decided at iteration "
                    f"{record['iteration']} to go back to global_step{record['to']}; that rollback "
                    "is completed now"
                )
                address = find_address(str(config.checkpoint.save))
                if address is None:
                    roll_back(root, _read_request(record), log)
                else:
                    _roll_back_address(address, root, _read_request(record), log)
            return record is not None
        except OSError as error:
            raise CheckpointError(f"{root} cannot be rolled back: {error}") from error
        # A person may have edited the file.
        except (KeyError, TypeError) as damage:
            raise OperationsError(
                f"{root / INTERVENTIONS}: the spike guard's last rollback lacks a value: {damage}; "
                "correct its line, or remove it to start from the newest checkpoint"
            ) from damage

    return bool(ranks.call_on_rank_0(finish, f"completing the rollback of {root}", log))


def _roll_back_address(
    address: str, root: Path, request: RollbackRequest, log: Callable[[str], None]
) -> None:
    """Roll back a run on an object store. The records that were in --local-dir are there, too.

    Raises:
        OperationsError, CheckpointError: It cannot be rolled back.
    """

    def make_request(mirror: Path) -> RollbackRequest:
        def move(path: str | None) -> str | None:
            given = Path(path or NOTHING)
            # The launch that decided may have been on another host.
            if given.is_relative_to(root.absolute()):
                return _find_given(str(mirror / given.relative_to(root.absolute())))
            return path

        return replace(
            request,
            tensorboard_dir=move(request.tensorboard_dir),
            metrics_file=move(request.metrics_file),
        )

    roll_back_address(address, make_request, log, dry_run=False)


def find_pending_rollback(root: Path) -> dict[str, Any] | None:
    """Return the record of a rollback that was decided on and not completed, or None.

    A decision no longer counts if an operator has rolled back or moved the pointers since then.

    Raises:
        OSError: A file cannot be read.
        OperationsError: The plan of an unfinished rollback is damaged or missing.
    """
    last = None
    for record in _read_records(root):
        if record.get("action") == ACTION and record.get("decision") == Response.ROLLBACK.value:
            last = record
        elif record.get("action") == "rollback":
            last = _keep_if_unfinished(root, last, record)
    if last is None:
        return None
    plan = find_unfinished(root)
    if plan is not None:
        # It may be a rollback by an operator, who has to complete it.
        return last if plan.request == last["request"] else None
    try:
        pointer = read_pointer(root)
        if pointer is None:
            return None
        present = read_manifest(find_stored_folder(root, pointer.iteration))
    except CheckpointError:
        # The start reports what is wrong with the pointers.
        return None
    return last if present.digest == last["from_digest"] else None


def _keep_if_unfinished(
    root: Path, decision: dict[str, Any] | None, note: dict[str, Any]
) -> dict[str, Any] | None:
    """Return a decision after the note of a rollback, or None if the decision is completed.

    The note is written before the pointers move, so the rollback may still be unfinished.
    """
    if decision is None or note.get("reason") != decision["request"]["reason"]:
        return None
    plan = find_unfinished(root)
    if plan is None or plan.request != decision["request"]:
        return None
    return decision


def _read_request(record: dict[str, Any]) -> RollbackRequest:
    # A record of an earlier version also names the folder of the emissions, which are not cut.
    given = {name: value for name, value in record["request"].items() if name != "codecarbon_dir"}
    request = RollbackRequest(**given)
    return replace(request, skip=tuple(request.skip))


def find_guard_windows(root: Path, checkpoint: Checkpoint) -> list[list[int]] | None:
    """Return the ranges that the guard's rollbacks skip after a checkpoint.

    It is None if no rollback went back to this checkpoint. Its own state then has the ranges.

    Raises:
        CheckpointError: The file of interventions cannot be read, or its ranges are damaged.
    """
    try:
        records = read_guard_records(root)
    except OSError as error:
        raise CheckpointError(f"{root / INTERVENTIONS} cannot be read: {error}") from error
    for record in reversed(records):
        if record.get("digest") == checkpoint.manifest.digest and "windows" in record:
            try:
                return [[int(first), int(last)] for first, last in record["windows"]]
            # A person may have edited the file.
            except (TypeError, ValueError) as damage:
                raise CheckpointError(
                    f"{root / INTERVENTIONS}: the windows of the spike guard's rollback to "
                    f"iteration {record.get('to')} are {record['windows']!r}, and must be a list "
                    "of [first, last] iterations; correct that line"
                ) from damage
    return None


# The part of a run


def add_guard_windows(
    plan: Plan, state: TrainState, checkpoint: Checkpoint
) -> tuple[Plan, list[str]]:
    """Add the ranges of the guard's rollbacks to those that the plan skips. Rank 0 calls it.

    They are added even if the guard is off now. Otherwise the run would train on the data of the
    spike that it was rolled back for.

    Returns:
        The plan with these ranges, and the warnings to print. The state has the ranges too.

    Raises:
        CheckpointError: The file of interventions cannot be read.
    """
    if not plan.config.checkpoint.resumes_itself or plan.config.batch.eval_only:
        return plan, []
    windows = find_guard_windows(Path(str(plan.config.checkpoint.save_folder)), checkpoint)
    if windows is not None:
        state.keep_guard_windows(windows)
    ranges = [(first, last) for first, last in state.spike_guard.get("windows", [])]
    # Ranges that the run has passed need no message.
    ahead = [f"{first}-{last}" for first, last in ranges if last > state.iteration]
    if not ahead:
        return plan, []
    return replace(plan, skip_ranges=merge_ranges([*plan.skip_ranges, *ranges])), [
        f"the iterations {' '.join(ahead)} are skipped, because the spike guard has rolled back"
    ]


class SpikeGuardKind(GuardKind):
    """See `GuardKind`."""

    finish_interrupted_rollback = staticmethod(finish_interrupted_rollback)
    add_windows = staticmethod(add_guard_windows)

    def build(self, plan: Plan, state: TrainState, mesh: Mesh, log: Callable[[str], None]) -> Guard:
        """See `GuardKind`."""
        return RunGuard(plan, state, mesh, log)

    def roll_back(
        self, record: dict[str, Any], plan: Plan, mesh: Mesh, lease: Lease | None
    ) -> None:
        """See `GuardKind`."""
        log = mesh.ranks.log

        def execute() -> None:
            assert lease is not None, "rank 0 holds the lease"
            execute_rollback(Path(str(plan.config.checkpoint.save_folder)), record, lease, log)

        mesh.ranks.call_on_rank_0(execute, "rolling back", log)


class RunGuard(Guard):
    """The spike guard of a run, and its records. See `Guard`."""

    def __init__(
        self, plan: Plan, state: TrainState, mesh: Mesh, log: Callable[[str], None]
    ) -> None:
        """Continue from the state of a checkpoint.

        Args:
            plan: The plan of the run.
            state: The state of the run, with that of the guard.
            mesh: The ranks of the run.
            log: Prints a line of the log on rank 0.
        """
        self._plan = plan
        self._mesh = mesh
        self._log = log
        save = plan.config.checkpoint.save_folder
        self._records: GuardRecords | None = None
        if mesh.rank == 0 and save is not None:
            self._records = GuardRecords(Path(save))
        untrained_loss = math.log(plan.padded_vocab_size)
        self._guard = SpikeGuard(plan.config.guard, state.spike_guard, untrained_loss)
        if plan.config.guard.drops_steps:
            self.accept = self._guard.accepts

    def record(self, state: TrainState) -> None:
        """See `Guard`."""
        state.spike_guard = self._guard.state()

    def find_accept(self) -> AcceptOnDevice | None:
        """See `Guard`."""
        if self.accept is None:
            return None
        return self._guard.find_limits().accept

    def start_phase(self) -> None:
        """See `Guard`."""
        self._guard.start_phase()

    def respond(
        self, result: StepResult, learning_rate: float, state: TrainState, saver: Saver | None
    ) -> dict[str, Any] | None:
        """See `Guard`."""
        spike = self._guard.observe(result, state.iteration)
        if spike is None:
            return None
        # All ranks reach this point with the same numbers, so they decide alike.
        record = build_record(spike, learning_rate)
        if spike.response == Response.ROLLBACK:
            assert saver is not None, "a rule requires --save"
            rollback = self._decide(spike, record, saver)
            if rollback is not None:
                return rollback
            record["decision"] = (Response.SKIP_STEP if spike.dropped else Response.LOG).value
        # The reason is on the disk before an error ends the run.
        self._write(record)
        if spike.response == Response.STOP:
            raise TrainingError(
                f"the spike guard ends the run at iteration {spike.iteration}, because the run has "
                f"diverged: {spike.reason}. An untrained model has a loss of "
                f"{math.log(self._plan.padded_vocab_size):.4g}. Roll back with tools/rollback.py "
                "to an earlier checkpoint, and change what caused it: the data, a hyperparameter "
                "or the code"
            )
        done = "it was dropped" if spike.dropped else "it was applied"
        self._log(
            f"warning: spike guard: iteration {spike.iteration} is a spike and {done}: "
            f"{spike.reason}"
        )
        if spike.response == Response.SWITCH_TO_LOG:
            self._log(self._explain_switch(spike))
        return None

    def _decide(self, spike: Spike, record: dict[str, Any], saver: Saver) -> dict[str, Any] | None:
        """Decide on a rollback on all ranks. Return its record, or None if it is not possible."""
        # The save of an iteration before the spike may be the checkpoint to go back to.
        saver.complete()
        lineage = saver.lineage

        def decide() -> dict[str, Any] | None:
            assert self._records is not None, "rank 0 writes the records"
            decided = None
            reason = f"there is no checkpoint from before iteration {spike.first} to go back to"
            try:
                # Without a lineage, nothing was saved yet.
                if lineage:
                    decided = decide_rollback(
                        self._plan, lineage, spike, self._guard.windows, record, self._records
                    )
            # A run that trains without the guard must not end because of it.
            except OSError as error:
                reason = f"a rollback cannot be prepared: {error}"
            if decided is None:
                self._log(f"warning: spike guard: {reason}; the steps of the spike are dropped")
            return decided

        decided: dict[str, Any] | None = self._mesh.ranks.call_on_rank_0(
            decide, "deciding on a rollback", self._log
        )
        if decided is None:
            return None
        first, last = decided["skip"]
        self._log(
            f"spike guard: {spike.reason} at iteration {spike.iteration}. The run goes back to "
            f"global_step{decided['to']} and skips the iterations {first}-{last}. This is rollback "
            f"{self._guard.count_rollbacks(spike.iteration) + 1} of at most "
            f"{self._plan.config.guard.spike_guard_max_rollbacks}"
        )
        return decided

    def _write(self, record: dict[str, Any]) -> None:
        """Write a record on rank 0. A failure does not end the run: the log has it too."""
        if self._records is None:
            return
        try:
            self._records.append(record)
        except OSError as error:
            self._log(f"warning: spike guard: the decision could not be recorded: {error}")

    def _explain_switch(self, spike: Spike) -> str:
        """Return why the guard intervenes no more."""
        guard = self._plan.config.guard
        rollbacks = self._guard.count_rollbacks(spike.iteration)
        if guard.spike_guard == "rollback" and rollbacks >= guard.spike_guard_max_rollbacks:
            often = f"has rolled back {rollbacks} times"
            flag = "--spike-guard-max-rollbacks"
        else:
            often = f"has dropped {guard.spike_guard_max_skips} steps"
            flag = "--spike-guard-max-skips"
        return (
            f"warning: the spike guard {often} within {guard.spike_guard_reach} iterations "
            f"({flag}). More would not help, so it only logs from now on, and the run continues"
        )
