"""What a run has that its reduced copies may lack: features, groups of ranks, and settings.

Invariant: nothing of the run is left out by name. A setting is lost if the copies have another
choice or do not have it at all. A structure of groups is lost if no group of the copies has it.
Only `_CHANGES_NO_STEP` names settings that are not compared.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from typing import Any, Literal, get_origin

from megatron.config.fields import Field, all_fields, flatten
from megatron.config.tree import Config
from megatron.parallel.context import reads_neighbours
from megatron.parallel.grid import Grid
from megatron.plan.run_plan import Plan

_CHANGES_NO_STEP = re.compile(
    # Files, logs and the vocabulary. A copy reads bytes, and the report says from where.
    r"(checkpoint|logging|profiling|tokenizer)\..*|"
    r"data\.(.*path.*|split|.*num_workers|data_cache_gb|data_impl|allow_changed_data)|"
    # Checks that stop a run, and what depends on the machine.
    r"parallel\.(check_invariants_interval|replay_.*|straggler_.*|hang_timeout|distributed_.*|"
    r"sync_tp_.*|local_rank)|kernels\.attention_backend|precision\.fp8_emulate|"
    # A copy has a length of its own, and no evaluation.
    r"batch\.(train_(iters|samples|tokens)|global_batch_size|gradient_accumulation_steps|eval_.*|"
    r"exit_.*|kill_switch_path|max_nan_iterations)|"
    r"optimizer\.(override_lr_scheduler|use_checkpoint_lr_scheduler)"
)
"""Names of the settings that change no number of a training step."""
_GROUPS = {
    "tensor": ("tensor parallelism", "tensor-parallel ranks"),
    "context": ("context parallelism", "ranks of a sequence"),
    "data": ("data parallelism", "data-parallel ranks"),
    "shards": ("copies that are sharded", "shards of each copy"),
    "copies": ("several copies of the model", "copies of the model"),
    "experts": ("experts that ranks divide", "ranks that divide the experts"),
    "expert shards": ("experts that ranks shard", "shards of each expert"),
    "expert copies": ("several copies of each expert", "copies of each expert"),
}
"""A kind of group -> the feature of a run that has it, and what such a group has."""
_EXPERT_GROUPS = ("experts", "expert shards", "expert copies")
REDUCED_EXPERTS = ("experts that ranks shard", "several copies of each expert")
"""Features with which ranks reduce the gradients of the same experts."""

Groups = dict[str, frozenset[int]]
"""Kind of a group -> the ranks of the first stage in the group of rank 0."""


def list_groups(grid: Grid, shard_size: int, expert_size: int | None) -> Groups:
    """Return the groups of rank 0. All groups of a kind have the same form.

    Args:
        grid: The sizes of the axes.
        shard_size: Data x context ranks that share a copy of the model.
        expert_size: Ranks that divide the experts. None: there are none.
    """
    tensor = grid.tensor
    stage = tensor * grid.weight_ranks
    copy = tensor * shard_size
    groups = {
        "tensor": range(tensor),
        "context": range(0, tensor * grid.context, tensor),
        "data": range(0, stage, tensor * grid.context),
        "shards": range(0, copy, tensor),
        "copies": range(0, stage, copy),
    }
    if expert_size is not None:
        # As in `_build_expert_parallel` of the mesh.
        groups["experts"] = range(expert_size)
        groups["expert shards"] = range(0, max(copy, expert_size), expert_size)
        groups["expert copies"] = range(0, stage, max(copy, expert_size))
    return {kind: frozenset(ranks) for kind, ranks in groups.items()}


def list_structures(groups: Groups) -> dict[str, frozenset[int]]:
    """Return the features of groups, each with the ranks that have it.

    They are the sizes of groups, and the axes that the groups of experts extend over.
    """
    found = {}
    for kind, ranks in groups.items():
        several, members = _GROUPS[kind]
        if len(ranks) > 1:
            found[several] = ranks
        if len(ranks) > 2:
            found[f"more than two {members}"] = ranks
    # Two layouts with groups of equal sizes may lay them over different axes.
    axes = [kind for kind in groups if kind not in _EXPERT_GROUPS]
    for kind, axis in product(_EXPERT_GROUPS, axes):
        common = groups.get(kind, frozenset()) & groups[axis]
        if len(common) > 1:
            found[f"{_GROUPS[kind][0]} over {_GROUPS[axis][1]}"] = common
    return found


def compare_structures(run: Groups, copy: Groups) -> tuple[list[str], list[str]]:
    """Return the features of the run's groups that the copy's groups have, and those they lack.

    If the run has several features for the same reason, only the first is returned. Experts that
    ranks divide are always named if the copy has them, because users look for them.
    """
    has = list_structures(copy)
    kept: list[str] = []
    lost: list[str] = []
    seen = set()
    for feature, ranks in list_structures(run).items():
        reason = (ranks, feature.startswith("more than"), feature in has)
        is_divided = feature == _GROUPS["experts"][0] and feature in has
        if reason not in seen or is_divided:
            if feature in has:
                kept.append(feature)
            else:
                lost.append(feature)
        seen.add(reason)
    return kept, lost


def list_plan_groups(plan: Plan) -> Groups:
    """Return `list_groups` of a plan."""
    return list_groups(plan.grid, plan.shard_size, plan.expert_size)


def find_lost_settings(run: Config, copies: Sequence[Config], given: Collection[str]) -> list[str]:
    """Return the flags of the run that no copy has, in the order of their declaration.

    Args:
        run: The configuration of the run.
        copies: Those of its copies.
        given: Dotted names of the settings that the copies get. Others have their defaults.
    """
    before = flatten(run)
    after = [flatten(copy) for copy in copies]
    return [
        field.spell(before[name])
        for name, field in all_fields().items()
        if not _CHANGES_NO_STEP.fullmatch(name)
        and all(_is_lost(field, before[name], copy[name], name in given) for copy in after)
    ]


def _is_lost(field: Field, run: Any, copy: Any, given: bool) -> bool:
    if run == copy:
        return False
    # A choice is another one, or the copy does not know the setting.
    if field.is_bool or get_origin(field.annotation) is Literal or not given:
        return True
    # Both have it, with another size.
    return bool(run) and not copy


def list_features(plan: Plan) -> Iterator[str]:
    """Yield the features of a layout and its configuration that may interact."""
    config = plan.config
    parallel = config.parallel
    model = config.model
    batch = config.batch
    share = batch.micro_batch_size * plan.data_parallel_size
    tied = not model.untie_embeddings_and_output_weights
    features = {
        "sequence parallelism": plan.grid.tensor > 1 and parallel.sequence_parallel,
        "pipeline stages": plan.pipeline_size > 1,
        "a stage between the first and the last": len(plan.stages) > 2,
        "stages of unequal size": len(set(plan.layers_per_stage)) > 1,
        "interleaved stages": plan.stages_per_rank > 1,
        "windows of which only the keys are sent": has_neighbours(plan),
        "exchange of heads between ranks of a sequence": parallel.exchanges_heads,
        "rates and factors that depend on the size": model.parametrization != "standard",
        "grouped queries": plan.shape.query_groups < model.num_attention_heads,
        "latent attention": plan.shape.attention == "latent",
        "query groups that ranks share": plan.shape.query_groups < plan.grid.tensor,
        "experts": model.num_experts,
        "gated delta nets": plan.shape.linear_layers,
        "padding of the vocabulary": plan.padded_vocab_size > plan.vocab_size,
        "a word embedding on two stages": plan.pipeline_size > 1 and tied,
        "several microbatches in a step": plan.batch_size.final > share,
        "several samples in a microbatch": batch.micro_batch_size > 1,
        "a batch size that changes": batch.rampup_batch_size or batch.step_batch_size_schedule,
        "a sequence length that changes": plan.curriculum,
        "phases of the data": config.data.data_phases,
        "a mixture of data sets": len(config.data.data_path) > 2,
        "masked tokens": plan.can_mask_tokens(training=True),
        "dropout": model.has_dropout,
        "recomputation of layers": config.recompute.checkpoint_activations,
        "recomputation of attention cores": config.recompute.recompute_attention_core,
        "float8 (emulated, in the run's precision only)": config.precision.fp8_format,
        "DeepSpeed": parallel.deepspeed,
    }
    yield from (name for name, is_present in features.items() if is_present)


def has_neighbours(plan: Plan) -> bool:
    """Return whether context-parallel ranks receive only the keys of a window."""
    model = plan.config.model
    parallel = plan.config.parallel
    size = parallel.context_parallel_size
    if size == 1 or parallel.exchanges_heads:
        return False
    return reads_neighbours(size, model.seq_length, model.sliding_window)
