"""Tests of the verification: healthy runs pass, and known errors of trainers are found."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from tiny_corpus import MERGES, VOCAB
from verify.mutations import ITERATIONS, MODEL, MUTATIONS
from verify.random_runs import draw_run
from verify.verifier import Verifier

from megatron.base.errors import ConfigError
from megatron.commands.verify import VerifyArguments, main, resolve_command
from megatron.extras.verify.reduction import reduce_plan

SHORT = {
    "gradients of norms are not summed under sequence parallelism",
    "an overflow is not seen by another stage",
    "learned positions restart on each slice of the sequence",
    "interleaved stages start from equal weights",
    "samples are read twice after a resume",
}
"""The mutations of the short suite."""
IRREGULAR = (
    "--num-layers 7 --tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --num-query-groups 1 --rampup-batch-size 16 16 640 "
    "--global-batch-size 64 --train-samples 6400 --checkpoint-activations --eod-mask-loss "
    f"--goldfish-loss --vocab-file {VOCAB} --merge-file {MERGES} --vocab-size 5000"
)
EXAMPLES = int(os.environ.get("VERIFY_EXAMPLES", "20"))
"""Number of random runs. docs/tests.md says how many ran, and what they found."""


@pytest.mark.parametrize(
    ("precision", "comparisons"), [("", 12), pytest.param("--bf16", 16, marks=pytest.mark.full)]
)
def test_an_irregular_run_equals_one_process(
    precision: str, comparisons: int, verifier: Verifier
) -> None:
    report = verifier.run(f"{IRREGULAR} {precision}", 16)
    assert report["verified"], report
    assert report["lost"] == []
    assert "query groups that ranks share" in report["kept"]
    assert "stages of unequal size" in report["kept"]
    assert len(report["comparisons"]) == comparisons
    assert report["copy"]["processes"] == 8


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
@given(run=draw_run())
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


def test_a_copy_of_more_than_8_processes_is_refused(tmp_path: Path) -> None:
    flags = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --hsdp-shard-size 2 "
        "--sharding-strategy hsdp"
    )
    plan, _ = resolve_command(
        VerifyArguments(world_size=16), f"{MODEL} {ITERATIONS} {flags}".split()
    )
    with pytest.raises(ConfigError, match=r"= 16 processes to keep 2 copies"):
        reduce_plan(plan, tmp_path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (f"{MODEL} {ITERATIONS}", "number of processes is not known"),
        (f"{MODEL} {ITERATIONS} --world-size 0", "--world-size 0 must be at least 1"),
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
