"""Runs with --attention-backend."""

import typing
from dataclasses import replace
from unittest import mock

import pytest
import torch
from test_plan import with_changes
from training.runs import Runner

from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.manifest import MANIFEST
from megatron.parallel.ranks import Ranks
from megatron.plan.resolve import resolve
from megatron.run.start.attention_order import _ORDERS, choose_attention_order
from megatron.run.state import TrainState


def test_an_impossible_kernel_ends_the_run_before_training(run: Runner) -> None:
    error = run.error("--attention-backend flash --attention-dropout 0.1")
    assert error.startswith("ConfigError: --attention-backend flash: none of these kernels")
    assert "--attention-dropout 0.1" in error
    assert "Add unfused at the end" in error
    assert not (run.folder / "metrics.jsonl").exists()


def test_another_kernel_trains_the_same_model(run: Runner, other: Runner) -> None:
    run("--num-layers 2")
    grid = "--tensor-model-parallel-size 2 --zero-stage 3 --checkpoint-activations"
    # The name of Megatron-LM for its own implementation.
    log = other(f"--num-layers 2 {grid} --attention-backend local", ranks=4)
    assert "--attention-backend local is read as --attention-backend unfused" in log
    assert "the first possible kernel of: unfused" in log
    assert other.losses() == pytest.approx(run.losses(), rel=1e-5)


GPU = torch.device("cuda", 0)
CUDNN = ["fused", "flash", "efficient", "unfused"]


class FakeRanks:
    """Ranks whose others have GPUs of the given types."""

    def __init__(self, *others: str) -> None:
        self.others = others

    def gather(self, mine: str) -> list[str]:
        return [mine, *self.others]


def choose(
    capability: tuple[int, int], state: TrainState, *others: str, backend: str = "by-gpu"
) -> tuple[tuple[str, ...], list[str]]:
    """Return the kernels of the plan, and the lines of the log."""
    lines: list[str] = []
    plan = resolve(with_changes(kernels={"attention_backend": (backend,)}), 1)
    ranks = typing.cast(Ranks, FakeRanks(*others))
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        chosen = choose_attention_order(plan, state, ranks, GPU, lines.append)
    return chosen.config.kernels.attention_backend, lines


def test_cudnn_comes_first_on_one_type_of_gpus_and_a_resume_keeps_the_choice() -> None:
    state = TrainState()
    assert choose((9, 0), state) == (tuple(CUDNN), [])
    assert state.attention == {"gpu": "9.0", "kernels": CUDNN}
    # A later version may have another order. The run keeps its own.
    state = TrainState.from_json({**state.to_json(), "iteration": 5})
    with mock.patch.dict(_ORDERS, {"9.0": ("flash", "unfused")}):
        assert choose((9, 0), state) == (tuple(CUDNN), [])
    # Other GPUs choose again. Ranks with several types take PyTorch's order.
    found, lines = choose((8, 0), state)
    assert found == ("auto",)
    assert "the checkpoint was trained on 9.0 and this run is on 8.0" in lines[0]
    found, lines = choose((9, 0), state, "8.0")
    assert found == ("auto",)
    assert "this run is on 8.0 and 9.0" in lines[0]
    found, lines = choose((9, 0), state, "9.0")
    assert found == tuple(CUDNN)
    assert len(lines) == 1


def test_an_older_checkpoint_keeps_the_order_of_pytorch() -> None:
    state = TrainState(iteration=5)
    found, lines = choose((9, 0), state)
    assert found == ("auto",)
    assert "was trained with PyTorch's order of kernels and keeps it" in lines[0]
    assert choose((9, 0), state) == (("auto",), [])
    # An explicit choice is no choice by the GPU, so nothing is recorded.
    assert choose((9, 0), state, backend="flash") == (("flash",), [])
    assert "attention" not in state.to_json()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_has_the_choice(run: Runner, ranks: int) -> None:
    output = run("--attention-backend by-gpu --exit-interval 2", ranks)
    assert "SDPA" in output
    stored = open_checkpoint(run.folder, 2)
    assert stored.state["attention"] == {"gpu": "cpu", "kernels": ["auto"]}
    assert stored.read_config().kernels.attention_backend == ("by-gpu",)
    rewrite = {"gpu": "9.0", "kernels": CUDNN}
    manifest = replace(stored.manifest, state={**stored.state, "attention": rewrite})
    (stored.folder / MANIFEST).write_text(manifest.dump_json())
    output = run("--attention-backend by-gpu --exit-interval 4", ranks)
    assert "the checkpoint was trained on 9.0 and this run is on cpu" in output
