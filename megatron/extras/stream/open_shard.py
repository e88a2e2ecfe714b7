"""A logical shard that a rank reads: the position of the run in it, and samples after it."""

import threading

from megatron.extras.stream.reader import Cursor, Sample, ShardReader
from megatron.extras.stream.streamed_dataset import StreamedDataset


class OpenShard:
    """One shard of one data set: the position of the run, and samples that were read ahead."""

    def __init__(self, dataset: StreamedDataset, shard: int, number: int, cursor: Cursor) -> None:
        """Remember the position: sample `number` begins at `cursor`."""
        self.number = number
        self.cursor = cursor
        self._reader = ShardReader(dataset, shard, cursor)
        self._next_number = number
        self._ahead: dict[int, Sample] = {}
        self._lock = threading.Lock()

    def read(self, number: int, seq_length: int) -> Sample:
        """Return a sample that is not before the position. The position does not move.

        Raises:
            ValueError: the sample is before the position. This happens only for a batch that was
                read ahead and is no longer needed, so its result is not used.
        """
        with self._lock:
            if number < self.number:
                raise ValueError(f"sample {number} is before the position {self.number}")
            # Two threads may ask for samples of the same shard in any order.
            if number not in self._ahead:
                self._go_to(number, seq_length)
                self._ahead[number] = self._reader.read_sample(seq_length)
                self._next_number = number + 1
            return self._ahead[number]

    def confirm(self, number: int) -> None:
        """Move the position behind a sample that was read."""
        with self._lock:
            self.cursor = self._ahead[number].after
            self.number = number + 1
            # Samples after the confirmed one were read ahead and are still wanted.
            self._ahead = {later: s for later, s in self._ahead.items() if later > number}

    def _go_to(self, number: int, seq_length: int) -> None:
        """Let the reader continue with a sample."""
        if number < self._next_number:
            # The reader only moves forward, so it starts again at the position.
            self._reader.seek(self.cursor)
            self._next_number = self.number
        if number > self._next_number:
            self._reader.skip_tokens((number - self._next_number) * seq_length)
        self._next_number = number
