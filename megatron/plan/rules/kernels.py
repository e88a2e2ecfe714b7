"""Rules about the choice of kernels, and about products in float8."""

from collections.abc import Iterator

from megatron.config.fields import ConfigWithOrigin
from megatron.model.shape import ModelShape
from megatron.plan.kernel_choice import find_graph_obstacle
from megatron.plan.rules.finding import Finding, PlanContext, error, warning


def check_float8(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that float8 has a recipe, results in bf16, and at least one layer."""
    precision = settings.config.precision
    if precision.fp8_format is None:
        return
    flag = settings.describe("precision.fp8_format")
    if precision.fp8_recipe is None:
        yield error(
            f"{flag} needs --fp8-recipe: without it, Megatron-LM takes scales from earlier steps "
            "(delayed), which is not supported; add --fp8-recipe tensorwise."
        )
    if precision.fp16:
        yield error(f"{flag} cannot be combined with --fp16: results are in bf16; use --bf16.")
    elif not (precision.bf16 or precision.fp8_emulate):
        yield error(f"{flag} needs --bf16: results of float8 products are in bf16; add --bf16.")
    if settings.config.parallel.deepspeed:
        yield error(
            f"{flag} cannot be combined with --deepspeed: float8 runs in the native engine only; "
            "give one of them."
        )
    left_out = precision.num_layers_at_start_in_bf16 + precision.num_layers_at_end_in_bf16
    layers = settings.config.model.num_layers
    if precision.first_last_layers_bf16 and left_out >= layers:
        counts = settings.describe(
            "precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16"
        )
        yield error(
            f"{counts} leave none of {layers} layers for {flag}; give smaller numbers, or leave "
            f"out {flag}."
        )


def warn_float8_after_the_end(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn if the run ends before float8 starts."""
    iterations = settings.config.batch.train_iters
    start = settings.config.precision.fp8_start_iteration
    if settings.config.precision.fp8_format is None or iterations is None:
        return
    if start > iterations:
        yield warning(
            f"{settings.describe('precision.fp8_start_iteration')} is after the last iteration "
            f"({iterations}), so no iteration is in float8."
        )


_VARLEN_HEAD_MULTIPLE = 8
_VARLEN_LARGEST_HEAD = 256
"""Widths of a head that FlashAttention-2 has kernels for."""


def check_attention_backend(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check the list of --attention-backend, and that no other flag replaces its kernels."""
    names = settings.config.kernels.attention_backend
    asked = settings.describe("kernels.attention_backend")
    if not names:
        yield error(f"{asked} needs at least one kernel, or auto.")
    if len(set(names)) < len(names):
        yield error(f"{asked} names a kernel twice; name each kernel once.")
    for alone in ("auto", "by-gpu"):
        if alone in names and len(names) > 1:
            yield error(
                f"{asked}: {alone} is a choice of its own; leave out {alone} or the others."
            )
    if "fused" in names and settings.config.kernels.deterministic_mode:
        yield error(
            f"{asked} cannot be combined with --deterministic-mode: the backward pass of fused "
            "(cuDNN) does not repeat bit for bit; leave out fused, as in flash efficient unfused."
        )
    if "unfused" in names[:-1]:
        yield error(
            f"{asked}: unfused computes everything, so the kernels after it would never be used; "
            "put it last."
        )
    if settings.config.kernels.use_torch_compile and names == ("unfused",):
        yield error(
            f"{asked} cannot be combined with --use-torch-compile, which may replace unfused "
            "attention by another kernel; give one of them."
        )
    if settings.config.kernels.use_varlen_attention and names not in (("auto",), ("by-gpu",)):
        yield error(
            f"{asked} cannot be combined with --use-varlen-attention, which has a kernel of its "
            "own; give one of them."
        )


def warn_about_masks_of_kernels(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn if attention kernels draw masks of their own."""
    config = settings.config
    if config.kernels.names_fused_attention and config.model.attention_dropout > 0:
        yield warning(
            f"{settings.describe('kernels.attention_backend')}: its kernels draw the masks of "
            f"{settings.describe('model.attention_dropout')} by themselves, so numbers depend on "
            "the layout. Leave it out for the same masks on every layout, which is slower."
        )


def check_varlen_attention(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the kernel of --use-varlen-attention can compute this model."""
    if not settings.config.kernels.use_varlen_attention:
        return
    flag = settings.describe("kernels.use_varlen_attention")
    precision = settings.config.precision
    model = settings.config.model
    if not settings.config.data.reset_attention_mask:
        yield error(
            f"{flag} needs --reset-attention-mask: without it a sample is one document. Add it, or "
            f"leave out {flag}."
        )
    if not (precision.bf16 or precision.fp16):
        yield error(
            f"{flag} needs --bf16 or --fp16: its kernel has no fp32. Add one, or leave out {flag}."
        )
    if model.position_embedding_type == "alibi":
        yield error(
            f"{flag} cannot be combined with {settings.describe('model.position_embedding_type')}: "
            f"its kernel has no bias. Leave out {flag}."
        )
    if model.attention_dropout > 0:
        yield error(
            f"{flag} cannot be combined with {settings.describe('model.attention_dropout')}: its "
            f"kernel has no dropout. Give --attention-dropout 0, or leave out {flag}."
        )
    # `check_ranges` reports this value. Below it would be a division by zero.
    if model.num_attention_heads < 1:
        return
    shape = ModelShape(model, 0, 0)
    width = shape.head_dim
    if width % _VARLEN_HEAD_MULTIPLE or not shape.value_dim <= width <= _VARLEN_LARGEST_HEAD:
        yield error(
            f"{flag}: the width of a head is {width}, and that of its values {shape.value_dim}, "
            f"but its kernel needs a multiple of {_VARLEN_HEAD_MULTIPLE} that is at most "
            f"{_VARLEN_LARGEST_HEAD}, and values that are not wider. Set them with --kv-channels, "
            f"or --qk-head-dim and --v-head-dim, or leave out {flag}."
        )


def check_gradient_accumulation_fusion(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that weights are in 16 bits, and that DeepSpeed is not used."""
    if not settings.config.kernels.gradient_accumulation_fusion:
        return
    flag = settings.describe("kernels.gradient_accumulation_fusion")
    if not (settings.config.precision.bf16 or settings.config.precision.fp16):
        yield error(
            f"{flag} needs --bf16 or --fp16: gradients in fp32 are not rounded in any case. Add "
            f"one, or leave out {flag}."
        )
    if settings.config.parallel.deepspeed:
        yield error(
            f"{flag} cannot be combined with {settings.describe('parallel.deepspeed')}, whose "
            "optimizer takes the gradients from autograd; give one of them."
        )


def warn_fusion_with_shared_groups(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn if the projection to queries, keys and values is left out of the fusion."""
    config = settings.config
    groups = config.model.num_query_groups
    if (
        config.kernels.gradient_accumulation_fusion
        and groups is not None
        and groups < config.parallel.tensor_model_parallel_size
    ):
        asked = settings.describe("model.num_query_groups", "parallel.tensor_model_parallel_size")
        yield warning(
            f"{settings.describe('kernels.gradient_accumulation_fusion')} leaves out the "
            f"projection to queries, keys and values with {asked}: it is put together from two "
            "weights, because ranks share groups."
        )


def warn_about_cuda_graph(context: PlanContext) -> Iterator[Finding]:
    """Warn if --cuda-graph on has no effect."""
    if context.config.kernels.cuda_graph != "on":
        return
    reason = find_graph_obstacle(context.plan)
    if reason is not None:
        yield warning(
            f"{context.describe('kernels.cuda_graph')} has no effect: {reason}. "
            "docs/cuda_graphs.md lists what a graph can hold."
        )
