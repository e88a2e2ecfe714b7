"""The engine on PyTorch's own parts: FSDP2 over the data-parallel ranks, AdamW on fp32 masters.

A single data-parallel rank needs no sharding and pays for none: its module holds plain parameters, which in bf16 are copies of fp32
masters, and autograd accumulates their gradients in fp32.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.data.batches import Microbatch
from megatron.engine.base import PhaseTimers, StepResult, no_timers
from megatron.engine.optimizer import AdamW, Master, count_zeros, squared_norm
from megatron.engine.sharding import Zero, shard_offset
from megatron.model.gpt import GPT
from megatron.model.init import initialise
from megatron.model.norm import describe_norm
from megatron.parallel.chunk import Chunk, Kind
from megatron.parallel.layers import ParameterSpec
from megatron.parallel.mesh import Mesh
from megatron.parallel.rng import RandomStreams
from megatron.plan import Plan


class NativeEngine:
    """See `engine/base.py`. Builds the model on the meta device, shards it, then draws the weights that this rank holds."""

    def __init__(self, plan: Plan, mesh: Mesh, timers: PhaseTimers = no_timers) -> None:
        self._timers = timers
        config = plan.config
        self._mesh = mesh
        self._clip = config.optimizer.clip_grad
        self._count_zeros = config.logging.log_num_zeros_in_grad
        self._dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
        self._zero_stage = config.parallel.zero_stage
        self._streams = RandomStreams(config.batch.seed, mesh.device, data_rank=mesh.place.data, tensor_rank=mesh.place.tensor)
        with torch.device("meta"):
            self.model = GPT(plan.shape, mesh.tensor_parallel, self._streams)
        specs: dict[str, ParameterSpec] = {name: p.spec for name, p in self.model.named_parameters()}  # type: ignore[attr-defined]
        self._zero = self._shard()
        if self._zero is None:
            self.model.to_empty(device=mesh.device)
        else:
            self._zero.materialise(mesh.device)
        self._masters = self._make_masters(specs)
        self._partial = [m for m in self._masters if m.spec.partial_gradient]
        self._optimizer = AdamW(self._masters, config.optimizer)
        for chunk in self.chunks(optimizer=False):
            initialise(chunk.name, chunk.tensor, chunk.global_shape, chunk.offset, plan.shape, config.batch.seed)
        self._refresh_model()

    # -- construction ---------------------------------------------------------------------------------------------------------

    def _shard(self) -> Zero | None:
        if self._mesh.grid.data > 1:
            mesh = self._mesh.data_parallel_mesh()
            clock = self._mesh.tensor_parallel.clock
            return Zero(self.model, mesh, stage=self._zero_stage, compute_dtype=self._dtype, clock=clock)
        self.model.to(self._dtype)
        return None

    def _make_masters(self, specs: dict[str, ParameterSpec]) -> list[Master]:
        masters = []
        for name, parameter in self.model.named_parameters():
            spec, local = specs[name], _local(parameter.detach())
            if self._zero is None and self._dtype != torch.float32:
                parameter.grad_dtype = torch.float32  # accumulate over microbatches in fp32
                local = torch.zeros_like(local, dtype=torch.float32)
            local.zero_()  # vocabulary padding stays zero for ever: its gradient is zero, too
            offset = self._offset(spec, tuple(parameter.shape))
            masters.append(Master(name, spec, offset, parameter, nn.Parameter(local, requires_grad=False)))
        return masters

    def _offset(self, spec: ParameterSpec, tp_local_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Where this rank's part begins: the tensor-parallel cut first, FSDP2's cut of the rows inside it."""
        offset = [0] * len(spec.shape)
        if spec.cut_dim is not None:
            offset[spec.cut_dim] = self._mesh.place.tensor * tp_local_shape[spec.cut_dim]
        if self._zero is not None:
            offset[0] += shard_offset(tp_local_shape[0], self._mesh.place.data, self._mesh.grid.data)
        return tuple(offset)

    # -- a step ---------------------------------------------------------------------------------------------------------------

    def train_batch(self, microbatches: Sequence[Microbatch], *, iteration: int, lr: float) -> StepResult:
        total = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        self.model.train()
        with self._timers("forward-backward"):
            self._forward_backward(microbatches, iteration, total)
        with self._timers("optimizer"):
            result = self._apply_gradients(total, lr)
            self.model.zero_grad(set_to_none=True)
        return result

    def _forward_backward(self, microbatches: Sequence[Microbatch], iteration: int, total: Tensor) -> None:
        """Gradients of the whole batch into the parameters, its mean loss on this rank into `total`."""
        for number, microbatch in enumerate(microbatches):
            if self._zero is not None:
                self._zero.before_backward(last=number == len(microbatches) - 1)
            self._streams.begin(iteration, number)
            loss = self._loss(microbatch) / len(microbatches)
            loss.backward()
            total += loss.detach()

    def eval_batch(self, microbatches: Sequence[Microbatch]) -> float:
        total = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        self.model.eval()
        with torch.no_grad():
            for microbatch in microbatches:
                total += self._loss(microbatch) / len(microbatches)
        values = total.double().unsqueeze(0) / (self._mesh.grid.data * self._mesh.grid.tensor)
        return self._sum_over_ranks(values)[0]

    def _loss(self, microbatch: Microbatch) -> Tensor:
        device = self._mesh.device
        mask = microbatch.loss_mask
        return self.model(
            microbatch.tokens.to(device, non_blocking=True),
            microbatch.labels.to(device, non_blocking=True),
            None if mask is None else mask.to(device, non_blocking=True),
        )

    def _apply_gradients(self, loss: Tensor, lr: float) -> StepResult:
        for master in self._masters:
            gradient = master.model.grad
            assert gradient is not None, f"{master.name} got no gradient"
            master.weight.grad = _local(gradient)
        self._add_partial_gradients()
        loss_value, squares, zeros = self._reduce_step(loss)
        norm = math.sqrt(squares) if math.isfinite(squares) else squares
        applied = math.isfinite(loss_value) and math.isfinite(norm)
        if applied:
            if self._clip > 0 and norm > self._clip:
                gradients = [m.weight.grad for m in self._masters if m.weight.grad is not None]
                torch._foreach_mul_(gradients, self._clip / (norm + 1e-6))
            self._optimizer.step(lr)
            self._refresh_model()
        for master in self._masters:
            master.weight.grad = None
        return StepResult(loss_value, norm, applied, int(zeros) if self._count_zeros else None, None)

    def _add_partial_gradients(self) -> None:
        """Norms and biases behind a cut sequence saw a part of it each: add the parts up, in one message."""
        gradients = [m.weight.grad for m in self._partial if m.weight.grad is not None and m.weight.grad.numel()]
        if not gradients:
            return
        flat = torch.cat([g.reshape(-1) for g in gradients])
        tp = self._mesh.tensor_parallel
        with tp.clock():
            dist.all_reduce(flat, group=tp.group)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def _reduce_step(self, loss: Tensor) -> tuple[float, float, float]:
        """Mean loss, squared gradient norm and zeros of the whole model: one message for all three."""
        mine = [m.weight.grad for m in self._masters if self._counts(m) and m.weight.grad is not None]
        squares = squared_norm(mine).to(loss.device)
        zeros = count_zeros(mine).to(loss.device) if self._count_zeros else torch.zeros_like(squares)
        share = loss.double() / (self._mesh.grid.data * self._mesh.grid.tensor)
        loss_value, squares_value, zeros_value = self._sum_over_ranks(torch.stack((share, squares, zeros)))
        return loss_value, squares_value, zeros_value

    def _counts(self, master: Master) -> bool:
        """A parameter that all tensor-parallel ranks hold is counted by the first of them."""
        return bool(master.weight.numel()) and (master.spec.cut_dim is not None or self._mesh.place.tensor == 0)

    def _sum_over_ranks(self, values: Tensor) -> list[float]:
        if self._mesh.grid.world_size > 1:
            with self._mesh.tensor_parallel.clock():
                dist.all_reduce(values)
        return values.tolist()

    def _refresh_model(self) -> None:
        """Low-precision weights follow their masters."""
        if self._zero is None and self._dtype != torch.float32:
            torch._foreach_copy_([m.model.data for m in self._masters], [m.weight.data for m in self._masters])

    # -- state ----------------------------------------------------------------------------------------------------------------

    def chunks(self, *, optimizer: bool) -> list[Chunk]:
        chunks = []
        for master in self._masters:
            rows = max(0, min(master.weight.shape[0], master.spec.shape[0] - master.offset[0]))  # without vocabulary padding
            if rows == 0 or master.weight.numel() == 0:
                continue
            owner = master.spec.cut_dim is not None or self._mesh.place.tensor == 0
            tensors: dict[Kind, Tensor] = {"weight": master.weight.data}
            if optimizer:
                tensors["exp_avg"] = self._optimizer.moment(master, "exp_avg")
                tensors["exp_avg_sq"] = self._optimizer.moment(master, "exp_avg_sq")
            for kind, tensor in tensors.items():
                chunks.append(Chunk(kind, master.name, master.spec.shape, master.offset, tensor[:rows], owner))
        return chunks

    def scalars(self) -> dict[str, Any]:
        return {"optimizer_step": self._optimizer.step_count}

    def loaded(self, scalars: dict[str, Any] | None) -> None:
        if scalars is None:
            self._optimizer.reset()
        else:
            self._optimizer.set_step_count(int(scalars["optimizer_step"]))
        self._refresh_model()

    def parameter_norm(self) -> float:
        squares = squared_norm([m.weight.data for m in self._masters if self._counts(m)]).to(self._mesh.device)
        return math.sqrt(self._sum_over_ranks(squares.reshape(1))[0])

    def kernels(self) -> list[tuple[str, str, str]]:
        config = self.model.shape.config
        cpu = self._mesh.device.type == "cpu"
        if config.position_embedding_type == "alibi":
            attention = "SDPA with a bias", "ALiBi needs one"
        elif config.attention_dropout > 0 and cpu:
            attention = "SDPA, math", "attention dropout has no fused kernel on CPU; --attention-dropout 0 does"
        else:
            attention = "SDPA", "causal, no bias: torch takes its fused kernel where it has one"
        data = self._mesh.grid.data
        if self._zero is None:
            sharding = "none", "one data-parallel rank"
        else:
            note = "; stage 0 runs as 1: the same numbers with less memory" if self._zero_stage == 0 else ""
            sharding = f"FSDP2, ZeRO {max(1, self._zero_stage)}", f"{data} data-parallel ranks{note}"
        return [
            ("attention", *attention),
            ("norm", *describe_norm(config, self._mesh.device.type)),
            ("loss", "fused projection and cross entropy", "no logits in fp32 are kept"),
            self._optimizer.description,
            ("precision", str(self._dtype).removeprefix("torch."), "masters, moments and accumulation in fp32"),
            ("sharding", *sharding),
        ]


def _local(tensor: Tensor) -> Tensor:
    """The plain tensor behind FSDP2's, or the tensor itself; shares its memory."""
    if isinstance(tensor, torch.distributed.tensor.DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor
