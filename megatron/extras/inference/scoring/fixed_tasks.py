"""Tasks of lm-evaluation-harness whose requests are built once and answered many times.

The harness usually asks a model while it runs. During training, the model is on many ranks, and
only rank 0 has the harness. So the requests are collected before training. All ranks then score
them together, and the harness gets the answers from a table.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import LM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.extras.inference.scoring.harness import TextLM
from megatron.extras.inference.scoring.likelihood import RequestPacker, iterate_windows
from megatron.extras.inference.scoring.tasks import harden_manager, select_metrics
from megatron.tokenizer.build import Tokenizer

_Key = tuple[str, tuple[Any, ...]]
"""Kind and texts of a request of the harness."""
_SCORED = ("loglikelihood", "loglikelihood_rolling")
"""The kinds of requests that need likelihoods only."""


class FixedTasks:
    """Tasks with their requests."""

    def __init__(
        self,
        manager: Any,
        names: Sequence[str],
        tokenizer: Tokenizer,
        context: int,
        *,
        num_fewshot: int | None = None,
        limit: int | None = None,
    ) -> None:
        """Load the tasks and build their requests.

        The examples in the prompts are those that the harness itself would choose.

        Args:
            manager: The harness's manager, which knows the tasks.
            names: Names of tasks, groups or tags.
            tokenizer: The tokenizer of the training.
            context: Largest number of tokens of an input.
            num_fewshot: Examples in each prompt. None: that of the task.
            limit: Use only the first items of each task.

        Raises:
            ConfigError: A task needs generated text, or has a continuation that does not fit.
        """
        recorder = _Recorder(tokenizer, context)
        harden_manager(manager)
        with _seed_random_numbers():
            self._loaded = manager.load(list(names))
            for name, task in self._loaded["tasks"].items():
                _choose_examples(task, num_fewshot)
                task.build_all_requests(limit=limit)
                _fix_requests(task)
                for instance in task.instances:
                    # Here, and not when the task runs, which may be hours later.
                    _check_kind(name, instance.request_type)
                    recorder.record(name, instance)
        self._limit = limit
        self._places = recorder.places
        self.requests = recorder.packer.pack()
        """What must be scored."""

    def compute_scores(self, likelihoods: Tensor) -> dict[str, dict[str, float]]:
        """Return the scores: task or group -> metric -> value.

        They have no standard errors. The harness would start processes to estimate some of them.

        Args:
            likelihoods: float64[n, 2] for the n requests: the log-likelihood, and 1 if each token
                of the continuation is the most likely one.
        """
        for task in self._loaded["tasks"].values():
            for instance in task.instances:
                # The answers of the evaluation before are still in it.
                instance.resps = []
                instance.filtered_resps = {}
        with _seed_random_numbers():
            results = evaluate(
                _Table(self._places, likelihoods),
                self._loaded,
                limit=self._limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        assert results is not None, "this is the harness's only process"
        return select_metrics(results["results"])


def _choose_examples(task: Any, num_fewshot: int | None) -> None:
    """Set the examples of a task's prompts, in the same way as the harness."""
    default = task.get_config("num_fewshot")
    if num_fewshot is None:
        if default is None:
            task.set_config(key="num_fewshot", value=0)
    elif default != 0:
        # A task with 0 in its own file stays without examples.
        task.set_config(key="num_fewshot", value=num_fewshot)
    # Each task has a generator of its own, which the global seeds do not reach.
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


def _fix_requests(task: Any) -> None:
    """Keep the harness from building the requests of a task again in each evaluation."""
    # Other requests than the recorded ones would have no answer in the table.
    task.build_all_requests = lambda **options: None


def _check_kind(name: str, kind: str) -> None:
    """Check that a task needs likelihoods only.

    Raises:
        ConfigError: It needs generated text.
    """
    if kind not in _SCORED:
        raise ConfigError(
            f"--eval-tasks {name} needs {kind}, which does not run inside the training loop. Leave "
            "it out, and evaluate it from a checkpoint with tools/evaluate.py"
        )


@contextlib.contextmanager
def _seed_random_numbers() -> Iterator[None]:
    """Seed all global generators as the harness does, and restore their states afterwards.

    Tasks may use any of them. The numbers of training must not change, and each evaluation must be
    the same.
    """
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng():
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class _Recorder(TextLM):
    """Encodes the harness's requests, and collects what a model must score for them."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        super().__init__(tokenizer, context)
        self.packer = RequestPacker(context)
        self.places: dict[_Key, slice] = {}
        """The scored requests that belong to a request of the harness."""

    def record(self, task: str, instance: Any) -> None:
        """Add a request of the harness. An equal one is scored only once.

        Raises:
            ConfigError: A continuation does not fit into the context.
        """
        key = (instance.request_type, instance.args)
        # Choices of several questions may be the same text.
        if key in self.places:
            return
        first = len(self.packer)
        try:
            getattr(self, instance.request_type)([instance], disable_tqdm=True)
        except ConfigError as error:
            raise ConfigError(f"--eval-tasks {task}: {error}") from error
        self.places[key] = slice(first, len(self.packer))

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        for request in requests:
            (text,) = request.args
            ids = self.tok_encode(text)
            for window in iterate_windows(ids, self.prefix_token_id, self.max_length):
                self.packer.add(window)
        return []

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        for _, context, following in requests:
            self.packer.add((context, following))
        return []


class _Table(LM):
    """A model whose answers are already in a table."""

    def __init__(self, places: Mapping[_Key, slice], likelihoods: Tensor) -> None:
        super().__init__()
        self._places = places
        self._likelihoods = likelihoods

    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
        return [self._look_up(request) for request in requests]

    def loglikelihood_rolling(self, requests: Any) -> list[float]:
        return [self._look_up(request)[0] for request in requests]

    def generate_until(self, requests: Any) -> list[str]:
        raise AssertionError("`_check_kind` refuses tasks that generate text")

    def _look_up(self, request: Any) -> tuple[float, bool]:
        # A rolling request has a row for each of its windows. The sum is over the whole text.
        rows = self._likelihoods[self._places[request.request_type, request.args]]
        return float(rows[:, 0].sum()), bool(rows[:, 1].all())
