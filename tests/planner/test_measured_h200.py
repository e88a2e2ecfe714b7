"""Steps of this trainer that were measured on one H200 are predicted (docs/planner_errors.md).

The seconds and the peaks are those of commit d5fdb98f with PyTorch 2.11, where products of odd
widths were not padded unless they were compiled. PyTorch's own order had cuDNN's attention first,
and torch's operators updated the weights.
"""

from dataclasses import dataclass, replace

import pytest
from planner.test_published import check_table

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.layout import StepJob
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.planner.prediction import describe_layout, describe_software
from megatron.plan.resolve import resolve

KERNELS = (
    "--gradient-accumulation-fusion --rope-fusion --bias-swiglu-fusion --cross-entropy-loss-fusion"
)
NONE = KERNELS.replace("--", "--no-")
COMPILED = f"{NONE} --use-torch-compile"
BEST = (
    "--use-torch-compile --gradient-accumulation-fusion --cross-entropy-loss-fusion "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
)
MEASURED = "--bf16 --train-iters 9 --lr 1e-4"
LARGE = "--seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --preset "
SMALL = "--vocab-size 50304 --hidden-dropout 0 --attention-dropout 0 "
GPT2 = (
    f"{SMALL} --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--micro-batch-size 16 --global-batch-size 64"
)
LLAMA = (
    f"{SMALL} --num-layers 10 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
    "--ffn-hidden-size 2730 --micro-batch-size 32 --global-batch-size 128 --glu-activation swiglu "
    "--position-embedding-type rotary --normalization RMSNorm --no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)


@dataclass(frozen=True)
class Row:
    """A run: its flags, the median seconds of a step, and the peak of torch's allocator in GiB."""

    flags: str
    seconds: float
    gib: float | None = None
    fitted: bool = False


ROWS = {
    "Llama 2 7B, no kernels": Row(f"{LARGE} llama2-7b {NONE}", 2.9795, 134.863, fitted=True),
    "Llama 2 7B, kernels": Row(f"{LARGE} llama2-7b {KERNELS}", 2.5025, 130.176, fitted=True),
    "Llama 2 7B, compiled": Row(f"{LARGE} llama2-7b {BEST}", 2.5948, 107.073, fitted=True),
    "Llama 3 8B, compiled": Row(f"{LARGE} llama3-8b {BEST}", 2.8764, 128.042),
    "GPT-2 125M, no kernels": Row(f"{GPT2} {NONE}", 0.1877),
    "GPT-2 125M, kernels": Row(f"{GPT2} {KERNELS}", 0.1439),
    "GPT-2 125M, compiled without kernels": Row(f"{GPT2} {COMPILED}", 0.1759),
    "Llama 177M, kernels": Row(f"{LLAMA} {KERNELS}", 0.2443),
    "Llama 177M, compiled without kernels": Row(f"{LLAMA} {COMPILED}", 0.2207),
}


def predict(row: Row, update: str = "--no-adamw-fusion") -> StepPrediction:
    loaded = load_config(f"{row.flags} {MEASURED} {update}".split())
    plan = resolve(loaded.config, 1, loaded.origin)
    plan.raise_on_errors()
    h200 = load_hardware("h200")
    # Inductor padded the products of layers.
    software = replace(describe_software(plan, h200), pads_products="compile" in row.flags)
    job = StepJob(plan.shape, describe_layout(plan), plan.batch_size.final, software, h200)
    return StepPrediction(job)


@pytest.mark.parametrize(("flags", "fused", "plain"), [(KERNELS, 34, 38), (BEST, 26, 62)])
def test_an_update_by_one_kernel_moves_fewer_bytes(flags: str, fused: int, plain: int):
    """Both read the gradient once more, for its norm."""
    flags = f"{LARGE} llama2-7b {flags}"
    factor = predict(Row(flags, 0)).job.software.pointwise
    before = predict(Row(flags, 0)).optimizer_seconds
    after = predict(Row(flags, 0), "--adamw-fusion").optimizer_seconds
    assert after / before == pytest.approx(fused / (factor * plain), rel=1e-3)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_time_of_a_measured_step(row: Row):
    error = predict(row).seconds / row.seconds - 1
    assert abs(error) < (0.005 if row.fitted else 0.05)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.gib])
def test_the_memory_of_a_measured_step(name: str):
    tensors = max(rank.total - rank.fixed for rank in predict(ROWS[name]).memory) / 2**30
    # 64 MiB are the workspaces of matrix products.
    assert tensors + 1 / 16 == pytest.approx(ROWS[name].gib, rel=1e-4)


def test_the_page_has_the_measured_steps():
    rows = [["step", "measured", "predicted", "error"]]
    for name, row in ROWS.items():
        seconds = predict(row).seconds
        fitted = " (fitted)" if row.fitted else ""
        error = f"{100 * (seconds / row.seconds - 1):+.1f} %"
        rows.append([f"{name}{fitted}", f"{row.seconds:.4f} s", f"{seconds:.4f} s", error])
    check_table("h200", rows)
