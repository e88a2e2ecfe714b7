"""TFLOPs above the peak, and the two conventions of attention."""

import pytest

from megatron.config.model import ModelConfig
from megatron.model import flops
from megatron.model.shape import ModelShape
from megatron.observe.throughput import explain_above_peak


def make_shape(seq_length: int, window: int | None = None) -> ModelShape:
    config = ModelConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=seq_length,
        sliding_window=window,
    )
    return ModelShape(config, 1000, 1024)


def test_rates_below_the_peak_need_no_explanation() -> None:
    assert explain_above_peak(300.0, 312.0, 0.8) is None
    assert explain_above_peak(300.0, None, 0.8) is None


def test_full_attention_explains_a_rate_above_the_peak() -> None:
    text = explain_above_peak(330.0, 312.0, 0.7)
    assert text is not None
    assert "with causal attention they are 231, 74 % of the peak" in text


def test_a_rate_that_nothing_explains_names_the_flag() -> None:
    text = explain_above_peak(900.0, 312.0, 0.7)
    assert text is not None
    assert "no kernel is that fast" in text
    assert "--peak-tflops-per-device" in text


def test_causal_attention_counts_what_the_mask_leaves() -> None:
    """Pairs are counted one by one here."""
    for seq, window in ((16, None), (16, 4), (7, 3), (5, 9)):
        shape = make_shape(seq, window)
        pairs = sum(1 for i in range(seq) for j in range(i + 1) if i - j < (window or seq))
        full, logits = flops.count_forward_flops_per_token(shape)
        causal, same = flops.count_forward_flops_per_token(shape, causal=True)
        assert same == logits
        keys = min(seq, window or seq)
        assert full - causal == 4 * 4 * keys * 64 - 4 * 4 * pairs * 64 // seq


def test_the_causal_share_of_a_long_sequence_is_near_one_half() -> None:
    assert flops.compute_causal_share(make_shape(1_000_000)) == pytest.approx(0.5, abs=0.01)
    assert 0.9 < flops.compute_causal_share(make_shape(32)) < 1
    # Recomputation counts with the same convention.
    shape = make_shape(4096)
    recomputed = flops.compute_causal_share(shape, recompute=1)
    assert recomputed < flops.compute_causal_share(shape)
