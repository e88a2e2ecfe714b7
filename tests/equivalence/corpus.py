"""Command lines of the tiny GPT that the equivalence tests train on real text."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from suites import by_suite

from megatron.config.optimizer import OPTIMIZERS as TABLE
from megatron.observe.metrics import read_metrics

# Heads and groups are divisible by 4. 5000 ids are padded to 5088, 5184 and 5376 rows for
# tensor-parallel sizes 1, 2 and 4. Six layers give uneven stages on four ranks, and three virtual
# stages on each of two ranks.
_SIZES = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--make-vocab-size-divisible-by 96"
)
_RATE = "--lr 1e-3 --lr-decay-style cosine"
_RUN = "--log-interval 1 --eval-interval 1000 --eval-iters 0 --seed 1234"
SHAPES = {
    "gpt2": "",
    "llama": "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--ffn-hidden-size 160 --num-query-groups 4 --no-add-bias-linear",
    "bloom": "--position-embedding-type alibi --embed-layernorm --init-method-std small",
}
UNTIED = "--untie-embeddings-and-output-weights"
VARIATIONS = {
    # Batch sizes 4 4 4 4 8 8 12 12 16 16.
    "ramp": "--rampup-batch-size 4 4 48 --global-batch-size 16 --train-samples 88 "
    "--lr-decay-samples 176 --lr-warmup-samples 8",
    # Four iterations of 32 tokens, six of 64.
    "curriculum": "--curriculum-schedule-type fixed_discrete --curriculum-difficulties 32 64 "
    "--curriculum-max-steps 4 --global-batch-size 8 --train-iters 10 --train-tokens 1000000 "
    "--lr-decay-tokens 10000 --lr-warmup-iters 2",
}
"""Flags that change the batch size or the sequence length within the 10 iterations."""
SHORT_VARIATIONS = {
    # Batch sizes 4 4 8 8.
    "short ramp": "--rampup-batch-size 4 4 8 --global-batch-size 8 --train-samples 24 "
    "--lr-decay-samples 48 --lr-warmup-samples 4",
    # Two iterations of 32 tokens, two of 64.
    "short curriculum": "--curriculum-schedule-type fixed_discrete --curriculum-difficulties 32 64 "
    "--curriculum-max-steps 2 --global-batch-size 8 --train-iters 4 --train-tokens 1000000 "
    "--lr-decay-tokens 3000 --lr-warmup-iters 1",
}
"""The same changes within 4 iterations."""
SIZES = {"ramp": (4, 8), "curriculum": (8,)}
"""The batch sizes of each variation in the first six iterations. All sizes are multiples of 4.

A short variation has them too.
"""
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
EVALUATED = "--eval-interval 4 --eval-iters 2 --split 80,20,0"
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
DOCUMENTS = (
    "--eod-mask-loss --reset-position-ids --reset-attention-mask "
    f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt"
)
GOLDFISH = "--goldfish-loss --goldfish-k 3 --goldfish-h 2"
_OPTIMIZER_FLAGS = {
    "ademamix": "--ademamix-beta3 0.99 --ademamix-alpha 4 --ademamix-beta3-warmup 8 "
    "--ademamix-alpha-warmup 6",
    # With this mode, the scale differs between queries and keys.
    "muon": "--muon-scale-mode unit_rms_norm --muon-fp32-matmul-prec high",
}
"""Optimizer -> its own flags, if the defaults would not show all of it in 10 iterations."""
OPTIMIZERS = {
    name: f"--optimizer {name} {_OPTIMIZER_FLAGS.get(name, '')}".rstrip()
    for name, _ in TABLE.list_rows()
    if name != "adam"
}
"""The flags of each optimizer other than Adam."""
Single = Callable[..., Path]
"""A function from (shape, tied, variation) to the folder of one process's run.

It also accepts more flags, and the prefix of other data.
"""


def of_suite(variation: str) -> str:
    """Return a variation, or its short form in the short suite."""
    return by_suite(f"short {variation}", variation)


def count_iterations(variation: str) -> int:
    """Return how many iterations a variation has. Runs are interrupted after half of them."""
    return 4 if variation in SHORT_VARIATIONS else 10


def command(folder: Path, data: str, shape: str, variation: str, *flags: str) -> list[str]:
    """Return the command line of a run of `count_iterations(variation)` iterations.

    Args:
        folder: The folder of metrics and checkpoints.
        data: The prefix of the data.
        shape: A key of `SHAPES`.
        variation: A key of `VARIATIONS` or `SHORT_VARIATIONS`.
        flags: More flags, separated by spaces.
    """
    varied = (VARIATIONS | SHORT_VARIATIONS)[variation]
    text = " ".join((_SIZES, _RATE, _RUN, SHAPES[shape], varied, *flags))
    paths = ["--data-path", data, "--save", str(folder), "--load", str(folder)]
    return [
        *text.split(),
        *paths,
        "--vocab-size",
        "5000",
        "--data-cache-path",
        str(folder / "cache"),
    ]


def load_from(argv: list[str], folder: Path, iteration: int) -> list[str]:
    """Return a command line that continues another run from one of its checkpoints."""
    at = argv.index("--load") + 1
    return [*argv[:at], str(folder), *argv[at + 1 :], "--load-iteration", str(iteration)]


def write_sentences(corpus: str, folder: Path) -> str:
    """Write a copy of the data in which full stops end documents, and return its prefix.

    A sentence has 39 tokens in the mean, so most samples have several documents.
    """
    ids = json.loads((FIXTURES / "gpt2-tiny-vocab.json").read_text())
    tokens = np.fromfile(f"{corpus}.bin", np.uint16)
    tokens[tokens == ids["."]] = ids["<|endoftext|>"]
    tokens.tofile(folder / "sentences.bin")
    shutil.copy(f"{corpus}.idx", folder / "sentences.idx")
    return str(folder / "sentences")


def curve(folder: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each iteration."""
    return [
        (entry["lm_loss"], entry["grad_norm"])
        for entry in read_metrics(folder / "metrics.jsonl")
        if "lm_loss" in entry
    ]


def validation(folder: Path) -> list[tuple[float]]:
    """Return the loss of each evaluation."""
    entries = read_metrics(folder / "metrics.jsonl")
    return [(entry["validation"]["validation"],) for entry in entries if "validation" in entry]


def worst(a: Sequence[tuple[float, ...]], b: Sequence[tuple[float, ...]]) -> float:
    """Return the largest relative difference between two curves of the same length."""
    assert len(a) == len(b) > 0, f"curves of {len(a)} and {len(b)} iterations"
    return max(
        abs(x - y) / abs(y)
        for left, right in zip(a, b, strict=True)
        for x, y in zip(left, right, strict=True)
    )
