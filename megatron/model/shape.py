"""Every size of the network. All of them are derived here from `ModelConfig`."""

import math
from dataclasses import dataclass
from typing import assert_never

from megatron.config.layer_choice import choose_layers, find_expert_layers, find_linear_layers
from megatron.config.model import AttentionKind, MLPKind, ModelConfig, NormPlacement


@dataclass(frozen=True)
class LayerDescription:
    """The settings that may differ between layers. The kinds determine the parameters."""

    number: int
    """Number of the layer in the complete model, from 0."""
    rotary: bool
    """Whether its queries and keys are rotated by their positions."""
    window: int | None
    """Number of tokens that a token attends to, itself included. None: no limit."""
    attention: AttentionKind = "dot_product"
    mlp: MLPKind = "dense"
    norms: NormPlacement = "input"
    """Where attention and MLP have their norms."""

    @property
    def experts(self) -> bool:
        """Whether it has experts in place of an MLP."""
        return self.mlp == "experts"


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the modules are built from, named as in docs/architecture.md, "Notation"."""

    config: ModelConfig
    vocab_size: int
    """Number of real token ids."""
    padded_vocab_size: int
    """Rows of the embedding after padding. The padding is never trained, saved or predicted."""

    @property
    def head_dim(self) -> int:
        """Width d of a query and of a key of an attention head."""
        if self.attention == "latent":
            return self.config.qk_head_dim + self.config.qk_pos_emb_head_dim
        return self.config.kv_channels or self.config.hidden_size // self.config.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Width of a value of an attention head."""
        if self.attention == "latent":
            return self.config.v_head_dim
        return self.head_dim

    @property
    def gate_dim(self) -> int:
        """Width of the gate of an attention head's result, 0 without a gate."""
        return self.value_dim * self.config.attention_output_gate

    @property
    def query_groups(self) -> int:
        """Number of key and value heads. Without grouped queries, it is the number of heads."""
        return self.config.num_query_groups or self.config.num_attention_heads

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.has_attention_bias or self.config.add_qkv_bias

    @property
    def has_attention_bias(self) -> bool:
        """Whether all projections of attention have biases."""
        return self.config.add_bias_linear or self.config.add_attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the linear layers of the MLP have biases."""
        return self.config.add_bias_linear or self.config.add_mlp_bias

    @property
    def ffn_hidden_size(self) -> int:
        """Inner width f of the MLP."""
        return self.config.ffn_hidden_size or 4 * self.config.hidden_size

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.config.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def expert_layers(self) -> frozenset[int]:
        """Numbers of the layers with experts."""
        if self.config.num_experts is None:
            return frozenset()
        return find_expert_layers(self.config.moe_layer_freq, self.config.num_layers)

    @property
    def linear_layers(self) -> frozenset[int]:
        """Numbers of the layers with a gated delta net in place of attention."""
        frequency = self.config.linear_attention_freq
        if len(self.config.attention_kinds) == 1 or frequency is None:
            return frozenset()
        return find_linear_layers(frequency, self.config.num_layers)

    @property
    def position_table_size(self) -> int:
        """Rows of the table of learned positions, 0 without such a table."""
        match self.config.position_embedding_type:
            case "absolute":
                return self.config.max_position_embeddings or self.config.seq_length
            case "rotary" | "alibi":
                return 0
            case _:
                assert_never(self.config.position_embedding_type)

    @property
    def has_alibi(self) -> bool:
        """Whether distances give a bias to the logits of attention."""
        return self.config.position_embedding_type == "alibi"

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated, 0 without rotary positions."""
        match self.config.position_embedding_type:
            case "absolute" | "alibi":
                return 0
            case "rotary" if self.attention == "latent":
                return self.config.qk_pos_emb_head_dim
            case "rotary":
                return int(self.head_dim * self.config.rotary_percent)
            case _:
                assert_never(self.config.position_embedding_type)

    @property
    def rope_attention_factor(self) -> float:
        """Factor on rotated queries and on rotated keys, 1 without YaRN.

        Source: https://arxiv.org/abs/2309.00071, section 3.4. Divisors of at most 1 need none.
        """
        config = self.config
        if config.rope_scaling != "yarn":
            return 1.0
        if config.rope_attention_factor is not None:
            return config.rope_attention_factor
        if self.attention != "latent":
            return self._scale_by_yarn(1.0)
        return self._scale_by_yarn(config.mscale) / self._scale_by_yarn(config.mscale_all_dim)

    @property
    def latent_logit_factor(self) -> float:
        """Factor on the logits of latent attention, 1 without YaRN.

        Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 4.3, and its configuration.
        """
        if self.config.rope_scaling != "yarn":
            return 1.0
        return self._scale_by_yarn(self.config.mscale_all_dim) ** 2

    def _scale_by_yarn(self, factor: float) -> float:
        """Return 0.1 x factor x ln(divisor of the frequencies) + 1."""
        return 0.1 * factor * math.log(max(1.0, self.config.rope_scaling_factor)) + 1.0

    @property
    def attention(self) -> AttentionKind:
        """The kind of the layers that have attention."""
        # Each such layer of a model has the same kind.
        return self.config.attention_kinds[0]

    def describe_layer(self, index: int) -> LayerDescription:
        """Return the description of layer number `index` of the complete model, from 0."""
        config = self.config
        mlp: MLPKind = "experts" if index in self.expert_layers else "dense"
        if index in self.linear_layers:
            norms = config.linear_norm_placement or config.norm_placement
            return LayerDescription(index, False, None, config.attention_kinds[1], mlp, norms)
        return LayerDescription(
            number=index,
            rotary=self.rotary_dim > 0
            and index not in _choose_layers(config.no_rope_layers, config.num_layers),
            window=None
            if index in _choose_layers(config.full_attention_layers, config.num_layers)
            else config.sliding_window,
            attention=self.attention,
            mlp=mlp,
            norms=config.norm_placement,
        )

    @property
    def init_std(self) -> float:
        """Standard deviation of the normal initialisation.

        The flag gives a number, or the name of a formula of the hidden size h. "small" is
        sqrt(2 / (5 h)) (https://arxiv.org/abs/1910.05895). "megatron" is sqrt(1 / (3 h))
        (https://arxiv.org/abs/2201.11990).
        """
        std = self.config.init_method_std
        h = self.config.hidden_size
        if not isinstance(std, str):
            return float(std)
        return {"small": math.sqrt(2 / (5 * h)), "megatron": math.sqrt(1 / (3 * h))}[std]

    @property
    def matrix_init_std(self) -> float:
        """Standard deviation of the matrices of the layers. It falls with the width ratio."""
        return self.init_std / math.sqrt(self.width_ratio)

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the projections that write into the residual stream.

        The default is `init_std` / sqrt(2 l) for l layers (https://arxiv.org/abs/1909.08053).
        "wang" is 2 / (l sqrt(h)) (https://arxiv.org/abs/2204.06745). The width ratio divides it as
        in `matrix_init_std`. With completep, a factor on the residual branches takes the place of
        sqrt(2 l).
        """
        if self.config.parametrization == "completep":
            return self.matrix_init_std
        return self._base_output_init_std / math.sqrt(self.width_ratio)

    @property
    def _base_output_init_std(self) -> float:
        std = self.config.output_init_method_std
        layers = self.config.num_layers
        if std is None:
            return self.init_std / math.sqrt(2.0 * layers)
        if not isinstance(std, str):
            return float(std)
        return {"wang": 2 / (layers * math.sqrt(self.config.hidden_size))}[std]

    @property
    def width_ratio(self) -> float:
        """Hidden size divided by that of the base model, 1 without one."""
        if self.config.base_width is None or self.config.parametrization == "standard":
            return 1.0
        return self.config.hidden_size / self.config.base_width

    @property
    def depth_ratio(self) -> float:
        """Number of layers divided by that of the base model, 1 without completep."""
        match self.config.parametrization:
            case "standard" | "mup":
                return 1.0
            case "completep":
                return self.config.num_layers / (self.config.base_depth or self.config.num_layers)
            case _:
                assert_never(self.config.parametrization)

    @property
    def output_factor(self) -> float:
        """Factor on the output of the final norm, which the output matrix multiplies."""
        return 1.0 / self.width_ratio

    @property
    def residual_factor(self) -> float:
        """Factor on what attention and MLP add to the residual stream."""
        return 1.0 / self.depth_ratio

    @property
    def query_factor(self) -> float:
        """Factor on the queries, after their norm."""
        base = self.config.base_kv_channels
        if base is None or self.config.parametrization == "standard":
            return 1.0
        return math.sqrt(base / self.head_dim)


def _choose_layers(text: str | None, num_layers: int) -> frozenset[int]:
    """Return the numbers of the layers that a text such as "3::4" chooses. None chooses none."""
    if text is None:
        return frozenset()
    return choose_layers(text, num_layers)
