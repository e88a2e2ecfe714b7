"""Translate a command line from batch-size ramp-up to curriculum learning.

    python tools/to_curriculum.py --train-tokens 300_000_000_000 -- <arguments of pretrain_gpt.py>
    python tools/to_curriculum.py train/my-run/my-run.slurm

The arithmetic is that of the BigScience 104B run. S is --seq-length, and B is the final
--global-batch-size.

    --train-tokens           --train-samples x S, unless given here
    --train-samples          twice the old one, so that the tokens end the run;
                             more if the tokens need it
    --lr-decay-tokens        --lr-decay-samples x S; without that flag the decay ends
                             with the run: --train-tokens
    --curriculum-total-step  --train-tokens / B / S / 2: half of the iterations at the full length
    --curriculum-min-difficulty 64, --curriculum-difficulty-step 8; lengths end at S
    --lr-warmup-*            stays in samples; a fraction and tokens are converted to samples

A run by --train-iters keeps iterations as its unit, and their number is doubled as well. No
command of a script runs.

Exit code 0 means success. Exit code 2 means that the old or the new command line has errors.
"""

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.plain_text import print_line
from megatron.commands.double_dash import split_at_double_dash
from megatron.commands.parse import parse_arguments
from megatron.commands.run_tool import run_tool
from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields, build_config
from megatron.config.tree import Config
from megatron.extras.translators.launch_script import (
    SCRIPT_SUFFIXES,
    parse_command,
    read_launch_script,
)
from megatron.extras.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

NO_END = 10**15
"""A number of iterations that no run reaches."""


@dataclass(frozen=True)
class CurriculumArguments:
    """The arguments of this tool. The old command line of pretrain_gpt.py follows '--'.

    A .slurm, .sh or .yaml file may be given instead of '--' and the arguments.
    """

    train_tokens: int | None = None
    """Tokens to train. Default: the old --train-tokens, otherwise the old samples at the full
    length. The 104B run took 300B tokens, fewer than its 300M samples of 2048 tokens."""
    min_difficulty: int = 64
    """Initial sequence length, a multiple of 8. A shorter one is more stable at first. A large
    model or other data may need more than 64. Watch the validation loss of the first hundreds of
    iterations."""
    total_step: int | None = None
    """Iterations until the full length. A longer curriculum is more stable. One that is too long
    overfits to short sequences, and the validation loss jumps within a few warm-ups. Default: half
    of the iterations that the tokens make at the full length."""
    difficulty_step: int = 8
    """Lengths are multiples of this number. A smaller step grows more evenly. Tensor Cores need a
    multiple of 8."""


@dataclass(frozen=True)
class CurriculumChange:
    """The fields of the old command line that change.

    `values` maps each field to its new value. None or () removes the flag.
    """

    old: ConfigWithOrigin
    new: Config
    values: dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Print what changes for `argv` (default: the command line) and return the exit code."""
    own, old = split_at_double_dash(argv)
    if old is None:
        end = _find_first_file(own)
        old = own[end:]
        own = own[:end]
    options = parse_arguments(
        CurriculumArguments, args=own, prog="to_curriculum.py", description=__doc__
    )
    return run_tool(lambda: _translate(old, options))


def _translate(old: list[str], options: CurriculumArguments) -> int:
    plan, origin = read_old(old)
    change = convert_to_curriculum(plan, origin, options)
    # Errors of the new plan name the origin of a field. Fields with a new value have no origin in
    # the old command line any more.
    kept = {dotted: where for dotted, where in origin.items() if dotted not in change.values}
    new = resolve(change.new, plan.world_size, kept)
    new.raise_on_errors()
    print_line(
        "\n".join(
            [
                *format_flags(change),
                "",
                *format_deepspeed_block(new),
                "",
                *list_consequences(plan, new),
            ]
        )
    )
    return 0


def _find_first_file(argv: list[str]) -> int:
    """Return the position of the script or YAML file that the old command starts with."""
    files = (
        i for i, word in enumerate(argv) if Path(word).suffix in (*SCRIPT_SUFFIXES, ".yaml", ".yml")
    )
    return next(files, len(argv))


def read_old(words: list[str]) -> tuple[Plan, dict[str, str]]:
    """Return the plan of the old command line, and the origin of its fields.

    The plan is made for one replica of the model. The translation does not depend on the number of
    replicas.

    Raises:
        ConfigError: The command line cannot be read, has errors, or gives no batch size.
    """
    if words and not words[0].startswith("-"):
        first = Path(words[0])
    else:
        first = None
    if first is not None and first.suffix in (".yaml", ".yml"):
        arguments = ["--config", *words]
    elif first is not None and first.suffix in SCRIPT_SUFFIXES:
        arguments = [*read_launch_script(first, environment=os.environ).arguments, *words[1:]]
    else:
        arguments = list(parse_command(words).arguments)
    loaded = load_config(arguments, prog="to_curriculum.py")
    batch = loaded.config.batch
    parallel = loaded.config.parallel
    # Without this flag the batch size follows from the number of processes, and all arithmetic here
    # depends on it.
    if batch.global_batch_size is None and batch.step_batch_size_schedule is None:
        raise ConfigError(
            "--global-batch-size is not given, and the number of processes is not known here. "
            "Give --global-batch-size."
        )
    if loaded.config.curriculum.curriculum_schedule_type is not None:
        raise ConfigError(
            "the command line has a curriculum already (--curriculum-schedule-type); there is "
            "nothing to translate."
        )
    # The batch sizes of a ramp-up that fit one replica may not fit more of them. That is checked
    # again when the new command line is planned.
    replica = max(1, parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    plan = resolve(loaded.config, replica, loaded.origin)
    plan.raise_on_errors()
    return plan, loaded.origin


def convert_to_curriculum(
    plan: Plan, origin: dict[str, str], options: CurriculumArguments
) -> CurriculumChange:
    """Compute the new values of all fields that change.

    Raises:
        ConfigError: The learning-rate schedule cannot count tokens, or the sizes make no
            curriculum.
    """
    old = ConfigWithOrigin(plan.config, origin)
    batch = plan.config.batch
    optimizer = plan.config.optimizer
    seq_length = plan.config.model.seq_length
    if optimizer.lr_decay_style in ("WSD", "inverse-square-root"):
        raise ConfigError(
            f"--lr-decay-style {optimizer.lr_decay_style} counts samples, and a curriculum needs a "
            "decay by tokens; use cosine or linear."
        )
    if plan.train_samples < 1 or plan.train_seconds is not None:
        raise ConfigError(
            "the old command line gives no end in samples; give --train-samples or --train-iters."
        )
    tokens = _choose_first_given(
        options.train_tokens, batch.train_tokens, plan.train_samples * seq_length
    )
    # At the final batch size, half of the iterations are then spent at the full length.
    total = _choose_first_given(
        options.total_step, max(1, tokens // (2 * plan.batch_size.final * seq_length))
    )
    values: dict[str, Any] = {
        # The curriculum replaces the ramp-up. Both start training with few tokens per step.
        "batch.rampup_batch_size": None,
        "batch.step_batch_size_schedule": None,
        "batch.global_batch_size": plan.batch_size.final,
        "batch.train_tokens": tokens,
        "optimizer.lr_decay_samples": None,
        "optimizer.lr_decay_iters": None,
        "optimizer.lr_decay_tokens": _compute_decay_tokens(plan, tokens),
        "curriculum.curriculum_schedule_type": "fixed_linear",
        "curriculum.curriculum_min_difficulty": options.min_difficulty,
        "curriculum.curriculum_total_step": total,
        "curriculum.curriculum_difficulty_step": options.difficulty_step,
    }
    if optimizer.lr_warmup_fraction is not None:
        values["optimizer.lr_warmup_fraction"] = None
        # A fraction would now be a share of the decay in tokens, which is another length.
        values |= _compute_warmup(plan)
    if optimizer.lr_warmup_tokens is not None:
        # With the curriculum, the first sequences are shorter than the length that converts tokens.
        values["optimizer.lr_warmup_tokens"] = None
        values |= _compute_warmup(plan)
    # The length depends on the curriculum, so this comes after all its fields are set.
    values |= _compute_length(plan, _update_config(plan.config, values), tokens)
    return CurriculumChange(old, _update_config(plan.config, values), values)


def _choose_first_given(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _update_config(config: Config, values: dict[str, Any]) -> Config:
    return build_config(ConfigWithOrigin(config, {}).list_values() | values)


def _compute_decay_tokens(plan: Plan, tokens: int) -> int:
    optimizer = plan.config.optimizer
    if optimizer.lr_decay_tokens is not None:
        return optimizer.lr_decay_tokens
    # Without a flag the decay ends with the run, as it did in the old one.
    if optimizer.lr_decay_samples is None and optimizer.lr_decay_iters is None:
        return tokens
    return plan.lr_schedule.decay_steps * plan.config.model.seq_length


def _compute_warmup(plan: Plan) -> dict[str, int]:
    """Return the old warm-up, given as a fraction or in tokens, in the unit of the run."""
    # Rounding up keeps the warm-up at least as long as it was.
    samples = math.ceil(plan.lr_schedule.warmup_steps)
    if plan.config.batch.train_samples is not None:
        return {"optimizer.lr_warmup_samples": samples}
    return {"optimizer.lr_warmup_iters": math.ceil(samples / plan.batch_size.final)}


def _compute_length(plan: Plan, new: Config, tokens: int) -> dict[str, int]:
    """Return samples or iterations that are at least what the tokens need.

    Short sequences make the run longer in samples. The tokens must end it, so this bound has to be
    higher.
    """
    curriculum = resolve(new, plan.world_size).curriculum
    if curriculum is not None:
        needed = curriculum.find_iteration_reaching(tokens, plan.batch_size.final, 1, NO_END)
    else:
        needed = None
    batch = plan.config.batch
    if batch.train_samples is not None:
        return {
            "batch.train_samples": max(
                2 * batch.train_samples, (needed or 0) * plan.batch_size.final
            )
        }
    return {"batch.train_iters": max(2 * plan.train_iters, needed or 0)}


def format_flags(change: CurriculumChange) -> list[str]:
    """List the flags to remove, to change and to add, each with its present origin."""
    removed = []
    changed = []
    added = []
    for dotted, value in change.values.items():
        before = change.old[dotted]
        # An unchanged field needs no line. The step is printed anyway, because the user must know
        # it.
        if before == value:
            # This field has a default, so it may be unchanged and yet needs to be in the new
            # command line.
            if dotted == "curriculum.curriculum_difficulty_step":
                added.append(f"  {_format_flag(dotted, value)}")
        elif value is None:
            removed.append(f"  {change.old.describe(dotted)}")
        elif before is None or not change.old.is_changed(dotted):
            added.append(f"  {_format_flag(dotted, value)}")
        else:
            changed.append(f"  {change.old.describe(dotted)}  ->  {_format_flag(dotted, value)}")
    parts = (("remove", removed), ("change", changed), ("add", added))
    return [line for title, lines in parts if lines for line in (title, *lines)]


def _format_flag(dotted: str, value: Any) -> str:
    return f"{all_fields()[dotted].flag} {f'{value:_}' if isinstance(value, int) else value}"


def format_deepspeed_block(new: Plan) -> list[str]:
    """Format the curriculum as a block of DeepSpeed's JSON, for runs that use such a file."""
    curriculum = new.curriculum
    assert curriculum is not None, "the new command line has one"
    block = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": curriculum.min_difficulty,
        "max_difficulty": curriculum.max_difficulty,
        "schedule_type": curriculum.style,
        "schedule_config": {
            "total_curriculum_step": curriculum.total_curriculum_step,
            "difficulty_step": curriculum.difficulty_step,
        },
    }
    text = json.dumps({"curriculum_learning": block}, indent=2)
    return [
        "instead of the --curriculum-* flags, in the JSON of --deepspeed-config",
        *text.splitlines(),
    ]


def list_consequences(old: Plan, new: Plan) -> list[str]:
    """List the numbers that follow from the change, and what the user has to decide."""
    assert new.curriculum is not None, "the new command line has one"
    assert new.config.batch.train_tokens is not None, "it was worked out"
    assert new.curriculum.total_curriculum_step is not None, "it is linear"
    batch = new.batch_size.final
    tokens = new.config.batch.train_tokens
    end = new.curriculum.find_iteration_reaching(tokens, batch, 1, NO_END) or 0
    stages = list(new.curriculum.iterate_stages(1, new.curriculum.total_curriculum_step))
    # Mean number of iterations that one length lasts.
    change_every = new.curriculum.total_curriculum_step / len(stages)
    lines = [
        f"the run ends at iteration {end:,} with {tokens:,} tokens of {end * batch:,} "
        f"samples; the old one had {old.train_iters:,} iterations and {old.train_samples:,} "
        "samples",
        f"there are {len(stages)} lengths from {stages[0][1]} to {stages[-1][1]} tokens; one "
        f"lasts {change_every:,.0f} iterations",
        *_describe_warmup(old, new),
        "the training loss is that of the current length: compare by the validation loss, "
        "which is always that of the full length, and evaluate more often (--eval-interval)",
        "memory is largest at the full length: try --micro-batch-size without the curriculum; "
        "it may grow, since the batch size no longer starts small",
    ]
    return [
        "consequences",
        *(f"- {line}" for line in [*lines, *new.curriculum.list_warnings()]),
    ]


def _describe_warmup(old: Plan, new: Plan) -> list[str]:
    """Describe how much shorter the warm-up becomes.

    A warm-up in samples takes far fewer steps without a ramp-up, and fewer tokens with short
    sequences.
    """
    samples = old.lr_schedule.warmup_steps
    batch = new.batch_size.final
    if samples <= 0:
        return []
    steps = math.ceil(samples / batch)
    before = next(p for p in _iterate_progress(old) if p[1] >= samples)[0]
    # Short sequences make the same samples far fewer tokens.
    (state,) = new.forecast().predict([steps])
    return [
        f"the warm-up's {samples:,.0f} samples are {steps:,} iterations and "
        f"{state.consumed_tokens:,} tokens now, instead of {before:,} iterations in the old run; "
        "if that is too steep, lengthen it (the 104B run went from 216,320 samples to 3,750,000: "
        "375M tokens at a mean length of 100)"
    ]


def _iterate_progress(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield (iteration, consumed samples) without end."""
    iteration = samples = 0
    while True:
        yield iteration, samples
        samples += plan.batch_size.get_size(samples, samples * plan.config.model.seq_length)
        iteration += 1


if __name__ == "__main__":
    sys.exit(main())
