"""Runs of a model whose widths a GPU would pad. Padding is forced, because CPUs need none."""

import json
from pathlib import Path
from unittest import mock

import pytest
from process_pool import pretrain, succeed
from training.runs import Runner

WIDTHS = (
    "--hidden-size 36 --num-attention-heads 2 --kv-channels 18 --ffn-hidden-size 42 "
    "--vocab-size 5002 --make-vocab-size-divisible-by 1 --swiglu --normalization RMSNorm "
    "--position-embedding-type rotary --untie-embeddings-and-output-weights"
)
"""No width of a rank is a multiple of 8: 36, 54, 18, 21 and 2,501 with two ranks."""


def pretrain_padded(argv: list[str]) -> set[int]:
    """Train with padding. Return the sizes of the matrices of forward products."""
    import torch.nn.functional as F
    from parallel.test_padding import pad_on_cpu

    with pad_on_cpu(), mock.patch.object(F, "linear", wraps=F.linear) as linear:
        pretrain(argv)
    factors = [call.args[:2] for call in linear.call_args_list]
    return {size for x, weight in factors for size in (x.shape[-1], *weight.shape)}


def read_headers(folder: Path) -> dict[str, object]:
    """Return the names, shapes, dtypes and places of all tensors of a checkpoint."""
    headers = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            headers[str(path.relative_to(folder))] = json.loads(file.read(size))
    return headers


@pytest.mark.parametrize(
    ("flags", "ranks", "bound"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3", 4, 1e-5),
        pytest.param(
            "--bf16 --gradient-accumulation-fusion --zero-stage 2 --checkpoint-activations",
            *(2, 1e-2),
            marks=pytest.mark.full,
        ),
    ],
    ids=["fp32", "bf16, fused"],
)
def test_ten_steps_and_their_checkpoints(
    flags: str, ranks: int, bound: float, run: Runner, other: Runner
) -> None:
    run(f"{WIDTHS} {flags}", ranks)
    outcomes = other.pool.run(ranks, pretrain_padded, other.argv(f"{WIDTHS} {flags}"))
    succeed(outcomes)
    for outcome in outcomes:
        assert outcome.value
        assert not any(size % 8 for size in outcome.value)
    expected, found = (list(each.losses().values()) for each in (run, other))
    assert len(found) == 10
    assert found == pytest.approx(expected, rel=bound)
    headers = read_headers(run.folder)
    assert len(headers) >= 1
    assert headers == read_headers(other.folder)
