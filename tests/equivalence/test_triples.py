"""Tests that layouts with each three values of their columns train as one process.

Six iterations contain the change of the batch size or of the length, and one evaluation.
"""

from pathlib import Path

import pytest
from equivalence.conftest import Compare
from equivalence.layouts import PAIRS, TRIPLES, Layout, covered, required


def test_layouts_cover_every_triple() -> None:
    assert all(layout.makes_sense for layout in TRIPLES)
    assert not required(3) - covered([*PAIRS, *TRIPLES], 3)


@pytest.mark.full
@pytest.mark.parametrize("layout", TRIPLES, ids=str)
def test_layout_trains_six_iterations_as_one_process(
    layout: Layout, compare: Compare, tmp_path: Path
) -> None:
    assert compare(layout, tmp_path, "--exit-interval 6", complete=True) == (6, 1)
