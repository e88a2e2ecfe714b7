"""The data files of a run: are they the same on all ranks, and still those that the checkpoint was
trained on?

Invariants: ranks whose files differ never take a step together; no checkpoint is written once a
file is known to have changed. A data set is compared three times. Its sampled fingerprint is
compared between ranks before the first step. So is the digest of its whole .bin where that is
small. The digest of a large one is computed in the background and compared before the next save.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpoint.ranks import Ranks
from megatron.config.tree import Config
from megatron.data.content import ContentDigests, FileIdentity, digest_of_file
from megatron.data.indexed import get_bin_path, get_idx_path
from megatron.data.segments import DatasetRegistry
from megatron.data.source import Sources
from megatron.errors import DataError, LayoutError, MegatronError
from megatron.tokenizer import tokenizer_digests, tokenizer_files
from megatron.training.state import TrainState

_SAME_FILES = "All ranks must read the same files: copy the right one to that host, or mount one file system on all of them"
_NEW_RUN = "or start a new run from these weights with --finetune and another --save"


def check_small_files(config: Config, ranks: Ranks, who: str) -> None:
    """Compare tokenizer and split files between ranks, before anything is built of them. `who`
    names this rank and its host.

    Raises:
        LayoutError: on every rank, naming the first rank whose files differ from rank 0's.
    """
    files = {f"{part} {path}": path for part, path in tokenizer_files(config.tokenizer).items()}
    data = config.data
    named = (
        data.train_weighted_split_paths_path,
        data.valid_weighted_split_paths_path,
        data.test_weighted_split_paths_path,
    )
    files |= {f"split file {name}": Path(name) for name in named if name is not None}
    facts = {name: _describe_small(path) for name, path in files.items()}
    try:
        facts["end-of-document token"] = repr(
            tokenizer_digests(config.tokenizer).get("end-of-document token")
        )
    except (MegatronError, OSError) as error:  # on one rank only: the others must not wait for it
        facts["end-of-document token"] = str(error)
    _require_same(ranks.gather({"who": who, "facts": facts}))


def open_same(
    open_sources: Callable[[], Sources],
    ranks: Ranks,
    who: str,
    say: Callable[[str], None] = lambda line: None,
) -> Sources:
    """Open the data sets on all ranks and compare their sizes and sampled fingerprints.

    `open_sources` runs in a thread and must not communicate: the ranks wait for each other meanwhile.

    Raises:
        MegatronError: what `open_sources` raised here.
        DataError: it failed on another rank only.
        LayoutError: the data of a rank differ from rank 0's.
    """

    def open_and_describe() -> tuple[Sources | None, dict[str, str], MegatronError | None]:
        try:
            sources = open_sources()
        except MegatronError as error:
            return None, {}, error  # compared below, so that the other ranks name the same reason
        registry = sources.registry
        facts = {prefix: describe_dataset(registry, prefix) for prefix in registry.datasets}
        return sources, facts, None

    sources, facts, failure = ranks.work(open_and_describe, "opening the data", say)
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
    _require_same(everyone)
    return sources


def describe_dataset(registry: DatasetRegistry, prefix: str) -> str:
    """Return sizes and sampled fingerprint of a data set."""
    sizes = [path(prefix).stat().st_size for path in (get_bin_path, get_idx_path)]
    return f"{sizes[0]} bytes in .bin, {sizes[1]} in .idx, sampled fingerprint {registry.open(prefix).compute_fingerprint()}"


def _describe_small(path: Path) -> str:
    try:
        return f"{path.stat().st_size} bytes, xxh3_128 {digest_of_file(path)}"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _require_same(everyone: list[dict[str, Any]]) -> None:
    """
    Raises:
        LayoutError: the facts of a rank are not rank 0's.
    """
    first = everyone[0]["facts"]
    for other in everyone[1:]:
        found = other["facts"]
        for name in [*first, *(name for name in found if name not in first)]:
            there = found.get(name, "absent")
            here = first.get(name, "absent")
            if there != here:
                raise LayoutError(
                    f"{other['who']} reads other data than {everyone[0]['who']}: {name}\n  the former: {there}\n"
                    f"  the latter: {here}\n{_SAME_FILES}"
                )


class DataFiles:
    """Whole-file digests of a run's data sets, each computed by one rank for each copy that there
    is."""

    def __init__(
        self,
        registry: DatasetRegistry,
        state: TrainState,
        ranks: Ranks,
        who: str,
        say: Callable[[str], None],
    ) -> None:
        """Start the digests; those of small files are there when this returns. All ranks call it
        together.

        Raises:
            DataError: a file cannot be read.
        """
        self._library = registry
        self._ranks = ranks
        self._who = who
        self._say = say
        self._digests = ContentDigests(registry.background)
        self._recorded: dict[str, str] = {
            name: digest for name, digest in state.data_digests.items() if digest is not None
        }
        self._source_of = dict.fromkeys(self._recorded, "the checkpoint")
        self._say_what_is_not_compared(state)
        problem = None
        try:
            self._request_own()
        except OSError as error:
            problem = f"{who}: a data file cannot be read: {error}"
        for other in ranks.gather(problem):
            if other is not None:
                raise DataError(other)

    def check(self) -> None:
        """Compare what is known by now with the checkpoint and between copies; all ranks call it
        together, before a save.

        Raises:
            DataError: on every rank; a data set or an index has changed.
        """
        background = self._library.background
        digests = self._digests.known
        mine = {
            "who": self._who,
            "problems": background.problems(),
            "notes": [*background.take_notes(), *self._digests.notes],
            "digests": [
                [
                    data.compute_fingerprint(),
                    str(get_bin_path(prefix)),
                    digests[str(get_bin_path(prefix))],
                ]
                for prefix, data in self._library.datasets.items()
                if str(get_bin_path(prefix)) in digests
            ],
        }
        self._digests.notes.clear()
        for other in self._ranks.gather(mine):
            for note in other["notes"]:
                self._say(f"warning: {other['who']}: {note}")
            for problem in other["problems"]:
                raise DataError(f"{other['who']}: {problem}")
            for fingerprint, path, digest in other["digests"]:
                self._compare(other["who"], fingerprint, path, digest)

    def record(self) -> dict[str, str | None]:
        """Return what the next checkpoint holds: fingerprint -> digest, None where it is not known
        yet."""
        unknown: dict[str, str | None] = {
            data.compute_fingerprint(): None for data in self._library.datasets.values()
        }
        return unknown | self._recorded

    def _compare(self, who: str, fingerprint: str, path: str, digest: str) -> None:
        expected = self._recorded.setdefault(fingerprint, digest)
        source = self._source_of.setdefault(fingerprint, f"{path} on {who}")
        if digest != expected:
            raise DataError(
                f"{who}: {path} has changed: its xxh3_128 is {digest}, and that of {source} is {expected}, although the sampled "
                f"fingerprint {fingerprint} is the same. A run must go on with the data that it began with. Bring that file "
                f"back, {_NEW_RUN}"
            )

    def _say_what_is_not_compared(self, state: TrainState) -> None:
        if not state.data:
            return
        missing = [
            prefix
            for prefix, data in self._library.datasets.items()
            if data.compute_fingerprint() not in self._recorded
        ]
        if missing:
            self._say(
                f"warning: the checkpoint has no digest of all bytes of {', '.join(missing)}: only the sampled fingerprint was "
                "compared with it. A later checkpoint will hold the digest"
            )

    def _request_own(self) -> None:
        """Request the digests that this rank is to compute: of each copy of each file, one rank's.

        The files of one copy are spread over the ranks that see it.
        """
        identities = {
            prefix: list(FileIdentity.of(get_bin_path(prefix)).copy)
            for prefix in self._library.datasets
        }
        everyone = self._ranks.gather(identities)
        for number, prefix in enumerate(identities):
            same = [
                rank
                for rank, theirs in enumerate(everyone)
                if theirs.get(prefix) == identities[prefix]
            ]
            if same[number % len(same)] == self._ranks.rank:
                self._digests.request(get_bin_path(prefix), self._library.cache_folder(prefix))
