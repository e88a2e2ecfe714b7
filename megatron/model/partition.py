"""Which pipeline stage holds which layers.

Invariant: the stages of a partition hold every layer exactly once, in order, and each at least one; the embedding is on the first
stage, the head on the last. Virtual stages (several runs of layers on one rank, https://arxiv.org/abs/2104.04473, section 2.2) are
stages like the others, dealt to the ranks in turn.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError
from megatron.model import flops
from megatron.model.shape import ModelShape


@dataclass(frozen=True)
class Stage:
    """A run of consecutive layers of the model, with the embedding before the first and the head behind the last."""

    index: int
    layers: range
    """Global numbers of its transformer layers."""
    first: bool
    """Holds the embedding."""
    last: bool
    """Holds the final norm, the output projection and the loss."""


def make_single_stage(shape: ModelShape) -> Stage:
    """All layers in one stage: no pipeline."""
    return Stage(0, range(shape.config.num_layers), first=True, last=True)


def partition(shape: ModelShape, parallel: ParallelConfig) -> tuple[Stage, ...]:
    """All stages, virtual ones included, in the order of the layers; stage i lives on pipeline rank i % pipeline size.

    Without virtual stages, --pp-partition-method says where to cut; with them, each has --num-layers-per-virtual-pipeline-stage.

    Raises ConfigError on more ranks than layers, layers that virtual stages do not divide, virtual stages without a pipeline, or an
    unknown method.
    """
    ranks, per_virtual = (
        parallel.pipeline_model_parallel_size,
        parallel.num_layers_per_virtual_pipeline_stage,
    )
    layers = shape.config.num_layers
    if ranks > layers:
        raise ConfigError(
            f"--pipeline-model-parallel-size {ranks} must not exceed --num-layers {layers}: each stage needs a layer."
        )
    if per_virtual is None:
        return _make_stages(
            _choose_even_cuts(
                layers, ranks, _weigh_ends(shape, parallel.pp_partition_method or "uniform")
            )
        )
    if ranks == 1:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_virtual} interleaves the stages of a pipeline: give "
            "--pipeline-model-parallel-size 2 or more, or leave it out."
        )
    if layers % (ranks * per_virtual):
        raise ConfigError(_describe_indivisible(layers, ranks, per_virtual))
    return _make_stages(list(range(0, layers + 1, per_virtual)))


def select_stages_of_rank(
    stages: Sequence[Stage], pipeline_rank: int, pipeline_size: int
) -> tuple[Stage, ...]:
    """The stages that live on one pipeline rank, in order: one, or as many as there are virtual stages on a rank."""
    return tuple(stages[pipeline_rank::pipeline_size])


def count_layers_per_rank(stages: Sequence[Stage], pipeline_size: int) -> tuple[int, ...]:
    """Number of transformer layers on each pipeline rank, over all its virtual stages."""
    return tuple(
        sum(len(stage.layers) for stage in select_stages_of_rank(stages, rank, pipeline_size))
        for rank in range(pipeline_size)
    )


def _make_stages(cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between neighbouring `cuts`: begins, and last the number of layers."""
    count = len(cuts) - 1
    assert cuts[0] == 0, f"cuts {cuts} would lose the first layers"
    assert all(begin < end for begin, end in pairwise(cuts)), (
        f"cuts {cuts} would make a stage without layers"
    )
    return tuple(
        Stage(i, range(*cuts[i : i + 2]), first=i == 0, last=i == count - 1) for i in range(count)
    )


def _choose_even_cuts(layers: int, stages: int, ends: float) -> list[int]:
    """Where stages begin, and last `layers`: each cut is nearest to an even share of the weight that leaves every stage a layer.

    A layer weighs 1; `ends` is what the embedding weighs, and again the output projection.
    """
    share = (layers + 2 * ends) / stages
    cuts = [0]
    for stage in range(1, stages):
        nearest = round(stage * share - ends)
        cuts.append(min(max(nearest, cuts[-1] + 1), layers - (stages - stage)))
    return [*cuts, layers]


def _weigh_ends(shape: ModelShape, method: str) -> float:
    """What the embedding, and the output projection, weigh in the cut, in layers.

    uniform counts layers, 'type:transformer|embedding' also counts the two ends as a layer each, parameters counts parameters.
    """
    method = method.lower()
    if method == "parameters":
        return flops.count_word_embedding_parameters(shape) / flops.count_layer_parameters(shape)
    if method.startswith("type:"):
        try:
            return 1.0 if re.search(method.removeprefix("type:"), "embedding") else 0.0
        except re.error as failure:
            raise ConfigError(
                f"--pp-partition-method {method}: {failure}; write it as in type:transformer|embedding."
            ) from None
    if method == "uniform":
        return 0.0
    raise ConfigError(
        f"--pp-partition-method {method} is unknown; use uniform, parameters or type:REGEX."
    )


def _describe_indivisible(layers: int, ranks: int, per_virtual: int) -> str:
    """The message where virtual stages do not divide the layers."""
    fitting = [str(n) for n in range(1, layers // ranks + 1) if layers % (ranks * n) == 0]
    way_out = (
        f"use {', '.join(fitting)}"
        if fitting
        else f"no value fits: {ranks} does not divide {layers}; leave it out"
    )
    return (
        f"--num-layers-per-virtual-pipeline-stage {per_virtual} x --pipeline-model-parallel-size {ranks} = {ranks * per_virtual} "
        f"must divide --num-layers {layers}; {way_out}."
    )
