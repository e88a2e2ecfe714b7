"""Flags of Megatron-LM and Megatron-DeepSpeed scripts that are spelled otherwise here, change nothing, or cannot be honoured.

A flag that is not in this table is a field of the configuration under the same name, or unknown. Invariant: a renamed flag does
exactly what it did there; a harmless one changes no number; anything else is refused with the way out.
Source: the argument parsers of Megatron-LM and of BigScience's and Microsoft's Megatron-DeepSpeed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["renamed", "harmless", "refused"]


@dataclass(frozen=True)
class Row:
    """One flag, or one value of it."""

    flag: str
    kind: Kind
    arity: int
    """Number of values that the flag takes there."""
    reason: str = ""
    """Why it is harmless or refused, in words that go on after a colon; for a renamed one what else is to know."""
    to: tuple[str, ...] = ()
    """For a renamed one: flag and fixed values here. The given values follow, unless `only` picked them."""
    only: tuple[str, ...] = ()
    """The row holds for these values only; the flag's other values mean what they mean here, or are errors."""
    needs: str = ""
    """The row holds only if this field is given too."""


def _renamed(flag: str, *to: str, arity: int = 0, only: tuple[str, ...] = (), reason: str = "") -> Row:
    return Row(flag, "renamed", arity, reason, to, only)


def _harmless(flag: str, reason: str, arity: int = 0, only: tuple[str, ...] = (), needs: str = "") -> Row:
    return Row(flag, "harmless", arity, reason, (), only, needs)


def _refused(flag: str, reason: str, arity: int = 0) -> Row:
    return Row(flag, "refused", arity, reason)


_SDPA = "attention runs in PyTorch's scaled_dot_product_attention, which picks its kernel itself"
_KERNELS = "the kernels in use are chosen, and printed, at the start"
_COUNTERS = "randomness is derived from the seed and the counters, so no random state is stored"
_MEMORY = "it changes memory only, and there is no such switch here"
_OVERLAP = "communication overlaps computation wherever the engine can do so"
_FP32 = "it is always so here"
_TENSORBOARD = "TensorBoard gets no such points here"
_SCORES = "the scaling by layer cancels out in exact arithmetic, and attention scores are held in fp32, where none overflows"

TABLE: tuple[Row, ...] = (
    # model
    _renamed("--swiglu", "--glu-activation", "swiglu"),
    _renamed("--disable-bias-linear", "--no-add-bias-linear"),
    _renamed("--norm-epsilon", "--layernorm-epsilon", arity=1),
    _renamed("--encoder-seq-length", "--seq-length", arity=1),
    _renamed("--use-rotary-position-embeddings", "--position-embedding-type", "rotary"),
    _renamed("--position-embedding-type", "--position-embedding-type", "rotary", arity=1, only=("rope",)),
    _renamed("--position-embedding-type", "--position-embedding-type", "absolute", arity=1, only=("learned_absolute",)),
    _harmless("--group-query-attention", "the number of groups alone turns it on", needs="model.num_query_groups"),
    _harmless(
        "--no-position-embedding",
        "rotary and ALiBi models have no table of positions anyway",
        needs="model.position_embedding_type",
    ),
    _harmless("--no-query-key-layer-scaling", _SCORES),
    _harmless("--apply-query-key-layer-scaling", _SCORES),
    _harmless("--attention-softmax-in-fp32", _SDPA),
    _harmless("--use-cpu-initialization", "every weight is initialised from the seed and its name, the same on any device"),
    _refused("--openai-gelu", "GELU in its tanh form is the default: take out this flag and --no-bias-gelu-fusion"),
    _refused("--apply-residual-connection-post-layernorm", "residuals are taken before the norm (pre-LN), as in GPT-2"),
    _refused("--init-method-xavier-uniform", "weights are drawn from a normal distribution; see --init-method-std"),
    _refused("--num-experts", "there are no mixtures of experts", arity=1),
    # kernels
    _harmless("--no-masked-softmax-fusion", _SDPA),
    _harmless("--use-flash-attn", _SDPA),
    _harmless("--use-flash-attn-v2", _SDPA),
    _harmless("--use-flash-attn-triton", _SDPA),
    _harmless("--attention-backend", _SDPA, arity=1),
    _harmless("--abort-on-unmet-fused-kernel-constraints", _KERNELS),
    _harmless("--no-bias-dropout-fusion", _KERNELS),
    _harmless("--no-gradient-accumulation-fusion", _KERNELS),
    _harmless("--no-persist-layer-norm", _KERNELS),
    _harmless("--transformer-impl", _KERNELS, arity=1),
    _harmless("--use-mcore-models", _KERNELS),
    # batches and data
    _renamed("--batch-size", "--micro-batch-size", arity=1, reason="the batch of one rank, as in old scripts"),
    _harmless("--dataloader-type", "samples come in the order that the seed gives", arity=1, only=("single",)),
    _harmless("--mmap-warmup", "the operating system reads ahead"),
    _harmless("--vocab-extra-ids", "there are no extra ids", arity=1, only=("0",)),
    _renamed("--tokenizer-type", "--tokenizer-type", "PretrainedFromHF", arity=1, only=("HuggingFaceTokenizer", "HFTokenizer")),
    _renamed("--tokenizer-model", "--tokenizer-name-or-path", arity=1),
    _refused(
        "--loss-on-targets-only", "a sample is one text, without inputs and targets apart; --eod-mask-loss masks ends of documents"
    ),
    # optimizer and precision
    _renamed("--override-opt-param-scheduler", "--override-lr-scheduler"),
    _renamed("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-lr-scheduler"),
    _renamed("--use-distributed-optimizer", "--zero-stage", "1"),
    _harmless("--accumulate-allreduce-grads-in-fp32", _FP32),
    _harmless("--fp16-lm-cross-entropy", "the loss is computed in fp32"),
    _refused(
        "--warmup", "it is long deprecated there: say --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples", arity=1
    ),
    _refused("--use-bnb-optimizer", "there is no 8-bit AdamW: take it out and add --embed-layernorm, which it implied"),
    _refused("--cpu-optimizer", "the optimizer runs where the parameters are; --zero-stage shards its states"),
    # parallelism
    _renamed("--model-parallel-size", "--tensor-model-parallel-size", arity=1),
    _renamed("--no-pipeline-parallel", "--pipeline-model-parallel-size", "1"),
    _harmless("--DDP-impl", "data parallelism has one implementation", arity=1, only=("local", "torch")),
    _harmless("--lazy-mpu-init", "process groups are built once, by the entry point", arity=1),
    _harmless("--use-contiguous-buffers-in-ddp", _MEMORY),
    _harmless("--no-contiguous-buffers-in-local-ddp", _MEMORY),
    _harmless("--no-scatter-gather-tensors-in-pipeline", _OVERLAP),
    _harmless("--no-async-tensor-model-parallel-allreduce", _OVERLAP),
    _harmless("--overlap-grad-reduce", _OVERLAP),
    _harmless("--overlap-param-gather", _OVERLAP),
    _harmless("--context-parallel-size", "there is no context parallelism", arity=1, only=("1",)),
    _harmless("--expert-model-parallel-size", "there are no mixtures of experts", arity=1, only=("1",)),
    # recomputation
    _renamed("--recompute-granularity", "--checkpoint-activations", arity=1, only=("full",)),
    _renamed("--recompute-granularity", "--recompute-attention-core", arity=1, only=("selective",)),
    _renamed("--recompute-activations", "--recompute-attention-core"),
    _harmless("--recompute-method", "each layer is recomputed by itself", arity=1, only=("uniform",)),
    _harmless("--recompute-num-layers", "each layer is recomputed by itself", arity=1, only=("1",)),
    _harmless("--checkpoint-num-layers", "each layer is recomputed by itself", arity=1, only=("1",)),
    _harmless("--distribute-checkpointed-activations", _MEMORY),
    _harmless("--partition-activations", _MEMORY),
    _harmless("--contigious-checkpointing", _MEMORY),
    _harmless("--checkpoint-in-cpu", _MEMORY),
    _harmless("--synchronize-each-layer", _MEMORY),
    # stopping and checkpoints
    _renamed("--eval-only", "--eval-only", arity=1, only=("True", "true", "1"), reason="a bare flag here"),
    _renamed("--exit-on-missing-checkpoint", "--require-load"),
    _harmless("--no-load-rng", _COUNTERS),
    _harmless("--no-save-rng", _COUNTERS),
    _harmless("--universal-checkpoint", "every checkpoint loads on any layout"),
    _refused("--adlr-autoresume", "it belongs to one cluster: requeue by --exit-duration-in-mins or SIGTERM"),
    # logging
    _renamed("--no-log-learnig-rate-to-tensorboard", "--no-log-learning-rate-to-tensorboard"),
    _harmless("--log-level", "there is one level of messages", arity=1),
    _harmless("--log-level-replica", "there is one level of messages", arity=1),
    _harmless("--log-throughput", "the log line always has it"),
    _harmless("--timing-log-level", "the step's parts are always timed", arity=1),
    _harmless("--log-world-size-to-tensorboard", _TENSORBOARD),
    _harmless("--log-memory-to-tensorboard", _TENSORBOARD),
    _harmless("--log-optimizer-states-to-tensorboard", _TENSORBOARD),
    _harmless("--exit-signal-handler", "SIGTERM always saves and leaves"),
)


def rows(flag: str) -> list[Row]:
    """The rows of a flag, spelled with hyphens; several where its values differ in meaning."""
    return [row for row in TABLE if row.flag == flag]


def find_row(flag: str, values: Sequence[str]) -> Row | None:
    """The row that holds for a flag with these values."""
    return next((row for row in rows(flag) if not row.only or (len(values) == 1 and values[0] in row.only)), None)
