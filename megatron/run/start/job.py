"""The job of a run: its plan and its starting point.

Rank 0 alone looks for the checkpoint and resolves the configuration. It sends the result as JSON,
and the other ranks build the same `Job` from that, without the command line and without the folder
of the checkpoints.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.plain_text import is_url
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.start import (
    choose_own_run,
    describe_checkpoint,
    find_start,
    restore_checkpoint,
    take_start,
)
from megatron.config.batch import BatchConfig
from megatron.config.checkpoint import CheckpointConfig, resolve_place
from megatron.config.tree import Config
from megatron.observe.log_line import format_kill_switch_line
from megatron.parallel.launcher import read_ranks_per_node
from megatron.parallel.ranks import Ranks
from megatron.plan.resolve import resolve
from megatron.plan.rules.finding import refuse_errors
from megatron.plan.run_plan import Plan, record_plan, restore_plan
from megatron.run.start.launch import Launch, check_plan
from megatron.run.start.resume import (
    choose_curriculum,
    choose_loss_mean,
    compare_with_checkpoint,
    keep_saved_choices,
    read_bare_thresholds,
)
from megatron.run.state import TrainState
from megatron.tokenizer.vocabulary import fetch_missing_tokenizer

_SEARCH = "looking for the checkpoint to start from"


@dataclass(frozen=True)
class Job:
    """The plan of a run and its starting point."""

    plan: Plan
    state: TrainState
    checkpoint: Checkpoint | None
    notes: list[str]
    """Warnings to print at the start."""

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON for the other ranks."""
        return {
            "plan": record_plan(self.plan),
            "checkpoint": describe_checkpoint(self.checkpoint),
            "guard_windows": self.state.spike_guard.get("windows", []),
            "notes": self.notes,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Job":
        """Return the job that `to_json` described. Nothing is read from files."""
        plan = restore_plan(record["plan"])
        checkpoint = restore_checkpoint(record["checkpoint"])
        state = build_starting_state(checkpoint, plan.config)
        # Only rank 0 reads the file of interventions.
        state.keep_guard_windows(record["guard_windows"])
        return cls(plan, state, checkpoint, record["notes"])


def agree_on_job(launch: Launch, ranks: Ranks) -> Job:
    """Return the job that rank 0 resolves from its configuration and the checkpoint that it finds.

    This run does not hold the lease yet, and nothing on the disk changes. So a wrong command line
    is refused before anything is written. All ranks call it together.

    Args:
        launch: What this rank was started with. Only rank 0's configuration is used.
        ranks: All ranks of the run.

    Raises:
        MegatronError: On every rank, as `find_start` and `resolve_job`.
    """

    def find() -> Job:
        chosen = _choose_own_run(launch)
        start = find_start(select_checkpoint_config(chosen.config))
        return resolve_job(chosen, start.checkpoint)

    job = _share_job(find, ranks)
    assert job is not None, "`find` always returns a job"
    settings = job.plan.config.checkpoint
    if job.checkpoint is not None and not settings.finetune:
        ranks.log(f"this run resumes at iteration {job.checkpoint.iteration} of {settings.load}")
    return job


def _choose_own_run(launch: Launch) -> Launch:
    """Return the launch with the result of `choose_own_run`."""
    config = launch.config
    chosen = choose_own_run(select_checkpoint_config(config))
    # An evaluation saves nothing, but its metrics are in the folder.
    changed = replace(config, checkpoint=replace(chosen, save=config.checkpoint.save))
    # The early plan is that of the given flags.
    early = launch.early if changed == config else None
    return replace(launch, loaded=replace(launch.loaded, config=changed), early=early)


def _share_job(find: Callable[[], Job | None], ranks: Ranks) -> Job | None:
    """Call a function on rank 0, and return its job, or None, on every rank."""
    if ranks.size == 1:
        return find()
    own: Job | None = None

    def find_and_record() -> dict[str, Any] | None:
        nonlocal own
        own = find()
        return None if own is None else own.to_json()

    record = ranks.call_on_rank_0(find_and_record, _SEARCH, ranks.log)
    # Rank 0 keeps its own job. Building it again would give the same.
    if record is None or own is not None:
        return own
    return Job.from_json(record)


def confirm_job(
    launch: Launch, job: Job, ranks: Ranks, damage: Mapping[int, str], *, holds_lease: bool
) -> Job:
    """Return the job, or another one if its checkpoint is not the one to start from any more.

    Another run may have saved before this run got the lease, or the checkpoint may be damaged. All
    ranks call it together.

    Args:
        launch: What this rank was started with. Only rank 0's configuration is used.
        job: The job as it is known so far.
        ranks: All ranks of the run.
        damage: Iteration of a checkpoint -> what an earlier attempt to load it found.
        holds_lease: Whether this run holds the lease of the folder that it loads from. See
            `take_start`.

    Raises:
        MegatronError: On every rank, as `take_start` and `resolve_job`.
    """

    def confirm() -> Job | None:
        chosen = replace(_choose_own_run(launch), early=None)
        config = select_checkpoint_config(chosen.config)
        start = take_start(config, damage, holds_lease=holds_lease, log=ranks.log)
        # The usual case. The other ranks then keep their job, and no plan is sent.
        if start.checkpoint == job.checkpoint:
            return None
        return resolve_job(chosen, start.checkpoint)

    return _share_job(confirm, ranks) or job


def resolve_job(launch: Launch, checkpoint: Checkpoint | None) -> Job:
    """Resolve the plan for continuing from a checkpoint, or for a run from scratch.

    Args:
        launch: What rank 0 was started with. Without a checkpoint, its early plan is that of the
            run.
        checkpoint: Where the run continues. None: from scratch.

    Raises:
        ConfigError: The configuration is wrong, it contradicts the checkpoint, or the tokenizer
            cannot be downloaded. The message lists everything that is wrong with the configuration.
        CheckpointError: The checkpoint's state is incomplete, or --load has no checkpoint and the
            run would not save one there.
    """
    config = launch.config
    if config.batch.eval_only and checkpoint is None:
        raise CheckpointError(
            f"--eval-only: --load {config.checkpoint.load} contains no checkpoint to evaluate"
        )
    # Other programs may call `pretrain` without the checks before the import of torch.
    refuse_errors(launch.parts.find_missing(config))
    # Fine-tuning is a new run, which takes only the weights of the checkpoint.
    # The plan depends on the position, because its end is counted from there.
    state = build_starting_state(checkpoint, config)
    if checkpoint is None or config.checkpoint.finetune:
        plan = launch.early or _resolve_plan(launch, state)
        if checkpoint is None:
            _refuse_missing_checkpoint(plan.config.checkpoint)
        _refuse_kill_switch(plan.config.batch)
        notes: list[str] = []
    else:
        plan, notes = _resolve_resume(launch, checkpoint, state)
    notes = [
        *launch.loaded.warnings,
        *plan.warnings,
        *_warn_if_nothing_is_kept(plan.config),
        *notes,
    ]
    return Job(plan, state, checkpoint, notes)


def _resolve_plan(launch: Launch, state: TrainState) -> Plan:
    """Resolve the plan on rank 0, and refuse one that cannot be trained.

    Raises:
        ConfigError: See `resolve_job`.
    """
    config = launch.config
    # This is rank 0. The other ranks read the tokenizer later, from the cache of the Hub.
    fetch_missing_tokenizer(config.tokenizer, needs_text=config.data.needs_documents)
    plan = resolve(
        config,
        launch.world.size,
        launch.loaded.origin,
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_tokens,
        iteration=state.iteration,
        ranks_per_node=read_ranks_per_node(launch.world.size),
    )
    check_plan(plan, launch.parts)
    return plan


def _resolve_resume(
    launch: Launch, checkpoint: Checkpoint, state: TrainState
) -> tuple[Plan, list[str]]:
    """Resolve the plan for continuing from a checkpoint.

    Returns:
        The plan, and notes about what is taken from the checkpoint or differs from it.

    Raises:
        ConfigError: See `resolve_job`.
        CheckpointError: See `resolve_job`.
    """
    saved = checkpoint.read_config()
    loaded = choose_loss_mean(launch.loaded, saved)
    # The order matters. The unit of the thresholds and the curriculum change the configuration
    # that the plan is resolved from. The schedule and the ranges are compared with the plan.
    given, about_steps = read_bare_thresholds(loaded.config, saved)
    config = choose_curriculum(given, saved, checkpoint.iteration)
    plan = _resolve_plan(replace(launch, loaded=replace(loaded, config=config)), state)
    _refuse_kill_switch(config.batch)
    about_checkpoint = compare_with_checkpoint(given, plan, state, checkpoint, saved)
    plan = keep_saved_choices(plan, state)
    plan, about_windows = launch.parts.load_guard().add_windows(plan, state, checkpoint)
    return plan, [*about_steps, *about_checkpoint, *about_windows]


def _refuse_missing_checkpoint(config: CheckpointConfig) -> None:
    """Raise an error if --load has no checkpoint, and is not the folder that this run saves to.

    The path is then probably misspelt. If the folders are the same, the first job of a chain starts
    from scratch, and the same command line resumes later.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if config.load is None or config.resumes_itself or config.allow_fresh_start:
        return
    raise CheckpointError(
        f"--load {config.load} has no checkpoint, and this run would not save one there. Correct "
        "the path, or leave out --load to start from scratch"
    )


def select_checkpoint_config(config: Config) -> CheckpointConfig:
    """Return the checkpoint settings. An evaluation saves nothing, so --save is left out for it.

    Without --save, the checkpoint to evaluate may be any, also one of another run.
    """
    if config.batch.eval_only:
        return replace(config.checkpoint, save=None)
    return config.checkpoint


def build_starting_state(checkpoint: Checkpoint | None, config: Config) -> TrainState:
    """Return the counters to start from. A fine-tuning run starts at zero.

    Raises:
        CheckpointError: The checkpoint's state is incomplete.
    """
    if checkpoint is None:
        return TrainState()
    state = TrainState()
    if not config.checkpoint.finetune:
        state = TrainState.from_json(checkpoint.state)
    if not config.checkpoint.resumes_itself:
        state.base = os.path.realpath(checkpoint.folder)
        load = str(config.checkpoint.load)
        # The folder of an address depends on the host.
        if is_url(load):
            state.base = os.path.join(resolve_place(load), checkpoint.folder.name)
    return state


def _warn_if_nothing_is_kept(config: Config) -> list[str]:
    """Return a warning if a run that trains has no folder for its checkpoints.

    The plan does not give this warning, because a command line can be planned without its paths.
    """
    if config.checkpoint.save is not None or config.batch.eval_only:
        return []
    return ["without --save nothing is kept: the weights are lost when this run ends"]


def _refuse_kill_switch(batch: BatchConfig) -> None:
    """Raise an error if the kill switch exists already, or cannot be looked for.

    One that is left over from the last stop would end the run after its first iteration.

    Raises:
        ConfigError: The file exists, or its folder cannot be read.
    """
    switch = batch.kill_switch_path
    if not switch:
        return
    try:
        found = Path(switch).exists()
    except OSError as error:
        raise ConfigError(
            f"--kill-switch-path {switch} cannot be looked for ({error.strerror}), so it could not "
            "stop the run. Fix the permissions or the file system, or give another path"
        ) from error
    if found:
        raise ConfigError(
            "the run does not start while its kill switch exists. Remove the file to run again. "
            # tools/slurm_status.py reads the path up to the end of the line.
            f"{format_kill_switch_line(switch)}"
        )
