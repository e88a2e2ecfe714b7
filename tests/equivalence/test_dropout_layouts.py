"""Tests that runs with dropout repeat bit for bit, and that micro-batch sizes change no mask.

`test_layouts.py` compares layouts with dropout with one process.
"""

from collections.abc import Callable
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
    load_from,
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


Trained = Callable[[Layout], Path]


def arguments(folder: Path, corpus: str, layout: Layout, *flags: str) -> list[str]:
    further = layout.flags, "--check-invariants-interval 0", *flags
    return command(folder, corpus, layout.shape, layout.variation, *further)


def train(
    pool: ProcessPool, corpus: str, folder: Path, layout: Layout, *flags: str
) -> list[tuple[float, float]]:
    succeed(pool.run(layout.ranks, pretrain, arguments(folder, corpus, layout, *flags)))
    return curve(folder)


@pytest.fixture(scope="module")
def trained(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function that trains a layout once, and returns the folder.

    It has a checkpoint after half of its iterations.
    """
    folders: dict[Layout, Path] = {}

    def run(layout: Layout) -> Path:
        if layout not in folders:
            folders[layout] = tmp_path_factory.mktemp("trained")
            half = count_iterations(layout.variation) // 2
            train(pool, corpus, folders[layout], layout, f"--save-interval {half}")
        return folders[layout]

    return run


def shorten(layout: Layout) -> Layout:
    """Return a layout with the variation of this suite."""
    return replace(layout, variation=of_suite(layout.variation))


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
    layout: Layout, pool: ProcessPool, corpus: str, trained: Trained, tmp_path: Path
) -> None:
    """A resumed run is bit-identical to an uninterrupted run of the same layout."""
    layout = shorten(layout)
    iterations = count_iterations(layout.variation)
    half = iterations // 2
    argv = load_from(arguments(tmp_path, corpus, layout), trained(layout), half)
    succeed(pool.run(layout.ranks, pretrain, argv))
    once = curve(trained(layout))
    assert len(once) == iterations
    assert curve(tmp_path) == once[half:]


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
    layout: Layout,
    recompute: str,
    pool: ProcessPool,
    corpus: str,
    trained: Trained,
    tmp_path: Path,
) -> None:
    """Some iterations are bit-identical, in which the batch size or the length changes."""
    layout = shorten(layout)
    iterations = by_suite(4, 6)
    flags = f"--exit-interval {iterations}"
    recomputed = train(pool, corpus, tmp_path, replace(layout, recompute=recompute), flags)
    assert len(recomputed) == iterations
    assert recomputed == curve(trained(layout))[:iterations]


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


def test_dropout_changes_the_curve(
    pool: ProcessPool, corpus: str, trained: Trained, tmp_path: Path
) -> None:
    layout = shorten(ONE)
    without = train(pool, corpus, tmp_path, layout, "--exit-interval 3", NO_DROPOUT)
    assert worst(curve(trained(layout))[:3], without) > 1e-3
