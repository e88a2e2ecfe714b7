"""Differences between the command line and the checkpoint: which are allowed, and what applies.

The defaults of the version that wrote the checkpoint may have been others (`keep_earlier_choices`).

Kernels round differently. So a run keeps its kernels after a resume, as long as the type of its
GPUs stays the same (`choose_run_kernels`). See docs/decisions/056.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

import torch

from megatron.checkpoint.load import Checkpoint, compare_models
from megatron.config.fields import LoadedConfig, all_fields
from megatron.config.kernels import SWITCHES, AttentionBackend, KernelsConfig
from megatron.config.loss import FOREIGN_ORIGIN, LOSS_MEAN
from megatron.config.tree import Config
from megatron.engine.kind import EngineKind
from megatron.parallel.ranks import Ranks
from megatron.plan.kernel_choice import (
    CPU,
    ROCM,
    KernelChoice,
    KernelDevice,
    apply_kernel_choice,
    choose_kernels,
    explain_refusal,
)
from megatron.plan.rules.finding import (
    ResumeContext,
    apply_rules,
    error,
    list_errors,
    list_warnings,
    refuse_errors,
)
from megatron.plan.rules.lists import RESUME_RULES
from megatron.plan.rules.resume import describe_curriculum_difference
from megatron.plan.run_plan import Plan
from megatron.run.state import TrainState
from megatron.schedule.batch_size import bare_thresholds_as_samples, step_entries
from megatron.schedule.lr import LRSchedule
from megatron.schedule.skip import SkipRange
from megatron.tokenizer.vocabulary import compute_tokenizer_digests


def read_bare_thresholds(config: Config, saved: Config) -> tuple[Config, list[str]]:
    """Read bare thresholds of --step-batch-size-schedule as samples if the checkpoint did so.

    A schedule that differs from the checkpoint's is not changed. The plan rejects its bare
    thresholds.

    Args:
        config: The configuration of a run that continues a checkpoint.
        saved: The checkpoint's configuration.

    Returns:
        The configuration with the unit spelled out, and the warnings to print.
    """
    given = config.batch.step_batch_size_schedule
    if given is None:
        return config, []
    spelled = bare_thresholds_as_samples(given)
    # Every threshold has a unit already, so there is nothing to decide.
    if spelled == step_entries(given):
        return config, []
    trained = saved.batch.step_batch_size_schedule
    if trained is None or bare_thresholds_as_samples(trained) != spelled:
        return config, []
    note = (
        f"--step-batch-size-schedule '{' '.join(given)}' is read as '{' '.join(spelled)}': the "
        "checkpoint was trained with thresholds in samples. Megatron-LM reads a bare threshold as "
        "tokens. Write the unit."
    )
    return replace(config, batch=replace(config.batch, step_batch_size_schedule=spelled)), [note]


def choose_loss_mean(loaded: LoadedConfig, saved: Config) -> LoadedConfig:
    """Return the configuration with the --loss-mean of the checkpoint, unless it was given."""
    origin = loaded.origin.get(LOSS_MEAN, "default")
    # A mean that only follows from another trainer's flag is no decision of the user.
    given = origin != "default" and not origin.startswith(FOREIGN_ORIGIN)
    if given:
        return loaded
    mean = saved.loss.loss_mean
    return replace(
        loaded,
        config=replace(loaded.config, loss=replace(loaded.config.loss, loss_mean=mean)),
        origin={**loaded.origin, LOSS_MEAN: "as in the checkpoint"},
    )


def choose_curriculum(config: Config, saved: Config, iteration: int) -> Config:
    """Return the configuration with the curriculum that applies on resume.

    Args:
        config: The configuration of the command line.
        saved: The checkpoint's configuration.
        iteration: The checkpoint's iteration.
    """
    if config.batch.eval_only:
        return config
    if config.optimizer.use_checkpoint_lr_scheduler and describe_curriculum_difference(
        config, saved, iteration
    ):
        return replace(config, curriculum=saved.curriculum)
    return config


def keep_saved_choices(plan: Plan, state: TrainState) -> Plan:
    """Return the plan with what the checkpoint decides: the learning rate and skipped ranges.

    `check_schedule` has found that a flag decides on the schedule if it is another one. The command
    line's ranges apply if it gives any, and the checkpoint's otherwise.
    """
    # A state without a schedule is that of a new run, or of fine-tuning. An evaluation needs none.
    if plan.config.batch.eval_only:
        return plan
    if state.lr_schedule and plan.config.optimizer.use_checkpoint_lr_scheduler:
        plan = replace(plan, lr_schedule=LRSchedule(**state.lr_schedule))
    saved = _read_ranges(state)
    # Ranges that lie in the past do not matter any more.
    if saved and saved[-1][1] > state.iteration and not plan.skip_ranges:
        plan = replace(plan, skip_ranges=saved)
    return plan


def _read_ranges(state: TrainState) -> tuple[SkipRange, ...]:
    # JSON has no tuples, so the checkpoint's ranges are lists.
    return tuple((first, last) for first, last in state.skip_ranges)


def compare_with_checkpoint(
    given: Config, plan: Plan, state: TrainState, checkpoint: Checkpoint, saved: Config
) -> list[str]:
    """Compare a run with the checkpoint that it continues. Return the warnings.

    Args:
        given: The configuration of the command line.
        plan: The plan, before `keep_saved_choices`.
        state: The state to start from.
        checkpoint: The checkpoint.
        saved: The checkpoint's configuration.

    Raises:
        ConfigError: The run cannot continue the checkpoint. All errors are listed.
    """
    context = ResumeContext(
        plan.config.tokenizer,
        state.iteration,
        state.tokenizer,
        given,
        plan,
        saved=saved,
        has_states=checkpoint.optimizer is not None,
        saved_schedule=LRSchedule(**state.lr_schedule) if state.lr_schedule else None,
        saved_ranges=_read_ranges(state),
    )
    findings = apply_rules(RESUME_RULES, context)
    if list_errors(findings):
        # `load_into` compares the shapes, but this message must have all differences.
        lines = compare_models(saved.model, plan.config.model)
        rows = checkpoint.read_index().tensors["weight/embedding.word.weight"]["shape"][0]
        if rows != plan.vocab_size:
            lines.append(f"the vocabulary has {rows} ids in the checkpoint, {plan.vocab_size} here")
        findings += map(error, lines)
    refuse_errors(findings)
    return list_warnings(findings)


def record_for_resume(state: TrainState, plan: Plan) -> None:
    """Store in the state what a resume will be compared with."""
    state.lr_schedule = asdict(plan.lr_schedule)
    state.skip_ranges = [list(r) for r in plan.skip_ranges]
    # If the files are not on this machine, the checkpoint's digests are kept for later resumes.
    state.tokenizer = compute_tokenizer_digests(plan.config.tokenizer) or state.tokenizer


_MASKS = "philox"
"""Name of the masks of `megatron/parallel/rng.py`. Earlier versions recorded none."""


def keep_earlier_choices(
    plan: Plan, state: TrainState, saved: Config | None, log: Callable[[str], None]
) -> Plan:
    """Return the plan with the checkpoint's choices where the run's are left to the trainer.

    Args:
        plan: The plan of the run.
        state: The state of the run. The name of its masks is recorded there.
        saved: The configuration of the checkpoint, or None for a new run.
        log: Prints a line of the log.
    """
    continues = saved is not None and state.iteration > 0
    if continues and plan.config.model.has_dropout and state.dropout_masks != _MASKS:
        log(
            "dropout draws other masks from here on than the version that wrote the checkpoint: "
            "they no longer depend on the layout"
        )
    state.dropout_masks = _MASKS
    if saved is None or not continues:
        return plan
    optimizer = plan.config.optimizer
    if optimizer.muon_fp32_matmul_prec == "auto":
        kept = saved.optimizer.muon_fp32_matmul_prec
        optimizer = replace(optimizer, muon_fp32_matmul_prec=kept)
    return replace(plan, config=replace(plan.config, optimizer=optimizer))


_CHOSEN_KERNELS = ("attention_backend", *SWITCHES)


def choose_run_kernels(
    plan: Plan,
    state: TrainState,
    saved: KernelsConfig | None,
    ranks: Ranks,
    device: torch.device,
    kind: EngineKind,
    log: Callable[[str], None],
) -> Plan:
    """Return the plan with the kernels that this run uses, and record them in the state.

    The choice is the same on all ranks. All ranks must call it.

    Args:
        plan: The plan of the run.
        state: The state of the run. It has the record of the checkpoint, if there is one.
        saved: The settings of kernels in the checkpoint. They replace what the record lacks.
        ranks: All ranks.
        device: This rank's device.
        kind: The engine. It knows whether this rank can run its kernels.
        log: Prints a line of the log.
    """
    mine = _name_gpu_type(device), kind.find_kernel_obstacle(device.type)
    here = replace(_find_common_device(ranks.gather(mine)), has_graphs=kind.has_graphs)
    choice = choose_kernels(plan, here)
    record = state.kernels
    if record and not _is_kernel_record(record):
        log("warning: the checkpoint's record of kernels is not valid, and is ignored")
        record = {}
    if record and record["gpu"] != here.gpu:
        log(
            f"the checkpoint was trained on {record['gpu']} and this run is on {here.gpu} (compute "
            "capability or cpu), so kernels without a flag are chosen again"
        )
    elif saved is not None and state.iteration > 0:
        used = _complete_kernels(record.get("kernels", {}), saved)
        choice = _keep_kernels(choice, used, plan, here, log)
    state.kernels = {
        "gpu": here.gpu,
        "kernels": {name: getattr(choice.kernels, name) for name in _CHOSEN_KERNELS},
    }
    return apply_kernel_choice(plan, choice)


def _find_common_device(ranks: Sequence[tuple[str, str]]) -> KernelDevice:
    """Return what all ranks have in common, from the type of GPU and the obstacle of each."""
    obstacles = [f"{found} (rank {rank})" for rank, (_, found) in enumerate(ranks) if found]
    # Ranks with GPUs of several types have a name that is in no table.
    types = " and ".join(sorted({gpu for gpu, _ in ranks}))
    return KernelDevice(types, "".join(obstacles[:1]))


def _name_gpu_type(device: torch.device) -> str:
    if device.type != "cuda":
        return CPU
    capability = map(str, torch.cuda.get_device_capability(device))
    if torch.version.hip is not None:
        return ROCM
    return ".".join(capability)


def _is_kernel_record(record: Any) -> bool:
    """Return whether a record has the values that `choose_run_kernels` writes."""
    if not isinstance(record, Mapping) or not isinstance(record.get("gpu"), str):
        return False
    used = record.get("kernels")
    if not isinstance(used, Mapping) or not {*used} <= {*_CHOSEN_KERNELS}:
        return False
    order = used.get("attention_backend", ["auto"])
    if (
        not isinstance(order, Sequence)
        or not order
        or not {*order} <= {*get_args(AttentionBackend)}
    ):
        return False
    return all(isinstance(used.get(name, False), bool) for name in SWITCHES)


def _complete_kernels(record: Mapping[str, Any], saved: KernelsConfig) -> dict[str, Any]:
    """Return the kernels that a checkpoint was trained with.

    Versions without a record used PyTorch's operators where no flag was given.
    """
    used: dict[str, Any] = {name: bool(getattr(saved, name)) for name in SWITCHES}
    used["attention_backend"] = saved.attention_backend
    used |= record
    used["attention_backend"] = tuple(used["attention_backend"])
    if used["attention_backend"] == ("by-gpu",):
        used["attention_backend"] = ("auto",)
    return used


def _keep_kernels(
    choice: KernelChoice,
    used: Mapping[str, Any],
    plan: Plan,
    here: KernelDevice,
    log: Callable[[str], None],
) -> KernelChoice:
    """Return a choice in which kernels without a flag are those of the checkpoint.

    Args:
        choice: The choice of a run from scratch.
        used: The kernels that the checkpoint was trained with.
        plan: The plan of the run, whose settings have None or by-gpu where no flag was given.
        here: What all ranks have in common.
        log: Prints a line of the log.
    """
    fields = all_fields()
    given = plan.config.kernels
    differing = [name for name in _CHOSEN_KERNELS if used[name] != getattr(choice.kernels, name)]
    kept = [name for name in differing if getattr(given, name) in (None, ("by-gpu",))]
    refusals = {name: explain_refusal(name, used[name], plan, here) for name in kept}
    kept = [name for name in kept if refusals[name] is None]
    for name, why in refusals.items():
        if why is not None:
            spelled = fields[f"kernels.{name}"].spell(used[name])
            log(f"warning: {spelled} of the checkpoint is not kept: {why}")
    if not kept:
        return choice
    before, default = (
        " ".join(fields[f"kernels.{name}"].spell(values[name]) for name in kept)
        for values in (used, vars(choice.kernels))
    )
    log(
        f"kernels stay as in the checkpoint, so that the run continues as it was: {before}. "
        f"The default for a new run here is {default}. Give these flags to change to it"
    )
    reasons = {**choice.reasons, **dict.fromkeys(kept, "as in the checkpoint")}
    kernels = replace(choice.kernels, **{name: used[name] for name in kept})
    return KernelChoice(kernels, reasons)
