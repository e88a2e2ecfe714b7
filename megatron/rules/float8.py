"""Rules about products in float8."""

from collections.abc import Iterator

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.rules.finding import Finding, error, warning


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
