"""The model of a checkpoint and its tokenizer, for the commands that compute with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from megatron.checkpoint.folder import find_stored_folder
from megatron.checkpoint.load import open_checkpoint
from megatron.config.data import TokenizerConfig
from megatron.console.tokenizer_flags import (
    TokenizerPath,
    TokenizerTypeName,
    resolve_tokenizer_type,
)
from megatron.extras.inference.generate.load import DTYPES, choose_checkpoint, join_ranks, load_part
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.extras.interop.inspection.verification import ensure_undisturbed
from megatron.extras.object_store.addresses import open_source
from megatron.parallel.mesh import Mesh
from megatron.plan.rules.finding import TokenizerContext, refuse_errors
from megatron.plan.rules.resume import check_tokenizer
from megatron.run.state import TrainState
from megatron.tokenizer.build import Tokenizer, build_tokenizer
from megatron.tokenizer.vocabulary import fetch_missing_tokenizer


@dataclass(frozen=True)
class ModelArguments:
    """The flags that name a checkpoint and say how its model is computed."""

    load: str
    """Folder of the run's checkpoints, or their s3:// address."""
    iteration: int | None = None
    """Iteration of the checkpoint. Default: the one that `latest` names."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the weights and of the computation."""
    device: Literal["cpu", "cuda"] | None = None
    """Default: cuda if there is a GPU."""
    tensor_model_parallel_size: int = 1
    """Processes that divide each layer. torchrun starts them."""
    pipeline_model_parallel_size: int = 1
    """Stages of layers, each on its own processes. torchrun starts them."""
    distributed_timeout_minutes: float = 10.0
    """Minutes that the processes wait for one that does not answer."""
    tokenizer_type: TokenizerTypeName | None = None
    """Type of the tokenizer, for a run that has none. Default: the run's."""
    vocab_file: str | None = None
    """Vocabulary file, if the run's has moved."""
    merge_file: str | None = None
    """Merges file, if the run's has moved."""
    tokenizer_name_or_path: TokenizerPath = None
    """Folder of a Hugging Face tokenizer or file tokenizer.model, if the run's has moved."""

    @contextmanager
    def join_ranks(self) -> Iterator[Mesh]:
        """Start the process group of the ranks that divide the model. See `join_ranks`."""
        with join_ranks(
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.device,
            self.distributed_timeout_minutes,
        ) as mesh:
            yield mesh


def load(
    arguments: ModelArguments, mesh: Mesh
) -> tuple[StagedModel, Tokenizer, int, TokenizerConfig]:
    """Return this rank's part of the model, the tokenizer, the iteration, and its settings.

    Raises:
        CheckpointError: There is no checkpoint to load.
        ConfigError: The tokenizer is not the one of the training, or cannot be read.
    """
    with open_source(arguments.load) as place:
        root, iteration = choose_checkpoint(place.folder, arguments.iteration, mesh)
        if place.is_mirror:
            # Each rank has a mirror of its own.
            root = place.root
        # The run may be active and remove this checkpoint while it is loaded.
        with ensure_undisturbed(find_stored_folder(root, iteration), errors_only=place.is_mirror):
            checkpoint = place.open(open_checkpoint(root, iteration))
            model = load_part(checkpoint, mesh, DTYPES[arguments.dtype])
    config = checkpoint.read_config()
    files = {
        name: getattr(arguments, name)
        for name in ("vocab_file", "merge_file", "tokenizer_name_or_path")
        if getattr(arguments, name)
    }
    tokenizer_config = replace(config.tokenizer, **files)
    if arguments.tokenizer_type is not None:
        kind = resolve_tokenizer_type(arguments.tokenizer_type)
        tokenizer_config = replace(tokenizer_config, tokenizer_type=kind)
    # The other ranks read what rank 0 has downloaded.
    ranks = mesh.ranks
    ranks.call_on_rank_0(
        lambda: fetch_missing_tokenizer(tokenizer_config, needs_text=True),
        "looking for the tokenizer",
    )
    tokenizer = build_tokenizer(tokenizer_config)
    # Other ids than those of the training would give a meaningless text without an error.
    state = TrainState.from_json(checkpoint.state)
    context = TokenizerContext(tokenizer_config, state.iteration, state.tokenizer)
    refuse_errors(check_tokenizer(context))
    return model, tokenizer, iteration, tokenizer_config
