"""Verification of a run's data files, between ranks and against the checkpoint.

Invariant: no checkpoint is written once a file is known to have changed.

A data set is compared three times. `open_data` compares its sampled fingerprint between ranks
before the first step. If its .bin is small, the digest of all its bytes is compared at that point
as well. The digest of a large .bin is computed in the background and compared before the next save.
"""

from collections.abc import Callable

from megatron.base.errors import DataError
from megatron.data.content import ContentDigests, FileIdentity
from megatron.data.indexed import get_bin_path
from megatron.data.registry import DatasetRegistry
from megatron.parallel.ranks import Ranks
from megatron.run.state import TrainState

_NEW_RUN = "or start a new run from these weights with --finetune and another --save"


class DataFiles:
    """Digests of all bytes of a run's data sets.

    Ranks on one file system see the same copy of a file, and one of them computes its digest.
    Replicas on other file systems are verified separately.
    """

    def __init__(
        self,
        registry: DatasetRegistry,
        state: TrainState,
        ranks: Ranks,
        who: str,
        log: Callable[[str], None],
        *,
        allow_changed_data: bool = False,
    ) -> None:
        """Start the computation of the digests.

        The digests of small files are known when this returns. All ranks call it together.

        Args:
            registry: The open data sets.
            state: The state at the start, with the digests that the checkpoint recorded.
            ranks: All ranks of the run.
            who: Name of this rank and its host, for error messages.
            log: Prints a line of the log.
            allow_changed_data: Accept streamed data that have changed, with a warning.

        Raises:
            DataError: A file cannot be read.
        """
        self._registry = registry
        self._allow_changed_data = allow_changed_data
        self._streamed = {files.fingerprint: files for files in registry.file_sets}
        self._ranks = ranks
        self._who = who
        self._log = log
        self._digests = ContentDigests(registry.background)
        # None means that the checkpoint was saved before the digest was known. Such entries are
        # left out, so that the first digest that is computed becomes the recorded one.
        self._recorded: dict[str, str] = {
            name: digest for name, digest in state.data_digests.items() if digest is not None
        }
        # Fingerprint -> the rank whose digest was known first, its name and its path. What the
        # checkpoint recorded has no rank.
        self._first_of: dict[str, tuple[int, str, str]] = {}
        # The state of a run from scratch has no data.
        if state.data:
            self._warn_about_unknown_digests()
        problem = None
        try:
            self._request_own()
            # Other hosts have compared the sampled contents. A complete corpus is read once.
            if ranks.rank == 0:
                for files in registry.file_sets:
                    self._digests.request_set(files)
        except OSError as error:
            problem = f"{who}: a data file cannot be read: {error}"
        # Raised after the gather, so that no rank waits for one that has already failed.
        for other in ranks.gather(problem):
            if other is not None:
                raise DataError(other)

    def check(self) -> None:
        """Compare the digests known so far with the checkpoint's and between replicas.

        All ranks call it together, before each save.

        Raises:
            DataError: A data set or an index has changed. The error is raised on every rank.
        """
        background = self._registry.background
        digests = self._digests.known
        own = {
            "who": self._who,
            "problems": background.problems(),
            "notes": [*background.take_notes(), *self._digests.notes],
            "digests": [
                [
                    data.compute_fingerprint(),
                    str(get_bin_path(prefix)),
                    digests[str(get_bin_path(prefix))],
                ]
                for prefix, data in self._registry.datasets.items()
                if str(get_bin_path(prefix)) in digests
            ]
            + [
                [fingerprint, files.place, digests[fingerprint]]
                for fingerprint, files in self._streamed.items()
                if fingerprint in digests
            ],
        }
        # `own` holds a copy of the notes. Without this the next check would print them again.
        self._digests.notes.clear()
        for rank, other in enumerate(self._ranks.gather(own)):
            # Every rank handles the same list in the same order, so all of them raise or none does.
            for note in other["notes"]:
                self._log(f"warning: {other['who']}: {note}")
            for problem in other["problems"]:
                raise DataError(f"{other['who']}: {problem}")
            for fingerprint, path, digest in other["digests"]:
                self._compare(rank, other["who"], fingerprint, path, digest)

    def record(self) -> dict[str, str | None]:
        """Return the digests for the next checkpoint, by sampled fingerprint.

        A digest is None if it is not known yet.
        """
        unknown: dict[str, str | None] = dict.fromkeys(self._list_fingerprints().values())
        return unknown | self._recorded

    def _list_fingerprints(self) -> dict[str, str]:
        """Return the place of each data set -> its sampled fingerprint."""
        indexed = {
            prefix: data.compute_fingerprint() for prefix, data in self._registry.datasets.items()
        }
        return indexed | {files.place: key for key, files in self._streamed.items()}

    def _compare(self, rank: int, who: str, fingerprint: str, path: str, digest: str) -> None:
        """Compare one rank's digest with the recorded one.

        Raises:
            DataError: They differ.
        """
        # The first rank that reports a digest sets what all replicas are compared with, unless the
        # checkpoint recorded one.
        if fingerprint not in self._recorded:
            self._recorded[fingerprint] = digest
            self._first_of[fingerprint] = (rank, who, path)
        expected = self._recorded[fingerprint]
        source = "the checkpoint"
        if fingerprint in self._first_of:
            first_rank, first_who, first_path = self._first_of[fingerprint]
            if first_rank > rank:
                # Digests arrive in any order. The message always names the higher rank, as all
                # other comparisons with rank 0 do.
                who, first_who = first_who, who
                path, first_path = first_path, path
                digest, expected = expected, digest
            source = f"{first_path} on {first_who}"
        if digest != expected:
            self._refuse_change(who, path, digest, source, expected, fingerprint)

    def _refuse_change(
        self, who: str, path: str, digest: str, source: str, expected: str, fingerprint: str
    ) -> None:
        """Refuse a file that has changed, unless --allow-changed-data accepts it."""
        what = (
            f"{who}: {path} has changed: its xxh3_128 is {digest}, and that of {source} "
            f"is {expected}, although the sampled fingerprint {fingerprint} is the same"
        )
        if fingerprint in self._streamed and self._allow_changed_data:
            self._recorded[fingerprint] = digest
            self._log(f"warning: {what}. --allow-changed-data accepts it")
            return
        way_out = _NEW_RUN
        if fingerprint in self._streamed:
            way_out = f"accept it with --allow-changed-data, {_NEW_RUN}"
        raise DataError(
            f"{what}. A run must continue with the data that it started with. Restore that file, "
            f"{way_out}"
        )

    def _warn_about_unknown_digests(self) -> None:
        """Warn about data sets whose digest the checkpoint lacks."""
        missing = [
            place
            for place, fingerprint in self._list_fingerprints().items()
            if fingerprint not in self._recorded
        ]
        if missing:
            self._log(
                f"warning: the checkpoint has no digest of all bytes of {', '.join(missing)}: only "
                "the sampled fingerprint was compared with it. A later checkpoint will hold the "
                "digest"
            )

    def _request_own(self) -> None:
        """Request the digests that this rank must compute.

        One rank computes the digest of each copy of each file. The files of one copy are spread
        over the ranks that see it.
        """
        # `copy` identifies a file on one file system. Equal values on two ranks mean that both read
        # the same bytes, and a second computation would only load the disk.
        identities = {
            prefix: list(FileIdentity.of(get_bin_path(prefix)).copy)
            for prefix in self._registry.datasets
        }
        everyone = self._ranks.gather(identities)
        for number, prefix in enumerate(identities):
            same = [
                rank
                for rank, theirs in enumerate(everyone)
                if theirs.get(prefix) == identities[prefix]
            ]
            if same[number % len(same)] == self._ranks.rank:
                self._digests.request(get_bin_path(prefix), self._registry.cache_folder(prefix))
