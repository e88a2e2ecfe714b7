"""Rules about what may change between a checkpoint and the run that continues it."""

from collections.abc import Iterator

from megatron.base.errors import ConfigError
from megatron.config.compare import find_config_differences
from megatron.config.fields import Field, all_fields
from megatron.config.tree import Config
from megatron.plan.rules.finding import Finding, ResumeContext, TokenizerContext, error, warning
from megatron.schedule.curriculum import FOREVER
from megatron.schedule.lr import list_schedule_differences
from megatron.schedule.skip import find_range
from megatron.tokenizer.vocabulary import compute_tokenizer_digests, find_tokenizer_files

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
    # Rules below compare these, with messages of their own.
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


def check_optimizer(context: ResumeContext) -> Iterator[Finding]:
    """Check that the checkpoint has the states of this run's optimizer, if they are loaded."""
    name = context.plan.config.optimizer.optimizer
    saved = context.saved.optimizer.optimizer
    # `load_engine` refuses a checkpoint without states, with its own message.
    if context.plan.config.checkpoint.load_optim and context.has_states and name != saved:
        yield error(
            f"--optimizer {name}: the checkpoint of iteration {context.iteration} has the "
            f"states of {saved}; give --optimizer {saved}, or --no-load-optim, for this start "
            "only, to continue with new states"
        )


def check_curriculum(context: ResumeContext) -> Iterator[Finding]:
    """Check that a flag selects one curriculum if the checkpoint has a different one."""
    difference = describe_curriculum_difference(context.given, context.saved, context.iteration)
    if difference is None or context.given.batch.eval_only:
        return
    yield _warn_about_decision(context, "the curriculum", difference) or error(
        f"the curriculum differs from the checkpoint's: {difference}; give "
        "--override-lr-scheduler to continue with this command line's schedules, or "
        "--use-checkpoint-lr-scheduler to continue with the checkpoint's"
    )


def _warn_about_decision(context: ResumeContext, what: str, difference: str) -> Finding | None:
    """Return a warning if a flag selects this configuration or the checkpoint."""
    if context.given.optimizer.override_lr_scheduler:
        return warning(f"--override-lr-scheduler changes {what}: {difference}")
    if context.given.optimizer.use_checkpoint_lr_scheduler:
        return warning(f"--use-checkpoint-lr-scheduler keeps the checkpoint's: {difference}")
    return None


def describe_curriculum_difference(config: Config, saved: Config, iteration: int) -> str | None:
    """Return how the lengths after an iteration differ, or None if they are the same.

    A curriculum that has ended does not have to be given any more.
    """
    # The next iteration is the first one whose length still matters.
    first = iteration + 1
    here = _list_coming_lengths(config, first)
    there = _list_coming_lengths(saved, first)
    if here == there:
        return None
    curriculum, other = (each.curriculum.build(each.model.seq_length) for each in (config, saved))
    return (
        f"{curriculum or 'none'} here, {other or 'none'} in the "
        f"checkpoint; iteration {first} has sequences of {here[0][1] or config.model.seq_length} "
        f"tokens here and of {there[0][1] or saved.model.seq_length} in the checkpoint"
    )


def _list_coming_lengths(config: Config, first: int) -> list[tuple[int, int | None]]:
    """Return pairs of an iteration and the sequence length from that iteration on.

    None is the full length. A changed --seq-length alone is therefore no difference here.
    """
    curriculum = config.curriculum.build(config.model.seq_length)
    if curriculum is None:
        return [(first, None)]
    return [
        (at, None if length == config.model.seq_length else length)
        for at, length in curriculum.iterate_stages(first, FOREVER)
    ]


def check_schedule(context: ResumeContext) -> Iterator[Finding]:
    """Check that a flag selects one learning-rate schedule if the checkpoint has another."""
    # An evaluation needs no schedule.
    if context.saved_schedule is None or context.given.batch.eval_only:
        return
    differing = list_schedule_differences(context.plan.lr_schedule, context.saved_schedule)
    if differing:
        lines = "\n  ".join(differing)
        yield _warn_about_decision(context, "the learning rate", "; ".join(differing)) or error(
            f"the learning-rate schedule differs from the checkpoint's:\n  {lines}\ngive "
            "--override-lr-scheduler to continue with this command line's, or "
            "--use-checkpoint-lr-scheduler to continue with the checkpoint's"
        )


def warn_about_skip_ranges(context: ResumeContext) -> Iterator[Finding]:
    """Warn if the skipped ranges of the checkpoint are replaced, or still apply."""
    ranges = context.plan.skip_ranges
    saved = context.saved_ranges
    # Ranges that lie in the past do not matter any more, so they cause no warning.
    ahead = " ".join(f"{first}-{last}" for first, last in saved if last > context.iteration)
    if not ahead or ranges == saved or context.given.batch.eval_only:
        return
    if ranges:
        yield warning(f"--skip-train-iteration-range replaces the checkpoint's {ahead}")
    else:
        yield warning(f"the checkpoint's --skip-train-iteration-range {ahead} still applies")


def warn_about_trained_range(context: ResumeContext) -> Iterator[Finding]:
    """Warn if an earlier launch has trained a part of a skipped range.

    If the run ended inside a range that the checkpoint also has, that part was skipped and not
    trained.
    """
    found = find_range(context.plan.skip_ranges, context.iteration + 1)
    if found is None or context.given.batch.eval_only:
        return
    first, last = found
    trained = [
        at
        for at in range(first, context.iteration + 1)
        if find_range(context.saved_ranges, at) is None
    ]
    if trained:
        yield warning(
            f"iterations {trained[0]} to {trained[-1]} of the range {first}-{last} were trained by "
            "an earlier launch and stay in the weights. To undo them, roll back to a checkpoint "
            f"before iteration {trained[0]}"
        )


def check_tokenizer(context: TokenizerContext) -> Iterator[Finding]:
    """Compare the contents of the tokenizer's files with those of the checkpoint."""
    # A run from scratch and fine-tuning start at iteration 0. Both may choose their tokenizer.
    if context.iteration == 0:
        return
    try:
        here = compute_tokenizer_digests(context.tokenizer)
    except ConfigError as failure:
        yield error(str(failure))
        return
    there = context.saved_digests
    if not here or not there:
        if here:
            yield warning(
                "the checkpoint has no digests of the tokenizer's files, so they were not compared "
                "with it"
            )
        if there:
            yield warning(
                "no file of the tokenizer is given or found, so it was not compared with the "
                "checkpoint's"
            )
        return
    paths = find_tokenizer_files(context.tokenizer)
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
        lines = "\n  ".join(differing)
        yield error(
            "the tokenizer is not the one that the checkpoint was trained with (xxh3_128 of the "
            f"files):\n  {lines}\nA run keeps its tokenizer, because its data consists of that "
            "tokenizer's ids. Give the original files, under any path, or start a new run from "
            "these weights with --finetune and another --save"
        )
        return
    missing = [part for part in there if part not in here]
    if missing:
        names = ", ".join(missing)
        yield warning(f"{names}: not compared with the checkpoint's, because it is not given here")


def warn_about_changes(context: ResumeContext) -> Iterator[Finding]:
    """Warn in one message about all settings that have changed since the checkpoint was saved.

    The list has only settings that can change what is trained, and that no other rule compares. All
    of them may change on resume.
    """
    # An evaluation trains nothing.
    if context.given.batch.eval_only:
        return
    table = all_fields()
    rows = [
        (table[dotted].flag, *(_show(value, table[dotted]) for value in (before, now)))
        for dotted, before, now in find_config_differences(context.saved, context.plan.config)
        if _is_listed(table[dotted]) and not _is_left_to_start(dotted, now)
    ]
    if not rows:
        return
    rows.insert(0, ("setting", "before", "now"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        f"\n  {setting.ljust(widths[0])}  {before.ljust(widths[1])}  {now}"
        for setting, before, now in rows
    ]
    yield warning(f"changed since the checkpoint of iteration {context.iteration}:{''.join(lines)}")


def _is_listed(field: Field) -> bool:
    """Return whether `warn_about_changes` lists a field."""
    if field.dotted in _LISTED:
        return True
    # `check_schedule` compares the schedule of the learning rate.
    if field.dotted in _NOT_LISTED or field.name.startswith("lr_"):
        return False
    return field.group in _LISTED_GROUPS


def _is_left_to_start(dotted: str, now: str) -> bool:
    """Return whether the start chooses a value (`run/start/resume.py`)."""
    if dotted == "optimizer.muon_fp32_matmul_prec":
        return now == '"auto"'
    return dotted.startswith("kernels.") and now in ("null", '["by-gpu"]')


def _show(value: str, field: Field) -> str:
    """Return a value in JSON as text for people."""
    unset = "auto" if field.is_switch else "not set"
    return {"null": unset, "true": "on", "false": "off", "[]": "not set"}.get(value, value)


def warn_about_new_states(context: ResumeContext) -> Iterator[Finding]:
    """Warn if --no-load-optim does not load states that fit this run."""
    config = context.plan.config
    if config.checkpoint.load_optim or config.batch.eval_only or not context.has_states:
        return
    # The states of another optimizer do not fit, so it is right to leave them out.
    if config.optimizer.optimizer == context.saved.optimizer.optimizer:
        yield warning(
            "--no-load-optim: the optimizer's states of the checkpoint are not loaded, although "
            "they fit, and start from zero. If --load is --save, remove the flag after the first "
            "start with it, or every start loses them"
        )
