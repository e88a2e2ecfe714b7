"""Tests that DeepSpeed trains what one process trains, to 1e-5 in fp32.

The batch size or the sequence length changes during the run. Both engines share checkpoints.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from equivalence.corpus import (
    DROPOUT,
    EVALUATED,
    NO_DROPOUT,
    UNTIED,
    VARIATIONS,
    Single,
    command,
    count_iterations,
    curve,
    load_from,
    of_suite,
    validation,
    worst,
)
from equivalence.layouts import RECOMPUTE
from process_pool import ProcessPool, pretrain, succeed

# `importorskip` would import the package, which takes long, while tests are collected.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

BOUND = 1e-5
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
PP3 = "--pipeline-model-parallel-size 3"
PP4 = "--pipeline-model-parallel-size 4"
LAYOUTS = {
    "one process": (1, "--micro-batch-size 4"),
    "dp2-zero2": (2, "--zero-stage 2 --micro-batch-size 1"),
    "dp2-zero3": (2, "--zero-stage 3 --micro-batch-size 1"),
    "tp2-dp2-zero1-sp": (4, f"{TP2} --sequence-parallel --zero-stage 1 --micro-batch-size 1"),
    "tp2-dp2-zero2": (4, f"{TP2} --zero-stage 2 --micro-batch-size 1"),
    "tp2-dp2-zero3-sp": (4, f"{TP2} --sequence-parallel --zero-stage 3 --micro-batch-size 1"),
    "tp2-dp2-zero3": (4, f"{TP2} --zero-stage 3 --micro-batch-size 1"),
    "pp2-dp2": (4, f"{PP2} --micro-batch-size 1"),
    "tp2-pp2-dp2": (8, f"{TP2} {PP2} --sequence-parallel --micro-batch-size 1"),
    "tp2-pp2-recompute": (
        4,
        f"{TP2} {PP2} --micro-batch-size 1 --deepspeed-activation-checkpointing "
        "--partition-activations",
    ),
    "dp2-zero1-offload": (2, "--zero-stage 1 --cpu-optimizer --micro-batch-size 1"),
    "dp2-zero2-offload": (2, "--zero-stage 2 --cpu-optimizer --micro-batch-size 1"),
    "dp2-zero3-offload": (2, "--zero-stage 3 --cpu-optimizer --micro-batch-size 1"),
    "pp2-dp2-offload": (4, f"{PP2} --cpu-optimizer --micro-batch-size 1"),
    "pp3": (3, f"{PP3} --micro-batch-size 1"),
    "pp3-dp2-offload": (6, f"{PP3} --cpu-optimizer --micro-batch-size 1"),
    "pp4": (4, f"{PP4} --micro-batch-size 1"),
    "pp4-few-microbatches": (4, f"{PP4} --micro-batch-size 4"),
    "pp4-dp2-ends": (
        8,
        f"{PP4} --pp-partition-method type:transformer|embedding --micro-batch-size 1",
    ),
    "tp2-pp4-sp": (
        8,
        f"{TP2} {PP4} --sequence-parallel --sync-tp-duplicated-parameters --micro-batch-size 1",
    ),
    "pp6": (6, "--pipeline-model-parallel-size 6 --micro-batch-size 2"),
}
"""Layouts of a model of six layers, which four stages divide unevenly."""
SHORT = {"dp2-zero2", "tp2-pp4-sp"}
COMPLETE = "dp2-zero2"
"""The layout that trains 10 steps in the short suite too."""


CASES = [
    pytest.param(
        name,
        variation,
        id=f"{name}-{variation}",
        marks=() if name in SHORT and variation == "ramp" else pytest.mark.full,
    )
    for name in LAYOUTS
    for variation in VARIATIONS
]


@pytest.mark.parametrize(("name", "variation"), CASES)
def test_deepspeed_trains_and_evaluates_as_one_process(
    name: str, variation: str, pool: ProcessPool, corpus: str, single: Single, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[name]
    variation = variation if name == COMPLETE else of_suite(variation)
    succeed(
        pool.run(
            ranks,
            pretrain,
            command(tmp_path, corpus, "gpt2", variation, DROPOUT, EVALUATED, flags, "--deepspeed"),
        )
    )
    assert len(curve(tmp_path)) == count_iterations(variation)
    assert worst(curve(tmp_path), curve(single("gpt2", True, variation, DROPOUT))) < BOUND
    assert worst(validation(tmp_path), validation(single("gpt2", True, variation, DROPOUT))) < BOUND


@pytest.mark.parametrize(
    ("name", "variation"),
    [
        ("pp3", "ramp"),
        *(
            pytest.param(name, variation, marks=pytest.mark.full)
            for name, variation in [
                ("pp2-dp2", "ramp"),
                ("pp3", "curriculum"),
                ("pp3-dp2-offload", "ramp"),
                ("pp4", "curriculum"),
                ("pp4-few-microbatches", "ramp"),
                ("pp4-dp2-ends", "curriculum"),
                ("tp2-pp4-sp", "ramp"),
                ("pp6", "ramp"),
            ]
        ),
    ],
)
def test_untied_stages_without_embeddings(
    name: str, variation: str, pool: ProcessPool, corpus: str, single: Single, tmp_path: Path
) -> None:
    """Only the first stage has embeddings. The others must still make the same collectives."""
    ranks, flags = LAYOUTS[name]
    variation = of_suite(variation)
    shared = corpus, "gpt2", variation, NO_DROPOUT, EVALUATED, UNTIED
    succeed(pool.run(ranks, pretrain, command(tmp_path, *shared, flags, "--deepspeed")))
    assert worst(curve(tmp_path), curve(single("gpt2", False, variation))) < BOUND
    assert worst(validation(tmp_path), validation(single("gpt2", False, variation))) < BOUND


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "bound"),
    [("", BOUND), ("--bf16", 0.01), ("--fp16 --initial-loss-scale 65536", 0.01)],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize("tied", ["", UNTIED], ids=["tied", "untied"])
def test_eight_stages(
    precision: str, bound: float, tied: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """One of eight stages has two of nine layers."""
    shared = corpus, "gpt2", "ramp", NO_DROPOUT, EVALUATED, "--num-layers 9", tied
    succeed(pool.run(1, pretrain, command(tmp_path / "alone", *shared, "--micro-batch-size 4")))
    flags = f"--pipeline-model-parallel-size 8 --micro-batch-size 1 --deepspeed {precision}"
    succeed(pool.run(8, pretrain, command(tmp_path / "ours", *shared, flags)))
    assert worst(curve(tmp_path / "ours"), curve(tmp_path / "alone")) < bound
    assert worst(validation(tmp_path / "ours"), validation(tmp_path / "alone")) < bound


CHANGES = [
    ("dp2-zero2", "--deepspeed", "tp2-pp2-dp2", ""),
    ("tp2-pp2-dp2", "", "dp2-zero3", "--deepspeed"),
    ("dp2-zero3", "--deepspeed", "pp2-dp2", "--deepspeed"),
    ("pp2-dp2", "--deepspeed", "tp2-dp2-zero1-sp", ""),
    ("tp2-dp2-zero3-sp", "--deepspeed", "tp2-pp2-dp2", "--deepspeed"),
    ("tp2-dp2-zero2", "", "pp2-dp2", "--deepspeed"),
    ("pp4-dp2-ends", "--deepspeed", "pp3", "--deepspeed"),
    ("pp3", "", "tp2-pp4-sp", "--deepspeed"),
    ("pp6", "--deepspeed", "pp3", ""),
]


@pytest.mark.parametrize(
    ("before", "first", "after", "second"),
    [
        pytest.param(*change, marks=() if i == 0 else pytest.mark.full)
        for i, change in enumerate(CHANGES)
    ],
)
def test_a_checkpoint_of_either_engine_resumes_on_the_other(
    before: str,
    first: str,
    after: str,
    second: str,
    pool: ProcessPool,
    corpus: str,
    single: Single,
    tmp_path: Path,
) -> None:
    variation = of_suite("ramp")
    half = count_iterations(variation) // 2
    shared = corpus, "gpt2", variation, NO_DROPOUT, EVALUATED
    ranks, flags = LAYOUTS[before]
    argv = command(tmp_path, *shared, flags, first, f"--exit-interval {half}")
    succeed(pool.run(ranks, pretrain, argv))
    manifest = json.loads((tmp_path / f"global_step{half}" / "manifest.json").read_text())
    assert manifest["optimizer"]["optimizer_step"] == half
    ranks, flags = LAYOUTS[after]
    output = succeed(
        pool.run(ranks, pretrain, command(tmp_path, *shared, flags, second, "--require-load"))
    )
    assert f"at iteration {half}" in output
    assert worst(curve(tmp_path), curve(single("gpt2", True, variation))) < BOUND


@pytest.mark.full
@pytest.mark.parametrize("variation", ["ramp", "curriculum"])
def test_recomputation_changes_no_bit(
    variation: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """Runs with dropout whose shape changes are bit-identical with and without recomputation."""
    layout = f"{TP2} {PP2} --micro-batch-size 2 --deepspeed --exit-interval 6"
    for folder, flags in (
        ("kept", ""),
        ("recomputed", RECOMPUTE["all"]),
        ("partitioned", RECOMPUTE["partitioned"]),
    ):
        succeed(
            pool.run(
                4, pretrain, command(tmp_path / folder, corpus, "gpt2", variation, layout, flags)
            )
        )
    assert len(curve(tmp_path / "kept")) == 6
    assert curve(tmp_path / "recomputed") == curve(tmp_path / "kept")
    assert curve(tmp_path / "partitioned") == curve(tmp_path / "kept")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("pp2-dp2", ""),
        pytest.param("tp2-pp4-sp", "--fp16 --initial-loss-scale 65536", marks=pytest.mark.full),
        pytest.param("pp4-dp2-ends", f"--bf16 {UNTIED}", marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_is_bit_identical(
    name: str, more: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[name]
    variation = of_suite("ramp")
    half = count_iterations(variation) // 2
    shared = corpus, "gpt2", variation, NO_DROPOUT, flags, more, "--deepspeed"
    whole = tmp_path / "whole"
    argv = command(whole, *shared, f"--save-interval {half}")
    succeed(pool.run(ranks, pretrain, argv))
    argv = command(tmp_path / "rest", *shared)
    succeed(pool.run(ranks, pretrain, load_from(argv, whole, half)))
    assert curve(tmp_path / "rest") == curve(whole)[half:]


@pytest.mark.parametrize(
    "precision",
    [pytest.param("--bf16", marks=pytest.mark.full), "--fp16 --initial-loss-scale 65536"],
)
@pytest.mark.parametrize(
    "name",
    [
        "tp2-pp2-dp2",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("dp2-zero2", "pp2-dp2-offload", "pp3", "pp4", "pp4-dp2-ends", "tp2-pp4-sp")
        ),
    ],
)
def test_half_precision_is_close(
    name: str, precision: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[name]
    shared = corpus, "gpt2", of_suite("ramp"), NO_DROPOUT, "--num-layers 4"
    succeed(pool.run(1, pretrain, command(tmp_path / "alone", *shared, "--micro-batch-size 4")))
    succeed(
        pool.run(
            ranks, pretrain, command(tmp_path / "ours", *shared, flags, precision, "--deepspeed")
        )
    )
    assert 0 < worst(curve(tmp_path / "ours"), curve(tmp_path / "alone")) < 0.01


# bitsandbytes keeps the moments of tensors smaller than this in 32 bits.
EIGHT_BIT = "--hidden-size 128 --deepspeed --use-bnb-optimizer --no-embed-layernorm"


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, "--micro-batch-size 4", marks=pytest.mark.full),
        pytest.param(2, "--micro-batch-size 1 --zero-stage 3", marks=pytest.mark.full),
        pytest.param(8, f"--micro-batch-size 1 {PP4}", marks=pytest.mark.full),
    ],
)
def test_8_bit_moments(
    ranks: int, flags: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """A run with 8-bit moments is close to one with 32 bits, and the native engine can continue it.

    A resume at the same layout is bit-identical.
    """
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    shared = corpus, "gpt2", "ramp", NO_DROPOUT
    succeed(
        pool.run(
            1,
            pretrain,
            command(tmp_path / "exact", *shared, "--hidden-size 128 --micro-batch-size 4"),
        )
    )
    for folder, legs in (
        ("uninterrupted", [""]),
        ("resumed", ["--exit-interval 5", "--require-load"]),
    ):
        for leg in legs:
            output = succeed(
                pool.run(
                    ranks, pretrain, command(tmp_path / folder, *shared, flags, EIGHT_BIT, leg)
                )
            )
            assert "8-bit moments for matrices" in output
    assert curve(tmp_path / "resumed") == curve(tmp_path / "uninterrupted")
    assert 1e-6 < worst(curve(tmp_path / "uninterrupted"), curve(tmp_path / "exact")) < 0.01
    succeed(
        pool.run(
            ranks,
            pretrain,
            command(tmp_path / "other", *shared, flags, EIGHT_BIT, "--exit-interval 5"),
        )
    )
    native = command(
        tmp_path / "other", *shared, "--hidden-size 128 --micro-batch-size 4 --require-load"
    )
    assert "at iteration 5" in succeed(pool.run(1, pretrain, native))
    assert worst(curve(tmp_path / "other"), curve(tmp_path / "exact")) < 0.01


def test_the_table_names_deepspeed_and_the_log_is_clean(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": "auto"})
    )
    argv = command(
        tmp_path / "run",
        corpus,
        "gpt2",
        "ramp",
        f"--micro-batch-size 2 --deepspeed --deepspeed_config {path} --exit-interval 2",
    )
    output = succeed(pool.run(2, pretrain, argv))
    assert "DeepSpeedEngine, DeepSpeedZeroOptimizer" in output
    assert "stage 0 runs as stage 1" in output
    table = output[: output.index("iteration        1/")]
    assert "deepspeed]" not in table.lower()
    assert "FutureWarning" not in output


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (f"{PP2} --zero-stage 2", 2, "shards optimizer states only"),
        (f"{PP2} --num-layers-per-virtual-pipeline-stage 1", 2, "one stage per rank"),
        ("--hsdp-shard-size 1", 2, "--hsdp-shard-size 1: DeepSpeed shards over all"),
        ("--hsdp-shard-size 1 --zero-stage 2", 2, "leave out --hsdp-shard-size, or remove"),
        ("--hsdp-shard-size 1 --sharding-strategy hsdp", 2, "use --sharding-strategy fsdp, or"),
        ("--log-num-zeros-in-grad", 1, "does not expose its gradients"),
        ("--log-layer-stats-interval 5", 1, "--log-layer-stats-interval 5"),
        ("--use-torch-compile", 1, "not tested with DeepSpeed"),
        ("--optimizer muon", 2, "--optimizer muon is for the native engine"),
        ("--optimizer ademamix", 1, "use --optimizer adam, or remove --deepspeed"),
        ("--deepspeed_config nowhere.json", 1, "nowhere.json does not exist"),
    ],
)
def test_an_unsupported_setting_is_an_error(
    flags: str, ranks: int, message: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    argv = command(tmp_path, corpus, "gpt2", "ramp", "--micro-batch-size 2 --deepspeed", flags)
    outcome = pool.run(ranks, pretrain, argv)[0]
    assert outcome.kind == "ConfigError", outcome.output
    assert message in str(outcome.error)
