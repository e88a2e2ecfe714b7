"""Tests of the verification: healthy runs pass, and known errors of trainers are found."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny_corpus import MERGES, VOCAB
from verify.mutation import ITERATIONS, MODEL, PP, RUN_CHECKS, TP
from verify.mutations import MUTATIONS
from verify.random_runs import draw_expert_run, draw_run, draw_triple
from verify.verifier import Verifier

from megatron.base import exit_codes
from megatron.base.errors import ConfigError
from megatron.commands.verify import VerifyArguments, main, resolve_command
from megatron.extras.planner.verify import verification
from megatron.extras.planner.verify.comparison import compare_records, count_flips
from megatron.extras.planner.verify.recording import RankRecord, RecordedStep, RoundedOperand
from megatron.extras.planner.verify.reduction import (
    find_common_size,
    reduce_plan,
    use_own_precision,
)
from megatron.extras.planner.verify.reference import ReferenceRun
from megatron.extras.planner.verify.report import describe_layout
from megatron.extras.step.float8.recipe import list_float8_layers
from megatron.parallel.grid import GridCoordinate

SHORT = {
    "gradients of norms are not summed under sequence parallelism",
    "an overflow is not seen by another stage",
    "learned positions restart on each slice of the sequence",
    "interleaved stages start from equal weights",
    "samples are read twice after a resume",
    "gradients of experts are divided by fewer ranks",
    "gradients of keys are not summed over the ranks of a sequence",
    "gradients are clipped on the first tensor rank only",
}
"""The mutations of the short suite."""
IRREGULAR = (
    "--num-layers 7 --tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --num-query-groups 1 --rampup-batch-size 16 16 640 "
    "--global-batch-size 64 --train-samples 6400 --checkpoint-activations --eod-mask-loss "
    f"--goldfish-loss --vocab-file {VOCAB} --merge-file {MERGES} --vocab-size 5000"
)
LONG = (
    "--seq-length 192 --sequence-parallel --tensor-model-parallel-size 2 --sliding-window 16 "
    "--position-embedding-type rotary --rope-scaling llama3 --rope-original-length 64 "
    "--num-query-groups 2 --full-attention-layers 1::2 --no-rope-layers 1::2 --eod-mask-loss "
    "--reset-position-ids --reset-attention-mask --global-batch-size 16 --train-iters 100 "
    f"--recompute-attention-core --vocab-file {VOCAB} --merge-file {MERGES} --vocab-size 5000"
)
FLOAT8 = (
    "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 "
    "--num-layers-at-end-in-bf16 3 --fp8-start-iteration 50"
)
EP = "--num-experts 16 --expert-model-parallel-size"
SETTINGS_OF_NO_COPY = (
    "--skip-train-iteration-range 2-3",
    "--moe-router-load-balancing-type global_aux_loss",
    "--muon-fp32-matmul-prec medium",
    "--use-torch-compile",
    "--spike-guard skip-step",
)
EXAMPLES = int(os.environ.get("VERIFY_EXAMPLES", "20"))
"""Number of random runs. docs/tests.md says how many ran, and what they found."""


@pytest.mark.parametrize(
    ("precision", "comparisons"),
    [
        ("", 13),
        pytest.param("--bf16", 18, marks=pytest.mark.full),
        pytest.param(f"--bf16 {FLOAT8}", 19, marks=pytest.mark.full),
    ],
)
def test_an_irregular_run_equals_one_process(
    precision: str, comparisons: int, verifier: Verifier
) -> None:
    report = verifier.run(f"{IRREGULAR} {precision}", 16)
    assert report["verified"], report
    assert report["lost"] == ["more than two tensor-parallel ranks"]
    assert "query groups that ranks share" in report["kept"]
    assert "stages of unequal size" in report["kept"]
    assert len(report["comparisons"]) == comparisons
    assert (report["float8_flips"] is None) == (FLOAT8 not in precision)
    if report["float8_flips"] is not None:
        flipped, values = report["float8_flips"]
        assert values > 10_000
        # Sums in bf16 differ by up to 2^-8, and numbers of e4m3 by 2^-3.
        assert flipped < 0.05 * values
    assert report["copy"]["processes"] == 8


SHARED_SEQUENCES = {
    "ranks of one sequence": (
        f"{LONG} --context-parallel-size 8",
        16,
        "tensor 2 x pipeline 1 x data 1 x context 4",
        ["windows of which only the keys are sent", "more than two ranks of a sequence"],
        [],
    ),
    # A copy of the model is within the ranks of a sequence, and a window needs all keys.
    "copies": (
        f"{LONG} --context-parallel-size 4 --sharding-strategy hsdp --hsdp-shard-size 2 "
        "--sliding-window 180 --bf16",
        8,
        "tensor 2 x pipeline 1 x data 1 x context 4",
        ["several copies of the model", "copies that are sharded"],
        [],
    ),
    "heads": (
        f"{LONG} --context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 16 "
        "--num-query-groups 4 --curriculum-schedule-type fixed_linear --train-tokens 100000 "
        "--curriculum-min-difficulty 64 --curriculum-difficulty-step 16 "
        "--curriculum-total-step 20 --lr-decay-tokens 90000 --pipeline-model-parallel-size 2",
        32,
        "tensor 2 x pipeline 2 x data 1 x context 2",
        ["exchange of heads between ranks of a sequence", "a sequence length that changes"],
        [
            "more than two ranks of a sequence",
            "data parallelism",
            "more than two shards of each copy",
        ],
    ),
    # The length is divided by 2 x 3.
    "three": (
        "--context-parallel-size 3 --seq-length 48 --position-embedding-type alibi "
        "--goldfish-loss --global-batch-size 16 --train-iters 100 --attention-dropout 0",
        6,
        "tensor 1 x pipeline 1 x data 2 x context 3",
        ["context parallelism", "dropout", "masked tokens"],
        [],
    ),
}
"""The flags and processes of a run, the layout of its copy, and features that it has or lacks."""


@pytest.mark.parametrize("name", SHARED_SEQUENCES)
def test_the_layout_of_a_copy_with_shared_sequences(name: str, tmp_path: Path) -> None:
    flags, world_size, layout, kept, lost = SHARED_SEQUENCES[name]
    arguments = VerifyArguments(world_size=world_size)
    reduction = reduce_plan(resolve_command(arguments, f"{MODEL} {flags}".split())[0], tmp_path)
    assert describe_layout(reduction.plan) == layout
    assert set(kept) <= set(reduction.kept)
    assert list(reduction.lost) == lost
    sliding = reduction.plan.config.model.sliding_window
    # A window of three quarters of 32 tokens needs all keys.
    assert name != "copies" or sliding == 32 - 8 + 2


@pytest.mark.parametrize(
    ("flags", "world_size", "data", "lost"),
    [
        ("--pipeline-model-parallel-size 2", 8, 3, []),
        ("--pipeline-model-parallel-size 2", 16, 2, ["more than two data-parallel ranks"]),
        (
            "--sharding-strategy hsdp --hsdp-shard-size 4 --micro-batch-size 1",
            32,
            4,
            ["more than two shards of each copy", "more than two copies of the model"],
        ),
    ],
)
def test_a_copy_names_the_ranks_that_it_has_no_room_for(
    flags: str, world_size: int, data: int, lost: list[str], tmp_path: Path
) -> None:
    """The first run has no tensor parallelism, and its copy has six processes."""
    tensor = 1 if world_size == 8 else 2
    flags = f"{MODEL} {ITERATIONS} {flags} --tensor-model-parallel-size {tensor}"
    arguments = VerifyArguments(world_size=world_size)
    reduction = reduce_plan(resolve_command(arguments, flags.split())[0], tmp_path)
    assert reduction.plan.grid.data == data
    assert list(reduction.lost) == lost
    assert ("more than two data-parallel ranks" in reduction.kept) == (data > 2)


@pytest.mark.parametrize(("sizes", "copied"), [("1,1,1,1", "1,1,1"), ("1,2,1,2", "2,1,1")])
def test_a_copy_has_given_sizes_of_stages(sizes: str, copied: str, tmp_path: Path) -> None:
    layers = 4 if sizes == "1,1,1,1" else 6
    flags = (
        f"{MODEL} {ITERATIONS} --num-layers {layers} --pipeline-model-parallel-size 4 "
        f"--pp-partition-method layers:{sizes}"
    )
    arguments = VerifyArguments(world_size=4)
    reduction = reduce_plan(resolve_command(arguments, flags.split())[0], tmp_path)
    assert reduction.plan.config.parallel.pp_partition_method == f"layers:{copied}"
    assert not reduction.lost


TOO_FEW = "more than two ranks that divide the experts"
EXPERT_COPIES = {
    # Flags and processes of a run, --processes, the layout of its copy, the ranks that divide its
    # experts and share a copy of the model, and what it lacks.
    "tensor-parallel ranks": (f"{EP} 4 {TP}", 8, 8, "tensor 2 x pipeline 1 x data 4", (4, 4), []),
    "stages": (
        f"{EP} 4 {TP} {PP}",
        16,
        8,
        "tensor 2 x pipeline 2 x data 2",
        (2, 2),
        [
            "more than two data-parallel ranks",
            TOO_FEW,
            "experts that ranks divide over data-parallel ranks",
        ],
    ),
    "stages of 16": (f"{EP} 4 {TP} {PP}", 16, 16, "tensor 2 x pipeline 2 x data 4", (4, 4), []),
    "ranks of a sequence": (
        f"{EP} 4 --context-parallel-size 2",
        8,
        8,
        "tensor 1 x pipeline 1 x data 4 x context 2",
        (4, 8),
        [],
    ),
    "copies": (
        f"{EP} 2 --sharding-strategy hsdp --hsdp-shard-size 4",
        8,
        8,
        "tensor 1 x pipeline 1 x data 8",
        (2, 4),
        [],
    ),
    "several copies": (
        f"{EP} 4 --sharding-strategy hsdp --hsdp-shard-size 2 --micro-batch-size 1",
        16,
        8,
        "tensor 1 x pipeline 1 x data 8",
        (4, 2),
        ["more than two copies of each expert"],
    ),
    "all": (
        f"{EP} 4",
        4,
        8,
        "tensor 1 x pipeline 1 x data 2",
        (2, 2),
        ["more than two data-parallel ranks"],
    ),
}


@pytest.mark.parametrize("name", EXPERT_COPIES)
def test_a_copy_has_copies_of_experts_if_the_run_has_them(name: str, tmp_path: Path) -> None:
    flags, world_size, processes, layout, shards, lost = EXPERT_COPIES[name]
    words = f"{MODEL} {ITERATIONS} {flags}".split()
    plan, _ = resolve_command(VerifyArguments(world_size=world_size), words)
    reduction = reduce_plan(plan, tmp_path, processes)
    assert describe_layout(reduction.plan) == layout
    assert (reduction.plan.expert_size, reduction.plan.shard_size) == shards
    assert list(reduction.lost) == lost


@pytest.mark.parametrize(
    ("flags", "lost"),
    [
        (
            f"{EP} 2 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
            True,
        ),
        ("--use-torch-compile", True),
        ("--spike-guard skip-step", True),
        ("--skip-train-iteration-range 2-3", True),
        (f"{EP} 2 --bf16", True),
        ("--bf16 --grad-reduce-in-bf16", False),
        ("--fp16 --loss-scale 128", False),
        # Without a run in 16 bits, no copy has such products.
        ("--optimizer muon --muon-fp32-matmul-prec medium", True),
        ("--optimizer muon --muon-nesterov --bf16", False),
        ("--weight-decay 0.3 --adam-eps 1e-7 --clip-grad 0.5 --eval-iters 7", False),
    ],
)
def test_a_setting_that_no_copy_has_is_listed(flags: str, lost: bool, tmp_path: Path) -> None:
    words = f"{MODEL} {ITERATIONS} {flags}".split()
    plan, _ = resolve_command(VerifyArguments(world_size=2), words)
    names = [each for each in reduce_plan(plan, tmp_path).lost if each.startswith("--")]
    expected = [each for each in (*SETTINGS_OF_NO_COPY, "--bf16") if each in flags]
    assert names == (expected if lost else [])


SMALLEST = (
    "--micro-batch-size 1 --tensor-model-parallel-size 2 --rampup-batch-size 8 8 800 "
    "--global-batch-size 64 --train-samples 64000"
)
"""A ramp of the batch size on one data-parallel rank. One sample divides the sizes of its copy."""


@pytest.mark.parametrize(
    ("flags", "micro"),
    [(f"{SMALLEST} --bf16", 2), (SMALLEST, 1), (f"{ITERATIONS} --micro-batch-size 1 --bf16", 1)],
)
def test_two_micro_batch_sizes_divide_the_batches_of_a_copy(
    flags: str, micro: int, tmp_path: Path
) -> None:
    """Otherwise both runs that give the bound in the run's precision are the same run."""
    arguments = VerifyArguments(world_size=2)
    reduction = reduce_plan(resolve_command(arguments, f"{MODEL} {flags}".split())[0], tmp_path)
    assert reduction.plan.config.batch.micro_batch_size == micro
    assert find_common_size(reduction.plan) > 1 or "--bf16" not in flags


@pytest.mark.full
@pytest.mark.parametrize("flags", ["--bf16", "--fp16", "--bf16 --optimizer muon"])
def test_a_ramp_of_small_batches_is_no_alarm(flags: str, verifier: Verifier) -> None:
    report = verifier.run(f"{SMALLEST} {flags}", 2)
    assert report["verified"], report


@pytest.mark.parametrize("precision", ["--bf16", "--fp8-emulate"])
def test_the_copy_in_the_runs_precision_has_float8(precision: str, tmp_path: Path) -> None:
    """Some sizes of a copy without float8 would be no multiples of 16."""
    arguments = VerifyArguments(world_size=16)
    flags = f"{MODEL} {IRREGULAR} {FLOAT8} {precision} --ffn-hidden-size 160"
    plan = resolve_command(arguments, flags.split())[0]
    reduction = reduce_plan(plan, tmp_path)
    assert "float8 (emulated, in the run's precision only)" in reduction.kept
    own = use_own_precision(reduction, plan.config)
    assert own is not None
    assert own.precision.fp8_emulate
    assert own.precision.fp8_start_iteration == 2
    assert list(list_float8_layers(own)) == list(range(1, own.model.num_layers - 1))
    assert own.model.hidden_size % 16 == 0
    assert own.model.ffn_hidden_size is not None
    assert own.model.ffn_hidden_size % 16 == 0


def test_flips_of_float8_are_counted() -> None:
    """Two ranks have the columns, and a recomputation has all values again."""
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-0.0, 6.0, 7.0, 8.0]])
    other = values.clone()
    other[1] = torch.tensor([0.0, 6.5, 7.0, 9.0])

    def record(*parts: torch.Tensor) -> RankRecord:
        rounded = [part.to(torch.float8_e4m3fn) for part in parts]
        operands = tuple(
            RoundedOperand("input of x", None, each, torch.ones(())) for each in rounded
        )
        step = SimpleNamespace(operands=operands)
        return RankRecord(GridCoordinate(0, 0, 0), [cast(RecordedStep, step)])

    ranks = [record(*[part] * 2) for part in other.chunk(2, dim=1)]
    assert count_flips(ranks, record(values), 0) == (2, 8)
    assert count_flips([record(values, values)], record(values), 0) == (0, 8)


def test_a_launch_without_records_is_compared() -> None:
    """A rank that is ended after the error of another one writes no record."""
    flags = f"{MODEL} {ITERATIONS} {TP}".split()
    plan = resolve_command(VerifyArguments(world_size=2), flags)[0]
    assert compare_records(plan, ReferenceRun({}), [[]]) == []


@pytest.mark.full
@pytest.mark.parametrize("name", SHARED_SEQUENCES)
def test_ranks_of_a_sequence_equal_one_process(name: str, verifier: Verifier) -> None:
    flags, world_size, layout, _, _ = SHARED_SEQUENCES[name]
    report = verifier.run(flags, world_size)
    assert report["verified"], report
    assert report["copy"]["layout"] == layout


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            n, id=m.name.replace(" ", "-"), marks=() if m.name in SHORT else pytest.mark.full
        )
        for n, m in enumerate(MUTATIONS)
    ],
)
def test_a_known_error_is_found(number: int, verifier: Verifier) -> None:
    report = verifier.run_mutation(number)
    assert not report["verified"]
    if MUTATIONS[number].caught_by in RUN_CHECKS:
        _, error = RUN_CHECKS[MUTATIONS[number].caught_by]
        assert error in report["errors"][0]
        return
    assert report["failed"] == MUTATIONS[number].caught_by
    assert str(report["first_difference"]).startswith(MUTATIONS[number].first)


@pytest.mark.full
@pytest.mark.parametrize("numbers", [range(n, n + 6) for n in range(0, len(MUTATIONS), 6)], ids=str)
def test_the_runs_of_the_mutations_are_healthy(numbers: range, verifier: Verifier) -> None:
    """Without the error, the same run passes. So the error is what is found."""
    for number in numbers:
        if number < len(MUTATIONS):
            report = verifier.run_mutation(number, healthy=True)
            assert report["verified"], MUTATIONS[number].name


@pytest.mark.full
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(run=st.one_of(draw_run(), draw_triple(), draw_expert_run()))
def test_no_false_alarm_on_random_runs(run: tuple[str, int], verifier: Verifier) -> None:
    flags, world_size = run
    try:
        resolve_command(VerifyArguments(world_size=world_size), f"{MODEL} {flags}".split())
    except ConfigError:
        assume(False)
    report = verifier.run(flags, world_size)
    assert report["verified"], (flags, world_size, report["failed"], report["comparisons"])


@pytest.mark.full
def test_deepspeed_is_compared_like_the_native_engine(verifier: Verifier) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    flags = "--deepspeed --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    report = verifier.run(f"{ITERATIONS} {flags} --zero-stage 1 --fp16", 8)
    assert report["verified"], report
    assert "DeepSpeed" in report["kept"]


def test_too_little_time_is_no_verdict(verifier: Verifier) -> None:
    code, output = verifier.call("--world-size 2 --time-limit 0.01")
    assert code == exit_codes.OUT_OF_TIME
    assert "ranks [0] still run after 0.01 s" in output
    assert "--time-limit 0.04 allows more time" in output
    assert "a launch had too little time (--time-limit)" in output.splitlines()[-1]
    assert "--time-limit 0 must be above 0" in verifier.call("--world-size 2 --time-limit 0")[1]


def test_the_time_limit_follows_the_cores_and_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification.os, "sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(verification.os, "getloadavg", lambda: (1.0, 9.0, 9.0))
    assert verification.choose_limit(2) == verification.LIMIT_SECONDS
    assert verification.choose_limit(8) == verification.LIMIT_SECONDS * 9 / 4


@pytest.mark.parametrize(("processes", "pipeline"), [(8, 2), (12, 3)])
def test_more_processes_have_a_third_stage(processes: int, pipeline: int, tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
    words = f"{MODEL} {ITERATIONS} {flags} --global-batch-size 32".split()
    plan, _ = resolve_command(VerifyArguments(world_size=64), words)
    reduction = reduce_plan(plan, tmp_path, processes)
    grid = reduction.plan.grid
    assert (grid.tensor, grid.pipeline, grid.data) == (2, pipeline, 2)
    assert ("a stage between the first and the last" in reduction.kept) == (pipeline == 3)


def test_sixteen_processes_have_copies_of_tensor_ranks_and_stages(tmp_path: Path) -> None:
    flags = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --hsdp-shard-size 2 "
        "--sharding-strategy hsdp"
    )
    words = f"{MODEL} {ITERATIONS} {flags}".split()
    plan, _ = resolve_command(VerifyArguments(world_size=16), words)
    assert "several copies of the model" in reduce_plan(plan, tmp_path, 16).kept


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_that_ranks_divide_are_named(ranks: int, tmp_path: Path) -> None:
    flags = f"--num-experts 4 --expert-model-parallel-size {ranks}"
    words = f"{MODEL} {ITERATIONS} {flags}".split()
    plan, _ = resolve_command(VerifyArguments(world_size=2), words)
    kept = reduce_plan(plan, tmp_path).kept
    assert "data parallelism" in kept
    assert ("experts that ranks divide" in kept) == (ranks == 2)


def test_a_copy_of_more_than_8_processes_is_refused(tmp_path: Path) -> None:
    flags = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --hsdp-shard-size 2 "
        "--sharding-strategy hsdp"
    )
    plan, _ = resolve_command(
        VerifyArguments(world_size=16), f"{MODEL} {ITERATIONS} {flags}".split()
    )
    with pytest.raises(ConfigError, match=r"= 16 processes to keep 2 copies.* Set --processes 16"):
        reduce_plan(plan, tmp_path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (f"{MODEL} {ITERATIONS}", "number of processes is not known"),
        (f"{MODEL} {ITERATIONS} --world-size 0", "--world-size 0 must be at least 1"),
        (f"{MODEL} {ITERATIONS} --world-size 2 --processes 4", "--processes 4 must be at least 8"),
        (f"{MODEL} {ITERATIONS} --world-size 3 --tensor-model-parallel-size 2", "must divide"),
        (
            f"{MODEL} {ITERATIONS} --world-size 2 --report no/such/folder.json",
            "its folder does not exist",
        ),
        ("no-such-script.slurm --world-size 2", "no-such-script.slurm"),
    ],
)
def test_bad_input_is_one_error(
    argv: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == 2
    assert message in capsys.readouterr().err


def test_a_script_with_an_unknown_variable_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"torchrun --nproc-per-node 2 pretrain_gpt.py {MODEL} {ITERATIONS} --num-layers $LAYERS\n"
    )
    assert main([str(script)]) == 2
    assert "LAYERS" in capsys.readouterr().err
