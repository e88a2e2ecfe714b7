"""The engine on DeepSpeed, which runs its pipeline, ZeRO and mixed precision around our model.

This is the only file that imports deepspeed. A stage of the model is one layer of DeepSpeed's
PipelineModule, so both engines compute with the same modules. DeepSpeed keeps masters and moments
in flat partitions. The shards of this engine are views of these partitions (`partitions.py`), so
each engine loads the checkpoints of the other. The loss scale is our own (`loss_scale.py`).

Traps of DeepSpeed 0.19 that this file avoids:

- PipelineModule's constructor resets the marks that the gradient norm depends on. The parameters
  are marked after it (`_mark`).
- The boundary of gradient accumulation is wrong after the number of microbatches has changed. It is
  set for each microbatch (`_train`).
- ZeRO stage 0 is wrong in 16 bits (`Plan.zero_stage`).
- Ranks with different numbers of parameter groups wait for each other forever
  (`_group_parameters`).
- If 16-bit gradients are summed in fp32, the pipeline does not find the gradients of tied weights
  (`TiedWeight`).
"""

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.base.errors import ConfigError
from megatron.config.optimizer import OptimizerConfig
from megatron.data.batches import Microbatch
from megatron.engine.base import Accept, StepOutcome, StepResult, Vote
from megatron.engine.engine_base import EngineBase
from megatron.engine.invariants import Replica, add_over_tensor_ranks
from megatron.engine.optimizer import choose_rate, compute_squared_norm
from megatron.extras.step.deepspeed.deepspeed_adapters import (
    FixedLossScaler,
    StageWrapper,
    TiedWeight,
    build_settings,
    make_empty_batches,
    make_mpu,
)
from megatron.extras.step.deepspeed.partitions import (
    EightBitMoments,
    FlatMoments,
    Fragment,
    TorchMoments,
    build_adamw,
)
from megatron.model.gpt import EMBEDDING, INPUT_AND_OUTPUT
from megatron.model.inputs import Inputs
from megatron.parallel.collectives import all_gather_single
from megatron.parallel.parameter_spec import ParameterSpec
from megatron.parallel.rank_progress import TimeLimit
from megatron.parallel.shard import ADAM_KINDS, Kind, TensorShard

_LOGGING_KEYS = ("wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger")
"""Keys of DeepSpeed's JSON that request output in the log."""


class DeepSpeedEngine(EngineBase):
    """An `Engine` that runs a step with DeepSpeed.

    Weights are initialised in DeepSpeed's fp32 partitions, and its 16-bit weights are copied from
    them.
    """

    _uses_fsdp = False

    # -- construction -----------------------------------------------------------------------------

    def _build(self) -> None:
        # DeepSpeed's pipeline has one stage on each rank.
        (stage,) = self._rank_stages
        self._specs = stage.specs
        self._wrapped_stage = StageWrapper(stage.model)
        self._engine = self._initialize()
        self._step_count = 0
        self._accept: Accept | None = None
        """Decides on the step that runs. None: every finite step is applied."""
        self._rejected = False
        """Whether `_accept` has refused the step that runs."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        """Mean loss of this rank's microbatches so far. It stays zero with a pipeline."""
        self._microbatches = 1
        """Number of this rank's microbatches in the step that runs."""
        self._shape: tuple[int, ...] | None = None
        self._flats = self._find_flats()
        self._moments = self._make_moments()
        self._fragments = list(self._find_fragments())

    def _initialize(self) -> Any:
        """Return DeepSpeed's engine around this rank's stage."""
        # DeepSpeed takes the number of its GPU from LOCAL_RANK, at any time. In a task that sees
        # one GPU, that has number 0, whatever the local rank is. PipelineModule fails without it.
        if self._mesh.device.index is not None:
            os.environ["LOCAL_RANK"] = str(self._mesh.device.index)
        os.environ.setdefault("LOCAL_RANK", "0")
        deepspeed = import_deepspeed(self._mesh.device.type)
        from deepspeed.utils import logger

        settings = build_settings(self._plan)
        logger.setLevel(
            logging.INFO if any(settings.get(key) for key in _LOGGING_KEYS) else logging.ERROR
        )
        # DeepSpeed calls functions of torch.distributed that are deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        if self._mesh.device.type == "cpu":
            # DeepSpeed would compile this extension at start. gloo does the same work.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            # DeepSpeed refuses fp16 on CPUs without fast instructions for it. torch computes fp16
            # on every CPU.
            deepspeed.get_accelerator().is_fp16_supported = lambda: True
        pipelined = self._mesh.grid.pipeline > 1
        # DeepSpeed prints its topology and its partition of the layers.
        with contextlib.redirect_stdout(io.StringIO()):
            # DeepSpeed needs a process group even with one rank. A HashStore needs no port.
            if not dist.is_initialized():
                backend = {"cuda": "nccl", "cpu": "gloo"}[self._mesh.device.type]
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            deepspeed.init_distributed(dist_init_required=False)
            # This must come before anything that makes DeepSpeed create groups.
            self._limit_groups(deepspeed.comm.comm.cdb)
            # `mpu` tells DeepSpeed the process groups. PipelineModule builds its own.
            if pipelined:
                model, mpu = self._build_pipeline_module(), None
            else:
                model, mpu = self._wrapped_stage, make_mpu(self._mesh)
            # This must come after PipelineModule. Its constructor sets `ds_pipe_replicated` to
            # False on all parameters, and the norm would count tied weights twice.
            for name, parameter in self.stages[0].named_parameters():
                self._mark(parameter, self._specs[name])
            optimizer = build_adamw(self._group_parameters(), self._plan.config.optimizer)
            with self._explain_refusal():
                engine, *_ = deepspeed.initialize(
                    model=model, optimizer=optimizer, config=settings, mpu=mpu
                )
        # In fp32 DeepSpeed sets `check_grad_overflow` to False and would apply gradients that are
        # not finite.
        update = engine.optimizer.step
        engine.optimizer.check_grad_overflow = True

        # DeepSpeed calls `optimizer.step` inside its own step, so this is the only place between
        # the last gradient and the update.
        def wait_and_update(*args: Any, **kwargs: Any) -> Any:
            self._before_update()
            self._share_replicated_gradients()
            self._show_infinities()
            with self._reject_step():
                result = update(*args, **kwargs)
            self._forget_dropped_gradients()
            return result

        engine.optimizer.step = wait_and_update
        self._time_gathering(engine.optimizer)
        return engine

    def _time_gathering(self, optimizer: Any) -> None:
        """Count the time in which ZeRO 3 gathers parameters as communication.

        DeepSpeed gathers them in hooks inside of a block, where this rank waits for the others.
        """
        offload = getattr(optimizer, "parameter_offload", None)
        # The other stages gather nothing.
        if offload is None:
            return
        coordinator = offload.get_param_coordinator()
        fetch = coordinator.fetch_sub_module

        def fetch_and_time(*args: Any, **kwargs: Any) -> None:
            with self._mesh.tensor_parallel.comm_timer():
                fetch(*args, **kwargs)

        coordinator.fetch_sub_module = fetch_and_time

    def _limit_groups(self, backend: Any) -> None:
        """Give the groups that DeepSpeed creates the same time-out as ours.

        DeepSpeed has no argument for it and uses torch's default of 30 minutes.
        """
        parallel = self._plan.config.parallel
        limit = TimeLimit(parallel.distributed_timeout_minutes, parallel.hang_seconds)
        backend.new_group = lambda ranks: dist.new_group(ranks, timeout=limit.collective)

    @contextlib.contextmanager
    def _explain_refusal(self) -> Iterator[None]:
        """Turn an error about DeepSpeed's JSON into one that the user can act on.

        Our own checks of the JSON do not find everything that DeepSpeed refuses.

        Raises:
            ConfigError: DeepSpeed refuses the file of `--deepspeed-config`.
        """
        from deepspeed.runtime.config import DeepSpeedConfigError

        try:
            yield
        # The errors of pydantic, which validates the JSON, are ValueErrors.
        except (DeepSpeedConfigError, AssertionError, ValueError) as error:
            path = self._plan.config.parallel.deepspeed_config
            # Without a file all settings are ours, so the error is a bug of this program.
            if path is None:
                raise
            lines = [line.strip() for line in str(error).splitlines()[:4]]
            reason = "; ".join(lines) or type(error).__name__
            raise ConfigError(
                f"--deepspeed-config {path}: DeepSpeed refuses it: {reason}; "
                "change the setting that it names"
            ) from error

    def _share_replicated_gradients(self) -> None:
        """Give the tensor-parallel ranks the same gradients of the parameters that all hold."""
        gradients = [
            self._get_gradient(fragment)
            for fragment in self._fragments
            if not fragment.spec.is_sharded
        ]
        # The hooks of `_mark` have added up partial gradients already.
        add_over_tensor_ranks([], gradients, self._mesh.tensor_parallel)

    def _get_gradient(self, fragment: Fragment) -> Tensor:
        """Return the reduced gradient of a fragment, which the next update reads."""
        optimizer = self._engine.optimizer
        # BF16_Optimizer has a flat gradient of each partition, and so has offload.
        flats = getattr(optimizer, "fp32_groups_gradient_flat_partition", None)
        flat = self._flats[fragment.flat].grad
        if flats is not None:
            flat = flats[fragment.flat]
        if flat is not None:
            return flat.narrow(0, fragment.at, fragment.size)
        # ZeRO has a list of tensors, which it concatenates to the flat gradient in its update.
        start = 0
        for gradient in optimizer.averaged_gradients[fragment.flat]:
            if start == fragment.at:
                return gradient
            start += gradient.numel()
        raise AssertionError(f"no gradient begins at {fragment.at} of partition {fragment.flat}")

    def _show_infinities(self) -> None:
        """Put an infinity into every rank's gradients if those of any rank are not finite.

        All ranks then drop the step.

        BF16_Optimizer drops a step if its gradient norm is not finite. The norm counts only one of
        several replicas, so it misses numbers in the others that are not finite.
        """
        gradients = getattr(self._engine.optimizer, "fp32_groups_gradient_flat_partition", None)
        # Only BF16_Optimizer has this attribute. ZeRO's optimizers check every gradient.
        if gradients is None:
            return
        finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
        bad = (~finite).to(torch.int32)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad:
            _spoil(gradients)

    @contextlib.contextmanager
    def _reject_step(self) -> Iterator[None]:
        """Let DeepSpeed drop the step within a `with` block if `_accept` refuses it.

        DeepSpeed drops a step only if gradients are not finite, so this makes it find an overflow.
        """
        if self._accept is None:
            yield
            return
        loss = self._reduce_loss_before_update()
        # A step that is not finite is dropped anyway, so `_accept` does not see it.
        self._rejected = math.isfinite(loss) and not self._accept(loss, None)
        if not self._rejected:
            yield
            return
        optimizer = self._engine.optimizer
        gradients = getattr(optimizer, "fp32_groups_gradient_flat_partition", None)
        if gradients is not None:
            # See `_show_infinities`.
            _spoil(gradients)
            yield
            return

        def find_overflow(**options: bool) -> bool:
            optimizer.overflow = True
            return True

        # ZeRO 3 looks for an overflow in the first method. ZeRO 1 and 2 have only the second one.
        method = "_overflow_check_and_loss_scale_update"
        if not hasattr(optimizer, method):
            method = "check_overflow"
        setattr(optimizer, method, find_overflow)
        try:
            yield
        finally:
            # Without the attribute, the method of the class is used again.
            delattr(optimizer, method)

    def _reduce_loss_before_update(self) -> float:
        """Return the mean loss over all ranks, when all microbatches have run.

        This needs one more all-reduce, because DeepSpeed reduces the loss after the update.
        """
        total = self._loss_sum.clone()
        if self._mesh.grid.pipeline > 1 and self.stages[0].head:
            total = self._engine.total_loss.detach().double() / self._microbatches
        dist.all_reduce(total)
        return float(total) / (self._mesh.grid.data * self._mesh.grid.tensor)

    def _forget_dropped_gradients(self) -> None:
        """Drop the gradients of a dropped step.

        With offload, ZeRO 2 keeps them in a buffer and adds the next gradients to it. An infinity
        would stay there permanently, and every later step would be dropped.
        """
        optimizer = self._engine.optimizer
        if (
            self._plan.config.optimizer.cpu_optimizer
            and optimizer.overflow
            and hasattr(optimizer, "all_grad_tensors")
        ):
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None

    def _build_pipeline_module(self) -> nn.Module:
        """Return DeepSpeed's pipeline of as many layers as there are pipeline ranks.

        A rank needs only its own stage. The layers of the other ranks are descriptions that this
        rank never builds.
        """
        from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
        from deepspeed.runtime.pipe.topology import ProcessTopology

        grid = self._mesh.grid
        coordinate = self._mesh.coordinate
        topology = ProcessTopology(
            axes=["pipe", "data", "model"], dims=[grid.pipeline, grid.data, grid.tensor]
        )
        layers = [
            self._wrapped_stage if index == coordinate.pipeline else LayerSpec(nn.Identity)
            for index in range(grid.pipeline)
        ]
        # "uniform" puts one layer on each rank. Other methods compare numbers of parameters, which
        # each rank knows only for its own stage.
        module = PipelineModule(layers=layers, topology=topology, partition_method="uniform")
        # DeepSpeed ties only layers of the class TiedLayerSpec. A stage is one layer, so its tied
        # weights are returned here.
        tied = [
            TiedWeight(parameter)
            for name, parameter in self.stages[0].named_parameters()
            if self._is_tied(self._specs[name].get_global_name(name))
        ]
        module.get_tied_weights_and_groups = lambda: [(weight, self._mesh.ends) for weight in tied]
        return module

    def _mark(self, parameter: nn.Parameter, spec: ParameterSpec) -> None:
        """Mark a parameter for DeepSpeed's gradient norm, and add up partial gradients.

        One mark is whether the parameter is sharded over tensor-parallel ranks. The other is
        whether it is a copy of a parameter on another stage.
        """
        parameter.model_parallel = spec.is_sharded  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = spec.is_sharded  # type: ignore[attr-defined]
        parameter.ds_pipe_replicated = spec.copy_of is not None  # type: ignore[attr-defined]
        # Each rank has the gradient of its part of the sequence only. This hook adds the parts up
        # before ZeRO moves the gradient into its buffers.
        if spec.partial_gradient:
            tp = self._mesh.tensor_parallel

            def add_parts(gradient: Tensor) -> Tensor:
                with tp.comm_timer():
                    dist.all_reduce(gradient := gradient.contiguous(), group=tp.group)
                return gradient

            parameter.register_hook(add_parts)

    def _group_parameters(self) -> list[dict[str, Any]]:
        """Return the parameter groups, which are the same on every rank.

        Matrices decay, and vectors do not. The configuration decides for embeddings. They are also
        a group of their own because their moments are too uneven for 8 bits. With a decoupled
        learning rate, the word embedding and the output matrix are groups of their own, too.

        ZeRO makes one all-reduce over the pipeline for each group. Ranks with different numbers of
        groups would therefore wait for each other forever. DeepSpeed removes empty groups, so a
        stage without parameters of a group gets a placeholder.
        """
        names = [("matrices", False), ("embeddings", False), ("vectors", False)]
        decoupling = self._plan.lr_schedule.decoupled_max_lr is not None
        if decoupling:
            names += [("matrices", True), ("embeddings", True)]
        parts: dict[tuple[str, bool], list[nn.Parameter]] = {name: [] for name in names}
        for name, parameter in self.stages[0].named_parameters():
            spec = self._specs[name]
            global_name = spec.get_global_name(name)
            if not spec.decays:
                part = "vectors"
            elif global_name.startswith(EMBEDDING):
                part = "embeddings"
            else:
                part = "matrices"
            parts[part, decoupling and global_name in INPUT_AND_OUTPUT].append(parameter)
        config = self._plan.config.optimizer
        decay = {"matrices": config.weight_decay, "embeddings": 0.0, "vectors": 0.0}
        if config.weight_decay_on_embeddings:
            decay["embeddings"] = config.weight_decay

        def add_placeholder(part: str, *, decoupled: bool) -> nn.Parameter:
            prefix = "decoupled_" * decoupled
            return self._wrapped_stage.add_placeholder(prefix + part, self._mesh.device)

        return [
            {
                "params": parameters or [add_placeholder(part, decoupled=decoupled)],
                "weight_decay": decay[part],
                "part": part,
                "decoupled": decoupled,
            }
            for (part, decoupled), parameters in parts.items()
        ]

    def _find_flats(self) -> list[Tensor]:
        """Return this rank's fp32 partitions, one for each parameter group (ZeRO 3: sub-group)."""
        # The attribute's name in ZeRO 1 and 2, in BF16_Optimizer, and in ZeRO 3.
        names = (
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
            "fp32_partitioned_groups_flat",
        )
        optimizer = self._engine.optimizer
        return list(next(getattr(optimizer, name) for name in names if hasattr(optimizer, name)))

    def _make_moments(self) -> FlatMoments:
        """Return access to the moments of the optimizer that DeepSpeed wraps."""
        optimizer = self._engine.optimizer
        if not self._plan.config.optimizer.use_bnb_optimizer:
            return TorchMoments(optimizer.optimizer, self._flats)
        # ZeRO 3 divides a parameter group into sub-groups, each with a partition of its own.
        # Otherwise partition i belongs to group i.
        groups = getattr(optimizer, "sub_group_to_group_id", {})
        group_of = [groups.get(i, i) for i in range(len(self._flats))]
        parts = [group["part"] for group in optimizer.optimizer.param_groups]
        exact = {i for i, part in enumerate(parts) if part != "matrices"}
        return EightBitMoments(optimizer.optimizer, self._flats, group_of, exact)

    def _find_fragments(self) -> Iterator[Fragment]:
        """Return for each parameter the run of elements that this rank's partitions hold."""
        optimizer = self._engine.optimizer
        for name, parameter in self.stages[0].named_parameters():
            # ZeRO 3 divides each parameter evenly over the data-parallel ranks. The last rank's
            # part is padded.
            if hasattr(optimizer, "fp32_partitioned_groups_flat"):
                shape = tuple(parameter.ds_shape)  # type: ignore[attr-defined]
                flat, at, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = self._mesh.coordinate.data * size
                size = min(size, math.prod(shape) - start)
            # The others divide the flattened group. "lp" and "hp" are DeepSpeed's terms for low and
            # high precision. `_hp_mapping` is None for a parameter of another rank's partition.
            else:
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is None:
                    continue
                shape = tuple(parameter.shape)
                flat = mapping.param_group_index
                start = mapping.lp_fragment_address.start
                address = mapping.hp_fragment_address
                size = address.numel
                at = address.start
            if size <= 0:
                continue
            spec = self._specs[name]
            offset = spec.compute_offset(shape, self._mesh.coordinate.tensor)
            yield Fragment(
                spec.get_global_name(name), spec, tuple(offset), shape, start, size, flat, at
            )

    def _get_flat_tensor(self, index: int, kind: Kind) -> Tensor:
        if kind == "weight":
            return self._flats[index].data
        return self._moments.open(index, kind)

    def _list_replicas(self) -> list[tuple[dist.ProcessGroup | None, list[Replica]]]:
        """Return the parameters that tensor-parallel ranks replicate.

        DeepSpeed divides the two copies of a tied embedding at different elements, so they are not
        compared.
        """
        # Moments that are not live are decoded copies. A repair of them would be lost.
        kinds: tuple[Kind, ...] = ("weight", *(ADAM_KINDS if self._moments.live else ()))
        replicas = [
            Replica(f.name, kind, self._get_flat_tensor(f.flat, kind).narrow(0, f.at, f.size))
            for f in self._fragments
            if not f.spec.is_sharded
            for kind in kinds
        ]
        return [(self._mesh.tensor_parallel.group, replicas)]

    # -- a step -----------------------------------------------------------------------------------

    def train_batch(
        self,
        microbatches: Sequence[Microbatch],
        *,
        iteration: int,
        lr: float,
        decoupled_lr: float | None = None,
        with_layer_statistics: bool = False,
        accept: Accept | None = None,
        vote: Vote | None = None,
    ) -> StepResult:
        """Train on one global batch. See `Engine.train_batch`."""
        assert not with_layer_statistics, "`kind.py` refuses statistics of layers"
        engine = self._engine
        # The step changes the moments, so decoded copies of them would be out of date.
        self._moments.drop()
        for group in engine.optimizer.param_groups:
            group["lr"] = choose_rate(lr, decoupled_lr, decoupled=group["decoupled"])
        if self._loss_scale is not None:
            engine.optimizer.loss_scaler = FixedLossScaler(self._loss_scale.scale)
        # DeepSpeed derives the number of accumulation steps from the size of the global batch.
        size = len(microbatches) * self._plan.config.batch.micro_batch_size * self._mesh.grid.data
        if engine.train_batch_size() != size:
            engine.set_train_batch_size(size)
        self._accept = accept
        self._rejected = False
        inputs = self._build_inputs(microbatches, iteration, training=True)
        # DeepSpeed updates moments and weights also if all gradients are 0, so it does not run. The
        # host reads a number here, as DeepSpeed does in its update.
        if self._counted_tokens is not None and float(self._counted_tokens) == 0:
            return self._finish_step(0.0, 0.0, StepOutcome.EMPTY)
        with self._timers("forward-backward"):
            loss, votes = self._train(inputs, vote)
        applied = engine.was_step_applied()
        # What DeepSpeed returns after a dropped step depends on its optimizer.
        norm = math.inf
        if applied:
            outcome = StepOutcome.APPLIED
            norm = float(engine.get_global_grad_norm())
        elif self._rejected:
            outcome = StepOutcome.REJECTED
        else:
            outcome = StepOutcome.NOT_FINITE
        self._step_count += applied
        result = self._finish_step(loss, norm, outcome)
        return replace(result, votes=votes)

    def _train(
        self, inputs: list[Inputs], vote: Vote | None
    ) -> tuple[float, Sequence[float] | None]:
        """Run forward, backward and the update.

        Returns:
            The mean loss over all ranks, and the sums of the votes. DeepSpeed's pipeline reduces
            the loss itself, so no message can carry votes there.
        """
        self._wrapped_stage.begin(inputs)
        self._microbatches = len(inputs)
        if self._mesh.grid.pipeline > 1:
            self._update_activation_shape(inputs)
            return float(self._engine.train_batch(make_empty_batches(len(inputs)))), None
        self._engine.train()
        # The sum stays on the device. Reading each loss would wait for the GPU every microbatch.
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        self._loss_sum = total
        for number in range(len(inputs)):
            self._mesh.progress.begin_part(f"microbatch {number + 1}")
            # DeepSpeed counts microbatches since its start and takes the count modulo their present
            # number. After that number has changed, the boundary would be in the wrong place.
            self._engine.set_gradient_accumulation_boundary(number == len(inputs) - 1)
            loss = self._engine(None)
            # DeepSpeed divides the loss by the number of accumulation steps itself.
            self._engine.backward(loss)
            total += loss.detach().double() / len(inputs)
            self._engine.step()
        own_votes = () if vote is None else vote()
        votes = [torch.full_like(total, number) for number in own_votes]
        loss_sum, *sums = self._sum_over_ranks(torch.stack((total, *votes)))
        return loss_sum / self._mesh.grid.world_size, None if vote is None else sums

    def _evaluate(self, inputs: list[Inputs]) -> float:
        self._wrapped_stage.begin(inputs)
        if self._mesh.grid.pipeline > 1:
            self._update_activation_shape(inputs)
            count = len(inputs)
            loss = self._engine.eval_batch(make_empty_batches(count), num_micro_batches=count)
            return float(loss)
        self._engine.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        with torch.no_grad():
            for _ in inputs:
                total += self._engine(None).double() / len(inputs)
        return self._sum_over_ranks(total.reshape(1))[0] / self._mesh.grid.world_size

    def _update_activation_shape(self, inputs: list[Inputs]) -> None:
        """Reset DeepSpeed's buffers if the shape of the microbatches has changed.

        DeepSpeed sends the shape of activations once and allocates its buffers for it. A curriculum
        changes the sequence length.
        """
        if self._shape != inputs[0].tokens.shape:
            self._engine.reset_activation_shape()
            self._shape = inputs[0].tokens.shape

    def _sum_over_ranks(self, values: Tensor) -> list[float]:
        # Only used without a pipeline, where every rank has a loss. Tensor-parallel ranks have the
        # same one, so the mean over all ranks is the mean over the data-parallel ranks.
        dist.all_reduce(values)
        return values.tolist()

    # -- state ------------------------------------------------------------------------------------

    def shards(self, *, optimizer: bool) -> list[TensorShard]:
        """Return the live state of this rank. See `Engine.shards`."""
        # The first tensor-parallel rank stores what all of them replicate. A copy of a tied weight
        # is stored by the stage that has the original.
        first = self._mesh.coordinate.tensor == 0
        kinds: tuple[Kind, ...] = ("weight", *(ADAM_KINDS if optimizer else ()))
        return [
            shard
            for f in self._fragments
            for shard in f.shards(
                {kind: self._get_flat_tensor(f.flat, kind) for kind in kinds},
                owner=f.spec.copy_of is None and (f.spec.is_sharded or first),
            )
        ]

    def _get_step_count(self) -> int:
        return self._step_count

    def _set_step_count(self, count: int) -> None:
        self._step_count = count
        # This encodes moments that are not live. It must come after all writes into them.
        self._moments.take_over(count)

    def _clear_moments(self) -> None:
        for index in range(len(self._flats)):
            self._moments.open(index, "exp_avg").zero_()
            self._moments.open(index, "exp_avg_sq").zero_()

    def _refresh_model(self) -> None:
        """Copy the fp32 masters to the weights that the model computes with."""
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
            return
        # ZeRO 3 has no such method. `ds_tensor` is this rank's part of the low-precision parameter.
        with torch.no_grad():
            for parameter in self.stages[0].parameters():
                group, at, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                part = parameter.ds_tensor  # type: ignore[attr-defined]
                part[:size].copy_(optimizer.fp32_partitioned_groups_flat[group].narrow(0, at, size))
                # ZeRO 3 keeps small parameters gathered, and a gathered copy must be updated too.
                # A sharded parameter has no elements until DeepSpeed gathers it.
                if parameter.numel():
                    gathered = part.new_empty(part.numel() * self._mesh.grid.data)
                    all_gather_single(gathered, part, group=optimizer.dp_process_group)
                    parameter.data.copy_(gathered[: parameter.numel()].view_as(parameter))

    def compute_parameter_norm(self) -> float:
        """Return the norm of all weights of the model."""
        # Owned shards contain every element of the model exactly once.
        owned = [shard.tensor for shard in self.shards(optimizer=False) if shard.owner]
        squares = compute_squared_norm(owned, self._mesh.device)
        dist.all_reduce(squares)
        return math.sqrt(float(squares))

    def describe_choices(self) -> list[tuple[str, str, str]]:
        """Return the rows of the table printed at start. See `Engine.describe_choices`."""
        stage = self._plan.zero_stage
        requested = self._plan.config.parallel.zero_stage
        sharding = f"{self._mesh.grid.data} data-parallel ranks"
        if self._plan.config.precision.bf16:
            sharding += "; DeepSpeed reduces gradients between them in bf16"
        if stage != requested:
            sharding += (
                f"; stage {requested} runs as stage {stage}, which is correct in every precision "
                "and needs less memory"
            )
        classes = f"{type(self._engine).__name__}, {type(self._engine.optimizer).__name__}"
        return [
            *self._list_kernels("DeepSpeed's PipelineModule"),
            ("engine", "DeepSpeed", classes),
            ("optimizer", *_describe_optimizer(self._plan.config.optimizer)),
            ("sharding", f"DeepSpeed, ZeRO {stage}", sharding),
        ]


def _spoil(gradients: Sequence[Tensor]) -> None:
    """Make the norm of gradients infinite. One infinite element is enough."""
    for gradient in gradients:
        gradient[:1].fill_(torch.inf)


def _describe_optimizer(config: OptimizerConfig) -> tuple[str, str]:
    if config.use_bnb_optimizer:
        return (
            "bitsandbytes AdamW",
            "8-bit moments for matrices, 32-bit moments for embeddings and vectors",
        )
    where = {True: "in host memory", False: "in DeepSpeed's partitions"}[config.cpu_optimizer]
    return "torch AdamW, fused", where


def import_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed and return its module. This takes seconds.

    Args:
        device_type: "cuda" or "cpu". The first import fixes it for the process.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    # Without this variable DeepSpeed searches for an accelerator and prints what it found.
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"--deepspeed needs DeepSpeed, which is not installed: {error}; "
            "pip install -e '.[deepspeed]' installs it"
        ) from error
    # Import this module while the compiler is disabled. A later import finds it loaded.
    with _disable_compiler():
        import deepspeed.runtime.zero.muon.original_muon
    return deepspeed


@contextlib.contextmanager
def _disable_compiler() -> Iterator[None]:
    """Replace `torch.compile` by a function that compiles nothing.

    DeepSpeed imports its Muon optimizer with all others. That module calls `torch.compile` when it
    is imported, and loading torch's compiler takes two seconds.
    """
    compile_ = torch.compile
    # `torch.compile` is used both as `@torch.compile` and as `@torch.compile(...)`.
    torch.compile = lambda *args, **kwargs: (  # type: ignore[assignment]
        args[0] if args else lambda function: function
    )
    try:
        yield
    finally:
        torch.compile = compile_
