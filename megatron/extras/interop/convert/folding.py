"""The factors of a parametrization, folded into weights.

Other programs have no such factors. A model of the standard parametrization with folded weights
computes the same function. The optimizer's settings by parameter are lost, so a training that goes
on there has other learning rates.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.model.shape import ModelShape

_BRANCH_OUTPUTS = {
    "input": (".attention.out.", ".mlp.down.", ".mlp.shared.down.", ".mlp.experts.down"),
    "output": (".attention_output_norm.", ".mlp_output_norm."),
}
"""--norm-placement -> the last parameters of a residual branch."""


def fold_description(model: ModelConfig) -> ModelConfig:
    """Return the description of the model with folded weights."""
    return replace(
        model, parametrization="standard", base_width=None, base_depth=None, base_kv_channels=None
    )


def fold_rows(rows: Tensor, name: str, first: int, shape: ModelShape) -> Tensor:
    """Return rows of a parameter, multiplied by the factor on their outputs.

    Args:
        rows: Neighbouring rows of the complete parameter.
        name: Name of the parameter.
        first: Number of the first of these rows.
        shape: Sizes of the model, with its parametrization.
    """
    if name.startswith("head.norm."):
        return rows * shape.output_factor
    # A norm after attention would undo a factor before it.
    if any(part in name for part in _BRANCH_OUTPUTS[shape.config.norm_placement]):
        return rows * shape.residual_factor
    # A norm of queries undoes factors of their projection.
    if ".attention.q_norm." in name:
        return rows * shape.query_factor
    if ".attention.qkv." in name and shape.config.qk_norm is None:
        # Each group has its query heads, its key and its value.
        heads = shape.config.num_attention_heads // shape.query_groups
        head = torch.arange(first, first + len(rows)) // shape.head_dim % (heads + 2)
        factors = torch.where(head < heads, shape.query_factor, 1.0)
        return rows * factors.view(-1, *(1 for _ in rows.shape[1:]))
    return rows
