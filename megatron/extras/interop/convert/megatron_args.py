"""The run of a Megatron checkpoint: its arguments as our configuration, and its counters.

The arguments are written as a command line, which the tables of the translators
(`megatron/extras/interop/translators/compat.py`) read as they read a script's. So a setting that is
not possible here is refused with the same message.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.fields import LoadedConfig
from megatron.extras.interop.translators.compat import load_table
from megatron.extras.interop.translators.translator import load_config
from megatron.run.state import TrainState
from megatron.schedule.lr import LRSchedule

_TABLE = load_table("saved_arguments")
_UNUSED_IF_ZERO, _BY_SAMPLES, _READ_ELSEWHERE = (
    frozenset(_TABLE["lists"][name].split())
    for name in ("unused_if_zero", "by_samples", "read_elsewhere")
)


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint says about its run."""

    args: Mapping[str, Any]
    iteration: int
    version: float
    """`checkpoint_version`."""
    tokens: int | None
    """Consumed tokens."""
    scheduler: Mapping[str, Any]
    """State of the learning-rate scheduler. Empty if it was not saved."""
    vocab_size: int | None
    """Number of token ids without padding, if the checkpoint has it."""

    @property
    def tensor_ranks(self) -> int:
        """Return the tensor-parallel size."""
        return int(self.args.get("tensor_model_parallel_size") or 1)

    @property
    def pipeline_ranks(self) -> int:
        """Return the pipeline-parallel size."""
        return int(self.args.get("pipeline_model_parallel_size") or 1)

    @property
    def expert_ranks(self) -> int:
        """Return the ranks that divide the experts.

        Raises:
            CheckpointError: tensor-parallel ranks divide a single expert in another way than the
                rest of the model.
        """
        if not self.args.get("num_experts"):
            return 1
        tensor = self.args.get("expert_tensor_parallel_size") or self.tensor_ranks
        if tensor != self.tensor_ranks:
            raise CheckpointError(
                f"the checkpoint has --expert-tensor-parallel-size {tensor} and "
                f"--tensor-model-parallel-size {self.tensor_ranks}, and can be read only if both "
                "are equal; save it with equal sizes"
            )
        return int(self.args.get("expert_model_parallel_size") or 1)


def read_saved_run(path: Path, state: Any) -> SavedRun:
    """Return the run that a file of the checkpoint describes.

    Args:
        path: The file, for messages.
        state: Its content.

    Raises:
        CheckpointError: it has no arguments or no iteration.
    """
    args = state.get("args") if isinstance(state, dict) else None
    if args is None:
        raise CheckpointError(f"{path} has no 'args', so the model is not known")
    iteration = state.get("iteration", state.get("total_iters"))
    if not isinstance(iteration, int):
        raise CheckpointError(f"{path} has no 'iteration', so it is not known where to continue")
    arguments = vars(args)
    # Both give the size of the vocabulary without its padding. Many files have neither.
    info = state.get("checkpoint_info") or {}
    universal = state.get("universal_checkpoint_info") or {}
    vocab_size = (
        info.get("original_vocab_size")
        or universal.get("original_vocab_size")
        or arguments.get("vocab_size")
    )
    return SavedRun(
        arguments,
        iteration,
        float(state.get("checkpoint_version") or 0),
        state.get("tokens"),
        _find_scheduler(state),
        vocab_size,
    )


def _find_scheduler(state: Mapping[str, Any]) -> dict[str, Any]:
    # The second is the name of older versions.
    for name in ("opt_param_scheduler", "lr_scheduler"):
        if isinstance(found := state.get(name), dict):
            return found
    return {}


def load_run_config(run: SavedRun, vocab_size: int) -> tuple[LoadedConfig, list[str]]:
    """Return the configuration of a run, and the names of the arguments that were not used.

    Raises:
        ConfigError: a setting is not possible here.
    """
    # The flag exists here, so the tables of translators would accept it.
    if run.args.get("multi_latent_attention"):
        raise ConfigError(
            "the arguments of the checkpoint are not possible here: tensors of "
            "--multi-latent-attention are not read from Megatron's checkpoints; import the model "
            "in Hugging Face's format"
        )
    words, used = _write_words(run.args)
    # Megatron averages the means of the microbatches, unless an argument changes it.
    words = ["--loss-mean", "microbatch", *words]
    words += ["--vocab-size", str(vocab_size)]
    if divisor := run.args.get("make_vocab_size_divisible_by"):
        words += ["--make-vocab-size-divisible-by", str(divisor)]
    try:
        loaded = load_config(words)
    except ConfigError as error:
        raise ConfigError(f"the arguments of the checkpoint are not possible here: {error}") from (
            error
        )
    unused = [
        name
        for name, value in run.args.items()
        if name not in used | _READ_ELSEWHERE and value not in (None, False, [], "")
    ]
    return loaded, sorted(unused)


def _write_words(args: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """Return the arguments as a command line, and the names of those that were written."""
    words: list[str] = []
    used = {*_TABLE["off"], "start_weight_decay", "end_weight_decay"}
    for group in _TABLE["groups"]:
        if "needs" in group and not args.get(group["needs"]):
            continue
        for name in group["names"].split():
            if written := _write_argument(args, name, is_switch=group.get("switches", False)):
                used.add(name)
                words += written
    words += [flag for name, flag in _TABLE["off"].items() if args.get(name) is False]
    return [*words, *_write_groups(args), *_write_decay(args)], used


def _write_argument(args: Mapping[str, Any], name: str, *, is_switch: bool) -> list[str]:
    """Return the flag of an argument and its values, or nothing if it was not given."""
    value = args.get(name)
    if is_switch:
        return [_make_flag(name)] * (value is True)
    by_samples = name in _BY_SAMPLES and bool(args.get("train_samples"))
    if value is None or by_samples or (name in _UNUSED_IF_ZERO and not value):
        return []
    if name == "moe_layer_freq" and isinstance(value, list):
        value = "[" + ",".join(map(str, value)) + "]"
    values = value if isinstance(value, list | tuple) else [value]
    return [_make_flag(name), *map(str, values)]


def _write_groups(args: Mapping[str, Any]) -> list[str]:
    """Return the flag of grouped queries."""
    # Microsoft's Megatron-DeepSpeed has this name, and Megatron-LM has a switch and a number.
    groups = args.get("num_key_value_heads")
    if args.get("group_query_attention"):
        groups = args.get("num_query_groups")
    if not groups:
        return []
    return ["--num-query-groups", str(groups)]


def _write_decay(args: Mapping[str, Any]) -> list[str]:
    """Return the flags of a weight decay that changes during the run, which is refused."""
    words = []
    for name in ("start_weight_decay", "end_weight_decay"):
        # Megatron fills in both ends also for a constant decay.
        if args.get(name) not in (None, args.get("weight_decay")):
            words += [_make_flag(name), str(args[name])]
    return words


def _make_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_state(run: SavedRun, loaded: LoadedConfig, steps: int | None) -> TrainState:
    """Return the counters of the run.

    Args:
        run: The run.
        loaded: Its configuration.
        steps: Steps of the optimizer's states. None if they are not imported.

    Raises:
        ConfigError: the scheduler's numbers give no valid schedule.
    """
    args = run.args
    config = loaded.config
    samples = args.get("consumed_train_samples")
    # Versions before the counters of samples train with a fixed batch.
    if samples is None:
        samples = run.iteration * (config.batch.global_batch_size or config.batch.micro_batch_size)
    tokens = run.tokens or args.get("consumed_train_tokens") or samples * config.model.seq_length
    # Megatron's schedulers count samples.
    lr_samples = int(run.scheduler.get("num_steps", samples))
    lr_tokens = run.scheduler.get("num_tokens")
    if lr_tokens is None:
        lr_tokens = lr_samples * config.model.seq_length
    return TrainState(
        iteration=run.iteration,
        consumed_samples=int(samples),
        consumed_tokens=int(tokens),
        lr_samples=lr_samples,
        lr_tokens=int(lr_tokens),
        warmup_tokens=int(run.scheduler.get("warmup_tokens", 0)),
        consumed_valid_samples=int(args.get("consumed_valid_samples") or 0),
        applied_steps=run.iteration if steps is None else steps,
        gigaflops_without_embeddings=float(args.get("gigaflos_no_embeds") or 0),
        lr_schedule=_read_schedule(run),
    )


def _read_schedule(run: SavedRun) -> dict[str, Any]:
    """Return the schedule that a resume is compared with. Empty if it was not saved."""
    saved = run.scheduler
    style = saved.get("lr_decay_style", saved.get("decay_style"))
    # A resume then compares nothing, and takes the schedule of the command line.
    if style is None:
        return {}
    # The scheduler's state does not have this length.
    wsd = run.args.get("lr_wsd_decay_samples")
    if wsd is None and run.args.get("lr_wsd_decay_iters") is not None:
        wsd = run.args["lr_wsd_decay_iters"] * run.args["global_batch_size"]
    schedule = LRSchedule(
        max_lr=saved["max_lr"],
        min_lr=saved["min_lr"],
        style=style,
        # The first name of each pair is the present one, the second that of older versions.
        warmup_steps=saved.get("lr_warmup_steps", saved.get("warmup_steps", 0)),
        decay_steps=saved.get("lr_decay_steps", saved.get("decay_steps")),
        decay_tokens=run.args.get("lr_decay_tokens"),
        wsd_decay_steps=wsd if style == "WSD" else None,
        wsd_decay_style=run.args.get("lr_wsd_decay_style") or "exponential",
        warmup_init=run.args.get("lr_warmup_init") or 0.0,
    )
    return asdict(schedule)
