"""Tests that float8 under every layout equals float8 in one process.

Everything besides the products is in fp32. Sums in another order change the last bit of some
numbers. Such a change flips a rounding to float8 only if the number lies next to the middle of two
float8 values. The flipped ones of all steps are counted.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from equivalence.float8_recorder import Key, Operand, Recorder, count_flips, join_operands
from process_pool import ProcessPool, succeed

if TYPE_CHECKING:
    from megatron.parallel.launcher import LaunchedWorld
    from megatron.parallel.ranks import Ranks
    from megatron.run.run import Run

LOSS_BOUND = 1e-5
NORM_BOUND = 1e-4
FLIPPED = 1e-5
STEPS = 10
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
    Layout("CP 3", 3, "--context-parallel-size 3", "--seq-length 36"),
    Layout("TP 2, compiled", 2, f"{TP2} {SP} --use-torch-compile"),
    Layout("PP 3", 3, "--pipeline-model-parallel-size 3"),
    Layout("ZeRO 1", 2, "--zero-stage 1"),
    Layout("ZeRO 3", 2, "--zero-stage 3"),
    Layout(
        "HSDP",
        4,
        "--sharding-strategy hsdp --hsdp-shard-size 2 --micro-batch-size 1",
        "--micro-batch-size 1",
        short=True,
    ),
    Layout("CP 2", 2, CP2),
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
    ),
]


def train_cases(cases: Sequence[str], shared: bool, padded: bool) -> Any:
    """Train every case on this rank, and return its numbers. See `train`.

    Args:
        cases: The flags of each case.
        shared: Otherwise, each rank takes the largest values from its own parts.
        padded: Multiply with the operator of GPUs, which is slow on a CPU.
    """
    from megatron.extras.float8 import products
    from megatron.extras.translators.translator import load_config
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.join import join_ranks

    world = read_launcher_world()
    ranks = join_ranks(load_config(cases[0].split()), world)
    with ExitStack() as patches:
        if not shared:
            patches.enter_context(mock.patch.object(products, "_share_largest"))
        if padded:
            multiply = partial(_multiply_on_tensor_cores, products.multiply_rounded)
            patches.enter_context(mock.patch.object(products, "multiply_rounded", multiply))
        return [train_case(case, ranks, world) for case in cases]


def _multiply_on_tensor_cores(multiply: Any, *arguments: Any, **options: Any) -> torch.Tensor:
    """Call `multiply_rounded` as a run without --fp8-emulate does it."""
    return multiply(*arguments, **{**options, "emulated": False})


def train_case(case: str, ranks: "Ranks", world: "LaunchedWorld") -> Any:
    """Train one case. See `train_cases`."""
    from megatron.commands.parts import choose_parts
    from megatron.extras.translators.translator import load_config
    from megatron.run.start.job import agree_on_job
    from megatron.run.start.setup import build_timers, divide_ranks, start_run

    loaded = load_config(case.split())
    job = agree_on_job(loaded, ranks, print, choose_parts(loaded.config))
    timers = build_timers(world)
    mesh = divide_ranks(job.plan, ranks, world, timers)
    run = start_run(loaded, job, mesh, timers, None)
    result = train(run, loaded.config.model.seq_length)
    run.reporter.close()
    run.sources.close()
    return result


def train(run: "Run", length: int) -> Any:
    """Return the numbers of all steps and of an evaluation, and what the layers rounded."""
    assert run.sources.train is not None
    recorder = Recorder(run, length)
    size = run.plan.batch_size.get_size(0, 0)
    steps = []
    batch = run.sources.train.read_batch(size, length)
    shares = read_shares(run, batch)
    with recorder.watch():
        for iteration in range(1, STEPS + 1):
            if iteration > 1:
                batch = run.sources.train.read_batch(size, length)
            recorder.begin_step()
            result = run.engine.train_batch(batch, iteration=iteration, lr=RATE)
            steps.append((result.loss, result.grad_norm))
    batch = run.sources.valid["validation"].read_batch(size)
    loss = run.engine.eval_batch(batch)
    run.engine.check_invariants(repair=False, iteration=STEPS, last_good=None)
    return steps, loss, recorder.close(), shares


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


Train = Callable[..., list[Result]]


@pytest.fixture(scope="module")
def train_world(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains with each recipe in a world, and returns the results."""
    cache = tmp_path_factory.mktemp("cache")
    alone: dict[str, list[Result]] = {}

    def run(
        ranks: int,
        flags: str,
        *,
        shared: bool = True,
        padded: bool = False,
        recipes: Sequence[str] = tuple(RECIPES),
    ) -> list[Result]:
        if ranks > 1:
            return launch(ranks, flags, shared, padded, recipes)
        if flags not in alone:
            alone[flags] = launch(ranks, flags, shared, padded, recipes)
        return alone[flags]

    def launch(
        ranks: int, flags: str, shared: bool, padded: bool, recipes: Sequence[str]
    ) -> list[Result]:
        paths = f"--data-path {corpus} --data-cache-path {cache}"
        cases = [f"{MODEL} {paths} {RECIPES[recipe]} {flags}" for recipe in recipes]
        outcomes = pool.run(ranks, train_cases, cases, shared, padded)
        succeed(outcomes)
        return [join([each.value[case] for each in outcomes]) for case in range(len(cases))]

    return run


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=each.name, marks=() if each.short else pytest.mark.full)
        for each in LAYOUTS
    ],
)
def test_layouts_equal_one_process(layout: Layout, train_world: Train) -> None:
    alone = train_world(1, layout.common)
    flags = f"{layout.common} {layout.flags}"
    together = train_world(layout.ranks, flags, padded=layout.padded)
    for recipe, found, expected in zip(RECIPES, together, alone, strict=True):
        compare(found, expected, recipe)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_that_do_not_share_the_largest_values_differ(recipe: str, train_world: Train) -> None:
    """The comparison finds what this design prevents, from the largest values on."""
    expected = dict(zip(RECIPES, train_world(1, ""), strict=True))[recipe]
    with pytest.raises(AssertionError, match="blocks"):
        compare(train_world(2, TP2, shared=False, recipes=(recipe,))[0], expected, recipe)


WIDER = {
    "TP 2": (2, f"{TP2} {SP}", ""),
    "CP 2": (2, CP2, ""),
    "ZeRO 3": (2, "--zero-stage 3", ""),
    "TP 2, one query group": (2, f"{TP2} {SP}", "--num-query-groups 1"),
}


@pytest.mark.full
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("layout", WIDER)
def test_a_wider_model_equals_one_process_up_to_the_first_flip(
    width: int, layout: str, train_world: Train
) -> None:
    """A wider model has more values, so some flip. What comes after a flip depends on it.

    `pytest -s` shows the numbers.
    """
    ranks, flags, common = WIDER[layout]
    model = f"--hidden-size {width} --ffn-hidden-size {3 * width} --seq-length 64 {common}"
    alone, together = train_world(1, model), train_world(ranks, f"{model} {flags}")
    for recipe, found, expected in zip(RECIPES, together, alone, strict=True):
        flips = count_flips(found.operands, expected.operands)
        loss, norm = compare_steps(found.steps, expected.steps)
        print(f"{recipe}: {flips}, loss {loss:.1e}, norm {norm:.1e}")
        assert flips.first <= 1 + FLIPPED * flips.before
        until = flips.step - 1
        loss, norm = compare_steps(found.steps[:until], expected.steps[:until])
        assert loss < LOSS_BOUND, recipe
        assert norm < NORM_BOUND, recipe


def compare(found: Result, expected: Result, recipe: str) -> None:
    """Check that scales are equal, few roundings flip, and losses and norms are close."""
    for key, operand in expected.operands.items():
        # Later steps have other weights.
        assert torch.equal(found.operands[key].inverses[0], operand.inverses[0]), key
    flips = count_flips(found.operands, expected.operands)
    loss, norm = compare_steps(
        [*found.steps, (found.loss, 1.0)], [*expected.steps, (expected.loss, 1.0)]
    )
    assert flips.flipped <= FLIPPED * flips.values, f"{recipe}: {flips}"
    for name, shares in expected.shares.items():
        assert found.shares[name] == pytest.approx(shares, rel=1e-9), name
        assert name.endswith("flushed") or not any(shares), name
    assert loss < LOSS_BOUND, recipe
    assert norm < NORM_BOUND, recipe


def compare_steps(
    found: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Return the largest relative differences of losses and of norms."""
    pairs = list(zip(found, expected, strict=True))
    loss, norm = (max((abs(a[n] / b[n] - 1) for a, b in pairs), default=0.0) for n in (0, 1))
    return loss, norm
