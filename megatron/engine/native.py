"""The engine on PyTorch: FSDP2, torch's pipeline schedules, and an optimizer on fp32 masters.

FSDP2 shards each stage over the data-parallel ranks. A single data-parallel rank needs no sharding
and has no cost from it. Its modules hold plain parameters, which in bf16 and fp16 are copies of
fp32 masters. Autograd accumulates their gradients in fp32. `ExpertState` has what routers keep.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.base.plain_text import format_count
from megatron.config.table import Table
from megatron.data.batches import Microbatch
from megatron.engine.ademamix import AdEMAMix
from megatron.engine.base import (
    Accept,
    ExpertStatistics,
    StepOutcome,
    StepResult,
    Vote,
)
from megatron.engine.engine_base import EngineBase
from megatron.engine.invariants import Replica, add_over_tensor_ranks
from megatron.engine.layer_statistics import LayerRecorder
from megatron.engine.muon import Muon
from megatron.engine.optimizer import (
    AdamW,
    MasterParameter,
    Masters,
    Optimizer,
    compute_scaling,
    compute_squared_norm,
    count_zeros,
)
from megatron.engine.parallelize import RankStage, shard_offset
from megatron.engine.runner import build_runner
from megatron.model.experts.routing import LOSSES, get_span, list_balance, list_routers
from megatron.model.fused_operators import FusedOperators
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameter_spec import ParameterSpec
from megatron.parallel.shard import Kind, TensorShard
from megatron.parallel.torch_private import foreach_copy_, foreach_mul_
from megatron.plan.run_plan import Plan

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ExpertState:
    """What this rank's routers keep: counts of a step, and the bias that balances experts.

    A model without experts has none.

    The invariant: the bias is the same on all ranks of a stage. It changes once in an applied step,
    by the choices of the complete step (https://arxiv.org/abs/2408.15664). Nothing else changes it.
    """

    def __init__(self, stages: Sequence[GPT], plan: Plan, mesh: Mesh) -> None:
        """Find the routers of this rank's stages."""
        self._routers = [router for stage in stages for router in list_routers(stage)]
        self._layers = sorted(plan.shape.expert_layers)
        self._experts = plan.config.model.num_experts or 0
        self._loss = plan.config.loss
        self._mesh = mesh

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        for router in self._routers:
            router.begin_step()

    def end_step(self, microbatches: int, *, applied: bool) -> ExpertStatistics | None:
        """Return the statistics of a step, and update the bias. All ranks call it together.

        Args:
            microbatches: This rank's number of microbatches.
            applied: Whether the step has updated the weights.
        """
        if not self._layers:
            return None
        # Layers of other stages stay 0, so the sum over all ranks is right.
        sums = torch.zeros(
            (len(self._layers), 2 * self._experts + LOSSES),
            dtype=torch.float64,
            device=self._mesh.device,
        )
        for router in self._routers:
            row = self._layers.index(router.layer)
            sums[row] = torch.cat((router.counts, router.sums))
        if self._mesh.grid.world_size > 1:
            with self._mesh.tensor_parallel.comm_timer():
                dist.all_reduce(sums)
        counts, losses, scores = sums.split((self._experts, LOSSES, self._experts), dim=1)
        if applied:
            self._update_biases(counts)
        # Each is a mean over microbatches. The ranks of a microbatch have a term of it each.
        means = losses / (microbatches * self._mesh.grid.data)
        if get_span(self._loss) is None:
            # No microbatch is balanced, so this is the loss of the step. It has the same choices
            # and scores on each layout.
            shares, parts = (x / x.sum(dim=1, keepdim=True).clamp(min=1) for x in (counts, scores))
            means[:, 0] = self._experts * (shares * parts).sum(dim=1)
        balancing, z_loss, entropy = means.t().tolist()
        return ExpertStatistics(self._layers, counts.long().tolist(), balancing, z_loss, entropy)

    def _update_biases(self, counts: torch.Tensor) -> None:
        below = torch.sign(counts.mean(dim=1, keepdim=True) - counts)
        for router in self._routers:
            if router.balance.numel():
                row = below[self._layers.index(router.layer)]
                router.balance.add_(row.float(), alpha=self._loss.moe_router_bias_update_rate)

    def list_shards(self) -> list[TensorShard]:
        """Return the biases as tensors of a checkpoint."""
        ranks = self._mesh.expert_parallel
        owner = ranks is None or ranks.stage.rank == 0
        return [shard for router in self._routers for shard in list_balance(router, owner=owner)]

    def list_replicas(self) -> tuple[dist.ProcessGroup | None, list[Replica]]:
        """Return the group whose ranks have the same biases, with this rank's."""
        ranks = self._mesh.expert_parallel
        return (
            None if ranks is None else ranks.stage.group,
            [Replica(shard.name, "weight", shard.tensor) for shard in self.list_shards()],
        )


CLASSES: Table[type[Optimizer]] = Table(
    "--optimizer",
    {
        "adam": AdamW,
        "ademamix": AdEMAMix,
        "muon": Muon,
    },
)
"""The optimizers' classes. `OPTIMIZERS` (`config/optimizer.py`) has their facts."""


def build_optimizer(
    masters: Masters, plan: Plan, mesh: Mesh, operators: FusedOperators
) -> Optimizer:
    """Return the optimizer of `--optimizer`, with states of zero. See `Optimizer.build`."""
    choice = CLASSES.require(plan.config.optimizer.optimizer)
    return choice.build(masters, plan, mesh, operators)


class NativeEngine(EngineBase):
    """An `Engine` that runs a step with PyTorch.

    It builds this rank's stages, shards them, and initialises only the shards that this rank holds.
    """

    _uses_fsdp = True

    # -- construction -----------------------------------------------------------------------------

    def _build(self) -> None:
        plan = self._plan
        self._clip = plan.config.optimizer.clip_grad
        self._count_zeros = plan.config.logging.log_num_zeros_in_grad
        # Each gradient of each step asks for it.
        self._shards_weights = self._mesh.shards_weights
        self._masters = [
            master for stage in self._rank_stages for master in self._make_masters(stage)
        ]
        self._optimizer = build_optimizer(
            self._masters, plan, self._mesh, self._execution.operators
        )
        self._experts = ExpertState(self.stages, plan, self._mesh)
        # The layout does not change, so the same masters count in every step.
        self._counted = [master for master in self._masters if self._is_counted(master)]
        # The first and the last stage hold the word embedding. `ends` is their group, and None on
        # all other ranks.
        self._tied = [master for master in self._masters if self._is_tied(master.name)]
        self.runner = build_runner(
            self._rank_stages,
            self._mesh,
            num_stages=len(plan.stages),
            execution=self._execution,
            vectors=[m.model_parameter for m in self._list_copied() if m.weight.dim() == 1],
        )

    def _make_masters(self, stage: RankStage) -> list[MasterParameter]:
        """Return the fp32 masters of a stage's parameters, filled with zeros.

        With FSDP2 or in fp32, a master is the parameter's own memory. Otherwise it is a separate
        fp32 tensor.
        """
        masters = []
        config = self._plan.config.optimizer
        for name, parameter in stage.model.named_parameters():
            spec = stage.specs[name]
            local = self._get_local_tensor(parameter.detach())
            if stage.sharded is None and self._dtype != torch.float32:
                # Sums over many microbatches would lose small gradients in 16 bits.
                parameter.grad_dtype = torch.float32
                local = torch.zeros_like(local, dtype=torch.float32)
            # A DTensor has the shape of the parameter before FSDP2 sharded it, which is the
            # tensor-parallel shard.
            offset = self._compute_offset(spec, tuple(parameter.shape))
            weight = nn.Parameter(local, requires_grad=False)
            global_name = spec.get_global_name(name)
            scaling = compute_scaling(global_name, spec, self._plan.shape, config)
            decays = config.weight_decay_on_embeddings
            masters.append(
                MasterParameter(global_name, spec, offset, parameter, weight, decays, scaling)
            )
        return masters

    def _get_local_tensor(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a parameter or gradient of the model. Both share memory."""
        # With several ranks that share the weights, FSDP2 has replaced each parameter by a DTensor.
        if not self._shards_weights:
            return tensor
        with torch.no_grad():
            return cast("DTensor", tensor).to_local()

    def _compute_offset(
        self, spec: ParameterSpec, tp_local_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the offset of this rank's shard in the global parameter.

        Tensor parallelism shards first, along `shard_dim`. FSDP2 then shards the rows of the
        result. For a parameter in pieces, it is the offset in the tensor-parallel shard.
        """
        offset = spec.compute_offset(tp_local_shape, self._mesh.coordinate.tensor)
        sharding = self._mesh.sharding
        if spec.by_expert:
            experts = self._mesh.expert_parallel
            assert experts is not None, "a model with experts has their ranks"
            offset[0] = experts.rank * tp_local_shape[0]
            sharding = experts.sharding
        if self._mesh.shards_weights:
            offset[0] += shard_offset(tp_local_shape[0], sharding.rank, sharding.size)
        return tuple(offset)

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
        for stage in self.stages:
            # This sets a flag in each module.
            if not stage.training:
                stage.train()
        self._prepare_step(iteration, len(microbatches))
        scale = self._get_scale()
        recorder = None
        if with_layer_statistics:
            recorder = self._make_recorder()
        self._experts.begin_step()
        with self._timers("forward-backward"), recorder or nullcontext():
            # As in Megatron-LM, the divisor is the number of this rank's microbatches. With twice
            # as many data-parallel ranks, each has half as many microbatches. Its fp16 gradients
            # are then twice as large before they are averaged, and overflow at half the scale.
            loss = self._run_microbatches(microbatches, iteration, scale / len(microbatches))
        with self._timers("optimizer"):
            result = self._apply_gradients(loss, scale, (lr, decoupled_lr), recorder, accept, vote)
            chosen = self._experts.end_step(len(microbatches), applied=result.applied)
            result = replace(result, experts=chosen)
        return result

    def _run_microbatches(
        self, microbatches: Sequence[Microbatch], iteration: int, factor: float | Tensor
    ) -> Tensor:
        """Compute the gradients of `factor` x the losses, and return this rank's mean loss."""
        inputs = self._build_inputs(microbatches, iteration, training=True)
        # Only routers read it, whose runs have the number.
        if isinstance(factor, float):
            inputs = [replace(each, loss_factor=factor) for each in inputs]
        return self.runner.run(inputs, factor, train=True)

    def compute_and_drop_gradients(
        self,
        microbatches: Sequence[Microbatch],
        iteration: int,
        observe: Callable[[str, Tensor], None],
    ) -> None:
        """Compute the gradients of the first microbatch of a step, and drop them.

        The step that follows gives the same bits as without it.

        Args:
            microbatches: This rank's microbatches of the step.
            iteration: The iteration of the step.
            observe: Called with the name and this rank's value of the loss and of each gradient.
        """
        for stage in self._rank_stages:
            stage.model.train()
            # An evaluation leaves weights gathered. Each call must gather them again.
            if stage.sharded is not None:
                stage.sharded.drop_gathered()
        # A balancing loss over the step reads what earlier microbatches have counted.
        self._experts.begin_step()
        self._prepare_step(iteration, len(microbatches))
        factor = self._get_scale() / len(microbatches)
        observe("loss", self._run_microbatches(microbatches[:1], iteration, factor))
        for master in self._masters:
            gradient = master.model_parameter.grad
            assert gradient is not None, f"{master.name} got no gradient"
            observe(f"gradient of {master.name}", self._get_local_tensor(gradient))
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Free the gradients. To allocate them again costs less than to fill them with zeros."""
        for master in self._masters:
            master.weight.grad = None
            master.model_parameter.grad = None

    def _prepare_step(self, iteration: int | None, microbatches: int) -> None:
        """Prepare the layers for the weights of this step. A subclass may need it.

        Args:
            iteration: The 1-based iteration, or None for an evaluation.
            microbatches: This rank's number of microbatches.
        """

    def _make_recorder(self) -> LayerRecorder:
        """Return the recorder of a step with statistics of layers."""
        return LayerRecorder(self.stages, self._mesh, self._plan.config.model.num_layers)

    def _evaluate(self, inputs: list[Inputs]) -> float:
        for stage in self.stages:
            stage.eval()
        self._prepare_step(None, len(inputs))
        with torch.no_grad():
            loss = self.runner.run(inputs, 1.0, train=False)
        return self._add_over_ranks(self._compute_loss_share(loss)).item()

    def _apply_gradients(
        self,
        loss: Tensor,
        scale: float,
        rates: tuple[float, float | None],
        recorder: LayerRecorder | None,
        accept: Accept | None,
        vote: Vote | None,
    ) -> StepResult:
        """Reduce, check, unscale and clip the gradients, and update the weights.

        Args:
            loss: This rank's mean loss, a scalar. It is zero on a rank without the last stage.
            scale: The loss scale, which the gradients still contain.
            rates: `lr` and `decoupled_lr` of `train_batch`.
            recorder: It records the gradients before clipping, and the weights after the update.
            accept: See `Engine.train_batch`.
            vote: See `Engine.train_batch`.
        """
        self._mesh.progress.begin_part("reduction of gradients")
        self._collect_gradients()
        if recorder is not None:
            recorder.record_gradients(self._list_counted(), scale)
        terms = self._reduce_step(loss, vote).tolist()
        result = self._judge_step(
            terms, scale, accept, votes=vote is not None, counts=self._counted_tokens is not None
        )
        if result.applied:
            clip_factor = 1.0
            # 1e-6 as in `torch.nn.utils.clip_grad_norm_`.
            if self._clip > 0 and result.grad_norm > self._clip:
                clip_factor = self._clip / (result.grad_norm + 1e-6)
            self._mesh.progress.begin_part("optimizer")
            self._before_update()
            self._optimizer.step(*rates, clip_factor / scale)
            self._refresh_model(copies=not self._optimizer.writes_copies)
        self._drop_gradients()
        if recorder is None:
            return result
        recorder.record_weights(self._list_counted())
        return replace(result, layers=recorder.reduce())

    def _collect_gradients(self) -> None:
        """Give the masters their gradients, summed over the ranks that have parts of them."""
        for master in self._masters:
            gradient = master.model_parameter.grad
            assert gradient is not None, f"{master.name} got no gradient"
            master.weight.grad = self._get_local_tensor(gradient)
        self._scale_expert_gradients()
        self._add_replicated_gradients()
        self._add_tied_gradients()

    def _judge_step(
        self,
        terms: Sequence[float],
        scale: float,
        accept: Accept | None,
        *,
        votes: bool,
        counts: bool,
    ) -> StepResult:
        """Return the result of a step from its terms, and update the loss scale.

        All ranks have the same terms, so all of them take the same decision.

        Args:
            terms: See `_reduce_step`.
            scale: See `_apply_gradients`.
            accept: See `Engine.train_batch`.
            votes: Whether the terms have votes.
            counts: Whether the last term is the number of tokens that count.
        """
        loss, squares, zeros, *sums = terms
        norm = squares
        if math.isfinite(squares):
            norm = math.sqrt(squares) / scale
        empty = False
        if counts:
            # What is left of the sums are the votes.
            empty = sums.pop() == 0.0
        num_zeros = None
        if self._count_zeros:
            num_zeros = int(zeros)
        outcome = _find_outcome(loss, norm, accept, empty=empty)
        result = self._finish_step(loss, norm, outcome, num_zeros)
        return replace(result, votes=sums if votes else None)

    def _scale_expert_gradients(self) -> None:
        """Divide the gradients of experts by the same number of ranks as all others.

        An expert gets the tokens of all ranks of a stage, and FSDP2 divides by the ranks that have
        the expert. Others are divided by the data x context ranks.
        """
        experts = self._mesh.expert_parallel
        gradients = [m.weight.grad for m in self._masters if m.spec.by_expert]
        if experts is None or experts.size == self._mesh.grid.tensor:
            return
        own = [g for g in gradients if g is not None and g.numel()]
        if own:
            foreach_mul_(own, self._mesh.grid.tensor / experts.size)

    def _add_replicated_gradients(self) -> None:
        """Give the tensor-parallel ranks the same gradients of the parameters that all hold.

        With sequence parallelism, the gradients of norms, learned positions and some biases cover
        only this rank's part of the sequence. Norms of heads, xIELU's weights, and keys and values
        that ranks share have gradients of this rank's heads or channels.
        """
        # A single rank has the complete gradients.
        if self._mesh.tensor_parallel.size == 1:
            return
        partial = []
        replicated = []
        for master in self._masters:
            gradient = master.weight.grad
            assert gradient is not None, "gradients are set before they are added up"
            if master.spec.partial_gradient:
                partial.append(gradient)
            elif not (master.spec.is_sharded or master.spec.by_expert):
                replicated.append(gradient)
        add_over_tensor_ranks(partial, replicated, self._mesh.tensor_parallel)

    def _add_tied_gradients(self) -> None:
        """Add up the gradients of the word embedding and its copy on the last stage.

        Each end has the gradient of its own use of the embedding. Both apply the sum, so they stay
        equal.
        """
        for master in self._tied:
            if master.weight.grad is not None and master.weight.grad.numel():
                with self._mesh.tensor_parallel.comm_timer():
                    dist.all_reduce(master.weight.grad, group=self._mesh.ends)

    def _reduce_step(self, loss: Tensor, vote: Vote | None) -> Tensor:
        """Return the mean loss, the squared gradient norm, the number of zeros, and the votes.

        They are those of the complete model and of all ranks, in fp64. One all-reduce sums all of
        them. The last one is the number of tokens that count, if they were counted. The norm is
        only right after the partial and tied gradients were added up.
        """
        counted = [m.weight.grad for m in self._list_counted() if m.weight.grad is not None]
        # An infinity in a replica is in the first rank's gradient too, which is counted.
        squares = compute_squared_norm(counted, loss.device)
        if self._count_zeros:
            zeros = count_zeros(counted, loss.device)
        else:
            zeros = torch.zeros_like(squares)
        own_votes = () if vote is None else vote()
        # A fill is one kernel. Making a tensor from the number would copy it from host memory.
        votes = [torch.full_like(squares, number) for number in own_votes]
        terms = [self._compute_loss_share(loss), squares, zeros, *votes]
        # It is the same on all ranks already, but the host reads all numbers in one copy.
        if self._counted_tokens is not None:
            terms.append(self._counted_tokens)
        return self._add_over_ranks(torch.stack(terms))

    def _compute_loss_share(self, loss: Tensor) -> Tensor:
        """Return this rank's term of the mean loss. The sum over all ranks is the mean.

        The loss is zero on ranks without the last stage. Tensor-parallel ranks have the same loss.
        """
        return loss.double() / (self._mesh.grid.weight_ranks * self._mesh.grid.tensor)

    def _is_counted(self, master: MasterParameter) -> bool:
        """Return whether this rank counts the parameter in sums and stores it in checkpoints.

        Exactly one rank does so for each element of the model. Among replicas it is the first rank.
        """
        if master.weight.numel() == 0 or master.spec.copy_of is not None:
            return False
        if master.spec.by_expert:
            experts = self._mesh.expert_parallel
            return experts is None or experts.sharding.copy == 0
        if self._mesh.sharding.copy != 0:
            return False
        return master.spec.is_sharded or self._mesh.coordinate.tensor == 0

    def _list_counted(self) -> list[MasterParameter]:
        return self._counted

    def _add_over_ranks(self, values: Tensor) -> Tensor:
        if self._mesh.grid.world_size > 1:
            with self._mesh.tensor_parallel.comm_timer():
                dist.all_reduce(values)
        return values

    def _refresh_model(self, *, copies: bool = True) -> None:
        """Copy the fp32 masters to the low-precision weights.

        FSDP2 casts its shards when it gathers them, so with FSDP2 there is nothing to copy. But an
        evaluation leaves weights gathered, and these are out of date.

        Args:
            copies: Whether the copies are out of date. The optimizer may have written them.
        """
        for stage in self._rank_stages:
            if stage.sharded is not None:
                stage.sharded.drop_gathered()
        copied = self._list_copied()
        if copied and copies:
            foreach_copy_([m.model_parameter.data for m in copied], [m.weight.data for m in copied])

    def _list_copied(self) -> list[MasterParameter]:
        """Return the masters of which the model has copies in low precision."""
        if self._mesh.shards_weights or self._dtype == torch.float32:
            return []
        return self._masters

    # -- state ------------------------------------------------------------------------------------

    def shards(self, *, optimizer: bool) -> list[TensorShard]:
        """Return the live state of this rank. See `Engine.shards`."""
        shards = []
        for master in self._masters:
            owner = self._is_counted(master)
            # `spec.shape` counts real rows only. Vocabulary padding is no part of a checkpoint.
            for piece in master.spec.locate_rows(master.offset[0], master.weight.shape[0]):
                offset = (piece.start, *master.offset[1:])
                rows = slice(piece.local, piece.local + piece.rows)
                for kind, tensor in self._get_state(master, optimizer=optimizer).items():
                    shards.append(
                        TensorShard(
                            kind, master.name, master.spec.shape, offset, tensor[rows], owner
                        )
                    )
        return shards + self._experts.list_shards()

    def _get_step_count(self) -> int:
        return self._optimizer.step_count

    def _set_step_count(self, count: int) -> None:
        self._optimizer.set_step_count(count)

    def _clear_moments(self) -> None:
        self._optimizer.reset()

    def _get_state(self, master: MasterParameter, *, optimizer: bool) -> dict[Kind, Tensor]:
        """Return the live tensors of a parameter: its weight, and with `optimizer` its states."""
        tensors: dict[Kind, Tensor] = {"weight": master.weight.data}
        if optimizer:
            for kind in self._optimizer.get_kinds(master):
                tensors[kind] = self._optimizer.get_moment(master, kind)
        return tensors

    def _list_replicas(self) -> list[tuple[dist.ProcessGroup | None, list[Replica]]]:
        of_experts = [m for m in self._masters if m.spec.by_expert]
        others = [m for m in self._masters if not m.spec.by_expert]
        replicated = [m for m in others if not m.spec.is_sharded]
        experts = self._mesh.expert_parallel
        return [
            (
                None if experts is None else experts.sharding.replicas,
                self._make_replicas(of_experts),
            ),
            self._experts.list_replicas(),
            (self._mesh.sharding.replicas, self._make_replicas(others)),
            (self._mesh.tensor_parallel.group, self._make_replicas(replicated)),
            (self._mesh.ends, self._make_replicas(self._tied)),
        ]

    def _make_replicas(self, masters: list[MasterParameter]) -> list[Replica]:
        return [
            Replica(m.name, kind, tensor)
            for m in masters
            for kind, tensor in self._get_state(m, optimizer=True).items()
        ]

    def compute_parameter_norm(self) -> float:
        """Return the norm of all weights of the model."""
        weights = [m.weight.data for m in self._list_counted()]
        squares = compute_squared_norm(weights, self._mesh.device)
        return math.sqrt(self._add_over_ranks(squares).item())

    def describe_choices(self) -> list[tuple[str, str, str]]:
        """Return the rows of the table printed at start. See `Engine.describe_choices`."""
        sharding = self._mesh.sharding
        rank = "data x context rank" if self._mesh.grid.context > 1 else "data-parallel rank"
        if sharding.size * sharding.copies == 1:
            shown = "none", "one data-parallel rank"
        else:
            if sharding.copies == 1:
                name = "FSDP"
            else:
                name = "DDP" if sharding.size == 1 else "HSDP"
            shown = (
                f"{name}, ZeRO {self._plan.config.parallel.zero_stage} (FSDP2)",
                f"{format_count(sharding.copies, 'copy', 'copies')} of the model, each on "
                f"{format_count(sharding.size, rank)}",
            )
        return [
            *self._list_kernels("torch.distributed.pipelining"),
            self._optimizer.description,
            ("sharding", *shown),
        ]


def _find_outcome(loss: float, norm: float, accept: Accept | None, *, empty: bool) -> StepOutcome:
    """Return whether a step is applied, or why it is dropped."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return StepOutcome.NOT_FINITE
    if empty:
        return StepOutcome.EMPTY
    if accept is not None and not accept(loss, norm):
        return StepOutcome.REJECTED
    return StepOutcome.APPLIED
