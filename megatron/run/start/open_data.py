"""Opens the data of a run at its position, and compares them between the ranks."""

from collections.abc import Callable

from megatron.base.errors import CheckpointError
from megatron.config.tree import Config
from megatron.data.build_sources import build_sources, count_evaluation_samples
from megatron.data.documents import DocumentRules
from megatron.data.source import BatchSlice, Sources
from megatron.data.source_kind import OpenIndexed, SourceKind, SourceRequest
from megatron.data.tokenizer_record import check_tokenizers_of_data
from megatron.parallel.mesh import Mesh
from megatron.parallel.ranks import PATIENCE_SECONDS, build_ranks
from megatron.plan.run_plan import Plan
from megatron.run.start.data_files import open_same
from megatron.run.state import TrainState
from megatron.tokenizer import build_tokenizer


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

    ranks = build_ranks(mesh)

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
    sources = open_same(build, ranks, mesh.describe(), log)
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
        if sources.train is not None:
            position = sources.train.consumed_samples
        else:
            position = state.consumed_samples
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
