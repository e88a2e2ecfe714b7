"""Values from which the numbers of a plan can be derived, whatever the user gave."""

from dataclasses import replace
from typing import Any

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.config.layer_choice import choose_layers, find_expert_layers
from megatron.config.tree import Config
from megatron.plan.rules.model import LAYER_CHOICES

# Fields that divide or are divided by others. A value below 1 would end in a ZeroDivisionError, and
# a very large one in an OverflowError.
COUNTS = (
    *("model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.seq_length"),
    *("model.ffn_hidden_size", "model.num_query_groups", "model.kv_channels"),
    "model.max_position_embeddings",
    *("batch.micro_batch_size", "batch.global_batch_size"),
    *("parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"),
    *("parallel.context_parallel_size", "parallel.num_layers_per_virtual_pipeline_stage"),
    *("parallel.hsdp_shard_size", "parallel.expert_model_parallel_size"),
    *("model.moe_router_topk", "model.moe_ffn_hidden_size", "model.moe_router_num_groups"),
    *("model.moe_router_group_topk", "model.moe_shared_expert_intermediate_size"),
    *("tokenizer.vocab_size", "tokenizer.pad_vocab_size_to"),
    "tokenizer.make_vocab_size_divisible_by",
    *("curriculum.curriculum_min_difficulty", "curriculum.curriculum_max_difficulty"),
    *("curriculum.curriculum_total_step", "curriculum.curriculum_difficulty_step"),
    "curriculum.curriculum_root_degree",
)


def replace_wrong_values(asked: ConfigWithOrigin) -> ConfigWithOrigin:
    """Return `asked` with values from which the numbers of a plan can be derived.

    A size out of its range becomes 1. A wrong choice of layers becomes the default. Rules report
    both.
    """
    config = asked.config
    for name in COUNTS:
        # None is a size that is derived from others, so it needs no limit.
        if asked[name] is not None and not all_fields()[name].range.contains(asked[name]):
            config = _replace_field(config, name, 1)
    for name in LAYER_CHOICES:
        try:
            if asked[name] is not None:
                choose_layers(asked[name], config.model.num_layers)
        except ValueError:
            config = _replace_field(config, name, None)
    experts = "model.num_experts"
    if asked[experts] is not None and not all_fields()[experts].range.contains(asked[experts]):
        config = _replace_field(config, experts, None)
    try:
        find_expert_layers(config.model.moe_layer_freq, config.model.num_layers)
    except ValueError:
        config = _replace_field(config, "model.moe_layer_freq", "1")
    return ConfigWithOrigin(config, asked.origin)


def _replace_field(config: Config, dotted: str, value: Any) -> Config:
    """Return the configuration with another value of a field."""
    group, name = dotted.split(".")
    return replace(config, **{group: replace(getattr(config, group), **{name: value})})
