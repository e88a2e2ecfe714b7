r"""Convert checkpoints to and from the format of Hugging Face, and from those of other trainers.

    python tools/convert_checkpoint.py to-hf --load runs/llama --out exported
    python tools/convert_checkpoint.py from-hf --model exported --out runs/imported
    python tools/convert_checkpoint.py from-megatron-deepspeed --load old/run --out runs/imported
    python tools/convert_checkpoint.py from-megatron-lm --load old/run --out runs/imported
    python tools/convert_checkpoint.py from-gpt-neox --load old/run --out runs/imported
    python tools/convert_checkpoint.py from-nanogpt --load out --out runs/imported
    python tools/convert_checkpoint.py from-llm-baselines --load exps/NAME/ckpts/latest \
        --out runs/imported -- --model llama --n_layer 12
    python tools/convert_checkpoint.py from-fms-fsdp --load ckpt/checkpoints/step_20000_ckp \
        --out runs/imported -- --model_variant=llama2_7b

The first two compare the result with transformers, layer by layer, before it gets its name. A model
of Hugging Face is trained further with
--config runs/imported/global_step0/config.yaml --load runs/imported --finetune --save runs/new.
A run of another trainer goes on at its iteration, without --finetune (docs/migrating.md).

Exit code 0 means success. Exit code 2 means that nothing was converted.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tyro

from megatron.base.code_version import get_code_version
from megatron.base.errors import ConfigError
from megatron.base.plain_text import print_line
from megatron.checkpoint.contents import CheckpointContents
from megatron.checkpoint.load import open_checkpoint
from megatron.config.fields import LoadedConfig
from megatron.config.yaml_file import dump_yaml
from megatron.console.checkpoint_path import locate_checkpoint
from megatron.console.parse import parse_arguments, split_at_double_dash
from megatron.console.run_tool import run_tool
from megatron.console.tokenizer_flags import TokenizerFlags
from megatron.extras.interop.convert.export import SHARD_BYTES, ExportOptions, export_checkpoint
from megatron.extras.interop.convert.from_megatron import open_megatron
from megatron.extras.interop.convert.from_trainer import open_trainer
from megatron.extras.interop.convert.importing import import_model
from megatron.extras.interop.convert.writing import (
    TensorToWrite,
    check_is_new,
    choose_states,
    write_checkpoint,
)
from megatron.extras.interop.inspection.verification import ensure_undisturbed
from megatron.extras.object_store.addresses import open_source
from megatron.model.shape import ModelShape
from megatron.parallel.shard import Kind
from megatron.run.state import TrainState


class ForeignCheckpoint(Protocol):
    """An opened checkpoint of another trainer."""

    iteration: int
    steps: int | None
    """Steps of the optimizer's states. None if there are none that are imported."""
    vocab_size: int | None
    """Number of token ids without padding, if the checkpoint has it."""
    layout: str
    """Ranks of the run that wrote it, as in ", TP 2, PP 4". Empty if whole tensors are stored."""

    def count_rows(self) -> int:
        """Return the rows of the word embedding, with its padding.

        Raises:
            CheckpointError: there is no word embedding.
        """

    def load_config(
        self, flags: Sequence[str], vocab_size: int
    ) -> tuple[LoadedConfig, Sequence[str]]:
        """Return the configuration of the run, and the settings that are not used.

        Raises:
            ConfigError: a setting is not possible here.
            CheckpointError: a setting is missing.
        """

    def make_state(self, loaded: LoadedConfig) -> TrainState:
        """Return the counters of the run."""

    def list_tensors(
        self, loaded: LoadedConfig, shape: ModelShape, kinds: Sequence[Kind]
    ) -> list[TensorToWrite]:
        """Return the tensors of the new checkpoint, which are read when they are written.

        Raises:
            CheckpointError: the tensors do not fit the settings.
        """


OutputFolder = Annotated[Path, tyro.conf.arg(aliases=["--output"])]


@dataclass(frozen=True)
class ToHF:
    """Export a checkpoint of any parallel layout."""

    load: str
    """Folder of the run's checkpoints, or their s3:// address."""
    out: OutputFolder
    """Folder to write. It must not exist."""
    iteration: int | None = None
    """Iteration of the checkpoint. Default: the one that `latest` names."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the files. Default: the precision of the training."""
    architecture: str | None = None
    """Model type to write, as in config.json. Default: the first that can express the model."""
    max_shard_bytes: int = SHARD_BYTES
    """Largest size of a tensor file."""
    compare_model: bool = True
    """Compare the complete model as well, if it fits into the memory. Without it
    (--no-compare-model), the layers are compared one by one, with the memory of one layer."""
    tokenizer: Annotated[TokenizerFlags, tyro.conf.arg(name="")] = field(
        default_factory=TokenizerFlags
    )
    license: str | None = None
    """Licence of the model for its card, such as apache-2.0. Default: the card says that none is
    stated."""


@dataclass(frozen=True)
class FromHF:
    """Import a model as the checkpoint of iteration 0."""

    model: Path
    """Folder with config.json, safetensors and a tokenizer."""
    out: OutputFolder
    """Folder of the new checkpoint. It must not exist."""
    seq_length: int | None = None
    """Sequence length of the training that follows. Default: that of config.json."""
    compare_model: bool = True
    """See to-hf."""


@dataclass(frozen=True)
class FromMegatron:
    """Import a checkpoint of Megatron-LM or Megatron-DeepSpeed, at its iteration."""

    load: Path
    """Folder of the checkpoints, or of one of them."""
    out: OutputFolder
    """Folder of the new checkpoint. It must not exist."""
    vocab_size: int | None = None
    """Number of token ids. Default: that of the checkpoint, or all rows of its embedding."""
    weights_only: bool = False
    """Leave out the optimizer's states."""


@dataclass(frozen=True)
class FromMegatronDeepSpeed(FromMegatron):
    """Import layer files, ZeRO 1 partitions or a universal checkpoint, at any TP and PP."""


@dataclass(frozen=True)
class FromMegatronLM(FromMegatron):
    """Import mp_rank_XX/model_optim_rng.pt or torch_dist, at any TP and PP."""


@dataclass(frozen=True)
class FromNeox:
    """Import the weights of GPT-NeoX, at any model-parallel size. Flags after -- replace settings.

    The settings are those of the YAML files in global_stepN/configs, or of -- --config FILE ...
    """

    load: Path
    """Folder of the checkpoints, or of one of them."""
    out: OutputFolder
    """Folder of the new checkpoint. It must not exist."""
    vocab_size: int | None = None
    """Number of token ids. Default: all rows of the embedding."""


@dataclass(frozen=True)
class FromTrainer:
    """Import a checkpoint of another trainer, at its iteration."""

    load: Path
    """File of the checkpoint, or its folder."""
    out: OutputFolder
    """Folder of the new checkpoint. It must not exist."""
    vocab_size: int | None = None
    """Number of token ids. Default: all rows of the embedding."""
    weights_only: bool = False
    """Leave out the optimizer's states."""


@dataclass(frozen=True)
class FromNanoGPT(FromTrainer):
    """Import ckpt.pt of nanoGPT. Flags after -- replace its settings."""


@dataclass(frozen=True)
class FromLlmBaselines(FromTrainer):
    """Import main.pt of llm-baselines, of --model base or llama. Its flags follow after --."""


@dataclass(frozen=True)
class FromFms(FromTrainer):
    """Import step_N_ckp of fms-fsdp, a folder or a .pth file. Its flags follow after --."""


Command = (
    Annotated[ToHF, tyro.conf.subcommand("to-hf")]
    | Annotated[FromHF, tyro.conf.subcommand("from-hf")]
    | Annotated[FromMegatronDeepSpeed, tyro.conf.subcommand("from-megatron-deepspeed")]
    | Annotated[FromMegatronLM, tyro.conf.subcommand("from-megatron-lm")]
    | Annotated[FromNeox, tyro.conf.subcommand("from-gpt-neox")]
    | Annotated[FromNanoGPT, tyro.conf.subcommand("from-nanogpt")]
    | Annotated[FromLlmBaselines, tyro.conf.subcommand("from-llm-baselines")]
    | Annotated[FromFms, tyro.conf.subcommand("from-fms-fsdp")]
)

_TRAINERS: dict[type, str] = {
    FromMegatronDeepSpeed: "megatron-deepspeed",
    FromMegatronLM: "megatron-lm",
    FromNeox: "gpt-neox",
    FromNanoGPT: "nanogpt",
    FromLlmBaselines: "llm-baselines",
    FromFms: "fms-fsdp",
}


def run_export(command: ToHF) -> None:
    """Export a checkpoint.

    Raises:
        MegatronError: See `export_checkpoint`.
    """
    if command.max_shard_bytes < 1:
        raise ConfigError(f"--max-shard-bytes {command.max_shard_bytes} must be at least 1.")
    with open_source(command.load) as place:
        root, iteration = locate_checkpoint(place.folder, command.iteration)
        checkpoint = open_checkpoint(root, iteration)
        place.fetch_weights(checkpoint)
        # The run may be active and remove this checkpoint while it is read. After the last read,
        # the export is complete in spite of that.
        with ensure_undisturbed(checkpoint.folder, errors_only=True):
            options = ExportOptions(
                command.dtype,
                command.architecture,
                command.max_shard_bytes,
                command.compare_model,
                command.tokenizer.make_config_if_given(),
                command.license,
            )
            comparison = export_checkpoint(checkpoint, command.out, options, print_line)
    for line in comparison.describe():
        print_line(line)
    print_line(f"iteration {iteration} of {command.load} is exported to {command.out}")


def run_import(command: FromHF) -> None:
    """Import a model.

    Raises:
        MegatronError: See `import_model`.
    """
    comparison = import_model(
        command.model,
        command.out,
        command.seq_length,
        print_line,
        compare_complete=command.compare_model,
    )
    for line in comparison.describe():
        print_line(line)
    print_line(f"{command.model} is imported to {command.out}")


def import_checkpoint(
    command: FromMegatron | FromNeox | FromTrainer, flags: Sequence[str], log: Callable[[str], None]
) -> None:
    """Write a checkpoint of another trainer as one of this trainer, of the same iteration.

    It gets its name after all of it was written. The files are pickles, and nothing in them is run
    (`unpickle.py`).

    Args:
        command: What to import.
        flags: Flags of the run. Where the checkpoint has its settings, these flags replace them.
        log: Receives lines for the user.

    Raises:
        ConfigError: `out` exists, or the run has a setting that is not possible here.
        CheckpointError: a file is missing, damaged, or contains what is not allowed, or the tensors
            do not fit the settings.
        OSError: a file cannot be written.
    """
    check_is_new(command.out)
    trainer = _TRAINERS[type(command)]
    # The optimizer's states of GPT-NeoX are never read.
    weights_only = isinstance(command, FromNeox) or command.weights_only
    opener = open_trainer if isinstance(command, FromTrainer) else open_megatron
    checkpoint: ForeignCheckpoint = opener(trainer, command.load, weights_only=weights_only)
    vocab_size = command.vocab_size or checkpoint.vocab_size
    if vocab_size is None:
        vocab_size = checkpoint.count_rows()
        log(
            f"all {vocab_size} rows of the embedding are imported; give --vocab-size to leave out "
            "the padding"
        )
    loaded, unused = checkpoint.load_config(flags, vocab_size)
    for warning in loaded.warnings:
        log(warning)
    if unused:
        log(f"not used of the saved arguments: {', '.join(unused)}")
    kinds, scalars = choose_states(checkpoint.steps, log)
    shape = ModelShape(loaded.config.model, vocab_size, vocab_size)
    tensors = checkpoint.list_tensors(loaded, shape, kinds)
    state = checkpoint.make_state(loaded)
    contents = CheckpointContents(
        checkpoint.iteration,
        scalars=scalars,
        state=state.to_json(),
        config_yaml=dump_yaml(loaded.config),
        version=get_code_version(),
        layout=f"imported from {trainer}{checkpoint.layout}",
    )
    write_checkpoint(command.out, tensors, contents)
    log(
        f"iteration {checkpoint.iteration}, {state.consumed_samples:,} samples, "
        f"{state.consumed_tokens:,} tokens, {state.lr_samples:,} samples of the learning rate"
    )
    log(f"{command.load} is imported to {command.out}")


def main(argv: list[str] | None = None) -> int:
    """Convert what `argv` names and return the exit code."""
    # Flags of another trainer are not parsed here. They go to the parser of training runs.
    words, flags = split_at_double_dash(argv)
    # mypy has no type for a union as a value.
    union: Any = Command
    command: Command = parse_arguments(union, args=words, description=__doc__)

    def convert() -> int:
        # Checkpoints of Megatron have their arguments, so flags would be ignored.
        if flags is not None and not isinstance(command, FromTrainer | FromNeox):
            raise ConfigError(
                f"-- {' '.join(flags)}: flags of a run are for from-gpt-neox, from-nanogpt, "
                "from-llm-baselines and from-fms-fsdp only."
            )
        if isinstance(command, ToHF):
            run_export(command)
        elif isinstance(command, FromHF):
            run_import(command)
        else:
            import_checkpoint(command, flags or [], print_line)
        return 0

    return run_tool(convert)


if __name__ == "__main__":
    sys.exit(main())
