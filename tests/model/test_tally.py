"""The sums of an evaluation: nats, correct predictions, counted positions."""

import pytest
import torch
import torch.nn.functional as F
from process_pool import ProcessPool, succeed
from torch import Tensor

from megatron.model.loss import VocabSlice, cross_entropy
from megatron.model.tally import Tally
from megatron.parallel.mesh import TensorParallel

VOCAB = 12
HIDDEN = 4


def make_case(*, with_ties: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states [s, b, h], output matrix [v, h], labels and a mask [s, b]."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(30, 5, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    if with_ties:
        # Ids 2, 7 and 11 have the same logits. They are on different ranks.
        weight[7] = weight[2]
        weight[11] = weight[2]
    labels = torch.randint(0, VOCAB, (30, 5), generator=generator)
    mask = (torch.rand(30, 5, generator=generator) < 0.7).float()
    return hidden, weight, labels, mask


def tally_on_ranks(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None, tp: TensorParallel
) -> list[float]:
    """Return the sums, with the vocabulary padded to 16 ids and sharded over the ranks."""
    rows = 16 // tp.size
    padded = torch.cat([weight, torch.full((4, HIDDEN), 100.0)])
    first = tp.rank * rows
    mine = VocabSlice(first, min(max(VOCAB - first, 0), rows))
    tally = Tally()
    with torch.no_grad():
        # Two microbatches.
        for part in (slice(0, 20), slice(20, 30)):
            cross_entropy(
                hidden[part],
                padded[first : first + rows],
                labels[part],
                mine,
                tp,
                None if mask is None else mask[part],
                tally=tally,
            )
    return [float(tally.nats), float(tally.correct), float(tally.positions)]


def compute_expected(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None
) -> list[float]:
    logits = F.linear(hidden, weight).double()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1), reduction="none")
    counted = torch.ones(losses.shape) if mask is None else mask.reshape(-1)
    hits = (F.linear(hidden, weight).argmax(-1) == labels).reshape(-1)
    return [float((losses * counted).sum()), float((hits * counted).sum()), float(counted.sum())]


def join_and_tally(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None
) -> list[float]:
    from parallel.test_loss_precision import join

    return tally_on_ranks(hidden, weight, labels, mask, join())


@pytest.mark.parametrize("with_ties", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_sums_equal_those_of_complete_logits(
    pool: ProcessPool, with_ties: bool, masked: bool, ranks: int
) -> None:
    """With 4 ranks, the last one holds nothing but padding."""
    hidden, weight, labels, mask = make_case(with_ties=with_ties)
    given = (hidden, weight, labels, mask if masked else None)
    expected = compute_expected(*given)
    assert expected[1] > 10
    if ranks == 1:
        found = [tally_on_ranks(*given, TensorParallel())]
    else:
        outcomes = pool.run(ranks, join_and_tally, *given)
        succeed(outcomes)
        found = [outcome.value for outcome in outcomes]
    for nats, correct, positions in found:
        assert nats == pytest.approx(expected[0], rel=1e-5)
        assert [correct, positions] == expected[1:]


def test_the_loss_is_the_same_with_a_tally() -> None:
    hidden, weight, labels, mask = make_case(with_ties=False)
    rows = VocabSlice(0, VOCAB)
    with torch.no_grad():
        without = cross_entropy(hidden, weight, labels, rows, TensorParallel(), mask)
        with_tally = cross_entropy(
            hidden, weight, labels, rows, TensorParallel(), mask, tally=Tally()
        )
    assert torch.equal(without, with_tally)
