"""Give the gradients of a Llama of litgpt the names of transformers, for `record_step`."""

from torch import Tensor

_NAMES = {
    "attn.proj": "self_attn.o_proj",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
}
_OUTSIDE = {
    "lm_head.weight": "lm_head.weight",
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
}


def rename(gradients: dict[str, Tensor], heads: int, groups: int) -> dict[str, Tensor]:
    """Return the gradients under the names of transformers.

    Args:
        gradients: Name in litgpt -> gradient.
        heads: `n_head` of its Config.
        groups: `n_query_groups` of its Config.
    """
    found = {}
    for name, gradient in gradients.items():
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = gradient
            continue
        _, _, number, module = name.removesuffix(".weight").split(".", 3)
        prefix = f"model.layers.{number}."
        if module == "attn.qkv":
            width = gradient.shape[0] // (heads + 2 * groups)
            parts = gradient.split((heads * width, groups * width, groups * width))
            for letter, part in zip("qkv", parts, strict=True):
                found[f"{prefix}self_attn.{letter}_proj.weight"] = part
        else:
            found[f"{prefix}{_NAMES[module]}.weight"] = gradient
    return found
