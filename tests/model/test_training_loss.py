"""Tests of the z-loss and of the goldfish loss."""

import pytest
import torch
import torch.nn.functional as F
from model.builders import build, some_tokens, tiny_config

from megatron.config.loss import LossConfig
from megatron.model.goldfish import keep_tokens
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs


def build_with(loss: LossConfig) -> GPT:
    plain = build(tiny_config())
    model = GPT(plain.shape, plain.tp, loss=loss)
    model.load_state_dict(plain.state_dict())
    # With large logits, log(Z) is far from 0.
    assert model.embedding is not None
    model.embedding.word.weight.data.mul_(20.0)
    return model


@pytest.mark.parametrize("masked", [False, True])
def test_the_z_loss_adds_the_squares_of_log_z(masked: bool) -> None:
    model = build_with(LossConfig(z_loss_coefficient=0.03))
    tokens = some_tokens(seed=1)
    labels = some_tokens(seed=2)
    mask = None
    if masked:
        mask = (some_tokens(seed=3) % 3 > 0).float()
    loss = model(None, Inputs(tokens, labels, mask))
    loss.backward()
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    logits = model.compute_logits(tokens).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    losses = losses + 0.03 * torch.logsumexp(logits, dim=-1).square()
    weights = torch.ones_like(losses) if mask is None else mask.flatten()
    reference = (losses * weights).sum() / weights.sum()
    reference.backward()
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=0)
    theirs = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(z_loss_coefficient=0.03),
        LossConfig(goldfish_loss=True, goldfish_k=2, goldfish_h=3),
    ],
)
def test_evaluation_is_plain_cross_entropy(loss: LossConfig) -> None:
    plain = build_with(LossConfig())
    model = build_with(loss)
    inputs = Inputs(some_tokens(seed=1), some_tokens(seed=2))
    assert model.train()(None, inputs).item() != plain.train()(None, inputs).item()
    assert model.eval()(None, inputs).item() == plain.eval()(None, inputs).item()


def leave_out_by_the_paper(labels: list[int], k: int, h: int) -> list[int]:
    """Return the positions that are left out, computed with Python's integers."""
    table = torch.rand(1_000_003, generator=torch.Generator().manual_seed(2971215073)).tolist()
    positions = []
    for last in range(h - 1, len(labels)):
        product = 1
        for token in labels[last - h + 1 : last + 1]:
            product *= token
        # Wrap around as signed 64-bit integers do.
        product = (product + 2**63) % 2**64 - 2**63
        if table[product % 1_000_003] < 1 / k:
            positions.append(last)
    return positions


@pytest.mark.parametrize(("k", "h"), [(2, 1), (3, 4), (4, 13), (50, 50)])
def test_goldfish_leaves_out_the_tokens_of_the_paper(k: int, h: int) -> None:
    generator = torch.Generator().manual_seed(k)
    labels = torch.randint(1, 50_000, (2, 400), generator=generator)
    labels[1, 100:120] = 0
    kept = keep_tokens(labels, k, h)
    left_out = 0
    for sample in range(2):
        expected = leave_out_by_the_paper(labels[sample].tolist(), k, h)
        assert (kept[sample] == 0).nonzero()[:, 0].tolist() == expected
        left_out += len(expected)
    assert left_out > 0


def test_goldfish_leaves_out_the_same_tokens_after_the_same_text() -> None:
    labels = torch.randint(1, 1000, (1, 300), generator=torch.Generator().manual_seed(0))
    shifted = torch.cat((torch.full((1, 7), 9), labels), dim=1)
    assert torch.equal(keep_tokens(labels, 4, 5)[:, 4:], keep_tokens(shifted, 4, 5)[:, 11:])


def test_a_sample_that_is_shorter_than_the_context_is_kept() -> None:
    assert keep_tokens(torch.ones((2, 12), dtype=torch.long), 2, 13).all()


def test_goldfish_is_the_mean_over_the_tokens_that_are_kept() -> None:
    model = build_with(LossConfig(goldfish_loss=True, goldfish_k=3, goldfish_h=2))
    tokens = some_tokens(seed=1)
    labels = some_tokens(seed=2)
    mask = (some_tokens(seed=3) % 5 > 0).float()
    kept = keep_tokens(labels, 3, 2) * mask
    assert 0.3 < kept.mean() < 0.75
    ours = model.train()(None, Inputs(tokens, labels, mask))
    expected = model.eval()(None, Inputs(tokens, labels, kept))
    torch.testing.assert_close(ours, expected)
