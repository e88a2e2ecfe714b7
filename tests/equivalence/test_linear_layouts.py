"""Tests that layers with a gated delta net on several ranks equal one process.

Samples have several chunks of the delta rule, and documents that begin inside of chunks, on other
ranks, and at single tokens. Compared are loss and norm of each step, the gradient of each
parameter, an evaluation and likelihoods.

With the usual settings, fp32 is not exact enough for the bound of 1e-5. The first token of a
document has the output beta (q k) v, and after its norm only the sign of q k is left. Adam makes
1e-3 of a rounding of it in 10 steps. So layouts are compared in two ways: in fp64 with the usual
settings, and in fp32 with settings that need fewer digits to 1e-5.

In fp64, the bound is 1e-9 in the first three steps. Training amplifies rounding there too: in one
process, another last digit of the learning rate changes the gradient norm of step 10 by 7e-10, and
by 8e-9 with Muon. So later steps have the bound of 1e-6, and of 1e-5 with Muon.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.corpus import curve, worst
from equivalence.test_context_layouts import (
    A2A,
    BOUND,
    EOD,
    FIXTURES,
    NO_DROPOUT,
    PP2,
    STEADY,
    Train,
    find_worst,
    make_train_world,
    train_cases,
)
from process_pool import ProcessPool, pretrain, succeed
from suites import by_suite
from torch import Tensor

SIZES = (
    "--num-layers 5 --hidden-size 48 --num-attention-heads 12 --num-query-groups 4 "
    f"--seq-length 160 --vocab-file {FIXTURES}/gpt2-tiny-vocab.json "
    f"--merge-file {FIXTURES}/gpt2-tiny-merges.txt --make-vocab-size-divisible-by 7 --lr 1e-3 "
    "--lr-decay-style constant --eval-iters 1 --split 80,20,0 --no-add-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rotary "
    "--normalization RMSNorm --glu-activation swiglu --ffn-hidden-size 64 --init-method-std 0.1 "
    f"{STEADY} {NO_DROPOUT} --experimental-attention-variant gated_delta_net "
    "--linear-value-head-dim 10 --linear-num-key-heads 4"
)
MODELS = {
    "documents": f"{EOD} --linear-num-value-heads 8 --linear-attention-freq 3",
    "whole samples, negative values": "--linear-num-value-heads 4 --linear-attention-freq "
    "([1]*1+[0]*1+[1]*3) --linear-allow-neg-eigval --linear-time-step log-uniform "
    "--norm-placement output --qk-norm full --init-method-std 0.02",
    "experts": f"{EOD} --linear-num-value-heads 8 --linear-attention-freq 4 --num-experts 4 "
    "--moe-ffn-hidden-size 20 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
}
DOCUMENTS, WHOLE, EXPERTS = MODELS
IN_FP32 = "--linear-key-head-dim 16 --linear-norm-epsilon 1e-2"
IN_FP64 = "--linear-key-head-dim 6"
FP64_BOUND = 1e-9
FP64_STEPS = 3
"""The steps with this bound."""
LATER_BOUND = 1e-6
TP2 = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
CP2 = "--context-parallel-size 2"
HSDP = "--sharding-strategy hsdp --hsdp-shard-size 2"
Moments = dict[tuple[str, str], Tensor]
"""Kind and name -> a state of the optimizer after the first step."""


@dataclass(frozen=True)
class Layout:
    """Ranks that share the model or the sequence."""

    name: str
    ranks: int
    flags: str
    models: tuple[str, ...] = (DOCUMENTS, WHOLE)
    common: str = ""
    """Flags that one process gets too."""
    short: bool = False


LAYOUTS = [
    Layout("data 2", 2, "", tuple(MODELS)),
    Layout("TP 2", 2, TP2),
    Layout("TP 4, SP", 4, f"--tensor-model-parallel-size 4 {SP}"),
    Layout("TP 2, uneven PP 2", 4, f"{TP2} {PP2}"),
    Layout(
        *("PP 4, given sizes", 4),
        "--pipeline-model-parallel-size 4 --pp-partition-method layers:2,1,1,1",
    ),
    Layout("CP 2", 2, CP2),
    Layout("CP 2, a2a, ZeRO 3", 4, f"{CP2} {A2A} --zero-stage 3"),
    Layout("CP 4", 4, "--context-parallel-size 4"),
    Layout("CP 4, a2a", 4, f"--context-parallel-size 4 {A2A}"),
    Layout("CP 2, TP 2, SP, core recomputed", 4, f"{CP2} {TP2} {SP} --recompute-attention-core"),
    Layout(
        "CP 2, TP 2, SP, uneven PP 2, recomputed",
        8,
        f"{CP2} {TP2} {SP} {PP2} --checkpoint-activations",
        short=True,
    ),
    Layout(
        "EP 2, CP 2, TP 2, ZeRO 1",
        8,
        f"--expert-model-parallel-size 2 {CP2} {TP2} --zero-stage 1",
        (EXPERTS,),
    ),
    Layout("HSDP, TP 2", 8, f"{HSDP} {TP2} --zero-stage 3"),
    Layout(
        "ZeRO 2, half recomputed",
        4,
        "--zero-stage 2 --checkpoint-activations --checkpoint-fraction 1/2",
    ),
    Layout("Muon, TP 2", 4, TP2, common="--optimizer muon"),
]
# Compiled code keeps fp32, so it has no counterpart in fp64.
COMPILED = Layout(
    *("TP 2, SP, compiled", 2, f"{TP2} {SP} --use-torch-compile", (WHOLE,)),
    common="--num-layers 2 --linear-attention-freq 2",
)


def train_in_fp64(cases: Sequence[str]) -> Any:
    """Train every case on this rank in fp64 in place of fp32, also weights and messages."""
    from megatron.engine import optimizer

    narrow, convert, dtypes = torch.float32, torch.Tensor.float, dict(optimizer.MOMENT_DTYPES)
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    optimizer.MOMENT_DTYPES["fp32"] = torch.float64
    try:
        return train_cases(cases)
    finally:
        torch.float32 = narrow
        torch.Tensor.float = convert  # type: ignore[method-assign]
        torch.set_default_dtype(narrow)
        optimizer.MOMENT_DTYPES.update(dtypes)


@pytest.fixture(scope="module")
def train_world(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """See `make_train_world`."""
    paths = f"--data-path {corpus} --data-cache-path {tmp_path_factory.mktemp('cache')}"
    flags = f"{SIZES} {paths} --micro-batch-size 1"
    wide = make_train_world(pool, f"{flags} {IN_FP64}", MODELS, train_in_fp64)
    single = make_train_world(pool, f"{flags} {IN_FP32}", MODELS)

    def run(ranks: int, models: Sequence[str], flags: str, *, in_fp64: bool) -> Any:
        if in_fp64:
            return wide(ranks, models, flags)
        return single(ranks, models, flags)

    return run


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=each.name, marks=() if each.short else pytest.mark.full)
        for each in LAYOUTS
    ],
)
def test_a_layout_equals_one_process_in_fp64(layout: Layout, train_world: Train) -> None:
    models, common = by_suite(layout.models[:1], layout.models), layout.common
    alone = train_world(1, models, common, in_fp64=True)
    together = train_world(layout.ranks, models, f"{common} {layout.flags}", in_fp64=True)
    for model, found, expected in zip(models, together, alone, strict=True):
        assert all(tensor.dtype == torch.float64 for tensor in found[4].values())
        first = find_worst(
            *((each[0][:FP64_STEPS], (), (), (), each[4]) for each in (found, expected))
        )
        assert max(first.values()) < FP64_BOUND, f"{model}: {first}"
        differences = find_worst(found, expected)
        bound = BOUND if "muon" in f"{common} {layout.flags}" else LATER_BOUND
        assert max(differences.values()) < bound, f"{model}: {differences}"


@pytest.mark.full
@pytest.mark.parametrize("layout", [*LAYOUTS, COMPILED], ids=lambda each: each.name)
def test_a_layout_equals_one_process_in_fp32(layout: Layout, train_world: Train) -> None:
    models, common = layout.models, layout.common
    alone = train_world(1, models, common, in_fp64=False)
    together = train_world(layout.ranks, models, f"{common} {layout.flags}", in_fp64=False)
    for model, found, expected in zip(models, together, alone, strict=True):
        differences = find_worst((*found[:4], {}), (*expected[:4], {}))
        differences["gradients"] = compare_moments(found[4], expected[4])
        assert max(differences.values()) < BOUND, f"{model}: {differences}"


def compare_moments(found: Moments, expected: Moments) -> float:
    """Return the largest difference of the first moments, relative to the largest of a layer.

    The gradients of decays are small differences of large numbers, because the norm after the delta
    rule removes what is common to the tokens. Their rounding is that of the layer.
    """
    assert found.keys() == expected.keys()
    differences: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for (kind, name), tensor in expected.items():
        if kind not in ("exp_avg", "momentum"):
            continue
        layer = kind + name.partition(".attention.")[0]
        difference = float((found[kind, name] - tensor).abs().max())
        assert isfinite(difference), name
        differences[layer] = max(differences.get(layer, 0.0), difference)
        sizes[layer] = max(sizes.get(layer, 0.0), float(tensor.abs().max()))
    assert differences
    return max(differences[layer] / size for layer, size in sizes.items())


def test_a_resume_under_another_layout(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    """Saved on TP 2 x PP 2, resumed on CP 2 with ZeRO 3, and at last on one process."""
    size = "--micro-batch-size 1 --log-interval 1"
    shared = f"{SIZES} {MODELS[DOCUMENTS]} {IN_FP32} --data-path {corpus} {size}"
    curves = []
    for name, layouts in (
        ("moved", ((4, f"{TP2} {PP2}", 2), (4, f"{CP2} --zero-stage 3", 4), (1, "", 6))),
        ("alone", ((1, "", 6),)),
    ):
        folder = tmp_path / name
        for number, (ranks, flags, last) in enumerate(layouts):
            own = f"--save {folder} --load {folder} --data-cache-path {tmp_path} --eval-iters 0"
            more = "--require-load" if number else ""
            argv = f"{shared} {own} {flags} {more} --exit-interval {last}".split()
            succeed(pool.run(ranks, pretrain, argv))
        curves.append(curve(folder))
    assert len(curves[1]) == 6
    assert worst(*curves) < BOUND
