"""Tests that ranks that share the sequence of each sample equal one process.

Each world trains several cases, so that a launch is paid for once. The batches of a case have the
documents of real text. Every other batch has documents that no part of a sequence fits: one of a
single token, one that all ranks share, and a part in which no token counts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from equivalence.test_reshape import select
from process_pool import ProcessPool, succeed
from suites import by_suite

from megatron.run.start.launch import read_launch

if TYPE_CHECKING:
    from megatron.data.batches import Microbatch
    from megatron.engine.base import ExpertStatistics
    from megatron.run.run import Run

BOUND = 1e-5
STEPS = by_suite(3, 10)
"""The sizes of batches and the lengths change in the third step in the short suite."""
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
    "window, groups, documents, sinks": f"{RAMP} {NO_DROPOUT} {LLAMA} {EOD} --sliding-window 11 "
    "--full-attention-layers 1 --no-rope-layers 2 --rope-scaling llama3 "
    "--rope-original-length 32 --log-layer-stats-interval 5 --softmax-type learnable",
    "wide window, one group": f"{STEADY} {NO_DROPOUT} --position-embedding-type rotary "
    "--num-query-groups 1 --sliding-window 50",
    "ALiBi, window, documents, curriculum": f"{NO_DROPOUT} {EOD} --position-embedding-type alibi "
    "--sliding-window 17 --curriculum-schedule-type fixed_discrete --curriculum-difficulties 48 "
    f"96 --curriculum-max-steps {by_suite(2, 4)} --global-batch-size 4 --train-iters 10 "
    "--train-tokens 1000000 --lr-decay-tokens 100000",
    "dropout": f"{STEADY} {DROPOUT} {LLAMA}",
    "dropout, documents": f"{STEADY} {DROPOUT} --position-embedding-type alibi {EOD}",
}


def train_cases(cases: Sequence[str]) -> Any:
    """Train every case on this rank. Return what each step, an evaluation and the end gave."""
    from megatron.commands.parts import choose_parts
    from megatron.extras.interop.translators.translator import load_config
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.build import build_timers, divide_ranks, start_run
    from megatron.run.start.job import agree_on_job
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world()
    ranks = None
    results = []
    for case in cases:
        loaded = load_config(case.split())
        launch = read_launch(loaded, choose_parts(loaded.config))
        ranks = ranks or join_ranks(launch)
        job = agree_on_job(launch, ranks)
        timers = build_timers(world)
        mesh = divide_ranks(job.plan, ranks, world, timers)
        run = start_run(launch, job, mesh, timers, None)
        results.append(train(run, documents="--reset-attention-mask" in case))
        run.reporter.close()
        run.sources.close()
    return results


def train(run: "Run", *, documents: bool) -> Any:
    """Return the numbers of all steps, and this rank's moments after the first one."""
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
        chosen = flatten_choices(result.experts)
        steps.append((result.loss, result.grad_norm, *chosen))
        if iteration == 1:
            # Later gradients differ in the weights too.
            state = [
                (shard.kind, shard.name, shard.global_shape, shard.offset, shard.tensor.clone())
                for shard in run.engine.shards(optimizer=True)
                if shard.owner
            ]
    layers = [] if result.layers is None else dataclasses.astuple(result.layers)
    tally = Tally()
    batch = run.sources.valid["validation"].read_batch(8)
    loss = run.engine.eval_batch(batch, tally)
    counted = _sum_over_ranks(run.mesh, tally, text_bytes=len(batch))
    masked = [dataclasses.replace(each, loss_mask=torch.ones(each.tokens.shape)) for each in batch]
    scores = run.engine.score_batch(masked)
    run.engine.check_invariants(repair=False, iteration=STEPS, last_good=None)
    return steps, (loss, *counted[:3]), layers, scores[:, 0].sort().values, state


def flatten_choices(experts: "ExpertStatistics | None") -> list[float]:
    """Return the loads of the experts of a step, and the means of their routers."""
    if experts is None:
        return []
    means = (*experts.balancing_loss, *experts.z_loss, *experts.entropy)
    return [float(number) for number in (*chain(*experts.counts), *means)]


def divide_otherwise(microbatch: "Microbatch") -> "Microbatch":
    """Return a microbatch with documents that span parts, and a quarter that does not count."""
    size, length = microbatch.tokens.shape
    bounds = (0, 1, 2, length - 7, length)
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(bounds)])
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
            empty = torch.full(shape, float("nan"), dtype=tensor.dtype)
            complete = tensors.setdefault((kind, name), empty)
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
        a, b = (
            torch.cat([torch.as_tensor(x, dtype=torch.float64).flatten() for x in numbers])
            for numbers in (ours, theirs)
        )
        worst[name] = float(((a - b).abs() / b.abs().clamp(min=1e-3)).max())
    # After the first step, the first moments are multiples of the gradients.
    assert found[4].keys() == expected[4].keys()
    for (kind, name), tensor in expected[4].items():
        if kind != "weight":
            largest = float(tensor.abs().max())
            difference = float((found[4][kind, name] - tensor).abs().max()) / largest
            # `max` would ignore a nan.
            assert isfinite(difference), name
            worst[kind] = max(worst.get(kind, 0.0), difference)
    return worst


Train = Callable[..., Any]


def make_train_world(
    pool: ProcessPool,
    flags: str,
    models: Mapping[str, str],
    train: Callable[[Sequence[str]], Any] = train_cases,
) -> Train:
    """Return a function that trains models in a world, and returns the joined results.

    Those of one process are computed once.

    Args:
        pool: The processes.
        flags: Flags of all models.
        models: Name -> flags of a model.
        train: Trains command lines on a rank.
    """
    alone: dict[str, Any] = {}

    def run(ranks: int, names: Sequence[str], more: str) -> Any:
        key = f"{names} {more}"
        if ranks > 1:
            return launch(ranks, names, more)
        if key not in alone:
            alone[key] = launch(ranks, names, more)
        return alone[key]

    def launch(ranks: int, names: Sequence[str], more: str) -> Any:
        cases = [f"{flags} {models[name]} {more}" for name in names]
        outcomes = pool.run(ranks, train, cases)
        succeed(outcomes)
        return [join_state([each.value[case] for each in outcomes]) for case in range(len(cases))]

    return run


@pytest.fixture(scope="module")
def train_world(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """See `make_train_world`."""
    paths = f"--data-path {corpus} --data-cache-path {tmp_path_factory.mktemp('cache')}"
    return make_train_world(pool, f"{SIZES} {paths}", MODELS)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks that share sequences, and what else divides the model or the batch."""

    name: str
    ranks: int
    flags: str
    micro_batch_size: int = 2
    common: str = ""
    """Flags that one process gets too."""
    models: tuple[str, ...] = tuple(MODELS)
    short: bool = False
    bound: float = BOUND
    alone_micro_batch_size: int = 2
    """Micro-batch size of the one process."""


A2A = "--cp-comm-type a2a"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
DOCUMENTS = "window, groups, documents, sinks"
ALIBI = "ALiBi, window, documents, curriculum"
LAYOUTS = [
    Layout("CP 2", 2, "--context-parallel-size 2"),
    Layout("CP 2, a2a", 2, f"--context-parallel-size 2 {A2A}"),
    Layout(
        "CP 2, a2a, some models",
        2,
        f"--context-parallel-size 2 {A2A}",
        models=(DOCUMENTS, "dropout, documents"),
        short=True,
    ),
    Layout("CP 3", 3, "--context-parallel-size 3"),
    Layout(
        "CP 3, some models",
        3,
        "--context-parallel-size 3",
        models=("learned positions, goldfish", DOCUMENTS, ALIBI, "dropout"),
        short=True,
    ),
    Layout("CP 3, a2a", 3, f"--context-parallel-size 3 {A2A}"),
    Layout("CP 4", 4, "--context-parallel-size 4"),
    Layout("CP 4, a2a", 4, f"--context-parallel-size 4 {A2A}"),
    # The three layers are one stage of two and one of one. 1F1B and, with fewer samples, GPipe.
    Layout(
        "CP 2, TP 2, uneven PP 2",
        8,
        f"--context-parallel-size 2 {TP2} {PP2}",
        micro_batch_size=1,
        models=(DOCUMENTS,),
        short=True,
    ),
    Layout(
        "CP 2, TP 2, uneven PP 2, all models",
        8,
        f"--context-parallel-size 2 {TP2} {PP2}",
        micro_batch_size=1,
    ),
    Layout(
        "CP 2, TP 2, uneven PP 2, two samples, a2a",
        8,
        f"--context-parallel-size 2 {TP2} {PP2} {A2A}",
    ),
    Layout(
        "CP 2, TP 4 without sequence parallelism",
        8,
        "--context-parallel-size 2 --tensor-model-parallel-size 4",
        models=(DOCUMENTS, ALIBI),
    ),
    Layout(
        "CP 4, HSDP 2",
        8,
        "--context-parallel-size 4 --sharding-strategy hsdp --hsdp-shard-size 2",
        micro_batch_size=1,
    ),
    Layout(
        "CP 2, interleaved, recomputation, ZeRO 3",
        8,
        f"--context-parallel-size 2 {PP2} --num-layers-per-virtual-pipeline-stage 1 "
        "--checkpoint-activations --zero-stage 3",
        micro_batch_size=1,
        common="--num-layers 4",
    ),
    # Batches of 5 and 7 microbatches.
    Layout(
        "CP 2, looped BFS",
        4,
        f"--context-parallel-size 2 {PP2} --num-layers-per-virtual-pipeline-stage 1",
        micro_batch_size=1,
        common="--num-layers 4 --rampup-batch-size 1 2 12 --global-batch-size 7",
        models=(DOCUMENTS,),
        alone_micro_batch_size=1,
    ),
    Layout(
        "CP 2, ZeRO 2, core recomputed, AdEMAMix",
        4,
        "--context-parallel-size 2 --zero-stage 2 --recompute-attention-core",
        micro_batch_size=1,
        common="--optimizer ademamix --ademamix-beta3 0.99 --ademamix-alpha 4 "
        "--ademamix-beta3-warmup 8 --ademamix-alpha-warmup 6",
        models=(DOCUMENTS, ALIBI),
    ),
    Layout(
        "CP 2, no sharding, half recomputed",
        4,
        "--context-parallel-size 2 --zero-stage 0 --checkpoint-activations "
        f"--checkpoint-fraction 1/2 {A2A}",
        micro_batch_size=1,
        models=(DOCUMENTS, ALIBI),
    ),
    Layout(
        "CP 2, TP 2, Muon",
        4,
        f"--context-parallel-size 2 {TP2}",
        common="--optimizer muon --muon-scale-mode unit_rms_norm --muon-fp32-matmul-prec high",
        models=(DOCUMENTS,),
    ),
    Layout(
        "CP 3, fp16",
        3,
        "--context-parallel-size 3",
        common="--fp16 --initial-loss-scale 4096",
        models=(DOCUMENTS, ALIBI),
        bound=0.02,
    ),
    Layout(
        "CP 2, compiled",
        2,
        "--context-parallel-size 2 --use-torch-compile",
        models=("wide window, one group", DOCUMENTS),
    ),
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=each.name, marks=() if each.short else pytest.mark.full)
        for each in LAYOUTS
    ],
)
def test_shared_sequences_equal_one_process(layout: Layout, train_world: Train) -> None:
    flags = f"{layout.common} --micro-batch-size {layout.alone_micro_batch_size}"
    alone = train_world(1, layout.models, flags)
    flags = f"{layout.common} --micro-batch-size {layout.micro_batch_size} {layout.flags}"
    together = train_world(layout.ranks, layout.models, flags)
    for model, found, expected in zip(layout.models, together, alone, strict=True):
        for name, difference in find_worst(found, expected).items():
            assert difference < layout.bound, f"{model}: {name}"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["allgather", "a2a"])
def test_masks_do_not_depend_on_the_ranks_of_a_sequence(kind: str, train_world: Train) -> None:
    """Sequence-parallel ranks draw for slices of the sequence, which context ranks cut across."""
    models = ("dropout", "dropout, documents")
    flags = f"{TP2} --micro-batch-size 2"
    alone = train_world(2, models, flags)
    flags = f"{flags} --context-parallel-size 3 --cp-comm-type {kind}"
    for model, found, expected in zip(models, train_world(6, models, flags), alone, strict=True):
        for name, difference in find_worst(found, expected).items():
            assert difference < BOUND, f"{model}: {name}"
