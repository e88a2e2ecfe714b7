"""Sums of vectors' gradients in one call a microbatch equal those of autograd, bit for bit."""

import shlex
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron.data.batches import Microbatch
from megatron.engine import runner
from megatron.engine.native import NativeEngine
from megatron.engine.runner import SingleStageRunner, VectorSums
from megatron.extras.interop.translators.translator import load_config
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import build_mesh
from megatron.plan.resolve import resolve

MICROBATCHES = 3
COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --lr 2e-3 "
    f"--micro-batch-size 1 --global-batch-size {MICROBATCHES} --train-iters 10 --vocab-size 100 "
    "--data-path none"
)
FLAGS = {
    "GPT-2": "--bf16",
    "GPT-2, products do not add": "--bf16 --no-gradient-accumulation-fusion",
    "fp16": "--fp16 --initial-loss-scale 256 --gradient-accumulation-fusion",
    "weights of heads and xIELU": (
        "--bf16 --qk-norm head --activation xielu --normalization RMSNorm "
        "--position-embedding-type rotary --recompute-granularity full --recompute-method uniform"
    ),
}


def train(flags: str, *, together: bool) -> list[Tensor]:
    """Return the gradients and the weights of two steps."""
    plan = resolve(load_config(shlex.split(f"{COMMON} {flags}")).config, 1)
    plan.raise_on_errors()
    mesh = build_mesh(Grid(1, 1, 1), torch.device("cpu"))
    build = runner.build_runner

    def build_without_vectors(*arguments, **options):
        return build(*arguments, **{**options, "vectors": ()})

    chosen = build if together else build_without_vectors
    with mock.patch("megatron.engine.native.build_runner", chosen):
        engine = NativeEngine(plan, mesh)
    generator = torch.Generator().manual_seed(0)
    seen: list[Tensor] = []

    def observe(_: str, value: Tensor) -> None:
        seen.append(value.clone())

    for iteration in (1, 2):
        tokens = torch.randint(0, 100, (MICROBATCHES, 1, 17), generator=generator)
        batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
        engine.compute_and_drop_gradients(batch, iteration, observe)
        assert all(master.model_parameter.grad is None for master in engine._masters)
        result = engine.train_batch(batch, iteration=iteration, lr=1e-3)
        seen.append(torch.tensor(result.grad_norm))
        seen += [shard.tensor.clone() for shard in engine.shards(optimizer=True)]
    assert isinstance(engine.runner, runner.SingleStageRunner)
    assert (engine.runner._vectors is not None) == together
    return seen


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_the_sums_are_those_of_autograd(flags: str) -> None:
    expected, found = (train(flags, together=together) for together in (False, True))
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


def test_a_run_in_fp32_leaves_its_gradients_to_autograd() -> None:
    plan = resolve(load_config(shlex.split(COMMON)).config, 1)
    engine = NativeEngine(plan, build_mesh(Grid(1, 1, 1), torch.device("cpu")))
    assert isinstance(engine.runner, runner.SingleStageRunner)
    assert isinstance(engine.runner, SingleStageRunner)
    assert engine.runner._vectors is None


def test_the_memory_of_the_sums_does_not_move() -> None:
    """Values that are no numbers stay, and a first microbatch leaves nothing of the last step."""
    vectors = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (3, 1, 8)]
    sums = VectorSums(vectors)
    places = set()
    for step in range(2):
        for number in range(2):
            for vector in vectors:
                value = float("nan") if step == 0 else 1.0 + number
                vector.grad = torch.full_like(vector.detach(), value)
            sums.add(first=number == 0)
        sums.assign()
        found = [vector.grad for vector in vectors if vector.grad is not None]
        places.add(tuple(each.data_ptr() for each in found))
        for each, vector in zip(found, vectors, strict=True):
            assert each.dtype == torch.float32
            expected = torch.full_like(each, float("nan") if step == 0 else 3.0)
            torch.testing.assert_close(each, expected, rtol=0, atol=0, equal_nan=True)
            vector.grad = None
    assert len(places) == 1
