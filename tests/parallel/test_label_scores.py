"""Likelihoods of labels on a divided vocabulary, and the loss if ranks have padding.

They are compared with float64.
"""

import pytest
import torch
from parallel.test_loss_precision import join
from process_pool import ProcessPool, succeed
from torch import Tensor

from megatron.model.loss import VocabSlice
from megatron.parallel.mesh import TensorParallel

SEQUENCE = 13
BATCH = 5
VOCAB = 33
ROWS_PER_RANK = 11


def make_identity(tp: TensorParallel) -> tuple[Tensor, VocabSlice]:
    """Return this rank's rows of the identity. On four ranks, the last one has padding only."""
    if tp.size == 1:
        return torch.eye(VOCAB), VocabSlice(0, VOCAB)
    first = tp.rank * ROWS_PER_RANK
    real = min(max(VOCAB - first, 0), ROWS_PER_RANK)
    weight = torch.zeros((ROWS_PER_RANK, VOCAB))
    weight[:real] = torch.eye(VOCAB)[first : first + real]
    return weight, VocabSlice(first, real)


def check_scores(chunk_rows: int) -> None:
    """Compare scores and loss with float64, `chunk_rows` rows at a time."""
    from megatron.model import loss as module

    tp = join()
    generator = torch.Generator().manual_seed(7)
    # Few values, so that many rows have several highest logits on different ranks.
    logits = torch.randint(-2, 3, (SEQUENCE, BATCH, VOCAB), generator=generator).float()
    labels = torch.randint(0, VOCAB, (SEQUENCE, BATCH), generator=generator)
    # The first sample has the first of the highest logits everywhere, the second has another one.
    labels[:, 0] = logits[:, 0].argmax(dim=-1)
    labels[:, 1] = VOCAB - 1 - logits[:, 1].flip(-1).argmax(dim=-1)
    mask = (torch.rand((SEQUENCE, BATCH), generator=generator) < 0.5).float()
    mask[:, 4] = 0.0
    weight, rows = make_identity(tp)
    limit = module._CHUNK_BYTES_CPU
    module._CHUNK_BYTES_CPU = chunk_rows * 4 * ROWS_PER_RANK
    try:
        loss = module.cross_entropy(logits, weight, labels, rows, tp, mask)
        each, greedy = module.score_labels(logits, weight, labels, mask, rows, tp)
        found = each.sum(dim=0)
    finally:
        module._CHUNK_BYTES_CPU = limit
    exact = logits.double().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    torch.testing.assert_close(found, (exact * mask).sum(dim=0), rtol=1e-6, atol=1e-6)
    hit = (logits.argmax(dim=-1) == labels) | (mask == 0)
    assert greedy.tolist() == hit.all(dim=0).tolist()
    assert greedy.tolist() == [True, False, False, False, True]
    assert found[4] == 0.0
    assert loss.item() == pytest.approx(-(found.sum() / mask.sum()).item(), rel=1e-6)


@pytest.mark.parametrize(("ranks", "chunk_rows"), [(1, 1000), (4, 1000), (4, 3)])
def test_scores_of_labels_are_exact(ranks: int, chunk_rows: int, pool: ProcessPool) -> None:
    succeed(pool.run(ranks, check_scores, chunk_rows))
