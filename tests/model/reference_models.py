"""Small models of `transformers`, and the same models in this trainer's words.

Weights are large, biases are not zero and norms are away from one. A part that is wrong, left out
or in the wrong place then changes the results by far more than rounding.
"""

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
    """Our name of a module -> theirs. Inside a layer, both without the layer's prefix."""
    layers: str = "model.layers"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Their projections to queries, keys and values."""
    split_qkv: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    """Divides a fused projection into queries, keys and values. None: there are three."""
    transposed: bool = False
    """Whether their linear layers have the shape [in, out]."""

    def build(self) -> Any:
        """Return the model of `transformers` with large weights."""
        import transformers

        config = getattr(transformers, f"{self.model}Config")(
            **self.theirs, vocab_size=VOCAB, attn_implementation="eager"
        )
        # `from_config` and the class disagree about nothing else, but the class takes no dtype.
        model_class = getattr(transformers, _CLASSES.get(self.model, f"{self.model}ForCausalLM"))
        model = model_class(config).float().eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() > 1:
                    parameter.copy_(noise * 0.2)
                elif name.endswith("bias"):
                    parameter.copy_(noise * 0.3)
                else:
                    parameter.copy_(1 + 0.4 * noise)
        return model

    def convert(self, tensors: Mapping[str, Tensor], our_names: list[str]) -> dict[str, Tensor]:
        """Return their weights, or the gradients of these, under our names and in our shapes."""
        return {name: self._convert_one(tensors, name) for name in our_names}

    def _convert_one(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        if name in self.names:
            return tensors[self.names[name]]
        if not name.startswith("blocks."):
            return tensors[f"{self.names[module]}.{leaf}"]
        _, index, part = module.split(".", 2)
        layer = f"{self.layers}.{index}."
        if part != "attention.qkv":
            tensor = tensors[f"{layer}{self.names[part]}.{leaf}"]
            return tensor.t() if self.transposed and tensor.dim() > 1 else tensor
        found = [tensors[f"{layer}{their}.{leaf}"] for their in self.qkv]
        if self.split_qkv is not None:
            (fused,) = found
            found = list(
                self.split_qkv(fused.t() if self.transposed and fused.dim() > 1 else fused)
            )
        groups = self.ours.get("num_query_groups", HEADS)
        # Our rows are the query heads of a group, its key and its value, group by group.
        parts = [t.reshape(groups, -1, HEAD_DIM, *t.shape[1:]) for t in found]
        return torch.cat(parts, dim=1).flatten(0, 2)


def make_tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Expected:
    """What a model of `transformers` computes, under our names."""

    weights: dict[str, Tensor]
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def compute_expected(family: Family, our_names: list[str]) -> Expected:
    """Run the model of `transformers` forward and backward."""
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
    "llama": Family("Llama", _LLAMA_SIZES, _LLAMA),
    "qwen3": Family("Qwen3", _LLAMA_SIZES | {"head_dim": HEAD_DIM}, _LLAMA | {"qk_norm": "head"}),
}
"""Each family with the parts that make it different from the others."""
