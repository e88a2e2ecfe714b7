"""Assignment of layers to pipeline stages.

Invariant: the stages of a partition hold every layer exactly once, in order, and each holds at
least one. The embedding is on the first stage and the head on the last. With virtual stages
(https://arxiv.org/abs/2104.04473, section 2.2), one rank holds several runs of layers. Virtual
stages are stages like the others, and are dealt to the ranks in turn.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron.base.errors import ConfigError
from megatron.config.parallel import ParallelConfig
from megatron.model import flops
from megatron.model.shape import ModelShape

GIVEN_SIZES = "layers:"
"""How a value of --pp-partition-method begins that has the number of layers of each stage."""


@dataclass(frozen=True)
class Stage:
    """A run of consecutive layers. The first stage has the embedding, and the last the head."""

    index: int
    layers: range
    """Global numbers of its transformer layers."""
    first: bool
    """Holds the embedding."""
    last: bool
    """Holds the final norm, the output projection and the loss."""


def make_single_stage(shape: ModelShape) -> Stage:
    """Return one stage that holds all layers, for a run without a pipeline."""
    return Stage(0, range(shape.config.num_layers), first=True, last=True)


def partition(shape: ModelShape, parallel: ParallelConfig) -> tuple[Stage, ...]:
    """Return all stages, virtual ones included, in the order of the layers.

    Stage i is on pipeline rank i % pipeline size. Without virtual stages --pp-partition-method
    decides where a stage ends. With them, each has --num-layers-per-virtual-pipeline-stage layers.
    If the method counts the embedding and the output layer, each is one of these layers.

    Raises:
        ConfigError: There are more ranks than layers, virtual stages do not divide the layers or
            have no pipeline, the method is unknown, or its sizes do not fit.
    """
    ranks = parallel.pipeline_model_parallel_size
    per_virtual = parallel.num_layers_per_virtual_pipeline_stage
    layers = shape.config.num_layers
    # A stage without layers would only pass activations on.
    if ranks > layers:
        raise ConfigError(
            f"--pipeline-model-parallel-size {ranks} must not exceed --num-layers {layers}: each "
            "stage needs a layer."
        )
    method = parallel.pp_partition_method
    ends = 0.0
    if method is not None:
        method = method.lower()
        if method.startswith(GIVEN_SIZES):
            return _make_stages([0, *accumulate(_read_sizes(method, layers, ranks))])
        ends = _weigh_ends(shape, method)
    if per_virtual is None:
        return _make_stages(_choose_even_boundaries(layers, ranks, ends))
    if ranks == 1:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_virtual} interleaves the stages of a "
            "pipeline; use --pipeline-model-parallel-size 2 or more, or remove this flag"
        )
    counted = layers + round(2 * ends)
    # The first and the last stage need a layer beside the embedding and the output layer.
    if counted % (ranks * per_virtual) or per_virtual <= ends:
        raise ConfigError(_describe_indivisible(layers, counted, ranks, per_virtual))
    # Virtual stages have equal sizes, so that all ranks take equally long for each.
    return _make_stages(_choose_even_boundaries(layers, counted // per_virtual, ends))


def _read_sizes(method: str, layers: int, ranks: int) -> list[int]:
    """Return the number of layers of each stage.

    Raises:
        ConfigError: There is another number of stages or of layers, or a stage has no layer.
    """
    parts = method.removeprefix(GIVEN_SIZES).split(",")
    sizes = [int(part) if part.isdecimal() else 0 for part in parts]
    if len(sizes) != ranks or sum(sizes) != layers or 0 in sizes:
        raise ConfigError(
            f"--pp-partition-method {method} needs a number above 0 for each of {ranks} stages, "
            f"and their sum must be --num-layers {layers}; write it as in layers:3,2,2."
        )
    return sizes


def select_stages_of_rank(
    stages: Sequence[Stage], pipeline_rank: int, pipeline_size: int
) -> tuple[Stage, ...]:
    """Return the stages of one pipeline rank, in order. It is one without virtual stages."""
    # Stages are dealt in turn, so those of a rank are `pipeline_size` apart.
    return tuple(stages[pipeline_rank::pipeline_size])


def count_layers_per_rank(
    stages: Sequence[Stage], pipeline_size: int, chosen: Container[int] | None = None
) -> tuple[int, ...]:
    """Return the number of transformer layers on each pipeline rank, over all its stages.

    If some are chosen, the others do not count.
    """
    return tuple(
        sum(
            chosen is None or layer in chosen
            for stage in select_stages_of_rank(stages, rank, pipeline_size)
            for layer in stage.layers
        )
        for rank in range(pipeline_size)
    )


def _make_stages(boundaries: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages between neighbouring `boundaries`.

    Args:
        boundaries: The first layer of each stage, and then the number of layers.
    """
    count = len(boundaries) - 1
    # A wrong boundary is a mistake in this module and not in the configuration, so these are
    # assertions.
    assert boundaries[0] == 0, f"boundaries {boundaries} leave out the first layers"
    assert all(begin < end for begin, end in pairwise(boundaries)), (
        f"boundaries {boundaries} leave a stage without layers"
    )
    return tuple(
        Stage(i, range(*boundaries[i : i + 2]), first=i == 0, last=i == count - 1)
        for i in range(count)
    )


def _choose_even_boundaries(layers: int, stages: int, ends: float) -> list[int]:
    """Return the first layer of each stage, and then `layers`.

    Each boundary is the nearest one to an even share of the weight that leaves every stage a
    layer. A layer weighs 1.

    Args:
        layers: Number of layers.
        stages: Number of stages.
        ends: Weight of the embedding, and again of the output projection, in layers.
    """
    # Both ends weigh the same, because the output matrix has the size of the embedding.
    share = (layers + 2 * ends) / stages
    boundaries = [0]
    for stage in range(1, stages):
        # The embedding precedes layer 0, so its weight is subtracted from the boundary's position.
        nearest = round(stage * share - ends)
        # The limits keep a layer for this stage, and one for each of the stages that follow.
        boundaries.append(min(max(nearest, boundaries[-1] + 1), layers - (stages - stage)))
    return [*boundaries, layers]


def _weigh_ends(shape: ModelShape, method: str) -> float:
    """Return the weight of the embedding, and also of the output projection, in layers.

    "uniform" counts layers. "type:transformer|embedding" also counts each of the two ends as a
    layer. "parameters" counts parameters.
    """
    if method == "parameters":
        words = flops.count_word_embedding_parameters(shape)
        ends = flops.count_first_stage_extra_parameters(shape) + flops.count_norm_parameters(shape)
        ends += words * (1 + shape.config.untie_embeddings_and_output_weights)
        # Layers weigh the same here, also if their parameters differ.
        return words * shape.config.num_layers / (flops.count_parameters(shape) - ends)
    if method.startswith("type:"):
        try:
            # The method's names are DeepSpeed's. It matches a regular expression with class names.
            if re.search(method.removeprefix("type:"), "embedding"):
                return 1.0
            return 0.0
        except re.error as failure:
            raise ConfigError(
                f"--pp-partition-method {method}: {failure}; write it as in "
                "type:transformer|embedding."
            ) from None
    if method == "uniform":
        return 0.0
    raise ConfigError(
        f"--pp-partition-method {method} is unknown; use uniform, parameters, type:REGEX or "
        "layers:SIZES."
    )


def _describe_indivisible(layers: int, counted: int, ranks: int, per_virtual: int) -> str:
    """Return the error message for virtual stages that do not divide the `counted` layers."""
    ends = " + 2 (--pp-partition-method counts both ends)" * (counted != layers)
    sizes = range(2 if ends else 1, counted // ranks + 1)
    fitting = [str(size) for size in sizes if counted % (ranks * size) == 0]
    if fitting:
        fix = f"use {', '.join(fitting)}"
    else:
        fix = f"no value fits, because {ranks} does not divide {counted}; remove this flag"
    return (
        f"--num-layers-per-virtual-pipeline-stage {per_virtual} x "
        f"--pipeline-model-parallel-size {ranks} = {ranks * per_virtual} must divide "
        f"--num-layers {layers}{ends}; {fix}."
    )
