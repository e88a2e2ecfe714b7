"""Tests of --use-torch-compile: the numbers are the same, and the number of graphs is limited.

The compiler of these tests is `aot_eager`. It traces forward and backward as inductor does, and
generates no code. Only a test about the numbers of generated code uses inductor.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from model.builders import build, some_tokens, tiny_config
from torch._dynamo.utils import counters

from megatron.engine.parallelize import compile_blocks, recompute_blocks
from megatron.errors import ConfigError
from megatron.model import compiling
from megatron.model.execution import Execution
from megatron.model.gpt import GPT
from megatron.model.inputs import Documents, Inputs
from megatron.parallel.rng import DropoutKey, RandomStreams

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
}
"""Other parts of models. Layers with other attention have a graph of their own for it."""


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
    models = []
    for execution in (
        eager or Execution(),
        Execution(compile=True, dynamic_shapes=dynamic, **_recompute(eager)),
    ):
        model = GPT(
            plain.shape, plain.tp, RandomStreams(7, torch.device("cpu")), execution=execution
        )
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


def step(
    model: GPT, number: int = 1, *, length: int = 24, documents: Documents | None = None
) -> list[torch.Tensor]:
    """Return the loss and all gradients of a microbatch."""
    model.zero_grad()
    tokens = some_tokens(length=length, seed=number)
    loss = model(
        None, Inputs(tokens, tokens, documents=documents, dropout_key=DropoutKey(number, 0))
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
    assert count_graphs() == 2


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(("shape", "graphs"), [("apertus", 2), ("olmo", 3), ("neox", 3)])
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
def test_two_graphs_for_twelve_layers(dropout: float) -> None:
    """Layers, dropout sites and iterations share two graphs. Evaluation needs two more."""
    _, compiled = pair(num_layers=12, hidden_dropout=dropout, attention_dropout=dropout)
    for number in range(1, 4):
        step(compiled, number)
    assert count_graphs() == 2
    compiled.eval()
    with torch.no_grad():
        for number in range(2):
            tokens = some_tokens(seed=number)
            compiled(None, Inputs(tokens, tokens))
    assert count_graphs() == 4
    compiled.train()
    step(compiled, 9)
    assert count_graphs() == 4


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
    assert count_graphs() == (2 if shape == "gpt2" else 3)


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


def test_a_missing_compiler_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/nonexistent/g++"))
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.raises(ConfigError, match=r"No working C\+\+ compiler"),
    ):
        compiling.require_compiler(torch.device("cpu"))
