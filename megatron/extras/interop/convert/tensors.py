"""Our tensors and those of Hugging Face: names, and the functions that convert the layouts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.extras.interop.convert.architectures import Architecture
from megatron.extras.interop.convert.latent_fields import LATENT_QUERY, order_rows
from megatron.model.experts.routing import BALANCE
from megatron.model.gpt import GPT
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel

_BLOCKS = "blocks."
_QKV = "attention.qkv"
_EXPERTS = "mlp.experts"
VOCABULARY_TENSORS = ("embedding.word.weight", "head.weight")
"""Our tensors with a row for each token id."""


@dataclass(frozen=True)
class TensorPair:
    """One of our tensors, and those of Hugging Face with the same numbers.

    There are three for queries, keys and values, one for each expert, and one for all others.
    """

    name: str
    """Name of the parameter in the complete model."""
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    layer: int | None
    """Number of the layer, or None for the embedding and the head."""
    transposed: bool = False
    rows: tuple[int, int, int] | None = None
    """Groups, query heads of a group, and width of a head. None: no queries, keys and values."""
    fused: bool = False
    """Whether Hugging Face has one tensor with all queries before all keys and values."""
    order: tuple[int, ...] | None = None
    """The row of ours for each row of Hugging Face's tensor. None: the same order."""

    def to_hf(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return Hugging Face's tensors with the same numbers."""
        parts: tuple[Tensor, ...] = tensor.chunk(len(self.hf_names))
        if self.rows is not None:
            groups, heads, width = self.rows
            by_group = tensor.reshape(groups, heads + 2, width, *tensor.shape[1:])
            parts = tuple(part.flatten(0, 2) for part in by_group.split((heads, 1, 1), dim=1))
            if self.fused:
                parts = (torch.cat(parts),)
        if self.order is not None:
            parts = tuple(part[list(self.order)] for part in parts)
        if self.transposed:
            parts = tuple(part.t() for part in parts)
        # The kernel of a convolution has one more dimension of size 1.
        sized = zip(parts, self.hf_shapes, strict=True)
        return tuple(part.reshape(size).contiguous() for part, size in sized)

    def from_hf(self, parts: Sequence[Tensor]) -> Tensor:
        """Return our tensor with the numbers of Hugging Face's."""
        if self.transposed:
            parts = [part.t() for part in parts]
        if self.order is not None:
            ours = torch.empty_like(parts[0])
            ours[list(self.order)] = parts[0]
            return ours
        if self.rows is None:
            whole = torch.cat(list(parts))
            # A part of the vocabulary has fewer rows than the shape says, so only those with
            # another number of dimensions are viewed.
            if whole.dim() != len(self.shape):
                whole = whole.view(self.shape)
            return whole
        groups, heads, width = self.rows
        if self.fused:
            rows = groups * width
            parts = parts[0].split((rows * heads, rows, rows))
        by_group = [part.reshape(groups, -1, width, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 2).contiguous()


def list_our_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name and global shape of each parameter of the complete model."""
    with torch.device("meta"):
        model = GPT(shape, TensorParallel())
    return {
        name: parameter.spec.shape  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
    }


def pair_tensors(architecture: Architecture, shape: ModelShape) -> list[TensorPair]:
    """Return a pair for each of our tensors, in our order: embedding, layers, head.

    Raises:
        ConfigError: a tensor has no name in the architecture of Hugging Face.
    """
    pairs = [
        _pair_tensor(architecture, shape, name, size)
        for name, size in list_our_tensors(shape).items()
    ]
    if shape.config.moe_router_enable_expert_bias:
        # It is no parameter, because no gradient changes it.
        size = (shape.config.num_experts or 0,)
        names = [f"{_BLOCKS}{layer}{BALANCE}" for layer in sorted(shape.expert_layers)]
        pairs += [_pair_tensor(architecture, shape, name, size) for name in names]
    return pairs


def _pair_tensor(
    architecture: Architecture, shape: ModelShape, name: str, size: tuple[int, ...]
) -> TensorPair:
    layer = None
    prefix = ""
    inside = name
    if name.startswith(_BLOCKS):
        _, number, inside = name.split(".", 2)
        layer = int(number)
        prefix = f"{architecture.layers}.{number}."
    module, _, leaf = inside.rpartition(".")
    if module == _EXPERTS and architecture.experts is not None:
        assert shape.config.num_experts is not None
        experts = range(shape.config.num_experts)
        hf_names = tuple(architecture.experts.name_matrix(prefix, each, leaf) for each in experts)
        one = (size[0] // len(hf_names), *size[1:])
        hf_sizes = (one,) * len(hf_names)
        return TensorPair(name, size, hf_names, hf_sizes, layer)
    if module == _QKV:
        return _pair_qkv(architecture, shape, name, size, layer, prefix)
    order = None
    if shape.attention == "latent":
        order = order_rows(inside, shape.config)
    modules = dict(architecture.modules)
    if layer in shape.linear_layers:
        modules |= architecture.linear_modules
    elif shape.config.q_lora_rank is not None:
        modules["attention.query"] = LATENT_QUERY
    if inside in modules:
        # The table of positions is a parameter of our embedding, and a module of `transformers`.
        hf_name = prefix + modules[inside]
    elif module in modules:
        hf_name = f"{prefix}{modules[module]}.{leaf}"
    else:
        raise ConfigError(f"{architecture.model_type} has no tensor for our {name}")
    transposed = module in architecture.transposed and len(size) == 2
    hf_size = size[::-1] if transposed else size
    if leaf.endswith("_convolution"):
        hf_size = (size[0], 1, size[1])
    return TensorPair(name, size, (hf_name,), (hf_size,), layer, transposed, order=order)


def _pair_qkv(
    architecture: Architecture,
    shape: ModelShape,
    name: str,
    size: tuple[int, ...],
    layer: int | None,
    prefix: str,
) -> TensorPair:
    leaf = name.rpartition(".")[2]
    hf_names = tuple(f"{prefix}{module}.{leaf}" for module in architecture.qkv)
    if architecture.fused == "by head":
        # With one head in each group, our rows have the same order.
        return TensorPair(name, size, hf_names, (size,), layer)
    groups = shape.query_groups
    heads = shape.config.num_attention_heads // groups
    width = shape.head_dim
    counts: tuple[int, ...] = (groups * heads * width, groups * width, groups * width)
    if architecture.fused == "thirds":
        counts = (sum(counts),)
    transposed = _QKV in architecture.transposed and len(size) == 2
    hf_sizes = tuple((count, *size[1:]) for count in counts)
    if transposed:
        hf_sizes = tuple(each[::-1] for each in hf_sizes)
    rows = (groups, heads, width)
    fused = architecture.fused == "thirds"
    return TensorPair(name, size, hf_names, hf_sizes, layer, transposed, rows, fused=fused)


def list_hf_shapes(pairs: Sequence[TensorPair]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor of Hugging Face, in the order of the pairs."""
    return {
        name: shape
        for pair in pairs
        for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
    }


Item = TypeVar("Item")


def divide_by_size(sizes: Iterable[tuple[Item, int]], most: int) -> Iterator[list[Item]]:
    """Yield items in parts of at most `most` bytes, in their order. A larger item is alone."""
    part: list[Item] = []
    used = 0
    for item, size in sizes:
        if part and used + size > most:
            yield part
            part = []
            used = 0
        part.append(item)
        used += size
    yield part


_SHOWN = 12
"""Number of problems that a message lists."""


def refuse_problems(problems: Sequence[str], description: str) -> None:
    """Refuse a checkpoint if there are problems with its tensors.

    Args:
        problems: A line for each problem.
        description: What the tensors do not fit, such as config.json.

    Raises:
        CheckpointError: there is at least one problem. The message lists the first 12.
    """
    if not problems:
        return
    shown = list(problems[:_SHOWN])
    if len(problems) > _SHOWN:
        shown.append(f"... {len(problems) - _SHOWN} more")
    raise CheckpointError(f"the tensors do not fit {description}:\n  " + "\n  ".join(shown))
