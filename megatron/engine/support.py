"""What can be planned and is not trained yet. Imports no torch: the planning tool asks, too."""

from megatron.errors import ConfigError
from megatron.plan import Plan


def unsupported(plan: Plan) -> list[str]:
    """What of a plan no engine runs yet, one line each."""
    config = plan.config
    asked = {
        "--deepspeed": config.parallel.deepspeed,
    }
    return [flag for flag, given in asked.items() if given]


def refuse_unsupported(plan: Plan) -> None:
    """
    Raises:
        ConfigError: with one line for each.
    """
    if refused := unsupported(plan):
        lines = "".join(f"\n  {flag}" for flag in refused)
        raise ConfigError(f"this version plans but does not yet train with{lines}\nleave these out")
