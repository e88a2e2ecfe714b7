"""The peak memory of a pipeline rank of this trainer: the largest of a few points of a step.

A rank needs most memory at the loss, at the start of the backward pass of a stage, where all
activations exist, or at its end, where all gradients exist. FSDP2 adds what it gathers and what it
reduces (https://arxiv.org/abs/2304.11277). docs/dry_run.md has an example by hand.

Notation: N parameters of the rank before they are sharded, S ranks that share a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

from megatron.config.model import AttentionKind, MLPKind
from megatron.extras.planner.cost.delta_net import LAYERS_BY_ATTENTION
from megatron.extras.planner.cost.float8 import list_float8_linears
from megatron.extras.planner.cost.layout import Float8, Software, StepJob
from megatron.extras.planner.cost.parameters import (
    Held,
    LayerParameters,
    count_head_parameters,
    count_root_parameters,
    reduces_each_microbatch,
    share_parameters,
    sum_layers,
    sum_stages,
    uses_fsdp,
)
from megatron.extras.planner.cost.tensors import TensorCase, TensorSizes, measure_tensors
from megatron.model import flops
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape

_TOKEN_BYTES = 16
"""A token and its label as int64. Those of all microbatches are on the device for the step."""


@dataclass(frozen=True)
class StepPoint:
    """Bytes at one point of a step, without what a rank always holds."""

    weights: float = 0.0
    """Weights that the model computes with, unless they are the master weights."""
    gradients: float = 0.0
    activations: float = 0.0
    """What microbatches in flight keep, apart from the layer that is computed."""
    working: float = 0.0
    """The layer whose backward pass runs: its activations and gradients, or those of the loss."""
    logits: float = 0.0
    """Logits of other trainers. Those of this one are part of `working`."""
    buffers: float = 0.0
    """What FSDP2 gathers and reduces."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class _Pass:
    """A backward pass of one microbatch through one stage."""

    stage: Stage
    number: int
    """Its number among the backward passes of the rank in a step, from 1."""
    accumulated: bool
    """Whether all gradients exist from earlier microbatches."""


def find_peak(job: StepJob, stages: Sequence[Stage], rank: int) -> StepPoint:
    """Return the point of a step at which a pipeline rank needs most memory.

    Args:
        job: The step.
        stages: The stages of the rank.
        rank: The pipeline rank.
    """
    points = _RankPeak(job, stages, rank).list_points()
    return max(points, key=lambda point: point.total)


_Kind = tuple[bool, MLPKind, AttentionKind]
"""Whether a layer has a sliding window, and the kinds of its parts."""


@lru_cache(maxsize=256)
def _list_kinds(shape: ModelShape) -> tuple[_Kind, ...]:
    """Return the kind of each layer."""
    length = shape.config.seq_length
    described = map(shape.describe_layer, range(shape.config.num_layers))
    return tuple(
        (each.window is not None and each.window < length, each.mlp, each.attention)
        for each in described
    )


@lru_cache(maxsize=4096)
def _find_kinds(
    shape: ModelShape, layers: range, share: Fraction, float8: Float8 | None
) -> frozenset[int]:
    """Return the last layer of each kind in a stage, as the number of layers after it.

    Recomputed layers and those in float8 are kinds of their own.
    """
    found: dict[tuple[_Kind, bool, bool], int] = {}
    for after, layer in enumerate(reversed(layers)):
        again = flops.count_recomputed_layers(range(layer, layer + 1), share) > 0
        in_float8 = float8 is not None and float8.covers(layer)
        found.setdefault((_list_kinds(shape)[layer], again, in_float8), after)
    return frozenset(found.values())


class _RankPeak:
    """The points of one pipeline rank."""

    def __init__(self, job: StepJob, stages: Sequence[Stage], rank: int) -> None:
        layout, software = job.layout, job.software
        self._shape = job.shape
        self._layout = layout
        self._software = software
        self._stages = stages
        self._schedule = job.schedule
        self._visits = job.schedule.count_in_flight(rank)
        self._passes = job.schedule.microbatches * len(stages)
        """Backward passes of the step."""
        self._forwards_first = job.schedule.name in ("GPipe", "looped BFS")
        self._value = 2 if software.half else 4
        self._fsdp = uses_fsdp(layout)
        self._gathers = layout.zero_stage == 3 and self._fsdp
        """Whether weights are gathered for each layer, and dropped again."""
        self._reduces_each = reduces_each_microbatch(layout, job.schedule.microbatches)
        # A gradient in fp32 is added to the sum at once, if the sum is kept.
        in_fp32 = not self._software.half or software.fused_gradients
        self._holds = self._fsdp and (not in_fp32 or self._reduces_each)
        """Whether FSDP2 holds gradients of layers as autograd computes them."""
        self._holds_outside = self._fsdp and (self._software.half or self._reduces_each)
        """The same for other gradients, which are never fused."""
        # The cache computes a hash of all fields of the shape at each call.
        self._kind_of_layer = _list_kinds(job.shape)
        self._kinds = self._measure(software)
        self._tensors = next(iter(self._kinds.values()))
        """Those outside of layers are the same for all kinds."""
        self._of_dense = flops.count_layer_parameters(job.shape, layout.tensor)
        self._is_dense = layout.expert is None and not job.shape.linear_layers
        """Whether all layers have attention and an MLP."""
        # Layers that are left out of float8.
        self._plain = self._measure(replace(software, float8=None))
        self._visit_bytes = {stage.index: self._sum_visit(stage) for stage in stages}

    # -- sizes ------------------------------------------------------------------------------------

    def _measure(self, software: Software) -> dict[_Kind, TensorSizes]:
        """Return kind -> the tensors of such layers."""
        found = {}
        for kind in sorted(set(self._kind_of_layer)):
            windowed, mlp, attention = kind
            holds = self._holds, self._holds_outside
            case = TensorCase(self._shape, self._layout, software, *holds, windowed)
            of_kind = LAYERS_BY_ATTENTION.require(attention).require(mlp)
            found[kind] = measure_tensors(case, of_kind.tensors)
        return found

    def _get_tensors(self, layer: int) -> TensorSizes:
        kinds = self._kinds
        if self._software.float8 is not None and not self._software.float8.covers(layer):
            kinds = self._plain
        return kinds[self._kind_of_layer[layer]]

    def _is_recomputed(self, layer: int) -> bool:
        share = self._layout.layers_recomputed
        return flops.count_recomputed_layers(range(layer, layer + 1), share) > 0

    def _sum_layers(self, layers: range) -> float:
        """Return what layers keep of one microbatch."""
        again = flops.count_recomputed_layers(layers, self._layout.layers_recomputed)
        if len(self._kinds) == 1:
            tensors = self._tensors
            return again * tensors.recomputed_layer + (len(layers) - again) * tensors.layer
        size = 0.0
        for layer in layers:
            tensors = self._get_tensors(layer)
            size += tensors.recomputed_layer if self._is_recomputed(layer) else tensors.layer
        return size

    def _sum_visit(self, stage: Stage) -> float:
        """Return what a microbatch keeps of a stage between its two passes."""
        size = self._sum_layers(stage.layers)
        if stage.first:
            size += self._tensors.embedding
        if stage.last:
            # Its backward pass follows at once, unless all forward passes come first.
            return size + (self._tensors.loss_kept if self._forwards_first else 0.0)
        # torch's schedule holds the output until its gradient arrives.
        return size + self._tensors.stream

    def _count_head(self, stage: Stage) -> int:
        """Return the parameters of a head that FSDP2 shards apart from the embedding."""
        return count_head_parameters(self._shape, self._layout.tensor, stage)

    def _count_root(self, stage: Stage) -> int:
        """Return the other parameters of a stage outside of its layers."""
        return count_root_parameters(self._shape, self._layout.tensor, stage)

    def _count_outside(self) -> int:
        return sum(self._count_head(stage) + self._count_root(stage) for stage in self._stages)

    def _count(self, layers: range) -> LayerParameters:
        """Return the parameters of layers on this rank."""
        # A search asks so often that the dense case is worth its own line.
        if self._is_dense:
            return LayerParameters(len(layers) * self._of_dense)
        return sum_layers(self._shape, self._layout, layers)

    def _hold(self, parameters: int) -> Held:
        """Return what the rank holds of parameters outside of layers."""
        return Held(parameters, parameters / self._layout.shard_size)

    @cached_property
    def _held(self) -> Held:
        """All parameters of the rank."""
        layers = sum_stages(self._shape, self._layout, self._stages)
        return share_parameters(layers, self._layout) + self._hold(self._count_outside())

    def _sum_in_flight(self, number: int) -> float:
        """Return what is kept during backward pass `number`, from 1, apart from its own visit."""
        visits = min(self._visits, self._passes - number + 1)
        # The stages of a rank may differ, so the mean of its visits counts.
        mean = sum(self._visit_bytes.values()) / len(self._stages)
        tokens = self._shape.config.seq_length * self._layout.micro_batch
        inputs = _TOKEN_BYTES * tokens * self._schedule.microbatches
        return visits * mean - mean + len(self._stages) * self._tensors.tables + inputs

    # -- points ----------------------------------------------------------------------------------

    def list_points(self) -> Iterator[StepPoint]:
        """Yield the points that may need most memory."""
        # Before the backward pass `later`, every stage of the rank has had one.
        bfs = self._schedule.name == "looped BFS"
        round_size = self._schedule.microbatches if bfs else self._layout.pipeline
        later = (len(self._stages) - 1) * round_size + 2
        # The first backward pass is one of the last stage.
        first = _Pass(self._stages[-1], 1, accumulated=self._software.kept_gradients)
        yield from self._list_backward(first)
        if self._passes >= later:
            # Of virtual stages, the first may have the embedding, and the last one the loss.
            for stage in self._stages[:: max(1, len(self._stages) - 1)]:
                yield from self._list_backward(_Pass(stage, later, accumulated=True))
        if self._fsdp and not self._reduces_each:
            yield self._reduce_root()

    def _list_backward(self, each: _Pass) -> Iterator[StepPoint]:
        """Yield the points of a backward pass."""
        stage = each.stage
        before = self._sum_in_flight(each.number)
        if each.number > 1 and not stage.first:
            # torch's schedule holds the last gradient that it sent to the stage before.
            before += self._tensors.stream
        own = before + self._sum_layers(stage.layers)
        if stage.first:
            own += self._tensors.embedding
        if stage.last:
            yield from self._list_loss(each, own)
        else:
            own += self._tensors.stream
        for done in self._choose_layers(stage):
            yield from self._list_layer(each, done, own)
        yield from self._list_end(each, before)

    def _choose_layers(self, stage: Stage) -> list[int]:
        """Return how many layers have finished their backward passes when memory may be highest."""
        count = len(stage.layers)
        # From the second layer on, memory only rises or only falls among layers of a kind.
        chosen = {0, min(1, count - 1), count - 1}
        partly = self._software.float8 is not None and self._software.float8.layers is not None
        kinds = partly or len(self._kinds) > 1
        if 0 < self._layout.layers_recomputed < 1 or kinds:
            share = self._layout.layers_recomputed
            chosen |= _find_kinds(self._shape, stage.layers, share, self._software.float8)
        return sorted(chosen)

    def _list_loss(self, each: _Pass, kept: float) -> Iterator[StepPoint]:
        """Yield the points of the loss."""
        point = self._start_point(each, None)
        if self._fsdp and (self._gathers or not each.accumulated) and self._layout.shard_size > 1:
            # FSDP2 frees what it gathered into when it gathers the next time.
            last = self._count_head(each.stage)
            if not last:
                last = self._count(each.stage.layers[-1:]).dense
            point = replace(point, buffers=point.buffers + self._value * last)
        if not (self._forwards_first and each.accumulated):
            yield replace(point, activations=kept, working=self._tensors.loss_forward)
        yield replace(point, activations=kept, working=self._tensors.loss_backward)

    def _list_layer(self, each: _Pass, done: int, kept: float) -> Iterator[StepPoint]:
        """Yield the points of a layer's backward pass, when `done` layers have finished theirs."""
        stage = each.stage
        point = self._start_point(each, done)
        layer = stage.layers[-1 - done]
        # FSDP2 gathers and sends experts by themselves, before the rest of a layer.
        own = self._count(range(layer, layer + 1))
        after = self._count_head(stage)
        if done:
            after = self._count(range(layer + 1, layer + 2)).dense
        gathered = self._value * own.dense if self._gathers else 0
        experts = self._value * own.experts if self._gathers else 0
        reduced = 4 * own.dense if self._reduces_each else 0
        reduced_before = 4 * after if self._reduces_each else 0
        # The input of a recomputed layer is among what its backward pass needs.
        left = kept - self._sum_layers(stage.layers[len(stage.layers) - 1 - done :])
        if done and not stage.last:
            # The gradient that the stage received is held until the end of its backward pass.
            left += self._tensors.stream
        tensors = self._get_tensors(layer)
        unread = tensors.unread_result if self._is_recomputed(layer) else 0
        most = tensors.in_backward if each.accumulated else tensors.in_first_backward
        yield replace(
            point,
            activations=left,
            working=most + unread,
            # The weights of this layer, those of the next one as they arrive, and the gradients of
            # the layer or the head before as they are sent.
            buffers=point.buffers + 2 * gathered + experts + reduced_before,
        )
        # What is dropped after the backward pass is dropped before the gradients are sent.
        yield replace(
            point,
            weights=self._start_point(each, done + 1).weights,
            activations=left,
            working=tensors.after_backward,
            buffers=point.buffers + gathered + reduced,
        )

    def _list_end(self, each: _Pass, before: float) -> Iterator[StepPoint]:
        """Yield the points at which only the parameters of FSDP2's root are left."""
        stage = each.stage
        point = self._start_point(each, len(stage.layers))
        root = self._count_root(stage)
        gradients = point.gradients - self._get_loss_gradient(stage)
        buffers = point.buffers
        if self._holds_outside:
            gradients += self._value * root
        if not each.accumulated and not self._reduces_each:
            # The sum over microbatches starts here.
            gradients += 4 * root
        if self._reduces_each:
            # Those of the last layer are still sent.
            buffers += 4 * self._count(stage.layers[:1]).dense
        working = 2 * self._tensors.stream
        if stage.first:
            before += self._tensors.embedding
            working += self._tensors.embedding_backward
            # The gradient of the table is the one that FSDP2 holds, unless it is added to that of
            # the output matrix.
            tied = not self._shape.config.untie_embeddings_and_output_weights
            if self._holds_outside and not (tied and stage.last):
                working -= self._tensors.table_gradient
            if not self._holds_outside and self._software.half and each.accumulated:
                # Autograd converts the gradient to fp32, which has twice the bytes.
                working += 2 * self._tensors.table_gradient
        yield replace(
            point, gradients=gradients, activations=before, working=working, buffers=buffers
        )
        if self._reduces_each:
            yield replace(point, gradients=gradients, activations=before, buffers=4 * root)

    def _get_loss_gradient(self, stage: Stage) -> float:
        """Return the bytes of a gradient of the output matrix that stays during the layers."""
        if not stage.last or not self._fsdp or self._count_head(stage):
            return 0.0
        return self._tensors.loss_gradient

    def _start_point(self, each: _Pass, done: int | None) -> StepPoint:
        """Return weights, gradients and gathered weights when `done` layers have finished.

        Before the end of the loss, `done` is None.
        """
        parameters = self._held.whole
        ended = Held()
        if done is not None:
            layers = each.stage.layers[len(each.stage.layers) - done :]
            ended = share_parameters(self._count(layers), self._layout)
            ended += self._hold(self._count_head(each.stage))
        finished = ended.whole
        summed = self._held if each.accumulated else ended
        gradients: float = 4 * (summed.shard if self._reduces_each else summed.whole)
        if not self._fsdp:
            # Both orders of a weight in float8 have the bytes of a copy in 16 bits.
            return StepPoint(2 * parameters if self._software.half else 0, gradients)
        # The gradient of a tied output matrix stays as autograd computed it.
        if done is not None:
            gradients += self._get_loss_gradient(each.stage)
        if self._gathers:
            outside = self._count_outside()
            if done is not None:
                outside -= self._count_head(each.stage)
            return StepPoint(0.0, gradients, buffers=self._value * outside)
        # The last backward pass drops the weights of a layer or head that it has finished.
        dropped = finished if each.number == self._passes else 0
        weights = self._value * (parameters - dropped) + 2 * self._count_rounded_weights()
        return StepPoint(weights, gradients)

    def _count_rounded_weights(self) -> int:
        """Return the weights that are kept in float8, in both orders, beside those in 16 bits."""
        if self._software.float8 is None:
            return 0
        linears = list_float8_linears(self._shape, self._layout.tensor)
        layers = sum(
            self._software.float8.covers(layer) for stage in self._stages for layer in stage.layers
        )
        return layers * sum(each.weights for each in linears)

    def _reduce_root(self) -> StepPoint:
        """Return the end of a step that reduces the gradients of FSDP2's root.

        They exist in fp32 twice: as the sum over microbatches, and in the order in which they are
        sent. Those of all layers and of the head are reduced already.
        """
        root = sum(map(self._count_root, self._stages))
        others = self._held.shard - root / self._layout.shard_size
        return StepPoint(
            gradients=(4 + self._value) * root + 4 * others,
            working=2 * self._tensors.stream,
            buffers=4 * root,
        )
