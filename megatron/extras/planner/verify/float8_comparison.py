"""Operands of products in float8, which one process rounds again from the complete tensor.

The largest value of an operand is found over all ranks that have a part of it. Its scale is the
largest power of two with which it fits into the format. So scales and rounded values must be equal,
whichever ranks exchange messages. See decision 052.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.extras.planner.verify.comparison import ComparedValue, compare_exactly
from megatron.extras.planner.verify.recording import RankRecord, RecordedStep

COMPARISON = "scales and values of float8"


def compare_operands(
    ranks: Sequence[RankRecord], dtype: torch.dtype, gradients: torch.dtype
) -> Iterator[ComparedValue]:
    """Compare scales and values of each operand with those of one process. The error is a share.

    Args:
        ranks: The records of all ranks of a copy.
        dtype: The dtype that weights are rounded to before float8.
        gradients: The float8 format of gradients.
    """
    for steps in zip(*(rank.steps for rank in ranks), strict=True):
        weights = _join_weights(steps)
        groups = defaultdict(list)
        for number, (rank, step) in enumerate(zip(ranks, steps, strict=True)):
            at = rank.coordinate
            for index, operand in enumerate(step.operands):
                # Context-parallel ranks have other rows, and share the scale of a tensor only.
                context = 0
                if operand.by_row:
                    context = at.context
                key = at.pipeline, at.data, context, index, operand.name
                groups[key].append((f"rank {number} ({at})", at.tensor, operand))
        for (*_, name), parts in groups.items():
            kind = torch.float8_e4m3fn
            if name.startswith("gradient"):
                kind = gradients
            matrices = [operand.matrix for _, _, operand in parts if operand.matrix is not None]
            for rank_name, tensor, operand in parts:
                matrix, whole = operand.matrix, matrices
                compared = []
                if matrix is None:
                    assert operand.largest is not None, "a weight has it"
                    weight = weights[name.split()[0]].to(dtype)
                    matrix = torch.cat([weight[rows] for rows in operand.rows])
                    whole = [matrix if operand.by_row else weight]
                    rows = weight.float().abs().amax(1)
                    largest = rows if len(operand.largest) > 1 else rows.amax(0, keepdim=True)
                    compared = [("largest value", operand.largest, largest)]
                    # A row-parallel layer has some of the columns.
                    width = operand.values.shape[1]
                    matrix = matrix.split(width, 1)[tensor if width < matrix.shape[1] else 0]
                scale = _find_scale(whole, operand.by_row, kind)
                expected = (matrix.double() * scale).float().to(kind)
                compared += [
                    ("1 / scale", operand.inverse, scale.reciprocal().float()),
                    ("values", operand.values, expected),
                ]
                for what, found, wanted in compared:
                    subject = f"{what} of {name} on {rank_name}"
                    # A dropped step has infinite gradients, whose scale is 0.
                    plain = [x.float().nan_to_num() for x in (found, wanted)]
                    yield compare_exactly(COMPARISON, steps[0].iteration, subject, *plain)


def _find_scale(matrices: Sequence[Tensor], by_row: bool, kind: torch.dtype) -> Tensor:
    """Return the largest power of two with which all values fit into a format, in fp64."""
    sizes = [x.double().abs() for x in matrices]
    largest = torch.stack([x.amax(1) if by_row else x.max() for x in sizes]).amax(0)
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    # torchao's lower limit, for a tensor of zeros.
    scale = torch.exp2((torch.finfo(kind).max / largest.clamp(min=1e-12)).log2().floor())
    return scale.unsqueeze(1) if by_row else scale


def _join_weights(steps: Sequence[RecordedStep]) -> dict[str, Tensor]:
    """Return the complete weights before a step, from the shards of all ranks."""
    shards = [s for step in steps for s in step.before if s.kind == "weight" and s.tensor.dim() > 1]
    weights: dict[str, Tensor] = {}
    for name in {shard.name for shard in shards}:
        own = [shard for shard in shards if shard.name == name]
        ends = [[o + n for o, n in zip(s.offset, s.tensor.shape, strict=True)] for s in own]
        weights[name] = torch.empty(tuple(map(max, zip(*ends, strict=True))))
        for shard in own:
            shard.select(weights[name]).copy_(shard.tensor)
    return weights
