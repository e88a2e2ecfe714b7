"""The shuffles in C++ and in blocks equal NumPy's, and other threads run meanwhile."""

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data import index_helpers


@pytest.fixture(params=["C++", "blocks"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "blocks":
        monkeypatch.setattr(index_helpers, "shuffle", None)
    elif index_helpers.shuffle is None:
        pytest.skip("the C++ index helpers are not built")
    return request.param


@pytest.mark.parametrize(
    ("items", "dtype", "direct"),
    [
        (1, np.int64, 1),
        (2, np.int64, 1),
        (7, np.int32, 1),
        (5000, np.int64, 1),
        (54_321, np.int32, 1000),
        (200_001, np.uint32, 50),
    ],
)
@pytest.mark.usefixtures("implementation")
def test_shuffles_equal_numpy(
    items: int, dtype: type, direct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_helpers, "DIRECT_ITEMS", direct)
    expected: NDArray = np.arange(items, dtype=dtype)
    found = expected.copy()
    rng = np.random.RandomState(items)
    reference = np.random.RandomState(items)
    for _ in range(2):
        reference.shuffle(expected)
        index_helpers.shuffle_in_place(found, rng)
        assert np.array_equal(found, expected)
    # The next draws are equal as well, so that a second shuffle continues the same stream.
    assert rng.randint(1 << 31, size=4).tolist() == reference.randint(1 << 31, size=4).tolist()


@pytest.mark.full
@pytest.mark.usefixtures("implementation")
def test_large_array_equals_numpy() -> None:
    expected = np.arange(3 * index_helpers.DIRECT_ITEMS, dtype=np.uint32)
    found = expected.copy()
    np.random.RandomState(1234).shuffle(expected)
    index_helpers.shuffle_in_place(found, np.random.RandomState(1234))
    assert np.array_equal(found, expected)


@pytest.mark.usefixtures("implementation")
def test_other_threads_run_during_a_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_helpers, "DIRECT_ITEMS", 1 << 16)
    over = threading.Event()
    beats: list[int] = []

    def beat() -> None:
        while not over.wait(0.001):
            beats.append(len(beats))

    thread = threading.Thread(target=beat)
    items = np.arange(4_000_000, dtype=np.uint32)
    thread.start()
    before = len(beats)
    index_helpers.shuffle_in_place(items, np.random.RandomState(1))
    during = len(beats) - before
    over.set()
    thread.join()
    # `RandomState.shuffle` lets no beat through.
    assert during > 20
