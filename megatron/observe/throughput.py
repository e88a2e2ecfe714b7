"""Samples, tokens and floating-point operations a second, and their part of the device's peak (MFU).

Invariant: seconds are wall seconds of whole iterations, all waits included; TFLOPs and MFU are one device's. Peaks are the dense
(no sparsity) bf16 Tensor Core rates of the vendors' data sheets; V100 and T4 have no bf16, theirs are fp16.
MFU: PaLM, https://arxiv.org/abs/2204.02311, appendix B.
"""

from dataclasses import dataclass

# First match wins, so that the weaker variants of a name stand before it. Sources: NVIDIA's data sheets of each product
# (https://www.nvidia.com/en-us/data-center/), "with sparsity" figures halved; AMD's for Instinct.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.5),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("A100", 311.8),
    ("A800", 311.8),
    ("A40", 149.7),
    ("A30", 165.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A10", 125.0),
    ("V100-PCIE", 112.0),
    ("V100", 125.0),
    ("T4", 65.0),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)


@dataclass(frozen=True)
class Throughput:
    samples_per_second: float
    tokens_per_second: float
    """Over all devices."""
    tflops: float
    """One device's."""
    mfu: float | None
    """0 to 1; None where the peak is not known."""


def find_peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a device by the name that `torch.cuda.get_device_name` gives; None where it is not in the table."""
    words = f" {device_name.replace('-', ' ')} ".upper()
    for name, peak in _PEAK_TFLOPS:
        # Whole words, or "A10" would match "A100".
        if f" {name.replace('-', ' ')} ".upper() in words:
            return peak
    return None


def compute_throughput(
    *,
    samples: int,
    tokens: int,
    flops: float,
    model_flops: float,
    seconds: float,
    devices: int,
    peak_tflops: float | None,
) -> Throughput:
    """Rates of work that took `seconds`: `samples`, `tokens`, `flops` (all that ran) and `model_flops` (without
    recomputation) are totals over all `devices`. TFLOPs count what ran, MFU the model's."""
    assert seconds > 0, f"work took {seconds} seconds"
    tflops = flops / seconds / devices / 1e12
    return Throughput(
        samples / seconds,
        tokens / seconds,
        tflops,
        None if peak_tflops is None else model_flops / seconds / devices / 1e12 / peak_tflops,
    )
