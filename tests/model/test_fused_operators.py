"""The Triton kernels equal PyTorch's operators, in Triton's interpreter."""

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from model.builders import build, some_tokens, tiny_config
from model.kernel_comparisons import (
    ACTIVATIONS,
    compare_gate,
    compare_rotary,
    count_units,
    measure_pairs,
)
from model.norm_comparisons import NORMS, compare_head_norm, compare_norm, make_norm
from training.runs import SIZES
from triton_interpreter import train

from megatron.config.kernels import KernelsConfig
from megatron.engine.parallelize import compile_blocks, fuse_operators, recompute_blocks
from megatron.extras.step.kernels import gate, residual_norm, rotary
from megatron.extras.step.kernels.kind import build_operators
from megatron.model.execution import Execution
from megatron.model.inputs import Inputs
from megatron.model.positions import make_rotary_table, rotate
from megatron.observe.metrics import read_metrics

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rotary",
    "rotary_percent": 0.5,
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "ffn_hidden_size": 80,
    "num_query_groups": 2,
}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One program computes 32 heads of 64 channels, and there are 36 here.
HEADS = {
    "partial, shared groups": ((5, 2, 3, 2, 10), 6, False),
    "odd pairs, positions of samples": ((7, 2, 2, 4, 20), 10, True),
    "several programs a token": ((2, 1, 12, 1, 64), 64, False),
    "one head": ((3, 1, 1, 1, 2), 2, False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS)
def test_rotary_positions(
    shape: str, dtype: torch.dtype, interpreters: ProcessPoolExecutor
) -> None:
    sizes, channels, by_sample = HEADS[shape]
    units = interpreters.submit(
        compare_rotary, sizes, channels, dtype, "cpu", by_sample=by_sample
    ).result()
    assert max(units.values()) <= 1, units


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_units_of_rounding_allow_contracted_operations_and_no_more(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((128, 2, 4, 3, 128), generator=generator).to(dtype)
    cos, sin = make_rotary_table(128, 128, 1e4, torch.device("cpu"))
    wide = x.double() if dtype == torch.float32 else x
    expected = rotate(wide, cos, sin)
    # As on a GPU: one product is rounded to fp32, and the other one is not.
    first, second = x.double().chunk(2, dim=-1)
    by_sine = [(half.float() * sin).double() for half in (second, first)]
    parts = (first * cos - by_sine[0], second * cos + by_sine[1])
    contracted = torch.cat([part.float() for part in parts], dim=-1)
    pairs = measure_pairs(expected, 128)
    assert count_units(contracted.to(dtype), expected, pairs) <= 1
    if dtype == torch.bfloat16:
        # A result that is nearly zero has other digits.
        assert count_units(contracted.to(dtype), expected) > 2
    # One result that is wrong by two distances of the type, or by 3e-6 of its operands.
    place = (3, 1, 2, 2, 5)
    contracted[place] += 2 * torch.finfo(dtype).eps * contracted[place].abs() + 3e-6 * pairs[place]
    assert count_units(contracted.to(dtype), expected, pairs) > 1
    contracted[place] = float("nan")
    with pytest.raises(AssertionError):
        count_units(contracted.to(dtype), expected, pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(
    activation: str, dtype: torch.dtype, interpreters: ProcessPoolExecutor
) -> None:
    units = interpreters.submit(compare_gate, activation, (3, 2, 777), dtype, "cpu").result()
    assert max(units.values()) <= 1, units


# Sizes, whether something is added, and the programs of the backward kernel.
STREAMS: list[tuple[tuple[int, int, int], bool, int | None]] = [
    ((1, 1, 7), True, None),
    ((3, 2, 80), False, None),
    ((7, 3, 33), True, 4),
    ((7, 3, 33), False, 4),
    ((3, 2, 1000), True, 2),
]


def compare_norms(norm: str, dtype: torch.dtype) -> list[dict[str, float]]:
    """Compare the kernels of a norm for all of `STREAMS`."""
    return [
        compare_norm(norm, sizes, dtype, "cpu", with_branch=with_branch, programs=programs)
        for sizes, with_branch, programs in STREAMS
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [*NORMS[:-1], pytest.param(NORMS[-1], marks=pytest.mark.full)])
def test_norms_of_the_residual_stream(
    norm: str, dtype: torch.dtype, interpreters: ProcessPoolExecutor
) -> None:
    for units in interpreters.submit(compare_norms, norm, dtype).result():
        assert max(units.values()) <= 1, units


def check_other_streams() -> None:
    """Check a stream without tokens, and one in fp32, which PyTorch's operators normalise."""
    norm = make_norm("LayerNorm", 24).bfloat16()
    x = torch.randn((2, 3, 24))
    empty = torch.zeros((0, 3, 24), dtype=torch.bfloat16, requires_grad=True)
    total, out = residual_norm.add_and_normalise(empty, empty.clone(), norm)
    (total.sum() + out.sum()).backward()
    assert out.shape == empty.shape
    for leaf in (empty, *norm.parameters()):
        assert leaf.grad is not None
        assert not leaf.grad.any()
    with mock.patch.object(residual_norm, "_add", side_effect=AssertionError("a kernel ran")):
        total, out = residual_norm.add_and_normalise(x, x, norm)
    assert torch.equal(total, 2 * x)
    assert torch.equal(out, norm(2 * x))


def test_streams_without_tokens_and_in_fp32(interpreters: ProcessPoolExecutor) -> None:
    interpreters.submit(check_other_streams).result()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS)
def test_norms_of_heads_with_rotation(
    shape: str, dtype: torch.dtype, interpreters: ProcessPoolExecutor
) -> None:
    sizes, channels, by_sample = HEADS[shape]
    units = interpreters.submit(
        compare_head_norm, sizes, channels, dtype, "cpu", by_sample=by_sample, programs=2
    ).result()
    assert max(units.values()) <= 1, units


def check_values_without_numbers() -> None:
    """Check NaN and infinities in a head and in an activation, and tensors without elements."""
    norms: list[Any] = [make_norm("RMSNorm", 8).bfloat16() for _ in range(2)]
    cos, sin = make_rotary_table(3, 8, 1e4, torch.device("cpu"))
    qkv = torch.randn((3, 1, 1, 4, 8)).bfloat16()
    qkv[0, 0, 0, 1, 3] = float("nan")
    qkv[1, 0, 0, 2, 5] = float("inf")
    qkv.requires_grad_()
    query, key, value = rotary.divide_projection(qkv, cos, sin, *norms)
    heads = qkv.split((2, 1, 1), dim=3)
    for found, norm, head in zip((query, key), norms, heads[:2], strict=True):
        expected = rotate(norm(head), cos, sin)
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01, equal_nan=True)
    (query.sum() + key.sum() + value.sum()).backward()
    assert qkv.grad is not None
    # The gradient of the head with such a number is lost, and no other.
    lost = qkv.grad.isnan().any(-1)
    assert lost.nonzero().tolist() == [[0, 0, 0, 1], [1, 0, 0, 2]]
    empty = torch.zeros((0, 1, 1, 4, 8), dtype=torch.bfloat16, requires_grad=True)
    for part in rotary.divide_projection(empty, cos[:0], sin[:0], *norms):
        assert part.numel() == 0
    numbers = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, 3e38, -2.0, 1.7]
    for dtype in DTYPES:
        for x in (torch.tensor(numbers), torch.randn(3, 777), torch.zeros(2, 0)):
            for grad in (torch.full_like(x, float("inf")), torch.randn(x.shape)):
                leaf = x.to(dtype).requires_grad_()
                results = []
                for function in (gate.square_relu, lambda y: torch.relu(y).square()):
                    out = function(leaf)
                    results.append((out, *torch.autograd.grad(out, leaf, grad.to(dtype))))
                # Every bit is equal, also of NaN's place.
                for one, other in zip(*results, strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_nan_infinities_and_empty_tensors(interpreters: ProcessPoolExecutor) -> None:
    interpreters.submit(check_values_without_numbers).result()


def list_accesses(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> set[str]:
    """Return the kinds of accesses to memory that a kernel has on a GPU of capability 9.0.

    Args:
        kernel: The kernel.
        pointers: Argument -> the type of its elements.
        constants: Argument -> its value. All others are whole numbers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {name: f"*{dtype}" for name, dtype in pointers.items()}
    fractions = {"eps", "weight1", "beta2", "rest2"} & set(types)
    types |= dict.fromkeys(fractions, "fp32")
    # As a launch finds it out: addresses and strides are multiples of 16, and counts are not.
    counts = ("batch", "groups", "slots", "queries", "rows", "programs", *fractions)
    divisible = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if types[name] != "constexpr" and name not in counts
    }
    source = ASTSource(kernel, types, constants, divisible)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return set(re.findall(r"(?:ld|st)\.global[.\w]*", compiled.asm["ptx"]))


def test_kernels_compile_for_hopper_and_move_16_bytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    pytest.importorskip("triton")
    from megatron.extras.step.kernels import (
        gate_kernel,
        residual_norm_kernel,
        rotary_kernel,
    )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wide = {"ld.global.v4.b32", "st.global.v4.b32"}
    heads = dict.fromkeys(("whole", "query", "key", "value"), "bf16") | {
        "cos": "fp32",
        "sin": "fp32",
    }
    for join, rest in ((False, 64), (True, 0)):
        blocks: dict[str, Any] = {
            "join": join,
            "block_heads": 16,
            "block_half": 64,
            "block_rest": rest,
        }
        assert list_accesses(rotary_kernel._move, heads, blocks) == wide
    tensors = dict.fromkeys(("grad", "gate", "up", "out", "grad_gate", "grad_up"), "bf16")
    for kernel, activation in ((gate_kernel._forward, "geglu"), (gate_kernel._backward, "swiglu")):
        pointers = {name: tensors[name] for name in kernel.arg_names if name in tensors}
        block = {"activation": activation, "block": gate_kernel._BLOCK}
        assert list_accesses(kernel, pointers, block) == wide
    square = dict.fromkeys(("grad", "x", "out"), "bf16")
    for kernel in (gate_kernel._square, gate_kernel._square_backward):
        pointers = {name: square[name] for name in kernel.arg_names if name in square}
        assert list_accesses(kernel, pointers, {"block": gate_kernel._BLOCK}) == wide
    of_heads = dict.fromkeys(("whole", "query", "key", "value", "grad"), "bf16")
    of_heads |= dict.fromkeys(("query_weight", "key_weight"), "bf16")
    of_heads |= dict.fromkeys(("cos", "sin", "statistics", "parts"), "fp32")
    for kernel in (rotary_kernel._normalise, rotary_kernel._differentiate):
        pointers = {name: of_heads[name] for name in kernel.arg_names if name in of_heads}
        blocks = {"block_heads": 16, "block_half": 64, "block_rest": 0}
        assert wide <= list_accesses(kernel, pointers, blocks)
    stream = ("x", "branch", "weight", "bias", "total", "out", "grad_total", "grad_out", "grad")
    vectors = {"statistics", "parts"}
    for kernel in (residual_norm_kernel._forward, residual_norm_kernel._backward):
        pointers = {name: "bf16" for name in kernel.arg_names if name in stream}
        pointers |= dict.fromkeys(vectors & set(kernel.arg_names), "fp32")
        flags = dict.fromkeys(("has_branch", "has_bias", "centred"), True)
        norm = {name: on for name, on in flags.items() if name in kernel.arg_names}
        # A row has single numbers too: 1 / standard deviation and the mean.
        single = {"ld.global.b32", "st.global.b32"}
        assert list_accesses(kernel, pointers, norm | {"block": 2048}) - single == wide
    blocks = {"block_rows": 64, "block_columns": 32}
    parts = {"parts": "fp32", "out": "bf16"}
    assert "ld.global.v4.b32" in list_accesses(residual_norm_kernel._add_parts, parts, blocks)


def check_registration() -> None:
    """Check that fake results and gradients of the operators fit their kernels."""
    check = partial(
        torch.library.opcheck,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    cos, sin = make_rotary_table(2, 2, 1e4, torch.device("cpu"))
    heads = torch.randn((2, 1, 1, 4, 3), requires_grad=True)
    check(rotary._rotate, (heads, cos, sin, [2, 1, 1]))
    parts = list(heads.detach().split((2, 1, 1), dim=3))
    check(rotary._rotate_back, (parts, cos, sin))
    leaves = [torch.randn((2, 3), requires_grad=True) for _ in range(2)]
    check(gate.apply_gate, (*leaves, "swiglu"))
    grad, *inputs = (each.detach() for each in (leaves[0], *leaves))
    check(gate._differentiate, (grad, *inputs, "swiglu"))
    check(gate.square_relu, (leaves[0],))
    check(gate._square_back, (grad, grad))
    qkv, query_weight, key_weight = heads.detach(), torch.ones(3), torch.zeros(3)
    check(rotary._normalise, (qkv, query_weight, key_weight, cos, sin, 1e-5))
    statistics = torch.ones((2, 1, 1, 3))
    tables = (cos, sin, statistics)
    check(rotary._differentiate, (parts, qkv, query_weight, key_weight, *tables))
    weight, bias = torch.ones(3), torch.zeros(3)
    check(residual_norm._add, (*inputs, weight, bias, 1e-5, True))
    check(residual_norm._add, (grad, None, weight, None, 1e-5, False))
    check(residual_norm._differentiate, (grad, *inputs, weight, torch.ones(2, 2), True))


def test_operators_are_registered_completely(interpreters: ProcessPoolExecutor) -> None:
    interpreters.submit(check_registration).result()


SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {},
    "gpt2, parallel residual": {"parallel_residual": True},
    "output norms": {"norm_placement": "output"},
}


def compile_with_kernels(shape: dict[str, Any]) -> tuple[int, list[list[float]], list[int]]:
    """Compute a small model three times: eager, with kernels, and compiled with kernels.

    Returns:
        The number of graphs, loss and norms of each, and how often each called the kernel of
        norms and additions.
    """
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    operators = build_operators(
        KernelsConfig(rope_fusion=True, bias_swiglu_fusion=True, residual_norm_fusion=True)
    )
    eager = Execution(recomputed_part=Fraction(1))
    fused = replace(eager, operators=operators)
    tokens = some_tokens(batch=2, length=3)
    results, calls = [], []
    # The compiler of test_compile.py traces, and generates no code.
    trace = partial(torch.compile, backend="aot_eager")
    for execution in (eager, fused, replace(fused, compile=True)):
        with (
            mock.patch.object(torch, "compile", trace),
            mock.patch.object(residual_norm, "_add", wraps=residual_norm._add) as add,
        ):
            model = build(tiny_config(**shape))
            recompute_blocks(model, execution)
            fuse_operators(model, execution)
            compile_blocks(model, execution)
            loss = model(None, Inputs(tokens, tokens))
            loss.backward()
            grads = [each.grad for each in model.parameters() if each.grad is not None]
            norms = [grad.norm().item() for grad in grads]
            results.append([loss.item(), *norms])
            calls.append(add.call_count)
    return counters["stats"]["unique_graphs"] - before, results, calls


@pytest.mark.parametrize("name", SMALL)
def test_compiled_blocks_contain_the_kernels(name: str, interpreters: ProcessPoolExecutor) -> None:
    graphs, (plain, fused, compiled), calls = interpreters.submit(
        compile_with_kernels, SMALL[name]
    ).result()
    assert fused == pytest.approx(plain, rel=1e-5)
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert graphs == 1
    # Each block is computed twice, and has two such norms. Parallel residuals have one.
    blocks = tiny_config().num_layers
    norms = {"gpt2, parallel residual": 1, "output norms": 0}.get(name, 2)
    assert calls == [0, 2 * blocks * norms, 0]


FLAGS = (
    "--train-iters 3 --seq-length 8 --micro-batch-size 1 --global-batch-size 1 --num-layers 2 "
    "--num-attention-heads 4 --num-query-groups 2 --position-embedding-type rotary "
    "--rotary-percent 0.5 --normalization RMSNorm --swiglu --tensor-model-parallel-size 2 "
    "--sequence-parallel --checkpoint-activations"
)


def train_curve(
    interpreters: ProcessPoolExecutor, corpus: str, folder: Path, flags: str
) -> tuple[list[float], str]:
    """Return losses and gradient norms of a run, and its log."""
    paths = f"--data-path {corpus} --data-cache-path {folder}/cache --save {folder}"
    log = train(interpreters, [*SIZES.split(), *paths.split(), *flags.split()])
    steps = [each for each in read_metrics(folder / "metrics.jsonl") if "lm_loss" in each]
    assert len(steps) == 3
    return [each[name] for each in steps for name in ("lm_loss", "grad_norm")], log


def test_training_with_kernels_equals_training_without(
    interpreters: ProcessPoolExecutor, corpus: str, tmp_path: Path
) -> None:
    kernels = (
        "--rope-fusion --bias-swiglu-fusion --residual-norm-fusion --cross-entropy-loss-fusion "
        "--adamw-fusion"
    )
    plain, log = train_curve(interpreters, corpus, tmp_path / "plain", FLAGS)
    assert "Triton" not in log
    fused, log = train_curve(interpreters, corpus, tmp_path / "fused", f"{FLAGS} {kernels}")
    assert "Triton" in log
    assert fused == pytest.approx(plain, rel=1e-6)
