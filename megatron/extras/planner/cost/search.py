"""All legal layouts of a model on a number of devices, and the fastest of them that fit.

The search is exact for the model: a layout is simulated unless its lower bound is already longer
than the time of enough others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from megatron.base.errors import ConfigError
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.layout import RankLayout, Software, StepJob
from megatron.extras.planner.cost.memory import BALANCED_ENDS, Verdict, build_stages
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.model.partition import GIVEN_SIZES
from megatron.model.shape import ModelShape

EQUAL_TIMES = GIVEN_SIZES
"""Value of `RankLayout.partition` until `balance_stages` has found the sizes."""
_SHARES = (Fraction(1), Fraction(3, 4), Fraction(2, 3), Fraction(1, 2), Fraction(1, 3))
"""Shares of recomputed layers that are tried."""
_MAX_MICRO_BATCH = 16
_MAX_VIRTUAL = 16
_MULTIPLES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Multiples of a number of devices that are tried if it is too small."""


@dataclass(frozen=True)
class SearchSpace:
    """What is searched. None leaves a choice to the search."""

    shape: ModelShape
    batch_size: int
    devices: int
    hardware: Hardware
    software: Software
    tensor: int | None = None
    pipeline: int | None = None
    context: int = 1
    exchange_heads: bool = False
    micro_batch: int | None = None
    virtual: int | None = None
    recompute: str | None = None
    zero_stage: int | None = None
    expert: int | None = None
    partition: str | None = None
    hsdp: bool | None = None
    """Whether ZeRO stage 3 shards over the ranks of a node only."""
    pad: Callable[[int], int] | None = None
    """Returns the padded vocabulary size of a tensor-parallel size. Default: that of `shape`."""
    accepts: Callable[[RankLayout], bool] | None = None
    """Returns whether a layout keeps the rules that are not known here. Default: all do."""
    fuses_gradients: Callable[[RankLayout], bool] | None = None
    """Returns whether products add to the gradients in fp32 where the recipe allows it. Default: as
    in the software."""
    float8_software: Software | None = None
    """Software that each layout is predicted with as well, such as that with float8."""

    def get_shape(self, tensor: int) -> ModelShape:
        """Return the shape of the model with this tensor-parallel size."""
        if self.pad is None:
            return self.shape
        return replace(self.shape, padded_vocab_size=self.pad(tensor))

    def choose_software(self, layout: RankLayout, software: Software) -> Software:
        """Return the software with the sums of gradients of a layout."""
        if self.fuses_gradients is None:
            return software
        possible = software.half and (software.float8 is None or software.float8.rowwise)
        return replace(software, fused_gradients=possible and self.fuses_gradients(layout))


@dataclass(frozen=True)
class SearchResult:
    """The layouts that fit or may fit, and how many do not."""

    fastest: tuple[StepPrediction, ...]
    """The fastest that fit, simulated, fastest first. After them come those that may fit and are
    faster than the first. If none fits, the fastest that may fit. Layouts that differ only in how
    layers are divided into stages are one entry, the fastest of them."""
    fitting: tuple[StepPrediction, ...]
    """All that fit, by the lower bounds of their times."""
    uncertain: tuple[StepPrediction, ...]
    """All that may fit, by the lower bounds of their times."""
    too_large: int
    """Number of layouts that do not fit in memory."""
    smallest: StepPrediction
    """The layout that needs least memory of all."""

    def list_virtual_stages(self, chosen: StepPrediction) -> list[int]:
        """Return the other numbers of virtual stages with which the layout fits or may fit."""
        key = _ignore_stages(chosen.job)
        numbers = {
            each.job.layout.virtual
            for each in (*self.fitting, *self.uncertain)
            if _ignore_stages(each.job) == key
        }
        return sorted(numbers - {chosen.job.layout.virtual})


def _ignore_stages(job: StepJob) -> tuple[RankLayout, bool]:
    """Return the layout without what divides the layers into stages, and whether it has float8."""
    layout = replace(job.layout, virtual=1, partition="uniform")
    return layout, job.software.float8 is not None


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    # Each divisor below the square root has a cofactor above it. The root of a square is its own
    # cofactor.
    return small + [number // divisor for divisor in reversed(small) if divisor**2 != number]


def iterate_layouts(space: SearchSpace) -> Iterator[RankLayout]:
    """Yield each legal layout of the space."""
    for tensor in _list_tensor_sizes(space):
        for pipeline in list_divisors(space.devices // (tensor * space.context)):
            if space.pipeline not in (None, pipeline):
                continue
            # Each stage needs a layer.
            if pipeline > space.shape.config.num_layers:
                continue
            data = space.devices // (tensor * pipeline * space.context)
            # All data-parallel ranks get the same number of samples.
            if space.batch_size % data == 0:
                yield from _iterate_microbatches(space, tensor, pipeline, data)


def _list_tensor_sizes(space: SearchSpace) -> list[int]:
    """Return the tensor-parallel sizes that divide the model and stay inside a node.

    Between nodes, the collectives of each layer would take longer than its computation.
    """
    config = space.shape.config
    # Groups of other sizes would be uneven over the nodes.
    sizes = list_divisors(space.hardware.ranks_per_node)
    return [
        size
        for size in sizes
        if space.tensor in (None, size)
        and space.devices % (size * space.context) == 0
        and config.num_attention_heads % size == 0
        and space.shape.ffn_hidden_size % size == 0
        and max(size, space.shape.query_groups) % min(size, space.shape.query_groups) == 0
    ]


def _iterate_microbatches(
    space: SearchSpace, tensor: int, pipeline: int, data: int
) -> Iterator[RankLayout]:
    share = space.batch_size // data
    for micro in range(1, min(share, _MAX_MICRO_BATCH) + 1):
        if share % micro or space.micro_batch not in (None, micro):
            continue
        for virtual, partition in _list_stage_choices(space, pipeline, share // micro):
            base = RankLayout(
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                context=space.context,
                exchange_heads=space.exchange_heads and space.context > 1,
                micro_batch=micro,
                virtual=virtual,
                partition=partition,
                sequence_parallel=_shards_sequence(space, tensor),
            )
            # ZeRO and recomputation do not depend on each other.
            for sharded in _iterate_experts(space, base):
                if space.accepts is None or space.accepts(sharded):
                    yield from _iterate_recomputation(space, sharded)


def _shards_sequence(space: SearchSpace, tensor: int) -> bool:
    """Return whether tensor-parallel ranks use sequence parallelism."""
    # Each rank needs the same number of tokens.
    even = space.shape.config.seq_length % (tensor * space.context) == 0
    return tensor > 1 and even and space.software.sequence_parallel


def _list_stage_choices(
    space: SearchSpace, pipeline: int, microbatches: int
) -> list[tuple[int, str]]:
    """Return pairs of virtual stages of a rank and the method that divides the layers."""
    partitions = [space.partition or "uniform"]
    if pipeline == 1:
        return [(1, partitions[0])]
    if space.partition is None and _is_changed_by_balanced_ends(space, pipeline):
        partitions.append(BALANCED_ENDS)
    # Equal numbers of layers take unequal times if the layers differ.
    if space.partition is None and space.shape.linear_layers:
        partitions.append(EQUAL_TIMES)
    # Stages need not be even without virtual stages.
    choices = [(1, partition) for partition in partitions]
    layers = space.shape.config.num_layers
    # Interleaved 1F1B needs rounds of the same size, and virtual stages of the same size.
    # Virtual stages that count the embedding and the output layer are tried only if the
    # configuration asks for this partition.
    method = "uniform"
    if space.partition == BALANCED_ENDS:
        layers += 2
        method = BALANCED_ENDS
    if layers % pipeline == 0 and microbatches % pipeline == 0:
        sizes = list_divisors(layers // pipeline)
        choices += [(size, method) for size in sizes if 1 < size <= _MAX_VIRTUAL]
    return [choice for choice in choices if space.virtual in (None, choice[0])]


def _is_changed_by_balanced_ends(space: SearchSpace, pipeline: int) -> bool:
    """Return whether the stages differ if embedding and output layer count as layers."""
    layout = RankLayout(tensor=1, pipeline=pipeline, data=1, micro_batch=1)
    balanced = replace(layout, partition=BALANCED_ENDS)
    # Equal stages would be listed as two layouts.
    return build_stages(space.shape, layout) != build_stages(space.shape, balanced)


def balance_stages(job: StepJob) -> StepJob:
    """Return the job with the stages whose slowest one is fastest, without virtual stages."""
    layout = replace(job.layout, virtual=1, partition="uniform")
    # A stage for each layer has the time of the layer, with that of the ends of the model.
    alone = replace(layout, pipeline=job.shape.config.num_layers)
    passes = StepPrediction(replace(job, layout=alone)).passes
    times = [each.forward.total + each.backward.total for each in passes]
    sizes = divide_evenly(times, layout.pipeline)
    return replace(job, layout=replace(layout, partition=GIVEN_SIZES + ",".join(map(str, sizes))))


def divide_evenly(times: Sequence[float], stages: int) -> list[int]:
    """Return how many layers each stage gets, so that the longest stage is as short as possible.

    Without the last stages, the same holds for those before.

    Args:
        times: Seconds of each layer, in order.
        stages: Number of stages, at most that of layers.
    """
    if stages == 1:
        return [len(times)]
    ends = [0.0, *accumulate(times)]
    shorter, longest = max(ends[-1] / stages, *times), ends[-1]
    # Each halving gives a bit of the shortest time.
    for _ in range(40):
        middle = (shorter + longest) / 2
        if ends[_place_stages(ends, stages, middle)[0]] <= middle:
            longest = middle
        else:
            shorter = middle
    last = len(times) - _place_stages(ends, stages, longest)[-2]
    return [*divide_evenly(times[:-last], stages - 1), last]


def _place_stages(ends: Sequence[float], stages: int, longest: float) -> list[int]:
    """Return where each stage stops at the earliest if no later one takes more than `longest`."""
    stops = [len(ends) - 1]
    for before in range(stages - 1, 0, -1):
        begin = stops[0] - 1
        # Each of the stages before needs a layer.
        while begin > before and ends[stops[0]] - ends[begin - 1] <= longest:
            begin -= 1
        stops.insert(0, begin)
    return stops


def _iterate_sharding(space: SearchSpace, base: RankLayout) -> Iterator[RankLayout]:
    """Yield ZeRO stages. Higher ones communicate for each microbatch of a pipeline."""
    stages = [space.zero_stage]
    if space.zero_stage is None:
        # One data-parallel rank has nothing to shard, so that all stages are the same.
        alone = base.data * base.context == 1
        stages = [1] if alone or base.pipeline > 1 else [1, 3]
    for stage in stages:
        assert stage is not None, "a ZeRO stage was chosen"
        if not (stage == 3 and space.hsdp):
            yield replace(base, zero_stage=stage)
        # Groups inside a node gather weights over the fast links.
        node = max(1, space.hardware.ranks_per_node // base.tensor)
        ranks = base.data * base.context
        if stage == 3 and space.hsdp is not False and 1 < node < ranks and ranks % node == 0:
            yield replace(base, zero_stage=stage, shard=node)


def _iterate_experts(space: SearchSpace, base: RankLayout) -> Iterator[RankLayout]:
    """Yield the ways to shard, each with the numbers of ranks that may divide the experts."""
    number = space.shape.config.num_experts
    for sharded in _iterate_sharding(space, base):
        # A dense model has one way.
        if number is None:
            yield sharded
            continue
        stage = base.tensor * base.context * base.data
        copy = sharded.shard_size * base.tensor
        # The rules are those of `megatron.plan.rules.model`.
        possible = [
            size
            for size in list_divisors(math.gcd(number, stage))
            if copy % size == 0 or size % copy == 0
        ]
        # One, the largest number inside a node, and all that need several nodes. The sizes between
        # have shorter messages than the second and less memory than the first, but not by much.
        near = max(size for size in possible if size <= space.hardware.ranks_per_node)
        for size in possible:
            if space.expert == size or (space.expert is None and (size == 1 or size >= near)):
                yield replace(sharded, expert=size, imbalance=space.hardware.expert_imbalance)


def _iterate_recomputation(space: SearchSpace, base: RankLayout) -> Iterator[RankLayout]:
    if space.recompute in (None, "none"):
        yield base
    if space.recompute == "selective" or (space.recompute is None and not space.software.flash):
        yield replace(base, recompute="selective")
    if space.recompute == "operators":
        yield replace(base, recompute="operators")
    if space.recompute in (None, "shares", "full"):
        # "full" alone means all layers; the search also tries shares of them.
        for share in _SHARES if space.recompute != "full" else _SHARES[:1]:
            yield replace(base, recompute="full", recomputed_share=share)


def search_layouts(space: SearchSpace, count: int = 10) -> SearchResult:
    """Return the `count` fastest layouts that fit, and what else was found.

    At most `count` layouts that may fit are among the fastest as well.

    Raises:
        ConfigError: No layout is legal.
    """
    found: dict[Verdict, list[StepPrediction]] = {verdict: [] for verdict in Verdict}
    for prediction in _predict_layouts(space):
        found[prediction.verdict].append(prediction)
    if not any(found.values()):
        raise ConfigError(
            f"no layout divides a batch of {space.batch_size} samples and the model over "
            f"{space.devices} devices; choose another number of devices or another batch size."
        )
    for verdict in (Verdict.FITS, Verdict.MAY_FIT):
        found[verdict].sort(key=lambda each: each.lower_bound)
    fastest = _simulate_fastest(found[Verdict.FITS], count)
    longest = fastest[0].seconds if fastest else float("inf")
    risky = _simulate_fastest(found[Verdict.MAY_FIT], count)
    return SearchResult(
        (*fastest, *(each for each in risky if each.seconds < longest)),
        tuple(found[Verdict.FITS]),
        tuple(found[Verdict.MAY_FIT]),
        len(found[Verdict.DOES_NOT_FIT]),
        min((each for some in found.values() for each in some), key=lambda each: each.peak_bytes),
    )


def _predict_layouts(space: SearchSpace) -> Iterator[StepPrediction]:
    """Yield a prediction for each legal layout of the space, with each software.

    Equal stages, and shares that recompute the same layers in each stage, are one layout.
    """
    for software in filter(None, (space.software, space.float8_software)):
        seen = set()
        for layout in iterate_layouts(space):
            try:
                shape = space.get_shape(layout.tensor)
                used = space.choose_software(layout, software)
                job = StepJob(shape, layout, space.batch_size, used, space.hardware)
                if layout.partition == EQUAL_TIMES:
                    job = balance_stages(job)
                prediction = StepPrediction(job)
            except ConfigError:
                # The layers or the vocabulary cannot be divided so.
                continue
            same = replace(layout, partition="", recomputed_share=Fraction(1))
            key = (same, prediction.stages, prediction.count_recomputed_layers())
            if key not in seen:
                seen.add(key)
                yield prediction


def _fits(space: SearchSpace) -> bool:
    """Return whether a layout of the space fits."""
    return any(each.verdict is Verdict.FITS for each in _predict_layouts(space))


def _simulate_fastest(found: Sequence[StepPrediction], count: int) -> tuple[StepPrediction, ...]:
    """Return the fastest of `found`, which are in the order of their lower bounds."""
    best: list[StepPrediction] = []
    for prediction in found:
        # No later one can be faster than those found so far.
        if len(best) == count and prediction.lower_bound >= best[-1].seconds:
            break
        best.append(prediction)
        best.sort(key=lambda each: each.seconds)
        # The first of each group is the fastest of it.
        groups: dict[tuple[RankLayout, bool], StepPrediction] = {}
        for each in best:
            groups.setdefault(_ignore_stages(each.job), each)
        best = list(groups.values())[:count]
    return tuple(best)


def find_context_size(space: SearchSpace) -> SearchSpace | None:
    """Return the space with the smallest context-parallel size with which a layout fits.

    The size of the space is doubled as often as needed. None if that does not help, or if it is
    enough already.
    """
    # Larger microbatches need more memory, so they are left out.
    smallest = replace(space, micro_batch=space.micro_batch or 1)
    size = space.context
    while space.shape.config.seq_length % (2 * size) == 0 and space.devices % size == 0:
        tried = replace(smallest, context=size)
        heads = space.shape.config.num_attention_heads
        if not (space.exchange_heads and heads % size) and _fits(tried):
            return None if size == space.context else replace(space, context=size)
        size *= 2
    return None


def find_enough_devices(space: SearchSpace) -> int | None:
    """Return a number of devices with which a layout fits, for the model and batch of `space`.

    Small multiples of the number in `space` are tried. None if none of them is enough.
    """
    # Small microbatches and full recomputation need least memory, so other layouts are left out.
    smallest = replace(space, micro_batch=space.micro_batch or 1, recompute="full")
    for factor in _MULTIPLES:
        larger = replace(smallest, devices=factor * space.devices)
        if _fits(larger):
            return larger.devices
    return None
