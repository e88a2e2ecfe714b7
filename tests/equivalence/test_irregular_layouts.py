"""Tests that deep and irregular pipelines equal one process.

The covering set of `layouts.py` has no rows for these: up to eight stages, stages of different
sizes, a number of microbatches that no stage divides, 16-bit arithmetic on four stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from equivalence.corpus import (
    EVALUATED,
    NO_DROPOUT,
    UNTIED,
    command,
    count_iterations,
    curve,
    of_suite,
    validation,
    worst,
)
from process_pool import ProcessPool, pretrain, succeed
from suites import by_suite

BOUND = 1e-5
HALF_BOUND = 0.01
VARIATION = of_suite("ramp")
# Batch sizes 3 3 3 5 5 7 7 7 7 7, or 3 3 5 7. On one data-parallel rank they are numbers of
# microbatches, too.
ODD = by_suite(
    "--rampup-batch-size 3 2 10 --global-batch-size 7 --train-samples 18",
    "--rampup-batch-size 3 2 18 --global-batch-size 7 --train-samples 54",
)
ODD_TWICE = "--rampup-batch-size 6 4 36 --global-batch-size 14 --train-samples 108"


@dataclass(frozen=True)
class Irregular:
    """A layout.

    `layers` is the number of layers of the model, and `stages` lists those of each stage.
    """

    name: str
    layers: int
    stages: str
    flags: str
    ranks: int
    shape: str = "gpt2"
    tied: bool = True
    batches: str = ""
    """Other batch sizes than those of the variation."""
    bound: float = BOUND
    short: bool = False

    @property
    def model(self) -> str:
        """The flags of the model, which one process gets too."""
        return f"--num-layers {self.layers} {self.batches} {'' if self.tied else UNTIED}"


def pipeline(ranks: int, method: str = "uniform") -> str:
    return f"{stages_on(ranks)} --pp-partition-method {method}"


def interleaved(ranks: int, layers: int = 1) -> str:
    return f"{stages_on(ranks)} --num-layers-per-virtual-pipeline-stage {layers}"


def stages_on(ranks: int) -> str:
    return f"--micro-batch-size 1 --pipeline-model-parallel-size {ranks}"


ENDS = "type:transformer|embedding"
LAYOUTS = [
    Irregular(
        "eight stages, uneven, tied",
        layers=10,
        stages="1 1 2 1 1 2 1 1",
        flags=pipeline(8),
        ranks=8,
        short=True,
    ),
    Irregular(
        "eight stages, light ends, untied",
        layers=14,
        stages="1 2 2 2 2 2 2 1",
        flags=pipeline(8, ENDS),
        ranks=8,
        shape="llama",
        tied=False,
    ),
    Irregular(
        "eight stages, heavy embedding",
        layers=12,
        stages="1 1 1 3 3 1 1 1",
        flags=pipeline(8, "parameters"),
        ranks=8,
        shape="bloom",
    ),
    Irregular(
        "eight ranks of two stages, untied",
        layers=16,
        stages=" ".join(["1"] * 16),
        flags=interleaved(8),
        ranks=8,
        tied=False,
    ),
    Irregular(
        "four ranks of three stages, ZeRO 2, untied",
        layers=12,
        stages=" ".join(["1"] * 12),
        flags=f"{interleaved(4)} --zero-stage 2",
        ranks=8,
        shape="llama",
        tied=False,
    ),
    Irregular(
        "two ranks of three stages, TP 2, ZeRO 3, untied",
        layers=12,
        stages="2 2 2 2 2 2",
        flags=f"{interleaved(2, layers=2)} --zero-stage 3 --tensor-model-parallel-size 2 "
        "--sequence-parallel",
        ranks=8,
        tied=False,
    ),
    Irregular(
        "two ranks of three stages, odd microbatches, untied",
        layers=6,
        stages="1 1 1 1 1 1",
        flags=interleaved(2),
        ranks=2,
        shape="llama",
        tied=False,
        batches=ODD,
    ),
    Irregular(
        "two ranks of two stages, light ends, odd microbatches",
        layers=6,
        stages="1 2 2 1",
        flags=f"{interleaved(2, layers=2)} --pp-partition-method {ENDS}",
        ranks=2,
        shape="llama",
        tied=False,
        batches=ODD,
    ),
    Irregular(
        "three stages, odd microbatches",
        layers=7,
        stages="2 3 2",
        flags=pipeline(3),
        ranks=3,
        batches=ODD,
        short=True,
    ),
    Irregular(
        "three stages, odd microbatches, ZeRO 3, light ends, untied",
        layers=8,
        stages="2 4 2",
        flags=f"{pipeline(3, ENDS)} --zero-stage 3",
        ranks=6,
        shape="llama",
        tied=False,
        batches=ODD_TWICE,
    ),
    Irregular(
        "five stages, odd microbatches",
        layers=6,
        stages="1 1 2 1 1",
        flags=pipeline(5),
        ranks=5,
        shape="bloom",
        batches=ODD,
    ),
    Irregular(
        "four stages, bf16, ZeRO 1",
        layers=4,
        stages="1 1 1 1",
        flags=f"{pipeline(4)} --zero-stage 1 --bf16",
        ranks=8,
        bound=HALF_BOUND,
    ),
    Irregular(
        "four stages, bf16, ZeRO 3, untied",
        layers=4,
        stages="1 1 1 1",
        flags=f"{pipeline(4)} --zero-stage 3 --bf16",
        ranks=8,
        shape="llama",
        tied=False,
        bound=HALF_BOUND,
    ),
    Irregular(
        "four stages, fp16",
        layers=4,
        stages="1 1 1 1",
        flags=f"{pipeline(4)} --fp16 --loss-scale 1024",
        ranks=4,
        bound=HALF_BOUND,
    ),
    Irregular(
        "four stages, fp16, dynamic loss scale, ZeRO 2, uneven, untied",
        layers=5,
        stages="1 1 2 1",
        flags=f"{pipeline(4)} --zero-stage 2 --fp16 --initial-loss-scale 1024",
        ranks=8,
        shape="llama",
        tied=False,
        bound=HALF_BOUND,
    ),
]
"""Every stage has a layer. A stage with only the embedding or only the head is refused."""

Alone = Callable[[Irregular], Path]


@pytest.fixture(scope="module")
def alone(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Return the folder of one process's run in fp32 of a layout's model."""
    folders: dict[tuple[str, str], Path] = {}

    def run(layout: Irregular) -> Path:
        key = layout.shape, layout.model
        if key not in folders:
            folder = tmp_path_factory.mktemp("alone")
            flags = NO_DROPOUT, EVALUATED, layout.model, "--micro-batch-size 1"
            succeed(pool.run(1, pretrain, command(folder, corpus, layout.shape, VARIATION, *flags)))
            folders[key] = folder
        return folders[key]

    return run


def in_suites(layout: Irregular) -> object:
    marks = () if layout.short else pytest.mark.full
    return pytest.param(layout, id=layout.name.replace(", ", "-").replace(" ", "_"), marks=marks)


@pytest.mark.parametrize("layout", [in_suites(layout) for layout in LAYOUTS])
def test_an_irregular_layout_trains_and_evaluates_as_one_process(
    layout: Irregular, pool: ProcessPool, corpus: str, alone: Alone, tmp_path: Path
) -> None:
    flags = NO_DROPOUT, EVALUATED, layout.model, layout.flags
    argv = command(tmp_path, corpus, layout.shape, VARIATION, *flags)
    output = succeed(pool.run(layout.ranks, pretrain, argv))
    assert f"layers of the stages: {layout.stages}\n" in output
    single = alone(layout)
    assert len(curve(tmp_path)) == count_iterations(VARIATION)
    difference = worst(curve(tmp_path), curve(single))
    assert difference < layout.bound
    in_16_bits = layout.bound == HALF_BOUND
    assert (difference > BOUND) == in_16_bits
    assert len(validation(tmp_path)) == by_suite(1, 3)
    assert worst(validation(tmp_path), validation(single)) < layout.bound
