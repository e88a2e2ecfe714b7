"""Likelihoods computed by the engine that trains, at every parallel layout.

Requests are samples of a batch, and take the path of the validation. The invariant: all ranks call
the engine with the same shapes, whatever the number of requests is.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.data.batches import Microbatch
from megatron.engine.base import Engine
from megatron.extras.inference.scoring.likelihood import (
    Continuation,
    Row,
    join_continuation,
    make_inputs,
)
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan

_SHORTEST = 16
"""Smallest length that a sample is padded to."""
_ALIGNMENT = 8
"""Lengths are multiples of this, as kernels for matrices prefer them."""
_NOTHING: Row = ((), 0)
"""A sample in which nothing counts."""


@dataclass(frozen=True)
class PackedRequests:
    """Requests as two tensors, which ranks can send to each other and which need little memory."""

    tokens: Tensor
    """int32[total], the ids of all requests, one request after the other."""
    lengths: Tensor
    """int32[n, 2], the number of ids of each request, and how many of them are its continuation."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.lengths)


class RequestPacker:
    """Collects requests, one at a time. A list of Python's numbers would need ten times as much."""

    def __init__(self, context: int) -> None:
        """Start without requests.

        Args:
            context: Largest number of tokens of an input.
        """
        self._context = context
        self._tokens = array("i")
        self._lengths: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._lengths)

    def add(self, request: Continuation) -> None:
        """Add a request.

        Raises:
            ConfigError: See `join_continuation`.
        """
        ids, following = join_continuation(request, self._context)
        self._tokens.extend(ids)
        self._lengths.append((len(ids), following))

    def pack(self) -> PackedRequests:
        """Return all requests."""
        return PackedRequests(
            torch.frombuffer(self._tokens, dtype=torch.int32).clone(),
            torch.tensor(self._lengths, dtype=torch.int32),
        )


class EngineScorer:
    """Computes likelihoods with an engine. All ranks call it with the same requests."""

    def __init__(self, engine: Engine, plan: Plan, mesh: Mesh) -> None:
        """Remember the engine.

        Args:
            engine: The engine, whose weights are not changed.
            plan: The plan of the run.
            mesh: This rank's mesh.
        """
        self._engine = engine
        self._plan = plan
        self._mesh = mesh

    def score(self, requests: PackedRequests) -> Tensor:
        """Return the likelihood of each request's continuation, float64[n, 2].

        The columns are the log-likelihood in nats, and 1 if each token of the continuation is the
        most likely one.
        """
        found = torch.zeros((len(requests), 2), dtype=torch.float64)
        ends = requests.lengths[:, 0].long().cumsum(0).tolist()
        sizes = requests.lengths.tolist()

        def read(request: int) -> Row:
            length, following = sizes[request]
            end = ends[request]
            return requests.tokens[end - length : end].tolist(), following

        for length, chosen in self._divide([size - 1 for size, _ in sizes]):
            self._mesh.ranks.check_stop()
            self._mesh.progress.begin_step("evaluation batch of tasks", chosen[0])
            rows = [read(request) for request in chosen]
            scored = self._engine.score_batch(self._make_microbatches(rows, length))
            found[chosen] = scored[: len(chosen)]
        return found

    def _divide(self, inputs: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield batches of requests, each with the length of its samples.

        Args:
            inputs: Tokens of the input of each request.
        """
        lengths = list_sample_lengths(self._plan)
        # As many samples as an evaluation of the loss computes together.
        batch_size = self._plan.batch_size.final
        for length, shorter in zip(lengths, [*lengths[1:], -1], strict=True):
            chosen = [number for number, size in enumerate(inputs) if shorter < size <= length]
            for start in range(0, len(chosen), batch_size):
                yield length, chosen[start : start + batch_size]

    def _make_microbatches(self, rows: Sequence[Row], length: int) -> list[Microbatch]:
        """Return this rank's microbatches of a batch. Samples in which nothing counts fill it."""
        micro_batch_size = self._plan.config.batch.micro_batch_size
        data = self._mesh.grid.data
        count = math.ceil(len(rows) / (micro_batch_size * data))
        samples = count * micro_batch_size
        complete = [*rows, *[_NOTHING] * (samples * data - len(rows))]
        first = samples * self._mesh.coordinate.data
        microbatches = []
        for start in range(first, first + samples, micro_batch_size):
            inputs = make_inputs(complete[start : start + micro_batch_size], length)
            assert inputs.labels is not None, "`make_inputs` makes labels"
            microbatches.append(Microbatch(inputs.tokens, inputs.labels, inputs.loss_mask))
        return microbatches


def list_sample_lengths(plan: Plan) -> list[int]:
    """Return the lengths that samples are padded to, the longest first.

    Each is half of the one before it, so at most about half of a sample is padding.
    """
    lengths = [plan.config.model.seq_length]
    # Compiled blocks would be compiled again for each length.
    if plan.config.kernels.use_torch_compile and plan.curriculum is None:
        return lengths
    # With sequence or context parallelism, ranks have equal parts of a sample.
    step = math.lcm(_ALIGNMENT, plan.config.parallel.length_unit)
    while lengths[-1] % (2 * step) == 0 and lengths[-1] // 2 >= _SHORTEST:
        lengths.append(lengths[-1] // 2)
    return lengths
