"""Repeated microbatches give the bits of eager ones, and each planted error is found."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from process_pool import ProcessPool, succeed

from megatron.run.start.launch import read_launch

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh
    from megatron.plan.run_plan import Plan

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 20 --lr 1e-2 --data-path none "
    "--hidden-dropout 0 --attention-dropout 0 "
)
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--ffn-hidden-size 48 --num-query-groups 2 --no-add-bias-linear --sliding-window 6 "
    "--untie-embeddings-and-output-weights "
)
NANOCHAT = (
    "--position-embedding-type rotary --normalization RMSNorm --squared-relu --qk-norm head "
    "--no-add-bias-linear --untie-embeddings-and-output-weights "
)
FUSED = "--gradient-accumulation-fusion"
TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-emulate"
ROWWISE = "--bf16 --fp8-format e4m3 --fp8-recipe rowwise --fp8-emulate --fp8-start-iteration 4"
CURRICULUM = (
    "--curriculum-schedule-type fixed_discrete --curriculum-difficulties 8 16 "
    "--curriculum-max-steps 4 --train-tokens 100000 --lr-decay-tokens 100000"
)
# A scale that overflows in the first steps, and is doubled later.
FP16 = "--fp16 --initial-loss-scale 16777216 --loss-scale-window 3 --hysteresis 1"
SHAPES = {
    "gpt2": "",
    "gpt2-bf16": f"--bf16 {FUSED}",
    "llama-bf16": f"{LLAMA} --bf16 {FUSED}",
    "sinks": f"{LLAMA} --bf16 --softmax-type learnable --full-attention-layers 1",
    "off-by-one": f"{LLAMA} --bf16 --softmax-type off-by-one --full-attention-layers 1",
    "llama-recomputed": f"{LLAMA} --bf16 --checkpoint-activations",
    "nanochat-bf16": f"{NANOCHAT} --bf16 {FUSED} --z-loss-coefficient 1e-4",
    "fp16": f"{LLAMA} {FP16}",
    "dropout": "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1",
    "goldfish": "--bf16 --goldfish-loss --goldfish-k 3 --goldfish-h 2",
    "curriculum": f"{LLAMA} --bf16 {CURRICULUM}",
    "float8": f"{LLAMA} {TENSORWISE} {FUSED}",
    "float8-rowwise": f"{LLAMA} {ROWWISE}",
}
SHORT = (
    *("gpt2", "llama-bf16", "nanochat-bf16", "fp16", "dropout", "goldfish", "curriculum", "float8"),
)
HISTORY = (
    *("train", "train", "train", "evaluate", "train", "statistics", "train", "nan", "train"),
    *("reject", "train", "save", "train", "train 3", "rollback", "train", "train"),
)
"""What happens. The first step with a size of microbatches warms up, and the next one records."""


class History:
    """Runs the events of `HISTORY` with an engine."""

    def __init__(self, plan: "Plan", mesh: "Mesh") -> None:
        """Create the engine, which is eager on a CPU."""
        import torch

        from megatron.engine.base import skip_timing, skip_waiting
        from megatron.extras.step.engines import choose_engine

        load = choose_engine(plan.config).load
        self.engine: Any = load(mesh.device.type)(plan, mesh, skip_timing, skip_waiting)
        self._length = plan.config.model.seq_length
        self._plan = plan
        self._generator = torch.Generator().manual_seed(1)
        self._saved: list[Any] = []
        self._iteration = 0

    def call(self, event: str) -> tuple[Any, ...]:
        """Run an event, and return numbers and copies of all state."""
        import torch

        engine = self.engine
        shards = list(engine.shards(optimizer=True))
        numbers: Any = None
        match event.split():
            case ["evaluate"]:
                numbers = engine.eval_batch(self._draw(2, self._length))
            case ["save"]:
                self._saved = [shard.tensor.clone() for shard in shards]
                self._scalars = engine.get_scalars()
            case ["rollback"]:
                for shard, saved in zip(shards, self._saved, strict=True):
                    shard.tensor.copy_(saved)
                engine.finish_load(self._scalars)
            case ["nan"]:
                # A weight that no layer replaces by its float8 values.
                norm = next(p for n, p in engine.stages[0].named_parameters() if "norm" in n)
                kept = norm.detach().clone()
                norm.data.view(-1)[0] = torch.nan
                numbers = self._train(2)
                norm.data.copy_(kept)
            case ["train", count]:
                numbers = self._train(int(count))
            case [kind]:
                numbers = self._train(
                    2,
                    accept=(lambda loss, norm: False) if kind == "reject" else None,
                    with_layer_statistics=kind == "statistics",
                )
        weights = [p.detach() for p in engine.stages[0].parameters()]
        state = [each.clone() for each in (*(shard.tensor for shard in shards), *weights)]
        return numbers, state

    def _draw(self, count: int, length: int) -> Any:
        """Return microbatches of random tokens."""
        import torch

        from megatron.data.batches import Microbatch

        tokens = torch.randint(64, (count, 1, length + 1), generator=self._generator)
        return [Microbatch(each[:, :-1], each[:, 1:]) for each in tokens]

    def _train(self, count: int, **options: Any) -> tuple[Any, ...]:
        self._iteration += 1
        length = self._plan.get_seq_length(self._iteration)
        result = self.engine.train_batch(
            self._draw(count, length), iteration=self._iteration, lr=1e-2, **options
        )
        layers = None if result.layers is None else str(result.layers)
        return result.outcome.name, str(result.loss), str(result.grad_norm), layers


def start(flags: str) -> tuple["Plan", "Mesh"]:
    """Return the plan and the mesh of a command line with one rank."""
    from megatron.extras.interop.translators.translator import load_config
    from megatron.parallel.launcher import read_launcher_world
    from megatron.plan.resolve import resolve
    from megatron.run.start.build import build_timers, divide_ranks
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world(None)
    loaded = load_config([*SIZES.split(), *flags.split()])
    plan = resolve(loaded.config, 1)
    plan.raise_on_errors()
    return plan, divide_ranks(plan, join_ranks(read_launch(loaded)), world, build_timers(world))


def capture(history: History, plan: "Plan", mesh: "Mesh") -> tuple[Any, Any]:
    """Let the engine of a history repeat its microbatches. Return its runner and recorder."""
    from engine.graph_stand_in import StandIn

    from megatron.extras.step.cuda_graph import capture_microbatches

    recorder = StandIn()
    return capture_microbatches(history.engine, plan, mesh, recorder), recorder


def compare(eager: History, captured: History, event: str) -> str:
    """Run an event with both. Return what differs, or an empty text."""
    import torch

    (numbers, state), (others, other_state) = eager.call(event), captured.call(event)
    if numbers != others:
        return f"{event}: {numbers} and {others}"
    equal = [
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        for mine, theirs in zip(state, other_state, strict=True)
        if mine.is_contiguous()
    ]
    return "" if all(equal) else f"{event}: tensor {equal.index(False)} of {len(equal)}"


def run_both(flags: str) -> dict[str, Any]:
    """Run the history of a shape eagerly and with repeated microbatches."""
    plan, mesh = start(flags)
    eager, captured = History(plan, mesh), History(plan, mesh)
    runner, recorder = capture(captured, plan, mesh)
    outcomes: list[str] = []
    addresses: set[Any] = set()
    recordings: list[int] = []
    for event in HISTORY:
        if difference := compare(eager, captured, event):
            return {"difference": difference}
        recordings.append(len(recorder.tapes))
        if runner.has_graphs:
            graphs = runner._graphs
            kept = [*graphs.gradients, *graphs._fixed, *captured.engine.stages[0].parameters()]
            addresses.add(tuple(tensor.data_ptr() for tensor in kept))
        outcomes.append(str(eager.engine.get_scalars()))
    return {
        "difference": "",
        "recordings": recordings,
        "repeated": recorder.repeated,
        "shared": recorder.shared,
        "addresses": len(addresses),
        "scalars": outcomes,
    }


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[pytest.mark.full] * (name not in SHORT)) for name in SHAPES]
)
def test_repeated_microbatches_have_the_bits_of_eager_ones(shape: str, pool: ProcessPool) -> None:
    outcomes = pool.run(1, run_both, SHAPES[shape])
    succeed(outcomes)
    found = outcomes[0].value
    assert found["difference"] == ""
    # A curriculum has other sizes, and float8 other weights, from some step on.
    sizes = 2 if shape in ("curriculum", "float8-rowwise") else 1
    assert found["addresses"] == sizes, outcomes[0].output
    assert found["recordings"][-1] == 2 * sizes
    assert found["repeated"] >= 16
    # The evaluation, and the step with statistics unless it is the first one with its size.
    assert found["shared"] == (1 if sizes == 2 else 2)
    if shape == "fp16":
        assert len(set(found["scalars"])) > 5


def ramp_up() -> tuple[list[str], list[int]]:
    """Return what differs if steps have one microbatch at first, and the number of recordings."""
    plan, mesh = start("--bf16 --gradient-accumulation-fusion")
    eager, captured = History(plan, mesh), History(plan, mesh)
    _, recorder = capture(captured, plan, mesh)
    counts = (1, 1, 2, 2, 1, 3)
    differences, recordings = [], []
    for count in counts:
        differences.append(compare(eager, captured, f"train {count}"))
        recordings.append(len(recorder.tapes))
    return differences, recordings


def test_a_second_microbatch_is_recorded_when_there_is_one(pool: ProcessPool) -> None:
    outcomes = pool.run(1, ramp_up)
    succeed(outcomes)
    differences, recordings = outcomes[0].value
    assert differences == [""] * 6
    # The first step with two microbatches is eager again, beside the graph of the first one.
    assert recordings == [0, 1, 1, 2, 2, 2]


# -- planted errors --------------------------------------------------------------------------------


def skip_inputs(runner: Any, engine: Any) -> Any:
    """The graph reads the inputs of the microbatch that it was recorded with."""
    from megatron.extras.step import cuda_graph

    return mock.patch.object(cuda_graph, "foreach_copy_", return_value=None)


def skip_labels(runner: Any, engine: Any) -> Any:
    """The graph gets new tokens and old labels."""
    from megatron.extras.step import cuda_graph

    return mock.patch.object(
        cuda_graph, "foreach_copy_", lambda fixed, given: fixed[0].copy_(given[0])
    )


def bake_factor(runner: Any, engine: Any) -> Any:
    """The factor on the loss is a number of the recording."""
    graphs = runner._graphs
    return mock.patch.object(graphs, "_factor", graphs._factor.clone())


def bake_input(graphs: Any, name: str) -> Any:
    place = graphs._copied.index(name)
    fixed = [each.clone() if n == place else each for n, each in enumerate(graphs._fixed)]
    return mock.patch.object(graphs, "_fixed", fixed)


def bake_divisor(runner: Any, engine: Any) -> Any:
    """The divisor of the loss is that of the recording."""
    return bake_input(runner._graphs, "loss_divisor")


def bake_masks(runner: Any, engine: Any) -> Any:
    """The masks of dropout are those of the recording."""
    return bake_input(runner._graphs, "dropout_key")


def replace_gradients(runner: Any, engine: Any) -> Any:
    """The optimizer reads gradients in other memory than the graph writes."""
    graphs = runner._graphs
    return mock.patch.object(graphs, "gradients", [each.clone() for each in graphs.gradients])


def add_always(runner: Any, engine: Any) -> Any:
    """The first microbatch adds to the gradients of the step before."""
    return mock.patch.object(runner._graphs, "_first", runner._graphs._others)


def add_never(runner: Any, engine: Any) -> Any:
    """The later microbatches overwrite the gradients."""
    return mock.patch.object(runner._graphs, "_others", runner._graphs._first)


def move_weights(runner: Any, engine: Any) -> Any:
    """The update writes 16-bit weights into new memory, and nobody notices."""
    wanted = runner._graphs.wanted
    refresh = engine._refresh_model

    def move(**options: bool) -> None:
        for parameter in engine.stages[0].parameters():
            parameter.data = parameter.data.clone()
        refresh(**options)

    patches = ExitStack()
    patches.enter_context(mock.patch.object(engine, "_refresh_model", move))
    patches.enter_context(mock.patch.object(runner, "_describe", return_value=wanted))
    return patches


def move_rounded_weights(runner: Any, engine: Any) -> Any:
    """Float8 weights are rounded into new memory."""
    engine._fixed.free()
    round_weights = engine._fixed.round

    def move() -> None:
        engine._fixed.free()
        round_weights()

    return mock.patch.object(engine._fixed, "round", move)


def overwrite_tables(runner: Any, engine: Any) -> Any:
    """The tables of positions have been freed, and something else has taken their memory."""
    runner._graphs._positions.cos.zero_()
    engine.stages[0].position_tables._key = None
    return nullcontext()


def keep_first_loss(runner: Any, engine: Any) -> Any:
    """The loss is not that of the microbatch."""
    graphs = runner._graphs
    return mock.patch.object(graphs, "_loss", graphs._loss.clone())


ERRORS: dict[Callable[..., Any], str] = {
    skip_inputs: "",
    skip_labels: "",
    bake_factor: "",
    bake_divisor: SHAPES["goldfish"],
    bake_masks: SHAPES["dropout"],
    replace_gradients: "",
    add_always: "",
    add_never: "",
    move_weights: "--bf16",
    move_rounded_weights: SHAPES["float8"],
    overwrite_tables: LLAMA,
    keep_first_loss: "",
}
"""Error -> the flags of a run in which it changes numbers."""
FOUND_BY_STEPS = {"add_never"}
"""A replay repeats the first microbatch of a step only."""


def plant_errors(names: list[str]) -> list[tuple[str, str, str]]:
    """Return each error, what the recorder finds in three steps, and what a replay says."""
    from megatron.extras.watch.replay import MicrobatchReplay

    planters = {planter.__name__: planter for planter in ERRORS}
    found = []
    for name in names:
        planter = planters[name]
        plan, mesh = start(ERRORS[planter])
        eager, captured = History(plan, mesh), History(plan, mesh)
        runner, _ = capture(captured, plan, mesh)
        lines: list[str] = []
        replay = MicrobatchReplay("warn", mesh, captured.engine, lines.append)
        for event in ("train", "train", "train"):
            assert compare(eager, captured, event) == ""
        # A replay changes nothing, and finds nothing.
        for history in (eager, captured):
            microbatches = history._draw(2, 16)
        replay.check(microbatches, 4)
        assert [line.startswith("replay: both passes") for line in lines] == [True], lines
        assert compare(eager, captured, "train") == ""
        with planter(runner, captured.engine):
            # The step after the first one has other weights and another factor.
            differences = [compare(eager, captured, f"train {count}") for count in (3, 2, 2)]
            replay.check(captured._draw(3, 16), 8)
        found.append((name, next(filter(None, differences), ""), "\n".join(lines)))
    return found


def test_each_planted_error_is_found(pool: ProcessPool) -> None:
    outcomes = pool.run(1, plant_errors, [planter.__name__ for planter in ERRORS])
    succeed(outcomes)
    for name, difference, said in outcomes[0].value:
        assert difference, name
        if name not in FOUND_BY_STEPS:
            assert "the CUDA graph gave other values" in said, name


# -- what is not recorded --------------------------------------------------------------------------


def read_on_host(norm: Any, x: Any) -> Any:
    """Compute a norm in its own way, after the host has read a number."""
    x.sum().item()
    return x * norm.weight + norm.bias


def refuse_recordings() -> dict[str, Any]:
    """Return what is logged if an operator cannot be recorded, or if memory does not suffice."""
    from megatron.model.norm import LayerNorm

    found: dict[str, Any] = {}
    for name in ("operator", "memory"):
        plan, mesh = start("")
        eager, captured = History(plan, mesh), History(plan, mesh)
        runner, recorder = capture(captured, plan, mesh)
        lines: list[str] = []
        runner._log = lines.append
        patch: Any = mock.patch.object(LayerNorm, "forward", read_on_host)
        if name == "memory":
            recorder.shortage = "too small"
            patch = nullcontext()
        with patch:
            differences = [compare(eager, captured, "train") for _ in range(4)]
        found[name] = differences, recorder.repeated, lines
    return found


def test_a_run_without_a_recording_goes_on_eagerly(pool: ProcessPool) -> None:
    outcomes = pool.run(1, refuse_recordings)
    succeed(outcomes)
    for name, (differences, repeated, lines) in outcomes[0].value.items():
        assert differences == [""] * 4, name
        assert repeated == 0
        (line,) = lines
        assert "--cuda-graph" in line
        assert {"operator": "aten._local_scalar_dense", "memory": "too small"}[name] in line


def build_engines() -> dict[str, str]:
    """Return the class of the runner for each value of --cuda-graph, as an engine is built."""
    from engine.graph_stand_in import StandIn

    from megatron.extras.step import cuda_graph, engines

    found = {}
    plan, mesh = start(SHAPES["float8"])
    for value in ("on", "off"):
        kernels = replace(plan.config.kernels, cuda_graph=value)
        chosen = replace(plan, config=replace(plan.config, kernels=kernels))
        with (
            mock.patch.object(engines, "_has_cuda", return_value=True),
            mock.patch.object(cuda_graph, "CudaGraphRecorder", return_value=StandIn()),
        ):
            found[value] = type(History(chosen, mesh).engine.runner).__name__
    return found


def test_an_engine_is_built_with_graphs_if_they_are_chosen(pool: ProcessPool) -> None:
    outcomes = pool.run(1, build_engines)
    succeed(outcomes)
    assert outcomes[0].value == {"on": "CapturedRunner", "off": "SingleStageRunner"}


def count_calls() -> list[float]:
    """Return the calls in this package of a repeated microbatch, and of an eager one.

    What its functions call of torch and of Python counts too. The recorder is left out.
    """
    plan, mesh = start("--num-layers 12 --global-batch-size 4")
    repeated, eager = History(plan, mesh), History(plan, mesh)
    _, recorder = capture(repeated, plan, mesh)
    counts = []
    for history in (repeated, eager):
        # The second step records.
        history._train(4)
        history._train(4)
        counts.append(count_calls_of_step(history) / 4)
    assert recorder.repeated == 8
    return counts


def count_calls_of_step(history: History) -> int:
    """Return the calls of the passes of a step."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    passes = history.engine.runner.run

    def run(*arguments: Any, **options: Any) -> Any:
        return profile.runcall(passes, *arguments, **options)

    with mock.patch.object(history.engine.runner, "run", run):
        history._train(4)
    rows = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = 0
    for (file, _, _), (_, calls, _, _, callers) in rows.items():
        if "graph_stand_in" in file:
            continue
        if "/megatron/" in file:
            total += calls
            continue
        total += sum(each[0] for (caller, _, _), each in callers.items() if "/megatron/" in caller)
    return total


def test_a_repeated_microbatch_has_few_python_calls(pool: ProcessPool) -> None:
    outcomes = pool.run(1, count_calls)
    succeed(outcomes)
    repeated, eager = outcomes[0].value
    print(f"{repeated:,.0f} calls of a repeated microbatch, {eager:,.0f} of an eager one")
    assert repeated <= 150
    assert eager > 1000
