"""Complete trainings of several ranks, each with a fake GPU. Their messages on the host are real.

Messages between GPUs are not sent. So the ranks agree, write one checkpoint together, and load it,
but what a GPU would compute is 2 everywhere.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from cuda.fake_worlds import RankRun, train_worlds
from cuda.formulas import FFN, H, S
from cuda.test_runs import LATE_READING, count_waits, sum_copies

from megatron.extras.interop.inspection.verification import verify
from megatron.extras.planner.dry_run.process import call_in_pool, find_compiler, open_pool
from megatron.extras.planner.dry_run.record import StepTrace

VOCAB = 5000
PADDED_VOCAB = 5120
"""The next multiple of 128 x 2 tensor-parallel ranks."""


@dataclass(frozen=True)
class CheckpointSource:
    """A rank of a layout with 2 tensor-parallel and 2 data-parallel ranks."""

    tensor: int
    data: int
    layers: int
    """Layers of the rank."""
    first: bool
    """Whether the rank has the first stage."""
    last: bool


def count_rows(rows: int, rank: int) -> int:
    """Return the rows of the data-parallel rank. The first ranks have one more if it is uneven."""
    chunk = -(-rows // 2)
    return max(0, min(chunk, rows - rank * chunk))


def count_elements(place: CheckpointSource, *, stored: bool) -> int:
    """Return the elements that a rank stores, or those that it holds, without padding.

    One tensor-parallel rank stores what both hold, and the first stage stores the word embedding.
    """
    divided = [(3 * H // 2, H), (3 * H // 2, 1), (H, H // 2), (FFN // 2, H), (FFN // 2, 1)]
    divided = [*divided, (H, FFN // 2)] * place.layers
    # Biases of both outputs, and two norms.
    replicated = [(H, 1)] * 6 * place.layers
    if place.first:
        replicated.append((S, H))
    if place.last:
        replicated += [(H, 1), (H, 1)]
    if stored and place.tensor != 0:
        replicated = []
    total = sum(count_rows(rows, place.data) * columns for rows, columns in divided + replicated)
    if place.first or (place.last and not stored):
        held = PADDED_VOCAB // 2
        # The padding is at the end, on the last rank.
        begin = place.tensor * held + place.data * held // 2
        total += max(0, min(held // 2, VOCAB - begin)) * H
    return total


SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    f"--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --vocab-size {VOCAB} "
    "--train-iters 2 --log-interval 1 --save-interval 1 --eval-iters 0 --split 100,0,0 "
)
LAYOUTS = {
    "ZeRO 1": (8, "--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "ZeRO 3": (4, "--bf16 --tensor-model-parallel-size 2 --zero-stage 3"),
}


def locate(world_size: int) -> list[CheckpointSource]:
    """Return the places of the ranks. Tensor-parallel ranks are neighbours, stages far apart."""
    stages = world_size // 4
    return [
        CheckpointSource(rank % 2, rank // 2 % 2, 2 // stages, stage == 0, stage == stages - 1)
        for rank in range(world_size)
        for stage in [rank // 4]
    ]


TrainWorlds = Callable[[int, list[list[str]]], list[list[RankRun]]]


@pytest.fixture(scope="module")
def train_on_fake_gpus() -> Iterator[TrainWorlds]:
    """Yield `train_worlds`, which runs in one process for all worlds, so that torch loads once."""
    if find_compiler() is None:
        pytest.skip("the fake GPU needs a C++ compiler, and there is none")
    with open_pool(1) as pool:
        yield lambda world_size, runs: call_in_pool(pool, train_worlds, world_size, runs)


@pytest.fixture(scope="module", params=[pytest.param("ZeRO 1", marks=pytest.mark.full), "ZeRO 3"])
def runs(
    request: pytest.FixtureRequest,
    corpus: str,
    tmp_path_factory: pytest.TempPathFactory,
    train_on_fake_gpus: TrainWorlds,
) -> tuple[list[CheckpointSource], list[RankRun], list[RankRun], Path]:
    """Return the ranks' places, what they did in two runs, and the folder of the checkpoints.

    The first run saves after one step. The second one loads that, and saves asynchronously.
    """
    world_size, layout = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("world")
    arguments = [*(SHAPE + layout).split(), "--data-path", corpus, "--save", str(folder)]
    command_lines = [
        [*arguments, "--exit-interval", "1"],
        [*arguments, "--load", str(folder), "--async-save"],
    ]
    first, second = train_on_fake_gpus(world_size, command_lines)
    return locate(world_size), first, second, folder


def list_blocking(step: StepTrace) -> set[tuple[str, str]]:
    """Return the directions and files of all copies for which the host waits."""
    return {(each.direction, each.line.rsplit(":", 1)[0]) for each in step.copies if each.blocking}


NAMED = {
    # The initial weights are drawn on the CPU.
    ("to the GPU", "model/init.py"),
    # What the kernel of AdamW reads for each parameter, such as its weight decay.
    ("to the GPU", "extras/step/kernels/adamw.py"),
    # Digests of replicas. The copy of a step's loss and norm does not block.
    ("to the host", "engine/invariants.py"),
    # One sum of each tensor, which shows numbers that are not finite.
    ("to the host", "checkpoint/finite.py"),
}
"""The blocking copies of a run that saves asynchronously and loads nothing."""
WEIGHTS = ("checkpoint/tensor_file.py", "checkpoint/shard_file.py")


def test_a_save_copies_what_a_rank_stores_and_waits_for_it(runs):
    places, first, _, folder = runs
    for place, run in zip(places, first, strict=True):
        step = run.step
        # Weights and two moments in fp32.
        stored = 12 * count_elements(place, stored=True)
        assert sum_copies(step, WEIGHTS[0], blocking=True) == stored
        assert sum_copies(step, "checkpoint/", blocking=False) == 0
        assert count_waits(step, "checkpoint/finite.py") == 1
        assert list_blocking(step) == {*NAMED, ("to the host", WEIGHTS[0])}
    check_complete(folder / "global_step1", len(places))


def test_an_asynchronous_save_copies_the_same_and_only_its_thread_waits(runs):
    places, first, second, folder = runs
    for place, before, run in zip(places, first, second, strict=True):
        step = run.step
        stored = 12 * count_elements(place, stored=True)
        assert sum_copies(step, WEIGHTS[1], blocking=False) == stored
        assert sum_copies(step, WEIGHTS[0], blocking=True) == 0
        # The thread waits once, for all copies.
        assert count_waits(step, WEIGHTS[1]) == 1
        assert list_blocking(step) == {*NAMED, ("to the GPU", WEIGHTS[0])}
        # One read after the load, and one before the save.
        assert count_waits(step, "checkpoint/finite.py") == 2
        # One step was trained.
        assert count_waits(step, LATE_READING) == 1
        # Otherwise the thread would use GPU 0 of the host, whatever this rank's GPU is.
        assert before.chosen == ()
        assert run.chosen == ("cuda:0",)
    check_complete(folder / "global_step2", len(places))


def test_a_load_copies_what_a_rank_holds(runs):
    places, _, second, _ = runs
    for place, run in zip(places, second, strict=True):
        loaded = sum(
            each.size * count
            for each, count in run.step.copies.items()
            if each.direction == "to the GPU" and each.line.startswith("checkpoint/")
        )
        assert loaded == 12 * count_elements(place, stored=False)


@pytest.mark.full
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("flags", ["--fp16 --zero-stage 1", "--zero-stage 2", "--zero-stage 3"])
def test_ranks_of_deepspeed_write_one_checkpoint(
    flags: str, corpus: str, tmp_path: Path, train_on_fake_gpus: TrainWorlds
) -> None:
    precision = "" if "--fp16" in flags else "--bf16 "
    # DeepSpeed's timers begin after the second step.
    shape = SHAPE.replace("--train-iters 2", "--train-iters 4").replace("interval 1", "interval 2")
    arguments = f"{shape} {precision}{flags} --deepspeed --tensor-model-parallel-size 2".split()
    command_line = [*arguments, "--data-path", corpus, "--save", str(tmp_path)]
    (run,) = train_on_fake_gpus(4, [command_line])
    steps = [each.step for each in run]
    whole = sum(count_elements(place, stored=True) for place in locate(4))
    # Two saves. Partitions are cut at other elements than the native engine's shards.
    copied = sum(sum_copies(step, "checkpoint/tensor_file.py", blocking=True) for step in steps)
    assert copied == 2 * 12 * whole
    for step in steps:
        assert count_waits(step, "checkpoint/finite.py") == 2
        # Its timers would wait for the GPU in each microbatch. ZeRO 3 does so without them.
        causes = {each.cause for each in step.synchronisations if "deepspeed" in each.line}
        assert ("cuda.synchronize" in causes) == ("--zero-stage 3" in flags)
    check_complete(tmp_path / "global_step4", 4)


def check_complete(folder: Path, files: int) -> None:
    """Check that the files of all ranks hold each element of the model once."""
    found = verify(folder)
    assert found.damage == ()
    assert len(list(folder.glob("rank_*.safetensors"))) == files
    # The word embedding and the positions, 12 parameters of each layer, and the last norm.
    assert found.tensors == 3 * (2 + 12 * 2 + 2)
