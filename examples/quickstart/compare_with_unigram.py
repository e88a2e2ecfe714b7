"""Check that a model has learned more than how often each token occurs.

The script prints the unigram entropy of the validation tokens, -sum p ln p over their own
frequencies. No model that ignores context has a lower loss on them. The run's last validation loss
is printed next to it. It must be lower by a margin, or the exit code is 1.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from megatron.base.errors import MegatronError, TrainingError
from megatron.data.indexed import IndexedDataset
from megatron.data.splits import compute_split_bounds
from megatron.observe.metrics import read_metrics


@dataclass(frozen=True)
class CompareWithUnigram:
    """Compare a run's last validation loss with the unigram entropy of its validation tokens."""

    dataset: Path
    """Path of the indexed data set without .bin/.idx."""
    split: str
    """The run's --split."""
    metrics: Path
    """metrics.jsonl of the run."""
    margin: float = 1.0
    """The loss must be lower than the entropy by this number of nats."""


def compute_unigram_entropy(dataset: IndexedDataset, split: str) -> float:
    """Return the entropy of the validation documents' token distribution, in nats."""
    bounds = compute_split_bounds(split, dataset.num_documents)
    # Bounds count documents. The offsets translate them into indices of the stored sequences.
    first, last = (int(dataset.document_offsets[bound]) for bound in (bounds[1], bounds[2]))
    tokens = np.concatenate([dataset.get(index) for index in range(first, last)])
    _, counts = np.unique(tokens, return_counts=True)
    p = counts / len(tokens)
    return float(-(p * np.log(p)).sum())


def read_last_validation_loss(metrics: Path) -> float:
    """Return the last loss of the validation set that --split gives.

    Raises:
        TrainingError: The run has not evaluated this set.
    """
    sets = [record.get("validation", {}) for record in read_metrics(metrics)]
    losses = [losses["validation"] for losses in sets if "validation" in losses]
    if not losses:
        raise TrainingError(f"{metrics} has no validation loss; train with --eval-iters above 0")
    return float(losses[-1])


def main(argv: list[str] | None = None) -> int:
    """Print both numbers and return the exit code."""
    options = tyro.cli(CompareWithUnigram, args=argv)
    try:
        entropy = compute_unigram_entropy(IndexedDataset(options.dataset), options.split)
        loss = read_last_validation_loss(options.metrics)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"unigram entropy of the validation tokens: {entropy:.4f} nats")
    print(f"validation loss of the model:             {loss:.4f} nats")
    if loss < entropy - options.margin:
        return 0
    print(f"error: the loss must be lower by at least {options.margin}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
