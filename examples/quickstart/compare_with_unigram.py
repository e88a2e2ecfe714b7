"""Has the model learned more than how often each token occurs?

Prints the unigram entropy of the validation tokens, -sum p ln p over their own frequencies: no model that ignores context has a
lower loss on them, however trained. Beside it the run's last validation loss, which must be lower by a margin, or the
exit code is 1.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from megatron.data.indexed import IndexedDataset
from megatron.data.splits import compute_split_bounds
from megatron.errors import MegatronError, TrainingError
from megatron.observe.metrics import read_metrics


@dataclass(frozen=True)
class CompareWithUnigram:
    """Compare a run's last validation loss with the unigram entropy of its validation tokens."""

    dataset: Path
    """Indexed data set's path without .bin/.idx."""
    split: str
    """The run's --split."""
    metrics: Path
    """metrics.jsonl of the run."""
    margin: float = 1.0
    """Nats by which the loss must be below the entropy."""


def unigram_entropy(dataset: IndexedDataset, split: str) -> float:
    """Entropy in nats of the distribution of the validation documents' tokens."""
    bounds = compute_split_bounds(split, dataset.num_documents)
    first, last = (int(dataset.document_offsets[bound]) for bound in (bounds[1], bounds[2]))
    tokens = np.concatenate([dataset.get(index) for index in range(first, last)])
    _, counts = np.unique(tokens, return_counts=True)
    p = counts / len(tokens)
    return float(-(p * np.log(p)).sum())


def last_validation_loss(metrics: Path) -> float:
    """Raises TrainingError where the run made no evaluation of the set that --split gives, `validation`."""
    sets = [record.get("validation", {}) for record in read_metrics(metrics)]
    losses = [losses["validation"] for losses in sets if "validation" in losses]
    if not losses:
        raise TrainingError(f"{metrics} has no validation loss; train with --eval-iters above 0")
    return float(losses[-1])


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(CompareWithUnigram, args=argv)
    try:
        entropy = unigram_entropy(IndexedDataset(options.dataset), options.split)
        loss = last_validation_loss(options.metrics)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"unigram entropy of the validation tokens: {entropy:.4f} nats")
    print(f"validation loss of the model:             {loss:.4f} nats")
    if loss < entropy - options.margin:
        return 0
    print(f"error: the loss should be lower by {options.margin} at least", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
