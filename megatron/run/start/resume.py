"""Differences between the command line and the checkpoint: which are allowed, and what applies."""

from dataclasses import asdict, replace

from megatron.base.errors import ConfigError
from megatron.checkpoint.load import Checkpoint
from megatron.config.compare import find_config_differences
from megatron.config.config_with_origin import LoadedConfig
from megatron.config.fields import Field, all_fields
from megatron.config.loss import FOREIGN_ORIGIN, LOSS_MEAN
from megatron.config.tree import Config
from megatron.plan.resolve import build_curriculum
from megatron.plan.run_plan import Plan
from megatron.run.state import TrainState
from megatron.schedule.batch_size import bare_thresholds_as_samples, step_entries
from megatron.schedule.curriculum import FOREVER
from megatron.schedule.lr import LRSchedule, list_schedule_differences
from megatron.schedule.skip import find_range
from megatron.tokenizer import compute_tokenizer_digests, find_tokenizer_files

_LISTED_GROUPS = ("batch", "loss", "optimizer", "precision", "data", "tokenizer", "guard")
"""Groups of settings that can change what is trained. The layout of the ranks is not among them."""
_LISTED = {
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.seq_length",
    "model.max_position_embeddings",
    # These kernels round in other places.
    "kernels.attention_backend",
    "kernels.gradient_accumulation_fusion",
}
"""Single settings that may change. For other settings of the model, `load_into` raises an error."""
_NOT_LISTED = {
    # These only determine when a run stops.
    "batch.eval_only",
    "batch.exit_interval",
    "batch.exit_duration_in_mins",
    "batch.kill_switch_path",
    # Functions below compare these, with messages of their own.
    "batch.skip_train_iteration_range",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.decoupled_lr",
    "optimizer.decoupled_min_lr",
    "optimizer.override_lr_scheduler",
    "optimizer.use_checkpoint_lr_scheduler",
    # The contents of these files are compared. Their paths may change.
    "tokenizer.vocab_file",
    "tokenizer.merge_file",
    "tokenizer.tokenizer_name_or_path",
    # These do not change the order of the samples.
    "data.data_cache_path",
    "data.data_cache_gb",
    "data.num_workers",
    "data.valid_num_workers",
}


def list_changes(config: Config, checkpoint: Checkpoint) -> list[str]:
    """List the settings that have changed since the checkpoint was saved.

    The list has only settings that can change what is trained, and that no other function of this
    module compares. All of them may change on resume.

    Args:
        config: The resolved configuration of this run.
        checkpoint: Where the run continues.

    Returns:
        One message with all changes, or nothing.

    Raises:
        CheckpointError: The checkpoint's configuration is damaged.
    """
    # An evaluation trains nothing.
    if config.batch.eval_only:
        return []
    table = all_fields()
    rows = [
        (table[dotted].flag, _show(before), _show(now))
        for dotted, before, now in find_config_differences(checkpoint.read_config(), config)
        if _is_listed(table[dotted])
    ]
    if not rows:
        return []
    rows.insert(0, ("setting", "before", "now"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        f"{setting.ljust(widths[0])}  {before.ljust(widths[1])}  {now}"
        for setting, before, now in rows
    ]
    head = f"changed since the checkpoint of iteration {checkpoint.iteration}:"
    return ["\n  ".join([head, *lines])]


def _is_listed(field: Field) -> bool:
    """Return whether `list_changes` lists a field."""
    if field.dotted in _LISTED:
        return True
    # `choose_schedule` compares the schedule of the learning rate.
    if field.dotted in _NOT_LISTED or field.name.startswith("lr_"):
        return False
    return field.group in _LISTED_GROUPS


def _show(value: str) -> str:
    """Return a value in JSON as text for people."""
    return {"null": "not set", "true": "on", "false": "off", "[]": "not set"}.get(value, value)


def choose_schedule(plan: Plan, state: TrainState) -> tuple[Plan, list[str]]:
    """Decide which learning-rate schedule applies on resume.

    Returns:
        The plan with that schedule, and the warnings to print.

    Raises:
        ConfigError: The schedules differ and no flag decides between them. The message names every
            difference and both flags.
    """
    # A state without a schedule is that of a new run, or of fine-tuning. An evaluation needs none.
    if not state.lr_schedule or plan.config.batch.eval_only:
        return plan, []
    optimizer = plan.config.optimizer
    saved = LRSchedule(**state.lr_schedule)
    differing = list_schedule_differences(plan.lr_schedule, saved)
    if not differing:
        return plan, []
    if optimizer.override_lr_scheduler:
        return plan, [f"--override-lr-scheduler changes the learning rate: {'; '.join(differing)}"]
    if optimizer.use_checkpoint_lr_scheduler:
        return replace(plan, lr_schedule=saved), [
            f"--use-checkpoint-lr-scheduler keeps the checkpoint's: {'; '.join(differing)}"
        ]
    raise ConfigError(
        "the learning-rate schedule differs from the checkpoint's:\n  "
        + "\n  ".join(differing)
        + "\ngive --override-lr-scheduler to continue with this command line's, or "
        "--use-checkpoint-lr-scheduler to continue with the checkpoint's"
    )


def read_bare_thresholds(config: Config, checkpoint: Checkpoint) -> tuple[Config, list[str]]:
    """Read bare thresholds of --step-batch-size-schedule as samples if the checkpoint did so.

    A schedule that differs from the checkpoint's is not changed. The plan rejects its bare
    thresholds.

    Returns:
        The configuration with the unit spelled out, and the warnings to print.

    Raises:
        CheckpointError: The checkpoint's configuration is damaged.
    """
    given = config.batch.step_batch_size_schedule
    if given is None or config.checkpoint.finetune:
        return config, []
    spelled = bare_thresholds_as_samples(given)
    # Every threshold has a unit already, so there is nothing to decide.
    if spelled == step_entries(given):
        return config, []
    saved = checkpoint.read_config().batch.step_batch_size_schedule
    if saved is None or bare_thresholds_as_samples(saved) != spelled:
        return config, []
    note = (
        f"--step-batch-size-schedule '{' '.join(given)}' is read as '{' '.join(spelled)}': the "
        "checkpoint was trained with thresholds in samples. Megatron-LM reads a bare threshold as "
        "tokens. Write the unit."
    )
    return replace(config, batch=replace(config.batch, step_batch_size_schedule=spelled)), [note]


def choose_loss_mean(loaded: LoadedConfig, checkpoint: Checkpoint) -> LoadedConfig:
    """Return the configuration with the --loss-mean of the checkpoint, unless it was given.

    Raises:
        CheckpointError: The checkpoint's configuration is damaged.
    """
    origin = loaded.origin.get(LOSS_MEAN, "default")
    # A mean that only follows from another trainer's flag is no decision of the user.
    given = origin != "default" and not origin.startswith(FOREIGN_ORIGIN)
    if given:
        return loaded
    mean = checkpoint.read_config().loss.loss_mean
    return replace(
        loaded,
        config=replace(loaded.config, loss=replace(loaded.config.loss, loss_mean=mean)),
        origin={**loaded.origin, LOSS_MEAN: "as in the checkpoint"},
    )


def choose_curriculum(config: Config, checkpoint: Checkpoint) -> tuple[Config, list[str]]:
    """Decide which curriculum applies on resume, by the same flags as the learning-rate schedule.

    Only the lengths that are still to come are compared. A curriculum that is over need not be
    given any more.

    Returns:
        The configuration with that curriculum, and the warnings to print.

    Raises:
        ConfigError: The curricula differ and no flag decides between them.
        CheckpointError: The checkpoint's configuration is damaged.
    """
    if config.batch.eval_only:
        return config, []
    # The next iteration is the first one whose length still matters.
    saved = checkpoint.read_config()
    first = checkpoint.iteration + 1
    here = _list_coming_lengths(config, first)
    there = _list_coming_lengths(saved, first)
    if here == there:
        return config, []
    differing = (
        f"{build_curriculum(config) or 'none'} here, {build_curriculum(saved) or 'none'} in the "
        f"checkpoint; iteration {first} has sequences of {here[0][1] or config.model.seq_length} "
        f"tokens here and of {there[0][1] or saved.model.seq_length} in the checkpoint"
    )
    if config.optimizer.override_lr_scheduler:
        return config, [f"--override-lr-scheduler changes the curriculum: {differing}"]
    if config.optimizer.use_checkpoint_lr_scheduler:
        return replace(config, curriculum=saved.curriculum), [
            f"--use-checkpoint-lr-scheduler keeps the checkpoint's: {differing}"
        ]
    raise ConfigError(
        f"the curriculum differs from the checkpoint's: {differing}; give --override-lr-scheduler "
        "to continue with this command line's schedules, or --use-checkpoint-lr-scheduler to "
        "continue with the checkpoint's"
    )


def _list_coming_lengths(config: Config, first: int) -> list[tuple[int, int | None]]:
    """Return pairs of an iteration and the sequence length from that iteration on.

    None is the full length. A changed --seq-length alone is therefore no difference here.
    """
    curriculum = build_curriculum(config)
    if curriculum is None:
        return [(first, None)]
    return [
        (at, None if length == config.model.seq_length else length)
        for at, length in curriculum.iterate_stages(first, FOREVER)
    ]


def choose_skip_ranges(plan: Plan, state: TrainState) -> tuple[Plan, list[str]]:
    """Decide which ranges of iterations are skipped after a resume.

    The command line's ranges apply if it gives any, and the checkpoint's otherwise.

    Returns:
        The plan with these ranges, and the warnings to print.
    """
    if plan.config.batch.eval_only:
        return plan, []
    # JSON has no tuples, so the checkpoint's ranges are lists.
    saved = tuple((first, last) for first, last in state.skip_ranges)
    # Ranges that lie in the past do not matter any more, so they cause no warning.
    ahead = [f"{first}-{last}" for first, last in saved if last > state.iteration]
    trained = _describe_trained(plan, state, saved)
    if not ahead or plan.skip_ranges == saved:
        return plan, trained
    if plan.skip_ranges:
        return plan, [
            f"--skip-train-iteration-range replaces the checkpoint's {' '.join(ahead)}",
            *trained,
        ]
    return replace(plan, skip_ranges=saved), [
        f"the checkpoint's --skip-train-iteration-range {' '.join(ahead)} still applies"
    ]


def _describe_trained(
    plan: Plan, state: TrainState, saved: tuple[tuple[int, int], ...]
) -> list[str]:
    """Return a warning if an earlier launch has trained a part of the range to skip.

    If the run ended inside a range that the checkpoint also has, that part was skipped and not
    trained.
    """
    here = find_range(plan.skip_ranges, state.iteration + 1)
    if here is None:
        return []
    first, last = here
    trained = [at for at in range(first, state.iteration + 1) if find_range(saved, at) is None]
    if not trained:
        return []
    return [
        f"iterations {trained[0]} to {trained[-1]} of the range {first}-{last} were trained by an "
        "earlier launch and stay in the weights. To undo them, roll back to a checkpoint before "
        f"iteration {trained[0]}"
    ]


def check_optimizer(config: Config, checkpoint: Checkpoint) -> None:
    """Check that the checkpoint has the states of this run's optimizer, if they are loaded.

    Raises:
        ConfigError: It has those of another optimizer.
        CheckpointError: The checkpoint's configuration is damaged.
    """
    if not config.checkpoint.load_optim:
        return
    # `load_engine` refuses a checkpoint without states, with its own message.
    if checkpoint.optimizer is None:
        return
    saved = checkpoint.read_config().optimizer.optimizer
    here = config.optimizer.optimizer
    if here != saved:
        raise ConfigError(
            f"--optimizer {here}: the checkpoint of iteration {checkpoint.iteration} has the "
            f"states of {saved}; give --optimizer {saved}, or --no-load-optim, for this start "
            "only, to continue with new states"
        )


def warn_of_new_states(config: Config, checkpoint: Checkpoint) -> list[str]:
    """Return a warning if --no-load-optim leaves out states that this run could load.

    Raises:
        CheckpointError: The checkpoint's configuration is damaged.
    """
    if config.checkpoint.load_optim or config.batch.eval_only:
        return []
    if checkpoint.optimizer is None:
        return []
    # The states of another optimizer do not fit, so it is right to leave them out.
    if config.optimizer.optimizer != checkpoint.read_config().optimizer.optimizer:
        return []
    return [
        "--no-load-optim: the optimizer's states of the checkpoint are not loaded, although they "
        "fit, and start from zero. Remove the flag after the first start with it, or every start "
        "loses them"
    ]


def check_tokenizer(config: Config, state: TrainState) -> list[str]:
    """Compare the contents of the tokenizer's files with those of the checkpoint.

    Returns:
        Warnings about what could not be compared.

    Raises:
        ConfigError: The files differ, or one cannot be read.
    """
    # A run from scratch and fine-tuning start at iteration 0. Both may choose their tokenizer.
    if state.iteration == 0:
        return []
    try:
        here = compute_tokenizer_digests(config.tokenizer)
    except OSError as error:
        raise ConfigError(f"a file of the tokenizer cannot be read: {error}") from error
    there = state.tokenizer
    if not there:
        if here:
            return [
                "the checkpoint has no digests of the tokenizer's files, so they were not compared "
                "with it"
            ]
        return []
    if not here:
        return [
            "no file of the tokenizer is given or found, so it was not compared with the "
            "checkpoint's"
        ]
    paths = find_tokenizer_files(config.tokenizer)
    # Only parts that both sides have can be compared. A machine that trains from prepared data may
    # lack some of the files.
    common = [part for part in there if part in here]
    differing = [
        f"{part} {paths.get(part, '')} is {here[part]}, the checkpoint's is {there[part]}".replace(
            "  ", " "
        )
        for part in common
        if here[part] != there[part]
    ]
    if not common:
        differing = [f"it consists of {', '.join(here)}, the checkpoint's of {', '.join(there)}"]
    if differing:
        raise ConfigError(
            "the tokenizer is not the one that the checkpoint was trained with (xxh3_128 of the "
            "files):\n  "
            + "\n  ".join(differing)
            + "\nA run keeps its tokenizer, because its data consists of that tokenizer's ids. "
            "Give the original files, under any path, or start a new run from these weights with "
            "--finetune and another --save"
        )
    missing = [part for part in there if part not in here]
    if missing:
        names = ", ".join(missing)
        return [f"{names}: not compared with the checkpoint's, because it is not given here"]
    return []


def record_for_resume(state: TrainState, plan: Plan) -> None:
    """Store in the state what a resume will be compared with."""
    state.lr_schedule = asdict(plan.lr_schedule)
    state.skip_ranges = [list(r) for r in plan.skip_ranges]
    # If the files are not on this machine, the checkpoint's digests are kept for later resumes.
    state.tokenizer = compute_tokenizer_digests(plan.config.tokenizer) or state.tokenizer
