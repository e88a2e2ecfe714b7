"""Masks of dropout: known numbers, statistics, slices of ranks, and the kernels on GPUs."""

import math
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from model.builders import build, some_tokens, tiny_config
from test_plan import with_changes
from torch import Tensor

from megatron.engine.parallelize import fuse_operators, recompute_blocks
from megatron.extras.planner.verify.reference_layers import ReferenceMasks, compute_philox
from megatron.model import attention_core
from megatron.model.attention_core import Weighting, attend
from megatron.model.dropout import Dropout, WeightDropout
from megatron.model.execution import Execution
from megatron.model.inputs import Inputs
from megatron.parallel.context import list_parts, locate_rows
from megatron.parallel.mesh import ContextParallel, TensorParallel
from megatron.parallel.rng import STEPS, draw_mask
from megatron.plan.kernel_choice import KernelDevice, choose_kernels, explain_refusal
from megatron.plan.resolve import resolve

KEY = torch.tensor((1234, 7, 5))
THRESHOLD = round(0.1 * STEPS)
ALONE = TensorParallel()
VECTORS = [
    ([0] * 4, [0, 0], "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
    (
        [2**64 - 1] * 4,
        [2**64 - 1] * 2,
        "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
    ),
    (
        [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
        [0x452821E638D01377, 0xBE5466CF34E90C6C],
        "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
    ),
]
"""Counter, key and block of Philox 4x64-10, from the `kat_vectors` of Random123."""


def draw(shape: list[int], place: list[int], site: int = 3, key: Tensor = KEY) -> Tensor:
    return draw_mask(key, torch.tensor(site), THRESHOLD, shape, place)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_numpy_has_the_published_blocks(counter: list[int], key: list[int], expected: str) -> None:
    # NumPy counts up before the first block.
    number = sum(word << 64 * i for i, word in enumerate(counter)) - 1
    philox = np.random.Philox(key=np.array(key, np.uint64), counter=number % 2**256)
    assert [f"{word:016x}" for word in philox.random_raw(4).tolist()] == expected.split()
    if key[1] == 0:
        found = compute_philox(np.array(counter, np.uint64), key[0])
        assert [f"{word:016x}" for word in found.tolist()] == expected.split()


def test_masks_equal_the_formulas_of_the_reference() -> None:
    masks = ReferenceMasks(1234, 40)
    masks.iteration = 7
    rows = np.array([2 + i // 6 * 100 + i % 6 for i in range(12)])
    expected = masks.draw(3, rows, 40, 9)[6:] >= THRESHOLD
    assert torch.equal(draw([12, 3, 40], [3, 2, 100, 6, 0, 1]).transpose(0, 1), expected)
    # A part of the columns, which begins within a block.
    expected = masks.draw(3, rows, 40, 7)[5:, :, 21:39] >= THRESHOLD
    assert torch.equal(draw([2, 2, 6, 18], [3, 2, 100, 6, 21, 0]).flatten(1, 2), expected)
    assert 0.85 < float(expected.float().mean()) < 0.95


@pytest.mark.parametrize(
    "blocks", [pytest.param(40, id="10^7"), pytest.param(400, id="10^8", marks=pytest.mark.full)]
)
def test_the_share_of_zeros_and_neighbours_in_each_coordinate(blocks: int) -> None:
    """The share is within 4 deviations, and pairs of neighbours are independent (chi-square)."""
    p = THRESHOLD / STEPS
    pairs: dict[str, list[int]] = {}
    zeros = total = 0
    changes = {"seed": (1, 0, 0), "iteration": (0, 1, 0), "sample": (0, 0, 1)}
    for number in range(blocks):
        place = [64, 128 * number, 0, 128, 0, 0]
        mask = ~draw([128, 2, 1024], place)
        zeros += int(mask.sum())
        total += mask.numel()
        others = {
            "site": ~draw([128, 2, 1024], place, site=4),
            "row": mask.roll(1, 0),
            "column": mask.roll(1, 2),
        }
        for name, change in changes.items():
            others[name] = ~draw([128, 2, 1024], place, key=KEY + torch.tensor(change))
        for name, other in others.items():
            found = pairs.setdefault(name, [0, 0, 0, 0])
            both = int((mask & other).sum())
            found[0] += both
            found[1] += int(mask.sum()) - both
            found[2] += int(other.sum()) - both
            found[3] += mask.numel() - int((mask | other).sum())
    assert abs(zeros - p * total) < 4 * math.sqrt(total * p * (1 - p))
    for name, counts in pairs.items():
        count = sum(counts)
        rows = counts[0] + counts[1], counts[2] + counts[3]
        columns = counts[0] + counts[2], counts[1] + counts[3]
        expected = [r * c / count for r in rows for c in columns]
        # One degree of freedom: p > 1e-4.
        statistic = sum((x - e) ** 2 / e for x, e in zip(counts, expected, strict=True))
        assert statistic < 15.14, name


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
@pytest.mark.parametrize("context", [1, 2, 3])
def test_ranks_have_the_rows_of_the_whole(tensor: int, context: int) -> None:
    length = 48 * context
    for rank in range(context):
        own = [*range(length)]
        if context > 1:
            own = [row for part in list_parts(rank, context, length) for row in part]
        size = len(own) // tensor
        for number in range(tensor):
            tp = TensorParallel(rank=number, size=tensor, sequence_parallel=True)
            first, step, span = locate_rows(size, tp, ContextParallel(rank=rank, size=context))
            assert size % span == 0
            found = [first + i // span * step + i % span for i in range(size)]
            assert found == own[number * size : (number + 1) * size]


def make_weight_dropout(p: float = 0.3, *, head: int = 0) -> WeightDropout:
    dropout = Dropout(p, 1, 24, ALONE, None).train()
    return WeightDropout(dropout, KEY, head)


@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_in_blocks_equals_all_at_once(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients. The last queries of a longer sample have the same masks."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn((2, heads, 24, 8), generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    )
    bias = None
    if has_bias:
        bias = torch.full((1, 4, 24, 24), -math.inf).triu(1) + 0.1 * torch.arange(24)
    drop = make_weight_dropout()
    results = []
    for limit in (1 << 20, 4 * 2 * 4 * 24 * 5):
        monkeypatch.setattr("megatron.model.loss._CHUNK_BYTES_CPU", limit)
        out = attend(query, key, value, Weighting(bias, drop=drop))
        grads = torch.autograd.grad(out.square().sum(), (query, key, value))
        results.append((out, *grads))
    for one, blocks in zip(*results, strict=True):
        torch.testing.assert_close(blocks, one, rtol=1e-5, atol=1e-5)
    # The formula, in fp64.
    masks = ReferenceMasks(1234, 24)
    masks.iteration = 7
    rows = np.arange(4)[:, None] * 24 + np.arange(24)
    threshold = round(0.3 * STEPS)
    kept = (masks.draw(1, rows, 24, 7)[5:] >= threshold) * (STEPS / (STEPS - threshold))
    keys, values = (x.double().repeat_interleave(2, 1) for x in (key, value))
    logits = query.double() @ keys.transpose(2, 3) / math.sqrt(8)
    logits = logits + (torch.full((24, 24), -math.inf).triu(1) if bias is None else bias)
    expected = (logits.softmax(3) * kept) @ values
    torch.testing.assert_close(results[0][0].double(), expected, rtol=1e-5, atol=1e-5)
    last = attention_core.replace(make_weight_dropout(), query=17)
    own_bias = None if bias is None else bias[:, :, 17:]
    out = attend(query[:, :, 17:], key, value, Weighting(own_bias, drop=last))
    torch.testing.assert_close(out, results[0][0][:, :, 17:], rtol=1e-5, atol=1e-6)


def test_other_samples_and_lengths_change_no_mask() -> None:
    """A model with dropout gives a sample the same loss in each microbatch that has it."""
    model = build(tiny_config(hidden_dropout=0.2, attention_dropout=0.2)).train()
    tokens = some_tokens(4)

    def compute(first: int, last: int) -> Tensor:
        part = tokens[first:last]
        return model(None, Inputs(part, part, dropout_key=torch.tensor((9, 2, first))))

    whole = compute(0, 4)
    parts = torch.stack([compute(number, number + 1) for number in range(4)])
    torch.testing.assert_close(parts.mean(), whole, rtol=1e-6, atol=1e-6)
    assert len(set(parts.tolist())) == 4


def test_the_factor_is_exact_in_16_bits() -> None:
    dropout = Dropout(0.1, 1, 64, ALONE, None).train()
    x = torch.full((8, 2, 64), 3.0, dtype=torch.bfloat16)
    kept = dropout(x, KEY)[dropout(x, KEY) != 0]
    assert set(kept.tolist()) == {float(torch.tensor(3 / 0.9).bfloat16())}


def test_masks_of_attention_kernels_repeat_in_a_recomputation() -> None:
    """A kernel that draws its own masks reads torch's generator, whose state is kept."""
    results = []
    for part in (Fraction(0), Fraction(1)):
        execution = Execution(recomputed_part=part, draws_by_kernel=True)
        model = build(tiny_config(attention_dropout=0.3, hidden_dropout=0.1)).train()
        recompute_blocks(model, execution)
        fuse_operators(model, execution)
        torch.manual_seed(3)
        tokens = some_tokens()
        loss = model(None, Inputs(tokens, tokens, dropout_key=KEY))
        torch.rand(5)
        loss.backward()
        results.append([loss.detach(), *(each.grad for each in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    torch.manual_seed(4)
    assert not torch.equal(model(None, Inputs(tokens, tokens, dropout_key=KEY)), loss)


def test_masks_that_depend_on_the_layout_give_a_warning() -> None:
    named = {"attention_backend": ("flash", "unfused")}
    for kernels, p, expected in ((named, 0.1, True), (named, 0.0, False), ({}, 0.1, False)):
        plan = resolve(with_changes(kernels=kernels, model={"attention_dropout": p}), 1)
        found = any("depend on the layout" in line for line in plan.warnings)
        assert found is expected
        assert Execution.from_config(plan.config, dynamic_shapes=False).draws_by_kernel is expected
    # By default, a GPU whose first choice is cuDNN's kernel has the masks of all layouts.
    plan = resolve(with_changes(model={"attention_dropout": 0.1}), 1)
    assert choose_kernels(plan, KernelDevice("9.0")).kernels.attention_backend == ("auto",)
    assert explain_refusal("attention_backend", ("fused",), plan, KernelDevice("9.0"))


def compare_kernels() -> list[tuple[bool, ...]]:
    """Compare masks, values and gradients of the kernels with those of PyTorch's operators."""
    from megatron.extras.step.kernels.dropout import drop
    from megatron.extras.step.kernels.dropout_kernel import launch

    generator = torch.Generator().manual_seed(1)
    site = torch.tensor(3)
    results = []
    for shape, place in (
        ([12, 3, 40], [3, 7, 30, 6, 0, 0]),
        ([2, 3, 4, 19], [4, 199, 64, 4, 21, 1]),
        ([2, 1, 2100], [132, 2**33, 0, 2, 0, 0]),
    ):
        expected = draw(shape, place)
        kept = torch.empty(shape, dtype=torch.bool)
        launch(None, None, kept, KEY, 3, THRESHOLD, place)
        found = [torch.equal(kept, expected)]
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
            residual = torch.randn(shape, generator=generator, requires_grad=True)
            grad = torch.randn(shape, generator=generator)
            ours = drop(x, residual, KEY, site, THRESHOLD, place)
            plain = residual + x * expected * (STEPS / (STEPS - THRESHOLD))
            found.append(torch.equal(ours, plain))
            for mine, theirs in zip(
                torch.autograd.grad(ours, (x, residual), grad),
                torch.autograd.grad(plain, (x, residual), grad),
                strict=True,
            ):
                found.append(torch.equal(mine, theirs))
        results.append(tuple(found))
    return results


def test_kernels_equal_operators_bit_for_bit(interpreters: ProcessPoolExecutor) -> None:
    assert interpreters.submit(compare_kernels).result() == [(True,) * 7] * 3
