"""What the tests of types run in the process with the fake GPU. torch is imported only there."""

import contextlib
import shlex
from typing import Any

from verify.mutation import ITERATIONS, MODEL
from verify.type_mutations import TYPE_MUTATIONS


def check_here(flags: str, world_size: int, mutation: str = "") -> list[str]:
    """Return the problems of a run, with a mutation of the package in this process."""
    from megatron.commands.verify import VerifyArguments, resolve_command
    from megatron.extras.planner.types.check import check_types
    from megatron.extras.planner.types.typed_rank import run_typed_rank

    plan, _ = resolve_command(VerifyArguments(world_size=world_size), shlex.split(flags))
    change: Any = contextlib.nullcontext()
    if mutation:
        change = TYPE_MUTATIONS[mutation].change()
    with change:
        check = check_types(plan, lambda tasks: [run_typed_rank(*task) for task in tasks])
    assert check.ranks
    return check.problems


def check_planted(name: str) -> list[str]:
    """Return the problems of a run with an error of the museum, which stays in this process."""
    from verify.mutations import MUTATIONS

    mutation = next(each for each in MUTATIONS if each.name == name)
    mutation.apply()
    return check_here(f"{MODEL} {ITERATIONS} {mutation.flags}", mutation.world_size)


def check_small(flags: str, world_size: int) -> list[str] | None:
    """Return the problems of a small model, or None if its flags do not fit each other."""
    from megatron.base.errors import ConfigError

    try:
        return check_here(f"{MODEL} {flags}", world_size)
    except ConfigError:
        return None
