"""--use-torch-compile: the same numbers as without, two graphs for all layers, and no graph for what changes during a run.

The compiler of these tests is `aot_eager`, which traces forward and backward as inductor does and generates no code, unless a test
is about the numbers of generated code.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from builders import build, some_tokens, tiny_config
from torch._dynamo.utils import counters

from megatron.errors import ConfigError
from megatron.model import compiling
from megatron.model.execution import Execution
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.rng import DropoutKey, RandomStreams

LLAMA = {
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "ffn_hidden_size": 80,
    "num_query_groups": 2,
    "add_bias_linear": False,
}
SHAPES = {"gpt2": {}, "llama": LLAMA, "bloom": {"position_embedding_type": "alibi"}}


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation, which takes seconds for each graph."""
    compile_with = torch.compile

    def trace(function: Callable[..., object], **options: object) -> object:
        return compile_with(function, backend="aot_eager", **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", trace)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def pair(
    shape: str = "llama",
    *,
    eager: Execution | None = None,
    dynamic: bool = False,
    **changes: object,
) -> tuple[GPT, GPT]:
    """The same model twice: not compiled and compiled."""
    plain = build(tiny_config(**(SHAPES[shape] | changes)))
    models = []
    for execution in (
        eager or Execution(),
        Execution(compile=True, dynamic_shapes=dynamic, **_recompute(eager)),
    ):
        model = GPT(
            plain.shape, plain.tp, RandomStreams(7, torch.device("cpu")), execution=execution
        )
        model.load_state_dict(plain.state_dict())
        models.append(model)
    return models[0], models[1]


def _recompute(execution: Execution | None) -> dict[str, object]:
    if execution is None:
        return {}
    return {
        "recomputed_part": execution.recomputed_part,
        "recompute_attention_core": execution.recompute_attention_core,
    }


def step(
    model: GPT, number: int = 1, *, length: int = 24, documents: object = None
) -> list[torch.Tensor]:
    """Loss and all gradients of a microbatch."""
    model.zero_grad()
    tokens = some_tokens(length=length, seed=number)
    loss = model(
        None, Inputs(tokens, tokens, documents=documents, dropout_key=DropoutKey(number, 0))
    )  # type: ignore[arg-type]
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    "execution",
    [Execution(), Execution(recomputed_part=1), Execution(recompute_attention_core=True)],
)  # type: ignore[arg-type]
@pytest.mark.parametrize("shape", list(SHAPES))
def test_same_numbers_as_without(shape: str, execution: Execution) -> None:
    eager, compiled = pair(shape, eager=execution)
    torch.testing.assert_close(step(compiled), step(eager), rtol=1e-5, atol=1e-6)
    assert graphs() == 2


def test_generated_code_has_the_same_numbers_and_repeats_its_dropout() -> None:
    eager, compiled = pair(num_layers=1)
    torch.testing.assert_close(step(compiled), step(eager), rtol=1e-5, atol=1e-6)
    _, dropping = pair(num_layers=1, hidden_dropout=0.1)
    first, second, again = step(dropping, 1), step(dropping, 2), step(dropping, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], step(compiled, 1)[0])


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_two_graphs_for_twelve_layers(dropout: float) -> None:
    """Neither a layer's number nor its dropout sites, nor the iteration, ask for a graph; evaluation has its own two."""
    _, compiled = pair(num_layers=12, hidden_dropout=dropout, attention_dropout=dropout)
    for number in range(1, 4):
        step(compiled, number)
    assert graphs() == 2
    compiled.eval()
    with torch.no_grad():
        for number in range(2):
            tokens = some_tokens(seed=number)
            compiled(None, Inputs(tokens, tokens))
    assert graphs() == 4
    compiled.train()
    step(compiled, 9)
    assert graphs() == 4


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_curriculum_needs_no_graph_for_each_length(shape: str) -> None:
    eager, compiled = pair(shape, dynamic=True)
    for length in (4, 8, 12, 16, 20, 24):
        torch.testing.assert_close(
            step(compiled, length=length), step(eager, length=length), rtol=1e-5, atol=1e-6
        )
    # A third where the first length happens to be another size of the layer, too: here the 4 heads and half a head's width.
    assert graphs() == (2 if shape == "gpt2" else 3)


@pytest.mark.usefixtures("tracing")
def test_documents_are_attended_outside_of_the_graph() -> None:
    """Other bounds in every batch; the second half of each layer stays compiled."""
    eager, compiled = pair()
    for cut in (5, 9, 17):
        documents = ((0, cut, 24), (0, 24), (0, 3, cut, 24))
        torch.testing.assert_close(
            step(compiled, documents=documents),
            step(eager, documents=documents),
            rtol=1e-5,
            atol=1e-6,
        )
    assert graphs() == 1


def test_a_missing_compiler_is_said_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/nonexistent/g++"))
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.raises(ConfigError, match=r"No working C\+\+ compiler"),
    ):
        compiling.require_compiler(torch.device("cpu"))
