"""Compare the predicted peak memory of all presets with and without the fused kernels.

    python benchmarks/kernel_memory.py             all presets, in about a minute
    python benchmarks/kernel_memory.py --quick     two presets

Nothing runs on a device. The memory is that of tools/plan.py. The configurations have ZeRO stages 0
to 3, 8 and 64 ranks, and a few layouts. Presets without a vocabulary have that of GPT-2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import tyro
from results import add_row

from megatron.config.config_with_origin import LoadedConfig
from megatron.config.presets import list_preset_names
from megatron.extras.planner.cost.hardware import Hardware, load_hardware
from megatron.extras.planner.cost.layout import RankLayout, Software
from megatron.extras.planner.cost.memory import estimate_memory
from megatron.extras.planner.cost.parameter_traffic import reduces_each_microbatch
from megatron.extras.planner.prediction import describe_layout, describe_software
from megatron.extras.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
DEVICES = ("rtx-4090", "a100-40g", "a100-80g", "h200")
_LARGEST = 1.05
"""Configurations above this share of the largest device are left out."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    quick: bool = False
    """Two presets only."""


@dataclass(frozen=True)
class Peaks:
    """Bytes of a configuration, by which kernels are on."""

    none: float
    triton: float
    """Rotary positions, the MLP and the loss."""
    all: float
    """Fused gradients as well."""
    default: float
    """Fused gradients where they are the default."""


def iterate_plans(loaded: LoadedConfig) -> Iterator[Plan]:
    """Yield the plans of a preset without an error."""
    config = loaded.config
    for world in (8, 64):
        for tensor in (1, 8):
            for pipeline in (1, 8):
                if tensor * pipeline > world:
                    continue
                data = world // tensor // pipeline
                for stage in STAGES if data > 1 else STAGES[:1]:
                    parallel = replace(
                        config.parallel,
                        zero_stage=stage,
                        tensor_model_parallel_size=tensor,
                        pipeline_model_parallel_size=pipeline,
                        sequence_parallel=tensor > 1,
                    )
                    batch = replace(config.batch, global_batch_size=8 * data)
                    plan = resolve(replace(config, batch=batch, parallel=parallel), world)
                    if not plan.errors:
                        yield plan


def measure(plan: Plan, layout: RankLayout, microbatches: int, hardware: Hardware) -> Peaks:
    """Return the peaks of the fullest rank."""
    config = plan.config.model
    none = replace(
        describe_software(plan, hardware),
        fused_rotation=False,
        fused_gate=False,
        fused_loss=False,
        fused_gradients=False,
    )
    triton = replace(
        none,
        fused_rotation=config.position_embedding_type == "rotary",
        fused_gate=config.glu_activation is not None,
        fused_loss=True,
    )
    fused = replace(triton, fused_gradients=True)

    def find_peak(software: Software) -> float:
        batch = microbatches * layout.micro_batch * layout.data
        return max(rank.total for rank in estimate_memory(plan.shape, layout, software, batch))

    peaks = find_peak(none), find_peak(triton), find_peak(fused)
    # The rule of `megatron.plan.kernel_choice`.
    return Peaks(*peaks, peaks[1 if reduces_each_microbatch(layout, microbatches) else 2])


def iterate_peaks(name: str, hardware: Hardware) -> Iterator[Peaks]:
    """Yield the peaks of each configuration of a preset."""
    flags = f"--preset {name} --bf16 --micro-batch-size 1 --global-batch-size 8 --train-iters 9"
    for plan in iterate_plans(
        load_config([*flags.split(), "--lr", "1e-4", "--vocab-size", "50257"])
    ):
        base = describe_layout(plan)
        for micro_batch in (1, 4):
            for recompute in ("none", "full"):
                layout = replace(base, micro_batch=micro_batch, recompute=recompute)
                for microbatches in (1, 8):
                    # A pipeline has as many microbatches as stages at least.
                    yield measure(plan, layout, microbatches * base.pipeline, hardware)


def main(arguments: Arguments) -> None:
    """Print how many configurations need more memory, and how many fit."""
    devices = [load_hardware(name) for name in DEVICES]
    names = list_preset_names()[: 2 if arguments.quick else None]
    limit = _LARGEST * devices[-1].memory_bytes
    found = [
        peaks for name in names for peaks in iterate_peaks(name, devices[-1]) if peaks.none <= limit
    ]
    print(f"{len(names)} presets, {len(found)} configurations")
    kinds: dict[str, Callable[[Peaks], float]] = {
        "triton": lambda peaks: peaks.triton,
        "all": lambda peaks: peaks.all,
        "default": lambda peaks: peaks.default,
    }
    for kind, get in kinds.items():
        more = [get(peaks) - peaks.none for peaks in found if get(peaks) > peaks.none + 1]
        text = f"{kind}: {len(more)} higher, by at most {max(more, default=0) / 2**30:.2f} GiB"
        print(text)
        add_row("kernel memory", kernels=kind, higher=len(more), gib=max(more, default=0) / 2**30)
        for device in devices:
            usable = device.usable_bytes
            lost = sum(peaks.none <= usable < get(peaks) for peaks in found)
            won = sum(get(peaks) <= usable < peaks.none for peaks in found)
            print(f"    {device.name}: {lost} no longer fit, {won} fit now")
            add_row("kernel memory", kernels=kind, device=device.name, lost=lost, won=won)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
