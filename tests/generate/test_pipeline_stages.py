"""Text and likelihoods of a model in several pipeline stages, compared with those of one process.

The models have 5 layers, so that the stages are uneven in each layout.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from generate.test_generation import PROMPTS, Words, list_ids
from model.builders import VOCAB
from model.reference_models import FAMILIES
from process_pool import ProcessPool, succeed

from megatron.base.errors import ConfigError, LayoutError
from megatron.checkpoint.load import open_checkpoint
from megatron.extras.inference.generate import cached_model
from megatron.extras.inference.generate.generation import GenerationOptions, generate
from megatron.extras.inference.generate.load import join_ranks, load_part, store_for_single_prompts
from megatron.extras.inference.generate.sampling import SamplingOptions
from megatron.extras.inference.scoring.likelihood import Scorer
from megatron.extras.interop.convert.importing import import_model

LAYERS = 5
CONTEXT = 64
FULL = pytest.mark.full
LONG_PROMPTS = [*PROMPTS, [7] * (CONTEXT - 1), list(range(40))]
"""Prompts of different lengths. One has a single token left in the context."""
GREEDY = GenerationOptions(30)
SAMPLED = GenerationOptions(
    30, SamplingOptions(1.1, top_k=60, top_p=0.95, repetition_penalty=1.1, seed=8)
)
OTHER_LAYOUTS = [
    (family, tensor, pipeline)
    for family in (
        *("gpt2", "bloom", "llama", "olmo3", "qwen3-multi-query", "apertus", "qwen3-moe"),
        *("olmoe", "mixtral"),
    )
    for tensor, pipeline in ((1, 2), (1, 3), (1, 4), (1, 5), (2, 2), (2, 3), (4, 2))
    # Its norm of queries and keys needs a query group for each tensor-parallel rank.
    if (family, tensor) not in (("olmo3", 4), ("olmoe", 4))
]


@dataclass
class Found:
    """What one rank computed."""

    greedy: list[list[int]]
    sampled: list[list[int]]
    single: list[list[int]]
    """The ids of one prompt alone."""
    stopped: list[tuple[str, str]]
    """Text and reason of texts that a stop string may end."""
    pieces: list[str]
    """Pieces of the first text as they arrived."""
    likelihoods: list[float]
    are_greedy: list[bool]
    loss: float


def import_family(family: str, folder: Path) -> str:
    """Write a model of `transformers` with 5 layers as a checkpoint, and return its folder."""
    described = FAMILIES[family]
    changes = {"n_positions": CONTEXT} if family == "gpt2" else {}
    layers = "n_layer" if "n_layer" in described.theirs else "num_hidden_layers"
    theirs = {**described.theirs, **changes, layers: LAYERS}
    replace(described, theirs=theirs).build().save_pretrained(folder / "theirs")
    import_model(folder / "theirs", folder / "ours", seq_length=CONTEXT)
    return str(folder / "ours")


def make_requests() -> list[tuple[list[int], list[int]]]:
    """Return contexts and continuations of many lengths, some longer than the context together."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for context, following in ((1, 1), (3, 20), (30, 2), (1, 64), (60, 30), (5, 5), (64, 64)):
        ids = torch.randint(0, VOCAB, (context + following,), generator=generator).tolist()
        requests.append((ids[:context], ids[context:]))
    return requests


def compute_on_rank(folder: str, tensor: int, pipeline: int, dtype: torch.dtype) -> Found:
    """Generate texts and compute likelihoods on one of several ranks."""
    with join_ranks(tensor, pipeline, "cpu") as mesh:
        model = load_part(open_checkpoint(Path(folder), 0), mesh, dtype)
        pieces: list[str] = []
        greedy = generate(model, Words(), LONG_PROMPTS, GREEDY)
        sampled = generate(model, Words(), LONG_PROMPTS, SAMPLED)
        stop = f"{greedy[0].ids[2]} {greedy[0].ids[3]} "
        options = GenerationOptions(12, stop_strings=(stop,))
        stopped = generate(model, Words(), LONG_PROMPTS[:3], options)
        scorer = Scorer(model, 3)
        scored = scorer.score(make_requests())
        text = list(range(VOCAB)) * 2
        loss = scorer.measure_text(text, "a text", 0).loss
        store_for_single_prompts(model)
        single = generate(model, Words(), PROMPTS[:1], SAMPLED, lambda _, text: pieces.append(text))
    return Found(
        list_ids(greedy),
        list_ids(sampled),
        list_ids(single),
        [(result.text, result.reason) for result in stopped],
        pieces,
        [each.log_likelihood for each in scored],
        [each.greedy for each in scored],
        loss,
    )


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [
        ("gpt2", 1, 3),
        ("bloom", 2, 2),
        ("llama", 1, 4),
        ("olmo3", 2, 3),
        ("qwen3-moe", 2, 2),
        *(pytest.param(*each, marks=FULL) for each in OTHER_LAYOUTS),
    ],
)
def test_stages_give_the_results_of_one_process(
    family: str, tensor: int, pipeline: int, tmp_path: Path, pool: ProcessPool
) -> None:
    pytest.importorskip("transformers")
    folder = import_family(family, tmp_path)
    expected = compute_on_rank(folder, 1, 1, torch.float32)
    assert any(reason == "stop-string" for _, reason in expected.stopped)
    ranks = tensor * pipeline
    outcomes = pool.run(ranks, compute_on_rank, folder, tensor, pipeline, torch.float32)
    succeed(outcomes)
    for outcome in outcomes:
        found: Found = outcome.value
        # All ranks have the results, to the last bit.
        assert found == outcomes[0].value
        assert (found.greedy, found.sampled) == (expected.greedy, expected.sampled)
        assert (found.single, found.stopped) == (expected.single, expected.stopped)
        assert (found.pieces, found.are_greedy) == (expected.pieces, expected.are_greedy)
        assert found.likelihoods == pytest.approx(expected.likelihoods, rel=1e-5)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        # Without tensor parallelism, the same sums are computed in the same order.
        assert tensor > 1 or found == expected


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [
        ("llama", 1, 3),
        pytest.param("bloom", 2, 2, marks=FULL),
        pytest.param("olmo3", 2, 3, marks=FULL),
    ],
)
def test_bf16_stages(
    family: str, tensor: int, pipeline: int, tmp_path: Path, pool: ProcessPool
) -> None:
    """In bf16, stages change nothing. Tensor parallelism changes a likelihood by up to 5 %."""
    pytest.importorskip("transformers")
    folder = import_family(family, tmp_path)
    expected = compute_on_rank(folder, 1, 1, torch.bfloat16)
    ranks = tensor * pipeline
    outcomes = pool.run(ranks, compute_on_rank, folder, tensor, pipeline, torch.bfloat16)
    succeed(outcomes)
    for outcome in outcomes:
        found: Found = outcome.value
        assert found == outcomes[0].value
        if tensor == 1:
            assert found == expected
        assert found.likelihoods == pytest.approx(expected.likelihoods, rel=0.05)


def test_layouts_that_do_not_fit_are_refused(tmp_path: Path, pool: ProcessPool) -> None:
    pytest.importorskip("transformers")
    folder = import_family("llama", tmp_path)
    for outcome in pool.run(6, compute_on_rank, folder, 1, 6, torch.float32):
        assert outcome.kind == "ConfigError"
        assert "--pipeline-model-parallel-size 6 must not exceed --num-layers 5" in str(
            outcome.error
        )
    with pytest.raises(LayoutError, match="torchrun --nproc-per-node 6"):
        compute_on_rank(folder, 2, 3, torch.float32)
    with (
        pytest.raises(ConfigError, match="--distributed-timeout-minutes nan"),
        join_ranks(1, 1, "cpu", float("nan")),
    ):
        pass


def break_on_rank(folder: str) -> list[list[int]]:
    """Generate on a stage whose tokens are at wrong positions."""
    with join_ranks(1, 3, "cpu") as mesh:
        model = load_part(open_checkpoint(Path(folder), 0), mesh, torch.float32)
        if mesh.rank == 1:
            make = cached_model.make_slot_bias
            cached_model.make_slot_bias = lambda *arguments: None
        found = generate(model, Words(), LONG_PROMPTS, GREEDY)
        if mesh.rank == 1:
            cached_model.make_slot_bias = make
    return list_ids(found)


def test_a_mistake_in_the_middle_stage_would_be_found(tmp_path: Path, pool: ProcessPool) -> None:
    pytest.importorskip("transformers")
    folder = import_family("llama", tmp_path)
    outcomes = pool.run(3, break_on_rank, folder)
    succeed(outcomes)
    assert outcomes[0].value != compute_on_rank(folder, 1, 1, torch.float32).greedy
