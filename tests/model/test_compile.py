"""Tests of --use-torch-compile: the numbers are the same, and the number of graphs is limited.

The compiler of these tests is `aot_eager`. It traces forward and backward as inductor does, and
generates no code. Only a test about the numbers of generated code uses inductor.
"""

import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from model.builders import build, some_tokens, tiny_config
from torch._dynamo.utils import counters

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.config.presets import list_preset_names, read_preset
from megatron.console.preset_table import build_preset_shape
from megatron.engine import parallelize
from megatron.engine.parallelize import compile_blocks, recompute_blocks
from megatron.model.execution import Execution
from megatron.model.gpt import GPT
from megatron.model.inputs import Documents, Inputs

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "ffn_hidden_size": 80,
    "num_query_groups": 2,
    "add_bias_linear": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "bloom": {"position_embedding_type": "alibi"},
}
PARTS: dict[str, dict[str, Any]] = {
    "apertus": {
        "position_embedding_type": "rotary",
        "normalization": "RMSNorm",
        "activation": "xielu",
        "qk_norm": "head",
        "rope_scaling": "llama3",
    },
    "olmo": LLAMA
    | {"qk_norm": "full", "norm_placement": "output"}
    | {"sliding_window": 9, "full_attention_layers": "1"},
    "neox": {
        "position_embedding_type": "rotary",
        "no_rope_layers": "1",
        "parallel_residual": True,
        "norm_bias": False,
    },
    "latent": LLAMA
    | {"num_query_groups": None, "multi_latent_attention": True, "q_lora_rank": 20}
    | {"kv_lora_rank": 12, "qk_head_dim": 10, "qk_pos_emb_head_dim": 6, "v_head_dim": 14}
    | {"rope_scaling": "yarn", "rope_original_length": 8, "mscale": 0.7, "mscale_all_dim": 1.0},
}
"""Other parts of models. Layers with other attention have a graph of their own for it."""

PRESETS = {
    "gpt2-124m": 1,
    "tr11-176b": 1,
    "llama2-70b": 1,
    "llama3-8b": 1,
    "qwen3-8b": 1,
    "olmo2-7b": 1,
    "olmo3-7b": 2,
    "smollm3-3b": 2,
    "apertus-8b": 1,
    "gpt-neox-20b": 1,
    "mistral-7b": 1,
}
"""A preset of each family, and the number of graphs of its layers.

A layer is one graph. Layers with another attention have a graph of their own.
"""
SHORT_PRESETS = ("olmo3-7b", "apertus-8b")


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the compiler by one without code generation, which takes seconds per graph."""
    compile_with = torch.compile

    def trace(function: Callable[..., object], **options: object) -> object:
        return compile_with(function, backend="aot_eager", **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", trace)


def count_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def pair(
    shape: str = "llama",
    *,
    eager: Execution | None = None,
    dynamic: bool = False,
    **changes: Any,
) -> tuple[GPT, GPT]:
    """Return the same model twice, not compiled and compiled."""
    plain = build(tiny_config(**((SHAPES | PARTS)[shape] | changes)))
    return make_pair(plain, eager=eager, dynamic=dynamic)


def make_pair(
    plain: GPT, *, eager: Execution | None = None, dynamic: bool = False
) -> tuple[GPT, GPT]:
    """Return a model twice, not compiled and compiled."""
    models = []
    for execution in (
        eager or Execution(),
        Execution(compile=True, dynamic_shapes=dynamic, **_recompute(eager)),
    ):
        model = GPT(plain.shape, plain.tp, execution=execution)
        recompute_blocks(model, execution)
        compile_blocks(model, execution)
        model.load_state_dict(plain.state_dict())
        models.append(model)
    return models[0], models[1]


def _recompute(execution: Execution | None) -> dict[str, Any]:
    if execution is None:
        return {}
    return {
        "recomputed_part": execution.recomputed_part,
        "recompute_attention_core": execution.recompute_attention_core,
    }


def shrink(name: str) -> ModelConfig:
    """Return the architecture of a preset with small sizes. Its parts stay as they are.

    Layers that are chosen by their number need at least four layers.
    """
    config = build_preset_shape(read_preset(name)).config
    ratio = config.num_attention_heads // (config.num_query_groups or config.num_attention_heads)
    return dataclasses.replace(
        config,
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=None if config.num_query_groups is None else max(1, 4 // ratio),
        kv_channels=None if config.kv_channels is None else 16,
        ffn_hidden_size=None if config.ffn_hidden_size is None else 80,
        seq_length=24,
        max_position_embeddings=None,
        sliding_window=None if config.sliding_window is None else 9,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def step(
    model: GPT, number: int = 1, *, length: int = 24, documents: Documents | None = None
) -> list[torch.Tensor]:
    """Return the loss and all gradients of a microbatch."""
    model.zero_grad()
    tokens = some_tokens(length=length, seed=number)
    loss = model(
        None, Inputs(tokens, tokens, documents=documents, dropout_key=torch.tensor((7, number, 0)))
    )
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    "execution",
    [Execution(), Execution(recomputed_part=Fraction(1)), Execution(recompute_attention_core=True)],
)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_compiled_model_has_the_same_numbers(shape: str, execution: Execution) -> None:
    eager, compiled = pair(shape, eager=execution)
    torch.testing.assert_close(step(compiled), step(eager), rtol=1e-5, atol=1e-6)
    assert count_graphs() == 1


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    ("shape", "graphs"), [("apertus", 1), ("olmo", 2), ("neox", 2), ("latent", 1)]
)
def test_compiled_parts_have_the_same_numbers(shape: str, graphs: int) -> None:
    eager, compiled = pair(shape)
    for number in (1, 2):
        torch.testing.assert_close(
            step(compiled, number), step(eager, number), rtol=1e-5, atol=1e-6
        )
        assert count_graphs() == graphs


def test_generated_code_has_the_same_numbers_and_repeats_its_dropout() -> None:
    eager, compiled = pair(num_layers=1)
    torch.testing.assert_close(step(compiled), step(eager), rtol=1e-5, atol=1e-6)
    _, dropping = pair(num_layers=1, hidden_dropout=0.1)
    first = step(dropping, 1)
    second = step(dropping, 2)
    again = step(dropping, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], step(compiled, 1)[0])


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_twelve_layers_share_a_graph(dropout: float) -> None:
    """Layers, dropout sites and iterations share it. Evaluation has another one."""
    _, compiled = pair(num_layers=12, hidden_dropout=dropout, attention_dropout=dropout)
    for number in range(1, 4):
        step(compiled, number)
    assert count_graphs() == 1
    compiled.eval()
    with torch.no_grad():
        for number in range(2):
            tokens = some_tokens(seed=number)
            compiled(None, Inputs(tokens, tokens))
    assert count_graphs() == 2
    compiled.train()
    step(compiled, 9)
    assert count_graphs() == 2


@pytest.mark.usefixtures("tracing")
def test_dropout_has_the_same_masks_in_a_graph() -> None:
    eager, compiled = pair(hidden_dropout=0.2, attention_dropout=0.2)
    for number in (1, 2):
        torch.testing.assert_close(
            step(compiled, number), step(eager, number), rtol=1e-5, atol=1e-6
        )


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_curriculum_needs_no_graph_for_each_length(shape: str) -> None:
    eager, compiled = pair(shape, dynamic=True)
    for length in (4, 8, 12, 16, 20, 24):
        torch.testing.assert_close(
            step(compiled, length=length), step(eager, length=length), rtol=1e-5, atol=1e-6
        )
    # The first length needs a graph of its own if it equals another size of the layer. 4 is the
    # number of heads and half of a head's width.
    assert count_graphs() == (1 if shape == "gpt2" else 2)


@pytest.mark.usefixtures("tracing")
def test_documents_are_attended_outside_of_the_graph() -> None:
    """Bounds of documents need no graph. The second half of each layer stays compiled."""
    eager, compiled = pair()
    for bound in (5, 9, 17):
        documents = ((0, bound, 24), (0, 24), (0, 3, bound, 24))
        torch.testing.assert_close(
            step(compiled, documents=documents),
            step(eager, documents=documents),
            rtol=1e-5,
            atol=1e-6,
        )
    assert count_graphs() == 1


def check_compiled_preset(name: str, graphs: int | None) -> None:
    """Check that the compiled layers equal the eager ones, and that later steps compile nothing."""
    eager, compiled = make_pair(build(shrink(name)))
    for number in range(3):
        torch.testing.assert_close(
            step(compiled, number), step(eager, number), rtol=1e-5, atol=1e-6
        )
        if number == 0:
            graphs = graphs or count_graphs()
        assert count_graphs() == graphs


def test_every_family_of_presets_is_compiled() -> None:
    families = {name.split("-")[0] for name in list_preset_names()}
    # tr1 is a GPT-2, tr8 a GPT-2 with the norm of tr11, and Pythia a GPT-NeoX. The hackathon's
    # model is a Llama 2.
    without = families - {name.split("-")[0] for name in PRESETS}
    # Of a layer with experts, only the first half is compiled, and that is one of the others.
    of_experts = {"mixtral", "olmoe", "deepseek", "moonlight"}
    # The long suite compiles a hybrid (`test_linear_layouts.py`).
    assert without == {"tr1", "tr8", "pythia", "lauzhack", "olmo"} | of_experts


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        pytest.param(name, graphs, marks=() if name in SHORT_PRESETS else pytest.mark.full)
        for name, graphs in PRESETS.items()
    ],
)
def test_a_compiled_preset_has_the_same_numbers(name: str, graphs: int) -> None:
    check_compiled_preset(name, graphs)


@pytest.mark.full
@pytest.mark.parametrize("name", PRESETS)
def test_generated_code_of_a_preset_has_the_same_numbers(name: str) -> None:
    check_compiled_preset(name, None)


def test_a_missing_compiler_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/nonexistent/g++"))
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.raises(ConfigError, match=r"No working C\+\+ compiler"),
    ):
        parallelize.require_compiler(torch.device("cpu"))
