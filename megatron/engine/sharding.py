"""ZeRO on PyTorch's FSDP2, which shards a model over the data-parallel ranks.

The stage determines what is sharded and when it is sent (https://arxiv.org/abs/1910.02054):

    stage 0   nothing: each rank has its own copy; gradients are reduced once
    stage 1   optimizer states are sharded; gradients are reduced once, after the last microbatch
    stage 2   also gradients: reduced and scattered after every microbatch
    stage 3   also parameters: gathered for each block's forward and backward, and dropped again

With several copies of the model (HSDP, or stage 0), the ranks of one copy shard it. The shards of
the gradients are averaged over the copies once, after the last microbatch. Copies therefore stay
equal bit for bit (docs/decisions/035).

FSDP2 keeps fp32 shards and gathers them in the compute dtype. It reduces and accumulates gradients
in fp32 (https://arxiv.org/abs/2304.11277). Only a run with several data-parallel ranks imports this
module. See `build_stages`.

Between processes on CPUs, gloo's reduce-scatter is an all-reduce of which each rank keeps a part,
and its all-gather copies every part once more. `reduce_shards` and `gather_shards` send each rank
only what it needs (docs/decisions/040). The ranks' terms are added in the order of the ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.model.experts.layer import Experts
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.mesh import CommTimer, DataSharding, ExpertParallel
from megatron.parallel.rank_progress import wait_for
from megatron.parallel.torch_private import find_fsdp_collectives


def has_faster_collectives(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether `gather_shards` and `reduce_shards` apply to a tensor and a group."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def gather_shards(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the shards of all ranks of a group, as `dist.all_gather_into_tensor` does.

    Args:
        gathered: [ranks x k], which is filled. `shard` may be this rank's part of it.
        shard: [k], this rank's shard.
        group: A group of gloo.
    """
    parts = gathered.view(group.size(), -1)
    own = parts[group.rank()]
    if own.data_ptr() != shard.data_ptr():
        own.copy_(shard)
    # All of them work at the same time.
    works = [
        dist.broadcast(part, group=group, group_src=source, async_op=True)
        for source, part in enumerate(parts)
    ]
    for work in works:
        assert work is not None, "this rank is in the group"
        wait_for(work)


def reduce_shards(
    reduced: Tensor,
    terms: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType | dist.ReduceOp,
) -> None:
    """Sum or average the ranks' terms, as `dist.reduce_scatter_tensor` does.

    Args:
        reduced: [k], which is filled with this rank's part of the result.
        terms: [ranks x k], this rank's terms of all parts.
        group: A group of gloo with several ranks.
        op: `SUM` or `AVG`.
    """
    assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"no exchange of terms for {op}"
    received = torch.empty_like(terms)
    dist.all_to_all_single(received, terms, group=group)
    first, second, *others = received.view(group.size(), -1)
    torch.add(first, second, out=reduced)
    for term in others:
        reduced.add_(term)
    if op == dist.ReduceOp.AVG:
        reduced.div_(group.size())


_AllGather, _ReduceScatter = find_fsdp_collectives()


class _TimedAllGather(_AllGather):  # type: ignore[misc, valid-type]
    """FSDP2's all-gather inside the communication timer."""

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
            if has_faster_collectives(input_tensor, group):
                gather_shards(output_tensor, input_tensor, group)
                return None
            work: dist.Work | None = super().__call__(output_tensor, input_tensor, group, async_op)
            return work


class _TimedReduceScatter(_ReduceScatter):  # type: ignore[misc, valid-type]
    """FSDP2's reduce-scatter inside the communication timer. It can send another dtype."""

    def __init__(self, comm_timer: CommTimer, dtype: torch.dtype) -> None:
        self._comm_timer = comm_timer
        self._dtype = dtype

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        # FSDP2 could reduce in bf16 itself, but it would then also accumulate microbatches in bf16.
        # The cast here changes only what is sent.
        sent = input_tensor.to(self._dtype)
        received = output_tensor.to(self._dtype)
        work = None
        with self._comm_timer():
            if has_faster_collectives(sent, group):
                reduce_shards(received, sent, group, op)
            else:
                work = super().__call__(received, sent, group, op, async_op)
        if received is not output_tensor:
            output_tensor.copy_(received)
        return work


class _CopyReduction:
    """Averages the gradients of one module over the copies of the model, once in a step.

    FSDP2 calls it after each reduce-scatter, on a separate stream. It therefore overlaps with the
    next reduce-scatter and with the backward pass. FSDP2's own HSDP is not used, because it would
    accumulate in the dtype that is sent, and its all-reduce cannot be timed.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, comm_timer: CommTimer) -> None:
        self._group = group
        self._dtype = dtype
        self._comm_timer = comm_timer
        self.last = False
        """Whether the next call is for the last microbatch of the batch."""
        self._earlier: Tensor | None = None

    def __call__(self, reduced: Tensor) -> None:
        """Average a microbatch's gradients in place, together with those of earlier ones.

        Args:
            reduced: This rank's shard of the module's gradients, flat in fp32.
        """
        if reduced.is_cuda:
            # FSDP2 allocates the tensor on another stream. Without this, it could be reused before
            # this stream has read it.
            reduced.record_stream(torch.cuda.current_stream())
        if not self.last:
            # The memory of the first microbatch becomes that of the parameters' gradients. FSDP2
            # adds those of later microbatches to it.
            if self._earlier is None:
                self._earlier = reduced
            return
        if self._earlier is not None:
            # FSDP2 adds the result to the parameters' gradients, so these must be zero now.
            reduced.add_(self._earlier)
            self._earlier.zero_()
            self._earlier = None
        sent = reduced.to(self._dtype)
        with self._comm_timer():
            dist.all_reduce(sent, op=dist.ReduceOp.AVG, group=self._group)
        if sent is not reduced:
            reduced.copy_(sent)


def _keep_gradients_in_fp32(module: FSDPModule) -> None:
    """Let autograd and linear layers accumulate the gradients of gathered parameters in fp32.

    FSDP2 gathers into the same parameters during the whole run. It sends gradients in fp32 in any
    case, and would only cast those in 16 bits first. All gradients of a module must have the same
    dtype.
    """
    module.unshard()
    assert isinstance(module, nn.Module), "FSDP2 adds its class to that of the module"
    for parameter in module.parameters():
        # Those of other modules inside this one are sharded now.
        if not isinstance(parameter, DTensor):
            parameter.grad_dtype = torch.float32


STAGES = {0: (False, False), 1: (False, False), 2: (True, False), 3: (True, True)}
"""ZeRO stage -> whether every microbatch reduces gradients, and whether each use drops parameters.

Stage 0 is stage 1 in which each rank is a copy of the model.
"""


class ShardedModel:
    """A model sharded over the data-parallel ranks."""

    def __init__(
        self,
        model: GPT,
        sharding: DataSharding,
        experts: ExpertParallel | None = None,
        *,
        stage: int,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        comm_timer: CommTimer,
        fused_gradients: bool = False,
    ) -> None:
        """Replace the parameters of `model` by shards, without memory yet.

        Args:
            model: A stage on the meta device.
            sharding: The data-parallel ranks that share a copy, and those with the same shards.
            experts: The ranks that divide the experts.
            stage: The ZeRO stage.
            compute_dtype: The type that parameters are gathered in.
            reduce_dtype: The type that gradients are sent in. They are accumulated in fp32.
            comm_timer: The timer of communication.
            fused_gradients: Whether the linear layers of blocks add to fp32 gradients.
        """
        self.model = model
        self._reduces_always, self._drops_always = STAGES[stage]
        self._compute_dtype = compute_dtype
        self._fused_gradients = fused_gradients
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
            # 16-bit sums over many microbatches would lose small gradients. `reduce_dtype` applies
            # to what is sent only.
            reduce_dtype=torch.float32,
            # FSDP2 would cast the rotary tables, which must stay in fp32.
            cast_forward_inputs=False,
        )
        # The model must come last. FSDP2 gives a module only the parameters that no module inside
        # it has. The model gets the embedding. Its gradients come last, so they are sent last. A
        # head with a matrix of its own is gathered during the last block, and its gradients are
        # sent during the backward pass of the blocks. A tied head belongs to the embedding.
        modules: list[nn.Module] = [*model.blocks.values(), model]
        if model.head is not None and model.head.weight is not None:
            modules.insert(-1, model.head)
        self._sharded: list[FSDPModule] = []
        self._copy_reductions: list[_CopyReduction] = []
        mixtures = [module for module in model.modules() if isinstance(module, Experts)]
        for module in [*mixtures, *modules]:
            # Other ranks share the experts than the rest of a block.
            shared = sharding
            if module in mixtures:
                assert experts is not None, "a model with experts has their ranks"
                shared = experts.sharding
            assert shared.mesh is not None, "several ranks have a mesh"
            sharded = fully_shard(
                module,
                mesh=shared.mesh,
                # The backward pass begins with the head. It would be dropped and immediately
                # gathered again. That of the embedding reads no weights, but FSDP2 would gather
                # them.
                reshard_after_forward=self._drops_always and module not in (model, model.head),
                mp_policy=policy,
            )
            sharded.set_custom_all_gather(_TimedAllGather(comm_timer))
            sharded.set_custom_reduce_scatter(_TimedReduceScatter(comm_timer, reduce_dtype))
            if shared.replicas is not None:
                reduction = _CopyReduction(shared.replicas, reduce_dtype, comm_timer)
                sharded.set_all_reduce_hook(reduction)
                self._copy_reductions.append(reduction)
            self._sharded.append(sharded)
        self._root = self._sharded[-1]

    def allocate_shards(self, device: torch.device) -> None:
        """Allocate the memory that the shards keep during the run.

        FSDP2 moves shards of uneven size into padded memory at its first forward pass. A reference
        to a shard is only valid after that, so this method runs a forward pass.
        """
        self.model.to_empty(device=device)
        tp = self.model.tp
        hidden_size = self.model.shape.config.hidden_size
        # A short sequence that sequence and context parallelism can divide. The weights are
        # undefined at this point, so the result has no meaning.
        context = self.model.context.size
        local = tp.size if context == 1 else 2 * tp.size
        tokens = torch.zeros((1, local * context), dtype=torch.long, device=device)
        stream = torch.zeros(
            (local // tp.size if tp.sequence_parallel else local, 1, hidden_size),
            dtype=self._compute_dtype,
            device=device,
        )
        self.model.eval()
        # The compiler must not build a graph for a shape that never occurs again.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            self.model(None if self.model.stage.first else stream, Inputs(tokens, tokens))
        # Only the blocks of stage 3 are dropped after a forward pass. What is still gathered holds
        # the undefined weights, and must be gathered again after initialisation.
        self.drop_gathered()
        if self._fused_gradients:
            for block in self.model.get_blocks().values():
                assert isinstance(block, FSDPModule), "FSDP2 shards each block"
                _keep_gradients_in_fp32(block)
        self.drop_gathered()

    def drop_gathered(self) -> None:
        """Drop the gathered parameters. The next pass gathers them again from the shards."""
        for sharded in self._sharded:
            sharded.reshard()

    def prepare_backward(self, *, last: bool) -> None:
        """Set what FSDP2 does in the next backward pass.

        Args:
            last: Whether it belongs to the last microbatch of the batch.
        """
        for reduction in self._copy_reductions:
            reduction.last = last
        # In stage 1 gradients of earlier microbatches are only accumulated, so that they are sent
        # once.
        self._root.set_requires_gradient_sync(last or self._reduces_always)
        # After the last microbatch the parameters must be dropped. The update changes the shards,
        # and gathered parameters would be out of date. In stage 3 they are dropped after each
        # microbatch. Otherwise all blocks would stay gathered from the first backward pass on.
        self._root.set_reshard_after_backward(last or self._drops_always)
