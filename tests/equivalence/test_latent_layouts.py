"""Tests that models with latent attention on several ranks equal one process.

Compared are loss and norm of each step, the gradient of each parameter, an evaluation and
likelihoods.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from equivalence.corpus import curve, worst
from equivalence.test_context_layouts import (
    A2A,
    BOUND,
    DROPOUT,
    EOD,
    NO_DROPOUT,
    PP2,
    SIZES,
    STEADY,
    Train,
    find_worst,
    make_train_world,
)
from process_pool import ProcessPool, pretrain, succeed

LATENT = (
    f"{STEADY} --multi-latent-attention --kv-lora-rank 20 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --position-embedding-type rotary --normalization RMSNorm "
    "--glu-activation swiglu --ffn-hidden-size 64 --init-method-std 0.1"
)
YARN = "--rope-scaling yarn --rope-original-length 32 --mscale 0.7 --mscale-all-dim 1"
MODELS = {
    "documents": f"{NO_DROPOUT} {EOD} --q-lora-rank 14 {YARN}",
    "window, dropout": f"{DROPOUT} --sliding-window 30 --full-attention-layers 1",
    "experts": f"{NO_DROPOUT} {EOD} --q-lora-rank 14 {YARN} --num-experts 8 "
    "--moe-layer-freq ([0]*1+[1]*2) --moe-router-topk 4 --moe-ffn-hidden-size 20 "
    "--moe-shared-expert-intermediate-size 16 --moe-router-score-function sigmoid "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-topk-scaling-factor 2.5",
}
DOCUMENTS, WINDOW, EXPERTS = MODELS
TP2 = "--tensor-model-parallel-size 2"
TP4 = "--tensor-model-parallel-size 4"
SP = "--sequence-parallel"
CP2 = "--context-parallel-size 2"
EP = "--expert-model-parallel-size"


@dataclass(frozen=True)
class Layout:
    """Ranks that share the model or the sequence."""

    name: str
    ranks: int
    flags: str
    models: tuple[str, ...] = (DOCUMENTS, WINDOW)
    common: str = ""
    """Flags that one process gets too."""
    short: bool = False


LAYOUTS = [
    Layout("TP 2", 2, TP2),
    Layout("TP 2, SP", 2, f"{TP2} {SP}", (DOCUMENTS,), short=True),
    Layout("TP 4", 4, TP4),
    Layout("TP 4, SP, core recomputed", 4, f"{TP4} {SP} --recompute-attention-core"),
    Layout("TP 2, uneven PP 2", 4, f"{TP2} {PP2}"),
    Layout("uneven PP 4", 4, "--pipeline-model-parallel-size 4", (DOCUMENTS,), "--num-layers 5"),
    Layout("CP 3, odd parts", 3, "--context-parallel-size 3", common="--seq-length 78"),
    Layout("CP 4, a2a", 4, f"--context-parallel-size 4 {A2A}", (DOCUMENTS,)),
    Layout("CP 2, a2a, ZeRO 3", 4, f"{CP2} {A2A} --zero-stage 3"),
    Layout(
        "CP 2, TP 2, SP, uneven PP 2, recomputed",
        8,
        f"{CP2} {TP2} {SP} {PP2} --checkpoint-activations",
    ),
    Layout("EP 4, TP 2", 4, f"{EP} 4 {TP2}", (EXPERTS,), short=True),
    Layout(
        "EP 8, TP 2, SP, CP 2, ZeRO 3", 8, f"{EP} 8 {TP2} {SP} {CP2} --zero-stage 3", (EXPERTS,)
    ),
    Layout(
        "HSDP, TP 2, half recomputed",
        8,
        f"--sharding-strategy hsdp --hsdp-shard-size 2 {TP2} --checkpoint-activations "
        "--checkpoint-fraction 1/2",
    ),
    Layout("EP 4, TP 2, SP, compiled", 4, f"{EP} 4 {TP2} {SP} --use-torch-compile", (EXPERTS,)),
    Layout("Muon, TP 2, SP", 4, f"{TP2} {SP}", common="--optimizer muon"),
]


@pytest.fixture(scope="module")
def train_world(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """See `make_train_world`."""
    paths = f"--data-path {corpus} --data-cache-path {tmp_path_factory.mktemp('cache')}"
    flags = f"{SIZES} {LATENT} {paths} --micro-batch-size 1"
    return make_train_world(pool, flags, MODELS)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=each.name, marks=() if each.short else pytest.mark.full)
        for each in LAYOUTS
    ],
)
def test_a_layout_equals_one_process(layout: Layout, train_world: Train) -> None:
    alone = train_world(1, layout.models, layout.common)
    together = train_world(layout.ranks, layout.models, f"{layout.common} {layout.flags}")
    for model, found, expected in zip(layout.models, together, alone, strict=True):
        differences = find_worst(found, expected)
        assert max(differences.values()) < BOUND, f"{model}: {differences}"


@pytest.mark.full
def test_a_resume_under_another_layout(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    """Saved on TP 2 x PP 2, resumed on CP 2 with ZeRO 3, and at last on one process."""
    size = "--micro-batch-size 1 --log-interval 1"
    shared = f"{SIZES} {LATENT} {MODELS[DOCUMENTS]} --data-path {corpus} {size}"
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
