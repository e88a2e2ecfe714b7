"""Names of the tensors in checkpoints of nanoGPT, llm-baselines and fms-fsdp.

Sources: nanoGPT's model.py, llm-baselines' models/base.py and models/llama.py, and the Llama of
ibm-fms, which fms-fsdp trains, in the versions before and after 1.0.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.architectures import Architecture, find_architecture
from megatron.extras.interop.convert.tensors import TensorPair
from megatron.model.layer_parts import get_activation
from megatron.model.shape import ModelShape

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a weight -> shape."""
NANOGPT = dataclasses.replace(
    # The names are those of transformers' GPT-2, whose matrices are transposed.
    find_architecture("gpt2"),
    model_type="the GPT of nanoGPT and llm-baselines",
    class_name="GPT",
    transposed=frozenset(),
)
_LLAMA_OF_LLM_BASELINES = dataclasses.replace(
    NANOGPT,
    model_type="the Llama of llm-baselines",
    class_name="Llama",
    modules={
        "embedding.word": "transformer.wte",
        "head": "lm_head",
        "head.norm": "transformer.ln_f",
        "input_norm": "ln_1",
        "post_attention_norm": "ln_2",
        "attention.out": "attn.c_proj",
        # Their w1 is the gate. In ibm-fms, below, w1 is the other matrix.
        "mlp.gate": "mlp.w1",
        "mlp.up": "mlp.w2",
        "mlp.down": "mlp.c_proj",
    },
)
FMS_LLAMA = Architecture(
    "the Llama of ibm-fms",
    "LLaMA",
    (),
    {
        "embedding.word": "embedding",
        "head": "head",
        "head.norm": "dec_norm",
        "input_norm": "ln",
        "post_attention_norm": "ff_ln",
        "attention.out": "attn.dense",
        "mlp.gate": "ff_sub_layer.wg",
        "mlp.up": "ff_sub_layer.w1",
        "mlp.down": "ff_sub_layer.w2",
    },
    "layers",
    ("attn.in_proj.qkv_fused",),
    "thirds",
    not_stored=(r".*rot_emb\..*",),
)
# A name can have several of them, one inside the other.
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""What torch.compile, FSDP, recomputation and data parallelism put into names."""


def strip_wrappers(name: str) -> str:
    """Return the name of a tensor in the model itself."""
    return _WRAPPERS.sub("", name)


def choose_llm_baselines_names(model: ModelConfig) -> Architecture:
    """Return the names of `--model base` or `--model llama`."""
    if not get_activation(model).gated:
        return NANOGPT
    return _LLAMA_OF_LLM_BASELINES


@dataclass(frozen=True)
class StoredParts:
    """Where the numbers of one of their tensors lie in the file."""

    names: tuple[str, ...]
    """The stored tensors, whose rows follow each other."""
    half: int | None = None
    """0 or 1 if it is the first or the second half of the rows. None: all of them."""

    def find_shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        stored = [shapes[name] for name in self.names]
        rows = sum(shape[0] for shape in stored)
        if self.half is not None:
            rows //= 2
        return (rows, *stored[0][1:])

    def read(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor."""
        parts = [read(name) for name in self.names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.half is None:
            return whole
        return whole.chunk(2)[self.half]


# Before version 1.0, the embedding and the head were one shared module.
_FMS_OUTSIDE = {"shared.emb.weight": "embedding.weight", "shared.head.weight": "head.weight"}
_FMS_GATED = re.compile(r"(.*\.ff_sub_layer)\.wg1_fused\.(.*)")
_FMS_QUERY = re.compile(r"(.*\.attn)(\.in_proj)?\.query\.(.*)")
_FMS_KEY_VALUE = re.compile(r".*\.attn(\.in_proj)?\.(key|value)\..*")


def find_fms_parts(stored: Sequence[str]) -> dict[str, StoredParts]:
    """Return where the tensors of `FMS_LLAMA` lie, from the names of any version of ibm-fms.

    The matrices of queries, keys and values are fused, or were separate in old versions. So are the
    gate and the matrix beside it.
    """
    found: dict[str, StoredParts] = {}
    for name in stored:
        # Since 1.0, the class with a head keeps the layers in `base_model`.
        plain = _FMS_OUTSIDE.get(name, name.removeprefix("base_model."))
        if gated := _FMS_GATED.fullmatch(plain):
            # The gate comes first in the fused matrix.
            found[f"{gated[1]}.wg.{gated[2]}"] = StoredParts((name,), half=0)
            found[f"{gated[1]}.w1.{gated[2]}"] = StoredParts((name,), half=1)
        # The three are read together when the query is found, so key and value are passed over.
        elif query := _FMS_QUERY.fullmatch(plain):
            parts = tuple(
                f"{part}.{query[3]}".join(name.rsplit(f"query.{query[3]}", 1))
                for part in ("query", "key", "value")
            )
            found[f"{query[1]}.in_proj.qkv_fused.{query[3]}"] = StoredParts(parts)
        elif not _FMS_KEY_VALUE.fullmatch(plain):
            found[plain] = StoredParts((name,))
    return found


def separate_rotary_halves(pair: TensorPair, tensor: Tensor, shape: ModelShape) -> Tensor:
    """Return queries and keys in our order of channels. Other tensors stay as they are.

    The Llamas of llm-baselines and ibm-fms rotate channels 0 and 1, 2 and 3, and so on. Here,
    channel i of the first half is rotated with channel i of the second half.

    Args:
        pair: The tensor.
        tensor: Rows of queries, keys and values, in our order of heads.
        shape: Sizes of the model.
    """
    if pair.rows is None:
        return tensor
    groups, heads, width = pair.rows
    # With a part of the channels, pairs would lie in that part only.
    if shape.rotary_dim != width:
        raise ConfigError(
            f"--rotary-percent {shape.config.rotary_percent} is not possible here: these models "
            "rotate all channels of a head"
        )
    # In each group: the queries, the key, the value. The value is not rotated.
    by_group = tensor.reshape(groups, heads + 2, width, *tensor.shape[1:])
    rotated = by_group[:, :-1].unflatten(2, (width // 2, 2)).transpose(2, 3).flatten(2, 3)
    return torch.cat((rotated, by_group[:, -1:]), dim=1).flatten(0, 2)


def order_nanogpt_states(shapes: Shapes) -> list[list[str]]:
    """Return the parameters of each group of nanoGPT's optimizer, in their order.

    Those with weight decay come first. These are all matrices.
    """
    matrices = [name for name, size in shapes.items() if len(size) >= 2]
    others = [name for name, size in shapes.items() if len(size) < 2]
    return [matrices, others]


def order_llm_baselines_states(shapes: Shapes) -> list[list[str]]:
    """Return the parameters of each group of llm-baselines' optimizer, in their order.

    Those with weight decay come first. These are the matrices of the layers. The names are sorted
    as text, so layer 10 comes before layer 2.
    """
    decayed = {name for name, size in shapes.items() if len(size) >= 2 and ".h." in name}
    return [sorted(decayed), sorted(shapes.keys() - decayed)]
