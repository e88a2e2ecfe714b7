"""Fields of `ModelConfig` and the fields of a configuration of `transformers` that mean the same.

Each class describes one such pair and converts it in both directions, so that export and import
cannot disagree.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from megatron.base.errors import ConfigError
from megatron.config.fields import all_fields
from megatron.config.model import ModelConfig, RopeScaling
from megatron.extras.interop.translators.compat_derived import describe_layers
from megatron.model.layer_parts import list_unused_fields
from megatron.model.shape import ModelShape

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_OF_ROPE_SCALING: dict[RopeScaling, dict[str, str]] = {
    "linear": {"rope_scaling_factor": "factor"},
    "llama3": {
        "rope_scaling_factor": "factor",
        "rope_low_freq_factor": "low_freq_factor",
        "rope_high_freq_factor": "high_freq_factor",
        "rope_original_length": "original_max_position_embeddings",
    },
    "yarn": {
        "rope_scaling_factor": "factor",
        "rope_original_length": "original_max_position_embeddings",
        "rope_beta_fast": "beta_fast",
        "rope_beta_slow": "beta_slow",
        "rope_truncate": "truncate",
        "rope_attention_factor": "attention_factor",
    },
}
"""Scaling -> our field -> their key in `rope_parameters`."""
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(ModelConfig)}


def _find_defaults(*beginnings: str) -> dict[str, Any]:
    """Return the default of each field of `ModelConfig` whose name begins with one of these."""
    return {name: value for name, value in _DEFAULTS.items() if name.startswith(beginnings)}


# The fields of a part that a model may lack -> their values in a model without it.
NO_EXPERTS = _find_defaults("num_experts", "moe_")
NO_DELTA_NETS = _find_defaults("experimental_attention_variant", "linear_")
NO_LATENTS = _find_defaults(
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
    *("qk_pos_emb_head_dim", "v_head_dim", "latent_norm_epsilon", "mscale"),
)
_FOLDED = {"parametrization", "base_width", "base_depth", "base_kv_channels"}
"""Fields whose factors an export multiplies into the weights. See `folding`."""
NOT_ARCHITECTURE = {
    *("seq_length", "hidden_dropout", "output_init_method_std", "linear_time_step"),
    *_FOLDED,
}
"""Fields that a class may lack. They do not change what a trained model computes."""


class Pair(Protocol):
    """One or several of our fields, and their fields with the same meaning."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """The fields of `ModelConfig` that the pair covers."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return their fields.

        Raises:
            ConfigError: they cannot express the model. The message names our flag.
        """
        ...

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return our fields.

        Raises:
            ConfigError: this trainer has no such part. The message names their field.
        """
        ...


@dataclass(frozen=True)
class Same:
    """A field with the same value on both sides."""

    name: str
    hf_name: str

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        return (self.name,)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        return {self.hf_name: getattr(model, self.name)}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        return {self.name: hf[self.hf_name]}


@dataclass(frozen=True)
class Cases:
    """A field of `transformers` whose values each mean certain values of `ModelConfig`.

    With a single case, it is a value that the class needs or always has.
    """

    hf_name: str
    cases: tuple[tuple[Any, Mapping[str, Any]], ...]
    """(their value, our values). The first one that fits is written."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        return tuple(dict.fromkeys(name for _, values in self.cases for name in values))

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        for hf_value, values in self.cases:
            if all(getattr(model, name) == value for name, value in values.items()):
                return {self.hf_name: hf_value}
        shown = " ".join(describe_setting(name, getattr(model, name)) for name in self.model_fields)
        raise ConfigError(f"{shown} has no equivalent in {self.hf_name}")

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        found = hf.get(self.hf_name)
        for hf_value, values in self.cases:
            if found == hf_value:
                return dict(values)
        known = ", ".join(str(value) for value, _ in self.cases)
        raise ConfigError(f"{self.hf_name} {found} is not supported here, only {known}")


@dataclass(frozen=True)
class Needed:
    """Our fields that have a fixed value in a class of `transformers`, and no field of theirs."""

    values: Mapping[str, Any]

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        return tuple(self.values)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        for name, value in self.values.items():
            if getattr(model, name) != value:
                fixed = describe_setting(name, value)
                if value is None:
                    fixed = f"no {fixed.split()[0]}"
                raise ConfigError(
                    f"the class has {fixed}, and this model has "
                    f"{describe_setting(name, getattr(model, name))}"
                )
        return {}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        return dict(self.values)


@dataclass(frozen=True)
class Derived:
    """A size that a class of `transformers` computes from others."""

    name: str
    compute: Callable[[ModelConfig], int]

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        return (self.name,)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        if getattr(model, self.name) != self.compute(model):
            raise make_refusal(model, self.name, f", only {self.compute(model)}")
        return {}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        return {}


@dataclass(frozen=True)
class HeadDim:
    """`head_dim`. Some classes have it only if a config.json names it, and derive it otherwise."""

    declared: bool = True
    """Whether the class declares the field."""

    model_fields = ("kv_channels",)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        derived = model.hidden_size // model.num_attention_heads
        if not self.declared and model.kv_channels == derived:
            return {}
        return {"head_dim": model.kv_channels}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        return {"kv_channels": hf.get("head_dim")}


@dataclass(frozen=True)
class Biases:
    """The linear layers with biases: `attention_bias` and `mlp_bias`."""

    attention: bool | None = None
    """Whether all projections of attention have biases. None: `attention_bias` gives it."""
    mlp: bool | None = None
    """Whether the MLP has biases. None: `mlp_bias` gives it."""
    qkv: bool = False
    """Whether the projections to queries, keys and values have biases in any case."""

    model_fields = ("add_bias_linear", "add_qkv_bias", "add_attention_bias", "add_mlp_bias")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        found = {}
        for part in ("attention", "mlp"):
            has_bias = getattr(model, f"add_{part}_bias")
            fixed = getattr(self, part)
            if fixed is None:
                found[f"{part}_bias"] = has_bias
            elif fixed != has_bias:
                raise _refuse_bias(f"add_{part}_bias", fixed)
        qkv = model.add_attention_bias or self.qkv
        if model.add_qkv_bias != qkv:
            raise _refuse_bias("add_qkv_bias", qkv)
        return found

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        attention = self.attention
        if attention is None:
            attention = bool(hf["attention_bias"])
        mlp = self.mlp
        if mlp is None:
            mlp = bool(hf["mlp_bias"])
        every = attention and mlp
        # The other flags have no effect if all layers have biases.
        return {
            "add_bias_linear": every,
            "add_qkv_bias": (attention or self.qkv) and not every,
            "add_attention_bias": attention and not every,
            "add_mlp_bias": mlp and not every,
        }


def _refuse_bias(name: str, there: bool) -> ConfigError:
    return ConfigError(
        f"the class has {describe_setting(name, there)}, and this model has "
        f"{describe_setting(name, not there)}"
    )


@dataclass(frozen=True)
class Rope:
    """The frequencies of the rotary embedding: `rope_parameters` of `transformers` 5."""

    partial: bool = False
    """Whether a part of each head's channels may be left as it is."""
    by_layer_type: bool = False
    """Whether they are given for full and sliding attention, which must then be equal."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        of_scaling = {name: None for each in _OF_ROPE_SCALING.values() for name in each}
        return ("rotary_base", "rotary_percent", "rope_scaling", *of_scaling)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        found: dict[str, Any] = {
            "rope_type": model.rope_scaling or "default",
            "rope_theta": model.rotary_base,
        }
        if model.rope_scaling is not None:
            names = _OF_ROPE_SCALING[model.rope_scaling]
            found |= {key: getattr(model, name) for name, key in names.items()}
        if self.partial:
            found["partial_rotary_factor"] = model.rotary_percent
        elif model.rotary_percent != 1:
            # The class would rotate all channels and ignore the field.
            raise ConfigError(f"--rotary-percent {model.rotary_percent} has no equivalent")
        if self.by_layer_type:
            # Two copies, so that a change of one does not change the other.
            return {"rope_parameters": {_FULL: dict(found), _SLIDING: dict(found)}}
        return {"rope_parameters": found}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        found = hf["rope_parameters"]
        # Ours are the same in every layer.
        if _FULL in found:
            if found[_FULL] != found[_SLIDING]:
                raise ConfigError(
                    f"rope_parameters differ between {_FULL} and {_SLIDING}, which is not "
                    "supported here"
                )
            found = found[_FULL]
        kind = found.get("rope_type", "default")
        if kind not in ("default", *_OF_ROPE_SCALING):
            raise ConfigError(
                f"rope_type {kind} is not supported here, only default, "
                f"{', '.join(_OF_ROPE_SCALING)}"
            )
        values = {
            "rotary_base": float(found["rope_theta"]),
            "rotary_percent": float(found.get("partial_rotary_factor") or 1.0),
        }
        if kind == "default":
            # Other fields stay at our defaults. Unused numbers must not make two models differ.
            return values
        if kind == "yarn":
            found = _complete_yarn(found, hf)
        for name, key in _OF_ROPE_SCALING[kind].items():
            # The factor of attention is None by default.
            convert = float if _DEFAULTS[name] is None else type(_DEFAULTS[name])
            values[name] = convert(found[key])
        return values | {"rope_scaling": kind}


def _complete_yarn(found: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of YaRN with the values that `transformers` uses by default."""
    factor = found["factor"]
    if factor is None:
        factor = hf["max_position_embeddings"] / found["original_max_position_embeddings"]
    log = math.log(max(1.0, factor))
    attention_factor = found.get("attention_factor")
    mscale = found.get("mscale")
    mscale_all_dim = found.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        # As in DeepSeek.
        attention_factor = (0.1 * mscale * log + 1) / (0.1 * mscale_all_dim * log + 1)
    elif attention_factor is None:
        attention_factor = 0.1 * log + 1
    return {
        "factor": factor,
        "original_max_position_embeddings": found["original_max_position_embeddings"],
        "beta_fast": found.get("beta_fast") or 32,
        "beta_slow": found.get("beta_slow") or 1,
        "truncate": found.get("truncate", True),
        "attention_factor": attention_factor,
    }


@dataclass(frozen=True)
class Training:
    """Dropout and initialisation, which change only a training that follows."""

    attention: str = "attention_dropout"
    """Their name of the dropout on the attention weights."""
    hidden: tuple[str, ...] = ()
    """Their names of the dropouts on the residual branches and the embedding. Many classes have
    none, and then the checkpoint's is not written."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """See `Pair`."""
        names = ("attention_dropout", "init_method_std")
        return (*names, "hidden_dropout") if self.hidden else names

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        return {
            self.attention: model.attention_dropout,
            "initializer_range": ModelShape(model, 0, 0).init_std,
            **dict.fromkeys(self.hidden, model.hidden_dropout),
        }

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        hidden = [float(hf[name]) for name in self.hidden] or [0.0]
        if len(set(hidden)) > 1:
            raise ConfigError(
                f"{' and '.join(self.hidden)} are {hidden}, and this trainer has one "
                "--hidden-dropout for all of them; give them one value in config.json"
            )
        return {
            "attention_dropout": float(hf[self.attention]),
            "init_method_std": float(hf["initializer_range"]),
            "hidden_dropout": hidden[0],
        }


@dataclass(frozen=True)
class Windows:
    """The layers with sliding-window attention: `layer_types` and `sliding_window`."""

    switch: bool = False
    """Whether `use_sliding_window` turns it on, as in Qwen 2."""
    always: bool = False
    """Whether the class needs a window, as OLMo 3 does."""

    model_fields = ("sliding_window", "full_attention_layers")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        shape = ModelShape(model, 0, 0)
        layers = [shape.describe_layer(index) for index in range(model.num_layers)]
        found: dict[str, Any] = {
            "layer_types": [_FULL if layer.window is None else _SLIDING for layer in layers],
            "sliding_window": model.sliding_window,
        }
        if self.always and model.sliding_window is None:
            # The size of the window does not matter if no layer has one.
            found["sliding_window"] = model.seq_length
        if self.switch:
            found["use_sliding_window"] = model.sliding_window is not None
            # `layer_types` is given, so this older field has no effect. It must not contradict it.
            found["max_window_layers"] = min(
                (index for index, layer in enumerate(layers) if layer.window is not None),
                default=model.num_layers,
            )
        return found

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        kinds = hf.get("layer_types") or []
        unknown = sorted(set(kinds) - {_FULL, _SLIDING})
        if unknown:
            raise ConfigError(f"layer_types {', '.join(unknown)} are not supported here")
        # `sliding_window` may have a number although no layer uses it.
        if _SLIDING not in kinds:
            return {"sliding_window": None, "full_attention_layers": None}
        full = [index for index, kind in enumerate(kinds) if kind == _FULL]
        return {
            "sliding_window": int(hf["sliding_window"]),
            "full_attention_layers": describe_layers(full, len(kinds)),
        }


@dataclass(frozen=True)
class LayersWithoutRope:
    """`no_rope_layers` of SmolLM3, which has a 1 for each layer that is rotated."""

    model_fields = ("no_rope_layers",)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        shape = ModelShape(model, 0, 0)
        rotated = [shape.describe_layer(index).rotary for index in range(model.num_layers)]
        return {"no_rope_layers": [int(each) for each in rotated]}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        rotated = hf["no_rope_layers"]
        return {
            "no_rope_layers": describe_layers(
                [index for index, each in enumerate(rotated) if not each], len(rotated)
            )
        }


def describe_setting(name: str, value: Any) -> str:
    """Return a field of `ModelConfig` as a flag."""
    return all_fields()[f"model.{name}"].spell(value)


def make_refusal(model: ModelConfig, name: str, more: str = "") -> ConfigError:
    """Return the error for a setting that their classes do not have."""
    return ConfigError(f"{describe_setting(name, getattr(model, name))} has no equivalent{more}")


def describe_expert_layers(chosen: Collection[int], num_layers: int) -> str:
    """Return a text for which `find_expert_layers` returns these layers, as in ([0]*1+[1]*15).

    Args:
        chosen: Numbers of the layers with experts.
        num_layers: Layers of the model.
    """
    if len(chosen) == num_layers:
        return "1"
    return describe_chosen_layers(chosen, num_layers)


def describe_chosen_layers(chosen: Collection[int], num_layers: int) -> str:
    """Return the list with a 1 for each of these layers, as in ([0]*1+[1]*15)."""
    flags = [int(number in chosen) for number in range(num_layers)]
    return "(" + "+".join(f"[{flag}]*{len(list(run))}" for flag, run in groupby(flags)) + ")"


def _normalise_latents(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of latent attention as `normalise_model` sets them."""
    if "latent" not in model.attention_kinds:
        return NO_LATENTS
    found: dict[str, Any] = {
        "latent_norm_epsilon": model.latent_norm_epsilon or model.layernorm_epsilon
    }
    if model.rope_scaling != "yarn":
        found |= {name: _DEFAULTS[name] for name in ("mscale", "mscale_all_dim")}
    return found


def normalise_model(model: ModelConfig) -> ModelConfig:
    """Return the same architecture with derived sizes filled in, and unused fields at defaults.

    Two descriptions of one architecture are then equal.
    """
    shape = ModelShape(model, 0, 0)
    changes: dict[str, Any] = {
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_query_groups": shape.query_groups,
        "kv_channels": shape.head_dim,
        "add_bias_linear": shape.has_attention_bias and shape.has_mlp_bias,
        "add_qkv_bias": shape.has_qkv_bias,
        "add_attention_bias": shape.has_attention_bias,
        "add_mlp_bias": shape.has_mlp_bias,
        "init_method_std": shape.init_std,
    }
    unused = list_unused_fields(model)
    if model.rope_scaling == "yarn":
        changes["rope_attention_factor"] = shape.rope_attention_factor
    if model.position_embedding_type == "absolute":
        changes["max_position_embeddings"] = shape.position_table_size
    else:
        # Only a learned table has a size.
        unused.append("max_position_embeddings")
    if model.position_embedding_type != "rotary":
        unused += [*Rope().model_fields, "no_rope_layers"]
    else:
        used = {} if model.rope_scaling is None else _OF_ROPE_SCALING[model.rope_scaling]
        every = {name for each in _OF_ROPE_SCALING.values() for name in each}
        unused += every - used.keys()
    if model.position_embedding_type == "rotary" and not any(
        shape.describe_layer(layer).rotary for layer in range(model.num_layers)
    ):
        unused += Rope().model_fields
    if model.sliding_window is None:
        unused.append("full_attention_layers")
    changes |= _normalise_latents(model)
    # A number of --linear-attention-freq and a list may choose the same layers.
    if shape.linear_layers:
        changes["linear_attention_freq"] = describe_chosen_layers(
            shape.linear_layers, model.num_layers
        )
        changes["linear_norm_epsilon"] = model.linear_norm_epsilon or model.layernorm_epsilon
        changes["linear_norm_placement"] = model.linear_norm_placement or model.norm_placement
    else:
        unused += NO_DELTA_NETS
    if model.num_experts is None:
        unused += NO_EXPERTS
    else:
        changes["moe_ffn_hidden_size"] = shape.expert_width
        # A factor of 1 is none.
        if model.moe_router_topk_scaling_factor == 1:
            unused.append("moe_router_topk_scaling_factor")
        if model.moe_router_num_groups is None:
            unused.append("moe_router_group_score")
        changes["moe_layer_freq"] = describe_expert_layers(shape.expert_layers, model.num_layers)
    changes |= {name: _DEFAULTS[name] for name in unused}
    return dataclasses.replace(model, **changes)
