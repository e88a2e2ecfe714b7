"""Samples, tokens and floating-point operations per second, and their part of the peak (MFU).

Invariant: seconds are wall seconds of complete iterations, including all waits. TFLOPs and MFU are
those of one device. Peaks are the dense (no sparsity) bf16 Tensor Core rates of the vendors' data
sheets. V100 and T4 have no bf16, so their peaks are fp16. MFU: PaLM,
https://arxiv.org/abs/2204.02311, appendix B.
"""

from dataclasses import dataclass

# The first match wins, so the weaker variants of a name come before it. Sources: NVIDIA's data
# sheets of each product (https://www.nvidia.com/en-us/data-center/), with the "with sparsity"
# figures halved, and AMD's for Instinct.
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


@dataclass
class Amounts:
    """What was done in a period of training, on all devices together."""

    seconds: float = 0.0
    """Wall time."""
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0
    """Operations that were computed. They determine TFLOPs."""
    model_flops: float = 0.0
    """Operations without recomputation. They determine MFU."""


@dataclass(frozen=True)
class Throughput:
    """Rates of a period of training."""

    samples_per_second: float
    tokens_per_second: float
    """Sum over all devices, as is `samples_per_second`."""
    tflops: float
    """TFLOPs of one device."""
    mfu: float | None
    """Fraction of the peak, 0 to 1. None if the peak is not known."""


def find_peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOPs, or None if it is not in the table.

    `device_name` is the name that `torch.cuda.get_device_name` returns.
    """
    # Names are spelled with and without hyphens, so hyphens count as spaces.
    words = f" {device_name.replace('-', ' ')} ".upper()
    for name, peak in _PEAK_TFLOPS:
        # Complete words are compared. As a substring, "A10" would match "A100".
        if f" {name.replace('-', ' ')} ".upper() in words:
            return peak
    return None


def explain_above_peak(tflops: float, peak_tflops: float | None, causal_share: float) -> str | None:
    """Explain TFLOPs above the dense peak of the device. None if they are not above it.

    Args:
        tflops: TFLOPs of one device, with full attention.
        peak_tflops: Its dense peak, or None if it is not known.
        causal_share: FLOPs with causal attention relative to those with full attention.
    """
    if peak_tflops is None or tflops <= peak_tflops:
        return None
    found = f"{tflops:.4g} TFLOPs are above the device's dense peak of {peak_tflops:g}"
    causal = tflops * causal_share
    if causal <= peak_tflops:
        # Flash kernels leave out the masked half, which the full convention counts.
        return (
            f"{found}: they count attention as if not causal; with causal attention they are "
            f"{causal:.4g}, {100 * causal / peak_tflops:.0f} % of the peak."
        )
    return (
        f"{found}, also with causal attention ({causal:.4g}): no kernel is that fast, so the peak "
        "or the measured time is wrong. Check --peak-tflops-per-device, and use the mean over "
        "several iterations."
    )


def compute_throughput(done: Amounts, devices: int, peak_tflops: float | None) -> Throughput:
    """Return the rates of a period of training.

    Args:
        done: What was done.
        devices: Number of devices.
        peak_tflops: Peak of one device, or None if it is not known.
    """
    # The lower limit prevents a division by zero where the clock is too coarse.
    seconds = max(done.seconds, 1e-9)
    return Throughput(
        done.samples / seconds,
        done.tokens / seconds,
        done.flops / seconds / devices / 1e12,
        None if peak_tflops is None else done.model_flops / seconds / devices / 1e12 / peak_tflops,
    )
