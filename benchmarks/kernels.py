"""Measure the kernels that decide the speed of a GPU: copies, products, attention, float8, parts.

    python benchmarks/kernels.py                          about a minute on a GPU
    python benchmarks/kernels.py --quick                  tiny sizes, also on a CPU
    python benchmarks/kernels.py --hardware mine.yaml     write a hardware file for tools/plan.py

Each kernel runs on several sets of normal random numbers in turn, which together exceed the cache.
Times are medians. The products are those of a step: forward, and for the gradients of the input
and of the weight. FLOPs of attention are those of the causal half. The time of a model part is that
of its forward and backward pass. It is also given as the number of bytes that a copy moves in this
time, for each element of the part's largest tensor. The products of the loss are left out there.
"""

import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from float8_speed import BLOCK, TINY, Benchmark
from results import add_row
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError
from megatron.extras.planner.commands.calibrate import format_hardware
from megatron.extras.planner.cost.calibration import Measured, build_measured_hardware
from megatron.extras.planner.cost.hardware import Hardware, find_hardware, load_hardware
from megatron.extras.step.kernels.cross_entropy import CrossEntropyKernels
from megatron.model.fused_operators import LossKernels
from megatron.model.loss import VocabSlice, cross_entropy
from megatron.model.norm import RMSNorm
from megatron.model.positions import rotate
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.padding import multiply_padded, pad_columns
from megatron.parallel.rendezvous import choose_device

_CACHE_BYTES = 128 << 20
"""More than the level-2 cache of any GPU."""
_MOST_SETS = 8
_BUSY_CYCLES = 2_000_000
"""About a millisecond."""
_SQUARE_SECONDS = 1.0
"""Time for each kernel of the hardware file's product. A GPU slows down when it gets warm."""
_REPEATS = 5
"""How often a backward pass is repeated to compare its bits."""
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    part: tuple[Literal["copy", "products", "attention", "model", "float8"], ...] = (
        "copy",
        "products",
        "attention",
        "model",
        "float8",
    )
    """What to measure. The model parts are the loss, rotary positions, SwiGLU, a norm and AdamW.
    float8 has the linear layers of a block."""
    seconds: float = 0.4
    """Time for each kernel."""
    hardware: Path | None = None
    """Hardware file to write, with the measured shares of the device's nominal speeds."""
    base: str | None = None
    """Hardware with the nominal speeds. Default: the one for this device."""
    quick: bool = False
    """Tiny sizes, which check that the script runs."""


@dataclass(frozen=True)
class Product:
    """A linear layer of `rows` tokens: [rows, inner] x [inner, columns]."""

    name: str
    rows: int
    columns: int
    inner: int
    aligned: bool = False
    """Whether rows of odd widths lie in memory at the next multiple of 8 elements."""


PRODUCTS = (
    Product("square", 8192, 8192, 8192),
    Product("7B queries, keys, values", 4096, 12288, 4096),
    Product("7B attention output", 4096, 4096, 4096),
    Product("7B gate and up", 4096, 22016, 4096),
    Product("7B down", 4096, 4096, 11008),
    Product("7B logits", 4096, 32000, 4096),
    Product("177M gate and up, width 2730", 16384, 5460, 1024),
    Product("177M gate and up, width 2730, aligned rows", 16384, 5460, 1024, aligned=True),
    Product("177M gate and up, width 2736", 16384, 5472, 1024),
    Product("177M down, width 2730", 16384, 1024, 2730),
    Product("177M down, width 2730, aligned rows", 16384, 1024, 2730, aligned=True),
    Product("177M down, width 2736", 16384, 1024, 2736),
    Product("125M up", 16384, 3072, 768),
    Product("125M logits, 50257 ids", 4096, 50257, 768),
    Product("125M logits, 50304 ids", 4096, 50304, 768),
)


@dataclass(frozen=True)
class Attention:
    """The attention of `batch` sequences."""

    heads: int
    groups: int
    """Heads of keys and values."""
    width: int
    length: int
    batch: int


ATTENTIONS = (
    Attention(32, 32, 128, 4096, 1),
    Attention(32, 32, 128, 8192, 1),
    Attention(32, 8, 128, 4096, 1),
    Attention(32, 8, 128, 8192, 1),
    Attention(12, 12, 64, 4096, 4),
    Attention(12, 12, 64, 8192, 2),
    Attention(12, 4, 64, 4096, 4),
)


def time_kernel(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Return the median seconds of a call. The calls take turns for about `seconds`."""
    # The first calls load kernels and allocate.
    for call in calls:
        call()
    _wait()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        for call in calls:
            times.append(_time_once(call))
    return statistics.median(times)


def _time_once(call: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The GPU is busy while the host queues the kernels. Otherwise the time of the host would count.
    torch.cuda._sleep(_BUSY_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_sets(size: int) -> int:
    """Return how many sets of tensors of `size` bytes exceed the cache."""
    return min(_MOST_SETS, max(1, -(-_CACHE_BYTES // size)))


def measure_copy(device: torch.device, arguments: Arguments) -> float:
    """Return the bytes that a copy reads and writes, in 10^12 a second."""
    size = (1 << 20) if arguments.quick else (1 << 30)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    seconds = time_kernel([lambda: target.copy_(source)], arguments.seconds)
    rate = 2 * size / seconds / 1e12
    print(f"copy of {size >> 20} MiB: {rate:.3f} TB/s", flush=True)
    add_row("copy", mib=size >> 20, tb_per_second=rate)
    return rate


def measure_product(product: Product, device: torch.device, seconds: float) -> dict[str, float]:
    """Return the TFLOPs of a linear layer's three products in bf16, and of the fused one."""
    rows, columns, inner = product.rows, product.columns, product.inner

    def draw(height: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        memory = width + -width % 8 if product.aligned else width
        return torch.randn(height, memory, device=device, dtype=dtype)[:, :width]

    elements = rows * inner + inner * columns + rows * columns
    sets = [
        (draw(rows, inner), draw(columns, inner), draw(rows, columns))
        for _ in range(count_sets(2 * elements))
    ]
    out, grad_x, grad_weight = draw(rows, columns), draw(rows, inner), draw(columns, inner)
    total = draw(columns, inner, torch.float32)
    calls: dict[str, list[Callable[[], object]]] = {
        "forward": [lambda s=s: torch.mm(s[0], s[1].t(), out=out) for s in sets],  # type: ignore[misc]
        "input": [lambda s=s: torch.mm(s[2], s[1], out=grad_x) for s in sets],  # type: ignore[misc]
        "weight": [
            lambda s=s: torch.mm(s[2].t(), s[0], out=grad_weight)  # type: ignore[misc]
            for s in sets
        ],
        # The sum of gradients over microbatches: first rounded, then added, as by autograd.
        "weight + sum": [
            lambda s=s: total.add_(torch.mm(s[2].t(), s[0], out=grad_weight))  # type: ignore[misc]
            for s in sets
        ],
    }
    if (columns % 8 or inner % 8) and not product.aligned:
        # As linear layers compute it on a GPU, with the copy of the weight.
        inputs = [pad_columns(x) for x, _, _ in sets]
        calls["forward, padded"] = [
            lambda x=x, s=s: multiply_padded(x, s[1], None)  # type: ignore[misc]
            for x, s in zip(inputs, sets, strict=True)
        ]
    if device.type == "cuda":
        # The same in one kernel, as with --gradient-accumulation-fusion. CPUs have none.
        calls["weight, fused sum"] = [
            lambda s=s: torch.addmm(  # type: ignore[misc]
                total, s[2].t(), s[0], out_dtype=torch.float32, out=total
            )
            for s in sets
        ]
    flops = 2 * rows * columns * inner
    rates = {}
    for name, each in calls.items():
        try:
            rates[name] = flops / time_kernel(each, seconds) / 1e12
        except RuntimeError as error:
            # One kernel that this version of torch lacks must not end the measurement.
            report_failure("products", product.name, error)
    return rates


def report_failure(table: str, name: str, error: Exception) -> None:
    """Print and record what could not be computed."""
    reason = str(error).splitlines()[0][:300]
    print(f"FAILED: {name}: {reason}", flush=True)
    add_row(table, name=name, error=reason)


def measure_products(device: torch.device, arguments: Arguments) -> float:
    """Measure all products, and return the TFLOPs of the square one."""
    square = 0.0
    for product in PRODUCTS:
        if arguments.quick:
            columns, inner = product.columns // 32, product.inner // 32
            product = dataclasses.replace(product, rows=64, columns=columns, inner=inner)
        seconds = arguments.seconds / 4
        if product.name == "square" and not arguments.quick:
            seconds = _SQUARE_SECONDS
        rates = measure_product(product, device, seconds)
        shape = f"{product.rows} x {product.columns} x {product.inner}"
        text = ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items())
        print(f"product {product.name} ({shape}), TFLOPs: {text}", flush=True)
        add_row("products", name=product.name, shape=shape, **rates)
        if product.name == "square":
            square = rates.get("forward", 0.0)
    return square


def measure_attention(
    attention: Attention, backend: SDPBackend, device: torch.device, seconds: float
) -> tuple[float, float, int]:
    """Return the TFLOPs of the forward pass and of the backward pass in bf16, and differences.

    The last number is how many of `_REPEATS` repeated backward passes have other bits than the
    first one.

    Raises:
        RuntimeError: The backend cannot compute it.
    """

    def draw(heads: int) -> torch.Tensor:
        # The trainer's layout is [s, b, n, d]. The kernels get views of it.
        shape = (attention.length, attention.batch, heads, attention.width)
        tensor = torch.randn(shape, device=device, dtype=torch.bfloat16)
        return tensor.permute(1, 2, 0, 3).requires_grad_()

    query = draw(attention.heads)
    key, value = draw(attention.groups), draw(attention.groups)
    gradient = torch.randn_like(query)
    grouped = attention.groups < attention.heads

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    with sdpa_kernel([backend]):
        forward_seconds = time_kernel([forward], seconds)
        out = forward()
        # The graph is kept, so that only the backward pass is in the time.
        backward_seconds = time_kernel(
            [lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)],
            seconds,
        )
        differing = count_differing(
            lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)
        )
    # Two products of s x s x d in the forward pass and five in the backward pass, half of them
    # masked.
    product = attention.batch * attention.heads * attention.length**2 * attention.width
    return 2 * product / forward_seconds / 1e12, 5 * product / backward_seconds / 1e12, differing


def count_differing(compute: Callable[[], Sequence[torch.Tensor]]) -> int:
    """Return how many of several repetitions have other bits than the first computation."""
    first = compute()
    return sum(
        not all(torch.equal(one, two) for one, two in zip(first, compute(), strict=True))
        for _ in range(_REPEATS)
    )


def compare_kernels(rates: Mapping[str, Sequence[tuple[float, int]]]) -> str:
    """Return whether cuDNN's kernel should come first in attention on this GPU, and why.

    It should if it is faster at all shapes. Whether backward passes repeat with the same bits is
    reported for both kernels. It is no reason against cuDNN, because flash does not repeat either.

    Args:
        rates: Name of a kernel -> (TFLOPs of both passes, differing repetitions) of each shape.
            The shapes have the same order for each kernel, and a rate of 0 means that the kernel
            cannot compute the shape.
    """
    flash, cudnn = rates["flash"], rates["cudnn"]
    faster = sum(new > old for (old, _), (new, _) in zip(flash, cudnn, strict=True))
    verdict = "yes" if faster == len(flash) else "no"
    same = [
        f"{sum(rate > 0 and differing == 0 for rate, differing in rates[name])} ({name})"
        for name in ("flash", "cudnn")
    ]
    return (
        f"cuDNN first: {verdict}. It is faster than flash at {faster} of {len(flash)} shapes, "
        "forward and backward pass together. Backward passes repeat with the same bits at "
        f"{' and '.join(same)} of them"
    )


def measure_attentions(device: torch.device, arguments: Arguments) -> float | None:
    """Measure all kernels, and return the TFLOPs of a flash kernel with heads of 128.

    The rate is that of forward and backward pass together.
    """
    rate = None
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in _BACKENDS}
    for attention in ATTENTIONS:
        if arguments.quick:
            attention = Attention(4, attention.groups * 4 // attention.heads, 16, 64, 1)
        for name, backend in _BACKENDS.items():
            described = dataclasses.asdict(attention)
            try:
                forward, backward, differing = measure_attention(
                    attention, backend, device, arguments.seconds / 2
                )
            except RuntimeError as error:
                print(f"attention {described} {name}: {str(error).splitlines()[0]}", flush=True)
                add_row("attention", kernel=name, error=str(error)[:200], **described)
                found[name].append((0.0, 0))
                continue
            print(
                f"attention {described} {name}, TFLOPs: forward {forward:.4g}, backward "
                f"{backward:.4g}; {differing} of {_REPEATS} backward passes differ",
                flush=True,
            )
            add_row(
                "attention",
                kernel=name,
                forward=forward,
                backward=backward,
                differing=differing,
                **described,
            )
            # 2 parts of the FLOPs are in the forward pass, and 5 in the backward pass.
            found[name].append((7 / (2 / forward + 5 / backward), differing))
            if rate is None and name == "flash":
                rate = found[name][-1][0]
    verdict = compare_kernels(found)
    print(verdict, flush=True)
    add_row("attention order", device=str(device), verdict=verdict)
    return rate


@dataclass(frozen=True)
class ModelPart:
    """A part of a model: its calls, and the elements of its largest tensor."""

    name: str
    call: Callable[[], object]
    elements: int
    products: Callable[[], object] | None = None
    """The matrix products of the part alone."""


def differentiate(out: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """Run the backward pass of a part, with ones as the gradient of its output."""
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def build_loss(
    name: str,
    rows: int,
    hidden: int,
    vocab: int,
    device: torch.device,
    kernels: LossKernels | None = None,
) -> ModelPart:
    """Return the trainer's loss with its output projection."""
    states = torch.randn(rows, 1, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocab, (rows, 1), device=device)
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16)
    vocab_slice = VocabSlice(0, vocab)

    def loss() -> None:
        value = cross_entropy(
            states, weight, labels, vocab_slice, TensorParallel(), kernels=kernels
        )
        differentiate(value, (states, weight))

    def products() -> None:
        flat = states.detach()[:, 0]
        _ = flat @ weight.detach().t()
        _ = logits @ weight.detach()
        _ = logits.t() @ flat

    return ModelPart(name, loss, rows * vocab, products)


def build_model_parts(device: torch.device, *, quick: bool) -> list[ModelPart]:
    """Return the parts at the sizes of 125M, 177M and 7B, or at tiny ones."""
    rows, length, heads, width = (16384, 4096, 32, 128)
    vocab, channels, parameters = (50304, 11008, 250_000_000)
    small, large = (768, 1024)
    if quick:
        rows, length, heads, width = (64, 32, 2, 16)
        vocab, channels, parameters = (256, 64, 1000)
        small, large = (64, 64)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    query = draw(length, 1, heads, 1, width)
    angles = torch.randn(length, 1, 1, 1, width // 2, device=device)
    cosines, sines = angles.cos(), angles.sin()
    gate, up = draw(length, channels), draw(length, channels)
    states = draw(length, heads * width)
    norm = RMSNorm(heads * width, 1e-5, TensorParallel()).to(device, torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    master = torch.randn(parameters, device=device, requires_grad=True)
    master.grad = torch.randn_like(master)
    optimizer = torch.optim.AdamW([master], fused=True)
    fused: list[ModelPart] = []
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        # They import Triton.
        from megatron.extras.step.kernels import gate as gate_kernels
        from megatron.extras.step.kernels import rotary as rotary_kernels

        fused = [
            build_loss("loss, 125M, kernels", rows, small, vocab, device, CrossEntropyKernels()),
            build_loss("loss, 177M, kernels", rows, large, vocab, device, CrossEntropyKernels()),
            ModelPart(
                "rotary positions, 7B, kernels",
                lambda: differentiate(rotary_kernels.rotate(query, cosines, sines), (query,)),
                query.numel(),
            ),
            ModelPart(
                "SwiGLU, 7B, kernels",
                lambda: differentiate(gate_kernels.apply_gate(gate, up, "swiglu"), (gate, up)),
                gate.numel(),
            ),
        ]
    return [
        *fused,
        build_loss("loss, 125M", rows, small, vocab, device),
        build_loss("loss, 177M", rows, large, vocab, device),
        ModelPart(
            "rotary positions, 7B",
            lambda: differentiate(rotate(query, cosines, sines), (query,)),
            query.numel(),
        ),
        ModelPart(
            "SwiGLU, 7B",
            lambda: differentiate(F.silu(gate) * up, (gate, up)),
            gate.numel(),
        ),
        ModelPart(
            "RMSNorm, 7B",
            lambda: differentiate(norm(states), (states, norm.weight)),
            states.numel(),
        ),
        ModelPart("AdamW, 250M parameters", optimizer.step, parameters),
    ]


def measure_model_parts(device: torch.device, arguments: Arguments, copy: float | None) -> None:
    """Measure the model parts, and print their times."""
    for part in build_model_parts(device, quick=arguments.quick):
        products = 0.0
        try:
            seconds = time_kernel([part.call], arguments.seconds)
            if part.products is not None:
                products = time_kernel([part.products], arguments.seconds)
        except RuntimeError as error:
            report_failure("model parts", part.name, error)
            continue
        moved = None
        if copy is not None:
            moved = (seconds - products) * copy * 1e12 / part.elements
        text = f"{part.name}: {1e3 * seconds:.3f} ms, products {1e3 * products:.3f} ms"
        if moved is not None:
            text += f", equal to a copy of {moved:.1f} bytes an element"
        print(text, flush=True)
        add_row(
            "model parts",
            name=part.name,
            ms=1e3 * seconds,
            products_ms=1e3 * products,
            elements=part.elements,
            bytes_of_a_copy=moved,
        )


def measure_float8(device: torch.device, arguments: Arguments) -> None:
    """Measure the linear layers of a block in float8 and in bf16."""
    benchmark = Benchmark(device, time_kernel, arguments.seconds / 2, add_row)
    try:
        benchmark.measure(TINY if arguments.quick else BLOCK)
    except RuntimeError as error:
        report_failure("float8", "all", error)


def write_hardware(
    path: Path, base: Hardware | None, rates: dict[str, float | None], device: torch.device
) -> None:
    """Write a hardware file with the measured speeds.

    Raises:
        ConfigError: A speed is above the nominal one of the base.
    """
    product, copy = rates["product"], rates["copy"]
    if product is None or copy is None:
        raise ConfigError("--hardware needs the parts copy and products.")
    gib, multiprocessors = 1.0, 1
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        gib = properties.total_memory / 2**30
        multiprocessors = properties.multi_processor_count
    measured = Measured(
        tflops=product,
        memory_tb_per_second=copy,
        memory_gib=gib,
        multiprocessors=multiprocessors,
        ring_gb_per_second=None,
        ranks=1,
    )
    hardware = build_measured_hardware(measured, base, path.stem)
    if rates["attention"] is not None:
        share = min(1.0, rates["attention"] / hardware.peak_tflops)
        hardware = dataclasses.replace(hardware, attention_share=share)
    replace_file(path, format_hardware(dataclasses.replace(hardware, name=path.stem)))
    add_row("hardware", **dataclasses.asdict(hardware))
    print(f"wrote {path}")


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    device = choose_device(0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}", flush=True)
    if arguments.quick:
        arguments = dataclasses.replace(arguments, seconds=0.01)
    base = find_hardware(name)
    if arguments.base is not None:
        base = load_hardware(arguments.base)
    rates: dict[str, float | None] = {"copy": None, "product": None, "attention": None}
    if "copy" in arguments.part:
        rates["copy"] = measure_copy(device, arguments)
    if "products" in arguments.part:
        rates["product"] = measure_products(device, arguments)
    if "attention" in arguments.part:
        rates["attention"] = measure_attentions(device, arguments)
    if "model" in arguments.part:
        measure_model_parts(device, arguments, rates["copy"])
    if "float8" in arguments.part:
        measure_float8(device, arguments)
    if arguments.hardware is not None:
        try:
            write_hardware(arguments.hardware, base, rates, device)
        except ConfigError as error:
            # The rows of the kernels are kept.
            report_failure("hardware", str(arguments.hardware), error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
