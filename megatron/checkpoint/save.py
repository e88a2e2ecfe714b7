"""Saving of checkpoints, and the policy of when to save and what to keep.

Every rank writes the shards that it owns into a new folder `global_stepN.unfinished`. Then rank 0
renames the folder to `global_stepN` and moves the pointers to it (the files `latest` and
`latest_checkpointed_iteration.txt`), see `Publisher`. The checkpoint is called safe from then on.

Invariants:

- A kill at any time leaves the pointers at one complete checkpoint, the old or the new one.
- Nothing is removed before a newer checkpoint was read back from the disk.
- All ranks agree on the outcome of a save.
- Only finite numbers are stored.

A save has the stages of `SaveStage`. All ranks work on the same stage. A stage runs in a thread,
and the threads of different ranks never communicate, see `stages.py`. `begin` waits for the stages
FINISH_EARLIER and PREPARE and starts WRITE. The training loop calls `poll` once an iteration. When
all ranks have finished the present stage, `poll` starts the next one. It needs no message, because
the ranks report their stages with the votes of a step (`run/exits.py`). READ_BACK is left out
unless older checkpoints are removed (--keep-latest-checkpoints). A synchronous save runs the same
stages, and `complete` waits for each of them.
"""

import os
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megatron.base.durable import replace_file
from megatron.base.errors import CheckpointError, DamagedError, TrainingError
from megatron.base.json_record import restore
from megatron.base.plain_text import format_bytes, format_count
from megatron.checkpoint.contents import CheckpointContents
from megatron.checkpoint.finite import describe_not_finite, gather_not_finite
from megatron.checkpoint.folder import UNFINISHED, remove, step_folder
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import Lineage
from megatron.checkpoint.shard_file import WrittenFile, record_event, select_own_shards
from megatron.checkpoint.stages import (
    SMALL_FILES,
    Published,
    Publisher,
    SaveInProgress,
    SaveStage,
    SaveStages,
    StageOutcome,
    StageResult,
    free_bytes,
)
from megatron.checkpoint.store import NO_STORE, Store
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.ranks import Ranks, Work
from megatron.parallel.shard import TensorShard
from megatron.schedule.clock import is_due


class SavePolicy:
    """Decides when to save and what to keep, from the flags and from what was recorded.

    Only the methods `record_...` change it. All ranks record the same events in the same order, so
    they get the same answers.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        """Create the policy of a run that has not saved yet."""
        self._config = config
        self.failures = 0
        """Number of failed saves since the last one that succeeded."""
        self._retry_at: int | None = None
        """First iteration after which a failed save is tried again. None if none has failed."""
        self._passed = 0
        """The last iteration that was recorded."""
        self.keep_next = False
        """Whether --keep-latest-checkpoints must never remove the next checkpoint."""
        self._ending = False

    @property
    def has_failed_too_often(self) -> bool:
        """Whether no further failure in a row is allowed."""
        return self.failures >= self._config.max_save_failures

    def is_due(self, before: int, after: int) -> bool:
        """Return whether a save is due after a step or jump from iteration `before` to `after`.

        A jump over several iterations (skipped data) counts each iteration that it passes.
        """
        if self._retry_at is not None and after >= self._retry_at:
            return True
        return self._passes_named(before, after) or is_due(
            self._config.save_interval, before, after
        )

    def describe_retry(self) -> str:
        """Return when the failed save is tried again, for messages."""
        if self._ending:
            return "immediately"
        # A save that is due anyway may come before --save-retry-interval is over.
        following = self._passed + 1
        due = [max(self._retry_at or 0, following), *self._config.save_at]
        if self._config.save_interval:
            due.append(following + -following % self._config.save_interval)
        first = min(iteration for iteration in due if iteration >= following)
        return f"after iteration {first}, unless a time or the end of the run comes first"

    def record_iterations(self, before: int, after: int) -> None:
        """Record a step or jump, which may pass an iteration whose checkpoint is kept."""
        self._passed = after
        if self._passes_named(before, after) or is_due(self._config.keep_every, before, after):
            self.keep_next = True

    def record_end_of_run(self) -> None:
        """Record that no further iteration follows, so that a failed save cannot wait for one."""
        self._ending = True

    def record_attempt(self) -> None:
        """Record that a save begins, which clears a scheduled retry and `keep_next`.

        Read `keep_next` before.
        """
        self._retry_at = None
        self.keep_next = False

    def record_failure(self, iteration: int, *, keep: bool) -> None:
        """Record that a save failed, and schedule the next attempt.

        Args:
            iteration: The iteration that was not saved.
            keep: Whether its checkpoint had to be kept permanently. The next one that is saved is
                then kept instead.
        """
        self.failures += 1
        self._passed = max(self._passed, iteration)
        self._retry_at = iteration + self._config.save_retry_interval
        # Another such iteration may have been passed since the save began.
        self.keep_next = self.keep_next or keep

    def record_success(self) -> None:
        """Record that a checkpoint is safe."""
        self.failures = 0

    def _passes_named(self, before: int, after: int) -> bool:
        """Return whether the run passes an iteration of --save-at."""
        return any(before < named <= after for named in self._config.save_at)


class Saver:
    """Writes the checkpoints of a run.

    All ranks call each method together and in the same order, because most methods communicate.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig | None = None,
        ranks: Ranks | None = None,
        *,
        lease: Lease | None = None,
        log: Callable[[str], None] = lambda line: None,
        saved: Callable[[int], None] = lambda iteration: None,
        in_use: Callable[[], Collection[int]] = tuple,
        lineage: Lineage = (),
        rollback_distance: int | None = None,
        store: Store = NO_STORE,
    ) -> None:
        """Create a saver without a save in progress.

        Args:
            root: Folder of the run's checkpoints.
            config: The flags that determine when to save and which checkpoints to keep.
            ranks: The ranks that save together. Default: this process alone.
            lease: The lease of `root` on rank 0. None on the other ranks, and in tests and tools.
            log: Called with each message and warning that people must see immediately.
            saved: Called with the iteration of each checkpoint as soon as it is safe.
            in_use: Returns the iterations of checkpoints that must not be removed for now. It is
                called on rank 0, from any thread.
            lineage: The checkpoints in `root` that the run came through so far.
            rollback_distance: See `select_removable_entries`.
            store: Where checkpoints are kept besides `root`. Default: nowhere.
        """
        self._store = store
        self._root = root
        self._config = config or CheckpointConfig()
        self._place = self._config.save or root
        """Where people look for the checkpoints: the folder, or the address."""
        self._ranks = ranks or Ranks()
        self._lease = lease
        self._log = log
        self._saved = saved
        self._policy = SavePolicy(self._config)
        publisher = Publisher(root, self._config, lease, in_use, rollback_distance, self._store)
        self._stages = SaveStages(root, self._ranks, publisher, self._store)
        self._save: SaveInProgress | None = None
        self._warned = False
        """Whether a warning of the stage WRITE was logged. It is the same for each save."""
        self.saved_iteration: int | None = None
        """Iteration of the newest checkpoint that this process has written and that is safe."""
        self.lineage = lineage
        """Checkpoints that the run came through, the newest last, without those removed."""

    @property
    def in_flight(self) -> bool:
        """Whether a save is in progress."""
        return self._save is not None

    @property
    def is_working(self) -> bool:
        """Whether this rank works on a stage of a save in progress."""
        return self._save is not None and not self._save.work.done

    def describe(self, shards: Sequence[TensorShard]) -> tuple[str, str]:
        """Return two cells of the table at start: the size of a checkpoint, and when it is written.

        The second cell also has the retention and the number of checkpoints that fit on the disk.
        """
        size = self._count_total_bytes(shards)
        # A call of a network file system can hang. `work` then names this rank.
        staging = self._store.choose_staging(self._root)
        free = self._ranks.work(
            lambda: free_bytes(staging), f"reading the free space of {staging}", self._log
        )
        room = int(free // (self._store.count_staged(size) + SMALL_FILES))
        how = "training waits for them"
        if self._config.async_save:
            how = "written while training continues"
        keep = self._config.keep_latest_checkpoints
        kept = "all are kept"
        if keep is not None:
            kept = f"the newest {keep} are kept"
        shortage = "; THERE IS NO ROOM: saves will fail"
        if room > 0:
            shortage = ""
        return (
            f"{format_bytes(size)} each",
            f"{how}, {kept}; {format_bytes(free)} free, enough for {room}{shortage}",
        )

    def _count_total_bytes(self, shards: Sequence[TensorShard]) -> int:
        """Return the bytes of the shards that all ranks own. All ranks must call it."""
        return sum(self._ranks.gather(sum(shard.tensor.nbytes for shard in shards if shard.owner)))

    def is_due(self, before: int, after: int) -> bool:
        """Return whether a save is due after a step or jump from iteration `before` to `after`.

        A jump over several iterations (skipped data) counts each iteration that it passes.
        """
        return self._policy.is_due(before, after)

    def mark_end_of_run(self) -> None:
        """Record that no further iteration follows.

        The caller then tries a failed save again immediately, and the messages say so.
        """
        self._policy.record_end_of_run()

    def begin(self, contents: CheckpointContents, shards: Sequence[TensorShard]) -> None:
        """Start a save.

        When this method has returned, a thread may still read the tensors of `shards`. They must
        not change until `wait_for_copy` has returned.

        Args:
            contents: The contents of the checkpoint, except its tensors.
            shards: The shards of this rank. Only those with `owner` are written.

        Raises:
            TrainingError: On every rank, if a number that would be stored is not finite. Nothing
                was written.
            CheckpointError: If this was the last failure in a row that is allowed, or another run
                took the folder over.
        """
        # One save at a time. A second one would overwrite the host buffers that the first one is
        # still written from.
        if self._save is not None:
            self._log(
                f"the save of iteration {self._save.contents.iteration} is still in progress, so "
                f"the save of iteration {contents.iteration} waits for it. Is --save-interval too "
                "short for this file system?"
            )
            self.complete()
        self._refuse_not_finite(contents, shards)
        save = self._make_save(contents, shards)
        self._policy.record_attempt()
        # An earlier attempt may have left a complete checkpoint that no pointer names. The pointers
        # move to it first. Otherwise the next start would not find it if this save is killed.
        earlier = self._complete_stage(SaveStage.FINISH_EARLIER, save)
        if earlier is None:
            return
        published = earlier[0].published
        if published is not None:
            self._succeed(published)
            if published.iteration == contents.iteration:
                # This call was another attempt for the same iteration, which is safe now.
                return
            save.lineage = published.lineage
        # The folder must exist before any rank writes into it, so all ranks wait for rank 0 here.
        if self._complete_stage(SaveStage.PREPARE, save) is None:
            return
        self._start_in_background(SaveStage.WRITE, save)

    def _make_save(
        self, contents: CheckpointContents, shards: Sequence[TensorShard]
    ) -> SaveInProgress:
        """Return a save whose first stage is not started. All ranks must call it."""
        folder = step_folder(self._root, contents.iteration)
        own = select_own_shards(shards)
        return SaveInProgress(
            contents=contents,
            folder=folder.with_name(folder.name + UNFINISHED),
            total_bytes=self._count_total_bytes(shards),
            shards=own,
            ready=record_event(own),
            copy_first=self._config.async_save,
            keep=self._policy.keep_next,
            lineage=self.lineage,
        )

    def wait_for_copy(self) -> None:
        """Wait until the tensors that are being saved may change.

        Call it before the optimizer's step, and before anything else that changes the state.
        """
        if self._save is not None:
            self._save.copied.wait()

    def save(self, contents: CheckpointContents, shards: Sequence[TensorShard]) -> None:
        """Start a save, as `begin`. Without --async-save, also wait until it is safe or has failed.

        Raises:
            TrainingError: See `begin`.
            CheckpointError: See `begin`.
        """
        self.begin(contents, shards)
        if not self._config.async_save:
            self.complete()

    def poll(self, before: int, after: int, *, stage_is_done: bool) -> bool:
        """Start the next stage of a save if all ranks have finished the present one.

        Call it once after each step or jump, also if no save is due. On rank 0 it also checks that
        the lease is still held. If the run passes an iteration of --save-at or --keep-every, the
        next checkpoint that is saved is kept permanently.

        Args:
            before: The iteration before the step.
            after: The iteration after it.
            stage_is_done: Whether `is_working` was False on all ranks, since the present stage
                began. All ranks must pass the same value, so that all of them go on together.

        Returns:
            Whether a save is due. See `is_due`.

        Raises:
            CheckpointError: See `begin`.
        """
        if self._lease is not None and self._lease.lost is not None:
            raise CheckpointError(self._lease.lost)
        if self._save is not None and stage_is_done:
            self._advance()
        self._policy.record_iterations(before, after)
        return self.is_due(before, after)

    def complete(self) -> None:
        """Wait until the save in progress is safe or has failed.

        Raises:
            CheckpointError: See `begin`.
        """
        while self._save is not None:
            self._wait_for(self._save)
            self._advance()

    def _advance(self) -> None:
        """Start the next stage, or end the save, after all ranks have finished the present one."""
        save = self._save
        assert save is not None
        # First, because no save may appear to be in progress if `_end_stage` raises.
        self._set_in_progress(None)
        results = self._end_stage(save)
        if results is None:
            return
        match save.stage:
            case SaveStage.WRITE:
                # A rank that owns nothing wrote no file.
                save.files = self._collect_files(save.work.result, results)
                self._report_warnings(results)
                # The save must not hold tensors that it needs no more.
                save.shards = {}
                # Reading back costs time. It is only needed if older checkpoints are removed later.
                if self._config.keep_latest_checkpoints is None:
                    self._start_in_background(SaveStage.PUBLISH, save)
                else:
                    self._start_in_background(SaveStage.READ_BACK, save)
            case SaveStage.READ_BACK:
                self._start_in_background(SaveStage.PUBLISH, save)
            case SaveStage.PUBLISH:
                published = results[0].published
                assert published is not None, "rank 0 has published"
                self._succeed(published)

    def _collect_files(
        self, own: StageResult | None, results: Sequence[StageResult]
    ) -> tuple[WrittenFile, ...]:
        """Return the files of all ranks, complete on rank 0 and summarised on the others."""
        assert own is not None, "the stage has succeeded"
        record = None if own.written is None else own.written.to_json()
        complete = self._ranks.gather_on_rank_0(record)
        if complete is None:
            return tuple(result.written for result in results if result.written is not None)
        return tuple(WrittenFile.from_json(each) for each in complete if each is not None)

    def _report_warnings(self, results: Sequence[StageResult]) -> None:
        """Log the first rank's warning of the stage WRITE, once in a run."""
        warnings = [result.warning for result in results if result.warning is not None]
        if not warnings or self._warned:
            return
        self._warned = True
        others = ""
        if len(warnings) > 1:
            others = f" (and {format_count(len(warnings) - 1, 'other rank')})"
        self._log(f"warning: {warnings[0]}{others}")

    def _start_stage(self, stage: SaveStage, save: SaveInProgress) -> None:
        """Start a stage in a thread. Each rank does its part."""
        save.stage = stage
        save.work = Work(lambda: self._stages.run(stage, save), in_thread=True)

    def _start_in_background(self, stage: SaveStage, save: SaveInProgress) -> None:
        """Start a stage that `poll` or `complete` ends."""
        self._start_stage(stage, save)
        self._set_in_progress(save)

    def _complete_stage(self, stage: SaveStage, save: SaveInProgress) -> list[StageResult] | None:
        """Start a stage, wait until all ranks have finished it, and return as `_end_stage` does."""
        self._start_stage(stage, save)
        self._wait_for(save)
        return self._end_stage(save)

    def _set_in_progress(self, save: SaveInProgress | None) -> None:
        """Remember the save in progress, which `poll` and `complete` continue."""
        self._save = save
        # While a thread writes, the lease must not be released. Otherwise another run could take
        # the folder over and write into it at the same time.
        if self._lease is not None:
            self._lease.busy = save is not None

    def _wait_for(self, save: SaveInProgress) -> None:
        """Wait until all ranks have finished the stage, as long as `Ranks.wait_for` allows."""
        what = f"saving iteration {save.contents.iteration}"
        self._ranks.wait_for(save.work, what, self._log, stage=save.stage.name)

    def _succeed(self, published: Published) -> None:
        """Record a checkpoint that is safe, and log its messages."""
        self._policy.record_success()
        self.saved_iteration = published.iteration
        self._saved(published.iteration)
        self.lineage = published.lineage
        for line in published.lines:
            self._log(line)

    def _end_stage(self, save: SaveInProgress) -> list[StageResult] | None:
        """Exchange how the stage ended, so that all ranks do the same.

        After a failure, remove the unfinished folder, report the failure and set the next attempt.

        Returns:
            The results of all ranks. None after a failure that does not end the run.

        Raises:
            CheckpointError: On every rank, if the failure ends the run.
        """
        cause = save.work.error
        own = self._make_outcome(save.work)
        outcomes = [restore(StageOutcome, each) for each in self._ranks.gather(asdict(own))]
        for outcome in outcomes:
            if outcome.fatal is not None:
                raise CheckpointError(outcome.fatal) from cause
        failures = [outcome.failure for outcome in outcomes if outcome.failure]
        if not failures:
            return [outcome.result for outcome in outcomes]
        failures += self._ranks.work(
            lambda: self._remove(save.folder), f"removing {save.folder}", self._log
        )
        self._policy.record_failure(save.contents.iteration, keep=save.keep)
        self._report_failure(save.contents.iteration, failures, cause)
        return None

    def _make_outcome(self, work: Work[StageResult]) -> StageOutcome:
        """Return how this rank's part of a stage ended.

        Raises:
            BaseException: The stage's error, if it is a mistake in this package. The other ranks
                wait in `gather` until this process has ended. Their connection is lost then, and
                `RollCall` reports this error.
        """
        if work.error is None:
            assert work.result is not None, "a stage returns a result or raises"
            return StageOutcome(work.result.summarise())
        # The order of the branches matters, because DamagedError is a CheckpointError. A file that
        # is read back wrong can be written again. Any other CheckpointError means a lost lease.
        here = f"rank {self._ranks.rank} on {os.uname().nodename}"
        if isinstance(work.error, OSError | DamagedError):
            return StageOutcome(StageResult(), failure=f"{here}: {work.error}")
        # The next attempt may find enough memory. Training can continue, because its own memory is
        # allocated already.
        if is_out_of_memory(work.error):
            failure = f"{here}: not enough memory of the host to write the checkpoint: {work.error}"
            return StageOutcome(StageResult(), failure=failure.rstrip(": "))
        if isinstance(work.error, CheckpointError):
            return StageOutcome(StageResult(), fatal=str(work.error))
        raise work.error

    def _remove(self, folder: Path) -> list[str]:
        """Remove the unfinished folder on rank 0 to free its space. Return what went wrong."""
        try:
            if self._ranks.rank == 0 and folder.exists():
                remove(folder)
        except OSError as error:
            return [f"{folder} could not be removed: {error}"]
        return []

    def _report_failure(
        self, iteration: int, failures: list[str], cause: BaseException | None
    ) -> None:
        """Log a failed save that the policy has recorded.

        Args:
            iteration: The iteration that was not saved.
            failures: One line for each failure, of all ranks.
            cause: The error on this rank. None if only other ranks failed.

        Raises:
            CheckpointError: If no further failure in a row is allowed.
        """
        head = (
            f"saving iteration {iteration} to {self._place} failed "
            f"({self._policy.failures} of {self._config.max_save_failures} in a row):"
        )
        problem = "\n  ".join([head, *failures])
        if self._policy.has_failed_too_often:
            # `from cause` keeps the errno. `error_report` needs it to find a host with a bad disk.
            raise CheckpointError(
                f"{problem}\nthe run ends here, because further training could not be saved. Older "
                f"checkpoints are untouched, the newest: {self._newest()}. "
                "Make room or fix the file system, and start again with the same command"
            ) from cause
        self._log(
            f"warning: {problem}\nolder checkpoints are untouched; the save is tried again "
            f"{self._policy.describe_retry()}"
        )

    def _refuse_not_finite(
        self, contents: CheckpointContents, shards: Sequence[TensorShard]
    ) -> None:
        """Raise if a number that would be stored is not finite.

        Raises:
            TrainingError: On every rank. The message names each tensor, its rank, and the number of
                such values.
        """
        records = {"optimizer": contents.scalars, "state": contents.state}
        found = gather_not_finite(describe_not_finite(shards), records, self._ranks)
        if not found:
            return
        raise TrainingError(
            f"after iteration {contents.iteration}, the state of this run holds numbers that are "
            "not finite:\n  " + "\n  ".join(found) + "\nAll further steps would be wrong. So the "
            f"run ends, and no checkpoint of this state is written to {self._place}. Older "
            f"checkpoints are untouched, the newest: {self._newest()}. Start again with the same "
            "command to resume from it. If it happens again, skip the data with "
            "--skip-train-iteration-range or lower --lr"
        )

    def _newest(self) -> str:
        """Return the name of the newest checkpoint of this lineage, for messages."""
        if self.lineage:
            return f"global_step{self.lineage[-1].iteration}"
        return "none"


def check_writable(root: Path) -> None:
    """Check that checkpoints can be written to a folder, by writing and removing a file there.

    Call it before training starts. Otherwise the first save would find a wrong path hours later.

    Raises:
        CheckpointError: If the folder cannot be made or written.
    """
    # A unique name, because several runs may start at the same time.
    probe = root / f".writable.{uuid.uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        replace_file(probe, "")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"--save {root} cannot be written: {error}; give another folder, or make room"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # PyTorch has no exception class for a lack of host memory.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
