"""The memory of a host without GPUs, checked before anything is allocated."""

from megatron.base.errors import ConfigError
from megatron.base.host_limits import read_total_memory
from megatron.base.plain_text import format_bytes
from megatron.model import flops
from megatron.plan.run_plan import Plan

_MASTER_BYTES = 4
"""Bytes of a parameter in fp32."""


def require_host_memory(plan: Plan, ranks_on_host: int) -> None:
    """Check that the fp32 weights and the optimizer's states can fit into this host's memory.

    Linux lets processes allocate more memory than the host has, and kills them without a message
    when they use it. Gradients and activations need memory too, so a run that passes this check may
    still be too large.

    Args:
        plan: The plan of the run.
        ranks_on_host: Number of ranks on this host.

    Raises:
        ConfigError: They cannot fit, even if each of them exists once.
    """
    if plan.config.parallel.deepspeed or plan.config.batch.eval_only:
        # DeepSpeed may keep states on a disk, or in 8 bits. An evaluation needs none.
        return
    share = ranks_on_host / plan.world_size
    needed = share * _count_state_bytes(plan)
    memory = read_total_memory()
    if memory is None or needed <= memory:
        return
    raise ConfigError(
        f"the model does not fit into the memory of this host: the fp32 weights and the states of "
        f"{plan.config.optimizer.optimizer} of {share:.0%} of its {plan.parameters:,} parameters "
        f"need {format_bytes(needed)}, and the host has {format_bytes(memory)}, swap included; "
        f"make it smaller, or divide it over more hosts (tools/plan.py shows what each rank needs)."
    )


def count_checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of the tensors of a checkpoint, over all of its files.

    A checkpoint has the fp32 weights and no half-precision copy of them. It has the optimizer's
    states, unless --no-save-optim is given. Rows that pad the vocabulary are not saved. They count
    here, because they are few.
    """
    if plan.config.checkpoint.save_optim:
        return _count_state_bytes(plan)
    return _MASTER_BYTES * plan.parameters


def _count_state_bytes(plan: Plan) -> int:
    """Return the bytes of the fp32 weights and of the optimizer's states, each of them once."""
    matrices = flops.count_matrix_parameters(plan.shape)
    states = flops.count_state_bytes(plan.config.optimizer, plan.parameters, matrices)
    return _MASTER_BYTES * plan.parameters + states
