"""The runner for several pipeline ranks. It uses the schedules of `torch.distributed.pipelining`.

The schedules are 1F1B, GPipe (https://arxiv.org/abs/1811.06965), interleaved 1F1B
(https://arxiv.org/abs/2104.04473) and looped BFS (https://arxiv.org/abs/2211.05953). Only a run
with a pipeline imports this module. See `build_runner`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from megatron.engine.parallelize import RankStage
from megatron.model.inputs import Inputs
from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import Mesh, choose_message_device
from megatron.parallel.rank_progress import RankProgress
from megatron.parallel.torch_private import StageInternals
from megatron.schedule.pipeline_schedule import choose_schedule


class PipelineRunner:
    """A runner for this rank's stages, together with those of the other pipeline ranks.

    A schedule works for one number of microbatches of one shape. The latest one for training and
    the latest one for evaluation are kept. A ramp-up has a hundred batch sizes, so keeping all
    schedules would waste memory.
    """

    def __init__(
        self,
        stages: Sequence[RankStage],
        mesh: Mesh,
        *,
        num_stages: int,
        dtype: torch.dtype,
    ) -> None:
        """Create a runner of this rank's stages.

        Args:
            stages: This rank's stages, in the order of the layers.
            mesh: This rank's mesh.
            num_stages: The number of stages on all ranks together.
            dtype: The type of the residual stream that stages send to each other.
        """
        self._mesh = mesh
        self._num_stages = num_stages
        self._dtype = dtype
        self._stages = [_StageModule(stage, mesh.progress) for stage in stages]
        self._factor: float | Tensor = 1.0
        self.schedules: dict[bool, tuple[tuple[int, ...], Any]] = {}
        """The latest schedule for training (True) and for evaluation (False).

        Each comes with the number of microbatches and the shape that it is for.
        """

    def run(self, inputs: Sequence[Inputs], factor: float | Tensor, *, train: bool) -> Tensor:
        """Run the microbatches by the pipeline schedule. See `Runner.run`."""
        for stage in self._stages:
            stage.begin(inputs)
        # The loss function of the schedule reads the factor from here. The schedule is kept over
        # many steps, and the factor may change with each.
        self._factor = factor
        schedule = self._get_schedule(len(inputs), inputs[0].tokens.shape, train)
        # torch splits its arguments into microbatches. It gets only their numbers, and
        # `_StageModule` looks up the microbatch itself.
        numbers = torch.arange(len(inputs))
        # torch computes a loss only if it gets a target. The labels are in the inputs already, so
        # the target is only a placeholder.
        if train:
            schedule.step(target=numbers, return_outputs=False, number=numbers)
        else:
            schedule.eval(target=numbers, return_outputs=False, number=numbers)
        total = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        for stage in self._stages:
            for loss in stage.losses:
                total += loss / len(inputs)
        return total

    def _get_schedule(self, microbatches: int, shape: Sequence[int], train: bool) -> Any:
        key = (microbatches, *shape)
        if train not in self.schedules or self.schedules[train][0] != key:
            # Drop the old schedule first, so that two never hold memory at the same time.
            self.schedules.pop(train, None)
            self.schedules[train] = key, self._make_schedule(microbatches, shape)
        return self.schedules[train][1]

    def _make_schedule(self, microbatches: int, shape: Sequence[int]) -> Any:
        """Return a schedule for this number of microbatches of the shape [b, s]."""
        ranks = self._mesh.grid.pipeline
        per_rank = len(self._stages)
        for_torch = [self._wrap_for_torch(stage, shape) for stage in self._stages]
        name = choose_schedule(microbatches, ranks, per_rank).name
        make: Callable[..., Any] = {
            "1F1B": Schedule1F1B,
            "GPipe": ScheduleGPipe,
            "interleaved 1F1B": ScheduleInterleaved1F1B,
            "looped BFS": ScheduleLoopedBFS,
        }[name]
        return make(
            for_torch if per_rank > 1 else for_torch[0],
            n_microbatches=microbatches,
            # The last stage's output is the loss already. With `scale_grads`, torch would divide
            # the gradients by the number of microbatches once more. The factor contains this
            # division.
            loss_fn=lambda loss, _: loss * self._factor,
            scale_grads=False,
        )

    def _wrap_for_torch(self, stage: "_StageModule", shape: Sequence[int]) -> "_Stage":
        """Return torch's stage for microbatches of the shape [b, s].

        Stages send [s, b, h] to each other, and [s/t, b, h] with sequence parallelism. With context
        parallelism, read s/c for s.
        """
        batch, length = shape
        # The microbatch has complete samples.
        length //= self._mesh.grid.context
        tp = self._mesh.tensor_parallel
        sent = (
            length // tp.size if tp.sequence_parallel else length,
            batch,
            stage.model.shape.config.hidden_size,
        )
        layers = stage.model.stage
        # With examples of its input and output, torch needs no trial run to learn their shapes.
        stream = torch.empty(sent, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return _Stage(
            stage,
            stage_index=layers.index,
            num_stages=self._num_stages,
            mesh=self._mesh,
            message_shape=sent,
            input_args=() if layers.first else (stream,),
            output_args=loss if layers.last else stream,
        )


class _StageModule(nn.Module):
    """A stage with the signature that the schedule calls.

    The schedule passes the residual stream of the preceding stage and the microbatch's number. If
    torch found an FSDP2 module, it would control when FSDP2 gathers and reduces. The wrapper hides
    the module, because `ShardedModel` controls that.
    """

    def __init__(self, stage: RankStage, progress: RankProgress) -> None:
        super().__init__()
        self.progress = progress
        self.model = stage.model
        self.sharded = stage.sharded
        self._inputs: Sequence[Inputs] = ()
        self.losses: list[Tensor] = []

    def begin(self, inputs: Sequence[Inputs]) -> None:
        """Set the microbatches of the next global batch, and forget the losses of the last one."""
        self._inputs = inputs
        self.losses = []

    def forward(self, x: Tensor | None = None, *, number: Tensor) -> Tensor:
        """Run microbatch `number`: [s, b, h] to [s, b, h], or to the loss on the last stage."""
        self.progress.begin_part(f"microbatch {int(number) + 1}")
        # The number is on the CPU, so reading it does not wait for the GPU.
        out: Tensor = self.model(x, self._inputs[int(number)])
        if self.model.stage.last:
            self.losses.append(out.detach())
        return out


class _Stage(StageInternals, PipelineStage):
    """torch's stage, with six changes.

    - It notifies `ShardedModel` before each backward pass.
    - It does not keep inputs and outputs in evaluation.
    - It holds receive buffers only for the microbatches in flight. torch's own stage keeps a buffer
      for each microbatch in both directions from the first step on. A large batch has hundreds of
      microbatches, and 1F1B has at most as many in flight as there are stages.
    - It cuts a loss from its graph after the backward pass. torch's schedule keeps the losses of
      all microbatches, and the graph of each keeps the stage's input.
    - With gloo, it sends copies in host memory, because gloo cannot send GPU tensors.
    - A tensor-parallel rank sends its part of a message, and the receivers gather the parts
      (https://arxiv.org/abs/2104.04473, section 4.1). All of them have the same activations unless
      the sequence is sharded. The links between nodes are slower than those within a node.
    """

    def __init__(
        self, stage: _StageModule, *, mesh: Mesh, message_shape: tuple[int, ...], **options: Any
    ) -> None:
        self._message_shape = message_shape
        self._sharded = stage.sharded
        self._progress = stage.progress
        self._compute_device = mesh.device
        group = mesh.get_pipeline_group()
        # torch uses its stage's device only for messages.
        message_device = choose_message_device(group, mesh.device)
        super().__init__(stage, device=message_device, group=group, **options)
        self.check_internals()
        self._tp = mesh.tensor_parallel

    # `StageInternals` puts torch's receive buffers on the meta device. `_make_receives` gives a
    # buffer its memory just before a message arrives in it.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a microbatch's activations, into new buffers."""
        with self.on_meta_device():
            ops = super().get_fwd_recv_ops(fwd_chunk_id)
        return self._make_receives(ops, self.args_recv_info[fwd_chunk_id])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a microbatch's gradients, into new buffers."""
        with self.on_meta_device():
            ops = super().get_bwd_recv_ops(bwd_chunk_id)
        return self._make_receives(ops, self.grad_recv_info.get(bwd_chunk_id, ()))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a microbatch's forward pass, and drop the buffer of its input."""
        self._complete_messages(self.args_recv_info[fwd_chunk_id])
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        # torch's cache still references the input until the backward pass has used it.
        self._drop_buffers(self.args_recv_info[fwd_chunk_id])
        # Interleaved schedules do not ask the last stage for its sends.
        if self.is_last:
            self._forget_in_evaluation(fwd_chunk_id)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a microbatch's output."""
        if self.is_last:
            return []
        ops = self._prepare_messages(super().get_fwd_send_ops(fwd_chunk_id))
        self._forget_in_evaluation(fwd_chunk_id)
        return ops

    def _forget_in_evaluation(self, fwd_chunk_id: int) -> None:
        """Drop a microbatch's input and output if no backward pass will remove them."""
        if not self.has_backward:
            self.forget_microbatch(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the gradient of a microbatch's input."""
        return self._prepare_messages(super().get_bwd_send_ops(bwd_chunk_id))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run a microbatch's backward pass, and drop the buffer of its output's gradient."""
        self._progress.begin_part(f"backward pass of microbatch {bwd_chunk_id + 1}")
        if self.has_backward and not self.is_last:
            self._complete_messages(self.grad_recv_info[bwd_chunk_id])
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward and not self.is_last:
            self._drop_buffers(self.grad_recv_info[bwd_chunk_id])
        # The schedule keeps the losses until the end of the step. Their graphs would keep the
        # inputs of all microbatches.
        loss = kwargs.get("loss")
        if loss is not None:
            loss.detach_()

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Prepare `ShardedModel` for a backward pass, and run it."""
        # torch would handle FSDP2 here, but it sees no FSDP2 module (`_StageModule`).
        if self._sharded is not None:
            self._sharded.prepare_backward(last=last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _splits(self, tensor: Tensor) -> bool:
        """Return whether each tensor-parallel rank sends only its part of a message."""
        tp = self._tp
        return tp.size > 1 and not tp.sequence_parallel and tensor.numel() % tp.size == 0

    def _make_receives(self, ops: Sequence[dist.P2POp], infos: Sequence[Any]) -> list[dist.P2POp]:
        """Return receives into new buffers, which `infos` keep."""
        made = []
        # The first stage receives no activations, and the last one no gradients.
        for op, info in zip(ops, infos, strict=bool(ops)):
            shape: tuple[int, ...] = op.tensor.shape
            if self._splits(op.tensor):
                shape = (op.tensor.numel() // self._tp.size,)
            info.buffer = torch.empty(
                shape,
                dtype=op.tensor.dtype,
                device=self.device,
                requires_grad=op.tensor.requires_grad,
            )
            made.append(dist.P2POp(op.op, info.buffer, group=op.group, group_peer=op.group_peer))
        return made

    def _complete_messages(self, infos: Sequence[Any]) -> None:
        """Copy received messages to the device, and gather their parts."""
        for info in infos:
            if info.buffer is None:
                continue
            received = info.buffer.detach().to(self._compute_device)
            # A part is one-dimensional.
            if received.dim() == 1:
                received = all_gather(received, self._tp).view(self._message_shape)
            info.buffer = received.requires_grad_(info.buffer.requires_grad)

    def _prepare_messages(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return sends of this rank's parts, in host memory if messages must be there."""
        prepared = []
        for op in ops:
            message = op.tensor.detach()
            if self._splits(message):
                message = message.reshape(-1).chunk(self._tp.size)[self._tp.rank]
            # A copy to the host waits for the kernels that compute the message.
            message = message.to(self.device)
            prepared.append(dist.P2POp(op.op, message, group=op.group, group_peer=op.group_peer))
        return prepared

    def _drop_buffers(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(
                    info.buffer, device="meta", requires_grad=info.buffer.requires_grad
                )
