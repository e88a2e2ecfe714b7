"""The architectures that both sides can express: their fields and the names of their tensors.

Each architecture is one table. Export and import read the same one. In this package, "our" names
are those of this trainer, and "their" names are those of `transformers`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.expert_fields import (
    ExpertFields,
    ExpertNames,
    ExpertPart,
    StackedExpertNames,
)
from megatron.extras.interop.convert.fields import (
    NO_DELTA_NETS,
    NO_EXPERTS,
    NO_LATENTS,
    Biases,
    Cases,
    Derived,
    HeadDim,
    LayersWithoutRope,
    Needed,
    Pair,
    Rope,
    Same,
    Training,
    Windows,
    normalise_model,
)
from megatron.extras.interop.convert.latent_fields import (
    LATENT_MODULES,
    DeepseekExperts,
    LatentRope,
    Latents,
)
from megatron.extras.interop.convert.linear_fields import (
    OLMO_LINEAR_MODULES,
    OLMO_PACKED,
    QWEN_LINEAR_MODULES,
    QWEN_PACKED,
    LinearLayers,
    OptionalRope,
)
from megatron.extras.interop.convert.packed import Packed, RowPart, divide_packed, join_packed
from megatron.model.shape import ModelShape

_USUAL_LENGTH = 2048
"""Tokens of a sample if neither config.json nor the user gives it."""
FusedOrder = Literal["separate", "thirds", "by head"]
"""How their file stores the projections to queries, keys and values.

separate: three tensors. thirds: one tensor with all queries, then all keys, then all values.
by head: one tensor with query, key and value of the first head, then those of the next head.
"""


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers` with the same parts as some models of this trainer."""

    model_type: str
    """Name of the architecture in config.json."""
    class_name: str
    pairs: tuple[Pair, ...]
    modules: Mapping[str, str]
    """Our module -> theirs. The names of a layer's modules begin after the layer's number."""
    layers: str
    """Their name of the list of layers."""
    qkv: tuple[str, ...]
    """Their modules with the projections to queries, keys and values."""
    fused: FusedOrder = "separate"
    transposed: frozenset[str] = frozenset()
    """Our modules whose matrices are [in, out] in theirs."""
    base: str = "model"
    """Prefix of their names that a file of the model without its head lacks."""
    not_stored: tuple[str, ...] = ()
    """Patterns of their tensors that hold no weights, such as tables of frequencies."""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Pattern of their tensors that an import leaves out -> what they are, for a warning."""
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Name inside a layer -> the fixed number that their tensor of this name holds."""
    hf_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of config.json, each with its only supported value."""
    experts: ExpertNames | None = None
    """Their names of the experts. None: the class has none."""
    linear_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The same as `modules`, in layers with a gated delta net only."""
    packed: tuple[Packed, ...] = ()
    """Their tensors that hold several of our parameters."""

    @property
    def converts_names(self) -> bool:
        """Whether a model of `transformers` in memory has other tensors than its files."""
        return self.experts is not None or bool(self.packed)

    def join(
        self, tensors: Iterable[tuple[str, Tensor]], model: ModelConfig
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors as files have them. See `ExpertNames.join`."""
        if self.experts is not None and model.num_experts is not None:
            tensors = self.experts.join(tensors, model.num_experts)
        return join_packed(self.packed, ModelShape(model, 0, 0), tensors)

    def divide(
        self, model: ModelConfig, name: str, size: tuple[int, ...]
    ) -> Mapping[str, ExpertPart | RowPart]:
        """Return the parts of a stored tensor by their names, or none if it is one tensor here."""
        if self.experts is not None and (parts := self.experts.divide(name, size)):
            return parts
        return divide_packed(self.packed, ModelShape(model, 0, 0), name)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of config.json that describe a model of this trainer.

        Raises:
            ConfigError: the class has no such part. The message names our flag.
        """
        model = normalise_model(model)
        found = dict(self.hf_fields)
        for pair in self.pairs:
            found |= pair.write(model)
        return found

    def read(self, hf: Mapping[str, Any], seq_length: int | None = None) -> ModelConfig:
        """Return our description of a config.json.

        Args:
            hf: The fields of config.json, with the defaults of its class.
            seq_length: Sequence length of the training that follows. Default: the largest that
                config.json allows, or 2048 if it does not say.

        Raises:
            ConfigError: this trainer has no such part. The message names their field.
        """
        found: dict[str, Any] = {}
        for pair in self.pairs:
            found |= pair.read(hf)
        # Learned positions bound the length too. Without either number, as in BLOOM, nothing does.
        longest = found.get("seq_length") or found.get("max_position_embeddings") or _USUAL_LENGTH
        found["seq_length"] = seq_length or longest
        for name, value in self.hf_fields.items():
            if hf.get(name, value) != value:
                raise ConfigError(f"{name} {hf[name]} is not supported here, only {value}")
        return ModelConfig(**found)


_SIZES: tuple[Pair, ...] = (
    Same("hidden_size", "hidden_size"),
    Same("num_layers", "num_hidden_layers"),
    Same("num_attention_heads", "num_attention_heads"),
)
# Our flag says untied, theirs tied.
_TIED = Cases(
    "tie_word_embeddings",
    (
        (True, {"untie_embeddings_and_output_weights": False}),
        (False, {"untie_embeddings_and_output_weights": True}),
    ),
)
_INPUT_NORM = {"norm_placement": "input"}
_NO_QK_NORM = {"qk_norm": None}
_ONE_STREAM = {"parallel_residual": False, "embed_layernorm": False}
_EVERY_TOKEN = {"sliding_window": None, "full_attention_layers": None}
_EVERY_ROPE = {"no_rope_layers": None}
_NO_SINKS = {"softmax_type": "vanilla"}
_PLAIN = {"attention_output_gate": False, "apply_layernorm_1p": False}
_USUAL_PARTS = NO_EXPERTS | NO_DELTA_NETS | NO_LATENTS | _EVERY_TOKEN | _NO_SINKS | _PLAIN
_RMS = {"normalization": "RMSNorm", "norm_bias": True}
_LAYER_NORM = {"normalization": "LayerNorm", "norm_bias": True}
_NO_LEARNED_TABLE = {"max_position_embeddings": None}
_ROTARY = {"position_embedding_type": "rotary", **_NO_LEARNED_TABLE}
# A class without rotary positions needs these fields at their defaults, as `normalise_model`
# sets them.
_NO_ROTATION = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name in (*Rope().model_fields, "no_rope_layers")
}
_PLAIN_MLP = {"glu_activation": None}
_ALL_BIASES = Biases(attention=True, mlp=True)
# The activation of a gated MLP is that of the gate. `normalise_model` sets the unused fields to
# these defaults.
_GATED = {"glu_activation": "swiglu", "activation": "gelu", "bias_gelu_fusion": True}
_SILU = Cases("hidden_act", (("silu", _GATED),))

_LLAMA_SIZES: tuple[Pair, ...] = (
    *_SIZES,
    Same("num_query_groups", "num_key_value_heads"),
    Same("layernorm_epsilon", "rms_norm_eps"),
    Same("seq_length", "max_position_embeddings"),
    _TIED,
    Training(),
    Needed(_ROTARY | _RMS | _ONE_STREAM),
)
_LLAMA_MODULES = {
    "embedding.word": "model.embed_tokens",
    "head": "lm_head",
    "head.norm": "model.norm",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LLAMA_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OLMO_MODULES = _LLAMA_MODULES | {
    # Llama has this name for the norm before the MLP. In OLMo 2 it follows attention.
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
# Older versions of transformers stored the table of frequencies in each layer.
_FREQUENCIES = (r".*rotary_emb\.inv_freq",)
_OLMO_NORMS = {"norm_placement": "output", "qk_norm": "full"}
_QWEN_LINEAR = {"linear_norm_placement": "input", "linear_allow_neg_eigval": False}
# The class has a constant for the output norm.
_OLMO_LINEAR = {"linear_norm_placement": "input", "linear_norm_epsilon": 1e-5}


_LLAMA_PARTS = {
    **_INPUT_NORM,
    **_NO_QK_NORM,
    "sliding_window": None,
    **_EVERY_ROPE,
    "full_attention_layers": None,
    **_NO_SINKS,
    **_PLAIN,
}
"""What a class like Llama has, unless a field of config.json gives it."""
_HEAD_DIM = HeadDim()
_DERIVED_SIZE = HeadDim(declared=False)
_ROPE = Rope()
_NO_BIASES = Biases(attention=False, mlp=False)
_ATTENTION_BIAS = Biases(mlp=False)


def _make_llama_like(
    model_type: str,
    class_name: str,
    biases: Biases,
    *layers: Pair,
    head_dim: Pair | None = _HEAD_DIM,
    rope: Pair = _ROPE,
    activation: Pair = _SILU,
    parts: Mapping[str, Any] | None = None,
    modules: Mapping[str, str] = _LLAMA_MODULES,
    qkv: tuple[str, ...] = _LLAMA_QKV,
    experts: tuple[ExpertFields | DeepseekExperts, ExpertNames] | None = None,
    latents: Pair | None = None,
    linear: LinearLayers | None = None,
    **more: Any,
) -> Architecture:
    """Return an architecture with the names of Llama, and its sizes.

    Args:
        model_type: See `Architecture`.
        class_name: See `Architecture`.
        biases: The biases.
        layers: What differs between layers, such as windows.
        head_dim: The width of a head. None: `latents` has it.
        rope: The rotary positions.
        activation: The activation of MLPs.
        parts: What differs from `_LLAMA_PARTS`.
        modules: Our modules -> theirs, without those of experts.
        qkv: See `Architecture`.
        experts: Fields and names of experts. None: the class has none.
        latents: The fields of latent attention. None: the class has none.
        linear: The fields of gated delta nets. None: the class has none.
        more: Other fields of `Architecture`.
    """
    mlp: tuple[Pair, ...] = (Same("ffn_hidden_size", "intermediate_size"), Needed(NO_EXPERTS))
    names = None
    if experts is not None:
        fields, names = experts
        mlp = (fields,)
        modules = {**modules, **names.modules}
    pairs: list[Pair] = [rope, *layers, activation, biases]
    if head_dim is not None:
        pairs.insert(0, head_dim)
    given = {name for pair in pairs for name in pair.model_fields}
    fixed = _LLAMA_PARTS | dict(parts or {})
    needed = Needed({name: value for name, value in fixed.items() if name not in given})
    others: tuple[Pair, ...] = (linear or Needed(NO_DELTA_NETS), latents or Needed(NO_LATENTS))
    return Architecture(
        model_type,
        class_name,
        (*_LLAMA_SIZES, *mlp, *pairs, needed, *others),
        modules,
        "model.layers",
        qkv,
        not_stored=_FREQUENCIES,
        experts=names,
        **more,
    )


# Classes without a field for these sizes derive them.
_DERIVED_HEAD_DIM = Derived("kv_channels", lambda m: m.hidden_size // m.num_attention_heads)
_DERIVED_FFN = Derived("ffn_hidden_size", lambda m: 4 * m.hidden_size)
_ONE_HEAD_A_GROUP = Derived("num_query_groups", lambda m: m.num_attention_heads)


def _make_deepseek(version: Literal["V2", "V3"], **more: Any) -> Architecture:
    """Return an architecture with latent attention."""
    return _make_llama_like(
        f"deepseek_{version.lower()}",
        f"Deepseek{version}ForCausalLM",
        _NO_BIASES,
        head_dim=None,
        rope=LatentRope(),
        modules=_LLAMA_MODULES | LATENT_MODULES,
        experts=(DeepseekExperts(version), ExpertNames()),
        latents=Latents(),
        **more,
    )


ARCHITECTURES: tuple[Architecture, ...] = (
    _make_llama_like("llama", "LlamaForCausalLM", Biases()),
    _make_llama_like(
        "mistral", "MistralForCausalLM", _NO_BIASES, Same("sliding_window", "sliding_window")
    ),
    _make_llama_like(
        "qwen3",
        "Qwen3ForCausalLM",
        _ATTENTION_BIAS,
        Windows(switch=True),
        parts={"qk_norm": "head"},
    ),
    _make_llama_like(
        "qwen2",
        "Qwen2ForCausalLM",
        Biases(attention=False, mlp=False, qkv=True),
        Windows(switch=True),
        head_dim=_DERIVED_SIZE,
    ),
    _make_llama_like(
        "smollm3",
        "SmolLM3ForCausalLM",
        Biases(),
        Windows(switch=True),
        LayersWithoutRope(),
        head_dim=_DERIVED_SIZE,
    ),
    _make_llama_like(
        "olmo2",
        "Olmo2ForCausalLM",
        _ATTENTION_BIAS,
        head_dim=_DERIVED_SIZE,
        parts=_OLMO_NORMS,
        modules=_OLMO_MODULES,
    ),
    _make_llama_like(
        "olmo3",
        "Olmo3ForCausalLM",
        _ATTENTION_BIAS,
        Windows(always=True),
        head_dim=_DERIVED_SIZE,
        rope=Rope(by_layer_type=True),
        parts=_OLMO_NORMS,
        modules=_OLMO_MODULES,
    ),
    _make_llama_like(
        "apertus",
        "ApertusForCausalLM",
        _ATTENTION_BIAS,
        head_dim=_DERIVED_SIZE,
        activation=Cases(
            "hidden_act",
            (
                ("xielu", _PLAIN_MLP | {"activation": "xielu", "bias_gelu_fusion": True}),
                # The Apertus models have xIELU. Others with squared ReLU fit into the same class.
                ("relu2", _PLAIN_MLP | {"activation": "squared_relu", "bias_gelu_fusion": True}),
            ),
        ),
        parts={"qk_norm": "head"},
        modules=_LLAMA_MODULES
        | {
            "input_norm": "attention_layernorm",
            "post_attention_norm": "feedforward_layernorm",
            "mlp.activation": "mlp.act_fn",
        },
        # The class stores these two numbers of xIELU as tensors, although they are not trained.
        constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
    ),
    _make_llama_like(
        "olmoe",
        "OlmoeForCausalLM",
        _ATTENTION_BIAS,
        head_dim=_DERIVED_SIZE,
        parts={"qk_norm": "full"},
        hf_fields={"clip_qkv": None},
        experts=(ExpertFields("num_experts", "num_local_experts"), ExpertNames()),
    ),
    _make_llama_like(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _ATTENTION_BIAS,
        parts={"qk_norm": "head"},
        hf_fields={"use_sliding_window": False},
        experts=(ExpertFields("num_experts", "num_local_experts", with_mlp=True), ExpertNames()),
    ),
    _make_llama_like(
        "mixtral",
        "MixtralForCausalLM",
        _NO_BIASES,
        Same("sliding_window", "sliding_window"),
        hf_fields={"router_jitter_noise": 0.0},
        experts=(
            ExpertFields("num_local_experts", "num_experts", normalised=True),
            ExpertNames("w1", "w3", "w2", "block_sparse_moe"),
        ),
    ),
    _make_llama_like(
        "gpt_oss",
        "GptOssForCausalLM",
        Biases(mlp=True),
        Windows(always=True),
        activation=Needed(_GATED | {"glu_activation": "clamped_swiglu"}),
        parts={"softmax_type": "learnable"},
        modules=_LLAMA_MODULES | {"attention.sink": "self_attn.sinks"},
        hf_fields={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        experts=(
            ExpertFields("num_local_experts", "num_experts", normalised=True),
            StackedExpertNames(),
        ),
    ),
    _make_deepseek(
        "V2",
        hf_fields={"attention_bias": False, "mlp_bias": False, "scoring_func": "softmax"},
    ),
    _make_deepseek(
        "V3",
        hf_fields={"attention_bias": False, "rope_interleave": True, "scoring_func": "sigmoid"},
        # The class does not read it either.
        left_out={r"model\.layers\.61\..*": "a layer that predicts a second token"},
    ),
    _make_llama_like(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _ATTENTION_BIAS,
        rope=Rope(partial=True),
        parts={"qk_norm": "head", "attention_output_gate": True, "apply_layernorm_1p": True},
        modules=_LLAMA_MODULES
        | {
            "attention.gate": "self_attn.q_proj.gate",
            "mlp.shared.gate": "mlp.shared_expert.gate_proj",
            "mlp.shared.up": "mlp.shared_expert.up_proj",
            "mlp.shared.down": "mlp.shared_expert.down_proj",
            "mlp.shared_gate": "mlp.shared_expert_gate.weight",
        },
        experts=(
            ExpertFields("num_experts", "num_local_experts", with_mlp=True, shared=True),
            ExpertNames(),
        ),
        linear=LinearLayers(_QWEN_LINEAR),
        qkv=("self_attn.q_proj.query", *_LLAMA_QKV[1:]),
        linear_modules=QWEN_LINEAR_MODULES,
        packed=QWEN_PACKED,
        left_out={r"mtp\..*": "a layer that predicts further tokens"},
    ),
    _make_llama_like(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        _ATTENTION_BIAS,
        head_dim=_DERIVED_SIZE,
        rope=OptionalRope(),
        parts=_OLMO_NORMS,
        modules=_OLMO_MODULES,
        linear=LinearLayers(_OLMO_LINEAR, ("linear_allow_neg_eigval",), "log-uniform"),
        linear_modules=OLMO_LINEAR_MODULES,
        packed=OLMO_PACKED,
    ),
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        (
            Same("hidden_size", "n_embd"),
            Same("num_layers", "n_layer"),
            Same("num_attention_heads", "n_head"),
            Same("ffn_hidden_size", "n_inner"),
            Same("layernorm_epsilon", "layer_norm_epsilon"),
            Same("max_position_embeddings", "n_positions"),
            _ONE_HEAD_A_GROUP,
            _DERIVED_HEAD_DIM,
            _TIED,
            Training("attn_pdrop", ("resid_pdrop", "embd_pdrop")),
            Cases(
                "activation_function",
                (
                    ("gelu_new", {"activation": "gelu", "bias_gelu_fusion": True}),
                    ("gelu", {"activation": "gelu", "bias_gelu_fusion": False}),
                ),
            ),
            _ALL_BIASES,
            Needed(_LAYER_NORM | _PLAIN_MLP | _INPUT_NORM | _NO_QK_NORM),
            Needed(_USUAL_PARTS | _ONE_STREAM | _NO_ROTATION),
            Needed({"position_embedding_type": "absolute"}),
        ),
        {
            "embedding.word": "transformer.wte",
            "embedding.position": "transformer.wpe.weight",
            "head": "lm_head",
            "head.norm": "transformer.ln_f",
            "input_norm": "ln_1",
            "post_attention_norm": "ln_2",
            "attention.out": "attn.c_proj",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        "transformer.h",
        ("attn.c_attn",),
        "thirds",
        # Its Conv1D multiplies from the other side than a linear layer.
        frozenset({"attention.qkv", "attention.out", "mlp.up", "mlp.down"}),
        base="transformer",
        # The causal mask. It has the name of a bias.
        not_stored=(r".*\.attn\.(masked_)?bias",),
        hf_fields={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
    ),
    Architecture(
        "bloom",
        "BloomForCausalLM",
        (
            Same("hidden_size", "hidden_size"),
            Same("num_layers", "n_layer"),
            Same("num_attention_heads", "n_head"),
            Same("layernorm_epsilon", "layer_norm_epsilon"),
            _DERIVED_HEAD_DIM,
            _DERIVED_FFN,
            _ONE_HEAD_A_GROUP,
            _TIED,
            Training(hidden=("hidden_dropout",)),
            _ALL_BIASES,
            Needed(_LAYER_NORM | _PLAIN_MLP | _INPUT_NORM | _NO_QK_NORM),
            Needed({"activation": "gelu", "bias_gelu_fusion": True}),
            Needed(_USUAL_PARTS | _NO_ROTATION | _NO_LEARNED_TABLE),
            Needed({"embed_layernorm": True, "parallel_residual": False}),
            Needed({"position_embedding_type": "alibi"}),
        ),
        {
            "embedding.word": "transformer.word_embeddings",
            "embedding.norm": "transformer.word_embeddings_layernorm",
            "head": "lm_head",
            "head.norm": "transformer.ln_f",
            "input_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attention.out": "self_attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        "transformer.h",
        ("self_attention.query_key_value",),
        "by head",
        base="transformer",
        hf_fields={"apply_residual_connection_post_layernorm": False},
    ),
    Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        (
            *_SIZES,
            Same("ffn_hidden_size", "intermediate_size"),
            Same("layernorm_epsilon", "layer_norm_eps"),
            Same("seq_length", "max_position_embeddings"),
            _DERIVED_HEAD_DIM,
            _ONE_HEAD_A_GROUP,
            _TIED,
            Training(hidden=("hidden_dropout",)),
            Rope(partial=True),
            Cases(
                "hidden_act",
                (
                    ("gelu", {"activation": "gelu", "bias_gelu_fusion": False}),
                    ("gelu_new", {"activation": "gelu", "bias_gelu_fusion": True}),
                    # Another name of the tanh form. It is read, and `gelu_new` is written.
                    ("gelu_fast", {"activation": "gelu", "bias_gelu_fusion": True}),
                ),
            ),
            Cases(
                "use_parallel_residual",
                ((True, {"parallel_residual": True}), (False, {"parallel_residual": False})),
            ),
            Needed(_LAYER_NORM | _PLAIN_MLP | _INPUT_NORM | _NO_QK_NORM),
            Biases(mlp=True),
            Needed(_USUAL_PARTS | _EVERY_ROPE),
            Needed(_ROTARY | {"embed_layernorm": False}),
        ),
        {
            "embedding.word": "gpt_neox.embed_in",
            "head": "embed_out",
            "head.norm": "gpt_neox.final_layer_norm",
            "input_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attention.out": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        "gpt_neox.layers",
        ("attention.query_key_value",),
        "by head",
        base="gpt_neox",
        not_stored=(*_FREQUENCIES, r".*\.attention\.(masked_)?bias"),
    ),
)
"""All architectures. The first one that can express a model is written."""


def choose_architecture(model: ModelConfig, wanted: str | None = None) -> Architecture:
    """Return the architecture that can express a model.

    Args:
        model: The model.
        wanted: The model type to write. None takes the first that fits.

    Raises:
        ConfigError: none can express it, or the wanted one does not exist or cannot. The message
            has the reason for each.
    """
    reasons = []
    for architecture in ARCHITECTURES:
        if wanted not in (None, architecture.model_type):
            continue
        try:
            architecture.write(model)
        except ConfigError as error:
            reasons.append(f"{architecture.model_type}: {error}")
            continue
        return architecture
    # No architecture was tried, so the name is wrong and not the model.
    if not reasons:
        known = ", ".join(each.model_type for each in ARCHITECTURES)
        raise ConfigError(f"--architecture {wanted} is unknown; give one of {known}.")
    if wanted is not None:
        raise ConfigError(
            f"--architecture {wanted} cannot express this model; give another one, or leave out "
            f"the flag:\n  {reasons[0]}"
        )
    raise ConfigError(
        "no architecture of transformers can express this model:\n  " + "\n  ".join(reasons)
    )


def find_architecture(model_type: str) -> Architecture:
    """Return the architecture that config.json names.

    Raises:
        ConfigError: it is not supported.
    """
    for architecture in ARCHITECTURES:
        if architecture.model_type == model_type:
            return architecture
    known = ", ".join(each.model_type for each in ARCHITECTURES)
    raise ConfigError(f"model_type {model_type} is not supported; supported are {known}.")
