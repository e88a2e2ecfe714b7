"""Refuses wrong configurations before a run starts, without torch.

Importing torch takes seconds. Where possible, a wrong command line is therefore refused before it.
"""

import os
from dataclasses import replace

from megatron.base.errors import combine_errors
from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.url import is_url
from megatron.engine.kind import refuse_unsupported
from megatron.engine.native_kind import NATIVE
from megatron.parallel.launcher import read_ranks_per_node
from megatron.plan.resolve import resolve
from megatron.plan.rules.data import check_tokenizer_files
from megatron.plan.rules.finding import apply_rules, list_errors, refuse_errors
from megatron.plan.rules.lists import CONFIG_RULES, NEEDED_BY_RUNS
from megatron.plan.run_plan import Plan
from megatron.run.parts import NO_PARTS, Parts, PartsContext, check_parts
from megatron.run.start.launch import Launch
from megatron.tokenizer import fetch_missing_tokenizer

_UNKNOWN_VOCABULARY = 1
"""A vocabulary size that breaks no rule, for a plan that is only checked."""


def check_before_torch(launch: Launch) -> Launch:
    """Refuse a configuration with errors that no checkpoint could correct.

    Each rank calls this without communication. In `resolve_job`, rank 0 checks what depends on the
    checkpoint, or on files that many ranks must not read at the same time.

    Returns:
        The launch, with the plan of a run from scratch. The plan is left out if it may depend on a
        checkpoint, or on such files.

    Raises:
        ConfigError: See `check_parts` and `check_plan`, or the tokenizer cannot be downloaded.
    """
    config = launch.config
    refuse_errors(check_parts(PartsContext(config, launch.parts)))
    # The checkpoint's curriculum may replace the one that is wrong here.
    if config.optimizer.use_checkpoint_lr_scheduler:
        return launch
    load = config.checkpoint.load
    # `os.path.exists` raises no error for a folder that cannot be read. Rank 0 reports that later.
    if load is not None and (is_url(load) or os.path.exists(load)):
        # The position in the data is unknown, so only rules that do not depend on it apply.
        refuse_errors(apply_rules(CONFIG_RULES, ConfigWithOrigin(config, launch.loaded.origin)))
        return launch
    # Many ranks must not read the tokenizer's files at the same time. Rank 0 reads them later.
    world_size = launch.world.size
    alone = world_size == 1
    if alone:
        # The plan needs the size of the vocabulary.
        fetch_missing_tokenizer(config.tokenizer, needs_text=config.data.needs_documents)
    plan = resolve(
        config,
        world_size,
        launch.loaded.origin,
        vocab_size=None if alone else _UNKNOWN_VOCABULARY,
        ranks_per_node=read_ranks_per_node(world_size),
    )
    check_plan(plan, launch.parts, read_files=alone)
    # Several ranks have planned with a placeholder for the vocabulary. Nothing can use that plan.
    return replace(launch, early=plan) if alone else launch


def check_plan(plan: Plan, parts: Parts = NO_PARTS, *, read_files: bool = True) -> None:
    """Refuse a plan that cannot be trained.

    Args:
        plan: The plan of the run.
        parts: The parts of the run besides the core.
        read_files: Also look for the files of the tokenizer.

    Raises:
        ConfigError: The configuration is wrong, a file of the tokenizer does not exist, the engine
            cannot run the plan, the package of a tracker is missing, or a setting is missing that
            only training needs. The message lists all such errors of one kind.
    """
    settings = ConfigWithOrigin(plan.config, {})
    errors = list(plan.errors)
    if read_files:
        errors += list_errors(check_tokenizer_files(plan.config.tokenizer))
    if errors:
        # A type without its path also leaves the size of the vocabulary unknown.
        raise combine_errors(tuple(dict.fromkeys(errors)))
    refuse_unsupported(plan, parts.engine or NATIVE)
    refuse_errors(apply_rules((parts.check_flags, *NEEDED_BY_RUNS), settings))
