"""The architecture of the network: everything that changes what a checkpoint's weights mean."""

from dataclasses import dataclass
from typing import Literal

PositionEmbedding = Literal["absolute", "rotary", "alibi"]
Normalization = Literal["LayerNorm", "RMSNorm"]
GLU = Literal["swiglu", "geglu", "reglu", "liglu"]


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int
    """Number of transformer layers."""
    hidden_size: int
    """Width h of the residual stream."""
    num_attention_heads: int
    """Number of attention (query) heads."""
    seq_length: int
    """Tokens in a training sample, s."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP. Default: 4 x hidden size (with a GLU too: set it yourself to about 8/3 x hidden size)."""
    num_query_groups: int | None = None
    """Key/value heads of grouped-query attention (https://arxiv.org/abs/2305.13245). Default: one for each attention head."""
    kv_channels: int | None = None
    """Width of one attention head. Default: hidden size / number of attention heads."""
    max_position_embeddings: int | None = None
    """Size of the table of learned positions; at least the sequence length. Default: the sequence length."""
    position_embedding_type: PositionEmbedding = "absolute"
    """absolute: learned table (GPT-2); rotary: RoPE (https://arxiv.org/abs/2104.09864); alibi: linear biases (https://arxiv.org/abs/2108.12409)."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Part of each head's channels that is rotated, 0 < p <= 1."""
    normalization: Normalization = "LayerNorm"
    """LayerNorm, or RMSNorm (https://arxiv.org/abs/1910.07467). Statistics are in fp32 in both."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance in every norm."""
    glu_activation: GLU | None = None
    """Gated MLP (https://arxiv.org/abs/2002.05202): swiglu, geglu, reglu or liglu (linear). Default: a plain GELU MLP."""
    bias_gelu_fusion: bool = True
    """GELU in its tanh form, as Megatron's fused kernel has it. Off (--no-bias-gelu-fusion): the erf form. Exports depend on it."""
    add_bias_linear: bool = True
    """Biases in the linear layers. Off (--no-add-bias-linear): none, as in Llama."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output projection weights of its own instead of the word embedding's."""
    embed_layernorm: bool = False
    """Normalise the word embedding's output: fewer spikes at 100B scale. It has weights: only from the first iteration on."""
    hidden_dropout: float = 0.1
    """Dropout probability on the residual branches and the embedding; 0 turns it off."""
    attention_dropout: float = 0.1
    """Dropout probability on the attention weights; 0 turns it off (and lets SDPA take its fast kernels)."""
    init_method_std: float | Literal["small", "megatron"] = 0.02
    """Std of the normal initialisation. small = sqrt(2/(5h)) (https://arxiv.org/abs/1910.05895),
    megatron = sqrt(1/(3h)) (530B, 176B).
    Output projections of attention and MLP use std / sqrt(2 x layers)."""
