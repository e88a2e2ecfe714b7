"""Megatron core's flags of gpt-oss give the model of the preset."""

import dataclasses

import pytest

from megatron.base.errors import ConfigError
from megatron.commands.parts import load_command_line
from megatron.config.model import ModelConfig
from megatron.config.presets import read_preset
from megatron.console.preset_table import build_preset_shape

# Published for gpt-oss 20B. Each query reads 128 tokens before its own, one more than the model's.
SIZES = """\
--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64
--group-query-attention --num-query-groups 8 --kv-channels 64 --seq-length 4096
--max-position-embeddings 131072 --position-embedding-type rope --rotary-base 150000
--rotary-percent 1.0 --num-experts 32 --moe-ffn-hidden-size 2880 --moe-router-topk 4
--moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
--normalization RMSNorm --norm-epsilon 1e-5 --untie-embeddings-and-output-weights
--padded-vocab-size 201088 --micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data
--no-masked-softmax-fusion --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 200018
"""
GATE = "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0"
WINDOW = "--window-size 128,0 --window-attn-skip-freq 2"


def load(flags: str) -> ModelConfig:
    return load_command_line([*SIZES.split(), *flags.split()], "test").config.model


def test_the_published_flags_give_the_preset() -> None:
    found = load(f"{GATE} {WINDOW} --softmax-type learnable --enable-gpt-oss")
    preset = build_preset_shape(read_preset("gpt-oss-20b")).config
    # A gate has no form of GELU, and only learned positions have a size.
    unused = {"max_position_embeddings": None, "bias_gelu_fusion": True}
    same = unused | {"sliding_window": 128}
    assert found.sliding_window == 129
    assert dataclasses.replace(found, **same) == preset  # type: ignore[arg-type]


def test_a_list_names_the_layers_with_a_window() -> None:
    found = load(f"{GATE} --window-size (7,0) --window-attn-skip-freq [1,1,0]*8")
    assert (found.sliding_window, found.full_attention_layers) == (8, "2::3")
    assert load(f"{GATE} --window-size (-1,0)").sliding_window is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--quick-geglu", "Give all three"),
        ("--glu-linear-offset 1.0 --activation-func-clamp-value 7.0", "Give all three"),
        (GATE.replace("7.0", "5"), "--activation-func-clamp-value 7.0"),
        (f"{GATE} --window-size 128,4", "must be N,0"),
        (f"{GATE} --window-size 128,0 --window-attn-skip-freq [1,0]", "24 layers"),
    ],
)
def test_other_values_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags)
