"""Tests that models with the parts of recent models train in each layout as on one process.

The covering set of `layouts.py` has only three models. The models here have the other parts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from equivalence.corpus import NO_DROPOUT, command, curve, worst
from process_pool import ProcessPool, pretrain, succeed
from suites import by_suite

from megatron.model.layer_parts import ACTIVATIONS, NORMS

BOUND = 1e-5
# Batch sizes 4 4 8 8, or 4 4 4 4 8 8 8.
STEPS, HALF = by_suite((4, 2), (7, 4))
_SMALL = (
    f"--num-layers 4 --train-samples {by_suite(24, 40)} --rampup-batch-size 4 4 {by_suite(8, 16)} "
    "--global-batch-size 8"
)
_ROTARY = "--position-embedding-type rotary --normalization RMSNorm"
MODELS = {
    "olmo": f"{_ROTARY} --qk-norm full --norm-placement output --glu-activation swiglu "
    "--ffn-hidden-size 96 --num-query-groups 4 --no-add-bias-linear --sliding-window 24 "
    "--full-attention-layers 3::4 --no-rope-layers 1::2 --rope-scaling yarn "
    # OLMo has no biases. A Llama with attention_bias and mlp_bias has these.
    "--rope-original-length 128 --add-attention-bias --add-mlp-bias",
    "apertus": f"{_ROTARY} --qk-norm head --activation xielu --num-query-groups 4 "
    "--no-add-bias-linear --rope-scaling llama3 --rope-original-length 128",
    "neox": "--position-embedding-type rotary --rotary-percent 0.25 --parallel-residual "
    "--no-norm-bias --no-add-bias-linear --add-qkv-bias --activation squared_relu",
    "gate": f"{_ROTARY} --qk-norm head --num-query-groups 2 --attention-output-gate "
    "--apply-layernorm-1p --no-add-bias-linear",
    # Two or four tensor-parallel ranks share these query groups.
    "multi-query": f"{_ROTARY} --num-query-groups 1 --qk-norm head",
    "two groups": f"{_ROTARY} --num-query-groups 2 --no-add-bias-linear",
}
EACH_PART = {
    **{name: f"--normalization {name}" for name, _ in NORMS.list_rows()},
    **{
        name: f"{'--glu-activation' if row.gated else '--activation'} {name}"
        for name, row in ACTIVATIONS.list_rows()
    },
}
"""Each norm and each activation. A new one is compared without a change here."""
MODELS |= EACH_PART
TWO_BY_TWO = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1"


@pytest.fixture(scope="module")
def alone(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function that trains a model on one process and returns the folder.

    Each model is trained only once.
    """
    folders: dict[str, Path] = {}

    def run(model: str) -> Path:
        if model not in folders:
            folders[model] = tmp_path_factory.mktemp(model)
            argv = command(
                folders[model],
                corpus,
                "gpt2",
                "ramp",
                NO_DROPOUT,
                f"{_SMALL} {MODELS[model]} --micro-batch-size 4",
            )
            succeed(pool.run(1, pretrain, argv))
        return folders[model]

    return run


def full(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("model", "ranks", "flags"),
    [
        ("olmo", 4, f"{TWO_BY_TWO} --pipeline-model-parallel-size 2 --checkpoint-activations"),
        ("apertus", 4, f"{TWO_BY_TWO} --zero-stage 3"),
        full("neox", 2, "--tensor-model-parallel-size 2 --micro-batch-size 1"),
        full("multi-query", 4, f"{TWO_BY_TWO} --zero-stage 3"),
        full("multi-query", 4, f"{TWO_BY_TWO} --pipeline-model-parallel-size 2"),
        full("multi-query", 2, "--tensor-model-parallel-size 2 --use-torch-compile"),
        full("multi-query", 2, "--tensor-model-parallel-size 2 --deepspeed"),
        full("multi-query", 4, f"{TWO_BY_TWO} --zero-stage 3 --deepspeed"),
        full("gate", 4, "--tensor-model-parallel-size 4 --sequence-parallel"),
        full(
            "gate", 4, f"{TWO_BY_TWO} --pipeline-model-parallel-size 2 --recompute-attention-core"
        ),
        full("gate", 4, f"{TWO_BY_TWO} --context-parallel-size 2 --zero-stage 3"),
        full("gate", 2, "--tensor-model-parallel-size 2 --use-torch-compile"),
        full("two groups", 4, "--tensor-model-parallel-size 4 --sequence-parallel"),
        full("olmo", 4, f"{TWO_BY_TWO} --zero-stage 3"),
        full("olmo", 2, "--tensor-model-parallel-size 2 --recompute-attention-core"),
        full("olmo", 2, "--tensor-model-parallel-size 2 --use-torch-compile"),
        full("apertus", 4, f"{TWO_BY_TWO} --pipeline-model-parallel-size 2"),
        full("apertus", 2, "--tensor-model-parallel-size 2 --use-torch-compile"),
        full("apertus", 2, "--tensor-model-parallel-size 2 --deepspeed"),
        full("olmo", 4, f"{TWO_BY_TWO} --zero-stage 3 --deepspeed"),
        full("neox", 4, f"{TWO_BY_TWO} --pipeline-model-parallel-size 2 --use-torch-compile"),
        full("neox", 4, f"{TWO_BY_TWO} --zero-stage 3"),
        *(full(name, 4, f"{TWO_BY_TWO} --pipeline-model-parallel-size 2") for name in EACH_PART),
        *(full(name, 4, f"{TWO_BY_TWO} --zero-stage 3") for name in EACH_PART),
    ],
)
def test_a_layout_trains_as_one_process(
    model: str,
    ranks: int,
    flags: str,
    pool: ProcessPool,
    corpus: str,
    alone: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    argv = command(
        tmp_path,
        corpus,
        "gpt2",
        "ramp",
        NO_DROPOUT,
        f"{_SMALL} {MODELS[model]} --micro-batch-size 2 --check-invariants-interval 2 {flags}",
    )
    succeed(pool.run(ranks, pretrain, argv))
    assert len(curve(tmp_path)) == STEPS
    assert worst(curve(tmp_path), curve(alone(model))) < BOUND


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("multi-query", (4, f"{TWO_BY_TWO} --zero-stage 2"), (1, "")),
        full("multi-query", (1, ""), (4, f"{TWO_BY_TWO} --zero-stage 3")),
        full("multi-query", (2, "--tensor-model-parallel-size 2 --deepspeed"), (1, "")),
        full("two groups", (4, "--tensor-model-parallel-size 4"), (2, TWO_BY_TWO)),
        full("apertus", (4, f"{TWO_BY_TWO} --zero-stage 3"), (1, "")),
        full("olmo", (2, TWO_BY_TWO), (4, f"{TWO_BY_TWO} --zero-stage 3")),
    ],
)
def test_a_resume_under_another_layout(
    model: str,
    before: tuple[int, str],
    after: tuple[int, str],
    pool: ProcessPool,
    corpus: str,
    alone: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    for (ranks, flags), more in ((before, f"--exit-interval {HALF}"), (after, "--require-load")):
        shared = f"{_SMALL} {MODELS[model]} --micro-batch-size 2"
        argv = command(tmp_path, corpus, "gpt2", "ramp", NO_DROPOUT, f"{shared} {flags} {more}")
        succeed(pool.run(ranks, pretrain, argv))
    assert worst(curve(tmp_path), curve(alone(model))) < BOUND
