"""The choice of plans whose microbatches are recorded as CUDA graphs, for --cuda-graph.

A graph repeats the same kernels with the same memory. So nothing in a microbatch may depend on a
number that the host reads, or that the host passes to a kernel in each microbatch.
"""

from megatron.config.tree import Config
from megatron.plan.run_plan import Plan
from megatron.schedule.curriculum import Curriculum

_LENGTHS = 8
"""The number of sequence lengths of a curriculum that get graphs."""


def find_graph_obstacle(plan: Plan) -> str | None:
    """Return why microbatches of a plan are never recorded, or None if they can be."""
    config = plan.config
    obstacles = {
        "attention kernels draw masks from a generator of the host": (
            config.model.attention_dropout > 0 and config.kernels.names_fused_attention
        ),
        "DeepSpeed runs the passes": config.parallel.deepspeed,
        "the stages of a pipeline send messages": plan.pipeline_size > 1,
        "several ranks share the weights, which FSDP2 gathers": plan.weight_ranks > 1,
        "each expert gets another number of tokens": config.model.num_experts is not None,
        "the number of documents differs": config.data.reset_attention_mask,
        "--checkpoint-in-cpu copies to host memory": config.recompute.checkpoint_in_cpu,
    }
    return next((reason for reason, found in obstacles.items() if found), None)


def find_default_obstacle(plan: Plan) -> str | None:
    """Return why --cuda-graph auto does not record microbatches of a plan, or None if it does."""
    reason = find_graph_obstacle(plan)
    if reason is None and plan.world_size > 1:
        return "graphs with messages between ranks have not run on several GPUs"
    return reason


def runs_eager_passes(config: Config) -> bool:
    """Return whether some iterations run backward passes that hooks watch, beside graphs."""
    return bool(config.parallel.replay_interval or config.logging.log_layer_stats_interval)


def find_shortest_recorded(curriculum: Curriculum | None, first: int, last: int) -> int:
    """Return the shortest sequence length that gets graphs, of iterations `first` to `last`.

    A recording costs about a step. A curriculum may have hundreds of lengths, and most tokens are
    in the longest samples.
    """
    if curriculum is None:
        return 0
    lengths = sorted({length for _, length in curriculum.iterate_stages(first, last)})
    return lengths[-_LENGTHS:][0]
