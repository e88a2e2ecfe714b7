"""Names of the tensors in checkpoints of Megatron-LM and Megatron-DeepSpeed, and their layout.

Every name is translated into the name of this package. Only the matrix into the MLP has a name of
its own, `mlp.in`, because with a gated activation it is two matrices here.

`MegatronSource` is what the layouts have in common: tensors are found by the names of this package.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError
from megatron.extras.interop.convert.megatron_args import SavedRun
from megatron.extras.interop.convert.tensors import VOCABULARY_TENSORS, list_our_tensors
from megatron.model.layer_parts import get_activation
from megatron.model.shape import ModelShape
from megatron.parallel.shard import Kind

_MLP_IN = "mlp.in"
_IN_LAYER = {
    "input_layernorm": "input_norm",
    "self_attention.query_key_value": "attention.qkv",
    "attention.query_key_value": "attention.qkv",
    "self_attention.dense": "attention.out",
    "attention.dense": "attention.out",
    "post_attention_layernorm": "post_attention_norm",
    "post_attention_norm": "post_attention_norm",
    "input_norm": "input_norm",
    "mlp.dense_h_to_4h": _MLP_IN,
    "mlp.dense_4h_to_h": "mlp.down",
    # Megatron core.
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.out",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "pre_mlp_layernorm": "post_attention_norm",
    "mlp.linear_fc1": _MLP_IN,
    "mlp.linear_fc2": "mlp.down",
}
"""Module in a layer of Megatron -> module here. Older and newer versions have different names."""
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))"
)
"""A matrix of one expert: the names of SequentialMLP and of TEGroupedMLP. Experts are numbered
within their rank."""
_OF_MIXTURE = {
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.expert_bias": "mlp.router.balance",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared.in.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared.down.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_gate",
    # GroupedMLP has all experts of a rank in one tensor, and both matrices transposed.
    "mlp.experts.weight1": "mlp.experts.in",
    "mlp.experts.weight2": "mlp.experts.down",
}
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_norm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_norm.",
}
"""Norms that Transformer Engine keeps in the matrix that follows them."""
_OUTSIDE = {
    "word_embeddings.weight": "embedding.word.weight",
    "position_embeddings.weight": "embedding.position",
    "word_embeddings.norm.weight": "embedding.norm.weight",
    "word_embeddings.norm.bias": "embedding.norm.bias",
    "final_layernorm.weight": "head.norm.weight",
    "final_layernorm.bias": "head.norm.bias",
    "final_norm.weight": "head.norm.weight",
    "final_norm.bias": "head.norm.bias",
    "output_layer.weight": "head.weight",
    "lm_head.weight": "head.weight",
}
_PREFIXES = (
    r"(?:(?:module|model\d*|language_model|tied_modules|embed|embedding|encoder|transformer|"
    r"decoder)\.)*"
)
_LAYER = re.compile(rf"{_PREFIXES}layers\.(?:(\d+)\.)?(.+)")
_PIPELINE = re.compile(r"(\d+)\.(.+)")
_NO_WEIGHT = re.compile(
    r".*(?:_extra_state.*|inv_freq|word_embeddings_for_head\.weight|\.masked_bias|attention\.bias)"
)
"""Tensors that are no weights, and the copy of a tied embedding on the last stage."""


def is_no_weight(name: str) -> bool:
    """Return whether a tensor of Megatron has no part in the model."""
    return _NO_WEIGHT.fullmatch(name) is not None


def is_parameter(name: str) -> bool:
    """Return whether a tensor of Megatron is trained. A copy of a tied embedding is."""
    return name.endswith("word_embeddings_for_head.weight") or not is_no_weight(name)


def rename(name: str) -> tuple[int | None, str] | None:
    """Return number of the layer and our name within it. None if the name is not known.

    A tensor with all layers in it has the number -1. A tensor outside of the layers has None.
    """
    found = _LAYER.fullmatch(name)
    if found is not None:
        inside = rename_in_layer(found.group(2))
        if inside is None:
            return None
        return int(found.group(1) or -1), inside
    outside = _OUTSIDE.get(re.sub(f"^{_PREFIXES}", "", name))
    if outside is None:
        return None
    return None, outside


def rename_in_layer(name: str) -> str | None:
    """Return our name of a tensor in a layer. None if the name is not known."""
    for fused, norm in _FUSED_NORMS.items():
        if name.startswith(fused):
            return norm + name.removeprefix(fused)
    if (found := _EXPERT.fullmatch(name)) is not None:
        number = found[1] or found[4]
        part = {"1": "in", "2": "down"}[found[2] or found[3]]
        return f"mlp.experts.{number}.{part}"
    if name in _OF_MIXTURE:
        return _OF_MIXTURE[name]
    module, _, leaf = name.rpartition(".")
    if module not in _IN_LAYER or leaf not in ("weight", "bias"):
        return None
    return f"{_IN_LAYER[module]}.{leaf}"


def number_pipeline_layers(names: Sequence[str]) -> dict[str, tuple[int | None, str]]:
    """Return layer and our name of the tensors of a pipeline of DeepSpeed.

    There, modules are numbered in the order of the computation, and modules without weights are
    counted too. So the layers are those with attention, in their order.

    Args:
        names: Names such as `3.self_attention.dense.weight`.
    """
    split = {name: _PIPELINE.fullmatch(name) for name in names}
    inside = {name: (int(m.group(1)), m.group(2)) for name, m in split.items() if m is not None}
    layers = sorted({number for number, rest in inside.values() if "attention." in rest})
    order = {number: index for index, number in enumerate(layers)}
    found: dict[str, tuple[int | None, str]] = {}
    for name, (number, rest) in inside.items():
        if number in order:
            renamed = rename_in_layer(rest)
            layer: int | None = order[number]
        else:
            layer = None
            # The final norm is a module by itself, so its tensors have no name but their own.
            renamed = _OUTSIDE.get(rest) or _OUTSIDE.get(f"final_layernorm.{rest}")
            follows = bool(layers) and number > layers[-1]
            if renamed == "embedding.word.weight" and follows:
                renamed = "head.weight"
        if renamed is not None:
            found[name] = (layer, renamed)
    return found


@dataclass(frozen=True)
class TensorLayout:
    """What the tensors of a checkpoint depend on, besides the sizes of the model."""

    version: float
    """The field `checkpoint_version`. It gives the order of queries, keys and values."""
    first_half: Literal["gate", "up"] = "gate"
    """The matrix of a gated MLP that comes first."""
    separate_keys: bool = False
    """With grouped queries, a rank has all queries before all keys and all values."""
    summed_biases: bool = False
    """The bias after a row-parallel matrix is the sum of those of the ranks, and not one copy."""


def describe_key(key: tuple[int | None, str]) -> str:
    """Return the name of a tensor for messages, from its layer and its name within it."""
    layer, name = key
    return name if layer is None else f"{name} of layer {layer}"


@dataclass(frozen=True)
class MegatronTensor:
    """A tensor of this package, and where Megatron stores its numbers."""

    parameter: str
    """Name of the parameter in the complete model."""
    shape: tuple[int, ...]
    layer: int | None
    name: str
    """Name within the layer, as `rename` returns it."""
    experts: int = 0
    """Number of experts, if it has the matrices of all. `name` is then that of each of them, with
    `{}` in the place of the number."""

    @property
    def keys(self) -> list[tuple[int | None, str]]:
        """Layer and name of each tensor of Megatron with a part of the numbers."""
        if not self.experts:
            return [(self.layer, self.name)]
        return [(self.layer, self.name.format(number)) for number in range(self.experts)]

    def merge(
        self, slices: Sequence[Sequence[Tensor]], shape: ModelShape, layout: TensorLayout
    ) -> Tensor:
        """Return our tensor.

        Args:
            slices: For each of `keys`, the slices of all tensor-parallel ranks, in their order.
            shape: Sizes of the model.
            layout: The layout of the stored tensors.

        Raises:
            CheckpointError: the slices do not fit the model.
        """
        try:
            merged = torch.cat([self._merge(each, shape, layout) for each in slices])
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(each.shape)) for each in slices[0])
            raise CheckpointError(
                f"{self.describe()}: slices of the shapes {shapes} do not give {self.shape}"
            ) from error
        if self.name in VOCABULARY_TENSORS:
            # The rows after the vocabulary are padding.
            merged = merged[: self.shape[0]]
        if tuple(merged.shape) != self.shape:
            raise CheckpointError(
                f"{self.describe()} has the shape {tuple(merged.shape)}, and must have {self.shape}"
            )
        return merged

    def describe(self) -> str:
        """Return the name for messages."""
        return describe_key((self.layer, self.name))

    def _merge(self, slices: Sequence[Tensor], shape: ModelShape, layout: TensorLayout) -> Tensor:
        if self.name.startswith("attention.qkv."):
            return torch.cat([_order_qkv(each, shape, layout) for each in slices])
        if self.name.startswith(f"{_MLP_IN}.") or self.name.endswith((".in", ".in.weight")):
            if not get_activation(shape.config).gated:
                return torch.cat(list(slices))
            first = layout.first_half in self.parameter.split(".")
            return torch.cat([each.chunk(2)[0 if first else 1] for each in slices])
        if self.name in VOCABULARY_TENSORS:
            return torch.cat(list(slices))
        if self.name in _ROW_PARALLEL:
            return torch.cat(list(slices), dim=1)
        if layout.summed_biases and self.name in ("attention.out.bias", "mlp.down.bias"):
            return torch.stack([each.float() for each in slices]).sum(dim=0)
        # The other tensors are replicas. Long runs on some versions let them drift apart, and
        # BLOOM's own converter averages them.
        if all(torch.equal(each, slices[0]) for each in slices):
            return slices[0]
        return torch.stack([each.float() for each in slices]).mean(dim=0)


_ROW_PARALLEL = (
    *("attention.out.weight", "mlp.down.weight", "mlp.shared.down.weight"),
    "mlp.experts.{}.down",
)
"""Matrices whose slices are columns."""


def list_megatron_tensors(shape: ModelShape) -> list[MegatronTensor]:
    """Return the tensors of the complete model, in our order."""
    found = []
    for parameter, size in list_our_tensors(shape).items():
        layer = None
        inside = parameter
        if parameter.startswith("blocks."):
            _, number, inside = parameter.split(".", 2)
            layer = int(number)
        name = re.sub(r"^(mlp(?:\.shared)?)\.(up|gate)\.", r"\1.in.", inside)
        experts = 0
        if inside.startswith("mlp.experts."):
            experts = shape.config.num_experts or 0
            name = "mlp.experts.{}." + {"down": "down"}.get(inside.rpartition(".")[2], "in")
        found.append(MegatronTensor(parameter, size, layer, name, experts))
    if shape.config.moe_router_enable_expert_bias:
        # It is no parameter, and has no states of the optimizer.
        found += [
            MegatronTensor(
                f"blocks.{layer}.mlp.router.balance",
                (shape.config.num_experts or 0,),
                layer,
                "mlp.router.balance",
            )
            for layer in sorted(shape.expert_layers)
        ]
    return found


def _order_qkv(rows: Tensor, shape: ModelShape, layout: TensorLayout) -> Tensor:
    """Return one rank's rows in our order: the queries of a group, then its key and its value.

    Since version 2, the stored layout is the same. Earlier versions have all queries first (0), or
    the three of each channel beside each other (1).
    """
    d = shape.head_dim
    heads = shape.config.num_attention_heads // shape.query_groups
    if layout.separate_keys and heads > 1:
        # Rows of the keys of this rank's groups, and as many of the values.
        width = len(rows) // (heads + 2)
        parts = rows.split((width * heads, width, width))
        groups = [part.unflatten(0, (width // d, -1)) for part in parts]
        return torch.cat(groups, dim=1).flatten(0, 1)
    if layout.version >= 2:
        return rows
    if layout.version == 1:
        return rows.unflatten(0, (-1, d, 3)).transpose(1, 2).flatten(0, 2)
    return rows.unflatten(0, (3, -1, d)).transpose(0, 1).flatten(0, 2)


Key = tuple[int | None, str]
"""Number of the layer, or None, and our name within it."""


class MegatronSource(Protocol):
    """A checkpoint of Megatron, whose tensors are found by our names."""

    run: SavedRun
    names: dict[Key, str]
    """Each weight -> its name in the checkpoint, for messages."""
    unknown: list[str]
    """Their tensors that have no place in our models."""
    slices: int
    """Tensor-parallel slices of each tensor. 1 if the files have whole tensors."""
    steps: int | None
    """Steps of the optimizer's states. None if there are none that can be read."""

    def read(self, kind: Kind, key: Key) -> list[Tensor]:
        """Return the slices of a tensor, or the tensor itself if it was stored whole."""
        ...


def flatten_tensors(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries, named with dots."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            found |= flatten_tensors(value, f"{prefix}{name}.")
    return found


def check_ranks(folder: Path, pattern: str, expected: int) -> None:
    """Check that a folder has as many files as ranks.

    Raises:
        CheckpointError: it has fewer or more.
    """
    found = sorted(path.name for path in folder.glob(pattern))
    if len(found) != expected:
        raise CheckpointError(
            f"{folder} has {len(found)} of {pattern}, and the saved arguments (tensor, pipeline "
            f"and expert parallel size) need {expected}: {', '.join(found)}"
        )


def find_steps(optimizer: Any) -> int | None:
    """Return the number of steps of an optimizer's state. None if it has none.

    Megatron stores it beside the states, apex in the parameter groups.
    """
    if not isinstance(optimizer, Mapping):
        return None
    for name in ("common_step", "step", "base_optimizer_state_step"):
        if (found := optimizer.get(name)) is not None:
            return int(found)
    groups = optimizer.get("param_groups") or []
    for group in groups:
        if isinstance(group, Mapping) and group.get("step") is not None:
            return int(group["step"])
    states = optimizer.get("state")
    if isinstance(states, Mapping):
        for each in [states, *states.values()]:
            if isinstance(each, Mapping):
                step = each.get("common_step", each.get("step"))
                if step is not None:
                    return int(step)
    return find_steps(optimizer.get("optimizer", optimizer.get("base_optimizer_state")))
