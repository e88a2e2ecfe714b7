"""The planner's bytes of a gated delta net are those of PyTorch's operators."""

from typing import Any

import pytest
import torch
from model.builders import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.extras.planner.cost.delta_net import BACKWARD, FORWARD, KEPT, get_sizes
from megatron.model.gpt import GPT
from megatron.model.inputs import START, Inputs
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel

LENGTH = 512
SHAPES = {
    "wide values": (2, 8, 64, 96),
    "as many heads of values": (6, 6, 24, 48),
    "wide keys": (2, 8, 96, 16),
}
"""Heads of keys and of values, and their widths."""


def list_tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


class MovedBytes(TorchDispatchMode):
    """Adds up what operators read and write, without the linear layers and views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        read, written = list_tensors((args, kwargs)), list_tensors(result)
        name = function.overloadpacket.__name__
        known = {each.untyped_storage().data_ptr() for each in read}
        is_view = all(each.untyped_storage().data_ptr() in known for each in written)
        if name not in ("mm", "addmm") and (not is_view or name.endswith("_")):
            self.bytes += sum(each.numel() * each.element_size() for each in [*read, *written])
        return result


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_bytes_of_a_layer(sizes: tuple[int, int, int, int]) -> None:
    keys, values, key_dim, value_dim = sizes
    config = tiny_config(
        seq_length=LENGTH,
        position_embedding_type="rotary",
        normalization="RMSNorm",
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq="2",
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
    )
    shape = ModelShape(config, 100, 128)
    model = GPT(shape, TensorParallel())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = model.bfloat16()
    layer = model.get_blocks()[0].attention
    inputs = Inputs(torch.zeros(1, LENGTH, dtype=torch.long))
    positions = model.position_tables.make_positions(inputs, torch.bfloat16)
    x = torch.randn(LENGTH, 1, config.hidden_size).bfloat16().requires_grad_()
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), x)}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        MovedBytes() as forward,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = layer(x, positions, START)
    with MovedBytes() as backward:
        out.sum().backward()
    counted = get_sizes(shape, 1)
    found = sum(kept.values()), forward.bytes, backward.bytes
    expected = [LENGTH * counted.count(each) for each in (KEPT, FORWARD, BACKWARD)]
    assert found == pytest.approx(expected, rel=0.04)
