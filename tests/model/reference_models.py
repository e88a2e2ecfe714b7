"""Small models of `transformers`, and the settings that give the same models here.

Weights are large, biases are not zero and the weights of norms are not one. A part that is wrong,
missing or in the wrong place then changes the results by far more than rounding.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VOCAB = 101
LENGTH = 16
HIDDEN = 32
HEADS = 4
HEAD_DIM = 8
LAYERS = 4
FFN = 48

_LLAMA_NAMES = {
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
_GPT2_NAMES = {
    "embedding.word": "transformer.wte",
    "embedding.position": "transformer.wpe.weight",
    "head.norm": "transformer.ln_f",
    "input_norm": "ln_1",
    "post_attention_norm": "ln_2",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_BLOOM_NAMES = {
    "embedding.word": "transformer.word_embeddings",
    "embedding.norm": "transformer.word_embeddings_layernorm",
    "head.norm": "transformer.ln_f",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention.out": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

_OLMO_NAMES = {
    **_LLAMA_NAMES,
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_APERTUS_NAMES = {
    **_LLAMA_NAMES,
    "input_norm": "attention_layernorm",
    "post_attention_norm": "feedforward_layernorm",
    "mlp.activation": "mlp.act_fn",
}
_EXPERT_NAMES = {**_LLAMA_NAMES, "mlp.router": "mlp.gate"}
_QWEN_NEXT_NAMES = _EXPERT_NAMES | {
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
}
_NEOX_NAMES = {
    "embedding.word": "gpt_neox.embed_in",
    "head": "lm_head",
    "head.norm": "gpt_neox.final_layer_norm",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


@dataclass(frozen=True)
class Family:
    """A class of `transformers` and the same architecture here."""

    model: str
    """Name of the class, without `ForCausalLM`."""
    theirs: Mapping[str, Any]
    """Fields of the configuration of `transformers`."""
    ours: Mapping[str, Any]
    """Fields of `ModelConfig` that differ from those of `tests/model/builders.py`."""
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    """Our name of a module -> theirs. Names inside a layer have no prefix of the layer."""
    layers: str = "model.layers"
    """Their name of the list of layers."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Their projections to queries, keys and values."""
    split_qkv: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    """Divides a fused projection into queries, keys and values. None: they are not fused."""
    transposed: bool = False
    """Whether their linear layers have the shape [in, out]."""

    def build(self) -> Any:
        """Return the model of `transformers` with large weights."""
        import transformers

        config = getattr(transformers, f"{self.model}Config")(
            **self.theirs, vocab_size=VOCAB, attn_implementation="eager"
        )
        model_class = getattr(transformers, _CLASSES.get(self.model, f"{self.model}ForCausalLM"))
        model = model_class(config).float().eval()
        for name, module in model.named_modules():
            # The class of Olmo-Hybrid has a constant.
            if name.endswith("linear_attn.o_norm"):
                module.variance_epsilon = self.ours["linear_norm_epsilon"]
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() > 1:
                    parameter.copy_(noise * 0.2)
                elif name.endswith("sinks"):
                    parameter.copy_(torch.tensor([0.0, 3.0, 20.0, -1.0]))
                elif name.endswith(("bias", "A_log")) or (
                    self.ours.get("apply_layernorm_1p") and not name.endswith("_attn.norm.weight")
                ):
                    parameter.copy_(noise * 0.3)
                else:
                    parameter.copy_(1 + 0.4 * noise)
        return model

    def convert(self, tensors: Mapping[str, Tensor], our_names: list[str]) -> dict[str, Tensor]:
        """Return their weights or gradients under our names and in our shapes."""
        return {name: self._convert_one(tensors, name) for name in our_names}

    def _convert_one(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        if name in self.names:
            return tensors[self.names[name]]
        if not name.startswith("blocks."):
            return tensors[f"{self.names[module]}.{leaf}"]
        _, index, part = module.split(".", 2)
        layer = f"{self.layers}.{index}."
        own = self._convert_special(tensors, layer, part, leaf)
        if own is not None:
            return own
        if part == "mlp.experts":
            # [E, f, h], with all gates of an expert before its other rows.
            first, second = tensors[f"{layer}mlp.experts.gate_up_proj"].chunk(2, dim=1)
            down = tensors[f"{layer}mlp.experts.down_proj"]
            return {"gate": first, "up": second, "down": down}[leaf].flatten(0, 1)
        if part in ("attention.query", "attention.latent_down"):
            return self._turn_rows(tensors[f"{layer}{self.names[part]}.{leaf}"], part)
        if part != "attention.qkv":
            tensor = tensors[f"{layer}{self.names[part]}.{leaf}"]
            return tensor.t() if self.transposed and tensor.dim() > 1 else tensor
        found = [tensors[f"{layer}{their}.{leaf}"] for their in self.qkv]
        if self.ours.get("attention_output_gate"):
            found[0] = found[0].unflatten(0, (HEADS, 2, -1))[:, 0].flatten(0, 1)
        if self.split_qkv is not None:
            (fused,) = found
            if self.transposed and fused.dim() > 1:
                fused = fused.t()
            found = list(self.split_qkv(fused))
        groups = self.ours.get("num_query_groups", HEADS)
        # Our rows are ordered by group: its query heads, its key and its value.
        width = self.ours.get("kv_channels", HEAD_DIM)
        parts = [t.reshape(groups, -1, width, *t.shape[1:]) for t in found]
        return torch.cat(parts, dim=1).flatten(0, 2)

    def _convert_special(
        self, tensors: Mapping[str, Tensor], layer: str, part: str, leaf: str
    ) -> Tensor | None:
        """Return a parameter that only one family has, or None if it is another one."""
        if part == "attention" and leaf == "sink":
            return tensors[f"{layer}self_attn.sinks"]
        if f"{layer}linear_attn.A_log" in tensors and part.startswith("attention"):
            path = f"{part}.{leaf}".removeprefix("attention.")
            return self._convert_delta_net(tensors, f"{layer}linear_attn.", path)
        if part == "mlp.experts" and self.model == "GptOss":
            # [E, in, out], and rows of gate and up alternate. Biases have no input.
            kind, _, bias = leaf.partition("_")
            stem = "down_proj" if kind == "down" else "gate_up_proj"
            whole = tensors[f"{layer}mlp.experts.{stem}" + (bias and "_bias")]
            rows = whole if bias else whole.transpose(1, 2)
            if kind != "down":
                rows = rows[:, {"gate": 0, "up": 1}[kind] :: 2]
            return rows.flatten(0, 1)
        if part == "mlp" and leaf == "shared_gate":
            return tensors[f"{layer}mlp.shared_expert_gate.weight"]
        if part == "attention.gate":
            # Each head has its query, then its gate.
            rows = tensors[f"{layer}self_attn.q_proj.{leaf}"].unflatten(0, (HEADS, 2, -1))
            return rows[:, 1].flatten(0, 1)
        return None

    def _convert_delta_net(self, tensors: Mapping[str, Tensor], prefix: str, path: str) -> Tensor:
        """Return a parameter of a gated delta net. `prefix` is that of its tensors."""
        heads = self.ours["linear_num_key_heads"]
        # Rows of a key head, and of all heads.
        key = self.ours["linear_key_head_dim"]
        value = self.ours["linear_value_head_dim"] * self.ours["linear_num_value_heads"] // heads
        if path.endswith("_convolution"):
            parts = tensors[f"{prefix}conv1d.weight"][:, 0].split(
                [heads * key, heads * key, heads * value]
            )
            return parts[("query", "key", "value").index(path.split("_")[0])]
        if path in ("A_log", "dt_bias"):
            return tensors[prefix + path]
        part = path.removesuffix(".weight")
        if f"{prefix}in_proj_ba.weight" not in tensors:
            names = {"norm": "o_norm", "out": "o_proj", "alpha": "a_proj", "beta": "b_proj"}
            return tensors[f"{prefix}{names.get(part, part[0] + '_proj')}.weight"]
        if part in ("norm", "out"):
            return tensors[f"{prefix}{part.replace('out', 'out_proj')}.weight"]
        packed = {"beta": 0, "alpha": 1}
        if part in packed:
            rows = tensors[f"{prefix}in_proj_ba.weight"].unflatten(0, (heads, 2, -1))
            return rows[:, packed[part]].flatten(0, 1)
        rows = tensors[f"{prefix}in_proj_qkvz.weight"].unflatten(0, (heads, -1))
        parts = rows.split([key, key, value, value], dim=1)
        return parts[("query", "key", "value", "gate").index(part)].flatten(0, 1)

    def _turn_rows(self, tensor: Tensor, part: str) -> Tensor:
        """Return rows with the two halves of the rotary channels first, or last in the latents."""
        rotary = self.ours["qk_pos_emb_head_dim"]
        heads = HEADS if part == "attention.query" else 1
        rows = tensor.unflatten(0, (heads, -1))
        plain, pairs = rows[:, :-rotary], rows[:, -rotary:]
        halves = torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
        parts = (halves, plain) if part == "attention.query" else (plain, halves)
        return torch.cat(parts, dim=1).flatten(0, 1)


def make_tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Expected:
    """The results of a model of `transformers`, under our names."""

    weights: dict[str, Tensor]
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def compute_expected(family: Family, our_names: list[str]) -> Expected:
    """Return the results of a forward and a backward pass of the model of `transformers`."""
    model = family.build()
    logits = model(make_tokens(1)).logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), make_tokens(2).flatten())
    loss.backward()
    weights = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in weights.items()}
    return Expected(
        {n: t.detach() for n, t in family.convert(weights, our_names).items()},
        logits.detach(),
        loss.item(),
        family.convert(gradients, our_names),
    )


def _split_thirds(fused: Tensor) -> tuple[Tensor, ...]:
    """Divide rows that have all queries, then all keys, then all values."""
    return fused.chunk(3)


def _split_heads(fused: Tensor) -> tuple[Tensor, ...]:
    """Divide rows that have query, key and value of one head after the other."""
    by_head = fused.reshape(HEADS, 3, HEAD_DIM, *fused.shape[1:])
    return tuple(by_head[:, i].flatten(0, 1) for i in range(3))


_CLASSES = {"GPT2": "GPT2LMHeadModel"}
_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_LLAMA_SIZES = _SIZES | {
    "intermediate_size": FFN,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "ffn_hidden_size": FFN,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
_WINDOW = {"sliding_window": 5}
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "attention_factor": 0.1 * math.log(4) + 1,
}

_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "attention_factor": (0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
_DEEPSEEK_SIZES = _LLAMA_SIZES | {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_DEEPSEEK: dict[str, Any] = _LLAMA | {
    "multi_latent_attention": True,
    "num_query_groups": HEADS,
    "kv_lora_rank": 20,
    "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 14,
    "latent_norm_epsilon": 1e-6,
    "rotary_base": 100.0,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 24,
    "moe_layer_freq": "([0]*1+[1]*3)",
}
_DEEPSEEK_NAMES = _EXPERT_NAMES | {
    "attention.latent_down": "self_attn.kv_a_proj_with_mqa",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.latent_up": "self_attn.kv_b_proj",
    **{f"mlp.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}

_DELTA_SIZES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 10,
}
_DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "2",
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 10,
}

_NEOX_SIZES = _SIZES | {
    "intermediate_size": FFN,
    "max_position_embeddings": 64,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
}
_NEOX: dict[str, Any] = {
    "position_embedding_type": "rotary",
    "rotary_base": 100.0,
    "rotary_percent": 0.5,
    "ffn_hidden_size": FFN,
    "parallel_residual": True,
    "bias_gelu_fusion": False,
    "untie_embeddings_and_output_weights": True,
}
_NEOX_LAYERS: dict[str, Any] = {
    "layers": "gpt_neox.layers",
    "qkv": ("attention.query_key_value",),
    "split_qkv": _split_heads,
}
FAMILIES = {
    "gpt2": Family(
        "GPT2",
        {
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": LENGTH,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        },
        {},
        _GPT2_NAMES,
        "transformer.h",
        ("attn.c_attn",),
        _split_thirds,
        transposed=True,
    ),
    "bloom": Family(
        "Bloom",
        {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
        {"position_embedding_type": "alibi", "embed_layernorm": True},
        _BLOOM_NAMES,
        "transformer.h",
        ("self_attention.query_key_value",),
        _split_heads,
    ),
    "gpt-neox": Family("GPTNeoX", _NEOX_SIZES, _NEOX, _NEOX_NAMES, **_NEOX_LAYERS),
    "gpt-neox-mlp-bias": Family(
        "GPTNeoX",
        _NEOX_SIZES | {"attention_bias": False},
        _NEOX | {"add_bias_linear": False, "add_mlp_bias": True},
        _NEOX_NAMES,
        **_NEOX_LAYERS,
    ),
    "llama": Family("Llama", _LLAMA_SIZES, _LLAMA),
    "llama-attention-bias": Family(
        "Llama", _LLAMA_SIZES | {"attention_bias": True}, _LLAMA | {"add_attention_bias": True}
    ),
    "llama-mlp-bias": Family(
        "Llama", _LLAMA_SIZES | {"mlp_bias": True}, _LLAMA | {"add_mlp_bias": True}
    ),
    "mistral": Family("Mistral", _LLAMA_SIZES | {"sliding_window": 5}, _LLAMA | _WINDOW),
    "mistral-wide-heads": Family(
        "Mistral",
        _LLAMA_SIZES | {"sliding_window": 5, "head_dim": 2 * HEAD_DIM},
        _LLAMA | _WINDOW | {"kv_channels": 2 * HEAD_DIM},
    ),
    # With these values, some frequencies are divided, some are interpolated and some are unchanged.
    "llama3": Family(
        "Llama",
        _LLAMA_SIZES
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        _LLAMA | {"rotary_base": 50.0, "rope_scaling": "llama3", "rope_original_length": 32},
    ),
    # Some frequencies are divided, some are interpolated and some are unchanged here too.
    "llama-yarn": Family(
        "Llama",
        _LLAMA_SIZES
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "truncate": False,
                # 0.1 ln(8) + 1, the default on both sides.
                "attention_factor": 1.2079441541679836,
            }
        },
        _LLAMA
        | {"rotary_base": 50.0, "rope_scaling": "yarn", "rope_original_length": 32}
        | {"rope_beta_fast": 4.0, "rope_beta_slow": 0.5, "rope_truncate": False},
    ),
    "llama-interpolated": Family(
        "Llama",
        _LLAMA_SIZES
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
        _LLAMA | {"rotary_base": 100.0, "rope_scaling": "linear", "rope_scaling_factor": 4.0},
    ),
    "nemotron-activation": Family(
        "Apertus",
        _LLAMA_SIZES | {"hidden_act": "relu2", "rope_parameters": _ROPE},
        _LLAMA
        | {"glu_activation": None, "activation": "squared_relu", "qk_norm": "head"}
        | {"rotary_base": 100.0},
        _APERTUS_NAMES,
    ),
    "apertus": Family(
        "Apertus",
        _LLAMA_SIZES | {"dtype": torch.float32, "rope_parameters": _ROPE},
        _LLAMA
        | {"glu_activation": None, "activation": "xielu", "qk_norm": "head"}
        | {"rotary_base": 100.0},
        _APERTUS_NAMES,
    ),
    "qwen2": Family(
        "Qwen2",
        _LLAMA_SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
        _LLAMA | {"add_qkv_bias": True, "sliding_window": 5, "full_attention_layers": ":3"},
    ),
    "qwen3": Family("Qwen3", _LLAMA_SIZES | {"head_dim": HEAD_DIM}, _LLAMA | {"qk_norm": "head"}),
    "qwen3-multi-query": Family(
        "Qwen3",
        _LLAMA_SIZES | {"head_dim": HEAD_DIM, "num_key_value_heads": 1, "attention_bias": False},
        _LLAMA | {"qk_norm": "head", "num_query_groups": 1},
    ),
    "qwen2-multi-query": Family(
        "Qwen2",
        _LLAMA_SIZES | {"num_key_value_heads": 1},
        _LLAMA | {"add_qkv_bias": True, "num_query_groups": 1},
    ),
    # The class does not declare this field, and uses it if config.json names it.
    "qwen2-wide-heads": Family(
        "Qwen2",
        _LLAMA_SIZES | {"head_dim": 2 * HEAD_DIM},
        _LLAMA | {"add_qkv_bias": True, "kv_channels": 2 * HEAD_DIM},
    ),
    "smollm3-wide-heads": Family(
        "SmolLM3",
        _LLAMA_SIZES
        | {"head_dim": 2 * HEAD_DIM, "no_rope_layer_interval": 2, "rope_parameters": _ROPE},
        _LLAMA | {"kv_channels": 2 * HEAD_DIM, "no_rope_layers": "1::2", "rotary_base": 100.0},
    ),
    "olmo2": Family(
        "Olmo2",
        _LLAMA_SIZES,
        _LLAMA | {"qk_norm": "full", "norm_placement": "output"},
        _OLMO_NAMES,
    ),
    "olmo3": Family(
        "Olmo3",
        _LLAMA_SIZES
        | {
            "sliding_window": 5,
            "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
        },
        _LLAMA
        | {
            "qk_norm": "full",
            "norm_placement": "output",
            "rotary_base": 100.0,
            "sliding_window": 5,
            "full_attention_layers": "3::4",
        },
        _OLMO_NAMES,
    ),
    "olmoe": Family(
        "Olmoe",
        _LLAMA_SIZES | {"num_experts": 6, "num_experts_per_tok": 3, "rope_parameters": _ROPE},
        _LLAMA
        | {"qk_norm": "full", "rotary_base": 100.0, "num_experts": 6, "moe_router_topk": 3}
        | {"moe_router_pre_softmax": True},
        _EXPERT_NAMES,
    ),
    "qwen3-moe": Family(
        "Qwen3Moe",
        _LLAMA_SIZES
        | {"head_dim": 2 * HEAD_DIM, "num_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 20, "norm_topk_prob": True}
        # Layers 0 and 2 are skipped by the step, and layer 1 by the list.
        | {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
        _LLAMA
        | {"qk_norm": "head", "kv_channels": 2 * HEAD_DIM, "num_experts": 5}
        | {"moe_ffn_hidden_size": 20, "moe_layer_freq": "([0]*3+[1])"},
        _EXPERT_NAMES,
    ),
    "qwen3-moe-as-olmoe": Family(
        "Qwen3Moe",
        _LLAMA_SIZES
        | {"head_dim": HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 1}
        | {"moe_intermediate_size": 28, "norm_topk_prob": False, "num_key_value_heads": 1},
        _LLAMA
        | {"qk_norm": "head", "num_query_groups": 1, "num_experts": 4, "moe_router_topk": 1}
        | {"moe_ffn_hidden_size": 28, "moe_router_pre_softmax": True},
        _EXPERT_NAMES,
    ),
    "mixtral": Family(
        "Mixtral",
        _LLAMA_SIZES
        | {"num_local_experts": 3, "sliding_window": 5, "head_dim": 2 * HEAD_DIM}
        | {"rope_parameters": _ROPE},
        _LLAMA | _WINDOW | {"num_experts": 3, "kv_channels": 2 * HEAD_DIM, "rotary_base": 100.0},
        _EXPERT_NAMES,
    ),
    "gpt-oss": Family(
        "GptOss",
        _LLAMA_SIZES
        | {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5}
        | {"head_dim": 2 * HEAD_DIM, "initializer_range": 0.02}
        | {"rope_parameters": _YARN},
        _LLAMA
        | _WINDOW
        | {"full_attention_layers": "1::2", "kv_channels": 2 * HEAD_DIM, "num_experts": 3}
        | {"glu_activation": "clamped_swiglu", "add_bias_linear": True}
        | {"softmax_type": "learnable", "rotary_base": 100.0, "rope_scaling": "yarn"}
        | {"rope_scaling_factor": 4.0, "rope_original_length": 16, "rope_truncate": False},
        {**_LLAMA_NAMES, "mlp.router": "mlp.router"},
    ),
    "qwen3-next": Family(
        "Qwen3Next",
        _LLAMA_SIZES
        | _DELTA_SIZES
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "head_dim": 2 * HEAD_DIM}
        # A smaller number lets the output norm enlarge the rounding of fp32 to 1e-4 in both models.
        # A test in fp64 has the published one.
        | {"rms_norm_eps": 1e-2}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}
        | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25}},
        _LLAMA
        | _DELTA
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "kv_channels": 2 * HEAD_DIM}
        | {"qk_norm": "head", "attention_output_gate": True, "apply_layernorm_1p": True}
        | {"layernorm_epsilon": 1e-2}
        | {"rotary_base": 100.0, "rotary_percent": 0.25, "num_experts": 4}
        | {"moe_ffn_hidden_size": 20, "moe_layer_freq": "([1]+[0]+[1]*2)"}
        | {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
        _QWEN_NEXT_NAMES,
    ),
    "olmo-hybrid": Family(
        "OlmoHybrid",
        _LLAMA_SIZES
        | _DELTA_SIZES
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "rms_norm_eps": 1e-6}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        _LLAMA
        | _DELTA
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "layernorm_epsilon": 1e-6}
        | {"linear_allow_neg_eigval": True, "no_rope_layers": ":", "linear_norm_epsilon": 1e-5}
        | {"qk_norm": "full", "norm_placement": "output", "linear_norm_placement": "input"},
        _OLMO_NAMES,
    ),
    "deepseek-v2": Family(
        "DeepseekV2",
        _DEEPSEEK_SIZES
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_routed_experts": 6}
        | {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 4, "rope_parameters": _ROPE}
        | {"routed_scaling_factor": 3.0},
        _DEEPSEEK
        | {"num_experts": 6, "moe_router_topk": 4, "moe_router_pre_softmax": True}
        | {"moe_router_num_groups": 3, "moe_router_group_topk": 2, "moe_router_group_score": "max"}
        | {"moe_router_topk_scaling_factor": 3.0},
        _DEEPSEEK_NAMES | {"attention.query": "self_attn.q_proj"},
    ),
    "deepseek-v3": Family(
        "DeepseekV3",
        _DEEPSEEK_SIZES
        | {"q_lora_rank": 14, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
        | {"num_experts_per_tok": 4, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5}
        | {"rope_parameters": _DEEPSEEK_YARN},
        _DEEPSEEK
        | {"q_lora_rank": 14, "num_experts": 8, "moe_router_topk": 4}
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
        | {"moe_router_topk_scaling_factor": 2.5, "rope_scaling": "yarn"}
        | {"rope_scaling_factor": 4.0, "rope_original_length": 16, "mscale": 0.7}
        | {"mscale_all_dim": 1.0},
        _DEEPSEEK_NAMES
        | {"attention.query": "self_attn.q_b_proj", "attention.query_down": "self_attn.q_a_proj"}
        | {"attention.query_norm": "self_attn.q_a_layernorm"},
    ),
    "moonlight": Family(
        "DeepseekV3",
        _DEEPSEEK_SIZES
        | {"q_lora_rank": None, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
        | {"num_experts_per_tok": 3, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.446}
        | {"rope_parameters": _ROPE},
        _DEEPSEEK
        | {"num_experts": 8, "moe_router_topk": 3, "moe_router_score_function": "sigmoid"}
        | {"moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.446},
        _DEEPSEEK_NAMES | {"attention.query": "self_attn.q_proj"},
    ),
    "smollm3": Family(
        "SmolLM3",
        _LLAMA_SIZES | {"no_rope_layer_interval": 2, "rope_parameters": _ROPE},
        _LLAMA | {"no_rope_layers": "1::2", "rotary_base": 100.0},
    ),
}
"""Name -> family. Each has parts that the others lack."""
