"""Measure a model that fills a GPU: time and memory of a step, beside the plan and its prediction.

    python benchmarks/large_model.py                 Llama 2 7B on one GPU, in less than 6 minutes
    python benchmarks/large_model.py --quick         a tiny model, also on a CPU

Each variant is a run of its own, with the loop of pretrain_gpt.py on random ids. A variant that
runs out of memory is reported with what it asked for. This process does not use the GPU, because
the model needs all of its memory. Memory is that of torch's allocator: "allocated" is
the peak of all tensors, and "reserved" also has the gaps between them. The predictions are those of
tools/plan.py for the same flags and this device.
"""

import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from results import add_row
from worlds import Case, LaunchedWorld, Rank, WorldFailedError, write_random_tokens

from megatron.base.errors import ConfigError
from megatron.extras.planner.cost.hardware import Hardware, find_hardware, load_hardware
from megatron.extras.planner.prediction import predict_plan
from megatron.extras.translators.translator import load_config
from megatron.model.flops import count_model_flops_per_token
from megatron.observe.throughput import find_peak_tflops
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

Variant = Literal["eager", "fused", "cudnn", "kernels", "compiled", "recompute"]
FLAGS: dict[Variant, str] = {
    "eager": "",
    "fused": "--gradient-accumulation-fusion",
    "cudnn": "--attention-backend fused flash unfused",
    "kernels": "--gradient-accumulation-fusion --attention-backend fused flash unfused "
    "--rope-fusion --bias-swiglu-fusion --cross-entropy-loss-fusion",
    "compiled": "--use-torch-compile",
    "recompute": "--checkpoint-activations",
}
QUICK = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--seq-length 64 --position-embedding-type rotary --normalization RMSNorm "
    "--glu-activation swiglu --no-add-bias-linear --untie-embeddings-and-output-weights "
    "--vocab-size 512 --hidden-dropout 0 --attention-dropout 0"
)
_RANDOM_TOKENS = 2_000_000


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    preset: str = "llama2-7b"
    """Preset of the model."""
    variant: tuple[Variant, ...] = (
        "fused",
        "eager",
        "kernels",
        "recompute",
        "cudnn",
        "compiled",
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


def build_flags(arguments: Arguments, variant: Variant, microbatches: int) -> str:
    """Return the command line of a variant, without its data."""
    model = QUICK if arguments.quick else f"--preset {arguments.preset}"
    return (
        f"{model} --bf16 --micro-batch-size 1 --global-batch-size {microbatches} "
        f"--train-iters 1000 --lr 3e-4 --eval-iters 0 --log-interval 1000 {FLAGS[variant]}"
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
) -> None:
    """Measure a variant with all numbers of microbatches, and print its rows."""
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
        return
    row["start_seconds"] = time.perf_counter() - start
    for microbatches in arguments.microbatches:
        row["microbatches"] = microbatches
        try:
            (measured,) = world.ask("measure", arguments.steps, microbatches)
        except WorldFailedError as failure:
            report_failure(row, failure)
            # The processes of a world that failed have ended.
            return
        command = build_flags(arguments, variant, microbatches)
        plan = resolve(load_config([*command.split(), "--data-path", str(data)]).config, 1)
        report(row, measured, plan, kinds)
    world.close()


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
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    start = time.perf_counter()
    kinds = load_kinds(arguments.hardware)
    # Memory that is freed in one size can be used in another one.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "random"
        write_random_tokens(data, 512 if arguments.quick else 32000, _RANDOM_TOKENS)
        for variant in arguments.variant:
            if time.perf_counter() - start > arguments.seconds:
                print(
                    f"SKIPPED: {variant}: the {arguments.seconds:g} s of --seconds have passed",
                    flush=True,
                )
                add_row("large model", variant=variant, error="not started: no time left")
                continue
            run_variant(arguments, variant, data, folder, kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
