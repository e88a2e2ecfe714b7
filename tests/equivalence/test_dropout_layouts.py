"""Tests that runs with dropout repeat bit for bit, and that micro-batch sizes change no mask.

`test_layouts.py` compares layouts with dropout with one process.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from equivalence.corpus import (
    DROPOUT,
    EVALUATED,
    NO_DROPOUT,
    Single,
    command,
    count_iterations,
    curve,
    of_suite,
    worst,
)
from equivalence.layouts import Layout
from process_pool import ProcessPool, pretrain, succeed
from suites import by_suite

BOUND = 1e-5
ONE = Layout()
PIPELINE = Layout(2, 2, 1, 1, sequence=True, schedule="1F1B")
INTERLEAVED = Layout(
    1,
    2,
    2,
    2,
    schedule="interleaved 1F1B",
    recompute="half",
    shape="llama",
    tied=False,
    variation="curriculum",
)
UNPIPELINED = Layout(2, 1, 2, 1, sequence=False, shape="bloom")


def train(
    pool: ProcessPool, corpus: str, folder: Path, layout: Layout, *flags: str
) -> list[tuple[float, float]]:
    argv = command(
        folder,
        corpus,
        layout.shape,
        layout.variation,
        layout.flags,
        "--check-invariants-interval 0",
        *flags,
    )
    succeed(pool.run(layout.ranks, pretrain, argv))
    return curve(folder)


def suite(layout: Layout, full: bool) -> object:
    return pytest.param(layout, id=str(layout), marks=pytest.mark.full if full else ())


@pytest.mark.parametrize(
    "layout",
    [
        suite(ONE, True),
        suite(PIPELINE, False),
        suite(INTERLEAVED, True),
        suite(Layout(2, 1, 2, 1, sequence=True), True),
        suite(Layout(2, shape="bloom"), True),
        suite(Layout(1, 1, 2, 3), True),
        suite(Layout(2, 2, 2, 3, schedule="1F1B", variation="curriculum"), True),
    ],
)
def test_dropout_is_reproducible(
    layout: Layout, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """A resumed run is bit-identical to an uninterrupted run of the same layout."""
    layout = replace(layout, variation=of_suite(layout.variation))
    iterations = count_iterations(layout.variation)
    once = train(pool, corpus, tmp_path / "once", layout)
    train(pool, corpus, tmp_path / "halves", layout, f"--exit-interval {iterations // 2}")
    assert train(pool, corpus, tmp_path / "halves", layout, "--require-load") == once
    assert len(once) == iterations


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        pytest.param(
            layout,
            recompute,
            id=f"{layout}-{recompute}",
            marks=() if recompute in short else pytest.mark.full,
        )
        for layout, short in (
            (ONE, ("core",)),
            (PIPELINE, ("half",)),
            (replace(INTERLEAVED, recompute="none"), ()),
        )
        for recompute in ("all", "half", "core")
    ]
    + [pytest.param(UNPIPELINED, "partitioned")],
)
def test_recomputation_changes_no_bit(
    layout: Layout, recompute: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """Some iterations are bit-identical, in which the batch size or the length changes."""
    layout = replace(layout, variation=of_suite(layout.variation))
    iterations = by_suite(4, 6)
    exit_interval = f"--exit-interval {iterations}"
    expected = train(pool, corpus, tmp_path / "kept", layout, exit_interval)
    recomputed = train(
        pool,
        corpus,
        tmp_path / "recomputed",
        replace(layout, recompute=recompute),
        exit_interval,
    )
    assert recomputed == expected
    assert len(expected) == iterations


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=data, sharding=sharding, micro_batch_size=size)
        for data, sharding in ((1, 1), (2, 1), (4, 2), (4, 3))
        for size in (1, 2, 4)
        if data * size <= 4
    ]
    + [Layout(tensor, sequence=sequence) for tensor in (2, 4) for sequence in (False, True)],
    ids=str,
)
def test_masks_do_not_depend_on_the_layout(
    layout: Layout, pool: ProcessPool, corpus: str, single: Single, tmp_path: Path
) -> None:
    alone = curve(single(layout.shape, layout.tied, layout.variation, DROPOUT))
    assert worst(train(pool, corpus, tmp_path, layout, DROPOUT, EVALUATED), alone) < BOUND


def test_dropout_changes_the_curve(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    with_it = train(pool, corpus, tmp_path / "with", ONE, "--exit-interval 3")
    without = train(pool, corpus, tmp_path / "without", ONE, "--exit-interval 3", NO_DROPOUT)
    assert worst(with_it, without) > 1e-3
