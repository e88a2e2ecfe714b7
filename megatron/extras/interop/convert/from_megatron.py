"""Checkpoints of Megatron and GPT-NeoX, for `convert_checkpoint`."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.fields import LoadedConfig
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.megatron_args import load_run_config, make_state
from megatron.extras.interop.convert.megatron_deepspeed import NeoxFolder, open_megatron_deepspeed
from megatron.extras.interop.convert.megatron_lm import open_megatron_lm
from megatron.extras.interop.convert.megatron_names import (
    Key,
    MegatronSource,
    MegatronTensor,
    TensorLayout,
    describe_key,
    list_megatron_tensors,
)
from megatron.extras.interop.convert.tensors import refuse_problems
from megatron.extras.interop.convert.writing import TensorToWrite
from megatron.model.shape import ModelShape
from megatron.parallel.shard import Kind
from megatron.run.state import TrainState

_WORD: Key = (None, "embedding.word.weight")
_HEAD: Key = (None, "head.weight")


class MegatronCheckpoint:
    """A checkpoint of Megatron or GPT-NeoX. See `ForeignCheckpoint`."""

    def __init__(self, source: MegatronSource, *, weights_only: bool) -> None:
        """Take the facts of the run from its files."""
        run = source.run
        self.iteration = run.iteration
        self.steps = None if weights_only else source.steps
        self.vocab_size = run.vocab_size
        self.layout = f", TP {run.tensor_ranks}, PP {run.pipeline_ranks}"
        if isinstance(source, NeoxFolder):
            self.layout = f", TP {source.slices}"
        self._source = source

    def count_rows(self) -> int:
        """Return the rows of the word embedding, with its padding."""
        if _WORD not in self._source.names:
            raise CheckpointError("the checkpoint has no word embedding")
        return sum(len(rows) for rows in self._source.read("weight", _WORD))

    def load_config(
        self, flags: Sequence[str], vocab_size: int
    ) -> tuple[LoadedConfig, Sequence[str]]:
        """Return the configuration of the run, and the saved arguments that are not used."""
        if isinstance(self._source, NeoxFolder):
            return self._source.load_config(flags, vocab_size), ()
        return load_run_config(self._source.run, vocab_size)

    def make_state(self, loaded: LoadedConfig) -> TrainState:
        """Return the counters of the run."""
        return make_state(self._source.run, loaded, self.steps)

    def list_tensors(
        self, loaded: LoadedConfig, shape: ModelShape, kinds: Sequence[Kind]
    ) -> list[TensorToWrite]:
        """Return the tensors of the new checkpoint, after a check of their names."""
        model = loaded.config.model
        source = self._source
        for flag, given in (
            ("--experimental-attention-variant", model.experimental_attention_variant),
            ("--attention-output-gate", model.attention_output_gate),
        ):
            if given:
                raise ConfigError(
                    f"the saved arguments have {flag}, whose tensors are not imported from "
                    "Megatron's checkpoints; convert the model to the format of Hugging Face first"
                )
        if model.num_layers > len(source.names):
            # Each layer would be built, and a wrong number may be too large for that.
            raise CheckpointError(
                f"the saved arguments have {model.num_layers} layers, and the checkpoint has "
                f"{len(source.names)} tensors"
            )
        tensors = list_megatron_tensors(shape)
        _check_names(source, tensors, tied=not model.untie_embeddings_and_output_weights)
        layout = _find_layout(source, model)
        return [
            _plan_tensor(source, kind, tensor, shape, layout)
            for tensor in tensors
            for kind in kinds
        ]


def open_megatron(trainer: str, folder: Path, *, weights_only: bool) -> MegatronCheckpoint:
    """Open a checkpoint of Megatron or GPT-NeoX.

    Args:
        trainer: megatron-deepspeed, megatron-lm or gpt-neox.
        folder: Folder of the checkpoints, or of one of them.
        weights_only: Leave out the optimizer's states.

    Raises:
        CheckpointError: a file is missing or damaged, or contains what is not allowed.
    """
    source: MegatronSource
    if trainer == "gpt-neox":
        source = NeoxFolder(folder)
    elif trainer == "megatron-deepspeed":
        source = open_megatron_deepspeed(folder, weights_only=weights_only)
    else:
        source = open_megatron_lm(folder, weights_only=weights_only)
    return MegatronCheckpoint(source, weights_only=weights_only)


def _find_layout(source: MegatronSource, model: ModelConfig) -> TensorLayout:
    """Return the layout of the tensors."""
    version = source.run.version
    if isinstance(source, NeoxFolder):
        # With two branches beside each other, each rank adds its biases before the sum over ranks.
        return TensorLayout(
            version, "up", separate_keys=True, summed_biases=model.parallel_residual
        )
    # `--glu-activation` of BigScience multiplies by the activation of the second half.
    if source.run.args.get("glu_activation"):
        return TensorLayout(version, "up")
    return TensorLayout(version)


def _plan_tensor(
    source: MegatronSource,
    kind: Kind,
    tensor: MegatronTensor,
    shape: ModelShape,
    layout: TensorLayout,
) -> TensorToWrite:
    """Return a tensor of the new checkpoint, which is read when it is written."""
    keys = tensor.keys

    def read() -> Tensor:
        return tensor.merge([source.read(kind, key) for key in keys], shape, layout)

    return TensorToWrite(
        kind, tensor.parameter, tensor.shape, f"{source.names[keys[0]]} ({kind})", read
    )


def _check_names(source: MegatronSource, tensors: Sequence[MegatronTensor], *, tied: bool) -> None:
    """Check that the checkpoint has the tensors of the model and no others.

    Raises:
        CheckpointError: it does not. The message lists the first 12 problems.
    """
    expected = dict.fromkeys(key for tensor in tensors for key in tensor.keys)
    problems = [f"{describe_key(key)} is missing" for key in expected if key not in source.names]
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
