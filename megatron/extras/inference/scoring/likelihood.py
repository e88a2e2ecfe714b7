"""Log-likelihoods of token sequences, computed in batches: by a loaded model, or by an engine.

Invariant: all ranks call the engine with the same shapes, whatever the number of requests is.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.data.batches import Microbatch
from megatron.engine.base import Engine
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.model.inputs import Inputs, SampleLikelihoods
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan

Continuation = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, at least one, and ids that follow it."""

Row = tuple[Sequence[int], int]
"""Ids of a context with its continuation, and the number of ids of the continuation."""


@dataclass(frozen=True)
class Likelihood:
    """How likely a continuation is."""

    log_likelihood: float
    """Sum over the tokens of the continuation, in nats."""
    greedy: bool
    """Whether each of its tokens is the most likely one."""


@dataclass(frozen=True)
class TextLoss:
    """The loss of a text."""

    tokens: int
    bytes: int
    """Length of the text in UTF-8."""
    nats: float
    """Sum over all tokens of -log(probability)."""

    @property
    def loss(self) -> float:
        """Mean over the tokens, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the loss. It is infinite if a float cannot hold it."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Loss that does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.bytes


class Scorer:
    """Computes likelihoods with a model.

    All ranks that hold the model call each method together, and get the same results.
    """

    def __init__(self, model: StagedModel, batch_size: int) -> None:
        """Remember the model.

        Args:
            model: The model.
            batch_size: Sequences that are computed together.
        """
        self._model = model
        self._batch_size = batch_size
        self.context = model.shape.config.seq_length
        """Largest number of tokens of an input."""

    def score(
        self,
        requests: Sequence[Continuation],
        on_batch: Callable[[int], None] = lambda count: None,
    ) -> list[Likelihood]:
        """Return the likelihood of each continuation after its context.

        If both are longer than the model's context, the first tokens are left out.

        Args:
            requests: Contexts and continuations.
            on_batch: Receives the number of requests that this rank's stage has computed.

        Raises:
            ConfigError: See `join_continuation`. Nothing was computed.
        """
        rows = [join_continuation(request, self.context) for request in requests]
        # Sequences of similar length are computed together, so that little is padded. The longest
        # come first, so that a lack of memory shows at the start.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        # Per request, the log-likelihood and 1 if it is greedy. On a rank without logits they stay
        # 0 until the end, so that no stage waits for the last one after each batch.
        found = torch.zeros((len(rows), 2), dtype=torch.float64, device=self._model.device)
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            scored = self._score_batch([rows[i] for i in chosen])
            if scored is not None:
                found[chosen] = scored
            on_batch(len(chosen))
        if requests:
            self._model.broadcast_result(found)
        return [Likelihood(value, bool(greedy)) for value, greedy in found.tolist()]

    def measure_text(self, tokens: Sequence[int], text: str, first: int) -> TextLoss:
        """Return the loss of a text, in windows of the model's context.

        Args:
            tokens: The ids of the text.
            text: The text.
            first: Id before the text, usually the end of a document.
        """
        windows = list(iterate_windows(tokens, first, self.context))
        nats = -sum(found.log_likelihood for found in self.score(windows))
        return TextLoss(len(tokens), len(text.encode()), nats)

    def measure_positions(self, tokens: Sequence[int], first: int, length: int) -> list[float]:
        """Return the mean loss at each position of samples, in nats.

        The text is cut into samples of `length` tokens. No sample sees the text before it, so the
        loss at a position shows what the model makes of that many tokens. The rest is left out.

        Args:
            tokens: The ids of the text.
            first: Id before each sample, usually the end of a document.
            length: Tokens of a sample.

        Raises:
            ConfigError: The text is shorter than a sample.
        """
        rows: list[Row] = [
            ([first, *tokens[start : start + length]], length)
            for start in range(0, len(tokens) - length + 1, length)
        ]
        if not rows:
            raise ConfigError(
                f"a text of {len(tokens)} tokens has no sample of {length}; give a longer text."
            )
        # On a rank without logits it stays 0, as in `score`.
        total = torch.zeros(length, dtype=torch.float64, device=self._model.device)
        for start in range(0, len(rows), self._batch_size):
            found = self._compute_likelihoods(rows[start : start + self._batch_size], length)
            if found.of_positions is not None:
                total -= found.of_positions.sum(dim=1)
        self._model.broadcast_result(total)
        return (total / len(rows)).tolist()

    def _score_batch(self, batch: Sequence[Row]) -> Tensor | None:
        """Return log-likelihood and greediness of each row, [b, 2] in fp64.

        It is None on all pipeline ranks but the last.
        """
        found = self._compute_likelihoods(batch, max(1, max(len(ids) for ids, _ in batch) - 1))
        if found.log_likelihood is None:
            return None
        assert found.greedy is not None, "the last stage fills both"
        return torch.stack([found.log_likelihood.double(), found.greedy.double()], 1)

    def _compute_likelihoods(self, batch: Sequence[Row], length: int) -> SampleLikelihoods:
        """Return the likelihoods of rows, which only the last stage fills."""
        found = SampleLikelihoods()
        inputs = replace(make_inputs(batch, length), likelihoods=found)
        with torch.no_grad():
            self._model.forward(inputs.to(self._model.device))
        return found


def join_continuation(request: Continuation, context: int) -> Row:
    """Join a context and a continuation. First tokens that do not fit are left out.

    Args:
        request: The context and the continuation.
        context: Largest number of tokens of an input.

    Raises:
        ConfigError: The continuation alone does not fit.
    """
    before, following = request
    if len(following) > context:
        raise ConfigError(
            f"a continuation of {len(following)} tokens does not fit into the model's context of "
            f"{context} tokens; leave out the task that has it"
        )
    # The last token of a continuation is predicted, and is no input.
    return [*before, *following][-(context + 1) :], len(following)


def make_inputs(rows: Sequence[Row], length: int) -> Inputs:
    """Return a microbatch of these rows, whose mask keeps the continuations.

    Args:
        rows: A row without ids is a sample in which nothing counts.
        length: Tokens of each sample. A row has at most one more.
    """
    tokens = torch.zeros((len(rows), length), dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    mask = torch.zeros((len(rows), length), dtype=torch.float32)
    for sample, (ids, following) in enumerate(rows):
        # Later tokens do not influence earlier ones, so any padding on the right does.
        row = torch.as_tensor(ids, dtype=torch.int64)
        end = max(len(row) - 1, 0)
        tokens[sample, :end] = row[:-1]
        labels[sample, :end] = row[1:]
        mask[sample, end - following : end] = 1.0
    return Inputs(tokens, labels, mask)


def iterate_windows(
    tokens: Sequence[int], first: int, context: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield contexts and continuations that cover each token of a text once.

    The first token follows `first`. Each window has as much of the text before it as fits, as in
    lm-evaluation-harness.

    Args:
        tokens: The ids of the text.
        first: Id before the text.
        context: Largest number of tokens of an input.
    """
    for start in range(0, len(tokens), context):
        end = min(start + context, len(tokens))
        if start == 0:
            before = [first]
        else:
            before = list(tokens[end - context - 1 : start])
        yield before, list(tokens[start:end])


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
    """Computes likelihoods with the engine that trains, at every parallel layout.

    Requests are samples of a batch, and take the path of the validation. All ranks call it with the
    same requests.
    """

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
            tokens = length * len(chosen)
            self._mesh.progress.begin_step("evaluation batch of tasks", chosen[0], tokens)
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
