"""Loading of a checkpoint as a model in evaluation mode, on one process or on several.

`load` is what commands call. It also builds the tokenizer.

It needs no engine, and in one process no process group.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.base.errors import ConfigError, LayoutError
from megatron.checkpoint.finite import describe_not_finite, refuse_not_finite
from megatron.checkpoint.folder import find_stored_folder
from megatron.checkpoint.load import Checkpoint, open_checkpoint
from megatron.config.data import TokenizerConfig
from megatron.config.fields import ConfigWithOrigin
from megatron.config.parallel import ParallelConfig
from megatron.config.tree import Config
from megatron.console.checkpoint_path import locate_checkpoint
from megatron.console.tokenizer_flags import (
    TokenizerPath,
    TokenizerTypeName,
    resolve_tokenizer_type,
)
from megatron.extras.inference.generate.staged_model import StagedModel
from megatron.extras.interop.inspection.verification import ensure_undisturbed
from megatron.extras.object_store.addresses import open_source
from megatron.model.experts.routing import list_balance, list_routers
from megatron.model.gpt import GPT
from megatron.model.partition import Stage, partition
from megatron.model.shape import ModelShape
from megatron.parallel.grid import Grid
from megatron.parallel.launcher import read_launcher_world
from megatron.parallel.mesh import Mesh, TensorParallel, build_mesh
from megatron.parallel.messages import gather_json
from megatron.parallel.parameter_spec import ParameterSpec
from megatron.parallel.ranks import Ranks, build_roll_call
from megatron.parallel.rendezvous import build_control_group, choose_device, start_process_group
from megatron.parallel.shard import TensorShard
from megatron.plan.rules.finding import Finding, TokenizerContext, error, list_errors, refuse_errors
from megatron.plan.rules.layout import check_tensor_parallel
from megatron.plan.rules.resume import check_tokenizer
from megatron.run.state import TrainState
from megatron.tokenizer.build import Tokenizer, build_tokenizer
from megatron.tokenizer.vocabulary import compute_padded_vocab_size, fetch_missing_tokenizer


def load_model(
    checkpoint: Checkpoint,
    device: torch.device | None = None,
    tp: TensorParallel | None = None,
    ranks: Ranks | None = None,
    stage: Stage | None = None,
) -> GPT:
    """Return the model of a checkpoint, or a stage of it, in fp32 and evaluation mode.

    Args:
        checkpoint: A checkpoint of any parallel layout.
        device: Where the model goes. Default: the CPU.
        tp: The tensor-parallel ranks, each of which gets its part. Default: one process alone.
        ranks: All ranks that load the checkpoint, for the error that they raise together. Default:
            one process alone.
        stage: The stage to load. Default: the complete model.

    Raises:
        CheckpointError: If the checkpoint is damaged or not complete, or a weight is not finite.
    """
    device = device or torch.device("cpu")
    tp = tp or TensorParallel()
    # On the meta device, no memory is allocated and no weight is initialised. The weights of the
    # checkpoint replace them all.
    with torch.device("meta"):
        model = GPT(read_shape(checkpoint, tp.size), tp, stage)
    # `to_empty` makes new parameters, which do not have the attribute `spec`. So it is read first.
    specs = {
        name: parameter.spec  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
    }
    model.to_empty(device=device)
    shards = [
        shard
        for name, parameter in model.named_parameters()
        for shard in _locate_shards(name, specs[name], parameter.data, tp)
    ]
    for router in list_routers(model):
        router.allocate(device)
        shards += list_balance(router, owner=True)
    checkpoint.load_into(shards)
    refuse_not_finite(checkpoint, describe_not_finite(shards), ranks or Ranks())
    return model.eval()


def read_shape(checkpoint: Checkpoint, tensor: int = 1) -> ModelShape:
    """Return the sizes of a checkpoint's model on a number of tensor-parallel ranks.

    Raises:
        CheckpointError: If the checkpoint is damaged, or of a version with other fields.
    """
    # The vocabulary size depends on the tokenizer, which is not needed here. Padding is not stored,
    # so the first dimension of the embedding is the vocabulary size.
    vocab_size = checkpoint.read_index().tensors["weight/embedding.word.weight"]["shape"][0]
    padded = compute_padded_vocab_size(vocab_size, 1, tensor)
    return ModelShape(checkpoint.read_config().model, vocab_size, padded)


def _locate_shards(
    name: str, spec: ParameterSpec, tensor: Tensor, tp: TensorParallel
) -> Iterator[TensorShard]:
    """Yield the slices of the complete model that a local tensor holds, without padding."""
    offset = spec.compute_offset(tensor.shape, tp.rank)
    for piece in spec.locate_rows(offset[0], tensor.shape[0]):
        rows = tensor[piece.local : piece.local + piece.rows]
        place = (piece.start, *offset[1:])
        yield TensorShard("weight", spec.get_global_name(name), spec.shape, place, rows, owner=True)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def join_ranks(
    tensor: int, pipeline: int, device: str | None = None, timeout_minutes: float = 10.0
) -> Iterator[Mesh]:
    """Start the process group of the ranks that divide a model, within a `with` block.

    After an error, the process group is left as it is: to end it would wait for the other ranks.

    Args:
        tensor: Number of tensor-parallel ranks.
        pipeline: Number of pipeline ranks.
        device: cpu or cuda. None: the GPU if there is one.
        timeout_minutes: Minutes that ranks wait for each other.

    Raises:
        ConfigError: There is no GPU and one was asked for, or the time is out of range.
        LayoutError: Another number of processes was started.
        LostRanksError: A rank has ended or does not answer.
    """
    grid = Grid(pipeline, 1, tensor)
    # Before torch is asked for ranks: a wrong number of processes would wait until the time is out.
    world = read_launcher_world()
    if world.size != grid.world_size:
        raise LayoutError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} "
            f"needs {grid.world_size} processes, but this is one of {world.size}; start with "
            f"torchrun --nproc-per-node {grid.world_size}, or give sizes whose product is "
            f"{world.size}"
        )
    if not 0 < timeout_minutes < math.inf:
        raise ConfigError(
            f"--distributed-timeout-minutes {timeout_minutes} must be above 0, and finite."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU, and torch sees none; use --device cpu")
    if device == "cpu":
        chosen = torch.device("cpu")
    else:
        chosen = choose_device(world.local_rank)
    if grid.world_size == 1:
        yield build_mesh(grid, chosen)
        return
    start_process_group(None, timeout_minutes, chosen)
    control = build_control_group(timeout_minutes)
    rank = dist.get_rank()
    # A rank that is lost is named with its host, also while the mesh is built.
    names = tuple(gather_json(f"rank {rank} on {os.uname().nodename}", control))
    ranks = Ranks(rank, grid.world_size, control, names)
    with build_roll_call(ranks, timeout_minutes) as roll_call:
        mesh = build_mesh(grid, chosen, timeout_minutes=timeout_minutes, control=control)
        roll_call.use_names(mesh.names)
        yield mesh
    dist.destroy_process_group()


def choose_checkpoint(path: Path, iteration: int | None, mesh: Mesh) -> tuple[Path, int]:
    """Return folder and iteration of a checkpoint, the same ones on all ranks.

    Rank 0 chooses, because an active run may save a newer checkpoint at any time.

    Raises:
        CheckpointError: See `locate_checkpoint`. It is raised on all ranks.
    """

    def locate() -> list[str | int]:
        root, found = locate_checkpoint(path, iteration)
        return [str(root), found]

    root, found = mesh.ranks.call_on_rank_0(locate, "looking for the checkpoint")
    return Path(root), found


def load_part(checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype) -> StagedModel:
    """Return this rank's part of the model of a checkpoint, in evaluation mode.

    Raises:
        CheckpointError: See `load_model`.
        ConfigError: The ranks cannot have equal parts of the layers, or a stage would have no
            layer.
    """
    config = checkpoint.read_config()
    # The layout of the training has no effect here.
    parallel = ParallelConfig(
        tensor_model_parallel_size=mesh.grid.tensor, pipeline_model_parallel_size=mesh.grid.pipeline
    )
    _check_parts(config, parallel)
    stages = partition(read_shape(checkpoint, mesh.grid.tensor), parallel)
    stage = stages[mesh.coordinate.pipeline]
    model = load_model(checkpoint, mesh.device, mesh.tensor_parallel, mesh.ranks, stage)
    pipeline = None
    if mesh.grid.pipeline > 1:
        pipeline = mesh.get_pipeline_group()
    return StagedModel(model.to(dtype), pipeline)


def store_for_single_prompts(model: StagedModel) -> None:
    """Store wide matrices by columns, which is faster for one sequence on a CPU.

    The product of a matrix [out, in] and one token's vector took 0.55 to 0.7 of the time if `out`
    is the larger size. With eight sequences it took up to 1.25 of the time. No value changes.
    """
    for parameter in model.stage.parameters():
        is_wide = parameter.dim() == 2 and parameter.shape[0] > parameter.shape[1]
        if is_wide and parameter.device.type == "cpu":
            parameter.data = parameter.data.t().contiguous().t()


def _check_parts(config: Config, parallel: ParallelConfig) -> None:
    """Check that a number of tensor-parallel ranks divides the model.

    Raises:
        ConfigError: It does not.
    """
    settings = ConfigWithOrigin(replace(config, parallel=parallel), {})
    if errors := list_errors(check_tensor_parallel(settings)):
        raise ConfigError("\n".join(errors))


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

    def join_ranks(self) -> contextlib.AbstractContextManager[Mesh]:
        """Start the process group of the ranks that divide the model. See `join_ranks`."""
        return join_ranks(
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.device,
            self.distributed_timeout_minutes,
        )


SIZES = {"batch_size": 1, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
"""Arguments of all commands -> their least value. See `check_at_least`."""


def check_at_least(arguments: ModelArguments, least: Mapping[str, int]) -> Iterator[Finding]:
    """Check that no argument is below its least value. None is no value."""
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            yield error(f"--{name.replace('_', '-')} {value} must be at least {bound}.")


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
