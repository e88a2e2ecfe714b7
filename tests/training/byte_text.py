"""A kind of data that somebody adds: one text file, read byte by byte. A byte is a token id."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError, DataError
from megatron.data.content import digest_of_file
from megatron.data.position_source import PositionSource
from megatron.data.registry import DatasetRegistry
from megatron.data.source import SourceRequest, Sources
from megatron.data.splits import compute_split_bounds


class ByteSource(PositionSource):
    """Source of samples that follow each other in a file. The first one follows the last one."""

    kind = "bytes"

    def __init__(self, name: str, path: Path, span: range, request: SourceRequest) -> None:
        super().__init__(name, request.seq_length, request.batch_slice, request.data.num_workers)
        self._path = path
        self._span = span
        self._bytes = np.memmap(path, np.uint8, "r")
        # Each save reads the digest, so the file is read only once for it.
        self._fingerprints = {path.name: digest_of_file(path)}

    @property
    def fingerprints(self) -> dict[str, str]:
        return self._fingerprints

    def describe(self) -> tuple[str, str]:
        return f"bytes of {self._path.name}", f"{len(self._span)} samples"

    def fill(self, positions: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        for row, position in zip(samples, positions, strict=True):
            first = self._span[int(position) % len(self._span)] * self._seq_length
            row[:] = self._bytes[first : first + len(row)]


class ByteText:
    """One text file, which --split divides by its samples."""

    def list_files(self, request: SourceRequest, log: Callable[[str], None]) -> None:
        """Do nothing, because one file is found quickly."""

    def build(self, request: SourceRequest, registry: DatasetRegistry) -> Sources:
        data = request.data
        if data.datasets is not None or data.data_phases is not None:
            raise ConfigError("a text has one part; leave out --datasets and --data-phases")
        path = Path(data.data_path[0])
        try:
            # The last token of a sample is the first one of the next sample.
            count = (path.stat().st_size - 1) // request.seq_length
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        bounds = compute_split_bounds(data.split, count)

        def make(name: str, samples: int | None, piece: int) -> ByteSource | None:
            span = range(bounds[piece], bounds[piece + 1])
            return ByteSource(name, path, span, request) if samples != 0 and span else None

        return Sources.of_three(
            make("train", request.train_samples, 0),
            make("validation", request.valid_samples, 1),
            make("test", request.test_samples, 2),
            registry,
        )
