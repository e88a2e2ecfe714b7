"""What can be planned and is not trained yet. Imports no torch: the planning tool asks, too."""

from megatron.errors import ConfigError
from megatron.plan import Plan


def unsupported(plan: Plan) -> list[str]:
    """What of a plan no engine runs yet, one line each."""
    config = plan.config
    stages = config.parallel.pipeline_model_parallel_size
    asked = {
        f"--pipeline-model-parallel-size {stages}": stages > 1,
        "--fp16 (--bf16 is there)": config.precision.fp16,
        "--checkpoint-activations": config.recompute.checkpoint_activations,
        "--deepspeed": config.parallel.deepspeed,
        "--sync-tp-duplicated-parameters": config.parallel.sync_tp_duplicated_parameters,
        "a curriculum of sequence lengths": plan.curriculum is not None,
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
