"""Tests of --replay-interval: planted bit flips are found on the right rank, and nothing else is.

The flips are planted in the second of two passes, in what one rank computes.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from process_pool import ProcessPool, pretrain, succeed
from torch import Tensor

from megatron.base.error_report import build_report
from megatron.base.errors import FaultyHostError
from megatron.base.outside_file import parse_json
from megatron.extras.operations.chronicle.events import describe_stop
from megatron.extras.operations.slurm.start import TrainingStarts
from megatron.extras.watch.replay import (
    Entry,
    compute_measures,
    describe_difference,
    find_first_ranks,
    sort_messages,
)
from megatron.observe.chronicle import CHRONICLE

if TYPE_CHECKING:
    from megatron.run.run import Run

FULL = pytest.mark.full
ITERATIONS = 50
"""Iterations of each healthy run in the long suite. docs/replay.md says how many ran once."""

SIZES = (
    "--mock-data --vocab-size 250 --num-layers 4 --hidden-size 48 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --lr 1e-3 --position-embedding-type "
    "rotary --eval-iters 1"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
ALL_THREE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
FLIPS = 20
"""Flips of a run in the long suite. The short one has six, two of each kind."""
KINDS = ("activation", "weight", "gradient")


@dataclass(frozen=True)
class Flip:
    """A bit that is flipped in the second pass."""

    rank: int
    module: str
    kind: str
    bit: int


def flip_bit(tensor: Tensor, bit: int) -> None:
    """Flip a bit of the largest element, in place. GELU makes zeros of negative ones."""
    # autograd must not notice the change, as it would not notice one of the hardware.
    flat = tensor.data.view(-1)
    place = int(flat.argmax())
    bits = flat.view({2: torch.int16, 4: torch.int32}[flat.itemsize])
    bits[place] = bits[place] ^ (1 << bit)


@contextmanager
def plant(run: "Run", flip: Flip) -> Iterator[None]:
    """Flip a bit in each second pass on one rank."""
    engine: Any = run.engine
    original = engine.compute_and_drop_gradients
    passes = 0

    def compute(*arguments: Any) -> None:
        nonlocal passes
        passes += 1
        module = find_module(run, flip.module)
        if passes != 2 or run.mesh.rank != flip.rank or module is None:
            original(*arguments)
            return
        hooks = add_hooks(module, flip)
        original(*arguments)
        for hook in hooks:
            hook.remove()

    engine.compute_and_drop_gradients = compute
    try:
        yield
    finally:
        engine.compute_and_drop_gradients = original


def find_module(run: "Run", name: str) -> Any:
    """Return a module of the first or last stage of this rank, or None."""
    for stage in run.engine.stages:
        found = dict(stage.named_modules()).get(name)
        if found is not None:
            return found
    return None


def add_hooks(module: Any, flip: Flip) -> list[Any]:
    """Return hooks that flip a bit of an output, of its gradient, or of the weight in use."""
    done = False

    def change_output(_module: Any, _inputs: Any, output: Any) -> Any:
        nonlocal done
        tensor = output[0] if isinstance(output, tuple) else output
        if done:
            return None
        # A recomputation has the right values.
        done = True
        if flip.kind == "gradient":
            tensor.register_hook(change_gradient)
        else:
            flip_bit(tensor, flip.bit)
        return None

    def change_gradient(gradient: Tensor) -> Tensor:
        changed = gradient.clone(memory_format=torch.contiguous_format)
        flip_bit(changed, flip.bit)
        return changed

    def change_weight(_module: Any, _inputs: Any) -> None:
        flip_bit(module.weight.data, flip.bit)

    def restore_weight(_module: Any, _inputs: Any, _output: Any) -> None:
        flip_bit(module.weight.data, flip.bit)

    if flip.kind == "weight":
        return [
            module.register_forward_pre_hook(change_weight),
            module.register_forward_hook(restore_weight),
        ]
    return [module.register_forward_hook(change_output)]


def start_runs(cases: Sequence[str]) -> Iterator["Run"]:
    """Start one run after the other in this world, up to its first iteration."""
    from megatron.commands.parts import choose_parts, load_command_line
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.build import build_timers, divide_ranks, start_run
    from megatron.run.start.job import agree_on_job
    from megatron.run.start.launch import read_launch
    from megatron.run.start.meet import join_ranks

    world = read_launcher_world()
    ranks = None
    for case in cases:
        loaded = load_command_line(case.split(), "pretrain_gpt.py")
        launch = read_launch(loaded, choose_parts(loaded.config))
        ranks = ranks or join_ranks(launch)
        job = agree_on_job(launch, ranks)
        timers = build_timers(world)
        mesh = divide_ranks(job.plan, ranks, world, timers)
        run = start_run(launch, job, mesh, timers, None)
        yield run
        run.reporter.close()
        run.sources.close()


def compare_curves(cases: Sequence[str], steps: int) -> list[bool]:
    """Return for each command line whether its curve is the same with a replay in each step."""
    curves = []
    for run in start_runs([f"{case} --replay-interval {n}" for case in cases for n in (1, 0)]):
        curve = []
        assert run.sources.train is not None
        for iteration in range(1, steps + 1):
            batch = run.sources.train.read_batch(run.plan.batch_size.final, 32)
            if run.plan.config.parallel.replay_interval:
                run.replay.check(batch, iteration)
                replay: Any = run.replay
                assert replay._last_good == iteration, "the replay differs"
                assert replay._bounds is None, "the bits do not repeat"
            result = run.engine.train_batch(batch, iteration=iteration, lr=1e-3)
            # A step that overflows has a norm that is no number.
            curve.append(str((result.loss, result.grad_norm, result.experts)))
        checksums = [
            shard.tensor.double().sum().item() for shard in run.engine.shards(optimizer=True)
        ]
        curves.append((curve, checksums))
    return [one == other for one, other in zip(curves[::2], curves[1::2], strict=True)]


def find_flips(case: str, flips: Sequence[Flip]) -> list[str]:
    """Return the message of each flip."""
    from megatron.extras.watch.replay import MicrobatchReplay

    messages = []
    for run in start_runs([case]):
        assert run.sources.train is not None
        batch = run.sources.train.read_batch(run.plan.batch_size.final, 32)
        replay = MicrobatchReplay("exclude", run.mesh, run.engine, run.reporter.log)
        # The first pass after a start gathers once more, so the first replay has three passes.
        replay.check(batch, 1)
        for number, flip in enumerate(flips, 2):
            with plant(run, flip):
                try:
                    replay.check(batch, number)
                    messages.append("")
                except FaultyHostError as error:
                    messages.append(str(error))
        # All flips are gone.
        replay.check(batch, 1)
    return messages


def draw_flips(
    seed: int, modules: Mapping[int, Sequence[str]], bits: range, count: int
) -> list[Flip]:
    """Draw flips of all kinds. `modules` has those of each rank."""
    draw = random.Random(seed)
    flips = []
    for number in range(count):
        rank = draw.randrange(len(modules))
        kind = KINDS[number % len(KINDS)]
        names = [n for n in modules[rank] if kind != "weight" or "attention." in n or "mlp." in n]
        flips.append(Flip(rank, draw.choice(names), kind, draw.choice(bits)))
    return flips


PARTS = (
    *("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
    *("input_norm", "post_attention_norm"),
)
MODULES = {
    rank: [f"blocks.{layer}.{part}" for layer in layers for part in PARTS] + [end]
    for ranks, layers, end in ((range(4), (0, 1), "embedding"), (range(4, 8), (2, 3), "head.norm"))
    for rank in ranks
}
"""Modules of each rank of TP 2 x PP 2 x DP 2 with four layers."""


@pytest.mark.parametrize(
    ("flags", "bits", "count"),
    [
        ("--zero-stage 3 --sequence-parallel", range(31), 6),
        pytest.param("--zero-stage 3 --sequence-parallel", range(31), FLIPS, marks=FULL),
        pytest.param("--zero-stage 2 --checkpoint-activations", range(31), FLIPS, marks=FULL),
        # The sum of a number in 16 bits and the residual stream may not show its last bits.
        pytest.param("--zero-stage 1 --bf16", range(3, 15), FLIPS, marks=FULL),
        pytest.param(
            "--zero-stage 0 --fp16 --sequence-parallel --initial-loss-scale 4096",
            range(6, 15),
            FLIPS,
            marks=FULL,
        ),
    ],
)
def test_each_flipped_bit_is_found_on_its_rank(
    flags: str, bits: range, count: int, pool: ProcessPool
) -> None:
    case = f"{SIZES} {ALL_THREE} --global-batch-size 16 --train-iters 9 {NO_DROPOUT} {flags}"
    flips = draw_flips(7, MODULES, bits, count)
    outcomes = pool.run(8, find_flips, case, flips)
    succeed(outcomes)
    for flip, message in zip(flips, outcomes[0].value, strict=True):
        assert "1 rank differs first" in message, (flip, message)
        assert f"rank {flip.rank} on" in message, (flip, message)
        assert "pass 2 was wrong" in message, (flip, message)
    assert all(outcome.value == outcomes[0].value for outcome in outcomes)


DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
EIGHT = f"{SIZES} {DROPOUT} --global-batch-size 16 --train-iters 999"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-ffn-hidden-size 32 "
    "--glu-activation swiglu --moe-router-bias-update-rate 0.01 --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type global_aux_loss --num-layers 2"
)
CURVES = {
    "all three": f"{EIGHT} {ALL_THREE} --zero-stage 3 --checkpoint-activations --bf16",
    "hsdp": f"{EIGHT} --sharding-strategy hsdp --hsdp-shard-size 2 --fp16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --loss-scale-window 2 "
    "--initial-loss-scale 65536",
    "interleaved": f"{EIGHT} {ALL_THREE} --num-layers-per-virtual-pipeline-stage 1",
    "context, looped": f"{EIGHT} --context-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 4 --zero-stage 2",
    "four stages": f"{EIGHT} --pipeline-model-parallel-size 4 --checkpoint-activations "
    "--checkpoint-fraction 1/2 --untie-embeddings-and-output-weights",
    # Without dropout of attention, ranks of a sequence use masks that torch creates.
    "experts": f"{EIGHT} {EXPERTS} --bf16 --zero-stage 2 --context-parallel-size 2 {NO_DROPOUT}",
    "float8": f"{EIGHT} --bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-emulate "
    f"--tensor-model-parallel-size 2 {NO_DROPOUT} --hidden-size 64",
}
SHORT = [(8, "all three"), (8, "hsdp"), (4, "experts"), (2, "float8")]
"""The short suite trains these with the fewest ranks that divide the model and its copies."""


@pytest.mark.parametrize(("ranks", "name"), SHORT)
def test_curves_are_the_same_bits_with_a_replay_in_each_step(
    ranks: int, name: str, pool: ProcessPool
) -> None:
    # The smallest batch of the eight ranks.
    case = f"{CURVES[name]} --global-batch-size 8"
    outcomes = pool.run(ranks, compare_curves, [case], 2)
    succeed(outcomes)
    assert [outcome.value for outcome in outcomes] == [[True]] * ranks


@pytest.mark.full
@pytest.mark.parametrize("name", CURVES)
def test_healthy_iterations_give_no_alarm(name: str, pool: ProcessPool) -> None:
    outcomes = pool.run(8, compare_curves, [CURVES[name]], ITERATIONS)
    succeed(outcomes)
    assert all(outcome.value == [True] for outcome in outcomes)


def replay_compiled(case: str) -> bool:
    """Compute a replay of compiled blocks, and return whether it found no difference."""
    for run in start_runs([case]):
        assert run.sources.train is not None
        batch = run.sources.train.read_batch(run.plan.batch_size.final, 32)
        run.replay.check(batch, 1)
        replay: Any = run.replay
    return replay._last_good == 1 and replay._bounds is None


def test_compiled_blocks_run_uncompiled_in_a_replay(pool: ProcessPool) -> None:
    # Nothing is compiled, so the test takes no longer than another one.
    case = (
        f"{SIZES} {NO_DROPOUT} --global-batch-size 8 --train-iters 9 --use-torch-compile "
        "--tensor-model-parallel-size 2 --sequence-parallel --replay-interval 1"
    )
    outcomes = pool.run(2, replay_compiled, case)
    succeed(outcomes)
    assert all(outcome.value for outcome in outcomes)


def find_stored_flip(case: str) -> tuple[str, str]:
    """Flip a bit of a stored weight on rank 1. Return what the replay and the comparison of
    replicas say about it.
    """
    from megatron.base.errors import TrainingError
    from megatron.extras.watch.replay import MicrobatchReplay

    said = ["", ""]
    for run in start_runs([case]):
        assert run.sources.train is not None
        batch = run.sources.train.read_batch(run.plan.batch_size.final, 32)
        if run.mesh.rank == 1:
            name = "blocks.1.mlp.up.weight"
            shard = next(s for s in run.engine.shards(optimizer=False) if s.name == name)
            flip_bit(shard.tensor, 20)
        try:
            MicrobatchReplay("stop", run.mesh, run.engine, run.reporter.log).check(batch, 1)
        except FaultyHostError as error:
            said[0] = str(error)
        try:
            run.engine.check_invariants(repair=False, iteration=1, last_good=None)
        except TrainingError as error:
            said[1] = str(error)
    return said[0], said[1]


def test_the_comparison_of_replicas_finds_a_flipped_stored_weight(pool: ProcessPool) -> None:
    # Both passes of a replay use the same wrong weight.
    case = f"{SIZES} {NO_DROPOUT} --sharding-strategy ddp --global-batch-size 8 --train-iters 9"
    outcomes = pool.run(2, find_stored_flip, case)
    succeed(outcomes)
    by_replay, by_replicas = outcomes[0].value
    assert by_replay == ""
    assert "blocks.1.mlp.up.weight (weight) differs" in by_replicas
    assert "rank 1 on" in by_replicas


def add_noise(module: Any, noise: torch.Generator) -> None:
    """Change the output of a module by what two orders of a sum may differ by."""

    def change(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output * (1 + 1e-6 * torch.rand(output.shape, generator=noise))

    module.register_forward_hook(change)


def replay_with_noise(case: str, noisy: Sequence[int], flips: bool = True) -> tuple[list[str], str]:
    """Let a layer add other noise in each pass on some ranks, and then flip a bit.

    Return what each of two replays found, and what the log has.
    """
    from megatron.extras.watch.replay import MicrobatchReplay

    messages = []
    lines: list[str] = []
    for run in start_runs([case]):
        assert run.sources.train is not None
        batch = run.sources.train.read_batch(run.plan.batch_size.final, 32)
        noise = torch.Generator().manual_seed(run.mesh.rank)

        module = find_module(run, "blocks.1.attention.out")
        if run.mesh.rank in noisy and module is not None:
            add_noise(module, noise)
        replay = MicrobatchReplay("stop", run.mesh, run.engine, lines.append)
        flip_at_the_end = [Flip(1, "blocks.2.mlp.down", "activation", 24)] if flips else []
        for flip in (None, None, None, *flip_at_the_end):
            with plant(run, flip or Flip(99, "", "activation", 0)):
                try:
                    replay.check(batch, 1)
                    messages.append("")
                except FaultyHostError as error:
                    messages.append(str(error))
    return messages, "\n".join(lines)


@pytest.mark.parametrize(
    "flags", ["", pytest.param("--pipeline-model-parallel-size 2", marks=FULL)]
)
def test_a_kernel_that_does_not_repeat_is_no_alarm(flags: str, pool: ProcessPool) -> None:
    case = f"{SIZES} {NO_DROPOUT} --global-batch-size 8 --train-iters 9 {flags}"
    outcomes = pool.run(2, replay_with_noise, case, [0, 1])
    succeed(outcomes)
    messages, log = outcomes[0].value
    assert messages[:3] == ["", "", ""]
    # The exponent of the largest number of a layer's output changes.
    assert "rank 1 on" in messages[3]
    assert "does not repeat its bits, first in: output of layer 2" in log


def test_an_overflow_in_a_kernel_that_does_not_repeat_is_no_alarm(pool: ProcessPool) -> None:
    case = (
        f"{SIZES} {NO_DROPOUT} --global-batch-size 8 --train-iters 9 --fp16 "
        "--initial-loss-scale 1e12"
    )
    outcomes = pool.run(2, replay_with_noise, case, [0, 1], False)
    succeed(outcomes)
    assert outcomes[0].value[0] == ["", "", ""]


def test_a_device_that_does_not_repeat_is_an_alarm(pool: ProcessPool) -> None:
    case = f"{SIZES} {NO_DROPOUT} --global-batch-size 8 --train-iters 9"
    outcomes = pool.run(2, replay_with_noise, case, [1])
    succeed(outcomes)
    messages, log = outcomes[0].value
    assert all("1 rank differs first" in message for message in messages)
    assert all("rank 1 on" in message for message in messages)
    assert log == ""


# -- the order of dependence -----------------------------------------------------------------------


def send(link: str) -> Entry:
    return Entry(f"send {link}", link)


def receive(link: str) -> Entry:
    return Entry(f"receive {link}", link, sends=False, receives=True)


def reduce(link: str) -> Entry:
    return Entry(f"reduce {link}", link, receives=True)


def find(traces: Sequence[Sequence[tuple[Entry, bool]]]) -> list[int]:
    """Return the first ranks. Each trace has the entries of a rank, and whether each differs."""
    return find_first_ranks(
        [
            describe_difference([entry for entry, _ in trace], [wrong for _, wrong in trace])
            for trace in traces
        ]
    )


def test_the_last_rank_of_a_chain_is_named_though_its_counter_is_the_largest() -> None:
    local = Entry("output")
    # Rank 2 is wrong before the second reduction. The ranks before it see it later.
    assert find(
        [
            [(reduce("a"), False), (reduce("b"), False), (local, True)],
            [(reduce("a"), False), (local, True), (reduce("b"), True)],
            [*([(local, False)] * 5), (reduce("a"), True)],
        ]
    ) == [2]


def test_a_message_is_sent_before_those_that_are_received_with_it() -> None:
    # The first stage sends wrong activations, and starts to receive the gradients before.
    first = [(receive("back"), False), (send("on"), True), (Entry("gradient"), True)]
    second = [(receive("on"), False), (Entry("output"), True), (send("back"), True)]
    assert find([first, second]) == [0]
    assert sort_messages([entry for entry, _ in first]) == [1, 0, 2]


def test_two_faults_are_both_named() -> None:
    trace = [(Entry("output"), True), (reduce("a"), True)]
    assert find([trace, [(Entry("output"), False), (reduce("a"), False)], trace]) == [0, 2]


@pytest.mark.parametrize("place", [0, 1, 63])
def test_a_change_of_one_element_changes_each_measure_by_its_size(place: int) -> None:
    tensor = torch.arange(64, dtype=torch.float32).view(4, 16)
    changed = tensor.clone()
    changed.view(-1)[place] += 0.5
    apart = (compute_measures(changed) - compute_measures(tensor)).abs()
    assert apart[1:].tolist() == [0.5, 0.5, 0.5]


# -- runs ------------------------------------------------------------------------------------------


def pretrain_with_flip(argv: list[str]) -> None:
    """Run a command line. Rank 1 computes other numbers in one pass of the second iteration."""
    import torch.distributed as dist

    from megatron.engine import native

    engines: Any = native.NativeEngine
    original = engines.compute_and_drop_gradients
    passes = 0

    def compute(engine: Any, *arguments: Any) -> None:
        nonlocal passes
        passes += 1
        hooks: list[Any] = []
        # Each pass of the first iteration is as it should be.
        if arguments[1] == 2 and passes % 2 == 0 and dist.get_rank() == 1:
            block = engine.stages[0].get_blocks()[1]
            hooks = add_hooks(block.mlp.down, Flip(1, "", "activation", 24))
        original(engine, *arguments)
        for hook in hooks:
            hook.remove()

    engines.compute_and_drop_gradients = compute
    try:
        pretrain(argv)
    finally:
        engines.compute_and_drop_gradients = original


@pytest.mark.parametrize("action", ["warn", "stop", "exclude"])
def test_a_run_warns_or_ends(action: str, pool: ProcessPool, tmp_path: Path) -> None:
    argv = (
        f"{SIZES} {NO_DROPOUT} --sharding-strategy ddp --global-batch-size 8 --train-iters 3 "
        f"--log-interval 1 --replay-interval 1 --replay-action {action} --save {tmp_path}/run"
    ).split()
    outcomes = pool.run(2, pretrain_with_flip, argv)
    chronicle = (tmp_path / "run" / CHRONICLE).read_text()
    if action == "warn":
        printed = succeed(outcomes)
        assert "iteration        3/       3" in printed
        assert "warning: the replay of iteration 2: two passes" in printed
        assert "the replay of iteration 2" in chronicle
        assert "found no difference" in printed
        assert printed.count("replay: both passes of iteration 1 agree on 2 ranks") == 1
        assert "replay: 3 replays in this launch, 1 with a difference" in printed
        stop = parse_json(chronicle.splitlines()[-1])["details"]
        assert (stop["replays"], stop["replays_with_difference"]) == (3, 1)
        assert describe_stop(stop).endswith("; 3 replays, 1 with a difference")
        return
    assert {outcome.kind for outcome in outcomes} == {"FaultyHostError"}
    assert "rank 1 on" in str(outcomes[0].error)
    assert "the replay of iteration 2" in chronicle


def test_the_array_task_gets_the_host(tmp_path: Path) -> None:
    report = build_report(FaultyHostError("rank 1 on n2: output of layer 1", ["n2"]), {})
    starts = TrainingStarts.__new__(TrainingStarts)
    hosts = {"n1": 4, "n2": 4, "n3": 4}
    assert starts._find_faulty_hosts([report], hosts) == {
        "n2": "two passes of a replay differ there"
    }
    # More than half of the hosts have another cause.
    both = build_report(FaultyHostError("two", ["n1", "n2"]), {})
    assert starts._find_faulty_hosts([both], hosts) == {}
    # Without --replay-action exclude, a person decides.
    assert starts._find_faulty_hosts([build_report(FaultyHostError("x"), {})], hosts) == {}
