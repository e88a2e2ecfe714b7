"""Settings of the architecture. They determine the meaning of a checkpoint's weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, PROBABILITY, Range

PositionEmbedding = Literal["absolute", "rotary", "alibi"]
Normalization = Literal["LayerNorm", "RMSNorm"]
GLU = Literal["swiglu", "geglu", "reglu", "liglu", "clamped_swiglu"]
Activation = Literal["gelu", "squared_relu", "xielu"]
QKNorm = Literal["head", "full"]
NormPlacement = Literal["input", "output"]
RopeScaling = Literal["linear", "llama3", "yarn"]
RouterScore = Literal["softmax", "sigmoid"]
GroupScore = Literal["sum", "max"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Parametrization = Literal["standard", "mup", "completep"]
AttentionVariant = Literal["gated_delta_net"]
TimeStep = Literal["one", "log-uniform"]
AttentionKind = Literal["dot_product", "latent", "gated_delta_net"]
"""Kinds of attention. A layer has one of them, whichever flags it follows from. Code asks for
`ModelConfig.attention_kinds` or `ModelShape.describe_layer`, and not for these flags."""
ATTENTION_FIELDS: dict[AttentionKind, str] = {
    "latent": "model.multi_latent_attention",
    "gated_delta_net": "model.experimental_attention_variant",
}
"""Kind of attention -> the field that asks for it. dot_product is the default."""
MLPKind = Literal["dense", "experts"]
DROPOUT_STEPS = 1 << 16
"""A probability of dropout is rounded to a multiple of 1 / DROPOUT_STEPS."""


@dataclass(frozen=True)
class ModelConfig:
    """Settings of the network's architecture and initialisation."""

    num_layers: Annotated[int, Range("[1, 1e6]")]
    """Number of transformer layers."""
    hidden_size: Annotated[int, Range("[1, 1e9]")]
    """Width h of the residual stream."""
    num_attention_heads: Annotated[int, Range("[1, 1e6]")]
    """Number of attention (query) heads."""
    seq_length: Annotated[int, Range("[1, 1e9]")]
    """Tokens in a training sample, s."""
    ffn_hidden_size: Annotated[int | None, Range("[1, 1e9]")] = None
    """Inner width of the MLP. Default: 4 x hidden size, also with a GLU. With a GLU, set it
    yourself to about 8/3 x hidden size."""
    num_query_groups: Annotated[int | None, Range("[1, 1e9]")] = None
    """Key/value heads of grouped-query attention (https://arxiv.org/abs/2305.13245). Default: one
    for each attention head."""
    kv_channels: Annotated[int | None, Range("[1, 1e9]")] = None
    """Width of one attention head. Default: hidden size / number of attention heads."""
    max_position_embeddings: Annotated[int | None, Range("[1, 1e9]")] = None
    """Size of the table of learned positions. It must be at least the sequence length. Default: the
    sequence length."""
    position_embedding_type: PositionEmbedding = "absolute"
    """absolute: learned table (GPT-2). rotary: RoPE (https://arxiv.org/abs/2104.09864). alibi:
    linear biases (https://arxiv.org/abs/2108.12409)."""
    rotary_base: Annotated[float, POSITIVE] = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float, Range("(0, 1]")] = 1.0
    """Fraction of each head's channels that is rotated, 0 < p <= 1."""
    rope_scaling: RopeScaling | None = None
    """Scale the rotary frequencies for longer contexts. linear: divide all by the factor
    (https://arxiv.org/abs/2306.15595). llama3: divide the low ones, leave the high ones, and
    interpolate those between (https://arxiv.org/abs/2407.21783). yarn: the same with another
    interpolation, and larger logits (https://arxiv.org/abs/2309.00071). Default: no scaling."""
    rope_scaling_factor: Annotated[float, POSITIVE] = 8.0
    """Divisor of the scaled rotary frequencies."""
    rope_low_freq_factor: Annotated[float, POSITIVE] = 1.0
    """llama3: frequencies with fewer turns than this in the original length are divided."""
    rope_high_freq_factor: Annotated[float, POSITIVE] = 4.0
    """llama3: frequencies with more turns than this in the original length are left as they are."""
    rope_original_length: int = 8192
    """llama3, yarn: sequence length in tokens of the training before the scaling. The turns of each
    frequency are counted over this length."""
    rope_beta_fast: Annotated[float, POSITIVE] = 32.0
    """yarn: frequencies with more turns than this in the original length are left as they are."""
    rope_beta_slow: Annotated[float, POSITIVE] = 1.0
    """yarn: frequencies with fewer turns than this in the original length are divided."""
    rope_truncate: bool = True
    """yarn: round the limits of --rope-beta-fast and --rope-beta-slow to whole channel pairs."""
    rope_attention_factor: Annotated[float | None, POSITIVE] = None
    """yarn: factor on rotated queries and on rotated keys. Default: 0.1 ln(factor) + 1."""
    sliding_window: int | None = None
    """Let each token attend to this many tokens, itself and those right before it
    (https://arxiv.org/abs/2004.05150). Default: to all tokens before it."""
    full_attention_layers: str | None = None
    """Layers without the sliding window, written as in --no-rope-layers. 3::4 is every fourth
    layer, as in OLMo 3. Default: none."""
    no_rope_layers: str | None = None
    """Layers without rotary positions (https://arxiv.org/abs/2501.18795), as numbers from 0 or
    ranges START:STOP:STEP, separated by commas. 3::4 is every fourth layer. Default: none."""
    normalization: Normalization = "LayerNorm"
    """LayerNorm, or RMSNorm (https://arxiv.org/abs/1910.07467). Both compute their statistics in
    fp32."""
    layernorm_epsilon: Annotated[float, POSITIVE] = 1e-5
    """Added to the variance in every LayerNorm, and to the mean square in every RMSNorm."""
    norm_placement: NormPlacement = "input"
    """Where attention and MLP of a layer have their norms. input: before them, as in
    GPT-2 (pre-norm). output: after them, before the sum with the residual stream, as in OLMo 2
    (https://arxiv.org/abs/2501.00656)."""
    apply_layernorm_1p: bool = False
    """Store the weight of a norm minus 1, as in Qwen3-Next. It starts at 0, and 1 is added in fp32.
    Norms have no weight decay in either form. Not for the output norm of a gated delta net."""
    norm_bias: bool = True
    """Use biases in LayerNorm. RMSNorm has none. Off (--no-norm-bias): LayerNorm has none
    either."""
    qk_norm: QKNorm | None = None
    """Normalise queries and keys before their rotation (https://arxiv.org/abs/2302.05442). head:
    each head by itself (Qwen 3). full: all heads together, only with RMSNorm (OLMo 2). Default: no
    such norm."""
    glu_activation: GLU | None = None
    """Gated MLP (https://arxiv.org/abs/2002.05202): swiglu, geglu, reglu or liglu (linear).
    clamped_swiglu is that of gpt-oss: both factors are limited to 7, and 1 is added to the linear
    one. Default: an MLP without a gate."""
    activation: Activation = "gelu"
    """Activation of an MLP without a gate: gelu, squared_relu (https://arxiv.org/abs/2109.08668),
    or xielu (https://arxiv.org/abs/2411.13010), which has two weights in each layer."""
    bias_gelu_fusion: bool = True
    """Use the tanh form of GELU, as Megatron's fused kernel does. Off (--no-bias-gelu-fusion): the
    erf form. A model that is converted to another format must use the same form."""
    add_bias_linear: bool = True
    """Use biases in the linear layers. Off (--no-add-bias-linear): no biases, as in Llama."""
    add_qkv_bias: bool = False
    """Use biases in the projections to queries, keys and values even with --no-add-bias-linear, as
    in Qwen 2."""
    add_attention_bias: bool = False
    """Use biases in all projections of attention even with --no-add-bias-linear, as in a Llama with
    attention_bias."""
    add_mlp_bias: bool = False
    """Use biases in the MLP even with --no-add-bias-linear, as in a Llama with mlp_bias, or in a
    GPT-NeoX without biases in attention."""
    parallel_residual: bool = False
    """Compute attention and MLP from the same input and add both to it, as in GPT-NeoX
    (https://arxiv.org/abs/2204.06745)."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output projection its own weights instead of those of the word embedding."""
    embed_layernorm: bool = False
    """Normalise the word embedding's output, which gives fewer loss spikes at 100B scale. It has
    weights, so it cannot be turned on or off on resume."""
    attention_output_gate: bool = False
    """Multiply the result of attention by a sigmoid of a projection of its input
    (https://arxiv.org/abs/2505.06708), as in Qwen3-Next."""
    hidden_dropout: Annotated[float, PROBABILITY] = 0.1
    """Dropout probability on the residual branches and the embedding. 0 turns it off."""
    softmax_type: SoftmaxType = "vanilla"
    """Sinks of attention. off-by-one: each head has one more logit, 0, without a value
    (https://www.evanmiller.org/attention-is-off-by-one.html). learnable: this logit is a parameter
    of the head, as in gpt-oss (https://arxiv.org/abs/2508.10925). vanilla: none."""
    attention_dropout: Annotated[float, PROBABILITY] = 0.1
    """Dropout probability on the attention weights. 0 turns it off and lets SDPA use its fast
    kernels. With dropout, products and a softmax compute attention for some queries at a time, so
    that masks are the same on every layout. See --attention-backend."""
    init_method_std: Annotated[float | Literal["small", "megatron"], POSITIVE] = 0.02
    """Standard deviation of the normal initialisation. small = sqrt(2/(5h))
    (https://arxiv.org/abs/1910.05895), megatron = sqrt(1/(3h)), as in the models with 530B and
    176B parameters. Output projections of attention and MLP use std / sqrt(2 x layers), except
    with --parametrization completep."""
    output_init_method_std: Annotated[float | Literal["wang"] | None, POSITIVE] = None
    """Standard deviation of the output projections of attention and MLP. wang =
    2 / (layers x sqrt(h)), as in GPT-NeoX-20B and Pythia. Default: --init-method-std /
    sqrt(2 x layers)."""
    parametrization: Parametrization = "standard"
    """How initial weights, learning rates and outputs change with the size of the model, so that
    the best --lr of a small base model is also that of this one. mup: with the width
    (https://arxiv.org/abs/2203.03466). completep: with width and depth
    (https://arxiv.org/abs/2505.01618). standard: as the other flags say."""
    base_width: Annotated[int | None, Range("[1, 1e9]")] = None
    """mup, completep: hidden size of the base model."""
    base_depth: Annotated[int | None, Range("[1, 1e6]")] = None
    """completep: number of layers of the base model."""
    base_kv_channels: Annotated[int | None, Range("[1, 1e9]")] = None
    """mup, completep: width of an attention head of the base model. Attention divides its logits by
    head width / sqrt(this). Default: that of this model, which is the usual sqrt(head width)."""
    num_experts: Annotated[int | None, Range("[2, 1e6]")] = None
    """Replace the MLPs by this many experts, of which each token uses some
    (https://arxiv.org/abs/2101.03961). Every token reaches its experts, none is dropped. Default:
    no experts."""
    moe_layer_freq: str = "1"
    """Layers with experts. N: every Nth layer from layer 0. A list has 1 for a layer with experts
    and 0 for one with an MLP, and may be written as in ([0]*1+[1]*15)."""
    moe_router_topk: Annotated[int, AT_LEAST_ONE] = 2
    """Experts that each token uses."""
    moe_ffn_hidden_size: Annotated[int | None, Range("[1, 1e9]")] = None
    """Inner width of an expert. Default: that of the MLP."""
    moe_router_score_function: RouterScore = "softmax"
    """How the router turns logits into scores. sigmoid: each expert by itself, as in DeepSeek-V3
    (https://arxiv.org/abs/2412.19437), and the weights of a token's experts add up to 1."""
    moe_router_pre_softmax: bool = False
    """Compute the softmax over all experts, so that the weights of a token's experts add up to less
    than 1 (OLMoE). Off: over the chosen experts, which equals normalised weights (Mixtral, Qwen
    3)."""
    moe_router_topk_scaling_factor: Annotated[float | None, POSITIVE] = None
    """Multiply the weights of the experts by this factor. Default: 1."""
    moe_router_num_groups: Annotated[int | None, AT_LEAST_ONE] = None
    """Divide the experts into this many groups. A token uses only experts of its best groups.
    Default: no groups."""
    moe_router_group_topk: Annotated[int | None, AT_LEAST_ONE] = None
    """Groups that a token may use. See --moe-router-group-score."""
    moe_router_group_score: GroupScore = "sum"
    """How good a group is. sum: as its best experts together, of which there are --moe-router-topk
    / --moe-router-group-topk (DeepSeek-V3). max: as its best expert (DeepSeek-V2)."""
    moe_router_enable_expert_bias: bool = False
    """Balance the experts by a bias on the scores that choose them, which is no part of their
    weights (https://arxiv.org/abs/2408.15664). Needs sigmoid."""
    moe_shared_expert_intermediate_size: Annotated[int | None, Range("[1, 1e9]")] = None
    """Inner width of an MLP that all tokens use beside their experts. Default: no such MLP."""
    moe_shared_expert_gate: bool = False
    """Multiply the output of the shared expert by a sigmoid of its input (Qwen 2 MoE)."""

    multi_latent_attention: bool = False
    """Compute keys and values from a small latent vector of each token, as in DeepSeek-V2
    (https://arxiv.org/abs/2405.04434, section 2.1). Each head has keys of --qk-head-dim channels
    without positions, and shares --qk-pos-emb-head-dim rotary ones with all others."""
    q_lora_rank: Annotated[int | None, Range("[1, 1e9]")] = None
    """Latent attention: width of the latent vector of queries. Default: queries are computed from
    the residual stream."""
    kv_lora_rank: Annotated[int, Range("[1, 1e9]")] = 32
    """Latent attention: width of the latent vector of keys and values. DeepSeek-V3 has 512."""
    qk_head_dim: Annotated[int, Range("[1, 1e9]")] = 128
    """Latent attention: channels of a query and a key without positions. Hugging Face's
    qk_nope_head_dim. Its qk_head_dim is the sum with the rotary channels."""
    qk_pos_emb_head_dim: Annotated[int, Range("[1, 1e9]")] = 64
    """Latent attention: rotary channels of a query and a key, an even number."""
    v_head_dim: Annotated[int, Range("[1, 1e9]")] = 128
    """Latent attention: channels of a value."""
    latent_norm_epsilon: Annotated[float | None, POSITIVE] = None
    """Latent attention: added to the mean square in the norms of latent vectors. Hugging Face's
    classes have 1e-6 for any model. Default: --layernorm-epsilon."""
    mscale: Annotated[float, NOT_NEGATIVE] = 1.0
    """Latent attention with yarn: rotated queries and keys are multiplied by (0.1 m ln(factor) + 1)
    / (0.1 a ln(factor) + 1) for this m, and a of --mscale-all-dim."""
    mscale_all_dim: Annotated[float, NOT_NEGATIVE] = 0.0
    """Latent attention with yarn: logits are multiplied by the square of 0.1 a ln(factor) + 1 for
    this a. DeepSeek-V3 has 1 for both."""
    experimental_attention_variant: AttentionVariant | None = None
    """What the layers of --linear-attention-freq have in place of attention. gated_delta_net: a
    recurrent state of fixed size (https://arxiv.org/abs/2412.06464), as in Qwen3-Next and
    Olmo-Hybrid. Default: all layers have attention."""
    linear_attention_freq: str | None = None
    """Layers with --experimental-attention-variant. N: all but every Nth layer. A list has 1 for
    such a layer and 0 for one with attention, and may be written as in ([1]*3+[0]*1)*12."""
    linear_conv_kernel_dim: Annotated[int, AT_LEAST_ONE] = 4
    """Gated delta net: tokens that its causal convolution reads, the token itself included."""
    linear_key_head_dim: Annotated[int, Range("[1, 1e9]")] = 128
    """Gated delta net: width of a query and of a key of a head."""
    linear_value_head_dim: Annotated[int, Range("[1, 1e9]")] = 128
    """Gated delta net: width of a value of a head."""
    linear_num_key_heads: Annotated[int, Range("[1, 1e6]")] = 16
    """Gated delta net: heads of queries and keys."""
    linear_num_value_heads: Annotated[int, Range("[1, 1e6]")] = 32
    """Gated delta net: heads of values, a multiple of --linear-num-key-heads. Each has a state."""
    linear_allow_neg_eigval: bool = False
    """Gated delta net: multiply beta by 2, so that the state can change its sign
    (https://arxiv.org/abs/2411.12537), as in Olmo-Hybrid."""
    linear_norm_epsilon: Annotated[float | None, POSITIVE] = None
    """Gated delta net: added to the mean square in its output norm. Default:
    --layernorm-epsilon."""
    linear_norm_placement: NormPlacement | None = None
    """Gated delta net: where the norms of its layers are, see --norm-placement. Olmo-Hybrid has
    input here and output in its layers with attention. Default: --norm-placement."""
    linear_time_step: TimeStep = "one"
    """Gated delta net: initial values of dt_bias. one: 1, as in Qwen3-Next. log-uniform: steps from
    0.001 to 0.1, as in Mamba (https://arxiv.org/abs/2312.00752) and Olmo-Hybrid."""

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention of its layers. Those with a state in place of keys are last."""
        usual: AttentionKind = "latent" if self.multi_latent_attention else "dot_product"
        return tuple(filter(None, (usual, self.experimental_attention_variant)))

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return max(self.hidden_dropout, self.attention_dropout) > 0

    @property
    def has_norms_first(self) -> bool:
        """Whether some layers have their norms before attention and MLP."""
        are_first = {"input": True, "output": False, None: False}
        return are_first[self.norm_placement] or are_first[self.linear_norm_placement]

    @property
    def activation_name(self) -> Activation | GLU:
        """The activation of the MLP, gated or not."""
        return self.glu_activation or self.activation
