"""The reduced copy of a run: the smallest layout and model that still have each of its features.

Invariant: what the run has and the copies lack is in `Reduction.lost` (see `features`), and each
field of the configuration that differs is in `Reduction.changes`. The report lists both.
"""

import math
import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from megatron.base.errors import ConfigError, LayoutError
from megatron.config.fields import build_config, flatten
from megatron.config.layer_choice import choose_layers
from megatron.config.precision import PrecisionConfig
from megatron.config.tree import Config
from megatron.extras.planner.verify.features import (
    REDUCED_EXPERTS,
    compare_structures,
    find_lost_settings,
    has_neighbours,
    list_features,
    list_groups,
    list_plan_groups,
)
from megatron.extras.planner.verify.reference_optimizer import FORMULAS
from megatron.extras.step.float8.recipe import MULTIPLE
from megatron.model.partition import GIVEN_SIZES
from megatron.parallel.grid import Grid
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

MOST_PROCESSES = 8
"""Default of --processes."""
ITERATIONS = 6
"""Length of the copy's schedules. Four iterations are compared."""
SAVED = 2
"""The iteration after which the copy saves and ends, and from which it resumes."""
DROPPED = 3
"""The iteration whose gradients are infinite, so that no rank may change its state. An applied step
follows, because it shows what the dropped one has changed."""
COMPARED = 4
"""The last iteration of the copy."""
HEAD = 8
"""Channels of a head, without float8."""
SEQUENCE = 32
"""Tokens of a sample, except with three context-parallel ranks."""
VOCABULARY = 257
"""All bytes and the end of a document. It is odd, so it has padding on each layout."""
EOD = VOCABULARY - 1
ENLARGED_STD = 0.15
"""Standard deviation of the weights in fp32. With small weights, errors of a branch would be below
the bound."""
ENLARGED_RATE = 0.01
"""Peak learning rate. After one step, biases must be so large that their errors exceed the
bound."""
ENLARGED_EPSILON = 1e-3
"""Adam's epsilon. A gradient that is 0 in exact arithmetic, such as that of a key's bias, would
otherwise become an update of full size with the sign of a rounding error."""
ENLARGED_NORM_EPSILON = 0.1
"""Epsilon of the norm in gated delta nets. With a small one, the norm leaves only the sign of a
first token's q k, and removes what the gradients of decays are made of."""
_TAKEN = re.compile(
    r"(model|curriculum|optimizer|loss|recompute)\..*|batch\.seed|checkpoint\.async_save|"
    r"data\.(mock_data|reset_.*|eod_mask_loss)|"
    r"parallel\.(pp_partition_method|sequence_parallel|cp_comm_type|zero_stage|sharding_strategy|"
    r"deepspeed)"
)
"""Names of the settings that the copy takes from the run. The others have their defaults."""
_NOT_TAKEN = ("optimizer.override_lr_scheduler", "optimizer.use_checkpoint_lr_scheduler")

Values = dict[str, Any]
"""Settings by their dotted names."""


@dataclass(frozen=True)
class Reduction:
    """The copy of a run, and how it differs from the run."""

    plan: Plan
    """The plan of the copy, in fp32."""
    changes: tuple[tuple[str, Any, Any], ...]
    """Dotted name of a field, its value in the run, and in the copy."""
    kept: tuple[str, ...] = ()
    """Features of the run that the copy has, in either precision."""
    lost: tuple[str, ...] = ()
    """Features and flags of the run that no copy has."""


def reduce_plan(plan: Plan, folder: Path, most_processes: int = MOST_PROCESSES) -> Reduction:
    """Return the reduced copy of a plan without errors.

    Args:
        plan: The plan of the run.
        folder: Folder for the copy's data, which `synthetic` writes, and its checkpoints.
        most_processes: The largest number of processes of the copy.

    Raises:
        ConfigError: The copy needs more processes, its configuration has errors, or the reference
            has no formula of the optimizer.
    """
    grid = _choose_grid(plan, most_processes)
    before = flatten(plan.config)
    taken = {name for name in before if _TAKEN.fullmatch(name)}.difference(_NOT_TAKEN)
    values = {name: value for name, value in before.items() if name in taken}
    values |= _reduce_model(plan, grid) | _reduce_parallel(plan, grid)
    values |= _reduce_batch(plan, grid) | _reduce_data(plan, folder)
    values |= {
        "loss.goldfish_h": min(before["loss.goldfish_h"], 3),
        # Samples are short, so more of their tokens are left out.
        "loss.goldfish_k": min(before["loss.goldfish_k"], 5),
        "checkpoint.save": str(folder / "run"),
        "checkpoint.load": str(folder / "run"),
        "logging.log_interval": 1,
    }
    copy = _choose_layers(plan, values, grid.world_size)
    if copy.errors:
        raise ConfigError("the reduced copy has errors:\n  - " + "\n  - ".join(copy.errors))
    after = flatten(copy.config)
    names = [name for name in after if before[name] != after[name]]
    changes = tuple((name, before[name], after[name]) for name in names)
    reduction = Reduction(copy, changes)
    return _compare(plan, values, reduction)


def _compare(plan: Plan, values: Values, reduction: Reduction) -> Reduction:
    """Return the reduction with what the copies have of the run, and what they lack.

    Args:
        plan: The plan of the run.
        values: The settings that were given to the copy in fp32.
        reduction: The copy in fp32.
    """
    copies = [reduction.plan]
    given = set(values)
    own = use_own_precision(reduction, plan.config)
    if own is not None:
        copies.append(resolve(own, reduction.plan.world_size))
        plain = flatten(reduction.plan.config)
        given |= {
            name
            for name, value in flatten(own).items()
            # A size that was made smaller may be the default.
            if value != plain[name] or name.startswith("precision.")
        }
    present = {feature for each in copies for feature in list_features(each)}
    features = list(list_features(plan))
    kept, lost = compare_structures(list_plan_groups(plan), list_plan_groups(reduction.plan))
    kept += [feature for feature in features if feature in present]
    lost += [feature for feature in features if feature not in present]
    lost += find_lost_settings(plan.config, [each.config for each in copies], given)
    return replace(reduction, kept=tuple(kept), lost=tuple(lost))


def _replace_given(plan: Plan, reduced: Values) -> Values:
    """Return the reduced values of the settings that the run uses. 0 or None turns one off."""
    run = flatten(plan.config)
    return {name: value for name, value in reduced.items() if run[name]}


def _choose_grid(plan: Plan, most: int) -> Grid:
    """Return the sizes of the copy's axes.

    Raises:
        ConfigError: No layout of at most this number of processes has the copies of the model.
    """
    parallel = plan.config.parallel
    # Data x context ranks share and copy the model.
    weights = min(plan.shard_size, 2) * min(plan.copies, 2)
    context = min(parallel.context_parallel_size, 2)
    data = weights
    if context > 1:
        data = min(plan.data_parallel_size, 2)
        # If all of these ranks share one sequence, they also do in the copy.
        context = max(context, weights // data)
    grid = Grid(
        min(plan.pipeline_size, 2), data, min(parallel.tensor_model_parallel_size, 2), context
    )
    # Without data parallelism, there are still the ranks of a sequence.
    if grid.world_size > most and weights <= context:
        grid = replace(grid, data=1)
    if grid.world_size > most:
        raise ConfigError(
            f"a reduced copy needs {grid.tensor} (tensor) x {grid.pipeline} (pipeline) x "
            f"{grid.weight_ranks} (data x context) = {grid.world_size} processes to keep "
            f"{plan.copies} copies of the model that are each sharded over {plan.shard_size} "
            f"ranks, and at most {most} are started. Set --processes {grid.world_size}. Or verify "
            "it once without pipeline parallelism and once with --zero-stage 1 instead of "
            "--sharding-strategy hsdp."
        )
    return _enlarge_grid(plan, grid, most)


def _enlarge_grid(plan: Plan, grid: Grid, most: int) -> Grid:
    """Return the grid with more stages and more ranks of a stage, if there is room."""
    size = plan.config.parallel.context_parallel_size
    larger = []
    # A third stage is neither the first nor the last one. With two tensor-parallel and two
    # data-parallel ranks, it needs 12 processes.
    if plan.pipeline_size > 2 and plan.stages_per_rank == 1:
        larger.append(replace(grid, pipeline=3))
    # Three data-parallel ranks have a rank between the first and the last, and uneven shards.
    # Three would not divide the experts.
    dense = plan.config.model.num_experts is None
    several = plan.data_parallel_size > 2 and grid.data == 2
    if several and dense and min(plan.copies, plan.shard_size) == 1:
        larger += [replace(each, data=3) for each in (*larger, grid)]
    # Experts may be on ranks of several axes, and have copies too.
    if any(_choose_shards(plan, grid)[2]):
        data = [n for n in (2 * grid.data, 4 * grid.data) if n <= plan.data_parallel_size]
        larger += [replace(each, data=n) for each in (*larger, grid) for n in data]
    # Then there are ranks that have neither end of the sequence nor its middle.
    if size > grid.context > 1:
        larger += [replace(each, context=4 - size % 2) for each in (*larger, grid)]
    fitting = [each for each in (grid, *larger) if each.world_size <= most]

    def rank(each: Grid) -> tuple[int, ...]:
        reduced, others = _choose_shards(plan, each)[2]
        # Two data-parallel ranks are too few, and many take time.
        return -reduced, -others, each.pipeline, each.context, min(each.data, 3)

    return max(fitting, key=rank, default=grid)


def _choose_shards(plan: Plan, grid: Grid) -> tuple[int, int, tuple[int, int]]:
    """Choose how the data x context ranks of a grid share the model and its experts.

    Returns:
        The ranks that share a copy of the model, those that divide the experts, and how many
        features of the groups of experts the copy lacks: of reductions, and others.
    """
    run = list_plan_groups(plan)
    shards = [grid.weight_ranks]
    if plan.shard_size == 1:
        shards = [1]
    elif plan.copies > 1:
        # If the ranks of a sequence do not hold several copies, they do not in the copy.
        whole = plan.shard_size >= plan.config.parallel.context_parallel_size > 1
        first = 2
        if whole:
            first = grid.context
        larger = min(plan.shard_size, 2 * first)
        shards = [first] + [larger] * (grid.weight_ranks % (2 * larger) == 0)
    ranks = grid.tensor * grid.weight_ranks
    size = plan.expert_size or 1
    fits = [n for n in (2, 4, 8) if n <= size and ranks % n == 0]
    # The plan has the same rule about the ranks of a copy.
    pairs = [
        (n, e)
        for n, e in product(shards, fits)
        if not (grid.tensor * n % e and e % (grid.tensor * n))
    ]
    choices = []
    for shard, experts in pairs or [(shards[0], 1)]:
        groups = list_groups(grid, shard, None if plan.expert_size is None else experts)
        lost = compare_structures(run, groups)[1]
        reduced = sum(each.startswith(REDUCED_EXPERTS) for each in lost)
        others = sum("experts" in each and "more" not in each for each in lost) - reduced
        choices.append((reduced, others, shard, experts))
    reduced, others, shard, experts = min(choices)
    return shard, experts, (reduced, others)


def _reduce_model(plan: Plan, grid: Grid) -> Values:
    """Return the sizes of the architecture, except the layers."""
    model = plan.config.model
    shape = plan.shape
    tensor = grid.tensor
    groups, heads = _reduce_heads(plan, grid)
    length = get_length(grid.context)
    head, multiple = HEAD, 4
    if plan.config.precision.fp8_format is not None:
        # Both sizes of each weight must be multiples of this, for products in float8.
        head = multiple = MULTIPLE
    hidden = heads * head
    # If heads x head width differs from the hidden size in the run, it also does in the copy.
    if shape.head_dim * model.num_attention_heads != model.hidden_size:
        hidden += head
    table = model.max_position_embeddings or 0
    values: Values = {
        "model.hidden_size": hidden,
        "model.num_attention_heads": heads,
        "model.seq_length": length,
        "model.rope_original_length": length // 2,
    }
    if model.parametrization != "standard":
        # The ratios are above 1, so a missing factor is found.
        values["model.base_width"] = hidden // 2
        values["model.base_depth"] = 1 if model.base_depth is not None else None
        values["model.base_kv_channels"] = None if model.base_kv_channels is None else head // 2
    # Named formulas give large values already, because the hidden size is small.
    if isinstance(model.init_method_std, float):
        values["model.init_method_std"] = ENLARGED_STD
    # This value differs from the scaled default, so that using the wrong one is found.
    if isinstance(model.output_init_method_std, float):
        values["model.output_init_method_std"] = ENLARGED_STD / 2
    # The inner width is a multiple of 4, which each tensor-parallel size divides.
    ratio = shape.ffn_hidden_size / model.hidden_size
    width = multiple * max(tensor, round(hidden * ratio / multiple))
    given = {
        "model.num_query_groups": groups,
        "model.kv_channels": head,
        "model.ffn_hidden_size": width,
        "model.max_position_embeddings": length + 8 * (table > model.seq_length),
        "model.sliding_window": _choose_window(plan, grid),
    }
    if shape.attention == "latent":
        # Each width is another one.
        values |= {"model.kv_lora_rank": 20, "model.qk_head_dim": 6, "model.v_head_dim": 10}
        values |= {"model.qk_pos_emb_head_dim": 4}
        given["model.q_lora_rank"] = 12
    values |= _replace_given(plan, given) | _reduce_experts(plan, grid)
    if plan.shape.linear_layers:
        values |= _reduce_delta_nets(plan, grid)
    return values


def _reduce_delta_nets(plan: Plan, grid: Grid) -> Values:
    """Return the sizes of gated delta nets. `_choose_layers` chooses their layers."""
    model = plan.config.model
    ranks = grid.tensor * grid.context
    # With two key heads on a rank, their order matters.
    keys = ranks * min(2, max(1, model.linear_num_key_heads // ranks))
    # If several heads of values share a key in the run, two of them do in the copy.
    copies = min(2, model.linear_num_value_heads // model.linear_num_key_heads)
    return {
        "model.linear_num_key_heads": keys,
        "model.linear_num_value_heads": keys * copies,
        # Two widths, so that taking one for the other is found.
        "model.linear_key_head_dim": 2 * HEAD,
        "model.linear_value_head_dim": HEAD,
        "model.linear_norm_epsilon": ENLARGED_NORM_EPSILON,
        # Large negative values of dt_bias. With 1, most heads forget all within two tokens, and
        # errors of the state would be below the bound.
        "model.linear_time_step": "log-uniform",
    }


def _reduce_experts(plan: Plan, grid: Grid) -> Values:
    """Return the numbers of experts and their ranks, and enlarged auxiliary losses."""
    model = plan.config.model
    if model.num_experts is None:
        return {}
    loss = plan.config.loss
    topk = min(model.moe_router_topk, 3)
    values: Values = {}
    number = 8
    groups = model.moe_router_num_groups
    if groups is not None and model.moe_router_group_topk is not None:
        best = min(model.moe_router_group_topk, 2)
        topk = best * min(2, model.moe_router_topk // model.moe_router_group_topk)
        # The run chooses among groups, and so does the copy.
        few = 4 if groups > 2 else groups
        number = few * 2
        values |= {"model.moe_router_num_groups": few, "model.moe_router_group_topk": best}
    frequency = "2"
    if set(plan.shape.expert_layers) == set(range(model.num_layers)):
        frequency = "1"
    values |= {
        "model.num_experts": number,
        "model.moe_router_topk": topk,
        "model.moe_layer_freq": frequency,
        "parallel.expert_model_parallel_size": _choose_shards(plan, grid)[1],
        # The choices of a step so far depend on the order of its microbatches.
        "loss.moe_router_load_balancing_type": loss.moe_router_load_balancing_type.replace(
            "global_", ""
        ),
    }
    # Errors of these terms would otherwise be below the bound.
    enlarged = {
        "model.moe_ffn_hidden_size": 12,
        "model.moe_shared_expert_intermediate_size": 4 * grid.tensor,
        "loss.moe_aux_loss_coeff": 0.05,
        "loss.moe_z_loss_coeff": 0.01,
        "loss.moe_router_bias_update_rate": 0.05,
    }
    return values | _replace_given(plan, enlarged)


def _reduce_heads(plan: Plan, grid: Grid) -> tuple[int, int]:
    """Return the number of query groups and of heads."""
    heads_per_group = plan.config.model.num_attention_heads // plan.shape.query_groups
    if plan.shape.query_groups < plan.config.parallel.tensor_model_parallel_size:
        # Each rank has two heads of the shared group.
        groups, heads = 1, 2 * grid.tensor
    else:
        # With several groups on a rank, their order matters.
        tensor = plan.config.parallel.tensor_model_parallel_size
        number = min(2, plan.shape.query_groups // grid.tensor)
        # If the run's shards end inside of a query group, those of the copy do too.
        if plan.shape.query_groups // tensor % plan.shard_size and number % grid.data == 0:
            number = 3
        groups = grid.tensor * number
        heads = groups * min(2, heads_per_group)
    if not plan.config.parallel.exchanges_heads:
        return groups, heads
    # Context-parallel ranks divide the heads of a tensor-parallel rank.
    enough = math.lcm(heads, grid.tensor * grid.context)
    return (enough if heads == groups else groups), enough


def _choose_window(plan: Plan, grid: Grid) -> int:
    """Return the number of keys that a query of the copy reads, if the run has a window."""
    length = get_length(grid.context)
    if grid.context == 1 or has_neighbours(plan):
        return length // 4
    # The window is so wide that context-parallel ranks gather all keys.
    return length - length // grid.context + 2


def get_length(context: int) -> int:
    """Return the tokens of a sample of the copy, by its context-parallel size.

    It is a multiple of 8 parts. The lengths of a curriculum are multiples of a quarter of it.
    """
    return SEQUENCE * 3 // 2 if context == 3 else SEQUENCE


def _reduce_parallel(plan: Plan, grid: Grid) -> Values:
    values: Values = {
        "parallel.tensor_model_parallel_size": grid.tensor,
        "parallel.pipeline_model_parallel_size": grid.pipeline,
        "parallel.context_parallel_size": grid.context,
        # The comparison covers the replicas of all ranks and names their difference.
        "parallel.check_invariants_interval": 0,
        "parallel.distributed_backend": "gloo",
        "parallel.distributed_timeout_minutes": 2.0,
        "parallel.straggler_interval": 0,
        "parallel.replay_interval": 0,
    }
    if plan.copies > 1 and plan.shard_size > 1:
        values["parallel.hsdp_shard_size"] = _choose_shards(plan, grid)[0]
    # The first and the last stage keep a layer if the embedding and the output layer count too.
    layers = 2
    if len({len(stage.layers) for stage in plan.stages}) == 1:
        layers = 1
    return values | _replace_given(plan, {"parallel.num_layers_per_virtual_pipeline_stage": layers})


def _reduce_batch(plan: Plan, grid: Grid) -> Values:
    """Return batch sizes, sequence lengths, and the schedule of the learning rate."""
    batch = plan.config.batch
    data = grid.data
    micro = min(batch.micro_batch_size, 2)
    number = _choose_microbatches(plan, grid.pipeline)
    changes = batch.rampup_batch_size or batch.step_batch_size_schedule
    # One process needs a second micro-batch size that divides all batch sizes. Otherwise the two
    # runs that give the bound in the run's precision would be the same run.
    if has_own_precision(plan.config.precision) and micro * data * (1 if changes else number) == 1:
        micro = 2
    # The plan requires a multiple of micro-batch size x data-parallel size.
    first = micro * data * number
    sizes = [first] * ITERATIONS
    values: Values = {"batch.micro_batch_size": micro, "batch.eval_iters": 0}
    if batch.rampup_batch_size is not None:
        # The size grows after the first and after the second iteration.
        sizes = [first, first + micro * data] + [first + 2 * micro * data] * (ITERATIONS - 2)
        values["batch.rampup_batch_size"] = (first, micro * data, 2 * first)
    elif batch.step_batch_size_schedule is not None:
        sizes = [first] + [first + micro * data] * (ITERATIONS - 1)
        values["batch.step_batch_size_schedule"] = (f"0:{first}", f"{first}samples:{sizes[-1]}")
    values["batch.global_batch_size"] = sizes[-1]
    if batch.step_batch_size_schedule is not None:
        values["batch.global_batch_size"] = None
    if len(set(sizes)) > 1 or batch.train_samples is not None:
        values["batch.train_samples"] = sum(sizes)
    else:
        values["batch.train_iters"] = ITERATIONS
    longest = get_length(grid.context)
    lengths = [longest] * ITERATIONS
    curriculum = plan.config.curriculum
    step = longest // 4
    if curriculum.curriculum_schedule_type == "fixed_discrete":
        number = min(3, len(curriculum.curriculum_difficulties))
        lengths[:number] = (2 * step, 3 * step, longest)[-number:]
        values["curriculum.curriculum_difficulties"] = tuple(lengths[:number])
        values["curriculum.curriculum_max_steps"] = tuple(range(1, number))
    elif curriculum.curriculum_schedule_type is not None:
        lengths[:2] = 2 * step, 3 * step
        values["curriculum.curriculum_min_difficulty"] = 2 * step
        values["curriculum.curriculum_max_difficulty"] = longest
        values["curriculum.curriculum_total_step"] = 3
        values["curriculum.curriculum_difficulty_step"] = step
    return values | _reduce_optimizer(plan, sizes, lengths)


def _choose_microbatches(plan: Plan, pipeline: int) -> int:
    """Return the number of microbatches of a step on each rank of the copy."""
    try:
        number = plan.get_num_microbatches(plan.batch_size.final)
    except LayoutError:
        number = 1
    if plan.pipeline_size == 1:
        return min(number, 3)
    if number < plan.pipeline_size:
        return pipeline - 1
    # 1F1B also takes numbers that the stages do not divide.
    return 2 * pipeline + (number % plan.pipeline_size > 0)


def _reduce_optimizer(plan: Plan, sizes: list[int], lengths: list[int]) -> Values:
    """Return the optimizer with a large rate. Each length keeps its unit.

    The warm-up takes two iterations, the decay takes all, and the last decay of WSD takes two.
    """
    optimizer = plan.config.optimizer
    formula = FORMULAS.require(optimizer.optimizer)
    rate = ENLARGED_RATE * formula.rate
    factor = rate / (optimizer.lr or rate)
    decoupled = (optimizer.decoupled_lr or 0.0) * factor
    given = {
        "optimizer.decoupled_lr": decoupled,
        "optimizer.decoupled_min_lr": (optimizer.decoupled_min_lr or 0.0) * factor,
        "optimizer.lr_warmup_iters": 2,
        "optimizer.lr_warmup_samples": sum(sizes[:2]),
        "optimizer.lr_warmup_tokens": sum(sizes[:2]) * max(lengths),
        "optimizer.lr_warmup_fraction": 1 / 3,
        "optimizer.lr_decay_iters": ITERATIONS,
        "optimizer.lr_decay_samples": sum(sizes),
        "optimizer.lr_decay_tokens": sum(map(math.prod, zip(sizes, lengths, strict=True))),
        "optimizer.lr_wsd_decay_iters": 2,
        "optimizer.lr_wsd_decay_samples": sum(sizes[-2:]),
        "optimizer.lr_wsd_decay_fraction": 1 / 3,
        "optimizer.weight_decay": max(optimizer.weight_decay, 0.1),
        **dict.fromkeys(formula.spans, ITERATIONS),
        # More than the copy reads, so that it does not end too early.
        "batch.train_tokens": 10**9,
    }
    return _replace_given(plan, given) | {
        "optimizer.lr": rate,
        "optimizer.min_lr": optimizer.min_lr * factor,
        # A first step at the rate 0 would leave biases at zero in the second forward pass.
        "optimizer.lr_warmup_init": min(rate, decoupled or rate) / 4,
        "optimizer.adam_eps": ENLARGED_EPSILON,
        "optimizer.exp_avg_dtype": "fp32",
        "optimizer.exp_avg_sq_dtype": "fp32",
        **formula.values,
    }


def _reduce_data(plan: Plan, folder: Path) -> Values:
    """Return the data, which are mixtures of small sets, and the vocabulary.

    Phases are written to a file in `folder`.
    """
    data = plan.config.data
    padded = plan.padded_vocab_size != plan.vocab_size
    first = str(folder / "data" / "first")
    second = str(folder / "data" / "second")
    mixture: tuple[str, ...] = (first,)
    if len(data.data_path) > 2 or data.train_weighted_split_paths:
        mixture = ("0.3", first, "0.7", second)
    values: Values = {
        "data.split": "100,0,0",
        "data.data_cache_path": str(folder / "cache"),
        "tokenizer.vocab_file": str(folder / "vocab.json"),
        "tokenizer.merge_file": str(folder / "merges.txt"),
        # 260 ids need no padding for a tensor-parallel size of at most 2.
        "tokenizer.vocab_size": VOCABULARY + 3 * (not padded),
        "tokenizer.make_vocab_size_divisible_by": 1 + 7 * padded,
    }
    if len(plan.data_phases) > 1:
        values["data.data_phases"] = str(folder / "phases.yaml")
        starts = ((1, mixture), (2, (second,)))
        phases = [{"from_iteration": at, "data_path": list(paths)} for at, paths in starts]
        (folder / "phases.yaml").write_text(yaml.safe_dump(phases))
    elif not data.mock_data:
        values["data.data_path"] = mixture
    return values


def _choose_layers(plan: Plan, values: Values, world_size: int) -> Plan:
    """Return the copy's plan with the fewest layers that keep the form of the stages.

    Stages of unequal size stay unequal. If possible, a stage of several layers keeps several.
    """
    stages = values["parallel.pipeline_model_parallel_size"]
    uneven = len(set(plan.layers_per_stage)) > 1
    mixed = bool(plan.shape.linear_layers)
    fewest = max(2 + mixed, stages + (max(plan.layers_per_stage) > 1))
    if values.get("parallel.num_layers_per_virtual_pipeline_stage"):
        fewest = 2 * stages
    plans = []
    # The form of the stages depends on the number of layers, so several are tried.
    for layers in range(fewest, 5 * stages + 1):
        values["model.num_layers"] = layers
        for name in ("model.no_rope_layers", "model.full_attention_layers"):
            pattern = values[name]
            total = plan.config.model.num_layers
            # If a pattern chooses only some layers of the run, it also does in the copy.
            if pattern is not None and 0 < len(choose_layers(pattern, total)) < total:
                values[name] = "1::2"
        if mixed:
            # Both kinds of layers. Of those with attention, the pattern above chooses the first.
            chosen = [str(int(number % 3 == 0)) for number in range(layers)]
            values["model.linear_attention_freq"] = f"[{','.join(chosen)}]"
        if (plan.config.parallel.pp_partition_method or "").lower().startswith(GIVEN_SIZES):
            sizes = [layers // stages + (number < layers % stages) for number in range(stages)]
            values["parallel.pp_partition_method"] = GIVEN_SIZES + ",".join(map(str, sizes))
        plans.append(resolve(build_config(values), world_size))
        if (len(set(plans[-1].layers_per_stage)) > 1) == uneven and not plans[-1].errors:
            return plans[-1]
    # The form that is lost is listed, because features of both plans are compared.
    return next((each for each in plans if not each.errors), plans[0])


def replace_values(config: Config, values: Values) -> Config:
    """Return a configuration with other values of some settings."""
    return build_config(flatten(config) | values)


def has_own_precision(precision: PrecisionConfig) -> bool:
    """Return whether a part of the run is not in fp32."""
    return bool(precision.fp16 or precision.bf16 or precision.fp8_format)


def use_own_precision(reduction: Reduction, original: Config) -> Config | None:
    """Return the copy in the run's own precision, or None if all of the run is in fp32.

    None too with experts. Rounding turns some choices around, and the runs would not be comparable.

    The loss is the mean over a step, because the one-process runs have another micro-batch size.
    """
    precision = original.precision
    if not has_own_precision(precision) or original.model.num_experts is not None:
        return None
    names = ["parallel.grad_reduce_in_bf16", "kernels.gradient_accumulation_fusion"]
    names += FORMULAS.require(original.optimizer.optimizer).values
    names += ["optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"]
    run = flatten(original)
    # The format, the residual stream and the loss scale.
    names += [name for name in run if name.startswith("precision.")]
    values = {name: run[name] for name in names} | {
        "loss.loss_mean": "step",
        # A loss scale of 2^32 would drop all steps that are compared.
        "precision.initial_loss_scale": min(precision.initial_loss_scale, 2.0**10),
        "precision.hysteresis": 1,
        # The scale that is restored then differs from the initial one.
        "precision.loss_scale_window": SAVED,
    }
    if precision.fp8_format is not None:
        values |= _reduce_float8(precision, reduction.plan.config.model.num_layers)
    return replace_values(reduction.plan.config, values)


def _reduce_float8(precision: PrecisionConfig, layers: int) -> Values:
    """Return the settings of float8, for a copy with few layers that trains few iterations."""
    # At least one layer computes in float8, from the second iteration on at the latest.
    start = min(precision.num_layers_at_start_in_bf16, 1, layers - 1)
    return {
        # The copy runs on CPUs.
        "precision.fp8_emulate": True,
        "precision.fp8_start_iteration": min(precision.fp8_start_iteration, 2),
        "precision.num_layers_at_start_in_bf16": start,
        "precision.num_layers_at_end_in_bf16": min(
            precision.num_layers_at_end_in_bf16, 1, layers - 1 - start
        ),
    }


def use_one_process(config: Config, micro_batch_size: int) -> Config:
    """Return a configuration for one process without recomputation, with a micro-batch size."""
    kept = {
        name: value
        for name, value in flatten(config).items()
        if not name.startswith(("parallel.", "recompute."))
    }
    intervals = {"parallel.check_invariants_interval": 0, "parallel.straggler_interval": 0}
    return build_config(kept | intervals | {"batch.micro_batch_size": micro_batch_size})


def use_full_samples(plan: Plan) -> Config:
    """Return a configuration of one process that reads the copy's samples at their full length."""
    config = flatten(use_one_process(plan.config, find_common_size(plan)))
    # Only the samples are used, so curriculum and optimizer are left out.
    kept = {n: v for n, v in config.items() if not n.startswith(("curriculum.", "optimizer."))}
    return build_config(kept | {"optimizer.lr": ENLARGED_RATE})


def find_common_size(plan: Plan) -> int:
    """Return the largest micro-batch size that divides all batch sizes of the copy."""
    sizes: list[int] = []
    length = plan.config.model.seq_length
    for _ in range(COMPARED):
        sizes.append(plan.batch_size.get_size(sum(sizes), sum(sizes) * length))
    return math.gcd(*sizes)
