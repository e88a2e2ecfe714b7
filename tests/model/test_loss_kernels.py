"""The kernels of the loss equal PyTorch's operators, in Triton's interpreter."""

import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from model.loss_comparisons import LogitCase, compare_logits, compare_loss, compare_loss_on_ranks
from triton_interpreter import run_ranks

from megatron.model import loss

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A program computes 4,096 columns at once.
CASES = {
    "odd": LogitCase(13, 704, 701, further=3),
    "several blocks": LogitCase(5, 9001, 9001, kept=None),
    "large, equal logits": LogitCase(6, 4100, 4097, scale=1000.0, ties=True),
    "small, equal logits": LogitCase(16, 9, 9, scale=1.0, ties=True),
    "no targets, all masked": LogitCase(3, 128, 100, held=0.0, kept=0.0),
    "padding only": LogitCase(4, 64, 0),
    "no columns": LogitCase(4, 0, 0, kept=None),
    "one logit": LogitCase(1, 1, 1, held=1.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sums_and_gradients_of_logits(
    name: str, dtype: torch.dtype, interpreters: ProcessPoolExecutor
) -> None:
    units = interpreters.submit(compare_logits, CASES[name], dtype, "cpu").result()
    assert units.pop("hit") == 0
    assert units.pop("maximum") == 0
    assert max(units.values()) <= 1, units


# Products of rounded gradients have the error of a unit of rounding in a few terms.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_loss_with_z_loss_and_mask(
    masked: bool, dtype: torch.dtype, interpreters: ProcessPoolExecutor
) -> None:
    found = interpreters.submit(compare_loss, dtype, "cpu", masked=masked, z_loss=1e-2).result()
    check_loss(found, dtype)


# With 320 rows, the second rank has nothing but padding.
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 160), (torch.float16, 320)], ids=str)
def test_loss_of_two_ranks(
    dtype: torch.dtype, rows: int, interpreters: ProcessPoolExecutor
) -> None:
    for found, _ in run_ranks(interpreters, compare_loss_on_ranks, dtype, rows):
        check_loss(found, dtype)


def check_loss(found: dict[str, float], dtype: torch.dtype) -> None:
    """Check that loss and evaluation are equal in fp32, and gradients in their dtype."""
    assert max(found["loss"], found["evaluation"], found["sums"]) <= 1e-6, found
    assert max(found["hidden"], found["weight"]) <= LIMITS[dtype], found


def test_kernels_compile_for_hopper_and_move_16_bytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.extras.step.kernels import cross_entropy_kernel as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shared = {"logits": "*bf16", "stride": "i32", "real": "i32", "columns": "i32"}
    shared |= {"local": "*i64", "holds_target": "*i1"}
    constants = {"with_hits": True, "has_mask": True, "block": kernels._BLOCK}
    for kernel, further in (
        (kernels._reduce, {"results": "*fp32"}),
        (kernels._write_gradient, {"top": "*fp32", "factor": "*fp32", "mask": "*fp32"}),
    ):
        own = {name: constants[name] for name in kernel.arg_names if name in constants}
        types = {**shared, **further, **dict.fromkeys(own, "constexpr")}
        # As the launch finds it out: addresses, the stride and all columns are multiples of 16.
        divisible = {
            (number,): [["tt.divisibility", 16]]
            for number, name in enumerate(kernel.arg_names)
            if types[name].startswith("*") or name in ("stride", "columns")
        }
        source = ASTSource(kernel, types, own, divisible)
        options = {"num_warps": kernels._WARPS, "enable_fp_fusion": True}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        # 4,096 logits of 2 bytes are two loads of 16 bytes for each of 256 threads.
        assert len(re.findall(r"ld\.global\.v4\.b32", compiled.asm["ptx"])) == 2


@pytest.mark.parametrize(
    ("columns", "rows"), [(128_256, 512), (50_257, 1280), (262_145, 255), (1 << 27, 1)]
)
def test_chunks_on_gpus_have_complete_tiles(columns: int, rows: int) -> None:
    parts = list(loss.split_rows(5000, columns, on_gpu=True))
    assert parts[0] == slice(0, rows)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert parts[-1].stop == 5000
