"""Tests of the DeepSpeed engine: dropped steps, the loss scale, saves during training and loads."""

import json
import math
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from equivalence.corpus import NO_DROPOUT, command, curve
from process_pool import ProcessPool, pretrain, start_without_lease, succeed

from megatron.checkpoint.load import open_folder
from megatron.extras.interop.inspection.comparison import compare
from megatron.observe.metrics import read_metrics

# `importorskip` would import the package, which takes long, while tests are collected.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

ROOT = Path(__file__).resolve().parents[2]
WRONG_AT = 3
LAYOUTS = {
    "one process": (1, "--micro-batch-size 4"),
    "tp2": (2, "--tensor-model-parallel-size 2 --micro-batch-size 4"),
    "dp2-zero1": (2, "--zero-stage 1 --micro-batch-size 2"),
    "dp2-zero2": (2, "--zero-stage 2 --micro-batch-size 1"),
    "dp2-zero3": (2, "--zero-stage 3 --micro-batch-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --micro-batch-size 2"),
    "dp2-zero2-offload": (2, "--zero-stage 2 --cpu-optimizer --micro-batch-size 2"),
    "pp2-offload": (2, "--pipeline-model-parallel-size 2 --cpu-optimizer --micro-batch-size 2"),
    "pp4": (4, "--pipeline-model-parallel-size 4 --micro-batch-size 2"),
}
VICTIMS = {"pp4": 1}
"""The rank that is disturbed: a stage in the middle. In other layouts it is the last rank."""


def pretrain_with_infinity(argv: list[str], victim: int) -> tuple[list[bool], list[bool]]:
    """Train with an infinity in one gradient of rank `victim` in the third step.

    Returns:
        For each step whether it was applied, and for each step whether the weights changed.
    """
    from megatron.engine.base import StepResult
    from megatron.extras.step.deepspeed.deepspeed import DeepSpeedEngine

    applied: list[bool] = []
    changed: list[bool] = []
    original = DeepSpeedEngine.train_batch

    def copy_state(engine: DeepSpeedEngine) -> list[torch.Tensor]:
        return [shard.tensor.clone() for shard in engine.shards(optimizer=True)]

    def train_and_disturb(
        engine: DeepSpeedEngine, *arguments: object, **keywords: object
    ) -> StepResult:
        handle = None
        if len(changed) + 1 == WRONG_AT and int(os.environ["RANK"]) == victim:
            parameter = next(
                p
                for name, p in engine.stages[0].named_parameters()
                if name.endswith("input_norm.weight")
            )
            handle = parameter.register_hook(lambda gradient: gradient * torch.inf)
        before = copy_state(engine)
        result = original(engine, *arguments, **keywords)  # type: ignore[arg-type]
        if handle is not None:
            handle.remove()
        changed.append(not all(map(torch.equal, before, copy_state(engine))))
        applied.append(result.applied)
        return result

    DeepSpeedEngine.train_batch = train_and_disturb  # type: ignore[method-assign, assignment]
    try:
        pretrain(argv)
    finally:
        DeepSpeedEngine.train_batch = original  # type: ignore[method-assign]
    return applied, changed


PRECISIONS = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --initial-loss-scale 1024 --hysteresis 1",
}
SHORT = {("dp2-zero2", "fp16"), ("pp2", "bf16"), ("dp2-zero3", "fp32"), ("pp4", "fp16")}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(
            layout, precision, marks=() if (layout, precision) in SHORT else pytest.mark.full
        )
        for layout in LAYOUTS
        for precision in PRECISIONS
    ],
)
def test_an_infinity_on_one_rank_drops_the_step_on_all(
    layout: str, precision: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[layout]
    argv = command(
        tmp_path,
        corpus,
        "gpt2",
        "ramp",
        NO_DROPOUT,
        flags,
        PRECISIONS[precision],
        "--deepspeed --exit-interval 6 --no-save-optim",
    )
    outcomes = pool.run(ranks, pretrain_with_infinity, argv, VICTIMS.get(layout, ranks - 1))
    succeed(outcomes)
    expected = [step != WRONG_AT for step in range(1, 7)]
    for outcome in outcomes:
        assert outcome.value == (expected, expected)
    entry = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "lm_loss" in entry][
        WRONG_AT - 1
    ]
    assert not math.isfinite(entry["grad_norm"])


EQUAL_MICROBATCHES = 64
SMALL = "--fp16 --loss-scale 65536 --num-layers 2 --seq-length 32 --curriculum-difficulties 16 32"


def measure_norms_of_equal_microbatches(argv: list[str]) -> tuple[float, float]:
    """Return the gradient norm of one microbatch, and of many that are the same."""
    run = start_without_lease(argv)
    assert run.sources.train is not None
    microbatch = run.sources.train.read_batch(run.plan.batch_size.final)[0]
    one = run.engine.train_batch([microbatch], iteration=1, lr=0.0)
    many = run.engine.train_batch([microbatch] * EQUAL_MICROBATCHES, iteration=2, lr=0.0)
    return one.grad_norm, many.grad_norm


PP2 = "--pipeline-model-parallel-size 2"
NORM_LAYOUTS = LAYOUTS | {
    "pp3-dp2": (6, "--pipeline-model-parallel-size 3 --num-layers 3 --micro-batch-size 1"),
    "pp4": (4, "--pipeline-model-parallel-size 4 --num-layers 4 --micro-batch-size 1"),
    "tp2-pp2-sp": (
        4,
        f"--tensor-model-parallel-size 2 {PP2} --sequence-parallel --micro-batch-size 1",
    ),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "pp2" else pytest.mark.full) for name in NORM_LAYOUTS],
)
def test_fp16_gradients_are_accumulated_in_fp32(
    layout: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """Many equal microbatches have the gradient norm of one, and that of the native engine.

    Sums in fp16 are wrong by 1e-4.
    """
    ranks, flags = NORM_LAYOUTS[layout]
    shared = corpus, "gpt2", "curriculum", NO_DROPOUT, SMALL, flags
    norms = {}
    for engine in ("--deepspeed", "--no-cpu-optimizer"):
        outcomes = pool.run(
            ranks, measure_norms_of_equal_microbatches, command(tmp_path / engine, *shared, engine)
        )
        succeed(outcomes)
        norms[engine] = outcomes[0].value
    one, many = norms["--deepspeed"]
    assert many == pytest.approx(one, rel=5e-6)
    assert many == pytest.approx(norms["--no-cpu-optimizer"][1], rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp2-zero1", "dp2-zero2", "dp2-zero3", "pp2", "pp4"])
def test_the_search_for_a_loss_scale_ends_where_the_native_engines_does(
    layout: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """Both engines add gradients up in fp32, over microbatches and over ranks."""
    ranks, flags = LAYOUTS[layout]
    steps = {}
    for engine in ("", "--deepspeed"):
        folder = tmp_path / f"engine{engine}"
        shared = (
            NO_DROPOUT,
            flags,
            "--fp16 --initial-loss-scale 1073741824 --hysteresis 1 --train-samples 300",
            engine,
        )
        succeed(pool.run(ranks, pretrain, command(folder, corpus, "gpt2", "ramp", *shared)))
        steps[engine] = [
            entry for entry in read_metrics(folder / "metrics.jsonl") if "loss_scale" in entry
        ]
    native = steps[""]
    deepspeed = steps["--deepspeed"]
    assert len({entry["loss_scale"] for entry in native}) > 5
    assert [entry["loss_scale"] for entry in deepspeed] == [entry["loss_scale"] for entry in native]
    trained = [
        (a["lm_loss"], b["lm_loss"])
        for a, b in zip(native, deepspeed, strict=True)
        if a["lm_loss"] and b["lm_loss"]
    ]
    assert len(trained) > 3
    assert all(abs(a - b) < 0.01 * a for a, b in trained)


def pretrain_with_slow_copies(argv: list[str]) -> None:
    """Train with copies that start only after the next step has started."""
    from megatron.checkpoint import stages

    original = stages.copy_to_host

    def copy_late(*arguments):
        time.sleep(0.5)
        return original(*arguments)

    with mock.patch.object(stages, "copy_to_host", copy_late):
        pretrain(argv)


@pytest.mark.parametrize(
    "layout",
    [
        "dp2-zero2",
        pytest.param("pp2", marks=pytest.mark.full),
        pytest.param("dp2-zero3", marks=pytest.mark.full),
    ],
)
def test_an_async_save_equals_a_synchronous_save(
    layout: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """The update waits for the copy. Otherwise the copy would mix two steps."""
    ranks, flags = LAYOUTS[layout]
    for folder, how in (("between", ""), ("during", "--async-save")):
        shared = NO_DROPOUT, flags, "--deepspeed --save-interval 2", how
        succeed(
            pool.run(
                ranks,
                pretrain_with_slow_copies,
                command(tmp_path / folder, corpus, "gpt2", "ramp", *shared),
            )
        )
    assert curve(tmp_path / "during") == curve(tmp_path / "between")
    for iteration in (2, 4, 6, 8, 10):
        between, during = (
            open_folder(tmp_path / folder / f"global_step{iteration}")
            for folder in ("between", "during")
        )
        found = compare(between, during)
        assert len(found.tensors) > 100
        assert found.equal


def measure_losses_of_zero_weights(argv: list[str]) -> tuple[float, float]:
    """Return the loss after one step, and after all weights were set to zero through the shards."""
    run = start_without_lease(argv)
    assert run.sources.train is not None
    batch = run.sources.train.read_batch(run.plan.batch_size.final)
    run.engine.train_batch(batch, iteration=1, lr=1e-3)
    trained = run.engine.eval_batch(batch)
    for shard in run.engine.shards(optimizer=False):
        shard.tensor.zero_()
    run.engine.finish_load(None)
    return trained, run.engine.eval_batch(batch)


@pytest.mark.parametrize(
    "layout",
    [
        # ZeRO 2 has the buffers of ZeRO 1, and four stages have what two have.
        pytest.param(
            layout,
            marks=pytest.mark.full if layout in ("one process", "tp2", "dp2-zero1", "pp2") else (),
        )
        for layout in LAYOUTS
    ],
)
def test_the_model_computes_with_loaded_weights(
    layout: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """A model whose loaded weights are zero gives each of its 5000 ids the same probability.

    The load comes after a step, when ZeRO 3 has gathered small parameters.
    """
    ranks, flags = LAYOUTS[layout]
    argv = command(tmp_path, corpus, "gpt2", "curriculum", NO_DROPOUT, flags, "--deepspeed --bf16")
    outcomes = pool.run(ranks, measure_losses_of_zero_weights, argv)
    succeed(outcomes)
    for outcome in outcomes:
        trained, zeros = outcome.value
        assert zeros == pytest.approx(math.log(5000), rel=1e-4)
        assert trained != zeros


def test_a_refusal_by_deepspeed_names_its_json(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"log_level": "loud"}')
    argv = command(
        tmp_path,
        corpus,
        "gpt2",
        "ramp",
        NO_DROPOUT,
        f"--micro-batch-size 4 --deepspeed --deepspeed_config {path}",
    )
    outcome = pool.run(1, pretrain, argv)[0]
    assert outcome.kind == "ConfigError", outcome.output
    assert f"{path}: DeepSpeed refuses it" in str(outcome.error)
    assert "loud" in str(outcome.error)


def pretrain_and_count_waits(argv: list[str]) -> int:
    """Train, and return how often DeepSpeed's timers wait for the device."""
    import deepspeed.utils.timer
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    waits: list[str] = []

    def synchronize(device: int | None = None) -> None:
        caller = sys._getframe(1).f_code.co_filename
        if caller == deepspeed.utils.timer.__file__:
            waits.append(caller)

    with mock.patch.object(accelerator, "synchronize", synchronize):
        pretrain(argv)
    return len(waits)


def test_the_throughput_timer_does_not_wait_for_the_device(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """The timer starts after two steps. It then waits twice in each microbatch if it is on.

    DeepSpeed's pipeline starts the timer and never stops it, so it never waits there.
    """
    path = tmp_path / "ds_config.json"
    path.write_text('{"timers": {"throughput": {"enabled": true}}}')
    ranks, flags = LAYOUTS["one process"]
    waits = []
    for name, config in (("off", ""), ("on", f"--deepspeed_config {path}")):
        argv = command(
            tmp_path / name,
            corpus,
            "gpt2",
            "ramp",
            NO_DROPOUT,
            flags,
            f"--deepspeed --exit-interval 6 {config}",
        )
        outcomes = pool.run(ranks, pretrain_and_count_waits, argv)
        succeed(outcomes)
        waits.append(outcomes[0].value)
    # Steps 3 to 6 have 1, 1, 2 and 2 microbatches of 4 samples.
    assert waits == [0, 2 * (1 + 1 + 2 + 2)]


def pretrain_in_own_folder(argv: list[str], folder: str) -> None:
    """Train in a folder of this rank, as on hosts that do not share a disk."""
    here = Path.cwd()
    os.chdir(Path(folder) / os.environ["RANK"])
    try:
        pretrain(argv)
    finally:
        os.chdir(here)


def test_ranks_whose_json_differs_are_named(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        size = {"zero_optimization": {"reduce_bucket_size": 1000 + rank}}
        (tmp_path / str(rank) / "ds_config.json").write_text(json.dumps(size))
    flags = "--micro-batch-size 2 --deepspeed --deepspeed_config ds_config.json"
    argv = command(tmp_path, corpus, "gpt2", "ramp", NO_DROPOUT, flags)
    for outcome in pool.run(2, pretrain_in_own_folder, argv, str(tmp_path)):
        assert outcome.kind == "LayoutError", outcome.output
        assert "1001" in str(outcome.error)
        assert "its ds_config.json passes" in str(outcome.error)


def test_one_process_needs_no_launcher_and_no_port(corpus: str, tmp_path: Path) -> None:
    argv = command(
        tmp_path,
        corpus,
        "gpt2",
        "ramp",
        NO_DROPOUT,
        "--micro-batch-size 4 --deepspeed --exit-interval 1",
    )
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launched} | {
        "OMP_NUM_THREADS": "1"
    }
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *argv],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        1/" in done.stdout
    assert done.stderr == ""
