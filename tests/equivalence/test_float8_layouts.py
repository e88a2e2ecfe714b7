"""Tests that float8 under every layout equals float8 in one process.

Everything besides the products is in fp32. Sums in another order change the last bit of some
numbers. Such a change flips a rounding to float8 only if the number lies next to the middle of two
float8 values. The flipped ones of all steps are counted.

A flip causes others. So larger models replay what one process rounded: each rank rounds its part
of the values of one process in place of its own. Then no difference comes from an earlier rounding,
and each value of each step must be equal up to the error of sums.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from equivalence.float8_recorder import Key, Operand, Recorder, count_flips, join_operands
from process_pool import ProcessPool, succeed
from suites import by_suite

from megatron.run.start.launch import read_launch

if TYPE_CHECKING:
    from megatron.parallel.launcher import LaunchedWorld
    from megatron.parallel.ranks import Ranks
    from megatron.run.run import Run

LOSS_BOUND = 1e-5
NORM_BOUND = 1e-4
FLIPPED = 1e-5
# In a replay, errors of sums do not grow.
REPLAYED_BOUND = 1e-6
VALUE_BOUND = 2e-6
STEPS = by_suite(2, 10)
RATE = 1e-5
# The model is small, because each rounded value is a chance of a flip.
#
# With a small epsilon, AdamW makes a full step from a gradient that consists of rounding errors.
# The weight may then round to another float8 value, which changes every token. With a high rate,
# the differences of other gradients do the same.
ADAM = "--adam-eps 1e-3"
MODEL = (
    "--num-layers 3 --hidden-size 16 --num-attention-heads 4 --seq-length 32 --vocab-size 5000 "
    "--make-vocab-size-divisible-by 96 --lr 1e-3 --lr-decay-style constant --eval-iters 1 "
    "--split 80,20,0 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 4 "
    "--train-iters 10 --micro-batch-size 2 --position-embedding-type rotary "
    "--normalization RMSNorm --glu-activation swiglu --ffn-hidden-size 48 --num-query-groups 2 "
    "--untie-embeddings-and-output-weights --fp8-emulate "
    f"{ADAM}"
)
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise",
}
TP2 = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int
    flags: str
    common: str = ""
    """Flags that one process gets too."""
    short: bool = False
    padded: bool = False
    """Whether the layout multiplies with the operator of GPUs, whose sizes are padded."""
    other_attention: bool = False
    """Whether another kernel than in one process computes attention."""


HYBRID = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --seq-length 80 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8 "
    "--linear-value-head-dim 6 --linear-norm-epsilon 1e-2 --attention-output-gate"
)
"""Samples have two chunks, and four matrices of a layer have the same input."""


LAYOUTS = [
    Layout("TP 2", 2, TP2),
    Layout("TP 2, sequence parallelism", 2, f"{TP2} {SP}"),
    # Two ranks share a query group.
    Layout(
        "TP 4, shared query groups",
        4,
        f"--tensor-model-parallel-size 4 {SP} --micro-batch-size 1",
        "--micro-batch-size 1",
        short=True,
    ),
    Layout("TP 4", 4, "--tensor-model-parallel-size 4", "--num-query-groups 4"),
    # The ranks have 4 and 12 columns of some weights.
    Layout(
        "TP 4, padded",
        4,
        f"--tensor-model-parallel-size 4 {SP}",
        "--num-query-groups 4",
        padded=True,
    ),
    Layout("TP 2, one query group", 2, f"{TP2} {SP}", "--num-query-groups 1"),
    # Three is no power of two, so the factor of the loss must not depend on the ranks.
    Layout("DP 3", 3, "--zero-stage 3", "--global-batch-size 6"),
    Layout("CP 3", 3, "--context-parallel-size 3", "--seq-length 36", other_attention=True),
    Layout("TP 2, compiled", 2, f"{TP2} {SP} --use-torch-compile"),
    Layout("PP 3", 3, "--pipeline-model-parallel-size 3"),
    Layout("ZeRO 1", 2, "--zero-stage 1"),
    Layout("ZeRO 3", 2, "--zero-stage 3"),
    Layout(
        "HSDP",
        4,
        "--sharding-strategy hsdp --hsdp-shard-size 2 --micro-batch-size 1",
        "--micro-batch-size 1",
    ),
    Layout("CP 2", 2, CP2, other_attention=True),
    Layout("CP 2, a2a", 2, f"{CP2} --cp-comm-type a2a"),
    Layout(
        "TP 2, uneven PP 2, DP 2, ZeRO 3",
        8,
        f"{TP2} {SP} {PP2} --zero-stage 3 --micro-batch-size 1",
        "--micro-batch-size 1",
        short=True,
    ),
    Layout(
        "recomputed, interleaved",
        2,
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --checkpoint-activations",
        "--num-layers 4 --micro-batch-size 1",
    ),
    Layout(
        "CP 2, TP 2, Muon, half recomputed",
        4,
        f"{CP2} {TP2} {SP} --checkpoint-activations --checkpoint-fraction 1/2",
        "--optimizer muon --muon-scale-mode unit_rms_norm --muon-fp32-matmul-prec high",
        other_attention=True,
    ),
    Layout("hybrid, TP 2", 2, f"{TP2} {SP}", HYBRID),
    Layout("hybrid, TP 4", 4, "--tensor-model-parallel-size 4", HYBRID),
    Layout("hybrid, CP 2, ZeRO 3", 4, f"{CP2} --zero-stage 3", HYBRID, other_attention=True),
    Layout("hybrid, compiled", 2, f"{TP2} --use-torch-compile", HYBRID),
]


@dataclass(frozen=True)
class Job:
    """What the ranks of a world train, one case after the other."""

    cases: tuple[str, ...]
    """The flags of each case."""
    replayed: tuple[str, ...] = ()
    """Files with what one process rounded, one for each case. Empty: ranks round their own values.
    """
    steps: int = STEPS
    padded: bool = False
    """Multiply with the operator of GPUs, which is slow on a CPU."""
    fault: str = ""
    """The name of a planted error. Empty: none."""


def train_job(job: Job) -> Any:
    """Train every case on this rank, and return its numbers. See `train`."""
    from megatron.extras.interop.translators.translator import load_config
    from megatron.extras.step.float8 import products
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world()
    ranks = join_ranks(read_launch(load_config(job.cases[0].split())))
    with ExitStack() as patches:
        if job.fault:
            patches.enter_context(FAULTS[job.fault]())
        if job.padded:
            multiply = partial(_multiply_on_tensor_cores, products.multiply_rounded)
            patches.enter_context(mock.patch.object(products, "multiply_rounded", multiply))
        files = job.replayed or (None,) * len(job.cases)
        return [
            train_case(case, ranks, world, file, job.steps)
            for case, file in zip(job.cases, files, strict=True)
        ]


def _use_own_scales() -> Any:
    """Let each rank take the largest values from its own parts."""
    from megatron.extras.step.float8.products import Float8Products

    find = Float8Products._find_largest

    def find_alone(its: Any, matrices: Any, groups: Any) -> Any:
        return find(its, matrices, ())

    return mock.patch.object(Float8Products, "_find_largest", find_alone)


def _scale_attention() -> Any:
    """Make the results of attention wrong by 1 in 65,536."""
    from megatron.model import attention_core

    attend = attention_core.attend

    def attend_wrongly(*arguments: Any) -> torch.Tensor:
        return attend(*arguments) * (1 + 2.0**-16)

    return mock.patch.object(attention_core, "attend", attend_wrongly)


FAULTS = {"own scales": _use_own_scales, "attention": _scale_attention}


def _multiply_on_tensor_cores(multiply: Any, *arguments: Any, **options: Any) -> torch.Tensor:
    """Call `multiply_rounded` as a run without --fp8-emulate does it."""
    return multiply(*arguments, **{**options, "emulated": False})


def train_case(
    case: str, ranks: "Ranks", world: "LaunchedWorld", replayed: str | None, steps: int
) -> Any:
    """Train one case. See `Job`."""
    from megatron.commands.parts import choose_parts
    from megatron.extras.interop.translators.translator import load_config
    from megatron.run.start.build import build_timers, divide_ranks, start_run
    from megatron.run.start.job import agree_on_job

    loaded = load_config(case.split())
    launch = read_launch(loaded, choose_parts(loaded.config))
    job = agree_on_job(launch, ranks)
    timers = build_timers(world)
    mesh = divide_ranks(job.plan, ranks, world, timers)
    run = start_run(launch, job, mesh, timers, None)
    result = train(run, loaded.config.model.seq_length, replayed, steps)
    run.reporter.close()
    run.sources.close()
    return result


def train(run: "Run", length: int, replayed: str | None, steps: int) -> Any:
    """Return the numbers of all steps and of an evaluation, and what the layers rounded."""
    assert run.sources.train is not None
    given = None
    if replayed is not None:
        given = torch.load(replayed, mmap=True, weights_only=False)
    recorder = Recorder(run, length, given)
    size = run.plan.batch_size.get_size(0, 0)
    results = []
    batch = run.sources.train.read_batch(size, length)
    shares = read_shares(run, batch)
    with recorder.watch():
        for iteration in range(1, steps + 1):
            if iteration > 1:
                batch = run.sources.train.read_batch(size, length)
            recorder.begin_step()
            result = run.engine.train_batch(batch, iteration=iteration, lr=RATE)
            results.append((result.loss, result.grad_norm))
    batch = run.sources.valid["validation"].read_batch(size)
    loss = run.engine.eval_batch(batch)
    run.engine.check_invariants(repair=False, iteration=steps, last_good=None)
    return results, loss, recorder.close(), shares


def read_shares(run: "Run", batch: Any) -> dict[str, list[float]]:
    """Return which shares of the operands are cut off or become zero in each layer.

    The step is dropped, so the weights stay as they are.
    """
    result = run.engine.train_batch(
        batch, iteration=1, lr=RATE, with_layer_statistics=True, accept=lambda *_: False
    )
    assert not result.warnings
    shares = {key: each for key, each in vars(result.layers).items() if "fp8" in key}
    assert len(shares) == 6
    return shares


@dataclass
class Result:
    """The results of a world."""

    steps: list[tuple[float, float]]
    loss: float
    """The loss of an evaluation."""
    operands: dict[Key, Operand]
    shares: dict[str, list[float]]
    """What each layer loses in the first step."""


def join(of_ranks: Sequence[Any]) -> Result:
    """Return the results of a world."""
    steps, loss, _, shares = of_ranks[0]
    assert all((each[0], each[3]) == (steps, shares) for each in of_ranks), "ranks disagree"
    return Result(steps, loss, join_operands([each[2] for each in of_ranks]), shares)


class Worlds:
    """Trains with each recipe in a world."""

    def __init__(self, pool: ProcessPool, corpus: str, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._base = f"{MODEL} --data-path {corpus} --data-cache-path {folder}"
        self._alone: dict[tuple[str, int], list[Result]] = {}

    def train_alone(self, flags: str, steps: int = STEPS) -> list[Result]:
        """Return the results of one process, which trains once with the same flags."""
        if (flags, steps) not in self._alone:
            self._alone[flags, steps] = self.train(1, flags, steps=steps)
        return self._alone[flags, steps]

    def train(
        self, ranks: int, flags: str, recipes: Sequence[str] = tuple(RECIPES), **options: Any
    ) -> list[Result]:
        """Return the results of a world. The options are those of `Job`."""
        cases = tuple(f"{self._base} {RECIPES[recipe]} {flags}" for recipe in recipes)
        outcomes = self._pool.run(ranks, train_job, Job(cases, **options))
        succeed(outcomes)
        return [join([each.value[case] for each in outcomes]) for case in range(len(cases))]

    def replay(
        self, ranks: int, flags: str, alone: Sequence[Result], **options: Any
    ) -> list[Result]:
        """Return the results of a world that rounds the values of one process."""
        files = tuple(str(self._folder / f"{recipe}.pt") for recipe in RECIPES)
        for result, file in zip(alone, files, strict=True):
            torch.save(result.operands, file)
        return self.train(ranks, flags, replayed=files, **options)


@pytest.fixture(scope="module")
def worlds(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(pool, corpus, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=each.name, marks=() if each.short else pytest.mark.full)
        for each in LAYOUTS
    ],
)
def test_layouts_equal_one_process(layout: Layout, worlds: Worlds) -> None:
    alone = worlds.train_alone(layout.common)
    flags = f"{layout.common} {layout.flags}"
    together = worlds.train(layout.ranks, flags, padded=layout.padded)
    for recipe, found, expected in zip(RECIPES, together, alone, strict=True):
        compare(found, expected, recipe, other_attention=layout.other_attention)
        names = {name.partition(".attention.")[2] for name, _ in expected.operands}
        entry = "query" if layout.common == HYBRID else "qkv"
        assert names == {entry, "qkv", "out", ""}


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_that_do_not_share_the_largest_values_differ(recipe: str, worlds: Worlds) -> None:
    """Each rank then has a scale of its own for the input of a row-parallel layer."""
    with pytest.raises(AssertionError, match=r"attention.out', 'input'.*ranks disagree"):
        worlds.train(2, TP2, (recipe,), fault="own scales")


MIDDLE = "--hidden-size 48 --ffn-hidden-size 144"
WIDE = "--hidden-size 64 --ffn-hidden-size 192 --seq-length 64"
WIDER = "--hidden-size 256 --ffn-hidden-size 768 --seq-length 64"
LARGE_WEIGHTS = "--init-method-std 0.1"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
THREE_HEADS = "--num-attention-heads 3 --num-query-groups 3"
SHARED = "--num-query-groups 1"
REPLAYED = {
    "CP 2, large weights": (2, CP2, f"{MIDDLE} {LARGE_WEIGHTS}"),
    "CP 2, large weights, dropout": (2, CP2, f"{MIDDLE} {LARGE_WEIGHTS} {DROPOUT}"),
    "CP 8": (8, "--context-parallel-size 8", MIDDLE),
    "TP 3": (
        3,
        "--tensor-model-parallel-size 3",
        f"--hidden-size 48 --ffn-hidden-size 99 {THREE_HEADS}",
    ),
    "TP 2, CP 2, half recomputed": (
        4,
        f"{TP2} {SP} {CP2} --checkpoint-activations --checkpoint-fraction 1/2",
        MIDDLE,
    ),
    **{
        f"{name}, width {width}": (2, flags, f"{model} {common}")
        for width, model in ((64, WIDE), (256, WIDER))
        for name, flags, common in (
            ("TP 2", f"{TP2} {SP}", ""),
            ("CP 2", CP2, ""),
            ("ZeRO 3", "--zero-stage 3", ""),
            ("TP 2, one query group", f"{TP2} {SP}", SHARED),
        )
    },
}
"""Name -> ranks, flags of the layout, flags that one process gets too."""


@pytest.mark.full
@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_equals_one_process_up_to_the_error_of_sums(name: str, worlds: Worlds) -> None:
    """`pytest -s` shows the numbers."""
    ranks, flags, common = REPLAYED[name]
    # The values of a step of the widest model need 22 MB.
    steps = 3 if WIDER in common else STEPS
    alone = worlds.train_alone(common, steps)
    together = worlds.replay(ranks, f"{common} {flags}", alone, steps=steps)
    for recipe, found, expected in zip(RECIPES, together, alone, strict=True):
        compare_replay(found, expected, recipe)


@pytest.mark.full
def test_a_replay_finds_an_error_of_attention(worlds: Worlds) -> None:
    """The error is a sixteenth of the distance between two numbers of float8, divided by 256."""
    alone = worlds.train_alone(MIDDLE)
    together = worlds.replay(2, f"{MIDDLE} {CP2}", alone, fault="attention")
    for recipe, found, expected in zip(RECIPES, together, alone, strict=True):
        with pytest.raises(AssertionError, match=f"{recipe}: a value"):
            compare_replay(found, expected, recipe)


def compare_replay(found: Result, expected: Result, recipe: str) -> None:
    """Check that each scale, and each value before it is rounded, are those of one process."""
    flips = count_flips(found.operands, expected.operands)
    loss, norm = compare_steps(found.steps, expected.steps)
    print(f"{recipe}: {flips}, loss {loss:.1e}, norm {norm:.1e}")
    assert flips.scales == 0, f"{recipe}: {flips}"
    assert flips.largest < VALUE_BOUND, f"{recipe}: a value differs, {flips}"
    assert flips.flipped <= 1 + FLIPPED * flips.values, f"{recipe}: {flips}"
    assert loss < REPLAYED_BOUND, recipe
    assert norm < REPLAYED_BOUND, recipe


def compare(found: Result, expected: Result, recipe: str, *, other_attention: bool = False) -> None:
    """Check that scales are equal, few roundings flip, and losses and norms are close."""
    for key, operand in expected.operands.items():
        # Later steps have other weights.
        assert torch.equal(found.operands[key].inverses[0], operand.inverses[0]), key
    flips = count_flips(found.operands, expected.operands)
    loss, norm = compare_steps(
        [*found.steps, (found.loss, 1.0)], [*expected.steps, (expected.loss, 1.0)]
    )
    assert flips.flipped <= FLIPPED * flips.values, f"{recipe}: {flips}"
    # The first token sees one key, so the gradient of its query is an error of sums.
    assert other_attention or not flips.in_noise, f"{recipe}: {flips}"
    for name, shares in expected.shares.items():
        assert name.endswith("flushed") or not any(shares), name
        # Errors of sums become zero too.
        if not (other_attention and "gradient" in name):
            assert found.shares[name] == pytest.approx(shares, rel=1e-9), name
    assert loss < LOSS_BOUND, recipe
    assert norm < NORM_BOUND, recipe


def compare_steps(
    found: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Return the largest relative differences of losses and of norms."""
    pairs = list(zip(found, expected, strict=True))
    loss, norm = (max((abs(a[n] / b[n] - 1) for a, b in pairs), default=0.0) for n in (0, 1))
    return loss, norm
