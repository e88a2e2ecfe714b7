"""Latent attention and the experts of DeepSeek in classes of `transformers`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.fields import (
    NO_EXPERTS,
    Rope,
    describe_expert_layers,
    make_refusal,
)
from megatron.model.shape import ModelShape

_WIDTHS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Our width -> theirs."""
_OPTIONAL = "q_lora_rank"
_SAME = {"head_dim": "qk_rope_head_dim", "num_key_value_heads": "num_attention_heads"}
"""Their field -> the field whose value it must have in a class with latent attention."""
_SCALES = ("mscale", "mscale_all_dim")
_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, which no field of theirs changes."""
_SHARED = "moe_shared_expert_intermediate_size"
_METHODS = {True: "greedy", False: "group_limited_greedy"}
"""Whether a token may use experts of all groups -> V2's `topk_method`."""
LATENT_QUERY = "self_attn.q_b_proj"
"""Their name of the matrix that gives queries from latent vectors."""
LATENT_MODULES = {
    "attention.query": "self_attn.q_proj",
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.latent_down": "self_attn.kv_a_proj_with_mqa",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.latent_up": "self_attn.kv_b_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "mlp.router.balance": "mlp.gate.e_score_correction_bias",
}
"""Our module -> theirs, beside those of Llama."""


@lru_cache(maxsize=64)
def order_rows(name: str, model: ModelConfig) -> tuple[int, ...] | None:
    """Return for each row of theirs the row of our matrix, or None if the order is the same.

    Our rotary channels are the first of a head, in two halves. Theirs are the last, as pairs.

    Args:
        name: Name of the matrix inside a layer.
        model: The model.
    """
    rotary = model.qk_pos_emb_head_dim
    # Row 2i of theirs is row i of our first half, and row 2i + 1 that of our second half.
    pairs = [row for pair in range(rotary // 2) for row in (pair, pair + rotary // 2)]
    if name == "attention.latent_down.weight":
        # Only the key that all heads share is rotated.
        latent = model.kv_lora_rank
        return (*range(latent), *(latent + row for row in pairs))
    if name != "attention.query.weight":
        return None
    width = rotary + model.qk_head_dim
    head = [*range(rotary, width), *pairs]
    return tuple(at * width + row for at in range(model.num_attention_heads) for row in head)


@dataclass(frozen=True)
class Latents:
    """The widths of latent attention."""

    model_fields = ("multi_latent_attention", *_WIDTHS, "latent_norm_epsilon", "kv_channels")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        # Classes without it have their own names of projections.
        if "latent" not in model.attention_kinds:
            raise ConfigError("the class has latent attention, and this model has not")
        if model.latent_norm_epsilon != _EPSILON:
            raise ConfigError(
                f"--latent-norm-epsilon {model.latent_norm_epsilon} has no equivalent, only "
                f"{_EPSILON}"
            )
        return {theirs: getattr(model, ours) for ours, theirs in _WIDTHS.items()}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        found: dict[str, Any] = {ours: hf[theirs] for ours, theirs in _WIDTHS.items()}
        # transformers accepts any values, and fails when it builds or runs the model. Queries may
        # have no latent vector.
        found |= {name: int(width) for name, width in found.items() if name != _OPTIONAL}
        if found[_OPTIONAL] is not None:
            found[_OPTIONAL] = int(found[_OPTIONAL])
        for name, other in _SAME.items():
            if hf.get(name, hf[other]) != hf[other]:
                raise ConfigError(
                    f"{name} {hf[name]} must be equal to {other} {hf[other]}; correct one of them"
                )
        return found | {"multi_latent_attention": True, "latent_norm_epsilon": _EPSILON}


@dataclass(frozen=True)
class LatentRope(Rope):
    """Frequencies whose scaling also changes the logits."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        return (*super().model_fields, *_SCALES)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        found = super().write(model)
        # The class reads the factor on logits from here, whatever `attention_factor` is.
        if model.rope_scaling == "yarn":
            found["rope_parameters"] |= {name: getattr(model, name) for name in _SCALES}
        return found

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        found = super().read(hf)
        if found.get("rope_scaling") == "yarn":
            # A value of 0 is no scaling in the class, as if it were missing.
            given = hf["rope_parameters"]
            found["mscale"] = float(given.get("mscale") or 1.0)
            found["mscale_all_dim"] = float(given.get("mscale_all_dim") or 0.0)
        return found


@dataclass(frozen=True)
class DeepseekExperts:
    """Router and experts of DeepSeek-V2 or V3, of which the first layers have none."""

    version: Literal["V2", "V3"]

    model_fields = (*NO_EXPERTS, "ffn_hidden_size")

    def _list_fixed(self, *, grouped: bool) -> dict[str, Any]:
        """Return our fields that the class fixes."""
        new = self.version == "V3"
        found = {
            "moe_router_score_function": {True: "sigmoid", False: "softmax"}[new],
            "moe_router_enable_expert_bias": new,
            "moe_router_pre_softmax": not new,
            "moe_router_group_score": "sum",
            "moe_shared_expert_gate": False,
        }
        # Without groups, the field has no effect and its default.
        if grouped and not new:
            found["moe_router_group_score"] = "max"
        return found

    def _check_choice(self, topk: int, groups: int | None, best: int | None) -> None:
        """Check that both sides choose the same experts.

        Raises:
            ConfigError: they do not.
        """
        if self.version != "V3":
            return
        # Ours leaves a single weight as the score that it is.
        if topk < 2:
            raise ConfigError("a token that uses one expert has a weight of 1 in the class only")
        # The class always adds up two. If all groups may be used, their scores do not matter.
        if best and groups != best and topk // best != 2:
            raise ConfigError(
                f"a group is as good as its best {topk // best} experts here (--moe-router-topk / "
                "--moe-router-group-topk), and as its best 2 in the class"
            )

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        if model.num_experts is None:
            raise ConfigError("the class has experts, and this model has none")
        groups, best = model.moe_router_num_groups, model.moe_router_group_topk
        for name, value in self._list_fixed(grouped=groups is not None).items():
            if getattr(model, name) != value:
                raise make_refusal(model, name)
        self._check_choice(model.moe_router_topk, groups, best)
        width = ModelShape(model, 0, 0).expert_width
        shared = getattr(model, _SHARED)
        if not shared or shared % width:
            reason = f": the class has shared experts, each {width} wide"
            raise make_refusal(model, _SHARED, reason)
        # Several shared experts are one MLP, because each token uses all of them.
        experts = ModelShape(model, 0, 0).expert_layers
        first = model.num_layers - len(experts)
        if experts != frozenset(range(first, model.num_layers)):
            reason = ": only the first layers of the class may have an MLP"
            raise make_refusal(model, "moe_layer_freq", reason)
        found: dict[str, Any] = {
            "n_routed_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": width,
            "intermediate_size": model.ffn_hidden_size,
            "first_k_dense_replace": first,
            "n_shared_experts": shared // width,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            # One group allows all experts, as no group does.
            "n_group": groups or 1,
            "topk_group": best or 1,
            "norm_topk_prob": self.version == "V3",
        }
        if self.version == "V2":
            return found | {"topk_method": _METHODS[groups is None]}
        # The layer that predicts a second token is not trained here.
        return found | {"num_nextn_predict_layers": 0}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        expected = self.version == "V3"
        if hf["norm_topk_prob"] != expected:
            raise ConfigError(f"norm_topk_prob must be {expected} in Deepseek{self.version}")
        layers, first = int(hf["num_hidden_layers"]), int(hf["first_k_dense_replace"])
        if not 0 <= first < layers or hf.get("moe_layer_freq", 1) != 1:
            raise ConfigError(
                f"first_k_dense_replace {first} and moe_layer_freq {hf.get('moe_layer_freq', 1)} "
                f"of {layers} layers are not supported here"
            )
        topk, width = int(hf["num_experts_per_tok"]), int(hf["moe_intermediate_size"])
        number = int(hf["n_routed_experts"])
        if not 1 <= topk <= number:
            raise ConfigError(
                f"num_experts_per_tok {topk} must be from 1 to n_routed_experts {number}"
            )
        limited = True
        if self.version == "V2":
            if hf["topk_method"] not in _METHODS.values():
                raise ConfigError(
                    f"topk_method {hf['topk_method']} is not supported here, only "
                    f"{' and '.join(_METHODS.values())}"
                )
            # V2 Lite names groups, and its method does not use them.
            limited = hf["topk_method"] == _METHODS[False]
        groups = best = None
        if limited:
            groups, best = int(hf["n_group"]), int(hf["topk_group"])
            if groups < 1 or number % groups or not 1 <= best <= groups:
                raise ConfigError(
                    f"n_group {groups} must divide n_routed_experts {number}, and topk_group "
                    f"{best} must be from 1 to n_group"
                )
            # One group allows all experts, as no group does.
            if groups == 1:
                groups = best = None
        self._check_choice(topk, groups, best)
        factor: float | None = float(hf["routed_scaling_factor"])
        # None is our name of a factor that changes nothing.
        if factor == 1:
            factor = None
        return self._list_fixed(grouped=groups is not None) | {
            "num_experts": number,
            "moe_router_topk": topk,
            "moe_ffn_hidden_size": width,
            "ffn_hidden_size": int(hf["intermediate_size"]),
            "moe_layer_freq": describe_expert_layers(range(first, layers), layers),
            _SHARED: int(hf["n_shared_experts"]) * width,
            "moe_router_topk_scaling_factor": factor,
            "moe_router_num_groups": groups,
            "moe_router_group_topk": best,
        }
