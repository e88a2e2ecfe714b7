"""Generated texts: beside `transformers`, in batches, at the limits, and on several ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model.builders import VOCAB, build, tiny_config
from model.reference_models import FAMILIES
from process_pool import ProcessPool, succeed

from megatron.base.errors import ConfigError, LayoutError
from megatron.checkpoint.load import open_checkpoint
from megatron.extras.inference.generate.generation import (
    Continuation,
    GenerationOptions,
    check_prompt,
    generate,
)
from megatron.extras.inference.generate.load import (
    join_ranks,
    load_part,
    store_for_single_prompts,
)
from megatron.extras.inference.generate.sampling import SamplingOptions
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.extras.interop.convert.importing import import_model
from megatron.model.mlp import MLP

PROMPTS = [[3, 14, 15, 92, 65], [35, 8], [97, 93, 23, 84, 62, 64, 33, 8, 32], [50, 28]]
GREEDY = GenerationOptions(50)
SAMPLED = GenerationOptions(30, SamplingOptions(1.0, top_k=50, top_p=0.95, seed=8))


class Words:
    """A tokenizer whose text of an id is its number."""

    vocab_size = VOCAB

    def __init__(self, eod: int = -1) -> None:
        self.eod = eod

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{each} " for each in ids)


def make_model(**changes: object) -> StagedModel:
    """Return a model in one stage whose predictions are far from uniform."""
    model = build(tiny_config(seq_length=64, **changes)).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return StagedModel(model)


def list_ids(results: list[Continuation]) -> list[list[int]]:
    return [result.ids for result in results]


def save_theirs(family: str, folder: Path) -> Any:
    """Save a model of `transformers` for texts of 64 tokens, and return it."""
    described = FAMILIES[family]
    if family == "gpt2":
        described = replace(described, theirs={**described.theirs, "n_positions": 64})
    model = described.build()
    model.save_pretrained(folder)
    return model


def import_family(family: str, folder: Path) -> Any:
    """Write a model of `transformers` as a checkpoint in `folder`/ours, and return it."""
    theirs = save_theirs(family, folder / "theirs")
    import_model(folder / "theirs", folder / "ours", seq_length=64)
    return theirs


def generate_on_rank(folder: str, size: int, options: GenerationOptions) -> list[list[int]]:
    """Return the ids that one of `size` tensor-parallel ranks generates."""
    with join_ranks(size, 1, "cpu") as mesh:
        model = load_part(open_checkpoint(Path(folder), 0), mesh, torch.float32)
        return list_ids(generate(model, Words(), PROMPTS, options))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "olmo3", "olmoe", "mixtral"])
def test_greedy_ids_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs = import_family(family, tmp_path)
    ours = generate_on_rank(str(tmp_path / "ours"), 1, GREEDY)
    for prompt, ids in zip(PROMPTS, ours, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=50,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "family",
    ["llama", "bloom", "qwen3-multi-query", "olmoe"]
    + [pytest.param(name, marks=pytest.mark.full) for name in ("olmo2", "qwen3-moe", "mixtral")],
)
def test_two_tensor_parallel_ranks_give_the_same_ids(
    family: str, tmp_path: Path, pool: ProcessPool
) -> None:
    pytest.importorskip("transformers")
    # The vocabulary of 101 ids is padded for two ranks.
    import_family(family, tmp_path)
    folder = str(tmp_path / "ours")
    for options in (GREEDY, SAMPLED):
        outcomes = pool.run(2, generate_on_rank, folder, 2, options)
        succeed(outcomes)
        expected = generate_on_rank(folder, 1, options)
        assert [outcome.value for outcome in outcomes] == [expected, expected]


def test_ranks_that_cannot_divide_the_model_are_refused(tmp_path: Path, pool: ProcessPool) -> None:
    pytest.importorskip("transformers")
    import_family("llama", tmp_path)
    for outcome in pool.run(3, generate_on_rank, str(tmp_path / "ours"), 3, GREEDY):
        assert outcome.kind == "ConfigError"
        assert "must divide --num-attention-heads 4" in str(outcome.error)
    with pytest.raises(LayoutError, match="torchrun --nproc-per-node 2"):
        generate_on_rank(str(tmp_path / "ours"), 2, GREEDY)


def test_storing_by_columns_changes_no_text() -> None:
    model = make_model(num_query_groups=2)
    expected = generate(model, Words(), PROMPTS, GREEDY)
    store_for_single_prompts(model)
    mlp = model.stage.get_blocks()[0].mlp
    assert isinstance(mlp, MLP)
    assert not mlp.up.weight.is_contiguous()
    assert generate(model, Words(), PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_a_text_is_the_same_in_any_batch(options: GenerationOptions) -> None:
    model = make_model()
    together = generate(model, Words(), PROMPTS, options)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert generate(model, Words(), [prompt], options) == [expected]
    backwards = generate(model, Words(), PROMPTS[::-1], options)
    assert backwards[::-1] == together


def test_the_end_of_a_document_ends_a_text() -> None:
    model = make_model()
    (complete,) = generate(model, Words(), PROMPTS[:1], GREEDY)
    eod = complete.ids[7]
    results = generate(model, Words(eod), PROMPTS, GREEDY)
    assert results[0].ids == complete.ids[: complete.ids.index(eod)]
    assert results[0].reason == "end-of-document"
    # The other texts go on without it.
    without = generate(model, Words(eod), PROMPTS[1:], GREEDY)
    assert results[1:] == without


def test_a_stop_string_ends_a_text() -> None:
    model = make_model()
    (complete,) = generate(model, Words(), PROMPTS[:1], GREEDY)
    stop = "".join(f"{each} " for each in complete.ids[4:6])
    options = GenerationOptions(50, stop_strings=(stop,))
    (result,) = generate(model, Words(), PROMPTS[:1], options)
    assert result.reason == "stop-string"
    assert result.text == complete.text[: complete.text.index(stop)]


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_prompt_and_text_fill_the_context(positions: str) -> None:
    model = make_model(position_embedding_type=positions)
    prompts = [list(range(60)), [1, 2], list(range(63))]
    results = generate(model, Words(), prompts, GenerationOptions(50))
    assert [len(result.ids) for result in results] == [4, 50, 1]
    assert [result.reason for result in results] == [
        "context-length",
        "max-new-tokens",
        "context-length",
    ]


def test_no_new_token_can_be_asked_for() -> None:
    (result,) = generate(make_model(), Words(), PROMPTS[:1], GenerationOptions(0))
    assert (result.ids, result.text, result.reason) == ([], "", "max-new-tokens")


def test_pieces_arrive_in_the_order_of_the_tokens() -> None:
    pieces: dict[int, list[str]] = {}

    def collect(index: int, text: str) -> None:
        pieces.setdefault(index, []).append(text)

    results = generate(make_model(), Words(), PROMPTS, GREEDY, collect)
    for index, result in enumerate(results):
        assert "".join(pieces[index]) == result.text
        assert len(pieces[index]) == len(result.ids)


@pytest.mark.parametrize(
    ("prompt", "phrase"), [([], "is empty"), (list(range(64)), "has 64 tokens")]
)
def test_prompts_that_cannot_be_continued_are_refused(prompt: list[int], phrase: str) -> None:
    with pytest.raises(ConfigError, match=f"--prompt {phrase}"):
        check_prompt(prompt, make_model(), "--prompt")


def test_training_goes_on_after_generation() -> None:
    """Tables of positions that generation made must not stop a backward pass."""
    generated = make_model(position_embedding_type="rotary")
    generate(generated, Words(), [[1, 2, 3]], GenerationOptions(3))
    model = generated.stage.train()
    logits = model.compute_logits(torch.tensor([[1, 2, 3]]))
    logits.sum().backward()
    assert next(model.parameters()).grad is not None
