"""Source of synthetic samples, for --mock-data."""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError, DataError
from megatron.data.position_source import PositionSource, find_kind
from megatron.data.source import BatchSlice


class MockSource(PositionSource):
    """Source of synthetic samples, for --mock-data.

    The ids of a sample increase by 1. The first one follows from the seed, the name of the set and
    the position. A model learns this quickly, so a falling loss shows that training works.
    """

    kind = "mock"

    def __init__(
        self, name: str, seed: int, seq_length: int, batch_slice: BatchSlice, threads: int
    ) -> None:
        """Create a source. No file is read.

        Raises:
            ConfigError: the size of the vocabulary is not known.
        """
        super().__init__(name, seq_length, batch_slice, threads)
        if batch_slice.vocab_size is None:
            raise ConfigError("--mock-data has no documents, so there is no text to show.")
        self._seed = seed
        self._vocab_size = batch_slice.vocab_size

    def state(self) -> dict[str, Any]:
        """Return the position. There are no segments."""
        return {"consumed_samples": self._consumed, "segments": []}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the state is that of real data.
        """
        if find_kind(state) != self.kind:
            raise DataError(
                f"{self.name}: the checkpoint was trained on real data, and --mock-data would go "
                "on with synthetic tokens; remove --mock-data, or start a new run with --finetune "
                "and another --save"
            )
        self._move_to(int(state["consumed_samples"]))

    def fill(self, positions: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        """Write the tokens of samples. See `PositionSource.fill`."""
        steps = np.arange(samples.shape[1], dtype=np.int64)
        key = [self._seed, zlib.crc32(self.name.encode())]
        for row, position in zip(samples, positions, strict=True):
            first = np.random.default_rng([*key, int(position)]).integers(self._vocab_size)
            row[:] = (first + steps) % self._vocab_size
