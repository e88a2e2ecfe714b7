"""Tests of attention in one call for all documents of a microbatch.

On a GPU the call is torch's `varlen_attn`. Here it is the reference, which has the same interface.
"""

from fractions import Fraction
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from model.builders import VOCAB, some_tokens, tiny_config
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.data.batches import Microbatch
from megatron.data.documents import DocumentRules
from megatron.engine.parallelize import recompute_blocks
from megatron.model import packed_attention
from megatron.model.execution import Execution
from megatron.model.gpt import GPT
from megatron.model.init import initialise
from megatron.model.inputs import Documents, Inputs
from megatron.model.packed_attention import (
    attend_packed,
    pack_documents,
    require_packed_attention,
)
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel

CPU = torch.device("cpu")
EXACT: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
EOD = 5
IRREGULAR: dict[str, Documents] = {
    "one document": ((0, 16),),
    "documents of one token": ((0, 1, 2, 3, 16), (0, 15, 16)),
    "only documents of one token": (tuple(range(17)),),
    "ends at the ends of samples": ((0, 16), (0, 4, 16), (0, 16)),
    "one token": ((0, 1), (0, 1)),
    "short sequences": ((0, 3, 5), (0, 5), (0, 1, 5)),
}


def test_bounds_are_those_of_the_packed_samples() -> None:
    packed = pack_documents(((0, 3, 5), (0, 5), (0, 1, 5)), CPU)
    assert packed.bounds.tolist() == [0, 3, 5, 10, 11, 15]
    assert packed.bounds.dtype == torch.int32
    assert packed.longest == 5


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None
) -> Tensor:
    """Return attention with an explicit mask [b, 1, s, s]."""
    length = query.shape[2]
    number = torch.zeros(len(documents), length, dtype=torch.long)
    for sample, bounds in enumerate(documents):
        for index, (start, stop) in enumerate(pairwise(bounds)):
            number[sample, start:stop] = index
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (number[:, :, None] == number[:, None, :])
    if window is not None:
        seen &= distance < window
    scores = torch.einsum("bnqd,bnkd->bnqk", query, key.repeat_interleave(_share(query, key), 1))
    scores = (scores / query.shape[-1] ** 0.5).masked_fill(~seen[:, None], float("-inf"))
    return scores.softmax(-1) @ value.repeat_interleave(_share(query, key), 1)


def _share(query: Tensor, key: Tensor) -> int:
    return query.shape[1] // key.shape[1]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("name", IRREGULAR)
def test_results_and_gradients_equal_masked_attention(
    name: str, groups: int, window: int | None
) -> None:
    check_packed(name, groups, window, 8)


def test_narrow_values_are_padded() -> None:
    kernel = packed_attention.attend_one_by_one
    with mock.patch.object(
        packed_attention, "attend_one_by_one", autospec=True, side_effect=kernel
    ) as attend:
        check_packed("short sequences", 2, 3, 5)
    query, key, value = attend.call_args.args[:3]
    assert value.shape[2] == key.shape[2] == query.shape[2] == 8


def check_packed(name: str, groups: int, window: int | None, value_dim: int) -> None:
    documents = IRREGULAR[name]
    samples, length = len(documents), documents[0][-1]
    results = []
    for attend in (attend_masked, attend_packed):
        generator = torch.Generator().manual_seed(3)
        # The memory order is [s, b, heads, d], as the projection makes it.
        leaves = [
            torch.randn(length, samples, heads, width, generator=generator, **EXACT)
            for heads, width in ((4, 8), (groups, 8), (groups, value_dim))
        ]
        inputs = [leaf.permute(1, 2, 0, 3) for leaf in leaves]
        given: Any = documents if attend is attend_masked else pack_documents(documents, CPU)
        out = attend(inputs[0], inputs[1], inputs[2], given, window)
        out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def build(shape: ModelShape, execution: Execution) -> GPT:
    model = GPT(shape, TensorParallel(), execution=execution)
    for name, parameter in model.named_parameters():
        spec = parameter.spec  # type: ignore[attr-defined]
        parameter.data.zero_()
        rows = parameter.data[: spec.shape[0]]
        initialise(name, spec.init, rows, spec.shape, (0,) * rows.dim(), shape, 7)
    recompute_blocks(model, execution)
    return model


def make_inputs(length: int) -> Inputs:
    """Return two samples, one with documents of 1, 6 and more tokens, one with a single one."""
    tokens = some_tokens(batch=2, length=length, seed=1)
    tokens[tokens == EOD] = EOD + 1
    tokens[0, [0, 6, length - 1]] = EOD
    rules = DocumentRules(
        EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    batch = rules.apply(Microbatch(tokens, some_tokens(batch=2, length=length, seed=2)))
    return Inputs(
        batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, documents=batch.documents
    )


@pytest.mark.parametrize(
    "recomputed",
    [
        {},
        {"recomputed_part": Fraction(1)},
        {"recomputed_part": Fraction(1), "kept_operators": ("attention", "matmul")},
        {"recompute_attention_core": True},
    ],
    ids=["kept", "recomputed", "operators kept", "core recomputed"],
)
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"position_embedding_type": "rotary", "num_query_groups": 2},
        {"position_embedding_type": "rotary", "sliding_window": 6, "full_attention_layers": "1::2"},
    ],
    ids=["gpt2", "grouped", "windowed"],
)
def test_a_model_computes_the_same_as_document_by_document(
    parts: dict[str, Any], recomputed: dict[str, Any]
) -> None:
    shape = ModelShape(tiny_config(**parts), VOCAB, 128)
    results = []
    for pack in (False, True):
        model = build(shape, Execution(pack_documents=pack, **recomputed))
        # The second sequence is shorter, as in a curriculum.
        with mock.patch.object(
            packed_attention,
            "attend_one_by_one",
            autospec=True,
            side_effect=packed_attention.attend_one_by_one,
        ) as attend:
            losses = [model(None, make_inputs(length)) for length in (24, 9)]
            torch.stack(losses).sum().backward()
        assert bool(attend.call_count) == pack
        results.append([*losses, *(parameter.grad for parameter in model.parameters())])
    for expected, found in zip(*results, strict=True):
        assert expected is not None
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("window", [None, 6])
def test_the_kernel_takes_the_arguments(groups: int, window: int | None) -> None:
    """On meta tensors torch's own function runs up to the kernel."""
    meta = torch.device("meta")
    inputs = [
        torch.empty(10, 2, heads, 8, device=meta, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, groups, groups)
    ]
    query, key, value = (each.permute(1, 2, 0, 3) for each in inputs)
    documents = pack_documents(((0, 3, 10), (0, 10)), meta)
    kernel = packed_attention._load_kernel()
    with mock.patch.object(packed_attention, "attend_one_by_one", kernel):
        out = attend_packed(query, key, value, documents, window)
    assert out.shape == (2, 4, 10, 8)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    for each in inputs:
        assert each.grad is not None
        assert each.grad.shape == each.shape


def test_an_old_gpu_is_refused() -> None:
    require_packed_attention(CPU)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="V100"),
        pytest.raises(ConfigError, match=r"V100 has compute capability 7\.0.*leave the flag out"),
    ):
        require_packed_attention(torch.device("cuda", 0))
