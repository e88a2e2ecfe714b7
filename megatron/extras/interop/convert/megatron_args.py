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
from megatron.extras.interop.translators.translator import load_config
from megatron.run.state import TrainState
from megatron.schedule.lr import LRSchedule

_VALUES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "normalization",
    "layernorm_epsilon",
    "norm_epsilon",
    "rotary_base",
    "rotary_percent",
    "init_method_std",
    "hidden_dropout",
    "attention_dropout",
    "glu_activation",
    "num_experts",
    "micro_batch_size",
    "global_batch_size",
    "rampup_batch_size",
    "train_iters",
    "train_samples",
    "train_tokens",
    "optimizer",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_tokens",
    "lr_warmup_fraction",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "seed",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "rope_scaling_factor",
    "window_size",
    "rotary_seq_len_interpolation_factor",
    "mtp_num_layers",
    "no_rope_freq",
    "hybrid_layer_pattern",
    "heterogeneous_layers_config_path",
    "experimental_attention_variant",
    "linear_attention_freq",
    "window_attn_skip_freq",
    "softmax_type",
    "eval_interval",
    "eval_iters",
    "save_interval",
    "split",
    "data_path",
)
"""Arguments that are flags with a value. Those of parts that are not possible here are among them,
so that such a model is refused, also if its tensors have the same shapes."""
_ON = (
    "swiglu",
    "squared_relu",
    "openai_gelu",
    "untie_embeddings_and_output_weights",
    "embed_layernorm",
    "qk_layernorm",
    "add_qkv_bias",
    "fp16",
    "bf16",
    "apply_layernorm_1p",
    "rotary_interleaved",
    "use_rope_scaling",
    "apply_residual_connection_post_layernorm",
    "multi_latent_attention",
    "qk_l2_norm",
    "attention_output_gate",
    "quick_geglu",
    "is_hybrid_model",
    "use_mup",
    "fp32_residual_connection",
    "use_rotary_position_embeddings",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "calculate_per_token_loss",
)
"""Arguments that are flags without a value, if they are true."""
_OF_EXPERTS = (
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_intermediate_size",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_expert_capacity_factor",
    "moe_input_jitter_eps",
)
_OF_MUP = (
    "mup_base_hidden_size",
    "mup_base_head_dim",
    "mup_attn_scale_power",
    "mup_embedding_mult",
    "mup_output_mult",
)
"""The same of muP. They are saved for all models, and have an effect only with it."""
_EXPERT_SWITCHES = (
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
    "moe_apply_probs_on_input",
)
"""The same of experts. Megatron-LM also saves them for models without experts."""
_OFF = {"add_bias_linear": "--disable-bias-linear", "bias_gelu_fusion": "--no-bias-gelu-fusion"}
"""Arguments that are true unless this flag is given."""
# 0 is their value of a flag that was not given. Here it may exclude another flag.
_UNUSED_IF_ZERO = {
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_init",
    "eval_iters",
}
# Given both, `load_config` would refuse them as two answers to one question.
_BY_SAMPLES = {"train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"}
"""Arguments that Megatron computes from the samples if those are given."""
# They are not flags of the new run, or are read below and in `from_megatron`. Reporting them as
# unused would be wrong.
_READ_ELSEWHERE = {
    "consumed_train_samples",
    "consumed_train_tokens",
    "consumed_valid_samples",
    "gigaflos_no_embeds",
    "group_query_attention",
    "num_query_groups",
    "num_key_value_heads",
    "padded_vocab_size",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
}


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
    used = set(_OFF) | {"start_weight_decay", "end_weight_decay"}
    experts = bool(args.get("num_experts"))
    names = list(_VALUES)
    if experts:
        names += _OF_EXPERTS
    if args.get("use_mup"):
        names += _OF_MUP
    for name in names:
        value = args.get(name)
        if name == "moe_layer_freq" and isinstance(value, list):
            value = "[" + ",".join(map(str, value)) + "]"
        by_samples = name in _BY_SAMPLES and bool(args.get("train_samples"))
        if value is None or by_samples or (name in _UNUSED_IF_ZERO and not value):
            continue
        used.add(name)
        words += [_make_flag(name), *_write_value(value)]
    for name in (*_ON, *(_EXPERT_SWITCHES if experts else ())):
        if args.get(name) is True:
            used.add(name)
            words.append(_make_flag(name))
    words += [flag for name, flag in _OFF.items() if args.get(name) is False]
    return [*words, *_write_groups(args), *_write_decay(args)], used


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


def _write_value(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return [str(value)]


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
