"""Verification of a run's data files, between ranks and against the checkpoint.

Invariants:
- Ranks whose files differ never take a step together.
- No checkpoint is written once a file is known to have changed.

A data set is compared three times. Its sampled fingerprint is compared between ranks before the
first step. If its .bin is small, the digest of all its bytes is compared at that point as well. The
digest of a large .bin is computed in the background and compared before the next save.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.base.errors import DataError, LayoutError, MegatronError
from megatron.config.tree import Config
from megatron.data.content import ContentDigests, FileIdentity, digest_of_file
from megatron.data.indexed import get_bin_path, get_idx_path
from megatron.data.registry import DatasetRegistry
from megatron.data.source import Sources
from megatron.parallel.ranks import Ranks
from megatron.run.state import TrainState
from megatron.tokenizer import compute_tokenizer_digests, find_tokenizer_files

_SAME_FILES = (
    "All ranks must read the same files. Copy the right file to that host, or mount one file "
    "system on all hosts"
)
_NEW_RUN = "or start a new run from these weights with --finetune and another --save"


def check_small_files(config: Config, ranks: Ranks, who: str) -> None:
    """Compare the tokenizer's files, the split files and the phases between ranks.

    This happens before anything is built from these files. All ranks call it together.

    Args:
        config: The resolved configuration.
        ranks: All ranks of the run.
        who: Name of this rank and its host, for error messages.

    Raises:
        LayoutError: A rank's files differ from rank 0's. The error is raised on every rank and
            names the first such rank.
    """
    files = {
        f"{part} {path}": path for part, path in find_tokenizer_files(config.tokenizer).items()
    }
    data = config.data
    named = (
        data.train_weighted_split_paths_path,
        data.valid_weighted_split_paths_path,
        data.test_weighted_split_paths_path,
    )
    files |= {f"split file {name}": Path(name) for name in named if name is not None}
    if data.data_phases is not None:
        files[f"--data-phases {data.data_phases}"] = Path(data.data_phases)
    facts = {name: _describe_small(path) for name, path in files.items()}
    # The token is named by a file such as tokenizer_config.json, which may not be among the files
    # above. Ranks with different tokens would split the data into documents at different places.
    try:
        facts["end-of-document token"] = repr(
            compute_tokenizer_digests(config.tokenizer).get("end-of-document token")
        )
    except (MegatronError, OSError) as error:
        # It may fail on one rank only. Raising here would leave the others waiting in the gather.
        facts["end-of-document token"] = str(error)
    _require_same(ranks.gather({"who": who, "facts": facts}))


def open_same(
    open_sources: Callable[[], Sources],
    ranks: Ranks,
    who: str,
    log: Callable[[str], None] = lambda line: None,
) -> Sources:
    """Open the data sets on all ranks and compare their sizes and sampled fingerprints.

    Args:
        open_sources: Opens the sources of this rank. It runs in a thread and must not communicate,
            because the main threads of the ranks wait for each other meanwhile.
        ranks: All ranks of the run.
        who: Name of this rank and its host, for error messages.
        log: Prints a line of the log.

    Raises:
        MegatronError: `open_sources` raised it on this rank.
        DataError: `open_sources` failed on another rank only.
        LayoutError: The data of a rank differ from rank 0's.
    """

    def open_and_describe() -> tuple[Sources | None, dict[str, str], MegatronError | None]:
        """Return the sources and their facts, or the failure."""
        try:
            sources = open_sources()
        except MegatronError as error:
            # It is raised after the gather below, so that the other ranks report the same reason.
            return None, {}, error
        registry = sources.registry
        facts = {prefix: describe_dataset(registry, prefix) for prefix in registry.datasets}
        facts |= {files.place: files.fingerprint for files in registry.file_sets}
        for source in sources.all:
            for name, fingerprint in source.fingerprints.items():
                facts[f"data set {name}"] = f"fingerprint {fingerprint} of files and row groups"
        return sources, facts, None

    sources, facts, failure = ranks.work(open_and_describe, "opening the data", log)
    # The failure itself is part of the message. A rank that raised before this gather would leave
    # the others waiting until the time limit of the process group.
    everyone = ranks.gather(
        {"who": who, "facts": facts, "failure": None if failure is None else str(failure)}
    )
    if failure is not None:
        if sources is not None:
            sources.close()
        raise failure
    assert sources is not None, "it was opened or failed"
    for other in everyone:
        if other["failure"] is not None:
            sources.close()
            raise DataError(f"{other['who']}: {other['failure']}\n{_SAME_FILES}")
    if ranks.size > 1:
        _require_same(everyone)
    return sources


def describe_dataset(registry: DatasetRegistry, prefix: str) -> str:
    """Return the sizes and the sampled fingerprint of a data set."""
    sizes = [path(prefix).stat().st_size for path in (get_bin_path, get_idx_path)]
    return (
        f"{sizes[0]} bytes in .bin, {sizes[1]} in .idx, sampled "
        f"fingerprint {registry.open(prefix).compute_fingerprint()}"
    )


def _describe_small(path: Path) -> str:
    # An unreadable file is a fact like any other. It differs from rank 0's, so it is reported with
    # the name of the rank instead of as a failed gather.
    try:
        return f"{path.stat().st_size} bytes, xxh3_128 {digest_of_file(path)}"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _require_same(everyone: list[dict[str, Any]]) -> None:
    """Raise an error if the facts of any rank differ from rank 0's.

    Raises:
        LayoutError: A fact differs, or exists on one of the two ranks only.
    """
    first = everyone[0]["facts"]
    for other in everyone[1:]:
        found = other["facts"]
        # Names that only the other rank has are included, because a missing file is a difference.
        for name in [*first, *(name for name in found if name not in first)]:
            found_there = found.get(name, "absent")
            expected = first.get(name, "absent")
            if found_there != expected:
                raise LayoutError(
                    f"{other['who']} reads data that differ from those of {everyone[0]['who']}: "
                    f"{name}\n"
                    f"  {other['who']}: {found_there}\n"
                    f"  {everyone[0]['who']}: {expected}\n{_SAME_FILES}"
                )


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
            self._warn_of_unknown_digests()
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
        if digest == expected:
            return
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

    def _warn_of_unknown_digests(self) -> None:
        """Warn of data sets whose digest the checkpoint lacks."""
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
