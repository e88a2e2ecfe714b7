"""How a global batch's microbatches run through the stages: one after the other on a single stage, or by a pipeline schedule of
`torch.distributed.pipelining` (1F1B, GPipe, https://arxiv.org/abs/1811.06965; interleaved 1F1B, https://arxiv.org/abs/2104.04473).

The invariant: every microbatch passes every block once, forward and backward, and each stage's gradient is the mean over the
microbatches. Only the rank with the last stage knows the loss.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

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

from megatron.engine.sharding import ShardedModel
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.mesh import Mesh
from megatron.schedule.pipeline import choose_schedule


class Runner(Protocol):
    def run(self, inputs: Sequence[Inputs], factor: float, *, train: bool) -> Tensor:
        """The microbatches' mean loss, a scalar in fp32; zero on ranks without the last stage. With `train`, gradients of
        `factor` x the sum of their losses are added to the parameters'."""
        ...


class SingleStageRunner:
    """The whole model on this rank."""

    def __init__(self, model: GPT, zero: ShardedModel | None) -> None:
        self._model, self._zero = model, zero

    def run(self, inputs: Sequence[Inputs], factor: float, *, train: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=inputs[0].tokens.device)
        for number, microbatch in enumerate(inputs):
            if train and self._zero is not None:
                self._zero.prepare_backward(last=number == len(inputs) - 1)
            loss = self._model(None, microbatch)
            if train:
                (loss * factor).backward()
            total += loss.detach() / len(inputs)
        return total


class PipelineRunner:
    """This rank's stages, and the schedule that runs them with the other ranks'.

    A schedule is made for one number of microbatches of one shape. The last one is kept, and one for evaluation: a ramp-up passes
    through a hundred batch sizes.
    """

    def __init__(
        self,
        models: Sequence[GPT],
        zeros: Sequence[ShardedModel | None],
        mesh: Mesh,
        *,
        num_stages: int,
        dtype: torch.dtype,
    ) -> None:
        """`dtype` of the residual stream that is sent from stage to stage."""
        self._mesh, self._num_stages, self._dtype = mesh, num_stages, dtype
        self._parts = [_StageModule(model) for model in models]
        self._zeros = list(zeros)
        self._factor = 1.0
        self._schedules: dict[bool, tuple[tuple[int, ...], Any]] = {}

    def run(self, inputs: Sequence[Inputs], factor: float, *, train: bool) -> Tensor:
        for part in self._parts:
            part.begin(inputs)
        self._factor = factor
        schedule = self._schedule(len(inputs), inputs[0].tokens.shape, train)
        numbers = torch.arange(len(inputs))
        # The schedule needs a target to compute a loss at all; ours is in the inputs.
        if train:
            schedule.step(target=numbers, return_outputs=False, number=numbers)
        else:
            schedule.eval(target=numbers, return_outputs=False, number=numbers)
        total = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        for part in self._parts:
            for loss in part.losses:
                total += loss / len(inputs)
        return total

    def _schedule(self, microbatches: int, shape: Sequence[int], train: bool) -> Any:
        key = (microbatches, *shape)
        if train not in self._schedules or self._schedules[train][0] != key:
            self._schedules.pop(train, None)
            self._schedules[train] = key, self._make_schedule(microbatches, shape)
        return self._schedules[train][1]

    def _make_schedule(self, microbatches: int, shape: Sequence[int]) -> Any:
        """`shape` of the microbatches: (b, s)."""
        ranks, per_rank = self._mesh.grid.pipeline, len(self._parts)
        stages = [
            self._make_stage(part, zero, shape)
            for part, zero in zip(self._parts, self._zeros, strict=True)
        ]
        name = choose_schedule(microbatches, ranks, per_rank).name
        make: Callable[..., Any] = {
            "1F1B": Schedule1F1B,
            "GPipe": ScheduleGPipe,
            "interleaved 1F1B": ScheduleInterleaved1F1B,
            "looped BFS": ScheduleLoopedBFS,
        }[name]
        return make(
            stages if per_rank > 1 else stages[0],
            n_microbatches=microbatches,
            loss_fn=lambda loss, _: loss * self._factor,
            scale_grads=False,
        )

    def _make_stage(
        self, part: "_StageModule", zero: ShardedModel | None, shape: Sequence[int]
    ) -> "_Stage":
        batch, length = shape
        tp = self._mesh.tensor_parallel
        sent = (
            length // tp.size if tp.sequence_parallel else length,
            batch,
            part.model.shape.config.hidden_size,
        )
        here = part.model.stage
        stream = torch.empty(sent, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return _Stage(
            part,
            zero,
            stage_index=here.index,
            num_stages=self._num_stages,
            device=self._mesh.device,
            input_args=() if here.first else (stream,),
            output_args=loss if here.last else stream,
            group=self._mesh.get_pipeline_group(),
        )


class _StageModule(nn.Module):
    """A stage as the schedule calls it: with the stream from the stage before, and the microbatch's number.

    It wraps the model, so that the schedule does not see FSDP2's module and leaves to `ShardedModel` what to gather and reduce when.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        self._inputs: Sequence[Inputs] = ()
        self.losses: list[Tensor] = []

    def begin(self, inputs: Sequence[Inputs]) -> None:
        """The batch that comes next."""
        self._inputs = inputs
        self.losses = []

    def forward(self, x: Tensor | None = None, *, number: Tensor) -> Tensor:
        out: Tensor = self.model(x, self._inputs[int(number)])
        if self.model.stage.last:
            self.losses.append(out.detach())
        return out


class _Stage(PipelineStage):
    """torch's stage, which additionally has ZeRO told of each backward pass, and holds memory for activations in flight only.

    Torch's own keeps a buffer for each microbatch of the batch, in both directions, from the first step on; a large batch has
    hundreds, of which 1F1B has at most as many in flight as there are stages.
    """

    def __init__(self, part: _StageModule, zero: ShardedModel | None, **stage: Any) -> None:
        self._zero = zero
        super().__init__(part, **stage)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        self._run_on_meta(
            lambda: super(_Stage, self)._setup_forward_recv_info(num_microbatches, has_backward)
        )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self._run_on_meta(lambda: super(_Stage, self)._setup_backward_recv_info(num_microbatches))

    def _run_on_meta(self, make_buffers: Callable[[], None]) -> None:
        device, self.device = self.device, torch.device("meta")
        try:
            make_buffers()
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._drop_buffers(self.args_recv_info[fwd_chunk_id])
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            self.fwd_cache.pop(fwd_chunk_id)  # kept for a backward pass that does not come
        return ops

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward and not self.is_last:
            self._drop_buffers(self.grad_recv_info[bwd_chunk_id])

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self._zero is not None:
            self._zero.prepare_backward(last=last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _make_buffers(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(
                    info.buffer, device=self.device, requires_grad=info.buffer.requires_grad
                )

    def _drop_buffers(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(
                    info.buffer, device="meta", requires_grad=info.buffer.requires_grad
                )
