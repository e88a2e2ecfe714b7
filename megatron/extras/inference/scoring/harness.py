"""A model of this trainer for the tasks of lm-evaluation-harness.

Source: https://github.com/EleutherAI/lm-evaluation-harness. How contexts and continuations are
divided into tokens is that package's, so the scores equal those of an exported model.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from megatron.base.errors import ConfigError
from megatron.extras.inference.generate.generation import GenerationOptions, generate
from megatron.extras.inference.generate.sampling import SamplingOptions, check_sampling
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.extras.inference.scoring.likelihood import Scorer, iterate_windows
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
