"""Tests that ranks that share the sequence of each sample equal one process.

Each world trains several cases, so that a launch is paid for once. The batches of a case have the
documents of real text. Every other batch has documents that no part of a sequence fits: one of a
single token, one that all ranks share, and a part in which no token counts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from equivalence.test_reshape import select
from process_pool import ProcessPool, succeed

if TYPE_CHECKING:
    from megatron.data.batches import Microbatch
    from megatron.run.run import Run

BOUND = 1e-5
STEPS = 10
LENGTH = 96
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
SIZES = (
    f"--num-layers 3 --hidden-size 48 --num-attention-heads 12 --seq-length {LENGTH} "
    f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt "
    "--make-vocab-size-divisible-by 7 --lr 1e-3 --lr-decay-style constant --eval-iters 1 "
    "--split 80,20,0 --no-add-bias-linear --untie-embeddings-and-output-weights"
)
RAMP = "--rampup-batch-size 2 2 12 --global-batch-size 8 --train-samples 56"
STEADY = "--global-batch-size 4 --train-iters 10"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.1"
EOD = "--eod-mask-loss --reset-position-ids --reset-attention-mask"
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--ffn-hidden-size 64 --num-query-groups 4 --qk-norm head"
)
MODELS = {
    "learned positions, goldfish": f"{STEADY} {NO_DROPOUT} --goldfish-loss --goldfish-k 3 "
    "--goldfish-h 5 --z-loss-coefficient 0.01",
    # The window is smaller than a part with up to four ranks.
    "window, groups, documents": f"{RAMP} {NO_DROPOUT} {LLAMA} {EOD} --sliding-window 11 "
    "--full-attention-layers 1 --no-rope-layers 2 --rope-scaling llama3 "
    "--rope-original-length 32 --log-layer-stats-interval 5",
    "wide window, one group": f"{STEADY} {NO_DROPOUT} --position-embedding-type rotary "
    "--num-query-groups 1 --sliding-window 50",
    "ALiBi, window, documents, curriculum": f"{NO_DROPOUT} {EOD} --position-embedding-type alibi "
    "--sliding-window 17 --curriculum-schedule-type fixed_discrete --curriculum-difficulties 48 "
    "96 --curriculum-max-steps 4 --global-batch-size 4 --train-iters 10 --train-tokens 1000000 "
    "--lr-decay-tokens 100000",
    "dropout": f"{STEADY} {DROPOUT} {LLAMA}",
    "dropout, documents": f"{STEADY} {DROPOUT} --position-embedding-type alibi {EOD}",
}


def train_cases(cases: Sequence[str]) -> Any:
    """Train every case on this rank. Return what each step, an evaluation and the end gave."""
    from megatron.commands.parts import choose_parts
    from megatron.extras.translators.translator import load_config
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.job import agree_on_job
    from megatron.run.start.join import join_ranks
    from megatron.run.start.setup import build_timers, divide_ranks, start_run

    world = read_launcher_world()
    ranks = None
    results = []
    for case in cases:
        loaded = load_config(case.split())
        ranks = ranks or join_ranks(loaded, world)
        job = agree_on_job(loaded, ranks, print, choose_parts(loaded.config))
        timers = build_timers(world)
        mesh = divide_ranks(job.plan, ranks, world, timers)
        run = start_run(loaded, job, mesh, timers, None)
        results.append(train(run, documents="--reset-attention-mask" in case))
        run.reporter.close()
        run.sources.close()
    return results


def train(run: "Run", *, documents: bool) -> Any:
    """Return the numbers of all steps, and this rank's part of weights and moments."""
    from megatron.model.tally import Tally
    from megatron.run.evaluate import _sum_over_ranks

    assert run.sources.train is not None
    plan = run.plan
    steps = []
    samples = tokens = 0
    for iteration in range(1, STEPS + 1):
        length = plan.get_seq_length(iteration)
        size = plan.batch_size.get_size(samples, tokens)
        batch = run.sources.train.read_batch(size, length)
        if documents and iteration % 2:
            batch = [divide_otherwise(each) for each in batch]
        samples += size
        tokens += size * length
        statistics = iteration == STEPS and plan.config.logging.log_layer_stats_interval
        result = run.engine.train_batch(
            batch, iteration=iteration, lr=1e-3, with_layer_statistics=bool(statistics)
        )
        steps.append((result.loss, result.grad_norm))
    layers = [] if result.layers is None else dataclasses.astuple(result.layers)
    tally = Tally()
    batch = run.sources.valid["validation"].read_batch(8)
    loss = run.engine.eval_batch(batch, tally)
    counted = _sum_over_ranks(run.mesh, tally, text_bytes=len(batch))
    masked = [
        dataclasses.replace(each, loss_mask=torch.ones(each.tokens.shape)) for each in batch
    ]
    scores = run.engine.score_batch(masked)
    state = [
        (shard.kind, shard.name, shard.global_shape, shard.offset, shard.tensor.clone())
        for shard in run.engine.shards(optimizer=True)
        if shard.owner
    ]
    run.engine.check_invariants(repair=False, iteration=STEPS, last_good=None)
    return steps, (loss, *counted[:3]), layers, scores[:, 0].sort().values, state


def divide_otherwise(microbatch: "Microbatch") -> "Microbatch":
    """Return a microbatch with documents that span parts, and a quarter that does not count."""
    size, length = microbatch.tokens.shape
    bounds = (0, 1, 2, length - 7, length)
    positions = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:], strict=False)])
    mask = torch.ones(size, length)
    mask[:, length // 4 : length // 2] = 0
    return dataclasses.replace(
        microbatch,
        documents=(bounds,) * size,
        position_ids=positions.expand(size, length).contiguous(),
        loss_mask=mask,
    )


def join_state(of_ranks: Sequence[Any]) -> Any:
    """Return the results of the ranks, with the moments of the complete model by kind and name."""
    steps, evaluated, layers, scores, _ = of_ranks[0]
    for others in of_ranks[1:]:
        assert others[0] == steps, "ranks disagree"
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for *_, state in of_ranks:
        for kind, name, shape, offset, tensor in state:
            complete = tensors.setdefault((kind, name), torch.full(shape, float("nan")))
            complete[select(offset, tensor.shape)] = tensor
    return steps, evaluated, layers, scores, tensors


def find_worst(found: Any, expected: Any) -> dict[str, float]:
    """Return the largest relative difference of each kind of number."""
    worst = {}
    for name, ours, theirs in zip(
        ("steps", "evaluation", "layers", "scores"), found, expected, strict=False
    ):
        if len(theirs) == 0:
            continue
        a, b = (torch.cat([torch.as_tensor(x).double().flatten() for x in y]) for y in (ours, theirs))
        worst[name] = float(((a - b).abs() / b.abs().clamp(min=1e-3)).max())
    # Each gradient has left its mark in the moments.
    assert found[4].keys() == expected[4].keys()
    for (kind, name), tensor in expected[4].items():
        if kind != "weight":
            largest = float(tensor.abs().max())
            difference = float((found[4][kind, name] - tensor).abs().max()) / largest
            worst[kind] = max(worst.get(kind, 0.0), difference)
    return worst


Train = Callable[..., Any]


@pytest.fixture(scope="module")
def train_world(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains models in a world, and returns the joined results."""
    cache = tmp_path_factory.mktemp("cache")

    def run(ranks: int, models: Sequence[str], flags: str) -> Any:
        paths = f"--data-path {corpus} --data-cache-path {cache}"
        cases = [f"{SIZES} {paths} {MODELS.get(model, model)} {flags}" for model in models]
        outcomes = pool.run(ranks, train_cases, cases)
        succeed(outcomes)
        return [join_state([each.value[case] for each in outcomes]) for case in range(len(cases))]

    return run


def test_try(train_world: Train) -> None:
    import time
    import os
    names = list(MODELS)
    t0=time.time()
    alone = train_world(1, names, "--micro-batch-size 2")
    print("one", time.time()-t0)
    for ranks, flags in eval(os.environ["TRY"]):
        t0=time.time()
        found = train_world(ranks, names, f"--micro-batch-size 2 {flags}")
        print(ranks, flags, time.time()-t0)
        for name, a, b in zip(names, found, alone):
            print("   ", name, {k: f"{v:.1e}" for k, v in find_worst(a, b).items()}, a[0][-1], b[0][-1])
