"""Values of a hardware file from measurements: of a device, or of a training step."""

from dataclasses import dataclass, replace
from typing import Any

from megatron.base.errors import ConfigError
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.layout import StepJob
from megatron.extras.planner.cost.step_prediction import StepPrediction

_LOWEST_SHARE = 0.02
"""A device that reaches less of its nominal speed is faulty, or is another device."""


@dataclass(frozen=True)
class Measured:
    """What a micro-benchmark found on one device."""

    tflops: float
    """Speed of a large matrix product."""
    memory_tb_per_second: float
    """Bytes read and written by a copy, in 10^12 a second."""
    memory_gib: float
    multiprocessors: int
    ring_gb_per_second: float | None
    """Bytes a second of a device in a ring of all ranks. None with one rank."""
    ranks: int


def build_measured_hardware(measured: Measured, base: Hardware | None, name: str) -> Hardware:
    """Return the hardware with measured shares of the base's nominal values.

    Without a base the measured values are the nominal ones, and their shares are 1. The network is
    then that of the ring, or a placeholder with one rank.

    Raises:
        ConfigError: A value is above the nominal one of the base, or far below it.
    """
    if base is None:
        ring = measured.ring_gb_per_second or 1.0
        return Hardware(
            name=name,
            peak_tflops=measured.tflops,
            memory_gib=measured.memory_gib,
            memory_tb_per_second=measured.memory_tb_per_second,
            multiprocessors=measured.multiprocessors,
            ranks_per_node=max(1, measured.ranks),
            node_gb_per_second=ring,
            network_gb_per_second=ring,
            watts=100.0,
            gemm_share=1.0,
            attention_share=1.0,
            memory_share=1.0,
            node_share=1.0,
            network_share=1.0,
        )
    shares: dict[str, Any] = {
        "gemm_share": measured.tflops / base.peak_tflops,
        "memory_share": measured.memory_tb_per_second / base.memory_tb_per_second,
    }
    if measured.ring_gb_per_second is not None:
        # The ring of one node uses its links. With more ranks, the slower network decides.
        if measured.ranks <= base.ranks_per_node:
            shares["node_share"] = measured.ring_gb_per_second / base.node_gb_per_second
        else:
            network = base.network_gb_per_second * base.ranks_per_node
            shares["network_share"] = measured.ring_gb_per_second / network
    # A base of another device gives shares that no device can have.
    for key, share in shares.items():
        if share > 1:
            raise ConfigError(
                f"{key}: the measured value is {share:.2f} times the nominal one of {base.name}, "
                "so this is another device. Choose another --base."
            )
        # A slow network is measured as it is, but so slow a product is that of another device, such
        # as a CPU.
        if share < _LOWEST_SHARE and key in ("gemm_share", "memory_share"):
            raise ConfigError(
                f"{key}: the measured value is {share:.2g} of the nominal one of {base.name}, so "
                "this is another device. Measure on a device of --base, or leave --base out."
            )
    # A flash kernel depends on the same units as the matrix product.
    shares["attention_share"] = base.attention_share * shares["gemm_share"] / base.gemm_share
    shares["attention_share"] = min(1.0, shares["attention_share"])
    return replace(base, **shares)


def fit_gemm_share(job: StepJob, seconds: float) -> Hardware:
    """Return the hardware of `job` with the gemm_share that explains the measured `seconds`.

    Raises:
        ConfigError: No share from 0.02 to 1 gives this time.
    """
    # Below this share the time would be that of a fault.
    low = _LOWEST_SHARE
    high = 1.0
    fastest = _predict(job, high)
    slowest = _predict(job, low)
    if not fastest <= seconds <= slowest:
        raise ConfigError(
            f"a step of {seconds:.4g} s cannot be explained by the speed of matrix products: with "
            f"{job.hardware.name} it would take {fastest:.4g} to {slowest:.4g} s. Check the "
            "hardware, the number of devices and the flags."
        )
    # The time decreases with the share.
    for _ in range(40):
        middle = (low + high) / 2
        if _predict(job, middle) > seconds:
            low = middle
        else:
            high = middle
    return _change_share(job, high).hardware


def _change_share(job: StepJob, share: float) -> StepJob:
    return replace(job, hardware=replace(job.hardware, gemm_share=share))


def _predict(job: StepJob, share: float) -> float:
    return StepPrediction(_change_share(job, share)).seconds
