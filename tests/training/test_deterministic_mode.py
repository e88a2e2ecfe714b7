"""Tests of --deterministic-mode. What it changes on a GPU is listed in docs/gpus.md."""

import os
from unittest import mock

import pytest
import torch
from process_pool import pretrain, succeed
from training.runs import Runner

PARTS = (
    "--train-iters 3 --num-layers 2 --swiglu --untie-embeddings-and-output-weights "
    "--hidden-dropout 0.1 --attention-dropout 0.1"
)


def pretrain_and_look(argv: list[str]) -> tuple[bool, str | None, str | None]:
    """Train. Return whether torch chose deterministic kernels, and the variables of libraries."""
    from megatron.engine.native import NativeEngine

    seen = []
    train_batch = NativeEngine.train_batch

    def look(self, *arguments, **options):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return train_batch(self, *arguments, **options)

    # Neither the environment nor torch's choice may stay in the process, which runs other tests.
    with mock.patch.dict(os.environ), mock.patch.object(NativeEngine, "train_batch", look):
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        os.environ["NCCL_ALGO"] = "Tree"
        try:
            pretrain(argv)
            return all(seen), os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ["NCCL_ALGO"]
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_are_chosen_and_change_no_number_on_a_cpu(ranks: int, run: Runner) -> None:
    flags = f"{PARTS} --tensor-model-parallel-size {ranks}"
    plain = run.pool.run(ranks, pretrain_and_look, run.argv(flags))
    succeed(plain)
    losses = run.losses()
    other = Runner(run.pool, run.data, run.folder / "deterministic")
    chosen = other.pool.run(ranks, pretrain_and_look, other.argv(f"{flags} --deterministic-mode"))
    succeed(chosen)
    for outcome in plain:
        assert outcome.value == (False, None, "Tree")
    for outcome in chosen:
        # A value of the user stays.
        assert outcome.value == (True, ":4096:8", "Tree")
    assert other.losses() == losses
