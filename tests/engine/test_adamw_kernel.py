"""AdamW's Triton kernel equals torch's operator bit for bit, in Triton's interpreter."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.adamw_comparisons import REPLACED, SIZES, Comparison, compare_steps
from model.test_fused_operators import list_accesses
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.optimizer import OptimizerConfig
from megatron.engine.optimizer import MasterParameter
from megatron.extras.step.kernels import adamw
from megatron.extras.step.kernels.adamw import KernelAdamW
from megatron.parallel.parameter_spec import Init, ParameterSpec

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("moments", "copies", "betas", "shift"),
    [
        (FP32, None, (0.9, 0.95), 0),
        (FP32, FP16, (0.4, 0.999), 0),
        (FP32, BF16, (0.9, 0.95), 1),
        (BF16, BF16, (0.9, 0.95), 0),
        (BF16, None, (0.0, 0.95), 3),
    ],
    ids=str,
)
def test_an_update_has_the_bits_of_torchs_operator(
    moments: torch.dtype,
    copies: torch.dtype | None,
    betas: tuple[float, float],
    shift: int,
    interpreters: ProcessPoolExecutor,
) -> None:
    found = interpreters.submit(compare_steps, "cpu", moments, copies, betas, shift).result()
    assert found == [[], [], [], []]


def count_bytes(moments: torch.dtype) -> tuple[float, int]:
    """Return the bytes that an update moves for each parameter, and its launches.

    The numbers of a program, such as its addresses, are left out.
    """
    from triton.runtime.interpreter import _get_np_dtype, interpreter_builder

    from megatron.extras.step.kernels import adamw_kernel

    moved = 0
    launches = []
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def count(pointers: Any, mask: Any) -> None:
        nonlocal moved
        width = _get_np_dtype(pointers.get_element_ty()).itemsize
        moved += int(mask.data.sum()) * width

    def counted_load(pointers: Any, mask: Any, *others: Any) -> Any:
        if pointers.data.size > 1:
            count(pointers, mask)
        return load(pointers, mask, *others)

    def counted_store(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return store(pointers, value, mask, *others)

    compared = Comparison("cpu", moments, BF16, (0.9, 0.95))
    launch = adamw_kernel.launch

    def counted_launch(*arguments: Any) -> None:
        launches.append(arguments)
        launch(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "create_masked_load", counted_load)
        patch.setattr(interpreter_builder, "create_masked_store", counted_store)
        patch.setattr(adamw_kernel, "launch", counted_launch)
        compared.step(1, 1.0, applied=True)
        applied = moved
        compared.step(2, 1.0, applied=False)
    assert moved == applied, "a dropped step moves nothing"
    without_copy = 2 * SIZES[REPLACED]
    return (applied + without_copy) / sum(SIZES), len(launches) // 2


@pytest.mark.parametrize(("moments", "expected"), [(FP32, 30), (BF16, 22)])
def test_an_update_moves_each_number_once(
    moments: torch.dtype, expected: int, interpreters: ProcessPoolExecutor
) -> None:
    assert interpreters.submit(count_bytes, moments).result() == (expected, 1)


class CountOperators(TorchDispatchMode):
    """Counts operators that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_launches_do_not_grow_with_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 2 7B has 291 parameters. torch's update, with the 16-bit copies, has 434 launches."""
    monkeypatch.setattr(adamw, "_update", lambda *arguments: None)
    counts = []
    for parameters in (2, 291):
        masters = []
        for number in range(parameters):
            shape = (4, 3) if number % 2 else (4,)
            model = nn.Parameter(torch.zeros(shape, dtype=BF16))
            weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
            weight.grad = torch.ones(shape)
            spec = ParameterSpec(shape, Init.NORMAL, decays=len(shape) > 1)
            masters.append(MasterParameter(f"w{number}", spec, (0,) * len(shape), model, weight))
        optimizer = KernelAdamW(masters, OptimizerConfig(weight_decay=0.1))
        assert optimizer.writes_copies
        with CountOperators() as counted:
            optimizer.step(0.1, 0.2, 0.5)
        counts.append(len(counted.names))
    assert counts[0] == counts[1] <= 25


def test_a_rank_without_elements_has_nothing_to_update() -> None:
    weight = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
    weight.grad = torch.zeros(0, 3)
    spec = ParameterSpec((2, 3), Init.NORMAL, decays=True)
    masters = [MasterParameter("w", spec, (2, 0), weight, weight)]
    optimizer = KernelAdamW(masters, OptimizerConfig())
    optimizer.step(0.1)
    assert optimizer.step_count == 1


def test_the_kernel_compiles_for_hopper_and_moves_16_bytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    from megatron.extras.step.kernels import adamw_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tl = triton.language
    pointers = {"table": "i64", "owners": "i32", "settings": "fp32", "decision": "fp32"}
    single = {"ld.global.b32", "ld.global.b64"}
    for moments, aligned in ((tl.float32, True), (tl.bfloat16, True), (tl.float32, False)):
        constants = {
            "from_gradient": False,
            "columns": adamw_kernel._COLUMNS,
            "first_dtype": moments,
            "second_dtype": moments,
            "copy_dtype": tl.bfloat16,
            "aligned": aligned,
            "block": adamw_kernel.BLOCK,
        }
        accesses = list_accesses(adamw_kernel.update, pointers, constants) - single
        wide = {"ld.global.v4.b32", "st.global.v4.b32"}
        assert accesses >= wide if aligned else not accesses & wide
