"""Measure a model that fills a GPU: time and memory of a step, beside the plan and its prediction.

    python benchmarks/large_model.py                 Llama 2 7B on one GPU, in less than 6 minutes
    python benchmarks/large_model.py --quick         a tiny model, also on a CPU

Each variant is a run of its own, with the loop of pretrain_gpt.py on random ids. At the end of a
variant, one more step is traced (`kernel_shares.py` describes the rows). A variant that runs out of
memory is reported with what it asked for. On a device with less than 100 GiB, the default is Llama
3.2B instead, with 4,096 tokens, too. This process does not use the GPU, because
the model needs all of its memory. Memory is that of torch's allocator: "allocated" is
the peak of all tensors, and "reserved" also has the gaps between them. The predictions are those of
tools/plan.py for the same flags and this device.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from kernel_shares import read_kernels, report_kernels
from results import add_row
from worlds import (
    Case,
    LaunchedWorld,
    Rank,
    WorldFailedError,
    choose_capture,
    write_random_tokens,
)

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.hardware import Hardware, find_hardware, load_hardware
from megatron.extras.planner.prediction import predict_plan
from megatron.model.flops import count_model_flops_per_token
from megatron.observe.throughput import find_peak_tflops
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

Variant = Literal[
    "defaults",
    "captured",
    "compiled",
    "tensorwise",
    "tensorwise-captured",
    "rowwise",
    "deterministic",
    "plain",
    "recompute",
]
_COMPILED = "--use-torch-compile --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
_CAPTURE = " ".join(choose_capture("on"))
FLAGS: dict[Variant, str] = {
    "defaults": "",
    "captured": _CAPTURE,
    "compiled": _COMPILED,
    "tensorwise-captured": f"{_COMPILED} --fp8-format hybrid --fp8-recipe tensorwise {_CAPTURE}",
    "tensorwise": f"{_COMPILED} --fp8-format hybrid --fp8-recipe tensorwise",
    "rowwise": f"{_COMPILED} --fp8-format e4m3 --fp8-recipe rowwise",
    "deterministic": "--deterministic-mode",
    # None of the kernels that a GPU uses without a flag.
    "plain": "--no-gradient-accumulation-fusion --no-rope-fusion --no-bias-swiglu-fusion "
    "--no-residual-norm-fusion --no-cross-entropy-loss-fusion --attention-backend auto",
    "recompute": "--checkpoint-activations",
}
"""Variant -> its flags besides --bf16. Compiled ones have moments in bf16, so that 8 billion
parameters fit into 140 GB."""
QUICK = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--seq-length 64 --position-embedding-type rotary --normalization RMSNorm "
    "--glu-activation swiglu --no-add-bias-linear --untie-embeddings-and-output-weights "
    "--vocab-size 512 --hidden-dropout 0 --attention-dropout 0 --adam-beta2 0.95"
)
_RANDOM_TOKENS = 2_000_000
_LARGE_BYTES = 100 << 30
"""A device with more memory trains 7 billion parameters, and another one 3 billion."""
_TRACED_MICROBATCHES = 2
_STEPS_BEFORE_CUBE = 10
_CUBE = 8192
_CUBE_SECONDS = 5.0
_PRODUCTS = 20
"""Products between two looks at the clock."""
_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
"""What nvidia-smi reports with --watch."""
_TRACED_ROWS = 15
"""Kernels of a trace that are printed."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    preset: str | None = None
    """Preset of the model. Default: llama2-7b, or llama3-3.2b if the GPU has less than 100 GiB."""
    variant: tuple[Variant, ...] = (
        "defaults",
        "compiled",
        "tensorwise",
        "rowwise",
        "deterministic",
    )
    """The variants to run, in this order."""
    microbatches: tuple[int, ...] = (1, 8)
    """Numbers of microbatches of a step. Each variant runs all of them."""
    steps: int = 3
    """Timed steps, after one that is not timed."""
    hardware: tuple[str, ...] = ()
    """Hardware of the predictions: names or files. Default: the one for this device."""
    seconds: float = 300
    """Time after which no further variant starts."""
    trace: bool = True
    """Trace a step of each variant."""
    watch: bool = False
    """Read the GPU's clocks, power and throttle reasons every 100 ms during the timed steps."""
    cube: bool = False
    """After the timed steps, run ten steps and then a product of 8,192 cubed for 5 s."""
    quick: bool = False
    """A tiny model, which checks that the script runs."""


class DeviceRank(Rank):
    """A rank that also reports the memory of its device."""

    def measure(self, count: int, microbatches: int) -> dict[str, Any]:
        """Return the seconds of each step, and the peak bytes of memory."""
        self.steps(1, microbatches)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = [self.steps(1, microbatches).seconds for _ in range(count)]
        allocated = torch.cuda.max_memory_allocated() if self._cuda else None
        reserved = torch.cuda.max_memory_reserved() if self._cuda else None
        device = torch.cuda.get_device_name() if self._cuda else "CPU"
        return {
            "seconds": seconds,
            "allocated": allocated,
            "reserved": reserved,
            "device": device,
        }

    def multiply(self, size: int, seconds: float) -> list[float]:
        """Run ten steps and then products of bf16 matrices, and return the TFLOPS of each second.

        The GPU is as warm as in a run. What the products reach is what the chip sustains.
        """
        for _ in range(_STEPS_BEFORE_CUBE):
            self.steps(1, _TRACED_MICROBATCHES)
        device = "cuda" if self._cuda else "cpu"
        a, b = (torch.randn((size, size), device=device, dtype=torch.bfloat16) for _ in range(2))
        rates = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            count = 0
            while time.perf_counter() - start < min(1.0, seconds):
                for _ in range(_PRODUCTS):
                    torch.mm(a, b)
                if self._cuda:
                    torch.cuda.synchronize()
                count += _PRODUCTS
            rates.append(2 * size**3 * count / (time.perf_counter() - start) / 1e12)
        return rates

    def trace(self, path: str) -> None:
        """Write the trace of a step to PATH.json.gz."""
        cuda, cpu = torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cuda if self._cuda else cpu]) as profiler:
            self.steps(1, _TRACED_MICROBATCHES)
        profiler.export_chrome_trace(path)


@contextmanager
def watch_gpu(*, wanted: bool) -> Iterator[list[str]]:
    """Yield a list that has the lines of nvidia-smi, one for every 100 ms, after the block."""
    lines: list[str] = []
    if not wanted or shutil.which("nvidia-smi") is None:
        yield lines
        return
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-lms"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([*command, "100"], stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield lines
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            lines += [line.strip() for line in output if line.strip()]


def report_clocks(row: dict[str, Any], lines: list[str]) -> None:
    """Record the samples of `watch_gpu`, and print their range."""
    names = _QUERY.split(",")
    samples = [line.split(", ") for line in lines]
    # The last line may be incomplete.
    samples = [sample for sample in samples if len(sample) == len(names)]
    if not samples:
        return
    columns = dict(zip(names, zip(*samples, strict=True), strict=True))
    described = {key: row.get(key) for key in ("model", "variant", "microbatches")}
    add_row("clocks", **described, samples=len(samples), **columns)
    for name, values in columns.items():
        print(f"{name}: {min(values)} to {max(values)}, {len({*values})} values", flush=True)


def choose_preset() -> str:
    """Return the preset that fits the first GPU, by the memory that nvidia-smi reports."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        mib = int(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "llama2-7b"
    return "llama2-7b" if mib << 20 >= _LARGE_BYTES else "llama3-3.2b"


def build_flags(arguments: Arguments, variant: Variant, microbatches: int) -> str:
    """Return the command line of a variant, without its data."""
    flags = FLAGS[variant]
    if arguments.quick and "--fp8-format" in flags and not torch.cuda.is_available():
        # A CPU has no products in float8, and compiles their emulation for a minute.
        flags = flags.replace("--use-torch-compile", "--fp8-emulate")
    model = QUICK if arguments.quick else f"--preset {arguments.preset} --seq-length 4096"
    return (
        f"{model} --bf16 --micro-batch-size 1 --global-batch-size {microbatches} "
        f"--train-iters 1000 --lr 3e-4 --eval-iters 0 --log-interval 1000 {flags}"
    )


def load_kinds(names: tuple[str, ...]) -> list[Hardware]:
    """Return the hardware of names or files. What cannot be loaded is left out, with a message."""
    kinds = []
    for name in names:
        try:
            kinds.append(load_hardware(name))
        except ConfigError as error:
            print(f"SKIPPED: predictions for {name}: {error}", flush=True)
    return kinds


def predict(plan: Plan, kinds: list[Hardware], device: str) -> dict[str, Any]:
    """Return the predicted seconds of a step, and the predicted peak of all tensors in GiB.

    Args:
        plan: The plan of the run.
        kinds: Hardware. Without any, that of the device.
        device: Name of the device.
    """
    if not kinds and (found := find_hardware(device)) is not None:
        kinds = [found]
    if not kinds:
        return {"predicted_seconds": {}, "predicted_gib": None}
    predictions = {kind.name: predict_plan(plan, kind) for kind in kinds}
    # The memory of the tensors does not depend on the hardware.
    memory = next(iter(predictions.values())).memory
    return {
        "predicted_seconds": {name: each.seconds for name, each in predictions.items()},
        "predicted_gib": max(rank.total - rank.fixed for rank in memory) / 2**30,
    }


def run_variant(
    arguments: Arguments, variant: Variant, data: Path, folder: str, kinds: list[Hardware]
) -> bool:
    """Measure a variant with all numbers of microbatches, print its rows, and return success."""
    most = max(arguments.microbatches)
    flags = build_flags(arguments, variant, most)
    start = time.perf_counter()
    row: dict[str, Any] = {"variant": variant, "model": arguments.preset}
    if arguments.quick:
        row["model"] = "quick"
    try:
        world = LaunchedWorld(Case(variant, flags, data=data), folder, DeviceRank)
    except WorldFailedError as failure:
        report_failure(row, failure)
        return False
    row["start_seconds"] = time.perf_counter() - start
    for microbatches in arguments.microbatches:
        row["microbatches"] = microbatches
        try:
            with watch_gpu(wanted=arguments.watch) as lines:
                (measured,) = world.ask("measure", arguments.steps, microbatches)
            report_clocks(row, lines)
        except WorldFailedError as failure:
            report_failure(row, failure)
            # The processes of a world that failed have ended.
            return False
        command = build_flags(arguments, variant, microbatches)
        plan = resolve(load_config([*command.split(), "--data-path", str(data)]).config, 1)
        report(row, measured, plan, kinds)
    if arguments.cube and not multiply(arguments, world, row):
        return False
    traced = not arguments.trace or trace_step(world, row, Path(folder) / f"{variant}.json.gz")
    world.close()
    return traced


def multiply(arguments: Arguments, world: LaunchedWorld, row: dict[str, Any]) -> bool:
    """Measure a product directly after steps, print and record it, and return success."""
    size = 256 if arguments.quick else _CUBE
    try:
        (rates,) = world.ask("multiply", size, 0.2 if arguments.quick else _CUBE_SECONDS)
    except WorldFailedError as failure:
        report_failure(row, failure)
        return False
    add_row("cube", variant=row["variant"], size=size, tflops=statistics.median(rates), each=rates)
    print(f"{size} cube after steps: {statistics.median(rates):.0f} TFLOPS", flush=True)
    return True


def trace_step(world: LaunchedWorld, row: dict[str, Any], path: Path) -> bool:
    """Trace a step, print and record its kernels, and return success."""
    try:
        world.ask("trace", str(path))
    except WorldFailedError as failure:
        report_failure(row, failure)
        return False
    described = {"size": row["model"], "shape": row["variant"], "flags": FLAGS[row["variant"]]}
    report_kernels(read_kernels(path), described, _TRACED_ROWS)
    return True


def report(
    row: dict[str, Any], measured: dict[str, Any], plan: Plan, kinds: list[Hardware]
) -> None:
    """Print and record one measurement."""
    seconds = statistics.median(measured["seconds"])
    tokens = plan.batch_size.final * plan.config.model.seq_length
    tflops = tokens * count_model_flops_per_token(plan.shape) / seconds / 1e12
    result = {
        **row,
        "seconds": seconds,
        "each_seconds": measured["seconds"],
        "tokens_per_second": tokens / seconds,
        "tflops": tflops,
        "mfu": None,
        "allocated_gib": None,
        "reserved_gib": None,
        **predict(plan, kinds, measured["device"]),
    }
    if measured["allocated"] is not None:
        peak = find_peak_tflops(measured["device"])
        result["mfu"] = tflops / peak if peak else None
        result["allocated_gib"] = measured["allocated"] / 2**30
        result["reserved_gib"] = measured["reserved"] / 2**30
    add_row("large model", **result)
    del result["each_seconds"]
    text = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in result.items()
    )
    print(text, flush=True)


def report_failure(row: dict[str, Any], failure: WorldFailedError) -> None:
    """Print and record a variant that failed, with the last line of its error."""
    lines = [line for line in str(failure).splitlines() if line.strip()]
    # The message of a device without memory is followed by torch's advice.
    memory = [line for line in lines if "out of memory" in line.lower()]
    reason = (memory or lines)[-1].strip()[:300]
    print(f"FAILED: {row}: {reason}", flush=True)
    add_row("large model", **row, error=reason)


def main() -> int:
    """Run the benchmark and return the exit code, which is 1 if a variant failed."""
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.preset is None:
        arguments = replace(arguments, preset=choose_preset())
    start = time.perf_counter()
    passed = True
    kinds = load_kinds(arguments.hardware)
    # Memory that is freed in one size can be used in another one.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "random"
        write_random_tokens(data, 512 if arguments.quick else 32000, _RANDOM_TOKENS)
        for variant in arguments.variant:
            if variant.endswith("captured") and not _CAPTURE:
                print(f"SKIPPED: {variant}: the trainer has no --cuda-graph", flush=True)
                continue
            if time.perf_counter() - start > arguments.seconds:
                print(
                    f"SKIPPED: {variant}: the {arguments.seconds:g} s of --seconds have passed",
                    flush=True,
                )
                add_row("large model", variant=variant, error="not started: no time left")
                continue
            passed &= run_variant(arguments, variant, data, folder, kinds)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
