"""Runs with --gradient-accumulation-fusion."""

import pytest
from process_pool import ProcessPool
from training.runs import Runner

PARTS = (
    "--bf16 --num-layers 2 --train-iters 3 --micro-batch-size 1 --swiglu --normalization RMSNorm "
    "--position-embedding-type rotary --log-layer-stats-interval 1"
)


def norms(run: Runner) -> list[float]:
    return [entry["grad_norm"] for entry in run.metrics() if "grad_norm" in entry]


def layer_norms(run: Runner) -> list[float]:
    """Return the norm of each layer's gradient in the first step. Embeddings are not rounded."""
    return next(entry["layer_grad_norm"] for entry in run.metrics() if "layer_grad_norm" in entry)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--zero-stage 1", 2),
        ("--zero-stage 2 --checkpoint-activations", 4),
        ("--zero-stage 3 --recompute-attention-core", 2),
        ("--pipeline-model-parallel-size 2 --zero-stage 3 --checkpoint-activations", 4),
        ("--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2", 2),
    ],
    ids=["ZeRO 1", "ZeRO 2", "ZeRO 3", "pipeline", "untied"],
)
def test_gradients_of_a_grid_are_those_of_one_process(
    flags: str, ranks: int, pool: ProcessPool, corpus: str, tmp_path
) -> None:
    plain, fused, grid = (Runner(pool, corpus, tmp_path / name) for name in ("a", "b", "c"))
    model = PARTS
    if "--untie" in flags:
        model += " --untie-embeddings-and-output-weights"
    plain(model)
    log = fused(f"{model} --gradient-accumulation-fusion")
    assert "products of fp32 copies" in log
    grid(f"{PARTS} {flags} --gradient-accumulation-fusion", ranks)
    # The first gradients come from equal weights. A microbatch is computed in the same way.
    assert layer_norms(grid) == pytest.approx(layer_norms(fused), rel=1e-7)
    assert norms(grid) == pytest.approx(norms(fused), rel=1e-2)
    # The rounding of each microbatch's gradient is larger.
    assert layer_norms(plain) != pytest.approx(layer_norms(fused), rel=1e-7)
    assert norms(plain) == pytest.approx(norms(fused), rel=1e-2)


def test_tensor_parallel_ranks_train_like_one_process(run: Runner, other: Runner) -> None:
    run(f"{PARTS} --gradient-accumulation-fusion")
    other(
        f"{PARTS} --gradient-accumulation-fusion --tensor-model-parallel-size 2 "
        "--sequence-parallel --num-query-groups 2",
        ranks=2,
    )
    assert list(other.losses().values()) == pytest.approx(list(run.losses().values()), rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--checkpoint-activations", 1),
        ("--zero-stage 1", 2),
        ("--zero-stage 3 --checkpoint-activations", 2),
        ("--pipeline-model-parallel-size 2 --zero-stage 2", 4),
        ("--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3", 4),
    ],
)
def test_compiled_layers_train_like_others(
    flags: str, ranks: int, run: Runner, other: Runner
) -> None:
    run(f"{PARTS} --gradient-accumulation-fusion")
    other(f"{PARTS} {flags} --gradient-accumulation-fusion --use-torch-compile", ranks)
    # Kernels that are fused round less.
    assert norms(other) == pytest.approx(norms(run), rel=1e-2)
    assert list(other.losses().values()) == pytest.approx(list(run.losses().values()), rel=1e-3)
