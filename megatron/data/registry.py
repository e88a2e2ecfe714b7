"""The data sets of a run, each opened once, with their index caches."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.base.errors import DataError
from megatron.base.plain_text import print_to_stderr
from megatron.data.background import Background
from megatron.data.building import Log
from megatron.data.cache import WAIT_SECONDS, IndexCache, discard_entry
from megatron.data.content import FileSet
from megatron.data.indexed import IndexedDataset


class DatasetRegistry:
    """The data sets of a run, each opened once.

    They are found by content. A recorded segment therefore finds its data at a new path, too.
    """

    def __init__(
        self,
        data_cache_path: str | None,
        *,
        log: Log = print_to_stderr,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Create a registry without data sets.

        Args:
            data_cache_path: Folder of the index caches. None puts them next to each data set.
            log: See `IndexCache`.
            wait_seconds: See `IndexCache`.
        """
        self.notes: list[str] = []
        self.background = Background()
        """Verifies what is too large to be read before the first step."""
        self.file_sets: list[FileSet] = []
        """The data sets of many files: streamed ones, and those of a manifest."""
        self.open_indexed: Callable[[str], IndexedDataset] = IndexedDataset
        """Opens the data set at a path."""
        self._data_cache_path = data_cache_path
        self._log = log
        self._wait_seconds = wait_seconds
        self.opened: dict[str, IndexedDataset] = {}
        """The indexed data sets that were opened, by their path."""
        self._caches: dict[str, IndexCache] = {}

    @property
    def datasets(self) -> dict[str, IndexedDataset]:
        """The data sets that were opened, by their path, without those of `file_sets`."""
        several = {files.place for files in self.file_sets}
        return {prefix: data for prefix, data in self.opened.items() if prefix not in several}

    def open(self, prefix: str) -> IndexedDataset:
        """Return the data set at a path, opened at the first call.

        Raises:
            DataError: it is missing or damaged.
        """
        # Training and evaluation often read parts of the same data set.
        if prefix not in self.opened:
            self.opened[prefix] = self.open_indexed(prefix)
            self.opened[prefix].register(self)
        return self.opened[prefix]

    def find(self, prefix: str, fingerprint: str) -> IndexedDataset:
        """Return the data set that a segment was made of.

        Args:
            prefix: Its path when the segment was made.
            fingerprint: See `IndexedDataset.compute_fingerprint`.

        Raises:
            DataError: it is missing or has changed.
        """
        # Search by content first. The data may have moved since the checkpoint was written.
        for opened in self.opened.values():
            if opened.compute_fingerprint() == fingerprint:
                return opened
        return self._open_recorded(prefix, fingerprint)

    def _open_recorded(self, prefix: str, fingerprint: str) -> IndexedDataset:
        """Open a data set that the run does not ask for any more. See `find`."""
        needed = (
            f"The checkpoint records an order of samples from {prefix}. Restore these data, "
            "or start a new run from its weights with --finetune and another --save."
        )
        try:
            opened = self.open(prefix)
        except DataError as error:
            raise DataError(f"{error} {needed}") from error
        # Other data may be at the recorded path now. They would silently change the samples.
        if opened.compute_fingerprint() != fingerprint:
            raise DataError(
                f"{prefix} has changed (fingerprint {opened.compute_fingerprint()}, recorded "
                f"{fingerprint}). {needed}"
            )
        return opened

    def cache(self, prefix: str) -> IndexCache:
        """Return the index cache of a data set."""
        folder = str(self.cache_folder(prefix))
        if folder not in self._caches:
            self._caches[folder] = IndexCache(
                folder,
                self.notes,
                background=self.background,
                log=self._log,
                wait_seconds=self._wait_seconds,
            )
        return self._caches[folder]

    def cache_folder(self, prefix: str | os.PathLike) -> Path:
        """Return the folder of everything that is derived from a data set."""
        return Path(
            self._data_cache_path
            if self._data_cache_path is not None
            else f"{os.fspath(prefix)}.index-cache"
        )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn the RuntimeError of an index out of range into a DataError.

        All indices of this run are discarded, so that the next start builds them again.

        Raises:
            DataError: an index, or the .idx of a data set, is not what it was when it was opened.
        """
        try:
            yield
        except RuntimeError as error:
            # The error does not show which file has changed, so every entry is built again.
            manifests = [
                manifest for cache in self._caches.values() for manifest in cache.manifests
            ]
            results = [discard_entry(manifest) for manifest in dict.fromkeys(manifests)]
            failed = [result for result in results if result.startswith("Remove")]
            raise DataError(
                f"an index of the data is damaged ({error}): a file of the index cache, or the "
                ".idx of a data set, has changed since it was opened. Start again from the last "
                "checkpoint. The index caches of this run are then built again. " + " ".join(failed)
            ) from error
