"""Tests of the CUDA path on one GPU. They compare runs with the same runs on the CPU.

Each run is a launch of `pretrain_gpt.py`. The runs of all selected tests start in the background,
twelve at a time, because a launch takes most of its time for imports. A test waits for its own runs
only, so tests that have finished have a result if the others are killed. `-m gpu_core` selects the
most important tests.

Without a GPU, all tests are skipped. With $GPU_TESTS_ON_CPU, the runs that should use the GPU use
the CPU. This checks the tests themselves.
"""

import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.results import add_row
from megatron.observe.metrics import read_metrics

ON_CPU = bool(os.environ.get("GPU_TESTS_ON_CPU"))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_runs = pytest.mark.skipif(
    not torch.cuda.is_available() and not ON_CPU, reason="needs a GPU, or GPU_TESTS_ON_CPU=1"
)

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures/openwebtext-100"
SIZES = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 5000 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 3e-4 --lr-decay-style constant --seed 1234 "
    "--log-interval 1 --eval-interval 5 --eval-iters 2 --split 80,20,0 --train-iters 10"
)
"""With a learning rate of 1e-3, the training amplifies rounding errors. Two runs on a CPU whose
initial weights differ by 6e-8 had gradient norms that differ by up to 1.4e-4 (Llama, iteration 10),
which is what a GPU and a CPU differed by. With 3e-4 it was at most 6e-7.
`test_rounding_alone_stays_far_below_the_bound` checks this."""
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--ffn-hidden-size 320 --num-query-groups 2 --no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)
DOCUMENTS = (
    "--reset-attention-mask --reset-position-ids "
    f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt"
)
BLOOM = "--position-embedding-type alibi --embed-layernorm"
WIDE = (
    f"{LLAMA} --num-layers 2 --hidden-size 256 --num-attention-heads 2 --num-query-groups 1 "
    "--seq-length 2048 --micro-batch-size 1 --global-batch-size 2"
)
"""Heads of 128 and sequences of 2,048 tokens, which other kernels compute than small ones."""
EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
)
IN_FP32 = {
    "gpt2": "",
    "llama": LLAMA,
    "bloom": BLOOM,
    "documents": f"{LLAMA} {DOCUMENTS}",
    "wide": WIDE,
    "wide-documents": f"{WIDE} {DOCUMENTS}",
    "window": f"{LLAMA} --sliding-window 32 --full-attention-layers 1::2",
    "qk-norm": f"{LLAMA} --qk-norm head",
    "penalties": f"{LLAMA} --z-loss-coefficient 1e-4 --goldfish-loss --goldfish-k 5 --goldfish-h 4",
    "recompute": "--checkpoint-activations",
    "recompute-core": f"{BLOOM} --recompute-attention-core",
    "recompute-in-cpu": "--checkpoint-activations --checkpoint-in-cpu",
    "statistics": "--log-layer-stats-interval 2",
    "ademamix": f"{LLAMA} --optimizer ademamix",
    "experts": f"{LLAMA} {EXPERTS}",
    "async-save": "--async-save --save-interval 5",
}
"""Name -> flags of a run whose losses on the GPU must equal those on the CPU."""
KERNELS = "--rope-fusion --bias-swiglu-fusion --cross-entropy-loss-fusion --adamw-fusion"
"""The kernels of `megatron.extras.step.kernels`. A CPU uses PyTorch's operators."""
IN_FP32 |= {
    "kernels": f"{LLAMA} {KERNELS} --rotary-percent 0.5 --z-loss-coefficient 1e-4",
    "wide-kernels": f"{WIDE} {KERNELS}",
}
BOUND = 1e-4
IN_16_BITS = {
    # Muon's products have fewer bits on a GPU.
    "muon": f"{LLAMA} --optimizer muon",
    "moments-bf16": f"{LLAMA} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
    "gpt2-bf16": "--bf16",
    "llama-bf16": f"{LLAMA} --bf16",
    "bloom-bf16": f"{BLOOM} --bf16",
    "experts-bf16": f"{LLAMA} {EXPERTS} --bf16",
    "documents-bf16": f"{LLAMA} --bf16 {DOCUMENTS}",
    "varlen-bf16": f"{LLAMA} --bf16 {DOCUMENTS} --use-varlen-attention",
    "varlen-fp16": f"--fp16 --initial-loss-scale 4096 {DOCUMENTS} --use-varlen-attention "
    "--sliding-window 32 --full-attention-layers 1::2 --recompute-attention-core",
    "flash-bf16": f"{LLAMA} --bf16 --attention-backend flash",
    # A CPU has neither of these two kernels, and takes the last one.
    "fused-bf16": f"{LLAMA} --bf16 --attention-backend fused unfused",
    "efficient-bf16": f"{BLOOM} --bf16 --recompute-attention-core "
    "--attention-backend efficient unfused",
    "fusion-bf16": f"{LLAMA} --bf16 --micro-batch-size 1 --gradient-accumulation-fusion "
    "--checkpoint-activations",
    "fusion-fp16": "--fp16 --initial-loss-scale 4096 --micro-batch-size 1 "
    "--gradient-accumulation-fusion",
    "wide-bf16": f"{WIDE} --bf16",
    "wide-cudnn-bf16": f"{WIDE} --bf16 --attention-backend fused unfused",
    "wide-fusion-bf16": f"{WIDE} --bf16 --gradient-accumulation-fusion",
    "wide-varlen-bf16": f"{WIDE} --bf16 {DOCUMENTS} --use-varlen-attention",
    "kernels-bf16": f"{LLAMA} --bf16 {KERNELS} --checkpoint-activations",
    "wide-kernels-bf16": f"{WIDE} --bf16 {KERNELS} {DOCUMENTS}",
    "kernels-fp16": f"{LLAMA} {KERNELS} --fp16 --initial-loss-scale 4096 --qk-norm head",
    # On a CPU, float8 is emulated.
    "float8-bf16": f"{LLAMA} --bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "float8-rowwise-bf16": f"{LLAMA} --bf16 --fp8-format e4m3 --fp8-recipe rowwise",
    "wide-replay-bf16": f"{WIDE} --bf16 --replay-interval 2",
    "replay-float8-bf16": f"{LLAMA} --bf16 --fp8-format hybrid --fp8-recipe tensorwise "
    "--replay-interval 2",
    "gpt2-fp16": "--fp16 --initial-loss-scale 4096",
    "bloom-fp16": f"{BLOOM} --fp16 --initial-loss-scale 4096",
}
BOUND_16_BITS = 2e-2
COMPILED = {
    "compiled": f"{LLAMA} --use-torch-compile",
    "compiled-bf16": "--bf16 --use-torch-compile",
    "wide-compiled-bf16": f"{WIDE} --bf16 --use-torch-compile",
    "kernels-compiled-bf16": f"{LLAMA} --bf16 --use-torch-compile {KERNELS}",
}
EAGER = {
    "compiled": "llama",
    "compiled-bf16": "gpt2-bf16",
    "wide-compiled-bf16": "wide-bf16",
    "kernels-compiled-bf16": "llama-bf16",
}
"""Compiled run -> the same run without compilation."""
WITH_DROPOUT = {
    "dropout": "",
    "dropout-bf16": f"{LLAMA} --bf16",
    "dropout-fp16": f"{BLOOM} --fp16 --initial-loss-scale 4096",
    "dropout-deterministic": f"{WIDE} --bf16 --deterministic-mode",
}
"""Runs that are trained twice, and once with a stop and a resume in the middle."""
RECOMPUTED = {"dropout-recomputed": "--checkpoint-activations"}
CORE = {
    *("gpt2", "llama", "bloom", "wide", "wide-documents", "llama-bf16", "fusion-bf16"),
    *("wide-bf16", "wide-cudnn-bf16", "wide-fusion-bf16", "wide-varlen-bf16"),
    *("compiled-bf16", "wide-compiled-bf16"),
    *("kernels", "wide-kernels-bf16"),
    *("float8-bf16", "float8-rowwise-bf16", "wide-replay-bf16"),
    *("experts", "experts-bf16"),
}
"""The runs of the most important tests."""


def mark_core(names: Any) -> list[Any]:
    """Return the names as parameters of a test, with the mark of the most important ones."""
    core = pytest.mark.gpu_core
    return [pytest.param(name, marks=[core] if name in CORE else []) for name in names]


@dataclass(frozen=True)
class Run:
    """One launch."""

    code: int
    output: str
    folder: Path

    def curve(self) -> list[tuple[float, float]]:
        """Return loss and gradient norm of each iteration."""
        assert self.code == 0, self.output[-3000:]
        return [
            (entry["lm_loss"], entry["grad_norm"])
            for entry in read_metrics(self.folder / "metrics.jsonl")
            if "lm_loss" in entry
        ]

    def validation(self) -> list[float]:
        return [
            entry["validation"]["validation"]
            for entry in read_metrics(self.folder / "metrics.jsonl")
            if "validation" in entry
        ]


def make_environment() -> dict[str, str]:
    """Return the environment of a process that imports the package."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = "1" if ON_CPU else "2"
    return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": paths}


def launch(data: str, folder: Path, flags: str, *, gpu: bool = True) -> Run:
    files = f"--data-path {data} --data-cache-path {folder}/cache --save {folder} --load {folder}"
    command = [sys.executable, "pretrain_gpt.py", *SIZES.split(), *files.split(), *flags.split()]
    environment = make_environment()
    if not gpu or ON_CPU:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    return Run(done.returncode, done.stdout + done.stderr, folder)


REORDERED = "--attention-backend unfused --micro-batch-size 1"
"""The same numbers with sums in another order."""
VARIANTS = {
    "test_rounding_alone_stays_far_below_the_bound": ("cpu", "reordered"),
    "test_fp32_equals_the_cpu": ("gpu", "cpu"),
    "test_16_bits_agree_with_the_cpu": ("gpu", "cpu"),
    "test_a_replay_gives_no_alarm": ("gpu",),
    "test_compiled_equals_eager": ("gpu",),
    "test_runs_repeat_bit_for_bit": ("gpu", "again"),
    "test_a_resumed_run_continues_bit_for_bit": ("gpu", "resumed"),
}
"""Test -> the runs of its parameter `name` that it compares."""


class Runs:
    """The runs of the selected tests, which are launched in the background."""

    def __init__(self, corpus: str, root: Path, pool: ThreadPoolExecutor) -> None:
        self._corpus = corpus
        self._root = root
        self._pool = pool
        self._runs: dict[tuple[str, str], Future[Run]] = {}

    def start(self, name: str, variant: str) -> None:
        """Start a run, unless that was done already."""
        if (name, variant) not in self._runs:
            self._runs[name, variant] = self._pool.submit(self._train, name, variant)

    def __getitem__(self, key: tuple[str, str]) -> Run:
        """Return a run by (name, variant).

        The variants are gpu, again, cpu, reordered (on the CPU, too) and resumed.
        """
        self.start(*key)
        return self._runs[key].result()

    def _train(self, name: str, variant: str) -> Run:
        without = IN_FP32 | IN_16_BITS | COMPILED
        if name in without:
            flags = f"{without[name]} {NO_DROPOUT}"
        else:
            flags = (WITH_DROPOUT | RECOMPUTED)[name]
            flags += " --hidden-dropout 0.1 --attention-dropout 0.1"
        if "--fp8-format" in flags and (ON_CPU or variant == "cpu"):
            flags += " --fp8-emulate"
        folder = self._root / f"{name}-{variant}"
        if variant == "resumed":
            launch(self._corpus, folder, f"{flags} --exit-interval 4 --save-interval 4")
        if variant == "reordered":
            flags += f" {REORDERED}"
        return launch(self._corpus, folder, flags, gpu=variant not in ("cpu", "reordered"))


@pytest.fixture(scope="module", autouse=True)
def runs(
    corpus: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Runs]:
    """Yield the runs, after those of all selected tests were queued in the tests' order.

    The first test begins them, so that they train while kernels are compared.
    """
    with ThreadPoolExecutor(12 if torch.cuda.is_available() else 2) as pool:
        found = Runs(corpus, tmp_path_factory.mktemp("runs"), pool)
        for item in request.session.items:
            name = getattr(item, "originalname", None)
            if name not in VARIANTS:
                continue
            run = item.callspec.params["name"]  # type: ignore[attr-defined]
            for variant in VARIANTS[name]:
                found.start(run, variant)
            if name == "test_compiled_equals_eager":
                found.start(EAGER[run], "gpu")
        yield found
        # After an interruption, runs that have not started are not waited for.
        pool.shutdown(cancel_futures=True)


def measure_worst(a: Run, b: Run) -> tuple[float, float]:
    """Return the largest relative differences of losses and of gradient norms."""
    left, right = a.curve(), b.curve()
    assert len(left) == len(right) == 10
    pairs = [*zip(left, right, strict=True)]
    losses = [(x[0], y[0]) for x, y in pairs] + [*zip(a.validation(), b.validation(), strict=True)]
    norms = [(x[1], y[1]) for x, y in pairs]
    # `max` passes over a NaN that is not the first value.
    assert all(math.isfinite(x) for pair in (*losses, *norms) for x in pair)
    worst_loss, worst_norm = (max(abs(x - y) / y for x, y in of) for of in (losses, norms))
    return worst_loss, worst_norm


def report(
    name: str, losses: float | None = None, norms: float | None = None, note: str = ""
) -> None:
    """Print a result, and add it to the results file of tests/gpu/first_hour.sh.

    Args:
        name: What was compared.
        losses: The largest relative difference of a loss.
        norms: That of a gradient norm.
        note: Anything else.
    """
    print(f"\nmeasured {name}: losses {losses}, gradient norms {norms} {note}")
    add_row("one gpu", name=name, losses=losses, norms=norms, note=note)


class OperatorRecorder(TorchDispatchMode):
    """Records the names of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize(
    ("names", "operator"),
    [
        (("flash", "fused"), "_scaled_dot_product_flash_attention"),
        (("fused", "flash"), "_scaled_dot_product_cudnn_attention"),
        (("efficient", "flash", "fused", "unfused"), "_scaled_dot_product_efficient_attention"),
        (("unfused",), "_safe_softmax"),
    ],
)
def test_attention_takes_the_first_kernel_of_the_order(
    names: tuple[str, ...], operator: str
) -> None:
    from megatron.model.attention_kernels import install_torch_order, use_attention_kernels

    # As an engine does at its start. On an H200, the first call of a process took cuDNN otherwise.
    install_torch_order(torch.device("cuda"))
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with OperatorRecorder() as recorder, use_attention_kernels(names):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    report(f"attention {' '.join(names)}", note=", ".join(recorder.names))
    assert operator in recorder.names


@needs_gpu
@pytest.mark.gpu_core
def test_varlen_attention_equals_its_reference() -> None:
    from megatron.model import packed_attention
    from megatron.model.packed_attention import attend_packed, pack_documents

    bounds = ((0, 1, 2, 100, 128), (0, 128), (0, 127, 128))
    results = []
    for kernel in (packed_attention._load_kernel(), packed_attention.attend_one_by_one):
        generator = torch.Generator().manual_seed(3)
        leaves = [
            torch.randn(3, heads, 128, 64, generator=generator)
            .to("cuda", torch.bfloat16)
            .requires_grad_()
            for heads in (4, 2, 2)
        ]
        documents = pack_documents(bounds, leaves[0].device)
        with mock.patch.object(packed_attention, "_load_kernel", return_value=kernel):
            full = attend_packed(leaves[0], leaves[1], leaves[2], documents, None)
            windowed = attend_packed(leaves[0], leaves[1], leaves[2], documents, 16)
        (full + windowed).float().square().sum().backward()
        results.append([full.detach(), windowed.detach(), *(leaf.grad for leaf in leaves)])
    worst = 0.0
    for found, expected in zip(*results, strict=True):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        worst = max(worst, error.item())
    report("varlen attention", note=f"relative error {worst:.1e}")
    assert worst < BOUND_16_BITS


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_add_to_gradients_in_fp32(dtype: torch.dtype) -> None:
    from megatron.parallel.weight_gradient import add_to_gradient

    weight = torch.nn.Parameter(torch.zeros(128, 256, device="cuda", dtype=dtype))
    weight.grad_dtype = torch.float32
    exact = torch.zeros(128, 256, dtype=torch.float64)
    rounded = torch.zeros(128, 256)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(512, 128, generator=generator).to(dtype)
        states = torch.randn(512, 256, generator=generator).to(dtype)
        add_to_gradient(weight, rows.cuda().t(), states.cuda())
        product = rows.double().t() @ states.double()
        exact += product
        rounded += product.to(dtype).float()
    assert weight.grad is not None
    found = ((weight.grad.cpu() - exact).norm() / exact.norm()).item()
    report(f"fused gradient in {dtype}", note=f"relative error {found:.1e}")
    assert found < ((rounded - exact).norm() / exact.norm()).item() / 10


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize("fused", [False, True])
def test_padded_products_of_small_integers_are_exact(fused: bool) -> None:
    from megatron.parallel.entered_linear import ALONE
    from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.parallel.parameter_spec import Init, make_linear_specs
    from megatron.parallel.weight_gradient import number_layer

    generator = torch.Generator().manual_seed(1)
    results: list[list[torch.Tensor]] = []
    drawn = [
        torch.randint(-1, 2, shape, generator=generator)
        for shape in ((1365, 64), (64, 1365), *[(256, 2, 64)] * 4)
    ]
    for device in ("cpu", "cuda"):
        specs = make_linear_specs("up", 1365, 64, Init.NORMAL, bias=False, shard_dim=0)
        specs |= make_linear_specs("down", 64, 1365, Init.NORMAL, bias=False, shard_dim=1)
        up = ColumnParallelLinear(specs, "up", ALONE)
        down = RowParallelLinear(specs, "down", ALONE)
        weights, inputs = (
            [each.to(device, torch.float32 if device == "cpu" else torch.float16) for each in part]
            for part in (drawn[:2], drawn[2:])
        )
        layers: list[ColumnParallelLinear | RowParallelLinear] = [up, down]
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = torch.nn.Parameter(weight)
            layer.weight.grad_dtype = torch.float32
            layer.number = number_layer(layer) if fused and device == "cuda" else None
        found = []
        for x, gradient in zip(inputs[:2], inputs[2:], strict=True):
            out = up(x.requires_grad_())
            assert out.shape[-1] == (1365 if device == "cpu" else 1368)
            # Signs keep all numbers below 2,048, where fp16 has each integer.
            hidden = out.detach().sign().requires_grad_()
            out.backward(hidden.detach())
            last = down(hidden)
            last.backward(gradient)
            assert x.grad is not None
            assert hidden.grad is not None
            found += [out, x.grad, last, hidden.grad]
        for layer in layers:
            assert layer.weight.grad is not None
            found.append(layer.weight.grad)
        results.append([each.detach().float().cpu()[..., :1365] for each in found])
    for expected, exact in zip(*results, strict=True):
        assert torch.equal(expected, exact)
    report(f"padded products, fused gradients {fused}", note="small integers are exact")


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_of_blocks_equal_the_operators_of_torch(dtype: torch.dtype) -> None:
    from model.kernel_comparisons import ACTIVATIONS, compare_gate, compare_rotary

    for name, sizes, channels, by_sample in (
        ("heads of 128", (1024, 2, 8, 4, 128), 128, True),
        ("32 groups", (512, 1, 32, 1, 128), 128, False),
        ("partial", (77, 2, 3, 2, 80), 20, True),
    ):
        units = compare_rotary(sizes, channels, dtype, "cuda", by_sample=by_sample)
        report(f"rotary kernel, {name}, {dtype}", note=f"in units of rounding: {units}")
        assert max(units.values()) <= 1, units
    for activation in ACTIVATIONS:
        units = compare_gate(activation, (1021, 2, 2731), dtype, "cuda")
        report(f"{activation} kernel, {dtype}", note=f"in units of rounding: {units}")
        # Two results are rounded one after the other, and exp may differ in the last bit of fp32.
        assert max(units.values()) <= 2, units


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_of_norms_equal_the_operators_of_torch(dtype: torch.dtype) -> None:
    from model.norm_comparisons import NORMS, compare_norm

    for norm in NORMS:
        for sizes in ((2048, 2, 768), (1021, 2, 4096), (77, 1, 8192), (300, 2, 1001)):
            for with_branch in (True, False):
                units = compare_norm(norm, sizes, dtype, "cuda", with_branch=with_branch)
                case = f"{norm} kernel, {sizes}, addition {with_branch}, {dtype}"
                report(case, note=f"in units of rounding: {units}")
                assert max(units.values()) <= 1, units


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_the_update_has_the_bits_of_torchs_operator_on_a_cpu(
    moments: torch.dtype, shift: int
) -> None:
    from engine.adamw_comparisons import compare_steps

    found = compare_steps("cuda", moments, torch.bfloat16, (0.9, 0.95), shift)
    report(f"AdamW's kernel, {moments}", note=f"tensors that differ in each step: {found}")
    assert found == [[], [], [], []]


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize("counts", [(300, 0, 5, 207), (0, 0, 0, 512), (0, 0, 0, 0)])
def test_products_of_experts_equal_single_ones_and_read_no_other_memory(
    counts: tuple[int, ...],
) -> None:
    """Memory that is free has no number, so a row that nobody writes would be seen."""
    from megatron.model.experts.grouped import multiply_by_expert

    generator = torch.Generator("cuda").manual_seed(1)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    x = torch.randn(sum(counts), 256, **options).requires_grad_()  # type: ignore[call-overload]
    weight = torch.randn(4 * 128, 256, **options).requires_grad_()  # type: ignore[call-overload]
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    for _ in range(2):
        kept = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(8, 22)]
        del kept
        out = multiply_by_expert(x, weight, ends)
        out.sum().backward()
    matrices = weight.detach().view(4, 128, 256)
    pieces = zip(x.detach().split(counts), matrices, strict=True)
    expected = torch.cat([a @ b.t() for a, b in pieces])
    torch.testing.assert_close(out.detach(), expected, rtol=2e-2, atol=2e-1)
    assert x.grad is not None
    assert weight.grad is not None
    sums = [2 * part.float().sum(0).expand(128, 256) for part in x.detach().split(counts)]
    found = weight.grad.view(4, 128, 256).float()
    torch.testing.assert_close(found, torch.stack(sums), rtol=2e-2, atol=1.0)
    assert x.grad.isfinite().all()


@needs_gpu
@pytest.mark.gpu_core
def test_kernels_of_float8_have_the_bits_of_pytorch() -> None:
    pytest.importorskip("torchao")
    from engine.test_float8_kernels import compare_all

    assert compare_all("cuda") == []


@needs_runs
@pytest.mark.gpu_core
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("kind", ["e4m3", "hybrid"])
def test_layers_in_float8_equal_the_emulated_ones(
    kind: Literal["e4m3", "hybrid"], rowwise: bool
) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the GPU has no products with a scale for each row")
    from benchmarks.float8_speed import Layers, build_pass, draw_tensors
    from megatron.extras.step.float8.recipe import Recipe

    device = torch.device("cpu" if ON_CPU else "cuda")
    # The first layers have a number of tokens that is no multiple of 16, so it is padded.
    every = (Layers("odd", 77, 128, (48, 48)), Layers("wide", 2048, 1024, (2816, 2816)))
    # A CPU takes minutes for the others.
    for layers in every[:1] if ON_CPU else every:
        drawn = draw_tensors(layers, torch.device("cpu"))
        found, expected = (
            build_pass(tensors, Recipe(kind, rowwise, emulated))()
            for emulated, tensors in ((False, drawn.to(device)), (True, drawn))
        )
        for name, one, two in zip(("input", "gate", "up"), found, expected, strict=True):
            error = ((one.cpu().float() - two.float()).norm() / two.float().norm()).item()
            report(f"float8 {kind} rowwise {rowwise} {layers.name} {name}", note=f"{error:.1e}")
            # Both are rounded to bf16, with an error of at most 2^-9 each.
            assert error < 2.0**-8, name


@needs_runs
@pytest.mark.parametrize("name", mark_core(IN_FP32))
def test_fp32_equals_the_cpu(name: str, runs: Runs) -> None:
    worst = measure_worst(runs[name, "gpu"], runs[name, "cpu"])
    report(name, *worst)
    assert max(worst) < BOUND


@needs_runs
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rounding_alone_stays_far_below_the_bound(name: str, runs: Runs) -> None:
    worst = measure_worst(runs[name, "reordered"], runs[name, "cpu"])
    report(f"{name}, sums in another order", *worst)
    # Otherwise the bound would not tell a wrong kernel from rounding.
    assert 0 < max(worst) < BOUND / 10


@needs_runs
@pytest.mark.parametrize("name", mark_core(IN_16_BITS))
def test_16_bits_agree_with_the_cpu(name: str, runs: Runs) -> None:
    if "fp8" in IN_16_BITS[name]:
        pytest.importorskip("torchao")
    worst = measure_worst(runs[name, "gpu"], runs[name, "cpu"])
    report(name, *worst)
    assert worst[0] < BOUND_16_BITS


@needs_runs
@pytest.mark.parametrize("name", mark_core(["wide-replay-bf16", "replay-float8-bf16"]))
def test_a_replay_gives_no_alarm(name: str, runs: Runs) -> None:
    if "fp8" in IN_16_BITS[name]:
        pytest.importorskip("torchao")
    output = runs[name, "gpu"].output
    lines = [line for line in output.splitlines() if line.startswith("replay: ")]
    report(name, note="; ".join(lines) or "all bits repeat")
    assert "gave different values" not in output


@needs_runs
@pytest.mark.parametrize("name", mark_core(COMPILED))
def test_compiled_equals_eager(name: str, runs: Runs) -> None:
    worst = measure_worst(runs[name, "gpu"], runs[EAGER[name], "gpu"])
    report(name, *worst)
    assert worst[0] < (BOUND if name == "compiled" else BOUND_16_BITS)


@needs_runs
@pytest.mark.parametrize("name", WITH_DROPOUT | RECOMPUTED)
def test_runs_repeat_bit_for_bit(name: str, runs: Runs) -> None:
    worst = measure_worst(runs[name, "again"], runs[name, "gpu"])
    report(f"{name} again", *worst)
    assert max(worst) == 0


@needs_runs
@pytest.mark.parametrize("name", WITH_DROPOUT | RECOMPUTED)
def test_a_resumed_run_continues_bit_for_bit(name: str, runs: Runs) -> None:
    worst = measure_worst(runs[name, "resumed"], runs[name, "gpu"])
    report(f"{name} resumed", *worst)
    assert max(worst) == 0


@needs_runs
def test_recomputation_repeats_the_dropout(runs: Runs) -> None:
    worst = measure_worst(runs["dropout-recomputed", "gpu"], runs["dropout", "gpu"])
    report("recomputed dropout", *worst)
    assert max(worst) == 0


@needs_gpu
def test_a_trace_has_kernels(corpus: str, tmp_path: Path) -> None:
    run = launch(corpus, tmp_path, "--profile-iterations 3-4 --bf16")
    assert run.code == 0, run.output[-3000:]
    [path] = (tmp_path / "profile").iterdir()
    with gzip.open(path, "rt") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    report("trace", note=f"{path.stat().st_size / 1e6:.1f} MB")
    assert "kernel" in kinds


@needs_gpu
def test_memory_snapshots_are_written(corpus: str, tmp_path: Path) -> None:
    run = launch(corpus, tmp_path, "--memory-snapshot --memory-snapshot-iterations 3 --bf16")
    assert run.code == 0, run.output[-3000:]
    [path] = (tmp_path / "profile").iterdir()
    report("memory snapshot", note=f"{path.name} {path.stat().st_size / 1e6:.1f} MB")


@needs_gpu
def test_memory_that_runs_out_ends_the_run_with_a_snapshot(corpus: str, tmp_path: Path) -> None:
    # Logits of 2 x 10^6 tokens do not fit any GPU of today.
    flags = "--memory-snapshot --seq-length 2048 --micro-batch-size 1024 --global-batch-size 1024"
    run = launch(corpus, tmp_path, f"{flags} --hidden-size 4096 --ffn-hidden-size 65536")
    assert run.code != 0
    report("out of memory", note=run.output.strip().splitlines()[-1][:200])
    assert "out of memory" in run.output
    assert list((tmp_path / "profile").iterdir())


@needs_runs
def test_a_cpu_run_continues_on_the_gpu(corpus: str, tmp_path: Path) -> None:
    first = launch(corpus, tmp_path, f"--exit-interval 5 --save-interval 5 {NO_DROPOUT}", gpu=False)
    assert first.code == 0, first.output[-3000:]
    assert len(launch(corpus, tmp_path, NO_DROPOUT).curve()) == 10


@needs_runs
def test_generated_text_equals_that_of_the_cpu(corpus: str, tmp_path: Path) -> None:
    assert launch(corpus, tmp_path, f"{LLAMA} {DOCUMENTS} --train-iters 40").code == 0
    texts = []
    for device in ("cpu", "cpu" if ON_CPU else "cuda"):
        command = f"tools/generate.py --load {tmp_path} --temperature 0 --max-new-tokens 40"
        done = subprocess.run(
            [sys.executable, *command.split(), "--prompt", "The city of", "--device", device],
            cwd=ROOT,
            env=make_environment(),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        texts.append(done.stdout)
    report("generated text", note=f"equal: {texts[0] == texts[1]}")
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("The city of")


@needs_gpu
@pytest.mark.gpu_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_of_the_loss_equal_the_operators_of_torch(dtype: torch.dtype) -> None:
    from model.loss_comparisons import LogitCase, compare_logits

    for name, case in {
        "50,257 ids": LogitCase(1021, 50_304, 50_257),
        "odd": LogitCase(77, 4097, 4097, further=3),
        "equal logits": LogitCase(64, 32_000, 32_000, scale=100.0, ties=True),
        "padding only": LogitCase(16, 128, 0),
    }.items():
        units = compare_logits(case, dtype, "cuda")
        report(f"loss kernels, {name}, {dtype}", note=f"in units of rounding: {units}")
        assert units["hit"] == units["maximum"] == 0
        assert max(units.values()) <= 1, units
