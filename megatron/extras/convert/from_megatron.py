"""Import of a checkpoint of Megatron or GPT-NeoX, so that its run goes on here.

Invariant: the checkpoint gets its name after all of it was written. The files are pickles, and
nothing in them is run (`unpickle.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron.base.code_version import get_code_version
from megatron.base.errors import CheckpointError
from megatron.checkpoint.contents import CheckpointContents
from megatron.config.model import ModelConfig
from megatron.config.yaml_file import dump_yaml
from megatron.extras.convert.megatron_args import load_run_config, make_state
from megatron.extras.convert.megatron_deepspeed import open_megatron_deepspeed
from megatron.extras.convert.megatron_lm import open_megatron_lm
from megatron.extras.convert.megatron_names import Layout, MegatronTensor, list_megatron_tensors
from megatron.extras.convert.megatron_source import Key, MegatronSource
from megatron.extras.convert.neox_checkpoint import NeoxFolder
from megatron.extras.convert.problems import refuse_problems
from megatron.extras.convert.writing import (
    TensorToWrite,
    check_is_new,
    choose_states,
    write_checkpoint,
)
from megatron.model.shape import ModelShape
from megatron.parallel.shard import Kind

System = Literal["megatron-deepspeed", "megatron-lm", "gpt-neox"]
_WORD: Key = (None, "embedding.word.weight")
_HEAD: Key = (None, "head.weight")


@dataclass(frozen=True)
class MegatronImport:
    """What to import."""

    folder: Path
    """Folder of the checkpoints, or of one of them."""
    out: Path
    """Folder of the new checkpoint. It must not exist."""
    system: System
    vocab_size: int | None = None
    """Number of token ids. None: that of the checkpoint, or all rows of its embedding."""
    weights_only: bool = False
    """Leave out the optimizer's states. Those of GPT-NeoX are never read."""
    flags: tuple[str, ...] = ()
    """Flags of a run of GPT-NeoX, which replace its settings."""


def import_megatron(
    command: MegatronImport, log: Callable[[str], None] = lambda line: None
) -> None:
    """Write a checkpoint of Megatron as one of this trainer, of the same iteration.

    Raises:
        ConfigError: `out` exists, or the run has a setting that is not possible here.
        CheckpointError: a file is missing, damaged, or contains what is not allowed, or the tensors
            do not fit the arguments.
        OSError: a file cannot be written.
    """
    check_is_new(command.out)
    source: MegatronSource
    if command.system == "gpt-neox":
        source = NeoxFolder(command.folder)
    elif command.system == "megatron-deepspeed":
        source = open_megatron_deepspeed(command.folder, weights_only=command.weights_only)
    else:
        source = open_megatron_lm(command.folder, weights_only=command.weights_only)
    run = source.run
    vocab_size = command.vocab_size or run.vocab_size
    if vocab_size is None:
        vocab_size = _count_rows(source)
        log(
            f"the checkpoint does not give the size of the vocabulary, so all {vocab_size} rows of "
            "its embedding are imported; give --vocab-size to leave out the padding"
        )
    unused: list[str] = []
    if isinstance(source, NeoxFolder):
        loaded = source.load_config(command.flags, vocab_size)
    else:
        loaded, unused = load_run_config(run, vocab_size)
    for warning in loaded.warnings:
        log(warning)
    if unused:
        log(f"not used of the saved arguments: {', '.join(unused)}")
    if loaded.config.model.num_layers > len(source.names):
        # Each layer would be built, and a wrong number may be too large for that.
        raise CheckpointError(
            f"the saved arguments have {loaded.config.model.num_layers} layers, and the checkpoint "
            f"has {len(source.names)} tensors"
        )
    shape = ModelShape(loaded.config.model, vocab_size, vocab_size)
    tensors = list_megatron_tensors(shape)
    tied = not loaded.config.model.untie_embeddings_and_output_weights
    _check_names(source, tensors, tied=tied)
    steps = None if command.weights_only else source.steps
    kinds, scalars = choose_states(steps, log)
    state = make_state(run, loaded, steps)
    contents = CheckpointContents(
        run.iteration,
        scalars=scalars,
        state=state.to_json(),
        config_yaml=dump_yaml(loaded.config),
        version=get_code_version(),
        layout=_describe_layout(command.system, source),
    )
    layout = _find_layout(source, loaded.config.model)
    write_checkpoint(
        command.out,
        [_plan_tensor(source, kind, tensor, shape, layout) for tensor in tensors for kind in kinds],
        contents,
    )
    log(
        f"iteration {run.iteration}, {state.consumed_samples:,} samples, "
        f"{state.consumed_tokens:,} tokens, {state.lr_samples:,} samples of the learning rate"
    )


def _describe_layout(system: System, source: MegatronSource) -> str:
    """Return the origin of the checkpoint, for its users."""
    if system == "gpt-neox":
        return f"imported from {system}, TP {source.slices}"
    run = source.run
    return f"imported from {system}, TP {run.tensor_ranks}, PP {run.pipeline_ranks}"


def _find_layout(source: MegatronSource, model: ModelConfig) -> Layout:
    """Return the layout of the tensors."""
    version = source.run.version
    if isinstance(source, NeoxFolder):
        # With two branches beside each other, each rank adds its biases before the sum over ranks.
        return Layout(version, "up", separate_keys=True, summed_biases=model.parallel_residual)
    # `--glu-activation` of BigScience multiplies by the activation of the second half.
    if source.run.args.get("glu_activation"):
        return Layout(version, "up")
    return Layout(version)


def _plan_tensor(
    source: MegatronSource,
    kind: Kind,
    tensor: MegatronTensor,
    shape: ModelShape,
    layout: Layout,
) -> TensorToWrite:
    """Return a tensor of the new checkpoint, which is read when it is written."""
    key = (tensor.layer, tensor.name)

    def read() -> Tensor:
        return tensor.merge(source.read(kind, key), shape, layout)

    return TensorToWrite(kind, tensor.ours, tensor.shape, f"{source.names[key]} ({kind})", read)


def _check_names(source: MegatronSource, tensors: Sequence[MegatronTensor], *, tied: bool) -> None:
    """Check that the checkpoint has the tensors of the model and no others.

    Raises:
        CheckpointError: it does not. The message lists the first 12 problems.
    """
    expected = {(tensor.layer, tensor.name): tensor for tensor in tensors}
    problems = [
        f"{tensor.describe()} is missing"
        for key, tensor in expected.items()
        if key not in source.names
    ]
    problems += [
        f"{name} has no part in the model that the arguments describe"
        for key, name in source.names.items()
        if key not in expected and not (tied and key == _HEAD)
    ]
    problems += [f"{name} is not known" for name in source.unknown]
    if tied and _HEAD in source.names and _WORD in source.names:
        # The last stage has a copy of the tied embedding.
        pairs = zip(source.read("weight", _HEAD), source.read("weight", _WORD), strict=True)
        if not all(torch.equal(copy, original) for copy, original in pairs):
            problems.append(
                f"{source.names[_HEAD]} differs from the word embedding, and the arguments say "
                "that they are tied"
            )
    refuse_problems(problems, "the saved arguments")


def _count_rows(source: MegatronSource) -> int:
    """Return the rows of the word embedding, with its padding.

    Raises:
        CheckpointError: there is no word embedding.
    """
    if _WORD not in source.names:
        raise CheckpointError("the checkpoint has no word embedding")
    return sum(len(rows) for rows in source.read("weight", _WORD))
