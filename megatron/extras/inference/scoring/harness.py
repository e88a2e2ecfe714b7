"""A model of this trainer for the tasks of lm-evaluation-harness.

Source: https://github.com/EleutherAI/lm-evaluation-harness. How contexts and continuations are
divided into tokens is that package's, so the scores equal those of an exported model.

The harness usually asks a model while it runs (`CheckpointLM`). During training, the model is on
many ranks, and only rank 0 has the harness. So the requests of `FixedTasks` are collected before
training. All ranks then score them together, and the harness gets the answers from a table.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import LM, TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from torch import Tensor
from tqdm import tqdm

from megatron.base.errors import ConfigError
from megatron.extras.inference.generate.generation import GenerationOptions, generate
from megatron.extras.inference.generate.sampling import SamplingOptions, check_sampling
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.extras.inference.scoring.likelihood import RequestPacker, Scorer, iterate_windows
from megatron.extras.inference.scoring.tasks import harden_manager, select_metrics
from megatron.plan.rules.finding import refuse_errors
from megatron.tokenizer.build import Tokenizer

_NEW_TOKENS = 256
"""Tokens that are generated if a task does not say how many."""


class TextLM(TemplateLM):
    """What the harness needs to divide texts into the tokens of a training."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        """Remember the tokenizer of the training, and the tokens of the model's context."""
        super().__init__()
        self._text_tokenizer = tokenizer
        self._context = context

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self._text_tokenizer.eod

    @property
    def max_length(self) -> int:
        """Tokens of the model's context."""
        return self._context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self._text_tokenizer.encode(string)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Raise an error, because this model generates no text."""
        raise NotImplementedError("this model generates no text")


class CheckpointLM(TextLM):
    """A loaded checkpoint."""

    def __init__(
        self, model: StagedModel, tokenizer: Tokenizer, batch_size: int, *, quiet: bool = False
    ) -> None:
        """Take a model.

        Args:
            model: The model. All ranks that hold it run the same tasks together.
            tokenizer: The tokenizer of the training.
            batch_size: Sequences that are computed together.
            quiet: Print no progress. Ranks after the first set it.
        """
        scorer = Scorer(model, batch_size)
        super().__init__(tokenizer, scorer.context)
        self._quiet = quiet
        self._model = model
        self._scorer = scorer

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each complete text."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm or self._quiet, desc="texts"):
            (text,) = request.args
            ids = self._text_tokenizer.encode(text)
            windows = list(iterate_windows(ids, self.prefix_token_id, self.max_length))
            found.append(sum(each.log_likelihood for each in self._scorer.score(windows)))
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to one of its stop strings."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm or self._quiet, desc="generated texts"):
            text, settings = request.args
            found.append(self._generate_one(text, dict(settings)))
        return found

    def _generate_one(self, text: str, settings: dict[str, Any]) -> str:
        options = self._read_settings(settings)
        # As in the harness, the start of a long text is left out.
        ids = self._text_tokenizer.encode(text)[-(self.max_length - options.max_new_tokens) :]
        (result,) = generate(
            self._model, self._text_tokenizer, [ids or [self.eot_token_id]], options
        )
        return result.text

    def _read_settings(self, settings: dict[str, Any]) -> GenerationOptions:
        """Return what a task's generation_kwargs mean.

        Raises:
            ConfigError: One of them has a wrong type or is out of range.
        """
        stops = settings.get("until") or []
        if isinstance(stops, str):
            stops = [stops]
        try:
            # One token of the context must remain for the prompt.
            new_tokens = min(int(settings.get("max_gen_toks", _NEW_TOKENS)), self.max_length - 1)
            # Without do_sample, the most likely token is taken, whatever the temperature is.
            temperature = 0.0
            if settings.get("do_sample"):
                temperature = float(settings.get("temperature", 1.0))
            sampling = SamplingOptions(
                temperature=temperature,
                top_k=int(settings.get("top_k", 0)),
                top_p=float(settings.get("top_p", 1.0)),
            )
            refuse_errors(check_sampling(sampling))
        except (TypeError, ValueError, ConfigError) as error:
            raise ConfigError(f"generation_kwargs of a task, {settings}: {error}") from error
        if new_tokens < 0:
            raise ConfigError(
                f"generation_kwargs of a task, {settings}: max_gen_toks must be at least 0."
            )
        # An empty stop string would end each text before it starts.
        return GenerationOptions(new_tokens, sampling, tuple(filter(None, stops)))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, following) for _, context, following in requests]
        with tqdm(total=len(pairs), disable=disable_tqdm or self._quiet, desc="requests") as bar:
            scored = self._scorer.score(pairs, bar.update)
        found = [(each.log_likelihood, each.greedy) for each in scored]
        for (key, _, _), answer in zip(requests, found, strict=True):
            # The harness can keep answers in a file, and asks each model to report them.
            self.cache_hook.add_partial("loglikelihood", key, answer)
        return found


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
