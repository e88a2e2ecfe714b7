"""Tests that the word embedding and the output matrix can have a learning rate of their own.

The reference is `torch.optim.AdamW` with three parameter groups in one process. Its learning rates
are computed here, with the formula of the schedule.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equivalence.corpus import NO_DROPOUT, UNTIED, command, curve, worst
from equivalence.test_reshape import read_global_tensors
from process_pool import ProcessPool, pretrain, succeed

from megatron.observe.metrics import read_metrics

BOUND = 1e-5
RATES = (1e-3, 1e-4)
"""Peak and minimum."""
DECOUPLED_RATES = (3e-3, 5e-4)
START = 2e-4
# Without it, an update amplifies the rounding of gradients that are almost zero.
EPS = 1e-5
FLAGS = (
    f"--lr {RATES[0]} --min-lr {RATES[1]} --decoupled-lr {DECOUPLED_RATES[0]} "
    f"--decoupled-min-lr {DECOUPLED_RATES[1]} --lr-warmup-init {START} --weight-decay 0.1 "
    f"--adam-eps {EPS}"
)
SAMPLES = (0, 4, 8, 12, 16, 24, 32, 44, 56, 72)
"""Samples before each iteration of the batch-size ramp-up."""
WARMUP, DECAY = 8, 176
"""Ends of warm-up and decay in samples."""
FOUR = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2"
ZERO = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2 --zero-stage"
LAYOUTS = {
    "one process": (1, "--micro-batch-size 4"),
    # Three layers are divided unevenly.
    "tp2-pp2": (4, FOUR),
    "tp2-dp2-zero1": (4, f"{ZERO} 1"),
    "tp2-dp2-zero2": (4, f"{ZERO} 2"),
    "tp2-dp2-zero3": (4, f"{ZERO} 3"),
    "deepspeed-dp2-zero2": (2, "--deepspeed --zero-stage 2 --micro-batch-size 2"),
    "deepspeed-dp2-zero3": (2, "--deepspeed --zero-stage 3 --micro-batch-size 2"),
    "deepspeed-tp2-pp2": (4, f"--deepspeed {FOUR}"),
}
SHORT = {
    ("one process", True),
    ("tp2-pp2", True),
    ("tp2-pp2", False),
    ("deepspeed-tp2-pp2", False),
}


def compute_rate(samples: int, peak: float, minimum: float) -> float:
    if samples <= WARMUP:
        return START + (peak - START) * samples / WARMUP
    done = (samples - WARMUP) / (DECAY - WARMUP)
    return minimum + 0.5 * (math.cos(math.pi * done) + 1) * (peak - minimum)


def pretrain_with_torchs_adamw(argv: list[str]) -> None:
    """Train with an optimizer that knows nothing of this project's groups and schedules."""
    from megatron.config.optimizer import OPTIMIZERS, OptimizerConfig
    from megatron.engine import native
    from megatron.engine.optimizer import MasterParameter, Optimizer, scale_gradients

    class Reference(Optimizer):
        row = OPTIMIZERS.require("adam")
        description = ("optimizer", "the reference", "")

        def __init__(self, masters: list[MasterParameter]) -> None:
            super().__init__(masters, OptimizerConfig())
            groups: dict[str, list[torch.nn.Parameter]] = {"ends": [], "inner": [], "vectors": []}
            for master in masters:
                group = "inner"
                if master.weight.dim() == 1:
                    group = "vectors"
                elif master.name in ("embedding.word.weight", "head.weight"):
                    group = "ends"
                groups[group].append(master.weight)
            self.adamw = torch.optim.AdamW(
                [
                    {"params": groups["ends"], "weight_decay": 0.1},
                    {"params": groups["inner"], "weight_decay": 0.1},
                    {"params": groups["vectors"], "weight_decay": 0.0},
                ],
                eps=EPS,
            )
            for master in masters:
                self.adamw.state[master.weight] = {
                    "step": torch.zeros(()),
                    **self.states[master.weight],
                }

        def step(
            self, lr: float, decoupled_lr: float | None = None, gradient_factor: float = 1.0
        ) -> None:
            scale_gradients(self.masters, gradient_factor)
            samples = SAMPLES[self.step_count]
            rates = [DECOUPLED_RATES, RATES, RATES]
            for group, (peak, minimum) in zip(self.adamw.param_groups, rates, strict=True):
                group["lr"] = compute_rate(samples, peak, minimum)
            self.adamw.step()
            self.step_count += 1

    original = native.build_optimizer
    native.build_optimizer = lambda masters, *_: Reference(masters)
    try:
        pretrain(argv)
    finally:
        native.build_optimizer = original


def arguments(folder: Path, corpus: str, layout: str, *, tied: bool) -> list[str]:
    _, flags = LAYOUTS[layout]
    return command(
        folder,
        corpus,
        "gpt2",
        "ramp",
        NO_DROPOUT,
        "--num-layers 3 --hidden-size 32",
        FLAGS,
        flags,
        "" if tied else UNTIED,
    )


@pytest.fixture(scope="module")
def reference(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], Path]:
    """Return a function that trains the reference once, and returns the folder."""
    folders: dict[bool, Path] = {}

    def run(tied: bool) -> Path:
        if tied not in folders:
            folder = tmp_path_factory.mktemp("reference")
            argv = arguments(folder, corpus, "one process", tied=tied)
            succeed(pool.run(1, pretrain_with_torchs_adamw, argv))
            folders[tied] = folder
        return folders[tied]

    return run


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        pytest.param(
            layout,
            tied,
            id=f"{layout}-{'tied' if tied else 'untied'}",
            marks=() if (layout, tied) in SHORT else pytest.mark.full,
        )
        for layout in LAYOUTS
        for tied in (True, False)
    ],
)
def test_a_layout_trains_as_torchs_adamw_with_groups(
    layout: str,
    tied: bool,
    pool: ProcessPool,
    corpus: str,
    reference: Callable[[bool], Path],
    tmp_path: Path,
) -> None:
    if "deepspeed" in layout:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    ranks, _ = LAYOUTS[layout]
    succeed(pool.run(ranks, pretrain, arguments(tmp_path, corpus, layout, tied=tied)))
    assert len(curve(tmp_path)) == 10
    assert worst(curve(tmp_path), curve(reference(tied))) < BOUND
    expected = read_global_tensors(reference(tied) / "global_step10")
    found = read_global_tensors(tmp_path / "global_step10")
    assert found.keys() == expected.keys()
    assert ("weight/head.weight" in found) != tied
    for name, tensor in found.items():
        bound = BOUND * float(expected[name].abs().max())
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=max(bound, 1e-12))
    # The report of an iteration has the rates that the next one uses.
    reports = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "lm_loss" in entry]
    for key, rates in (("learning_rate", RATES), ("decoupled_learning_rate", DECOUPLED_RATES)):
        expected_rates = [compute_rate(samples, *rates) for samples in SAMPLES[1:]]
        assert [report[key] for report in reports[:-1]] == pytest.approx(expected_rates)
