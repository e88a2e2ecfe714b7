"""Opens the data of a run at its position.

Invariant: ranks whose files differ never take a step together. Sizes and sampled fingerprints are
compared before the first step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, DataError, LayoutError, MegatronError
from megatron.config.tree import Config
from megatron.data.build_sources import build_sources, count_evaluation_samples
from megatron.data.content import digest_of_file
from megatron.data.documents import DocumentRules
from megatron.data.indexed import get_bin_path, get_idx_path
from megatron.data.registry import DatasetRegistry
from megatron.data.source import BatchSlice, OpenIndexed, SourceKind, SourceRequest, Sources
from megatron.data.tokenizer_record import check_tokenizers_of_data
from megatron.parallel.mesh import Mesh
from megatron.parallel.ranks import PATIENCE_SECONDS, Ranks
from megatron.plan.run_plan import Plan
from megatron.run.state import TrainState
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.vocabulary import compute_tokenizer_digests, find_tokenizer_files

_SAME_FILES = (
    "All ranks must read the same files. Copy the right file to that host, or mount one file "
    "system on all hosts"
)


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


def open_data(
    plan: Plan,
    mesh: Mesh,
    state: TrainState,
    log: Callable[[str], None] = lambda line: None,
    other: SourceKind | None = None,
    open_indexed: OpenIndexed | None = None,
) -> Sources:
    """Open the data at the state's position, and build the indices.

    This also checks that all ranks read the same data.

    Args:
        plan: The resolved plan.
        mesh: The ranks of the run.
        state: The counters and the position in the data.
        log: Prints lines that must appear while an index is still being built.
        other: The kind of data of --dataset-format.
        open_indexed: See `SourceRequest`.

    Raises:
        ConfigError: Data were made with another tokenizer.
        DataError: See `build_run`.
        LayoutError: Ranks read different data.
        CheckpointError: The state contradicts itself.
    """
    config = plan.config
    batch = plan.config.batch
    # --eval-only reads no training data, and the first samples of the other sets.
    train_samples: int | None = 0 if batch.eval_only else plan.train_samples
    valid_samples: int | None
    valid_samples, test_samples = count_evaluation_samples(
        0 if batch.eval_only else plan.train_iters,
        batch.eval_interval,
        batch.eval_iters,
        plan.batch_size.final,
    )
    # The order of a run by time must not depend on its speed.
    if plan.train_seconds is not None and not batch.eval_only:
        train_samples = None
        valid_samples = None if valid_samples else 0

    ranks = mesh.ranks

    def ask() -> SourceRequest:
        """Return what this rank asks for. It may fail, because it may build the tokenizer."""
        return SourceRequest(
            data=config.data,
            seq_length=config.model.seq_length,
            seed=batch.seed,
            train_samples=train_samples,
            valid_samples=valid_samples,
            test_samples=test_samples,
            batch_slice=BatchSlice(
                batch.micro_batch_size,
                mesh.coordinate.data,
                mesh.grid.data,
                plan.vocab_size,
                build_document_rules(config),
            ),
            phases=plan.data_phases,
            ranks=ranks,
            build_tokenizer=lambda: build_tokenizer(config.tokenizer),
            open_indexed=open_indexed,
        )

    def build() -> Sources:
        """Build the sources of this rank's slice of the batch, without communication."""
        return build_sources(ask(), other, log=log, wait_seconds=PATIENCE_SECONDS)

    if other is not None and not config.data.mock_data:
        # The other ranks then find the row groups in the cache, and do not open all files as well.
        ranks.call_on_rank_0(lambda: other.list_files(ask(), log), "listing the data files", log)
    sources = build() if ranks.size == 1 else open_same(build, ranks, mesh.describe(), log)
    prefixes = list(sources.registry.opened)
    ranks.call_on_rank_0(
        lambda: check_tokenizers_of_data(config.tokenizer, prefixes),
        "comparing the tokenizer with that of the data",
        log,
    )
    # --eval-only always starts at the first sample. From a checkpoint's position, it would
    # evaluate other samples for each checkpoint, and the losses could not be compared.
    if state.data and not batch.eval_only:
        sources.load(state.data)
        # The position is stored twice, in the counters and in the source's state. Going on with two
        # different values would silently repeat or drop samples.
        position = state.consumed_samples
        if sources.train is not None:
            position = sources.train.consumed_samples
        if position != state.consumed_samples:
            raise CheckpointError(
                f"the checkpoint counts {state.consumed_samples} consumed samples, but its data "
                f"position is {position}. This checkpoint is damaged. Resume from an earlier one"
            )
    elif state.consumed_samples and sources.train is not None and not batch.eval_only:
        # An imported checkpoint has counters, and no record of its order. The run goes on at the
        # same position in the order of this data.
        sources.train.advance(state.consumed_samples)
    # Indices are built after the comparison, because building them takes long and is wasted if the
    # files are wrong.
    ranks.work(sources.prepare, "building the data's indices", log)
    return sources


def build_document_rules(config: Config) -> DocumentRules | None:
    """Return the rules for documents, or None if document boundaries are ignored.

    Without the rules no tokenizer is needed, so none is built.
    """
    if not config.data.needs_documents:
        return None
    if config.data.dataset_format is not None:
        # The bounds come from the files, so no token marks them.
        return DocumentRules.from_config(config.data, eod=-1)
    return DocumentRules.from_config(config.data, build_tokenizer(config.tokenizer).eod)


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
