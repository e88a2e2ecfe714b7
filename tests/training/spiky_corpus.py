"""Data sets whose bad tokens are in chosen iterations, although samples are shuffled.

Clean text is a Markov chain, which a tiny model learns in some dozens of steps. Its loss then stays
near the entropy of the chain.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from data.source_requests import open_sources

from megatron.config.data import DataConfig
from megatron.data.indexed import IndexedDatasetWriter
from megatron.data.source import BatchSlice

VOCABULARY = 64
BATCH = 16
SEQUENCE = 32
SEED = 1234
CHAIN = 0.9
"""Probability of the chain's next token. Otherwise any token follows."""

Badness = Callable[[int], float]
"""A function from an iteration to the fraction of its tokens that are random."""


def random_stretch(first: int, last: int) -> Badness:
    """Return the badness of a stretch of random tokens."""
    return lambda iteration: float(first <= iteration <= last)


def worsening_stretch(first: int, last: int) -> Badness:
    """Return the badness of a stretch with more and more random tokens."""

    def find_badness(iteration: int) -> float:
        if not first <= iteration <= last:
            return 0.0
        return (iteration - first + 1) / (last - first + 1)

    return find_badness


def write_corpus(
    prefix: Path, iterations: int, badness: Badness, *, wrong_rule: bool = False
) -> str:
    """Write a data set for a run of so many iterations, and return its prefix.

    Args:
        prefix: Path of the files without their suffix.
        iterations: Iterations that the data are for.
        badness: Fraction of bad tokens of each iteration.
        wrong_rule: Whether a bad token follows from the one before it by another rule than in the
            clean text. A model then learns the wrong rule. Otherwise bad tokens are random.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    order = find_order(prefix.with_name("order"), iterations)
    generator = np.random.default_rng(7)
    text = make_clean_text(generator, iterations * BATCH * SEQUENCE + 1)
    for iteration in range(1, iterations + 1):
        for sample in order[BATCH * (iteration - 1) : BATCH * iteration]:
            # Labels reach one token further, which belongs to the next sample too.
            begin = SEQUENCE * sample + 1
            spoiled = generator.random(SEQUENCE - 1) < badness(iteration)
            noise = generator.integers(0, VOCABULARY, SEQUENCE - 1)
            part = text[begin : begin + SEQUENCE - 1]
            if wrong_rule:
                noise = (11 * text[begin - 1 : begin + SEQUENCE - 2] + 3) % VOCABULARY
            part[spoiled] = noise[spoiled]
    write_tokens(prefix, text)
    return str(prefix)


def make_clean_text(generator: np.random.Generator, length: int) -> np.ndarray:
    jumps = generator.random(length) >= CHAIN
    others = generator.integers(0, VOCABULARY, length)
    text = np.empty(length, np.int64)
    token = 0
    for at in range(length):
        token = int(others[at]) if jumps[at] else (5 * token + 7) % VOCABULARY
        text[at] = token
    return text


def find_order(prefix: Path, iterations: int) -> list[int]:
    """Return the samples in the order of training, from a data set whose tokens name them."""
    samples = iterations * BATCH
    write_tokens(prefix, np.arange(samples * SEQUENCE + 1) // SEQUENCE)
    data = DataConfig(
        data_path=(str(prefix),), split="1,0,0", data_cache_path=str(prefix.parent / "order-cache")
    )
    batch_slice = BatchSlice(BATCH)
    sources = open_sources(data, samples, seq_length=SEQUENCE, seed=SEED, batch_slice=batch_slice)
    assert sources.train is not None
    order: list[int] = []
    for _ in range(iterations):
        (batch,) = sources.train.read_batch(BATCH, SEQUENCE)
        order += batch.tokens[:, 0].tolist()
    sources.close()
    assert sorted(order) == list(range(samples))
    return order


def write_tokens(prefix: Path, tokens: np.ndarray | Sequence[int]) -> None:
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        writer.add_document(tokens)
