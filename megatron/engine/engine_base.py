"""What engines with the model of this package share, with rows of the table at the start.

The rows list the implementations in use and the reasons.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.base.plain_text import format_count
from megatron.config.kernels import SWITCHES
from megatron.data.batches import Microbatch
from megatron.engine.base import (
    PhaseTimers,
    StepOutcome,
    StepResult,
    build_inputs,
    skip_timing,
    skip_waiting,
)
from megatron.engine.invariants import InvariantChecker, Replica
from megatron.engine.loss_scale import LossScale
from megatron.engine.parallelize import RankStage, build_stages, require_compiler
from megatron.model.attention_kernels import (
    install_torch_order,
    pads_values,
    require_attention_kernels,
)
from megatron.model.execution import Execution
from megatron.model.experts.routing import BALANCE
from megatron.model.fused_operators import FusedOperators
from megatron.model.goldfish import find_loss_mask
from megatron.model.gpt import GPT, WORD_EMBEDDING
from megatron.model.init import Initialise, initialise
from megatron.model.inputs import Inputs, SampleLikelihoods
from megatron.model.loss import find_chunk_bytes
from megatron.model.norm import describe_norm
from megatron.model.packed_attention import require_packed_attention
from megatron.model.tally import Tally
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameter_spec import Init
from megatron.parallel.shard import TensorShard
from megatron.plan.run_plan import Plan

Row = tuple[str, str, str]
"""What is described, which implementation is in use, and why."""


class EngineBase(ABC):
    """The state and the methods that these engines share. An engine may do without it.

    See `Engine`.
    """

    reads_late = False
    """See `Engine`."""
    _uses_fsdp: ClassVar[bool]
    """Whether FSDP2 shards the stages. See `build_stages`."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        timers: PhaseTimers = skip_timing,
        before_update: Callable[[], None] = skip_waiting,
        initialise: Initialise = initialise,
        operators: FusedOperators | None = None,
    ) -> None:
        """Build this rank's stages and the engine around them, and initialise the weights.

        Args:
            plan: The plan of the run.
            mesh: This rank's mesh.
            timers: Called with the name of a phase to time it.
            before_update: Called before weights or moments change.
            initialise: Fills a shard of a parameter with its initial values.
            operators: The kernels that the model uses. By default it uses none.

        Raises:
            ConfigError: A package that the engine needs is not installed or refuses the settings.
        """
        self._plan = plan
        self._mesh = mesh
        self._timers = timers
        self._before_update = before_update
        self._initialise = initialise
        self._execution = replace(
            Execution.from_config(plan.config, dynamic_shapes=plan.curriculum is not None),
            operators=operators or FusedOperators(),
        )
        if self._execution.compile:
            require_compiler(mesh.device)
        self._dtype = self._execution.dtype or torch.float32
        if self._execution.pack_documents:
            require_packed_attention(mesh.device)
        if self._execution.attention_kernels:
            install_torch_order(mesh.device)
            require_attention_kernels(
                self._execution.attention_kernels,
                plan.shape,
                tensor_parallel_size=mesh.grid.tensor,
                dtype=self._dtype,
                device=mesh.device,
                by_document=plan.config.data.reset_attention_mask,
            )
        self._counted_tokens: Tensor | None = None
        """Tokens that count in the latest batch, on all ranks. None if they were not counted."""
        self._loss_scale: LossScale | None = None
        if plan.config.precision.fp16:
            self._loss_scale = LossScale(plan.config.precision)
        self._rank_stages: list[RankStage] = build_stages(
            plan, mesh, self._execution, use_fsdp=self._uses_fsdp
        )
        self.stages: Sequence[GPT] = [stage.model for stage in self._rank_stages]
        self._build()
        # It needs the shards, so it comes last.
        self._initialise_weights()

    @abstractmethod
    def _build(self) -> None:
        """Build what runs the stages and what updates the weights. The weights have no values."""

    @abstractmethod
    def _list_replicas(self) -> list[tuple[dist.ProcessGroup | None, list[Replica]]]:
        """Return the groups of ranks that replicate state, each with this rank's replicas."""

    def queue_batch(self, *arguments: Any, **options: Any) -> Any:
        """See `Engine.queue_batch`. Engines that cannot do it are not asked."""
        raise NotImplementedError

    @abstractmethod
    def _evaluate(self, inputs: list[Inputs]) -> float:
        """Run the forward passes of a global batch, and return its mean loss."""

    @abstractmethod
    def shards(self, *, optimizer: bool) -> list[TensorShard]:
        """Return the live state of this rank. See `Engine.shards`."""

    @abstractmethod
    def _get_step_count(self) -> int:
        """Return the number of steps in the moments."""

    @abstractmethod
    def _set_step_count(self, count: int) -> None:
        """Set the number of steps in the moments, after they were written into."""

    @abstractmethod
    def _clear_moments(self) -> None:
        """Set the moments to zero."""

    @abstractmethod
    def _refresh_model(self) -> None:
        """Copy the fp32 masters to the weights that the model computes with."""

    def _is_tied(self, global_name: str) -> bool:
        """Return whether the other end of the pipeline holds the parameter too."""
        untied = self._plan.config.model.untie_embeddings_and_output_weights
        return global_name == WORD_EMBEDDING and self._mesh.ends is not None and not untied

    def _initialise_weights(self) -> None:
        """Fill the weights with their initial values."""
        kinds = {
            spec.get_global_name(name): spec.init
            for stage in self._rank_stages
            for name, spec in stage.specs.items()
        }
        # Initialisation writes through the same shards as loading, so both see the same layout.
        for shard in self.shards(optimizer=False):
            kind = Init.ZERO if shard.name.endswith(BALANCE) else kinds[shard.name]
            self._initialise(
                shard.name,
                kind,
                shard.tensor,
                shard.global_shape,
                shard.offset,
                self._plan.shape,
                self._plan.config.batch.seed,
            )
        # DeepSpeed does not notice writes into its fp32 partitions, whose views the shards are.
        self._refresh_model()

    @contextmanager
    def _use_tally(self, tally: Tally | None) -> Iterator[None]:
        """Let this rank's stages add what they evaluate to `tally`."""
        for stage in self.stages:
            stage.tally = tally
        try:
            yield
        finally:
            for stage in self.stages:
                stage.tally = None

    def _build_inputs(
        self, microbatches: Sequence[Microbatch], iteration: int, *, training: bool
    ) -> list[Inputs]:
        """Return the inputs of a global batch, with the divisor of their losses.

        The runners average over microbatches, and over data-parallel ranks. The divisor is the mean
        count of a microbatch, so the result is the mean over all counted tokens. It stays on the
        device, so the host does not wait for it.
        """
        seed = self._plan.config.batch.seed
        if training and self._execution.draws_by_kernel:
            # The masks of these kernels then depend on nothing but the layout and the iteration.
            words = seed, iteration, self._mesh.rank
            torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))
        origin = seed, self._mesh.coordinate.data, self._mesh.grid.data
        inputs = build_inputs(microbatches, iteration, self._mesh.device, origin)
        # Without masks each microbatch has the same count, and no rank needs a message. This must
        # not depend on the data, because all ranks take part in the message.
        if not self._plan.counts_tokens_of_step(training=training):
            return inputs
        counted = self._count_tokens(inputs, training=training)
        if self._mesh.grid.world_size > 1:
            with self._mesh.tensor_parallel.comm_timer():
                dist.all_reduce(counted)
        # All ranks that share a microbatch have counted it, so the mean over all ranks is right.
        # If no token counts, the lower limit makes the loss and its gradient 0.
        shares = len(inputs) * self._mesh.grid.world_size
        divisor = (counted.clamp(min=1.0) / shares).float()
        self._counted_tokens = counted
        return [replace(each, loss_divisor=divisor) for each in inputs]

    def _count_tokens(self, inputs: Sequence[Inputs], *, training: bool) -> Tensor:
        """Return the number of tokens that count in this rank's microbatches, a scalar in fp64."""
        counted = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for each in inputs:
            mask = find_loss_mask(each, self._plan.config.loss, training=training)
            if mask is None:
                counted += each.tokens.numel()
            else:
                counted += mask.sum(dtype=torch.float64)
        return counted

    def _get_scale(self) -> float:
        """Return the factor on the loss of the next step, which is 1 without fp16."""
        if self._loss_scale is None:
            return 1.0
        return self._loss_scale.scale

    def _finish_step(
        self, loss: float, grad_norm: float, outcome: StepOutcome, num_zeros: int | None = None
    ) -> StepResult:
        """Update the loss scale after a step, and return the result of the step.

        Args:
            loss: See `StepResult`.
            grad_norm: See `StepResult`.
            outcome: See `StepResult`, but NOT_FINITE also in the search for a loss scale.
            num_zeros: See `StepResult`.
        """
        used_scale = None
        if self._loss_scale is not None:
            used_scale = self._loss_scale.scale
        # A rejected or empty step had no overflow, and must leave all state as it was.
        ended = outcome in (StepOutcome.APPLIED, StepOutcome.NOT_FINITE)
        if self._loss_scale is not None and ended:
            is_overflow = self._loss_scale.update_after_step(
                applied=outcome is StepOutcome.APPLIED, loss_is_finite=math.isfinite(loss)
            )
            if is_overflow:
                outcome = StepOutcome.OVERFLOW
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            outcome=outcome,
            num_zeros=num_zeros,
            loss_scale=used_scale,
        )

    def eval_batch(self, microbatches: Sequence[Microbatch], tally: Tally | None = None) -> float:
        """Return the mean loss of one global batch. See `Engine.eval_batch`."""
        with self._use_tally(tally):
            return self._evaluate(self._build_inputs(microbatches, 0, training=False))

    def score_batch(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return how likely the labels of each sample are. See `Engine.score_batch`."""
        inputs = [
            replace(each, likelihoods=SampleLikelihoods())
            for each in build_inputs(microbatches, 0, self._mesh.device)
        ]
        self._evaluate(inputs)
        samples = sum(len(each.tokens) for each in inputs)
        grid = self._mesh.grid
        found = torch.zeros((grid.data, samples, 2), dtype=torch.float64, device=self._mesh.device)
        # Exactly one rank of each data-parallel replica fills its rows: the first tensor-parallel
        # rank of the last stage. All others add zeros, so the sum changes no number. With context
        # parallelism, each of the ranks there has the sum over its positions.
        if self._mesh.coordinate.tensor == 0 and any(stage.head for stage in self.stages):
            found[self._mesh.coordinate.data] = torch.cat(
                [_stack_columns(each.likelihoods) for each in inputs]
            )
        if grid.world_size > 1:
            dist.all_reduce(found)
        # A sample is predicted greedily if it is on each of its ranks.
        found[..., 1] = (found[..., 1] == grid.context).double()
        return found.flatten(0, 1).cpu()

    def get_scalars(self) -> dict[str, Any]:
        """Return the optimizer's step count and loss scale. See `Engine.get_scalars`."""
        scalars: dict[str, Any] = {"optimizer_step": self._get_step_count()}
        if self._loss_scale is not None:
            scalars["loss_scale"] = self._loss_scale.state()
        return scalars

    def finish_load(self, scalars: dict[str, Any] | None) -> None:
        """Update what depends on the loaded shards. See `Engine.finish_load`."""
        if scalars is None:
            self._clear_moments()
            self._set_step_count(0)
        else:
            self._set_step_count(int(scalars["optimizer_step"]))
            if self._loss_scale is not None and "loss_scale" in scalars:
                self._loss_scale.load(scalars["loss_scale"])
        self._refresh_model()

    def check_invariants(self, *, repair: bool, iteration: int, last_good: int | None) -> list[str]:
        """Compare replicated state over the ranks. See `Engine.check_invariants`."""
        # A repair changes weights that a save may still be copying.
        if repair:
            self._before_update()
        if self._mesh.grid.world_size == 1:
            return []
        repaired = InvariantChecker(self._list_replicas(), self._mesh).check(
            self.get_scalars(), repair=repair, iteration=iteration, last_good=last_good
        )
        if repaired:
            self._refresh_model()
        return repaired

    def _list_kernels(self, pipelined: str) -> list[Row]:
        """Return the rows of `Engine.describe_choices` that do not depend on the engine.

        Args:
            pipelined: The name of the library that runs the pipeline schedule.
        """
        plan, mesh, execution = self._plan, self._mesh, self._execution
        rows = [
            ("attention", *_describe_attention(plan, mesh, execution)),
            ("norm", *describe_norm(plan.config.model, mesh.device.type)),
            ("loss", "fused projection and cross entropy", "fp32 logits are not kept"),
            ("precision", *_describe_precision(plan, execution, self._loss_scale)),
        ]
        if "gated_delta_net" in plan.config.model.attention_kinds:
            how = ("PyTorch's operators", "GPUs have kernels with pip install 'megatron-3d[fla]'")
            if execution.operators.delta_rule is not None:
                how = ("kernels of fla-core", "it is installed")
            rows.append(("gated delta rule", *how))
        rows += _describe_fused_kernels(plan, mesh, execution)
        if "cuda_graph" in plan.kernel_reasons:
            what = {"on": "forward and backward pass"}.get(plan.config.kernels.cuda_graph, "none")
            rows.append(("CUDA graph", what, plan.kernel_reasons["cuda_graph"]))
        if mesh.grid.context > 1:
            rows.append(("sequence", *_describe_context(plan, mesh)))
        if mesh.grid.pipeline > 1:
            rows.append(("pipeline", *_describe_pipeline(plan, mesh, pipelined)))
        if execution.recomputed_part or execution.recompute_attention_core:
            rows.append(("recomputation", *_describe_recomputation(execution)))
        if execution.compile:
            graphs = "all layers share their graphs"
            if execution.dynamic_shapes:
                graphs = "any sequence length"
            why = f"{graphs}; the first steps wait for compilation"
            rows.append(("compiler", "torch.compile, each layer", why))
        return rows


def _stack_columns(likelihoods: SampleLikelihoods | None) -> Tensor:
    """Return the likelihoods of a microbatch as float64[b, 2]."""
    assert likelihoods is not None, "the inputs ask for likelihoods"
    assert likelihoods.log_likelihood is not None, "the last stage fills them"
    assert likelihoods.greedy is not None, "the last stage fills both"
    return torch.stack((likelihoods.log_likelihood, likelihoods.greedy.double()), dim=1)


def _describe_context(plan: Plan, mesh: Mesh) -> tuple[str, str]:
    ranks = format_count(mesh.grid.context, "context-parallel rank")
    how = "gather keys and values"
    if plan.config.parallel.exchanges_heads:
        how = "exchange positions for heads"
    compiled = "; attention is not compiled" if plan.config.kernels.use_torch_compile else ""
    return f"{ranks} share each sample", f"in attention they {how}{compiled}"


def _describe_attention(plan: Plan, mesh: Mesh, execution: Execution) -> tuple[str, str]:
    config = plan.config.model
    # torch selects the kernel of SDPA at run time. The rows only name the conditions that exclude
    # its fused kernels.
    how, why = "SDPA with a bias", "layers with a sliding window need one"
    if plan.shape.has_alibi:
        why = "ALiBi needs one"
    elif config.sliding_window is None:
        how, why = "SDPA", "causal, no bias; torch uses its fused kernel where it has one"
    kernels, packs, shape = execution.attention_kernels, execution.pack_documents, plan.shape
    padded = ""
    if shape.value_dim < shape.head_dim and (packs or pads_values(kernels, mesh.device)):
        padded = f", values padded to {shape.head_dim} channels"
    how += padded
    if config.attention_dropout > 0 and not execution.draws_by_kernel:
        masks = "masks of --attention-dropout that are the same on every layout need scores"
        megabytes = find_chunk_bytes(on_gpu=mesh.device.type == "cuda") >> 20
        how = "products and softmax, some queries at a time"
        why = (
            f"{masks}: up to {megabytes} MiB of them in fp32, each block computed twice; "
            "--attention-dropout 0 has a fused kernel"
        )
    elif kernels:
        # The conditions above apply to torch's own choice.
        reason = plan.kernel_reasons.get("attention_backend", "--attention-backend")
        why = f"the first possible kernel of: {' '.join(kernels)}; {reason}"
    if packs:
        if mesh.device.type == "cpu":
            return "document by document", "a CPU has no kernel for all documents of a microbatch"
        return f"torch's varlen_attn{padded}", "one call for all documents of a microbatch"
    if plan.config.data.reset_attention_mask:
        if execution.compile:
            why += "; attention is not compiled"
        how += ", document by document"
    return how, why


def _describe_precision(
    plan: Plan, execution: Execution, loss_scale: LossScale | None
) -> tuple[str, str]:
    stream = ""
    if execution.fp32_residual:
        stream = ", residual stream fp32"
    scale = ""
    if loss_scale is not None:
        scale = f"; loss scale {loss_scale.describe()}"
    dtype = str(execution.dtype or torch.float32).removeprefix("torch.")
    first, second = plan.config.optimizer.exp_avg_dtype, plan.config.optimizer.exp_avg_sq_dtype
    in_fp32 = "masters, moments and accumulation in fp32"
    if first != second:
        in_fp32 = f"masters and accumulation in fp32, first moments in {first}, second in {second}"
    elif first != "fp32":
        in_fp32 = f"masters and accumulation in fp32, moments in {first}"
    return dtype + stream, f"{in_fp32}{scale}"


def _describe_fused_kernels(plan: Plan, mesh: Mesh, execution: Execution) -> list[Row]:
    """Return a row for each kernel that may be on or off, or one row if none is on."""
    reasons = {name: why for name, why in plan.kernel_reasons.items() if name in SWITCHES}
    if reasons and not any(getattr(plan.config.kernels, name) for name in reasons):
        # Most often, all of them have the same reason.
        return [("fused kernels", "none", ", ".join(dict.fromkeys(reasons.values())))]
    rows = []
    for name, reason in reasons.items():
        choice, note = "PyTorch's operators", ""
        if getattr(plan.config.kernels, name):
            choice, note = _name_kernel(name, mesh, execution)
        rows.append((SWITCHES[name], choice, reason + note))
    return rows


def _name_kernel(name: str, mesh: Mesh, execution: Execution) -> tuple[str, str]:
    """Return what computes a kernel that is on, and a note to its reason."""
    if name == "gradient_accumulation_fusion":
        if mesh.device.type == "cpu":
            note = "; a CPU has no product of 16 bits with a result in fp32"
            return "products of fp32 copies", note
        return "products add to fp32", ""
    if execution.operators == FusedOperators():
        return "PyTorch's operators", "; a CPU has no kernels"
    return "Triton", ""


def _describe_pipeline(plan: Plan, mesh: Mesh, pipelined: str) -> tuple[str, str]:
    ranks = mesh.grid.pipeline
    stages = plan.stages
    layers = " ".join(str(len(stage.layers)) for stage in stages)
    virtual = ""
    # A rank holds more than one stage only with virtual stages (interleaved 1F1B).
    if len(stages) > ranks:
        virtual = f", {len(stages) // ranks} stages on each"
    return f"{ranks} ranks{virtual}, {pipelined}", f"layers of the stages: {layers}"


def _describe_recomputation(execution: Execution) -> tuple[str, str]:
    """Return the row of activation recomputation, if something is recomputed."""
    part = execution.recomputed_part
    core = execution.recompute_attention_core
    layers = f"{part} of the layers"
    if part == 1:
        layers = "every layer"
    if part and core and part < 1:
        return (
            f"{layers}, attention core of the others",
            "keeps the inputs of recomputed layers, and queries, keys and values of the others",
        )
    if part:
        return layers, "keeps their inputs only"
    return "attention core", "keeps queries, keys and values, and no intermediate results"
