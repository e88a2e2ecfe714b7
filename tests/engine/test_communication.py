"""Tests that a step sends what the formulas of docs/sharding.md count."""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from process_pool import ProcessPool, pretrain, succeed

from megatron.extras.planner.cost.communication import (
    Collectives,
    CommunicationTime,
    Network,
    StepTraffic,
    count_traffic,
    estimate_time,
)
from megatron.observe.metrics import read_metrics
from megatron.run.start.launch import read_launch

# Heads of 6 and 5,000 ids give rows that 4 ranks cannot divide.
SIZES = (
    "--num-layers 3 --hidden-size 30 --num-attention-heads 5 --seq-length 32 "
    "--micro-batch-size 1 --train-iters 2 --eval-iters 0 --check-invariants-interval 0 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 2e-3 --lr-decay-style constant "
    "--vocab-size 5000"
)
UNTIED = "--untie-embeddings-and-output-weights"
MICROBATCHES = 3
Recorded = dict[str, tuple[int, int]]
"""Name of a collective -> how often it was called, and the bytes of its complete tensors."""
COMPLETE = {"all_reduce": "tensor", "broadcast": "tensor", "all_to_all_single": "input"}
"""Name of a collective -> the argument that is the complete tensor."""


Shapes = list[tuple[int, ...]]


def count_padded(shapes: Sequence[tuple[int, ...]], ranks: int) -> int:
    """Return the elements of parameters after FSDP2 has padded their rows for `ranks` ranks."""
    total = 0
    for rows, *others in shapes:
        elements = -(-rows // ranks) * ranks
        for size in others:
            elements *= size
        total += elements
    return total


def record_step(argv: list[str]) -> tuple[Recorded, dict[str, Shapes]]:
    """Train two steps. Return what the second one sent, and the shapes of each group."""
    import torch.distributed as dist

    import megatron.run.pretrain as pretrain_module
    from megatron.commands.parts import choose_parts
    from megatron.engine.native import NativeEngine
    from megatron.extras.interop.translators.translator import load_config

    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    shapes: dict[str, Shapes] = {}
    names = (
        *("all_gather_single", "reduce_scatter_single", "all_reduce", "all_gather", "broadcast"),
        *("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "send", "recv"),
    )
    # Before version 2.13 torch did not have all of them.
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def watch(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            given = inspect.signature(originals[name]).bind(*arguments, **keywords)
            tensor = given.arguments[COMPLETE[name]]
            counts[name] += 1
            sizes[name] += tensor.numel() * tensor.element_size()
            return originals[name](*arguments, **keywords)

        return call

    train_batch = NativeEngine.train_batch

    def train(self: NativeEngine, microbatches: Any, *, iteration: int, **options: Any) -> Any:
        if iteration == 1:
            return train_batch(self, microbatches, iteration=iteration, **options)
        untied = UNTIED in argv
        for name, parameter in self.stages[0].named_parameters():
            part, number = name.split(".")[:2]
            group = "root"
            if part == "blocks":
                group = number
            elif untied and part == "head":
                group = part
            shapes.setdefault(group, []).append(tuple(parameter.shape))
        with ExitStack() as stack:
            for watched in originals:
                stack.enter_context(mock.patch.object(dist, watched, watch(watched)))
            return train_batch(self, microbatches, iteration=iteration, **options)

    with mock.patch.object(NativeEngine, "train_batch", train):
        loaded = load_config(argv)
        pretrain_module.pretrain(read_launch(loaded, choose_parts(loaded.config)))
    return {name: (counts[name], sizes[name]) for name in counts}, shapes


@pytest.mark.parametrize(
    ("ranks", "flags", "stage", "shard_size", "weight", "gradient"),
    [
        (4, "--sharding-strategy fsdp", 3, 4, 4, 4),
        (4, "--sharding-strategy hsdp --hsdp-shard-size 2", 3, 2, 4, 4),
        (4, "--sharding-strategy hsdp --hsdp-shard-size 2 --bf16 " + UNTIED, 3, 2, 2, 4),
        (4, "--hsdp-shard-size 2 --zero-stage 2 --bf16 --grad-reduce-in-bf16", 2, 2, 2, 2),
        (2, "--zero-stage 1 " + UNTIED, 1, 2, 4, 4),
        (2, "--sharding-strategy ddp", 0, 1, 4, 4),
    ],
)
def test_a_step_sends_what_the_formula_counts(
    ranks: int,
    flags: str,
    stage: int,
    shard_size: int,
    weight: int,
    gradient: int,
    pool: ProcessPool,
    corpus: str,
    tmp_path: Path,
) -> None:
    copies = ranks // shard_size
    argv = [
        *SIZES.split(),
        *flags.split(),
        *("--global-batch-size", str(MICROBATCHES * ranks)),
        *("--data-path", corpus, "--data-cache-path", str(tmp_path)),
    ]
    outcomes = pool.run(ranks, record_step, argv)
    succeed(outcomes)
    for outcome in outcomes:
        recorded, groups = outcome.value
        padded = {name: count_padded(shapes, shard_size) for name, shapes in groups.items()}
        traffic = count_traffic(
            [size for name, size in padded.items() if name.isdigit()],
            [size for name, size in padded.items() if not name.isdigit()],
            shard_size=shard_size,
            copies=copies,
            zero_stage=stage,
            microbatches=MICROBATCHES,
            weight_bytes=weight,
            gradient_bytes=gradient,
        )
        # One more all-reduce of six fp64 numbers: loss, gradient norm, zeros, and three votes.
        expected = {
            # On CPUs, an all-gather is a broadcast of each part (`engine/sharding.py`).
            "broadcast": Collectives(
                traffic.all_gather.count * shard_size, traffic.all_gather.bytes
            ),
            "all_to_all_single": traffic.reduce_scatter,
            "all_reduce": Collectives(traffic.all_reduce.count + 1, traffic.all_reduce.bytes + 48),
        }
        found = {name: Collectives(*values) for name, values in recorded.items()}
        assert found == {name: sent for name, sent in expected.items() if sent.count}


def test_gradients_that_are_sent_in_bf16_are_close(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """The gradient norms change by the rounding of bf16, about 0.4 %, and not at all without it."""
    norms = {}
    for name, flags in (
        ("fp32", "--zero-stage 2"),
        ("bf16", "--zero-stage 2 --grad-reduce-in-bf16"),
        ("hsdp, bf16", "--hsdp-shard-size 2 --grad-reduce-in-bf16"),
    ):
        argv = [
            *SIZES.split(),
            *flags.split(),
            *("--bf16", "--global-batch-size", "32", "--log-interval", "1"),
            *("--data-path", corpus, "--data-cache-path", str(tmp_path)),
            *("--metrics-file", str(tmp_path / f"{name}.jsonl")),
        ]
        succeed(pool.run(4, pretrain, argv))
        norms[name] = [
            entry["grad_norm"]
            for entry in read_metrics(tmp_path / f"{name}.jsonl")
            if "grad_norm" in entry
        ]
    assert len(norms["fp32"]) == 2
    for name in ("bf16", "hsdp, bf16"):
        assert norms[name] != norms["fp32"]
        assert norms[name] == pytest.approx(norms["fp32"], rel=4e-3)


def test_padding_of_rows() -> None:
    assert count_padded([(5, 3), (4,)], 4) == 8 * 3 + 4
    assert count_padded([(5, 3), (4,)], 1) == 19


NETWORK = Network(ranks_per_node=8, node_bandwidth=100.0, network_bandwidth=10.0, hop_seconds=0.001)
TRAFFIC = StepTraffic(Collectives(2, 400), Collectives(1, 800), Collectives(1, 200))


@pytest.mark.parametrize(
    ("shard_size", "copies", "inner", "expected"),
    [
        # Everything inside a node: 3 hops of 3 collectives, 1,200 bytes.
        (4, 1, 1, CommunicationTime(3 * 0.003 + 1200 * 3 / 4 / 100, 0.0)),
        # The ring of 16 ranks uses the 8 links of a node, 80 bytes per second.
        (16, 1, 1, CommunicationTime(0.0, 3 * 0.015 + 1200 * 15 / 16 / 80)),
        # The all-reduce between two nodes uses one link.
        (8, 2, 1, CommunicationTime(3 * 0.007 + 1050 / 100, 2 * (0.001 + 100 / 10))),
        # Two copies on a node.
        (4, 2, 1, CommunicationTime(3 * 0.003 + 900 / 100 + 2 * (0.001 + 100 / 100), 0.0)),
        # Tensor-parallel ranks fill half of the node.
        (8, 1, 2, CommunicationTime(0.0, 3 * 0.007 + 1050 / 40)),
    ],
)
def test_time_of_rings(
    shard_size: int, copies: int, inner: int, expected: CommunicationTime
) -> None:
    traffic = TRAFFIC
    if copies == 1:
        traffic = StepTraffic(TRAFFIC.all_gather, TRAFFIC.reduce_scatter, Collectives())
    found = estimate_time(traffic, NETWORK, shard_size=shard_size, copies=copies, inner_ranks=inner)
    assert found.inside_nodes == pytest.approx(expected.inside_nodes)
    assert found.between_nodes == pytest.approx(expected.between_nodes)
    assert found.total == max(found.inside_nodes, found.between_nodes)
