"""ZeRO on PyTorch's FSDP2: which data-parallel rank holds what, and when it is sent (https://arxiv.org/abs/1910.02054).

    stage 1   optimizer states are sharded; gradients are reduced once, after the last microbatch
    stage 2   also gradients: reduced and scattered after every microbatch
    stage 3   also parameters: gathered for each block's forward and backward, and dropped again

FSDP2 keeps fp32 shards, gathers them in the compute dtype, and reduces and accumulates gradients in fp32 (https://arxiv.org/abs/2304.11277).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.mesh import CommTimer


class _TimedAllGather(DefaultAllGather):
    def __init__(self, comm_timer: CommTimer) -> None:
        self._comm_timer = comm_timer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._comm_timer():
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _TimedReduceScatter(DefaultReduceScatter):
    def __init__(self, comm_timer: CommTimer) -> None:
        self._comm_timer = comm_timer

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._comm_timer():
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


class ShardedModel:
    """A model sharded over the data-parallel ranks."""

    def __init__(
        self,
        model: GPT,
        mesh: DeviceMesh,
        *,
        stage: int,
        compute_dtype: torch.dtype,
        comm_timer: CommTimer,
    ) -> None:
        self._model = model
        self._stage = stage
        self._compute_dtype = compute_dtype
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # rotary tables stay in fp32
        )
        modules: list[nn.Module] = [*model.blocks.values(), model]
        self._sharded: list[FSDPModule] = []
        for module in modules:
            sharded = fully_shard(
                module, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy
            )
            sharded.set_custom_all_gather(_TimedAllGather(comm_timer))
            sharded.set_custom_reduce_scatter(_TimedReduceScatter(comm_timer))
            self._sharded.append(sharded)
        self._root = self._sharded[-1]

    def allocate_shards(self, device: torch.device) -> None:
        """Give the shards memory, at the place where it will stay.

        FSDP2 moves shards of uneven size into padded memory at its first forward; who keeps a reference to a shard must take it
        after that. So run one, on as few tokens as the layout allows.
        """
        self._model.to_empty(device=device)
        tp, hidden_size = self._model.tp, self._model.shape.config.hidden_size
        tokens = torch.zeros((1, tp.size), dtype=torch.long, device=device)
        stream = torch.zeros(
            (1 if tp.sequence_parallel else tp.size, 1, hidden_size),
            dtype=self._compute_dtype,
            device=device,
        )
        self._model.eval()
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):  # no graph for a shape that never comes again
            self._model(None if self._model.stage.first else stream, Inputs(tokens, tokens))
        for sharded in self._sharded:
            sharded.reshard()

    def prepare_backward(self, *, last: bool) -> None:
        """Called before each microbatch; `last`: it is the batch's last one."""
        self._root.set_requires_gradient_sync(last or self._stage >= 2)
        # After the last one, or the module would keep unsharded parameters, whose gradients nobody reads; in stage 3 after each, or
        # all blocks would lie gathered from the first backward pass on.
        self._root.set_reshard_after_backward(last or self._stage == 3)


def shard_offset(rows: int, rank: int, ranks: int) -> int:
    """The first of `rows` rows that FSDP2 gives to `rank`: chunks of equal size, the last ones shorter or empty."""
    size = -(-rows // ranks)
    return min(rank * size, rows)
