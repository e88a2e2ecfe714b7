"""Everything that treats layers by their kind of attention has each kind, or refuses it by name.

`KINDS` says for each kind and each part of the trainer whether it is built. A kind that is missing
there fails the first test.
"""

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatron.config.fields import build_config
from megatron.config.model import AttentionKind
from megatron.engine import engine_base
from megatron.extras.planner.verify.reduction import reduce_plan
from megatron.extras.step.deepspeed.kind import DEEPSPEED
from megatron.model.execution import Execution
from megatron.plan.kernel_choice import find_graph_obstacle
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

SIZES: dict[str, Any] = {
    "model.num_layers": 4,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.seq_length": 32,
    "batch.micro_batch_size": 1,
    "batch.train_iters": 8,
    "optimizer.lr": 1e-3,
    "tokenizer.vocab_size": 100,
    "data.mock_data": True,
}
FLAGS: dict[str, dict[str, Any]] = {
    "dot_product": {},
    "latent": {
        "model.multi_latent_attention": True,
        "model.q_lora_rank": 12,
        "model.position_embedding_type": "rotary",
        "model.add_bias_linear": False,
    },
    "gated_delta_net": {
        "model.experimental_attention_variant": "gated_delta_net",
        "model.linear_attention_freq": "2",
        "model.linear_num_key_heads": 2,
        "model.linear_num_value_heads": 4,
    },
}
"""Kind of attention -> the settings of a model that has layers of it."""


def make_plan(kind: str, **changes: Any) -> Plan:
    return resolve(build_config(SIZES | FLAGS[kind] | changes), 1)


def list_errors(**changes: Any) -> Callable[[str, Path], list[str]]:
    """Return a function that lists the errors of a plan with these settings."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda kind, folder: list(make_plan(kind, **dotted).errors)


def verify(kind: str, folder: Path) -> list[str]:
    """Return what is wrong with a reduced copy."""
    plan = make_plan(kind)
    copy = reduce_plan(plan, folder).plan
    kinds = {copy.shape.describe_layer(number).attention for number in range(2)}
    return [f"the copy lacks {kind}"] * (kind not in kinds)


def use_deepspeed(kind: str, folder: Path) -> list[str]:
    return [found.text for rule in DEEPSPEED.rules for found in rule(make_plan(kind))]


def record_graphs(kind: str, folder: Path) -> list[str]:
    return [text] if (text := find_graph_obstacle(make_plan(kind))) else []


PARTS: dict[str, Callable[[str, Path], list[str]]] = {
    "verification": verify,
    "DeepSpeed": use_deepspeed,
    "CUDA graphs": record_graphs,
    "compiled layers": list_errors(kernels__use_torch_compile=True),
    "float8": list_errors(
        precision__fp8_format="e4m3", precision__fp8_recipe="tensorwise", precision__bf16=True
    ),
    "muP": list_errors(model__parametrization="mup", model__base_width=16),
}
"""Part of the trainer -> a function that returns why it refuses a kind."""
KINDS: dict[str, dict[str, str]] = {
    "dot_product": {},
    "latent": {
        "DeepSpeed": "--multi-latent-attention",
        "CUDA graphs": "latent attention",
        "float8": "--multi-latent-attention",
        "muP": "--multi-latent-attention",
    },
    "gated_delta_net": {
        "DeepSpeed": "--experimental-attention-variant gated_delta_net",
        "muP": "--experimental-attention-variant gated_delta_net",
    },
}
"""Kind -> parts that refuse it, and the name that the message has. All others have it."""


def name_attention(device: str, **options: Any) -> str:
    """Return the row of the start's table for latent attention."""
    mesh = Mock(device=torch.device(device))
    plan = make_plan("latent", **{"model.attention_dropout": 0.0})
    return engine_base._describe_attention(plan, mesh, Execution(**options))[0]


def test_the_table_names_padded_values() -> None:
    """A head of 192 channels has values of 128."""
    padded = ", values padded to 192 channels"
    assert name_attention("cpu") == f"SDPA{padded}"
    assert name_attention("cuda") == "SDPA"
    assert name_attention("cuda", attention_kernels=("fused", "flash")) == "SDPA"
    assert name_attention("cuda", attention_kernels=("flash", "unfused")) == f"SDPA{padded}"
    assert name_attention("cuda", pack_documents=True) == f"torch's varlen_attn{padded}"


def test_each_kind_is_listed() -> None:
    assert set(KINDS) == set(FLAGS) == set(typing.get_args(AttentionKind))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_a_kind_or_refuses_it_by_name(kind: str, part: str, tmp_path: Path) -> None:
    messages = PARTS[part](kind, tmp_path)
    name = KINDS[kind].get(part)
    if name is None:
        assert messages == []
    else:
        assert any(name in message for message in messages), messages
