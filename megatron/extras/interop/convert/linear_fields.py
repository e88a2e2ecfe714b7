"""Gated delta nets in classes of `transformers`: their fields, and the names of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.fields import (
    NO_DELTA_NETS,
    Rope,
    describe_chosen_layers,
    describe_setting,
    make_refusal,
)
from megatron.extras.interop.convert.packed import Packed
from megatron.model.shape import ModelShape

_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Fields with the same name in both."""
_LINEAR = "linear_attention"
_FULL = "full_attention"


@dataclass(frozen=True)
class LinearLayers:
    """The layers with a gated delta net, and its sizes."""

    fixed: Mapping[str, Any]
    """Our fields of this kind that have a fixed value in the class."""
    same: tuple[str, ...] = ()
    """Further fields with the same name in both."""
    time_step: str = "one"
    """How the class initialises dt_bias, which only a training from scratch needs."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        return tuple(name for name in NO_DELTA_NETS if name != "linear_time_step")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        layers = ModelShape(model, 0, 0).linear_layers
        if not layers:
            raise ConfigError("the class has gated delta nets, and this model has none")
        # Without a field or a constant, the output norm has that of the other norms.
        needed = {"linear_norm_epsilon": model.layernorm_epsilon, **self.fixed}
        for name, value in needed.items():
            if getattr(model, name) != value:
                raise make_refusal(model, name, f", only {describe_setting(name, value)}")
        # Both classes take the list in place of an interval.
        kinds = [(_FULL, _LINEAR)[at in layers] for at in range(model.num_layers)]
        same = {name: getattr(model, name) for name in (*_SIZES, *self.same)}
        return {"layer_types": kinds} | same

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        kinds = hf["layer_types"]
        unknown = sorted(set(kinds) - {_FULL, _LINEAR})
        if unknown or _LINEAR not in kinds:
            raise ConfigError(
                f"layer_types {', '.join(unknown or [_FULL])} are not supported here in this "
                f"class, only {_LINEAR} and {_FULL}"
            )
        # transformers accepts any sizes, and fails when it builds the model.
        found = {name: int(hf[name]) for name in _SIZES} | {name: hf[name] for name in self.same}
        keys, values = found["linear_num_key_heads"], found["linear_num_value_heads"]
        if min(found[name] for name in _SIZES) < 1 or values % keys:
            raise ConfigError(
                f"linear_num_value_heads {values} must be a multiple of linear_num_key_heads "
                f"{keys}, and all sizes of linear layers must be at least 1"
            )
        # A number would have to divide the layers evenly, and a list is always exact.
        chosen = [at for at, kind in enumerate(kinds) if kind == _LINEAR]
        return found | {
            **self.fixed,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": describe_chosen_layers(chosen, len(kinds)),
            "linear_time_step": self.time_step,
        }


@dataclass(frozen=True)
class OptionalRope(Rope):
    """Rotary positions of all layers with attention, or of none, as in Olmo-Hybrid."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        return (*super().model_fields, "no_rope_layers")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        shape = ModelShape(model, 0, 0)
        layers = set(range(model.num_layers)) - shape.linear_layers
        # Gated delta nets have no positions in any case.
        rotated = {shape.describe_layer(layer).rotary for layer in layers}
        if rotated == {False}:
            return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        if len(rotated) > 1:
            reason = ": all layers with attention have positions, or none has"
            raise make_refusal(model, "no_rope_layers", reason)
        return super().write(model)

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        # transformers gives a config.json without a base the base None, and rotates nothing then.
        if (hf.get("rope_parameters") or {}).get("rope_theta") is None:
            return {"no_rope_layers": ":"}
        return super().read(hf)


def _get_rows_per_key_head(shape: ModelShape) -> int:
    return _get_value_width(shape) // shape.config.linear_num_key_heads


def _get_heads_per_key_head(shape: ModelShape) -> int:
    return shape.config.linear_num_value_heads // shape.config.linear_num_key_heads


def _get_key_width(shape: ModelShape) -> int:
    return shape.config.linear_num_key_heads * shape.config.linear_key_head_dim


def _get_value_width(shape: ModelShape) -> int:
    return shape.config.linear_num_value_heads * shape.config.linear_value_head_dim


_get_key_heads = attrgetter("config.linear_num_key_heads")
_get_key_dim = attrgetter("config.linear_key_head_dim")
_get_head_dim = attrgetter("head_dim")
_get_hidden_size = attrgetter("config.hidden_size")

QWEN_PACKED = (
    # A head has its query before its gate.
    Packed(
        "self_attn.q_proj",
        {"self_attn.q_proj.query": _get_head_dim, "self_attn.q_proj.gate": _get_head_dim},
        lambda shape: shape.config.num_attention_heads,
        linear=False,
    ),
    # A key head has the values and the gates of all value heads that share it.
    Packed(
        "linear_attn.in_proj_qkvz",
        {
            "linear_attn.in_proj_qkvz.query": _get_key_dim,
            "linear_attn.in_proj_qkvz.key": _get_key_dim,
            "linear_attn.in_proj_qkvz.value": _get_rows_per_key_head,
            "linear_attn.in_proj_qkvz.gate": _get_rows_per_key_head,
        },
        _get_key_heads,
    ),
    Packed(
        "linear_attn.in_proj_ba",
        {
            "linear_attn.in_proj_ba.beta": _get_heads_per_key_head,
            "linear_attn.in_proj_ba.alpha": _get_heads_per_key_head,
        },
        _get_key_heads,
    ),
    # The channels are not interleaved here.
    Packed(
        "linear_attn.conv1d",
        {
            "linear_attn.conv1d.query": _get_key_width,
            "linear_attn.conv1d.key": _get_key_width,
            "linear_attn.conv1d.value": _get_value_width,
        },
    ),
)
"""The tensors of Qwen3-Next that hold several of our parameters."""
QWEN_LINEAR_MODULES = {
    "attention.query": "linear_attn.in_proj_qkvz.query",
    "attention.key": "linear_attn.in_proj_qkvz.key",
    "attention.value": "linear_attn.in_proj_qkvz.value",
    "attention.gate": "linear_attn.in_proj_qkvz.gate",
    "attention.beta": "linear_attn.in_proj_ba.beta",
    "attention.alpha": "linear_attn.in_proj_ba.alpha",
    "attention.query_convolution": "linear_attn.conv1d.query.weight",
    "attention.key_convolution": "linear_attn.conv1d.key.weight",
    "attention.value_convolution": "linear_attn.conv1d.value.weight",
    "attention.A_log": "linear_attn.A_log",
    "attention.dt_bias": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm",
    "attention.out": "linear_attn.out_proj",
}
"""Our module or parameter -> theirs, in layers with a gated delta net."""
OLMO_PACKED = (
    # A model in memory has one convolution, and published files have three.
    Packed(
        "linear_attn.conv1d",
        {
            "linear_attn.q_conv1d": _get_key_width,
            "linear_attn.k_conv1d": _get_key_width,
            "linear_attn.v_conv1d": _get_value_width,
        },
        in_files=False,
    ),
    # Layers with attention have no norm of this name.
    Packed("input_layernorm", {"attention_layer_norm": _get_hidden_size}, in_files=False),
    Packed(
        "post_attention_layernorm", {"feedforward_layer_norm": _get_hidden_size}, in_files=False
    ),
    # transformers 5.24 gives the norm after attention this name when it saves a model.
    Packed(
        "feedforward_layer_norm",
        {"post_attention_layernorm": _get_hidden_size},
        linear=False,
        in_files=False,
    ),
)
"""What a model of Olmo-Hybrid in memory has in place of what published files have."""
OLMO_LINEAR_MODULES = {
    "input_norm": "attention_layer_norm",
    "post_attention_norm": "feedforward_layer_norm",
    "attention.query": "linear_attn.q_proj",
    "attention.key": "linear_attn.k_proj",
    "attention.value": "linear_attn.v_proj",
    "attention.gate": "linear_attn.g_proj",
    "attention.beta": "linear_attn.b_proj",
    "attention.alpha": "linear_attn.a_proj",
    "attention.query_convolution": "linear_attn.q_conv1d.weight",
    "attention.key_convolution": "linear_attn.k_conv1d.weight",
    "attention.value_convolution": "linear_attn.v_conv1d.weight",
    "attention.A_log": "linear_attn.A_log",
    "attention.dt_bias": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.o_norm",
    "attention.out": "linear_attn.o_proj",
}
"""The same in published files of Olmo-Hybrid."""
