"""Files that change while they are in use.

Wherever a bit flips, the result is an error that names the damage, or another valid sample. It is
never a crash.
"""

import numpy as np
import pytest
from data.corpora import write_numbered
from data.source_requests import open_sources

from megatron.base.errors import DataError
from megatron.config.data import DataConfig
from megatron.data import index_helpers, index_numpy
from megatron.data.source import BatchSlice


@pytest.fixture(params=["C++", "NumPy"])
def sources(request, tmp_path, monkeypatch):
    """A mixture of two data sets, resumed with another seed.

    Every kind of cached array is then in use.
    """
    if request.param == "NumPy":
        monkeypatch.setattr(index_helpers, "gather_tokens", index_numpy.gather_tokens)
    x = write_numbered(tmp_path / "x", documents=40, size=30)
    y = write_numbered(tmp_path / "y", documents=40, size=30, first=5000)
    config = DataConfig(
        data_path=("0.7", x, "0.3", y),
        split="100,0,0",
        data_cache_path=str(tmp_path / "cache"),
        num_workers=0,
    )

    first = open_sources(config, 120, batch_slice=BatchSlice(4))
    assert first.train is not None
    first.train.advance(8)
    second = open_sources(config, 120, seed=2, batch_slice=BatchSlice(4))
    second.load(first.state())
    second.prepare()
    yield second
    for opened in (first, second):
        opened.close()


def read_all(sources):
    """Return all samples and None, or None and the error."""
    train = sources.train
    start = train.consumed_samples
    try:
        return np.concatenate([train.read_batch(4)[0].tokens.numpy() for _ in range(28)]), None
    except DataError as error:
        return None, str(error)
    finally:
        train.advance(start - train.consumed_samples)


@pytest.mark.parametrize("bit", [0, 30, 31])
def test_a_flipped_bit_of_a_mapped_array_is_an_error_or_another_valid_sample(
    sources, bit, tmp_path
):
    """The bit is written to the file, as another program would, after the array was mapped."""
    expected, error = read_all(sources)
    assert error is None
    files = sorted((tmp_path / "cache").glob("*.npy"))
    assert {file.name.split("-")[0] for file in files} == {"samples", "permutation", "blend"}
    errors = 0
    for file in files:
        header = 128
        for at in range(header + bit // 8, file.stat().st_size, 4 * 17):
            flip(file, at, bit % 8)
            read, error = read_all(sources)
            flip(file, at, bit % 8)
            if error is None:
                assert read.shape == expected.shape
                assert ((read >= 0) & (read < 6200)).all(), "tokens of the corpora"
            else:
                assert "an index of the data is damaged" in error
                assert "Start again from the last checkpoint" in error
                errors += 1
    assert errors > (0 if bit == 0 else 10)
    assert read_all(sources)[0].tobytes() == expected.tobytes()
    assert not list((tmp_path / "cache").glob("samples-*.json")), "the next start builds them again"


@pytest.mark.parametrize("bit", [0, 30, 31])
def test_a_flipped_bit_of_a_mapped_idx_is_an_error_or_another_valid_sample(sources, bit, tmp_path):
    errors = 0
    for at in range(34 + bit // 8, 34 + 40 * 12, 4 * 5):
        flip(tmp_path / "x.idx", at, bit % 8)
        read, error = read_all(sources)
        flip(tmp_path / "x.idx", at, bit % 8)
        if error is None:
            assert ((read >= 0) & (read < 6200)).all()
        else:
            errors += 1
    assert errors > 0


def flip(file, at, bit):
    with open(file, "rb+") as raw:
        raw.seek(at)
        (value,) = raw.read(1)
        raw.seek(at)
        raw.write(bytes([value ^ (1 << bit)]))
