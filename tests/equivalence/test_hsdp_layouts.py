"""Tests that copies of the model equal one process in cases that `layouts.py` does not contain.

There are shards without elements, groups of one rank, stages 1 and 2 inside of groups, other
optimizers, and gradients that are sent in bf16.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from equivalence.corpus import NO_DROPOUT, OPTIMIZERS, command, curve, worst
from process_pool import ProcessPool, pretrain, succeed

BOUND = 1e-5
BF16_BOUND = 0.01
# The six rows of a norm on groups of four ranks are 2, 2, 2 and 0. Those of the heads' norms, with
# two elements, are 1, 1, 0 and 0.
NARROW = (
    "--num-layers 2 --hidden-size 6 --num-attention-heads 3 --num-query-groups 3 "
    "--ffn-hidden-size 9 --qk-layernorm --rampup-batch-size 8 8 48 --global-batch-size 16 "
    "--train-samples 128"
)
PIPELINE = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@dataclass(frozen=True)
class Case:
    """A layout on `ranks` ranks. `model` has the flags that one process gets too."""

    name: str
    ranks: int
    model: str
    flags: str
    bound: float = BOUND
    short: bool = False


CASES = [
    Case("empty shards", 8, NARROW, "--zero-stage 3 --hsdp-shard-size 4", short=True),
    Case("empty shards, ZeRO 2", 8, NARROW, "--zero-stage 2 --hsdp-shard-size 4"),
    Case(
        "empty shards, Muon",
        8,
        f"{NARROW} {OPTIMIZERS['muon']}",
        "--zero-stage 3 --hsdp-shard-size 4",
    ),
    Case(
        "Muon, TP 2",
        8,
        f"--num-layers 2 {OPTIMIZERS['muon']}",
        f"--sharding-strategy hsdp --hsdp-shard-size 2 {TP2}",
    ),
    Case(
        "AdEMAMix",
        4,
        f"--num-layers 2 {OPTIMIZERS['ademamix']}",
        "--sharding-strategy hsdp --hsdp-shard-size 2",
    ),
    Case("ZeRO 1, two stages a rank", 8, "", f"--zero-stage 1 --hsdp-shard-size 2 {PIPELINE}"),
    Case("ZeRO 2, two stages a rank", 8, "", f"--zero-stage 2 --hsdp-shard-size 2 {PIPELINE}"),
    Case(
        "groups of one rank, TP 2, PP 2",
        8,
        "",
        f"--sharding-strategy hsdp --hsdp-shard-size 1 --pipeline-model-parallel-size 2 {TP2}",
    ),
    Case(
        "gradients in bf16",
        4,
        "--num-layers 2 --bf16",
        "--sharding-strategy hsdp --hsdp-shard-size 2 --grad-reduce-in-bf16",
        bound=BF16_BOUND,
    ),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.short else pytest.mark.full)
        for case in CASES
    ],
)
def test_copies_of_the_model_equal_one_process(
    case: Case, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    curves = []
    for ranks, flags in ((1, "--micro-batch-size 4"), (case.ranks, case.flags)):
        folder = tmp_path / str(ranks)
        argv = command(folder, corpus, "llama", "ramp", NO_DROPOUT, case.model, flags)
        if ranks > 1:
            argv += ["--micro-batch-size", "1"]
        succeed(pool.run(ranks, pretrain, argv))
        curves.append(curve(folder))
    alone, together = curves
    assert len(alone) >= 10
    assert worst(together, alone) < case.bound
