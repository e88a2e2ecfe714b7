"""Tests of --attention-backend, the choice between SDPA's kernels.

A CPU has two of them, flash and unfused. Which kernel runs is seen at torch's operators.
"""

import contextlib
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from model.builders import VOCAB, build, some_tokens, tiny_config
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.base.errors import ConfigError
from megatron.engine.parallelize import choose_attention_kernels, recompute_blocks
from megatron.model.attention_kernels import require_attention_kernels
from megatron.model.execution import Execution
from megatron.model.gpt import GPT
from megatron.model.inputs import Documents, Inputs
from megatron.model.shape import ModelShape

CPU = torch.device("cpu")
RECOMPUTED: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"recomputed_part": Fraction(1)},
    "core recomputed": {"recompute_attention_core": True},
}


def make(execution: Execution, **parts: Any) -> GPT:
    model = build(tiny_config(**parts))
    recompute_blocks(model, execution)
    choose_attention_kernels(model, execution)
    return model


def run(model: GPT, documents: Documents | None = None) -> list[torch.Tensor]:
    tokens = some_tokens(batch=2)
    loss = model(None, Inputs(tokens, tokens, documents=documents))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients]


class KernelRecorder(TorchDispatchMode):
    """Records which kernels of attention run forward."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            self.kernels.append("flash")
        if name == "_safe_softmax":
            self.kernels.append("unfused")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("documents", [None, ((0, 7, 24), (0, 24))], ids=["samples", "documents"])
@pytest.mark.parametrize("kernel", ["flash", "unfused"])
@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_the_kernel_computes_the_forward_pass_and_the_recomputation(
    recomputed: str, kernel: str, documents: Documents | None
) -> None:
    model = make(Execution(attention_kernels=(kernel,), **RECOMPUTED[recomputed]))
    with KernelRecorder() as recorder:
        found = run(model, documents)
    # Two layers. The two samples have three documents.
    calls = 2
    if documents is not None:
        calls *= 3
    if recomputed != "kept":
        calls *= 2
    assert recorder.kernels == [kernel] * calls
    for one, other in zip(found, run(make(Execution()), documents), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_the_order_is_active_during_each_call_and_gone_afterwards(recomputed: str) -> None:
    asked = ("fused", "efficient", "flash", "unfused")
    attend = F.scaled_dot_product_attention
    before = _cur_sdpa_kernel_backends(with_priority=True)
    orders = []

    def look(*arguments: Any, **options: Any) -> torch.Tensor:
        orders.append(_cur_sdpa_kernel_backends(with_priority=True))
        return attend(*arguments, **options)

    model = make(Execution(attention_kernels=asked, **RECOMPUTED[recomputed]))
    with mock.patch.object(F, "scaled_dot_product_attention", look):
        run(model)
    expected = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.MATH,
    ]
    assert orders == [expected] * (2 if recomputed == "kept" else 4)
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_without_a_choice_torch_is_left_alone() -> None:
    with mock.patch("megatron.model.attention_kernels.sdpa_kernel") as context:
        run(make(Execution()))
    context.assert_not_called()


def require(names: tuple[str, ...], **parts: Any) -> None:
    shape = ModelShape(tiny_config(**parts), VOCAB, 128)
    require_attention_kernels(
        names,
        shape,
        tensor_parallel_size=1,
        dtype=torch.bfloat16,
        device=CPU,
        by_document=True,
    )


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        ((), {"attention_dropout": 0.1}),
        (("flash",), {}),
        (("flash",), {"num_query_groups": 2}),
        (("flash",), {"position_embedding_type": "alibi", "sliding_window": 6}),
        (("fused", "flash"), {}),
        (("fused", "unfused"), {"attention_dropout": 0.1}),
    ],
)
def test_a_possible_choice_is_accepted(names: tuple[str, ...], parts: dict[str, Any]) -> None:
    require(names, **parts)


@pytest.mark.parametrize(
    ("names", "parts", "reason"),
    [
        (("flash",), {"attention_dropout": 0.1}, "Both fused kernels do not support non-zero"),
        (("fused", "efficient"), {}, "this PyTorch has none of them for this device"),
    ],
)
def test_an_impossible_choice_is_refused_with_the_reason(
    names: tuple[str, ...], parts: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as failure:
        require(names, **parts)
    message = str(failure.value)
    assert f"--attention-backend {' '.join(names)}: none of these kernels" in message
    assert "on cpu in bfloat16 with heads of 8, no bias" in message
    assert reason in message
    assert "Add unfused at the end" in message
    assert "Triggered internally" not in message


@pytest.mark.parametrize("value", [6, 8, 10])
def test_values_that_are_wider_than_keys_are_refused(value: int) -> None:
    """Zeros widen the values of latent attention. Nothing widens its keys."""
    widths = {"qk_head_dim": 6, "qk_pos_emb_head_dim": 2, "v_head_dim": value}
    latent = {"multi_latent_attention": True, "position_embedding_type": "rotary"}
    refused = pytest.raises(ConfigError, match="none of these kernels")
    with refused if value > 8 else contextlib.nullcontext():
        require(("flash",), **latent, **widths)


def test_each_kind_of_layer_is_tried() -> None:
    """A sliding window in some layers is a bias. A document may have one token."""
    parts = {"num_layers": 4, "sliding_window": 6, "full_attention_layers": "1::2"}
    with mock.patch.object(
        F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    ) as attend:
        require(("flash",), **parts)
    tried = [
        (call.kwargs["attn_mask"] is not None, call.args[1].shape[2])
        for call in attend.call_args_list
    ]
    length = tiny_config(**parts).seq_length
    assert tried == [(False, length), (False, 1), (True, length), (True, 1)]


def test_another_error_of_the_kernel_is_not_hidden() -> None:
    failure = torch.OutOfMemoryError("CUDA out of memory")
    with (
        mock.patch.object(F, "scaled_dot_product_attention", side_effect=failure),
        pytest.raises(torch.OutOfMemoryError),
    ):
        require(("flash",))
