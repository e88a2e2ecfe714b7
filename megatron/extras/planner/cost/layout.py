"""What is predicted: a step of a model on a layout of ranks, and the software that runs on it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from megatron.config.optimizer import OptimizerConfig
from megatron.extras.planner.cost.hardware import Hardware
from megatron.model.shape import ModelShape
from megatron.schedule.pipeline_schedule import PipelineSchedule, choose_schedule

Recompute = Literal["none", "selective", "operators", "full"]


@dataclass(frozen=True)
class RankLayout:
    """How a model and its batch are divided over the ranks.

    Ranks are numbered as in the trainer: tensor-parallel ranks are neighbours, then come
    context-parallel, data-parallel and pipeline ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    """Ranks that share each sequence. Each of them gathers the keys and values of the others."""
    exchange_heads: bool = False
    """Whether context-parallel ranks exchange positions for heads instead (`a2a`)."""
    micro_batch: int = 1
    """Samples of a microbatch."""
    virtual: int = 1
    """Virtual stages of a pipeline rank."""
    recompute: Recompute = "none"
    """full keeps only the inputs of layers, and selective leaves out the attention core. operators
    keeps the results of attention and of every second matrix product, as torchtitan does."""
    recomputed_share: Fraction = Fraction(1)
    """Share of the layers that full recomputation applies to."""
    sequence_parallel: bool = False
    zero_stage: int = 1
    shard: int | None = None
    """Data x context ranks that share a copy of the model. Default: all of them."""
    partition: str = "uniform"
    """The value of --pp-partition-method."""
    partition_inputs: bool = False
    """Shard the inputs that full recomputation keeps over the tensor-parallel ranks."""
    host_inputs: bool = False
    """Keep these inputs in host memory. Only the memory of this trainer is counted so."""
    expert: int | None = None
    """Tensor x context x data ranks that divide the experts of a layer. None: no experts."""
    imbalance: float = 1.0
    """Rows that the experts of the fullest rank get, in multiples of the mean of all ranks."""

    def keep(self, *names: str) -> "RankLayout":
        """Return a layout with these fields, and all others as by default.

        It is a key of a cache for what only these fields matter to.
        """
        return RankLayout(**{name: getattr(self, name) for name in names})

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the model. Context-parallel ranks hold the same weights."""
        if self.zero_stage == 0:
            return 1
        return self.shard or self.data * self.context

    @property
    def copies(self) -> int:
        """Number of copies of the model."""
        return self.data * self.context // self.shard_size

    @property
    def expert_shards(self) -> int:
        """Ranks that share the experts of a rank, in a copy of the model.

        The rule is that of `megatron.parallel.mesh`. It is 1 without experts.
        """
        if self.expert is None:
            return 1
        return max(1, self.shard_size * self.tensor // self.expert)

    @property
    def expert_copies(self) -> int:
        """Number of copies of the experts."""
        return self.tensor * self.context * self.data // (self.expert or 1) // self.expert_shards

    @property
    def layers_recomputed(self) -> Fraction:
        """Share of the layers that are recomputed completely."""
        if self.recompute == "full":
            return self.recomputed_share
        return Fraction(0)

    def describe(self) -> str:
        """Return a short text, such as 'TP 4 PP 12 DP 8 micro-batch 2 full recomputation'."""
        parts = [f"TP {self.tensor} PP {self.pipeline} DP {self.data}"]
        if self.context > 1:
            parts.append(f"CP {self.context}{' a2a' if self.exchange_heads else ''}")
        if self.expert is not None:
            parts.append(f"EP {self.expert}")
        parts.append(f"micro-batch {self.micro_batch}")
        if self.virtual > 1:
            parts.append(f"{self.virtual} virtual stages")
        if self.recompute == "full" and self.recomputed_share != 1:
            parts.append(f"{self.recomputed_share} recomputed")
        elif self.recompute != "none":
            parts.append(f"{self.recompute} recomputation")
        if self.sequence_parallel:
            parts.append("sequence-parallel")
        parts.append(f"ZeRO {self.zero_stage}")
        if self.copies > 1 and self.zero_stage:
            parts.append(f"on {self.shard_size}")
        return " ".join(parts)


@dataclass(frozen=True)
class Overhead:
    """Memory of a device beside the tensors."""

    allocator: float = 1.0
    """Reserved memory relative to the tensors in it."""
    fixed_gib: float = 1.5
    """Memory of the device's context, its kernels and the libraries."""

    def estimate_bytes(self, tensors: float) -> float:
        """Return the bytes that `tensors` bytes of tensors need in addition."""
        return (self.allocator - 1) * tensors + self.fixed_gib * 2**30


@dataclass(frozen=True)
class Float8:
    """How a trainer multiplies in float8 in transformer layers. `cost.float8` has the formulas."""

    layers: range | None = None
    """Numbers of the transformer layers. Default: all of them."""
    rowwise: bool = False
    """Whether each token and each row of a weight has a scale. The product for a weight's gradient
    is not in float8 then."""
    rounding: Callable[..., Any] | None = None
    """Another formula for what a layer rounds. None: it is that of this trainer (`cost.float8`)."""
    shares_scales: bool = True
    """Whether ranks exchange the largest values of tensors that they share."""

    def covers(self, layer: int) -> bool:
        """Return whether the products of a transformer layer are in float8."""
        return self.layers is None or layer in self.layers


@dataclass(frozen=True)
class Software:
    """How a trainer uses the devices.

    These are properties that its documentation states, apart from `contention`, `overhead` and the
    logit's bytes, which are fitted.
    """

    name: str
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks also share what lies between the matrix products."""
    flash: bool = True
    """Attention has a flash kernel, so scores are never in memory. Without one, this trainer has
    the kernel that torch chooses (`cost.tensors.choose_kernel`)."""
    pointwise: float = 1.0
    """Memory traffic of pointwise operations relative to fused kernels."""
    step_gap: float = 0.0
    """Seconds of a step in which no kernel runs, as between two steps."""
    compiled: bool = False
    """Whether layers are compiled. Only this trainer uses it."""
    cudnn: bool = False
    """Whether cuDNN's kernel is the first choice for attention. Only this trainer uses it."""
    pads_products: bool = False
    """Whether products with sizes that are no multiples of 8 are padded."""
    hidden_data: float = 0.0
    """Share of the last backward pass of a step during which gradients can be sent, and of the
    first forward pass during which parameters can be gathered."""
    contention: float = 0.0
    """Seconds that computation loses for each second of communication that overlaps with it. Both
    use the memory and the multiprocessors."""
    hidden_pipeline: bool = False
    """Whether ranks compute while activations are sent between stages."""
    gradient_bytes: int = 4
    """Bytes of a gradient as data-parallel ranks send it."""
    dropout: bool = True
    """Whether the layers have dropout. Other trainers write masks for it."""
    attends_in_blocks: bool = False
    """Whether attention has dropout whose masks are the same on every layout. It is computed for
    some queries at a time, without a kernel."""
    half: bool = True
    """Whether it computes in bf16 or fp16. Otherwise in fp32, at half the rate or less."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and the precision of its moments."""
    fp16: bool = False
    """Whether the half precision is fp16, in which some gradients are in fp32."""
    float8: Float8 | None = None
    """How products of transformer layers are in float8, or None if they are not."""
    fp32_residual: bool = False
    """Whether the residual stream is in fp32."""
    kept_operators: tuple[str, ...] = ()
    """Operators whose results full recomputation keeps: matmul, attention or both. Only the memory
    model of this trainer uses it."""
    fused_gradients: bool = False
    """Whether matrix products add to the weights' gradients in fp32. Only this trainer uses it."""
    kept_gradients: bool = False
    """Whether the memory of gradients is kept from step to step, because a CUDA graph writes it and
    eager passes run beside it. Only this trainer uses it."""
    fused_rotation: bool = False
    """Whether one kernel rotates and divides the projection. Only this trainer uses it."""
    fused_gate: bool = False
    """Whether one kernel computes the product in a gated MLP. Only this trainer uses it."""
    fused_loss: bool = False
    """Whether the loss has kernels of its own. Only this trainer uses it."""
    fused_update: bool = False
    """Whether one kernel updates the weights and writes their copies. Only this trainer uses it."""
    logit_bytes: int = 56
    """Memory traffic of the loss and its backward pass for each logit."""
    overhead: Overhead = Overhead()
    memory: Callable[..., Any] | None = None
    """Another formula for the parts of a rank's memory, which returns a `cost.peak.StepPoint`.
    None: they are counted tensor by tensor, as this trainer allocates them (`cost.tensors`)."""

    times: tuple[tuple[str, Any], ...] = ()
    """Kinds of MLP with other classes for the times of their layers than `cost.layers` has."""

    @property
    def counts_tensors(self) -> bool:
        """Whether this is the trainer itself, whose tensors are known. Others have formulas."""
        return self.memory is None


_OPERATORS = 1.45
"""Time of a byte in PyTorch's operators of this trainer, relative to a copy. Fitted on steps of a
7B. Norms and sums of equal types have numbers of their own (`cost.layers`)."""

# SDPA, FSDP2 and torch.distributed.pipelining. What overlaps is as in other trainers with FSDP. A
# trace of a 1.3B has the gap, and the bytes of a logit are 44.
TRAINER = Software(
    "trainer",
    pointwise=_OPERATORS,
    step_gap=6e-3,
    pads_products=True,
    logit_bytes=round(44 * _OPERATORS),
    hidden_data=1.0,
    contention=0.15,
    hidden_pipeline=True,
)
"""This trainer."""


@dataclass(frozen=True)
class StepJob:
    """A step to predict."""

    shape: ModelShape
    layout: RankLayout
    batch_size: int
    """Samples of the global batch."""
    software: Software
    hardware: Hardware
    seq_length: int | None = None
    """Tokens of a sample. Default: that of `shape`."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * (self.seq_length or self.shape.config.seq_length)

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The schedule of the pipeline."""
        layout = self.layout
        microbatches = max(1, self.batch_size // (layout.data * layout.micro_batch))
        return choose_schedule(microbatches, layout.pipeline, layout.virtual)
