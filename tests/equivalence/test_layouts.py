"""Tests that every layout trains the same model.

Loss and gradient norm equal those of one process on real text, to 1e-5 in fp32. A run has 10 steps,
or 4 in the short suite, and the batch size or the sequence length changes during it. Parameters are
not compared. The gradient of the key's bias is zero in exact arithmetic, so Adam turns its rounding
errors into steps.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from equivalence.conftest import BOUND, Compare
from equivalence.corpus import (
    DROPOUT,
    EVALUATED,
    NO_DROPOUT,
    SHAPES,
    UNTIED,
    VARIATIONS,
    Single,
    command,
    count_iterations,
    curve,
    of_suite,
    worst,
)
from equivalence.layouts import PAIRS, SHORT, STRATEGIES, Layout, covered, required
from process_pool import ProcessPool, pretrain, succeed
from suites import by_suite

COMPLETE = next(layout for layout in SHORT if layout.pipeline == 4 and layout.context != "none")
"""The layout that trains 10 steps in the short suite too, see `nearest_tests.py`."""
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "loss_curves.json"


def test_the_short_suite_has_every_value() -> None:
    assert all(layout.makes_sense for layout in SHORT)
    assert not required(1) - covered(SHORT, 1)


def test_layouts_cover_every_pair() -> None:
    assert all(layout.makes_sense for layout in PAIRS)
    assert not required(2) - covered(PAIRS, 2)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=str(layout), marks=() if layout in SHORT else pytest.mark.full)
        for layout in [*PAIRS, *STRATEGIES]
    ],
)
def test_layout_trains_and_evaluates_as_one_process(
    layout: Layout, compare: Compare, tmp_path: Path
) -> None:
    complete = layout == COMPLETE
    counts = compare(layout, tmp_path, complete=complete)
    assert counts == ((10, 3) if complete else by_suite((4, 1), (10, 3)))


def test_the_curve_is_the_golden_one(single: Single) -> None:
    """A change of all layouts at once is found. UPDATE_GOLDEN=1 writes the numbers again."""
    curves = {
        f"{shape}, {variation}": curve(single(shape, shape != "llama", variation))
        for shape in SHAPES
        for variation in VARIATIONS
    }
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert curves.keys() == golden.keys()
    for name, values in curves.items():
        # Another processor adds up in another order. A change of the mathematics is larger.
        assert worst(values, [tuple(pair) for pair in golden[name]]) < 1e-4, name


@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_learns(shape: str, single: Single) -> None:
    losses = [loss for loss, _ in curve(single(shape, shape != "llama", "ramp"))]
    assert losses[-1] < losses[0] - 0.1


RESUMED = [
    (Layout(1, 1, 2, 3), Layout(1, 4, 1, 1, schedule="1F1B")),
    (
        Layout(2, 4, 1, 1, schedule="1F1B", variation="curriculum"),
        Layout(1, 1, 4, 3, variation="curriculum"),
    ),
    (
        Layout(2, 2, 2, 2, sequence=True, schedule="interleaved 1F1B"),
        Layout(1, 2, 2, 1, schedule="1F1B"),
    ),
    (
        Layout(
            1,
            2,
            2,
            3,
            schedule="GPipe",
            shape="llama",
            tied=False,
            partition="parameters",
            micro_batch_size=2,
        ),
        Layout(4, 1, 2, 1, sequence=True, shape="llama", tied=False),
    ),
    (Layout(4, 2, 1, 1, schedule="1F1B", shape="bloom", partition="ends"), Layout(shape="bloom")),
    (
        Layout(1, 1, 4, 2, shape="llama", tied=True),
        Layout(2, 2, 1, 1, schedule="interleaved 1F1B", shape="llama", tied=True),
    ),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(a, b, id=f"{a}--{b}", marks=() if i == 2 else pytest.mark.full)
        for i, (a, b) in enumerate(RESUMED)
    ],
)
def test_resume_under_another_layout(
    before: Layout, after: Layout, pool: ProcessPool, corpus: str, single: Single, tmp_path: Path
) -> None:
    variation = of_suite(before.variation)
    half = count_iterations(variation) // 2
    first = command(
        tmp_path,
        corpus,
        before.shape,
        variation,
        DROPOUT,
        EVALUATED,
        before.flags,
        f"--exit-interval {half}",
    )
    succeed(pool.run(before.ranks, pretrain, first))
    second = command(
        tmp_path,
        corpus,
        after.shape,
        variation,
        DROPOUT,
        EVALUATED,
        after.flags,
        "--require-load",
    )
    output = succeed(pool.run(after.ranks, pretrain, second))
    assert f"successfully loaded checkpoint from {tmp_path} at iteration {half}" in output
    alone = single(after.shape, after.tied, variation, DROPOUT)
    assert worst(curve(tmp_path), curve(alone)) < BOUND


def test_resume_of_one_process_is_bit_identical(
    pool: ProcessPool, corpus: str, single: Single, tmp_path: Path
) -> None:
    alone = single("gpt2", True, "ramp")
    shutil.copytree(alone, tmp_path / "run")
    # An operator rolls back by hand.
    (tmp_path / "run" / "latest").write_text("global_step5")
    argv = command(
        tmp_path / "run", corpus, "gpt2", "ramp", NO_DROPOUT, EVALUATED, "--micro-batch-size 4"
    )
    succeed(pool.run(1, pretrain, argv))
    assert curve(tmp_path / "run") == curve(alone)


BF16 = [
    Layout(),
    Layout(1, 1, 2),
    Layout(2, 2, 2, 3, sequence=True, schedule="1F1B"),
    Layout(4, shape="llama", tied=False, variation="curriculum"),
    Layout(1, 4, 2, 1, schedule="GPipe", shape="llama", tied=False),
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=str(layout), marks=() if i == 1 else pytest.mark.full)
        for i, layout in enumerate(BF16)
    ],
)
def test_bf16_is_close(layout: Layout, pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    """A run in bf16 is close to fp32.

    With more than four layers the gradient norms of these tiny models change so much from step to
    step that rounding errors determine them.
    """
    untied = "" if layout.tied else UNTIED
    shared = layout.shape, of_suite(layout.variation), DROPOUT, EVALUATED
    alone = tmp_path / "alone"
    ours = tmp_path / "ours"
    succeed(
        pool.run(
            1,
            pretrain,
            command(alone, corpus, *shared, untied, "--micro-batch-size 4 --num-layers 4"),
        )
    )
    succeed(
        pool.run(
            layout.ranks,
            pretrain,
            command(ours, corpus, *shared, layout.flags, "--bf16 --num-layers 4"),
        )
    )
    assert 0 < worst(curve(ours), curve(alone)) < 0.01
