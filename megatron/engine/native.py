"""The engine on PyTorch's own parts: FSDP2 over the data-parallel ranks, torch's pipeline schedules, AdamW on fp32 masters.

A single data-parallel rank needs no sharding and pays for none: its modules hold plain parameters, which in bf16 and fp16 are
copies of fp32 masters, and autograd accumulates their gradients in fp32.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.data.batches import Microbatch
from megatron.engine.base import PhaseTimers, StepResult, build_inputs, skip_timing
from megatron.engine.describe import list_kernels
from megatron.engine.invariants import InvariantChecker, Replica
from megatron.engine.loss_scale import LossScale
from megatron.engine.optimizer import AdamW, MasterParameter, compute_squared_norm, count_zeros
from megatron.engine.pipeline import PipelineRunner, Runner, SingleStageRunner
from megatron.engine.sharding import ShardedModel, shard_offset
from megatron.model.compiling import require_compiler
from megatron.model.execution import Execution
from megatron.model.gpt import GPT, WORD_EMBEDDING
from megatron.model.init import initialise
from megatron.model.partition import select_stages_of_rank
from megatron.parallel.layers import ParameterSpec
from megatron.parallel.mesh import Mesh
from megatron.parallel.rng import RandomStreams
from megatron.parallel.shard import Kind, TensorShard
from megatron.plan import Plan


class NativeEngine:
    """See `engine/base.py`. Builds this rank's stages on the meta device, shards them, then draws the weights that it holds."""

    def __init__(self, plan: Plan, mesh: Mesh, timers: PhaseTimers = skip_timing) -> None:
        self.pre_update_hook: Callable[[], None] = lambda: None
        self._timers = timers
        config = plan.config
        self._plan, self._mesh = plan, mesh
        self._clip = config.optimizer.clip_grad
        self._count_zeros = config.logging.log_num_zeros_in_grad
        self._execution = execution = Execution.from_config(
            config, dynamic_shapes=plan.curriculum is not None
        )
        if execution.compile:
            require_compiler(mesh.device)
        self._dtype = execution.dtype or torch.float32
        self._loss_scale = LossScale(config.precision) if config.precision.fp16 else None
        streams = RandomStreams(
            config.batch.seed,
            mesh.device,
            data_rank=mesh.coordinate.data,
            tensor_rank=mesh.coordinate.tensor,
        )
        with torch.device("meta"):
            self.stages = [
                GPT(plan.shape, mesh.tensor_parallel, streams, stage, execution)
                for stage in select_stages_of_rank(
                    plan.stages, mesh.coordinate.pipeline, mesh.grid.pipeline
                )
            ]
        specs = [{name: p.spec for name, p in stage.named_parameters()} for stage in self.stages]  # type: ignore[attr-defined]
        self._zeros = [self._shard(stage) for stage in self.stages]
        self._masters: list[MasterParameter] = []
        for stage, zero, spec in zip(self.stages, self._zeros, specs, strict=True):
            if zero is None:
                stage.to_empty(device=mesh.device)
            else:
                zero.allocate_shards(mesh.device)
            self._masters += self._make_masters(stage, zero, spec)
        self._partial = [m for m in self._masters if m.spec.partial_gradient]
        self._optimizer = AdamW(self._masters, config.optimizer)
        # Both ends of a pipeline hold the word embedding; `ends` is there on these ranks only.
        shared = mesh.ends is not None and not config.model.untie_embeddings_and_output_weights
        self._tied = [m for m in self._masters if shared and m.name == WORD_EMBEDDING]
        replicated = [m for m in self._masters if m.spec.shard_dim is None]
        self._invariants = InvariantChecker(
            [
                (mesh.tensor_parallel.group, self._list_replicas(replicated)),
                (mesh.ends, self._list_replicas(self._tied)),
            ],
            mesh,
        )
        self._runner = self._make_runner()
        for shard in self.shards(optimizer=False):
            initialise(
                shard.name,
                shard.tensor,
                shard.global_shape,
                shard.offset,
                plan.shape,
                config.batch.seed,
            )
        self._refresh_model()

    # -- construction ---------------------------------------------------------------------------------------------------------

    def _shard(self, stage: GPT) -> ShardedModel | None:
        if self._mesh.grid.data > 1:
            mesh, zero_stage = (
                self._mesh.get_data_parallel_mesh(),
                self._plan.config.parallel.zero_stage,
            )
            comm_timer = self._mesh.tensor_parallel.comm_timer
            return ShardedModel(
                stage, mesh, stage=zero_stage, compute_dtype=self._dtype, comm_timer=comm_timer
            )
        stage.to(self._dtype)
        return None

    def _make_masters(
        self, stage: GPT, zero: ShardedModel | None, specs: dict[str, ParameterSpec]
    ) -> list[MasterParameter]:
        masters = []
        for name, parameter in stage.named_parameters():
            spec, local = specs[name], _get_local_tensor(parameter.detach())
            if zero is None and self._dtype != torch.float32:
                parameter.grad_dtype = torch.float32  # accumulate over microbatches in fp32
                local = torch.zeros_like(local, dtype=torch.float32)
            local.zero_()  # vocabulary padding stays zero for ever: its gradient is zero, too
            offset = self._compute_offset(spec, tuple(parameter.shape))
            masters.append(
                MasterParameter(
                    spec.copy_of or name,
                    spec,
                    offset,
                    parameter,
                    nn.Parameter(local, requires_grad=False),
                )
            )
        return masters

    def _compute_offset(
        self, spec: ParameterSpec, tp_local_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Where this rank's part begins: the tensor-parallel cut first, FSDP2's cut of the rows inside it."""
        offset = [0] * len(spec.shape)
        if spec.shard_dim is not None:
            offset[spec.shard_dim] = self._mesh.coordinate.tensor * tp_local_shape[spec.shard_dim]
        if self._mesh.grid.data > 1:
            offset[0] += shard_offset(
                tp_local_shape[0], self._mesh.coordinate.data, self._mesh.grid.data
            )
        return tuple(offset)

    def _make_runner(self) -> Runner:
        if self._mesh.grid.pipeline == 1:
            return SingleStageRunner(self.stages[0], self._zeros[0])
        residual = torch.float32 if self._execution.fp32_residual else self._dtype
        return PipelineRunner(
            self.stages, self._zeros, self._mesh, num_stages=len(self._plan.stages), dtype=residual
        )

    # -- a step ---------------------------------------------------------------------------------------------------------------

    def train_batch(
        self, microbatches: Sequence[Microbatch], *, iteration: int, lr: float
    ) -> StepResult:
        for stage in self.stages:
            stage.train()
        scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
        with self._timers("forward-backward"):
            # As in Megatron-LM the scale is over this rank's microbatches: with twice the data-parallel ranks, gradients in fp16
            # are twice as large before they are averaged, and overflow one doubling of the scale earlier.
            loss = self._runner.run(
                build_inputs(microbatches, iteration, self._mesh.device),
                scale / len(microbatches),
                train=True,
            )
        with self._timers("optimizer"):
            result = self._apply_gradients(loss, scale, lr)
            for stage in self.stages:
                stage.zero_grad(set_to_none=True)
        return result

    def eval_batch(self, microbatches: Sequence[Microbatch]) -> float:
        for stage in self.stages:
            stage.eval()
        with torch.no_grad():
            loss = self._runner.run(
                build_inputs(microbatches, 0, self._mesh.device), 1.0, train=False
            )
        return self._sum_over_ranks(self._compute_loss_share(loss).unsqueeze(0))[0]

    def _apply_gradients(self, loss: Tensor, scale: float, lr: float) -> StepResult:
        for master in self._masters:
            gradient = master.model.grad
            assert gradient is not None, f"{master.name} got no gradient"
            master.weight.grad = _get_local_tensor(gradient)
        self._add_partial_gradients()
        self._add_tied_gradients()
        loss_value, squares, zeros = self._reduce_step(loss)
        norm = math.sqrt(squares) / scale if math.isfinite(squares) else squares
        applied = math.isfinite(loss_value) and math.isfinite(norm)
        if applied:
            clipped = self._clip / (norm + 1e-6) if self._clip > 0 and norm > self._clip else 1.0
            if clipped / scale != 1.0:
                gradients = [m.weight.grad for m in self._masters if m.weight.grad is not None]
                torch._foreach_mul_(gradients, clipped / scale)
            self.pre_update_hook()
            self._optimizer.step(lr)
            self._refresh_model()
        for master in self._masters:
            master.weight.grad = None
        overflow = self._loss_scale is not None and self._loss_scale.update_after_step(
            applied=applied, loss_is_finite=math.isfinite(loss_value)
        )
        used_scale = None if self._loss_scale is None else scale
        return StepResult(
            loss_value,
            norm,
            applied,
            int(zeros) if self._count_zeros else None,
            used_scale,
            overflow,
        )

    def _add_partial_gradients(self) -> None:
        """Norms and biases behind a cut sequence saw a part of it each: add the parts up, in one message."""
        gradients = [
            m.weight.grad
            for m in self._partial
            if m.weight.grad is not None and m.weight.grad.numel()
        ]
        if not gradients:
            return
        flat = torch.cat([g.reshape(-1) for g in gradients])
        tp = self._mesh.tensor_parallel
        with tp.comm_timer():
            dist.all_reduce(flat, group=tp.group)
        for gradient, summed in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(summed.view_as(gradient))

    def _add_tied_gradients(self) -> None:
        """The word embedding and its copy on the last stage each saw one use of it: both take the sum, so that they stay equal."""
        for master in self._tied:
            if master.weight.grad is not None and master.weight.grad.numel():
                with self._mesh.tensor_parallel.comm_timer():
                    dist.all_reduce(master.weight.grad, group=self._mesh.ends)

    def _reduce_step(self, loss: Tensor) -> tuple[float, float, float]:
        """Mean loss, squared gradient norm and zeros of the whole model: one message for all three."""
        mine = [
            m.weight.grad
            for m in self._masters
            if self._is_counted(m) and m.weight.grad is not None
        ]
        squares = compute_squared_norm(mine).to(loss.device)
        # A replicated parameter is counted by the first tensor rank alone, but an infinity must be seen wherever it arose:
        # 0 x inf is nan. (The tied embedding's copy holds the same sum as the original.)
        replicated = [
            m
            for m in self._masters
            if m.spec.shard_dim is None and m.weight.numel() and not self._is_counted(m)
        ]
        squares += 0.0 * compute_squared_norm(
            [m.weight.grad for m in replicated if m.weight.grad is not None]
        ).to(loss.device)
        zeros = (
            count_zeros(mine).to(loss.device) if self._count_zeros else torch.zeros_like(squares)
        )
        loss_value, squares_value, zeros_value = self._sum_over_ranks(
            torch.stack((self._compute_loss_share(loss), squares, zeros))
        )
        return loss_value, squares_value, zeros_value

    def _compute_loss_share(self, loss: Tensor) -> Tensor:
        """This rank's part of the mean loss: the ranks of the last stage each have one, the others zero."""
        return loss.double() / (self._mesh.grid.data * self._mesh.grid.tensor)

    def _is_counted(self, master: MasterParameter) -> bool:
        """Whether the parameter is this rank's to count and to store: of several copies the first rank's is."""
        if master.weight.numel() == 0 or master.spec.copy_of is not None:
            return False
        return master.spec.shard_dim is not None or self._mesh.coordinate.tensor == 0

    def _sum_over_ranks(self, values: Tensor) -> list[float]:
        if self._mesh.grid.world_size > 1:
            with self._mesh.tensor_parallel.comm_timer():
                dist.all_reduce(values)
        return values.tolist()

    def _refresh_model(self) -> None:
        """Low-precision weights follow their masters."""
        if self._mesh.grid.data == 1 and self._dtype != torch.float32:
            torch._foreach_copy_(
                [m.model.data for m in self._masters], [m.weight.data for m in self._masters]
            )

    # -- state ----------------------------------------------------------------------------------------------------------------

    def shards(self, *, optimizer: bool) -> list[TensorShard]:
        shards = []
        for master in self._masters:
            rows = max(
                0, min(master.weight.shape[0], master.spec.shape[0] - master.offset[0])
            )  # without vocabulary padding
            if rows == 0 or master.weight.numel() == 0:
                continue
            owner = self._is_counted(master)
            tensors: dict[Kind, Tensor] = {"weight": master.weight.data}
            if optimizer:
                tensors["exp_avg"] = self._optimizer.get_moment(master, "exp_avg")
                tensors["exp_avg_sq"] = self._optimizer.get_moment(master, "exp_avg_sq")
            for kind, tensor in tensors.items():
                shards.append(
                    TensorShard(
                        kind, master.name, master.spec.shape, master.offset, tensor[:rows], owner
                    )
                )
        return shards

    def get_scalars(self) -> dict[str, Any]:
        scale = {} if self._loss_scale is None else {"loss_scale": self._loss_scale.state()}
        return {"optimizer_step": self._optimizer.step_count, **scale}

    def finish_load(self, scalars: dict[str, Any] | None) -> None:
        if scalars is None:
            self._optimizer.reset()
        else:
            self._optimizer.set_step_count(int(scalars["optimizer_step"]))
            if self._loss_scale is not None and "loss_scale" in scalars:
                self._loss_scale.load(scalars["loss_scale"])
        self._refresh_model()

    def _list_replicas(self, masters: list[MasterParameter]) -> list[Replica]:
        return [
            Replica(
                m.name,
                kind,
                m.weight.data if kind == "weight" else self._optimizer.get_moment(m, kind),
            )
            for m in masters
            for kind in get_args(Kind)
        ]

    def check_invariants(self, *, repair: bool, iteration: int, last_good: int | None) -> list[str]:
        if repair:
            self.pre_update_hook()
        repaired = self._invariants.check(
            self.get_scalars(), repair=repair, iteration=iteration, last_good=last_good
        )
        if repaired:
            self._refresh_model()
        return repaired

    def compute_parameter_norm(self) -> float:
        squares = compute_squared_norm(
            [m.weight.data for m in self._masters if self._is_counted(m)]
        ).to(self._mesh.device)
        return math.sqrt(self._sum_over_ranks(squares.reshape(1))[0])

    def describe_kernels(self) -> list[tuple[str, str, str]]:
        data, zero_stage = self._mesh.grid.data, self._plan.config.parallel.zero_stage
        if data == 1:
            sharding = "none", "one data-parallel rank"
        else:
            note = (
                "; stage 0 runs as 1: the same numbers with less memory" if zero_stage == 0 else ""
            )
            sharding = f"FSDP2, ZeRO {max(1, zero_stage)}", f"{data} data-parallel ranks{note}"
        pipelined = "torch.distributed.pipelining"
        return [
            *list_kernels(self._plan, self._mesh, self._execution, self._loss_scale, pipelined),
            self._optimizer.description,
            ("sharding", *sharding),
        ]


def _get_local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor behind FSDP2's, or the tensor itself; shares its memory."""
    if isinstance(tensor, torch.distributed.tensor.DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor
