"""Logits with the cache of keys and values, beside those of complete texts."""

from typing import Any

import pytest
import torch
from model.builders import build, some_tokens, tiny_config
from model.reference_models import FAMILIES

from megatron.extras.inference.generate.cached_model import CachedModel
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.model.gpt import GPT

LENGTH = 24
PROMPTS = (5, 9, 1, 5)
"""Lengths of the prompts of a batch. Two are equal, and one is a single token."""
TOKENS = some_tokens(len(PROMPTS), LENGTH)
MODELS: dict[str, dict[str, Any]] = {name: dict(each.ours) for name, each in FAMILIES.items()} | {
    "alibi with a window": {
        "position_embedding_type": "alibi",
        "sliding_window": 6,
        "full_attention_layers": "1::2",
    },
    "experts": {
        "position_embedding_type": "rotary",
        "num_experts": 6,
        "moe_router_topk": 3,
        "moe_layer_freq": "2",
        "moe_shared_expert_intermediate_size": 8,
    },
    "latent": {
        "multi_latent_attention": True,
        "position_embedding_type": "rotary",
        "q_lora_rank": 12,
        "kv_lora_rank": 20,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 10,
        "rope_scaling": "yarn",
        "mscale_all_dim": 1.0,
        "sliding_window": 7,
        "full_attention_layers": "1::2",
    },
    "alibi with groups": {"position_embedding_type": "alibi", "num_query_groups": 2},
    "learned positions with a window": {"sliding_window": 4},
    "a sink of 0 with groups": {"softmax_type": "off-by-one", "num_query_groups": 2},
    # A prompt of one token is shorter than the convolution.
    "gated delta nets": {
        "position_embedding_type": "rotary",
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "4",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
    },
}


def make_model(name: str) -> GPT:
    """Return a model with large weights, so that every part changes the logits."""
    described = {"num_layers": 4} | MODELS[name]
    if "experimental_attention_variant" in described:
        # The norm would enlarge the rounding of a first token more than the bound.
        described["linear_norm_epsilon"] = 0.1
    model = build(tiny_config(**described)).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def compute_cached(model: GPT, rows: list[int]) -> list[torch.Tensor]:
    """Return the logits after each token from the last one of the prompt on, [s, v] for each row.

    The texts are those of `TOKENS`. A text that has all its tokens leaves the batch.
    """
    prompts = [TOKENS[row, : PROMPTS[row]].tolist() for row in rows]
    cached = CachedModel(StagedModel(model), prompts, LENGTH)
    found: dict[int, list[torch.Tensor]] = {row: [] for row in rows}
    logits = cached.read_prompts()
    used = {row: PROMPTS[row] for row in rows}
    active = rows
    while True:
        assert logits is not None, "the model is in one stage"
        for row, each in zip(active, logits, strict=True):
            found[row].append(each)
        kept = [place for place, row in enumerate(active) if used[row] < LENGTH]
        if not kept:
            return [torch.stack(found[row]) for row in rows]
        if len(kept) < len(active):
            cached.keep(torch.tensor(kept))
            active = [active[place] for place in kept]
        logits = cached.add_tokens(torch.stack([TOKENS[row, used[row]] for row in active]))
        for row in active:
            used[row] += 1


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_does_not_change_logits(name: str) -> None:
    model = make_model(name)
    if name == "moonlight":
        # In fp32, these logits have errors of 1e-5 with each kernel, with and without a cache.
        model = model.double()
    with torch.no_grad():
        complete = model.compute_logits(TOKENS).float()
        cached = compute_cached(model, list(range(len(PROMPTS))))
    for row, logits in enumerate(cached):
        expected = complete[row, PROMPTS[row] - 1 :]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        # kv_lora_rank and qk_rope_head_dim.
        ("latent", 20 + 4),
        # A key and a value for each of 2 groups.
        ("llama", 2 * 2 * 8),
    ],
)
def test_the_bytes_of_a_cache_are_those_of_the_formula(
    name: str, numbers: int, dtype: torch.dtype
) -> None:
    """The last prompts are short, and the third sequence ends first."""
    model = make_model(name).to(dtype)
    prompts = [TOKENS[row, :length].tolist() for row, length in enumerate(PROMPTS)]
    cached = CachedModel(StagedModel(model), prompts, 3)
    of_token = numbers * model.shape.config.num_layers * dtype.itemsize

    def count_bytes() -> int:
        stored = [x for layer in cached._cache._layers.values() for x in layer]
        assert not cached._cache._states
        return sum(x.untyped_storage().nbytes() for x in stored)

    with torch.no_grad():
        cached.read_prompts()
        assert count_bytes() == 4 * (9 + 3) * of_token
        cached.add_tokens(TOKENS[:, 9])
        assert count_bytes() == 4 * (9 + 3) * of_token
        cached.keep(torch.tensor([0, 1, 3]))
        cached.add_tokens(TOKENS[:3, 10])
    assert count_bytes() == 3 * (9 + 3) * of_token


def test_a_text_does_not_depend_on_its_batch() -> None:
    model = make_model("llama")
    with torch.no_grad():
        together = compute_cached(model, [0, 1, 2, 3])
        for row in range(len(PROMPTS)):
            (alone,) = compute_cached(model, [row])
            torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-5)


def test_a_wrong_position_would_be_found() -> None:
    model = make_model("llama")
    with torch.no_grad():
        complete = model.compute_logits(TOKENS)
        cached = CachedModel(
            StagedModel(model), [TOKENS[0, :5].tolist(), TOKENS[1, :9].tolist()], 4
        )
        cached.read_prompts()
        cached._positions._empty += 1
        logits = cached.add_tokens(torch.stack([TOKENS[0, 5], TOKENS[1, 9]]))
    assert logits is not None
    assert (logits[0] - complete[0, 5]).abs().max() > 0.1


def test_bf16_logits_are_those_of_complete_texts() -> None:
    model = make_model("qwen3").to(torch.bfloat16)
    with torch.no_grad():
        complete = model.compute_logits(TOKENS)
        cached = compute_cached(model, [0, 1])
    assert cached[0].dtype == torch.float32
    for row, logits in enumerate(cached):
        expected = complete[row, PROMPTS[row] - 1 :]
        torch.testing.assert_close(logits, expected, rtol=0.1, atol=0.3)
