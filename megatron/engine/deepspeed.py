"""DeepSpeed as the engine: its pipeline, its ZeRO, its mixed precision, around our model. The only file that imports deepspeed.

A stage of the model is one layer of DeepSpeed's PipelineModule, so that both engines compute with the same modules. DeepSpeed keeps
masters and moments in flat partitions, of which a rank's part of a parameter is a run: the shards are views of the partitions
(`fragments.py`), so checkpoints are the same for both engines, in both directions. The loss scale is our own, too.

Traps of 0.19 that this file knows: the gradient norm counts what PipelineModule's constructor unmarks; the boundary of gradient
accumulation is wrong after the number of microbatches has changed, unless it is set; ZeRO without a stage is wrong in 16 bits.
Ranks with different numbers of parameter groups wait for each other without end (`_group_parameters`). Sums of 16-bit gradients in fp32 hide
tied gradients from the pipeline (`_TiedWeight`).
"""

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.deepspeed_json import read_json, select_passed_on
from megatron.config.optimizer import OptimizerConfig
from megatron.data.batches import Microbatch
from megatron.engine.base import PhaseTimers, StepResult, build_inputs, skip_timing
from megatron.engine.describe import list_kernels
from megatron.engine.flat_moments import EightBitMoments, FlatMoments, TorchMoments, build_adamw
from megatron.engine.fragments import Fragment
from megatron.engine.invariants import InvariantChecker, Replica
from megatron.engine.loss_scale import LossScale
from megatron.engine.optimizer import compute_squared_norm
from megatron.errors import ConfigError
from megatron.model.execution import Execution
from megatron.model.gpt import GPT, WORD_EMBEDDING
from megatron.model.init import initialise
from megatron.model.inputs import Inputs
from megatron.parallel.layers import ParameterSpec
from megatron.parallel.mesh import Mesh
from megatron.parallel.rng import RandomStreams
from megatron.parallel.roll_call import TimeLimit
from megatron.parallel.shard import Kind, TensorShard
from megatron.plan import Plan

_LOGGING_KEYS = ("wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger")
"""Keys of its JSON that ask for lines in the log."""


class DeepSpeedEngine:
    """See `engine/base.py`. Weights are drawn into DeepSpeed's fp32 partitions; its 16-bit weights follow."""

    def __init__(self, plan: Plan, mesh: Mesh, timers: PhaseTimers = skip_timing) -> None:
        self.pre_update_hook: Callable[[], None] = lambda: None
        self._plan, self._mesh, self._timers = plan, mesh, timers
        config = plan.config
        self._execution = execution = Execution.from_config(
            config, dynamic_shapes=plan.curriculum is not None
        )
        self._loss_scale = LossScale(config.precision) if config.precision.fp16 else None
        streams = RandomStreams(
            config.batch.seed,
            mesh.device,
            data_rank=mesh.coordinate.data,
            tensor_rank=mesh.coordinate.tensor,
        )
        with mesh.device:
            stage = GPT(
                plan.shape,
                mesh.tensor_parallel,
                streams,
                plan.stages[mesh.coordinate.pipeline],
                execution,
            )
        self._specs: dict[str, ParameterSpec] = {
            name: p.spec  # type: ignore[attr-defined]
            for name, p in stage.named_parameters()
        }
        for parameter in stage.parameters():
            parameter.data.zero_()  # vocabulary padding stays zero for ever: its gradient is zero, too
        self._stage, self._wrapped_stage = stage, _StageWrapper(stage)
        self._engine = self._initialize()
        self._step_count = 0
        self._shape: tuple[int, ...] | None = None
        self._flats = self._find_flats()
        self._moments = self._make_moments()
        self._fragments = list(self._find_fragments())
        self._invariants = self._make_invariants()
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

    def _initialize(self) -> Any:
        os.environ.setdefault(
            "DS_ACCELERATOR", self._mesh.device.type
        )  # or it looks for one, and says so
        os.environ.setdefault("LOCAL_RANK", "0")  # PipelineModule insists
        try:
            import deepspeed
        except ImportError as error:
            raise ConfigError(
                f"--deepspeed needs DeepSpeed, which is not installed: {error}; pip install -e . brings it"
            ) from error
        from deepspeed.utils import logger

        with _disable_compiler():
            import deepspeed.runtime.zero.muon.original_muon
        settings = self._build_settings()
        logger.setLevel(
            logging.INFO if any(settings.get(key) for key in _LOGGING_KEYS) else logging.ERROR
        )
        warnings.filterwarnings(
            "ignore", category=FutureWarning, module=r"torch\.distributed"
        )  # of calls that DeepSpeed makes
        if self._mesh.device.type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
                False  # would be compiled at the start; gloo does
            )
            deepspeed.get_accelerator().is_fp16_supported = lambda: (
                True
            )  # it means: fast; torch computes it on any
        pipelined = self._mesh.grid.pipeline > 1
        with contextlib.redirect_stdout(io.StringIO()):
            if not dist.is_initialized():  # DeepSpeed insists; a world of one, without a port
                backend = "nccl" if self._mesh.device.type == "cuda" else "gloo"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            deepspeed.init_distributed(dist_init_required=False)
            self._limit_groups(deepspeed.comm.comm.cdb)
            model = self._build_pipeline_module() if pipelined else self._wrapped_stage
            for (
                name,
                parameter,
            ) in (
                self._stage.named_parameters()
            ):  # behind PipelineModule, which marks them all as its own
                self._mark(parameter, self._specs[name])
            mpu = None if pipelined else _MeshMpu(self._mesh)
            optimizer = build_adamw(self._group_parameters(), self._plan.config.optimizer)
            with self._explain_refusal():
                engine, *_ = deepspeed.initialize(
                    model=model, optimizer=optimizer, config=settings, mpu=mpu
                )
        update, engine.optimizer.check_grad_overflow = engine.optimizer.step, True

        def wait_and_update(*args: Any, **kwargs: Any) -> Any:
            self.pre_update_hook()
            self._show_infinities()
            result = update(*args, **kwargs)
            self._forget_dropped_gradients()
            return result

        engine.optimizer.step = wait_and_update
        return engine

    def _limit_groups(self, backend: Any) -> None:
        """Give DeepSpeed's own groups the time-out of ours; it has no argument for that and takes torch's 30 minutes."""
        limit = TimeLimit(self._plan.config.parallel.distributed_timeout_minutes)
        backend.new_group = lambda ranks: dist.new_group(ranks, timeout=limit.collective)

    @contextlib.contextmanager
    def _explain_refusal(self) -> Iterator[None]:
        """What our reading of the JSON lets pass, and DeepSpeed does not, is the user's to mend."""
        from deepspeed.runtime.config import DeepSpeedConfigError

        try:
            yield
        except (
            DeepSpeedConfigError,
            AssertionError,
            ValueError,
        ) as error:  # pydantic's are ValueErrors
            path = self._plan.config.parallel.deepspeed_config
            if path is None:
                raise  # all of it is ours
            said = (
                "; ".join(line.strip() for line in str(error).splitlines()[:4])
                or type(error).__name__
            )
            raise ConfigError(
                f"--deepspeed-config {path}: DeepSpeed refuses it: {said}; change what it names."
            ) from error

    def _show_infinities(self) -> None:
        """BF16_Optimizer drops a step by its norm, in which of copies one counts: infinities of the others are put into all."""
        gradients = getattr(self._engine.optimizer, "fp32_groups_gradient_flat_partition", None)
        if gradients is None:
            return  # ZeRO's optimizers look at each gradient
        bad = (
            torch.stack([~torch.isfinite(gradient).all() for gradient in gradients])
            .any()
            .to(torch.int32)
        )
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad:
            for gradient in gradients:
                gradient[:1].fill_(torch.inf)

    def _forget_dropped_gradients(self) -> None:
        """With offload, ZeRO 2 keeps them in a buffer that it adds the next ones to: an infinity would stay for ever."""
        optimizer = self._engine.optimizer
        if (
            self._plan.config.optimizer.cpu_optimizer
            and optimizer.overflow
            and hasattr(optimizer, "all_grad_tensors")
        ):
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None

    def _build_pipeline_module(self) -> nn.Module:
        from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
        from deepspeed.runtime.pipe.topology import ProcessTopology

        grid, coordinate = self._mesh.grid, self._mesh.coordinate
        topology = ProcessTopology(
            axes=["pipe", "data", "model"], dims=[grid.pipeline, grid.data, grid.tensor]
        )
        layers = [
            self._wrapped_stage if index == coordinate.pipeline else LayerSpec(nn.Identity)
            for index in range(grid.pipeline)
        ]
        module = PipelineModule(layers=layers, topology=topology, partition_method="uniform")
        tied = [_TiedWeight(p) for name, p in self._stage.named_parameters() if self._is_tied(name)]
        module.get_tied_weights_and_groups = lambda: [(weight, self._mesh.ends) for weight in tied]
        return module

    def _is_tied(self, name: str) -> bool:
        """Whether the other end of the pipeline has the parameter, too."""
        if self._plan.config.model.untie_embeddings_and_output_weights or self._mesh.ends is None:
            return False
        return WORD_EMBEDDING in (name, self._specs[name].copy_of)

    def _mark(self, parameter: nn.Parameter, spec: ParameterSpec) -> None:
        """Tell DeepSpeed's gradient norm what is cut over tensor ranks and what is a copy; add up what is partial."""
        parameter.model_parallel = parameter.tensor_model_parallel = spec.shard_dim is not None  # type: ignore[attr-defined]
        parameter.ds_pipe_replicated = spec.copy_of is not None  # type: ignore[attr-defined]
        if spec.partial_gradient:
            tp = self._mesh.tensor_parallel

            def add_parts(gradient: Tensor) -> Tensor:
                with tp.comm_timer():
                    dist.all_reduce(gradient := gradient.contiguous(), group=tp.group)
                return gradient

            parameter.register_hook(add_parts)

    def _group_parameters(self) -> list[dict[str, Any]]:
        """Return the same parameter groups on every rank: matrices and embeddings, which decay, and vectors, which do not.

        Embeddings are a group of their own because their moments are too uneven for 8 bits.

        ZeRO makes one all-reduce over the pipeline for each group, so ranks with different numbers
        of groups would wait for each other without end. DeepSpeed removes empty groups. A stage
        without parameters of a group therefore gets a placeholder.
        """
        parts: dict[str, list[nn.Parameter]] = {"matrices": [], "embeddings": [], "vectors": []}
        for name, parameter in self._stage.named_parameters():
            spec = self._specs[name]
            matrix = "embeddings" if (spec.copy_of or name).startswith("embedding.") else "matrices"
            parts["vectors" if len(spec.shape) == 1 else matrix].append(parameter)
        decay = self._plan.config.optimizer.weight_decay
        return [
            {
                "params": parameters
                or [self._wrapped_stage.add_placeholder(part, self._mesh.device)],
                "weight_decay": 0.0 if part == "vectors" else decay,
                "part": part,
            }
            for part, parameters in parts.items()
        ]

    def _build_settings(self) -> dict[str, Any]:
        """What DeepSpeed is told: the configuration's values, over what the user's JSON has beside them."""
        config = self._plan.config
        path, precision = config.parallel.deepspeed_config, config.precision
        ours: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": config.optimizer.clip_grad,
            "zero_optimization": {"stage": get_effective_zero_stage(self._plan)},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if config.optimizer.cpu_optimizer:
            ours["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if config.parallel.sequence_parallel:
            # What stages send is cut over tensor ranks already: DeepSpeed, taking it for copies, would send each a part of its own.
            ours["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
        if precision.fp16:
            ours["fp16"] = {
                "enabled": True,
                "loss_scale": 1.0,
            }  # a stand-in: see `_FixedLossScaler`
            # DeepSpeed would cast the fp32 sums to fp16, where they overflow at a lower loss scale
            # than the gradients of one microbatch do.
            ours["communication_data_type"] = "fp32"
        if precision.bf16:
            ours["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if precision.fp16 or precision.bf16:
            ours["data_types"] = {"grad_accum_dtype": "fp32"}
        return _merge_settings(
            {"steps_per_print": 10**9, **(select_passed_on(read_json(path)) if path else {})}, ours
        )

    def _find_flats(self) -> list[Tensor]:
        """This rank's fp32 partitions."""
        names = (
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
            "fp32_partitioned_groups_flat",
        )
        return list(
            next(
                getattr(self._engine.optimizer, name)
                for name in names
                if hasattr(self._engine.optimizer, name)
            )
        )

    def _make_moments(self) -> FlatMoments:
        optimizer = self._engine.optimizer
        if not self._plan.config.optimizer.use_bnb_optimizer:
            return TorchMoments(optimizer.optimizer, self._flats)
        groups = getattr(optimizer, "sub_group_to_group_id", {})
        exact = {
            i
            for i, group in enumerate(optimizer.optimizer.param_groups)
            if group["part"] != "matrices"
        }
        return EightBitMoments(
            optimizer.optimizer,
            self._flats,
            [groups.get(i, i) for i in range(len(self._flats))],
            exact,
        )

    def _find_fragments(self) -> Iterator[Fragment]:
        """This rank's runs of elements in its partitions."""
        optimizer = self._engine.optimizer
        for name, parameter in self._stage.named_parameters():
            if hasattr(
                optimizer, "fp32_partitioned_groups_flat"
            ):  # ZeRO 3: each parameter is cut by itself
                shape = tuple(parameter.ds_shape)  # type: ignore[attr-defined]
                flat, at, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = self._mesh.coordinate.data * size
                size = min(size, math.prod(shape) - start)
            else:
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is None:
                    continue
                shape, flat = tuple(parameter.shape), mapping.param_group_index
                start, there = mapping.lp_fragment_address.start, mapping.hp_fragment_address
                size, at = there.numel, there.start
            if size <= 0:
                continue
            spec = self._specs[name]
            offset = [0] * len(spec.shape)
            if spec.shard_dim is not None:
                offset[spec.shard_dim] = self._mesh.coordinate.tensor * shape[spec.shard_dim]
            yield Fragment(spec.copy_of or name, spec, tuple(offset), shape, start, size, flat, at)

    def _get_flat_tensor(self, index: int, kind: Kind) -> Tensor:
        return self._flats[index].data if kind == "weight" else self._moments.open(index, kind)

    def _make_invariants(self) -> InvariantChecker:
        """Of what tensor ranks replicate. A tied embedding's two ends are cut differently here, and are not compared."""
        kinds: tuple[Kind, ...] = get_args(Kind) if self._moments.live else ("weight",)
        replicas = [
            Replica(f.name, kind, self._get_flat_tensor(f.flat, kind).narrow(0, f.at, f.size))
            for f in self._fragments
            if f.spec.shard_dim is None
            for kind in kinds
        ]
        return InvariantChecker([(self._mesh.tensor_parallel.group, replicas)], self._mesh)

    # -- a step ---------------------------------------------------------------------------------------------------------------

    def train_batch(
        self, microbatches: Sequence[Microbatch], *, iteration: int, lr: float
    ) -> StepResult:
        engine, scale = self._engine, 1.0 if self._loss_scale is None else self._loss_scale.scale
        self._moments.drop()
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        if self._loss_scale is not None:
            engine.optimizer.loss_scaler = _FixedLossScaler(scale)
        size = len(microbatches) * self._plan.config.batch.micro_batch_size * self._mesh.grid.data
        if engine.train_batch_size() != size:
            engine.set_train_batch_size(size)
        with self._timers("forward-backward"):
            loss = self._train(build_inputs(microbatches, iteration, self._mesh.device))
        applied = engine.was_step_applied()
        norm = float(engine.get_global_grad_norm()) if applied else math.inf
        self._step_count += applied
        overflow = self._loss_scale is not None and self._loss_scale.update_after_step(
            applied=applied, loss_is_finite=math.isfinite(loss)
        )
        return StepResult(
            loss, norm, applied, None, None if self._loss_scale is None else scale, overflow
        )

    def _train(self, inputs: list[Inputs]) -> float:
        self._wrapped_stage.begin(inputs)
        if self._mesh.grid.pipeline > 1:
            self._update_activation_shape(inputs)
            return float(self._engine.train_batch(_make_empty_batches(len(inputs))))
        self._engine.train()
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for number in range(len(inputs)):
            self._engine.set_gradient_accumulation_boundary(number == len(inputs) - 1)
            loss = self._engine(None)
            self._engine.backward(loss)
            total += loss.detach().double() / len(inputs)
            self._engine.step()
        return self._average_over_ranks(total)

    def eval_batch(self, microbatches: Sequence[Microbatch]) -> float:
        inputs = build_inputs(microbatches, 0, self._mesh.device)
        self._wrapped_stage.begin(inputs)
        if self._mesh.grid.pipeline > 1:
            self._update_activation_shape(inputs)
            return float(
                self._engine.eval_batch(
                    _make_empty_batches(len(inputs)), num_micro_batches=len(inputs)
                )
            )
        self._engine.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        with torch.no_grad():
            for _ in inputs:
                total += self._engine(None).double() / len(inputs)
        return self._average_over_ranks(total)

    def _update_activation_shape(self, inputs: list[Inputs]) -> None:
        """DeepSpeed sends the shape of activations once, and allocates by it."""
        if self._shape != inputs[0].tokens.shape:
            self._engine.reset_activation_shape()
            self._shape = inputs[0].tokens.shape

    def _average_over_ranks(self, value: Tensor) -> float:
        dist.all_reduce(value)
        return float(value) / self._mesh.grid.world_size

    # -- state ----------------------------------------------------------------------------------------------------------------

    def shards(self, *, optimizer: bool) -> list[TensorShard]:
        first = self._mesh.coordinate.tensor == 0
        kinds: tuple[Kind, ...] = get_args(Kind) if optimizer else ("weight",)
        return [
            shard
            for f in self._fragments
            for shard in f.shards(
                {kind: self._get_flat_tensor(f.flat, kind) for kind in kinds},
                owner=f.spec.copy_of is None and (f.spec.shard_dim is not None or first),
            )
        ]

    def get_scalars(self) -> dict[str, Any]:
        scale = {} if self._loss_scale is None else {"loss_scale": self._loss_scale.state()}
        return {"optimizer_step": self._step_count, **scale}

    def finish_load(self, scalars: dict[str, Any] | None) -> None:
        if scalars is None:
            for index in range(len(self._flats)):
                self._moments.open(index, "exp_avg").zero_()
                self._moments.open(index, "exp_avg_sq").zero_()
        self._step_count = 0 if scalars is None else int(scalars["optimizer_step"])
        self._moments.take_over(self._step_count)
        if scalars is not None and self._loss_scale is not None and "loss_scale" in scalars:
            self._loss_scale.load(scalars["loss_scale"])
        self._refresh_model()

    def _refresh_model(self) -> None:
        """The weights that the model computes with follow the masters."""
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
            return
        with torch.no_grad():
            for parameter in self._stage.parameters():
                group, at, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                part = parameter.ds_tensor  # type: ignore[attr-defined]
                part[:size].copy_(optimizer.fp32_partitioned_groups_flat[group].narrow(0, at, size))
                if parameter.numel():  # small ones stay gathered
                    whole = part.new_empty(part.numel() * self._mesh.grid.data)
                    dist.all_gather_into_tensor(whole, part, group=optimizer.dp_process_group)
                    parameter.data.copy_(whole[: parameter.numel()].view_as(parameter))

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
        owned = [shard.tensor for shard in self.shards(optimizer=False) if shard.owner]
        squares = compute_squared_norm(owned).to(self._mesh.device)
        dist.all_reduce(squares)
        return math.sqrt(float(squares))

    def describe_kernels(self) -> list[tuple[str, str, str]]:
        stage, asked = get_effective_zero_stage(self._plan), self._plan.config.parallel.zero_stage
        note = (
            ""
            if stage == asked
            else f"; stage {asked} runs as {stage}: right in every precision, with less memory"
        )
        travel = (
            "; DeepSpeed sends them gradients in bf16" if self._plan.config.precision.bf16 else ""
        )
        return [
            *list_kernels(
                self._plan,
                self._mesh,
                self._execution,
                self._loss_scale,
                "DeepSpeed's PipelineModule",
            ),
            (
                "engine",
                "DeepSpeed",
                f"{type(self._engine).__name__}, {type(self._engine.optimizer).__name__}",
            ),
            ("optimizer", *_describe_optimizer(self._plan.config.optimizer)),
            (
                "sharding",
                f"DeepSpeed, ZeRO {stage}",
                f"{self._mesh.grid.data} data-parallel ranks{travel}{note}",
            ),
        ]


def get_effective_zero_stage(plan: Plan) -> int:
    """The stage that runs.

    DeepSpeed's 0 is wrong in 16 bits: the norm with tensor parallelism, a first step without gradients. Under a pipeline in bf16 it
    is right (BF16_Optimizer) but for the sums of gradients, which it keeps in bf16; stage 1 is the same optimizer with fp32 sums.
    """
    return max(1, plan.config.parallel.zero_stage)


def _describe_optimizer(config: OptimizerConfig) -> tuple[str, str]:
    if config.use_bnb_optimizer:
        return (
            "bitsandbytes AdamW",
            "moments of matrices in 8 bits, of embeddings and vectors in 32",
        )
    where = "in host memory" if config.cpu_optimizer else "in DeepSpeed's partitions"
    return "torch AdamW, fused", where


@contextlib.contextmanager
def _disable_compiler() -> Iterator[None]:
    """DeepSpeed's Muon optimizer, which is imported with all others, would take two seconds to load torch's compiler."""
    compile_ = torch.compile
    torch.compile = lambda *args, **kwargs: args[0] if args else lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


class _StageWrapper(nn.Module):
    """A stage as DeepSpeed calls it: without the microbatches, which come in their order."""

    def __init__(self, stage: GPT) -> None:
        super().__init__()
        self.stage = stage
        self._inputs: Iterator[Inputs] = iter(())

    def add_placeholder(self, part: str, device: torch.device) -> nn.Parameter:
        """Return a parameter of one element that the model does not use.

        It is zero, has no gradient, and is in no checkpoint.
        """
        placeholder = nn.Parameter(torch.zeros(1, device=device))
        self.register_parameter(f"no_{part}", placeholder)
        return placeholder

    def begin(self, inputs: Sequence[Inputs]) -> None:
        """The microbatches of the batch that follows."""
        self._inputs = iter(inputs)

    def forward(self, x: Tensor | None) -> Tensor:
        return self.stage(None if self.stage.stage.first else x, next(self._inputs))


class _TiedWeight:
    """Show PipelineEngine the gradient of a tied parameter, which it adds up over the ends of the pipeline.

    PipelineEngine (0.19.8) reads `_hp_grad` with BF16_Optimizer, and `grad` otherwise. ZeRO 1 moves
    each 16-bit gradient into `grad_accum`, which is fp32, and leaves `grad` empty. So the sum of a
    tied parameter would be left out without a message.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        accumulated: Tensor | None = getattr(self._parameter, "grad_accum", None)
        return self._parameter.grad if accumulated is None else accumulated

    @property
    def _hp_grad(self) -> Tensor:
        gradient: Tensor = self._parameter._hp_grad  # type: ignore[attr-defined]
        return gradient


class _FixedLossScaler:
    """Answers DeepSpeed's optimizer; `LossScale` decides."""

    dynamic = True

    def __init__(self, scale: float) -> None:
        self.cur_scale = self.loss_scale = scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Not DeepSpeed's business."""


class _MeshMpu:
    """Our mesh, in the words in which DeepSpeed asks for it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        alone = dist.group.WORLD  # of one
        self._tensor = alone if mesh.devices is None else mesh.devices.get_group("tp")
        self._data = alone if mesh.devices is None else mesh.devices.get_group("dp")

    def get_model_parallel_rank(self) -> int:
        return self._mesh.coordinate.tensor

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.grid.tensor

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_data_parallel_rank(self) -> int:
        return self._mesh.coordinate.data

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.grid.data

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._data)

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def _make_empty_batches(microbatches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What DeepSpeed loads on the first and the last stage: `_StageWrapper` has the data."""
    nothing = torch.zeros(1, dtype=torch.long)
    return iter([(nothing, nothing)] * microbatches)


def _merge_settings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries merged; `above` wins."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        result[key] = (
            _merge_settings(inner, value)
            if isinstance(inner, Mapping) and isinstance(value, Mapping)
            else value
        )
    return result
