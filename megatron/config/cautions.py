"""Rules whose failure is a warning: what was given trains, but has no effect or an unexpected one. Nothing is silently ignored.

Invariant: as in `config/rules.py`, which runs them.
"""

import math
from collections.abc import Iterator

from megatron.config.asked import Asked
from megatron.config.fields import all_fields


def ramp_by_iterations(asked: Asked) -> Iterator[str]:
    batch = asked.config.batch
    changing = "batch.rampup_batch_size" if batch.rampup_batch_size is not None else "batch.step_batch_size_schedule"
    if batch.train_iters is not None and asked[changing] is not None:
        yield (
            f"{asked.given(changing)} with {asked.given('batch.train_iters')}: an iteration of the learning rate's warm-up and "
            "decay counts as the final batch size, so that they last longer than they say; --train-samples and --lr-*-samples "
            "are exact."
        )


def decay_by_tokens_wins(asked: Asked) -> Iterator[str]:
    for dotted in ("optimizer.lr_decay_samples", "optimizer.lr_decay_iters"):
        if asked.config.optimizer.lr_decay_tokens is not None and asked[dotted] is not None:
            yield f"{asked.given(dotted)} has no effect beside {asked.given('optimizer.lr_decay_tokens')}, which ends the decay."


def wsd_without_its_style(asked: Asked) -> Iterator[str]:
    if asked.config.optimizer.lr_decay_style != "WSD":
        for name in ("iters", "samples", "style"):
            dotted = f"optimizer.lr_wsd_decay_{name}"
            if asked.differs(dotted):
                yield f"{asked.given(dotted)} has no effect without --lr-decay-style WSD."


def loss_scale_without_use(asked: Asked) -> Iterator[str]:
    precision = asked.config.precision
    if not precision.fp16:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            if asked.differs(f"precision.{name}"):
                yield f"{asked.given(f'precision.{name}')} has no effect without --fp16."


def static_loss_scale_wins(asked: Asked) -> Iterator[str]:
    precision = asked.config.precision
    if precision.fp16 and precision.loss_scale is not None:
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            if asked.differs(f"precision.{name}"):
                static = asked.given("precision.loss_scale")
                yield f"{asked.given(f'precision.{name}')} has no effect beside {static}, which is static."


def loss_scale_that_rounds(asked: Asked) -> Iterator[str]:
    """A power of two changes exponents only; any other scale rounds each gradient once more."""
    precision = asked.config.precision
    if not precision.fp16:
        return
    used = ("loss_scale",) if precision.loss_scale is not None else ("initial_loss_scale", "min_loss_scale")
    for name in used:
        scale = asked[f"precision.{name}"]
        if 0 < scale < math.inf and math.frexp(scale)[0] != 0.5:
            below = 2.0 ** (math.frexp(scale)[1] - 1)
            others = f"{below:.10g} and {2 * below:.10g}"
            yield f"{asked.given(f'precision.{name}')} is no power of two, so scaling rounds; {others} do not."


def fp32_residual_of_fp32(asked: Asked) -> Iterator[str]:
    precision = asked.config.precision
    if precision.fp32_residual_connection and not (precision.fp16 or precision.bf16):
        yield f"{asked.given('precision.fp32_residual_connection')} has no effect without --fp16 or --bf16: everything is fp32."


def alibi_has_no_positions_to_reset(asked: Asked) -> Iterator[str]:
    if asked.config.data.reset_position_ids and asked.config.model.position_embedding_type == "alibi":
        yield (
            f"{asked.given('data.reset_position_ids')} has no effect with --position-embedding-type alibi, whose bias depends on "
            "distances only."
        )


def deepspeed_config_without_deepspeed(asked: Asked) -> Iterator[str]:
    parallel = asked.config.parallel
    if parallel.deepspeed_config is not None and not parallel.deepspeed:
        yield f"{asked.given('parallel.deepspeed_config')} has no effect without --deepspeed."


def save_without_interval(asked: Asked) -> Iterator[str]:
    checkpoint = asked.config.checkpoint
    if checkpoint.save is not None and not checkpoint.save_optim and checkpoint.load_optim and checkpoint.resumes_itself:
        yield (
            "--no-save-optim: this command will not resume what it saves, since there will be no optimizer state; with "
            "--no-load-optim it goes on with fresh moments."
        )
    if checkpoint.save is not None and checkpoint.save_interval is None and not asked.config.batch.eval_only:
        yield f"{asked.given('checkpoint.save')} without --save-interval saves only when training ends or is asked to stop."


def tensorboard_without_folder(asked: Asked) -> Iterator[str]:
    if asked.config.logging.tensorboard_dir is None:
        for field in all_fields().values():
            if field.group == "logging" and "tensorboard" in field.name and asked.differs(field.dotted):
                yield f"{asked.given(field.dotted)} has no effect without --tensorboard-dir."


def rotary_settings_without_rotary(asked: Asked) -> Iterator[str]:
    if asked.config.model.position_embedding_type != "rotary":
        for dotted in ("model.rotary_percent", "model.rotary_base"):
            if asked.differs(dotted):
                yield f"{asked.given(dotted)} has no effect without --position-embedding-type rotary."


def fraction_without_recomputation(asked: Asked) -> Iterator[str]:
    recompute = asked.config.recompute
    if asked.differs("recompute.checkpoint_fraction") and not recompute.checkpoint_activations:
        yield f"{asked.given('recompute.checkpoint_fraction')} has no effect without --checkpoint-activations."
    for dotted in ("recompute.partition_activations", "recompute.checkpoint_in_cpu"):
        if asked[dotted] and not recompute.checkpoint_activations:
            yield f"{asked.given(dotted)} has no effect without --checkpoint-activations."
    if recompute.partition_activations and asked.config.parallel.sequence_parallel:
        yield f"{asked.given('recompute.partition_activations')} has no effect beside --sequence-parallel, which cuts them already."
    if recompute.recompute_attention_core and recompute.checkpoint_activations and recompute.checkpoint_fraction.strip() == "1":
        yield (
            f"{asked.given('recompute.recompute_attention_core')} has no effect beside --checkpoint-activations, which recomputes "
            "whole layers; with --checkpoint-fraction it holds for the other layers."
        )


WARNINGS = (
    ramp_by_iterations,
    decay_by_tokens_wins,
    wsd_without_its_style,
    loss_scale_without_use,
    static_loss_scale_wins,
    loss_scale_that_rounds,
    fp32_residual_of_fp32,
    alibi_has_no_positions_to_reset,
    deepspeed_config_without_deepspeed,
    save_without_interval,
    tensorboard_without_folder,
    rotary_settings_without_rotary,
    fraction_without_recomputation,
)
