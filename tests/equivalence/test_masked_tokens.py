"""Tests that masked tokens give the same numbers for every micro-batch size and layout.

Each world trains all cases, so that a launch is paid for once. The batches of a case have the
documents of real text, then masks for which the counts of microbatches and ranks differ most.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from process_pool import ProcessPool, pretrain, succeed

from megatron.observe.metrics import read_metrics
from megatron.run.start.launch import read_launch

if TYPE_CHECKING:
    from megatron.data.batches import Microbatch
    from megatron.run.run import Run

BOUND = 1e-5
BATCH = 8
LENGTH = 64
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
SIZES = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} "
    f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt "
    f"--global-batch-size {BATCH} --train-iters 10 --lr 1e-3 --lr-decay-style constant "
    "--hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --split 80,20,0"
)
EOD = "--eod-mask-loss --reset-position-ids --reset-attention-mask"
GOLDFISH = "--goldfish-loss --goldfish-k 3 --goldfish-h 2"
CASES = {
    "eod": EOD,
    "goldfish": GOLDFISH,
    "eod, goldfish and z-loss": f"{EOD} {GOLDFISH} --z-loss-coefficient 0.01",
}
STEPS: tuple[tuple[int, ...] | None, ...] = (
    None,
    # The other ranks and microbatches count nothing.
    (0,),
    # The last data-parallel rank counts everything.
    (6, 7),
    # A microbatch of one or two samples counts nothing.
    (0, 1, 4, 5, 6, 7),
    # Nothing counts.
    (),
    None,
)
"""The samples of each batch that count, or None for all."""
EMPTY = STEPS.index(())


def train_cases(flags: Sequence[str], micro_batch_size: int, cases: Sequence[str]) -> Any:
    """Train every case on this rank. Return for each case the steps and the validation loss."""
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
        loaded = load_config([*flags, *case.split(), "--micro-batch-size", str(micro_batch_size)])
        launch = read_launch(loaded, choose_parts(loaded.config))
        ranks = ranks or join_ranks(launch)
        job = agree_on_job(launch, ranks)
        timers = build_timers(world)
        mesh = divide_ranks(job.plan, ranks, world, timers)
        run = start_run(launch, job, mesh, timers, None)
        steps = [train_step(run, number, counted) for number, counted in enumerate(STEPS, 1)]
        validation = 0.0
        if "--eod-mask-loss" in case:
            validation = run.engine.eval_batch(run.sources.valid["validation"].read_batch(BATCH))
        results.append((steps, validation))
        run.reporter.close()
        run.sources.close()
    return results


def train_step(run: "Run", iteration: int, counted: tuple[int, ...] | None) -> Any:
    """Train a step in which these samples of the batch count.

    Returns:
        (loss, gradient norm, what happened to the step, whether the state of this rank changed).
    """
    assert run.sources.train is not None
    batch = run.sources.train.read_batch(BATCH, LENGTH)
    if counted is not None:
        batch = [
            mask_samples(each, (number * run.mesh.grid.data + run.mesh.coordinate.data), counted)
            for number, each in enumerate(batch)
        ]
    before = read_state(run)
    result = run.engine.train_batch(batch, iteration=iteration, lr=1e-3)
    after = read_state(run)
    kept = before[1] == after[1] and all(map(torch.equal, before[0], after[0]))
    outcome = result.outcome.name
    return result.loss, result.grad_norm, outcome, not kept


def mask_samples(microbatch: "Microbatch", number: int, counted: tuple[int, ...]) -> "Microbatch":
    """Return a microbatch, given its number in the global batch, in which only some samples count.

    See `compute_sample_positions` for the order of the samples.
    """
    size, _ = microbatch.tokens.shape
    keep = [float(number * size + sample in counted) for sample in range(size)]
    mask = torch.tensor(keep)[:, None].expand(microbatch.tokens.shape)
    if microbatch.loss_mask is not None:
        mask = mask * microbatch.loss_mask
    return dataclasses.replace(microbatch, loss_mask=mask)


def read_state(run: "Run") -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return copies of the weights and moments of this rank, and the optimizer's other state."""
    shards = run.engine.shards(optimizer=True)
    return [shard.tensor.detach().clone() for shard in shards], run.engine.get_scalars()


Train = Callable[..., Any]


@pytest.fixture(scope="module")
def train(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains all cases in a world, and returns the results of each rank."""
    cache = tmp_path_factory.mktemp("cache")

    def run(ranks: int, flags: str, micro_batch_size: int, cases: Sequence[str]) -> Any:
        paths = f"--data-path {corpus} --data-cache-path {cache}"
        words = f"{SIZES} {paths} {flags}".split()
        outcomes = pool.run(ranks, train_cases, words, micro_batch_size, cases)
        succeed(outcomes)
        return [outcome.value for outcome in outcomes]

    return run


@pytest.fixture(scope="module")
def reference(train: Train) -> Any:
    """Return the results of one process whose batch is one microbatch."""
    return train(1, "", BATCH, list(CASES.values()))[0]


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


def full(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("ranks", "flags", "micro_batch_size"),
    [
        (1, "", 1),
        full(1, "", 2),
        full(2, "--zero-stage 3", 2),
        full(2, f"{PP2}", 2),
        full(2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-layers 4", 1),
        (4, f"{PP2} --zero-stage 1", 1),
        full(4, "--sharding-strategy hsdp --hsdp-shard-size 2", 2),
        full(4, f"{TP2} {PP2}", 1),
        full(8, f"{TP2} {PP2} --zero-stage 1", 2),
        (2, "--deepspeed --zero-stage 1", 2),
        full(2, "--deepspeed --zero-stage 3", 1),
        full(4, f"--deepspeed {PP2} --zero-stage 1", 2),
    ],
)
def test_micro_batch_size_and_layout_change_no_number(
    ranks: int, flags: str, micro_batch_size: int, train: Train, reference: Any
) -> None:
    if "--num-layers 4" in flags:
        reference = train(1, "--num-layers 4", BATCH, list(CASES.values()))[0]
    everyone = train(ranks, flags, micro_batch_size, list(CASES.values()))
    for found in everyone:
        for (steps, validation), (expected, other) in zip(found, reference, strict=True):
            assert [step[2] for step in steps] == [step[2] for step in expected]
            numbers = [value for step in steps for value in step[:2]]
            theirs = [value for step in expected for value in step[:2]]
            assert numbers == pytest.approx(theirs, rel=BOUND)
            assert validation == pytest.approx(other, rel=BOUND)
    # A step without any token that counts leaves weights, moments and loss scale as they were.
    assert not any(steps[EMPTY][3] for found in everyone for steps, _ in found)
    assert all(
        any(found[case][0][number][3] for found in everyone)
        for case in range(len(CASES))
        for number in range(len(STEPS))
        if number != EMPTY
    )


def test_the_mean_is_over_the_tokens_that_count(reference: Any, train: Train) -> None:
    for steps, _ in reference:
        assert all(math.isfinite(value) for step in steps for value in step[:2])
        assert steps[EMPTY] == (0.0, 0.0, "EMPTY", False)
        assert steps[EMPTY - 1][2] == "APPLIED"
    # Before, the mean of a microbatch without a token that counts was a loss of 0.
    old = train(1, "--loss-mean microbatch", 1, [EOD])[0][0][0]
    assert old[1][0] < 0.2 * reference[0][0][1][0]


def test_a_step_without_tokens_keeps_the_loss_scale(train: Train) -> None:
    steps, _ = train(1, "--fp16 --initial-loss-scale 256", 2, [EOD])[0][0]
    assert steps[EMPTY][2:] == ("EMPTY", False)
    assert steps[EMPTY + 1][2] == "APPLIED"


def test_a_batch_ramp_up_changes_no_number(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    """The batch has one to four microbatches, of two samples or of one on each of two ranks."""
    curves = []
    for ranks, size in ((1, 2), (2, 1)):
        folder = tmp_path / f"{ranks}"
        flags = (
            f"{SIZES} {CASES['eod, goldfish and z-loss']} --rampup-batch-size 2 2 12 "
            f"--micro-batch-size {size} --train-samples 56 --data-path {corpus} "
            f"--data-cache-path {tmp_path}/cache --metrics-file {folder}.jsonl --log-interval 1"
        )
        flags = flags.replace("--train-iters 10 ", "")
        succeed(pool.run(ranks, pretrain, flags.split()))
        entries = read_metrics(Path(f"{folder}.jsonl"))
        curves.append(
            [(each["lm_loss"], each["grad_norm"]) for each in entries if "lm_loss" in each]
        )
    assert len(curves[0]) == 9
    assert curves[1] == [pytest.approx(values, rel=BOUND) for values in curves[0]]
