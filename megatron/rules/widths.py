"""Warnings about widths of matrices that GPUs multiply slowly."""

import math

from megatron.model.shape import ModelShape
from megatron.rules.plan import PlanReport

_MULTIPLE = 8
"""Products of 16 bits use the fastest kernels if the rows of the matrices have a multiple of 16
bytes (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication)."""


def warn_of_widths(shape: ModelShape, report: PlanReport) -> None:
    """Warn of the widths of a tensor-parallel rank that are no multiple of 8, in bf16 and fp16."""
    precision = report.config.precision
    if not (precision.bf16 or precision.fp16):
        return
    model = report.config.model
    ranks = report.config.parallel.tensor_model_parallel_size
    heads = shape.head_dim * model.num_attention_heads
    per_head = "--kv-channels x --num-attention-heads"
    for name, flag, width, parts, unit in (
        ("hidden size", "--hidden-size", model.hidden_size, 1, 1),
        ("width of the MLP", "--ffn-hidden-size", shape.ffn_hidden_size, ranks, 1),
        ("width of all heads", per_head, heads, ranks, model.num_attention_heads),
        # Padding by --make-vocab-size-divisible-by has added rows already.
        ("padded vocabulary", "--make-vocab-size-divisible-by", shape.padded_vocab_size, ranks, 1),
    ):
        # What cannot be divided is an error of another rule.
        if width % parts or width // parts % _MULTIPLE == 0:
            continue
        share = ""
        if parts > 1:
            share = f" / {ranks} tensor-parallel ranks = {width // parts}"
        # All heads have the same width.
        step = math.lcm(_MULTIPLE * parts, unit)
        report.warnings.append(
            f"{name} {width:,}{share} ({flag}) is not a multiple of {_MULTIPLE}: on GPUs, its "
            f"matrix products in 16 bits take up to twice the time. {-(-width // step) * step:,} "
            "is the next width that does not."
        )
