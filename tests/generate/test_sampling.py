"""The choice of a token from logits, beside that of `transformers`."""

import math
from typing import Any

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.extras.inference.generate.sampling import (
    Sampler,
    SamplingOptions,
    check_sampling,
    filter_logits,
)
from megatron.plan.rules.finding import refuse_errors

VOCAB = 50
LOGITS = 3 * torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(4))
TEXTS = [[1, 2, 2, 7], [0, 49], [5]]
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-k above the vocabulary": {"temperature": 1.0, "top_k": 70},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-9},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.7},
    "repetition reward": {"temperature": 1.0, "repetition_penalty": 0.6},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}


def filter_with_transformers(options: SamplingOptions) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    # Only the settings that differ from the default have a processor there too.
    given: list[Any] = []
    if options.repetition_penalty != 1:
        given.append(transformers.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    given.append(transformers.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        given.append(transformers.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        given.append(transformers.TopPLogitsWarper(options.top_p))
    rows = []
    for row, text in zip(LOGITS, TEXTS, strict=True):
        rows.append(
            transformers.LogitsProcessorList(given)(torch.tensor([text]), row.unsqueeze(0).clone())
        )
    return torch.cat(rows)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_distribution_is_that_of_transformers(name: str) -> None:
    options = SamplingOptions(**OPTIONS[name])
    logits = LOGITS.clone()
    ours = filter_logits(logits, options, TEXTS).softmax(-1)
    torch.testing.assert_close(ours, filter_with_transformers(options).softmax(-1))
    assert torch.equal(logits, LOGITS)


def test_temperature_0_takes_the_most_likely_token() -> None:
    sampler = Sampler(SamplingOptions(), TEXTS, torch.device("cpu"))
    assert torch.equal(sampler.draw(LOGITS, [0, 1, 2], TEXTS), LOGITS.argmax(-1))


def test_a_penalty_changes_the_most_likely_token() -> None:
    best = int(LOGITS[0].argmax())
    options = SamplingOptions(repetition_penalty=100.0)
    sampler = Sampler(options, TEXTS[:1], torch.device("cpu"))
    assert int(sampler.draw(LOGITS[:1], [0], [[best]])) == int(LOGITS[0].topk(2).indices[1])


def draw_often(seed: int, rows: list[int], prompts: list[list[int]]) -> list[list[int]]:
    """Return 300 draws for each of some sequences."""
    sampler = Sampler(SamplingOptions(temperature=1.0, seed=seed), prompts, torch.device("cpu"))
    logits = torch.stack([LOGITS[0] for _ in rows])
    draws = [sampler.draw(logits, rows, prompts) for _ in range(300)]
    return torch.stack(draws, dim=1).tolist()


def test_random_numbers_depend_on_seed_and_prompt_only() -> None:
    both = draw_often(1, [0, 1], [[1], [2]])
    assert draw_often(1, [0], [[2]]) == both[1:]
    assert both[0] != both[1]
    assert draw_often(2, [0], [[1]])[0] != both[0]


def test_draws_follow_the_distribution() -> None:
    drawn = torch.tensor(draw_often(1, list(range(20)), [[i] for i in range(20)])).flatten()
    expected = LOGITS[0].softmax(-1)
    found = torch.bincount(drawn, minlength=VOCAB) / drawn.numel()
    # Five standard deviations of a share of 6,000 draws.
    bound = 5 * (expected * (1 - expected) / drawn.numel()).sqrt() + 1e-3
    assert bool(((found - expected).abs() < bound).all())


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"temperature": math.nan}, "--temperature nan"),
        ({"temperature": 1e-50}, "--temperature 1e-50"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.1}, "--top-p 1.1"),
        ({"top_p": math.nan}, "--top-p nan"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0.0"),
        ({"repetition_penalty": 1e-50}, "--repetition-penalty 1e-50"),
        ({"repetition_penalty": math.inf}, "--repetition-penalty inf"),
        ({"top_k": -1}, "--top-k -1"),
        ({"seed": 2**63}, "--seed 9223372036854775808"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], phrase: str) -> None:
    with pytest.raises(ConfigError, match=phrase):
        refuse_errors(check_sampling(SamplingOptions(**changes)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    logits = LOGITS.clone()
    logits[1, 3] = value
    sampler = Sampler(SamplingOptions(), TEXTS, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--dtype"):
        sampler.draw(logits, [0, 1, 2], TEXTS)
