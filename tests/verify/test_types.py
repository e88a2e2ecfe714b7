"""Types over groups of ranks at the real size, on fake GPUs (`tools/verify.py --types`)."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from verify.mutation import ITERATIONS, MODEL
from verify.random_runs import draw_run
from verify.type_mutations import EXPERTS, STAGES, TYPE_MUTATIONS
from verify.typed_runs import check_here, check_small

from megatron.commands import verify
from megatron.extras.planner.dry_run.process import find_compiler
from megatron.extras.planner.types.check import choose_ranks, reduce_depth

pytest.importorskip("spmd_types")
if find_compiler() is None:
    pytest.skip("the fake GPU needs a C++ compiler, and there is none", allow_module_level=True)
SHORT = (
    "row-parallel products are not added up",
    "input gradients of column-parallel layers stay partial",
    "gradients of copies are not averaged",
)
"""The mutations of the short suite."""


@pytest.fixture(scope="module")
def typed() -> Iterator[Callable[..., Any]]:
    """Yield a function that calls another one in a process with a fake GPU."""
    from megatron.extras.planner.dry_run.process import call_in_pool, open_pool

    with open_pool(1) as pool:
        yield lambda function, *arguments: call_in_pool(pool, function, *arguments)


def _mark(name: str) -> Any:
    return pytest.param(name, marks=() if name in SHORT else pytest.mark.full)


@pytest.mark.parametrize("name", [_mark(name) for name in TYPE_MUTATIONS])
def test_a_known_error_is_found_at_the_real_size(name: str, typed: Callable[..., Any]) -> None:
    mutation = TYPE_MUTATIONS[name]
    problems = typed(check_here, mutation.flags, mutation.world_size, name)
    for words in mutation.says:
        assert any(words in problem for problem in problems), (words, problems[:5])


HEALTHY = {
    # FSDP2 lets a stream wait for events of another one.
    "tensor, pipeline and data": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--loss-mean step --zero-stage 3",
        8,
    ),
    # Ranks send uneven parts of Muon's matrices.
    "experts and sequences": (
        "--num-experts 16 --expert-model-parallel-size 4 --moe-aux-loss-coeff 0.01 "
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --fp16 --optimizer muon "
        "--zero-stage 3 --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate "
        "--micro-batch-size 1",
        8,
    ),
    # The four parts of a sequence that two ranks have are exchanged for heads.
    "gated delta nets": (
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
        "--linear-num-key-heads 4 --linear-num-value-heads 8 --tensor-model-parallel-size 2 "
        "--context-parallel-size 2 --sequence-parallel",
        8,
    ),
    # Each copy of the model has a group for Muon.
    "copies": ("--optimizer muon --sharding-strategy hsdp --hsdp-shard-size 2 --num-layers 1", 4),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if "delta" in name else ()) for name in HEALTHY],
)
def test_a_healthy_run_is_no_alarm(name: str, typed: Callable[..., Any]) -> None:
    flags, world_size = HEALTHY[name]
    assert typed(check_small, f"{ITERATIONS} {flags}", world_size) == []


@pytest.mark.full
def test_healthy_large_runs_are_no_alarms(typed: Callable[..., Any]) -> None:
    for flags, world_size in ((STAGES, 16384), (EXPERTS, 64)):
        assert typed(check_here, flags, world_size) == []


@pytest.mark.full
def test_random_runs_are_no_alarms(typed: Callable[..., Any]) -> None:
    checked = 0

    @settings(
        max_examples=90,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(run=draw_run())
    def check(run: tuple[str, int]) -> None:
        nonlocal checked
        problems = typed(check_small, *run)
        assert not problems, run
        checked += problems is not None

    check()
    assert checked >= 30


def resolve(flags: str, world_size: int) -> Any:
    options = verify.VerifyArguments(world_size=world_size)
    return verify.resolve_command(options, f"{MODEL} {ITERATIONS} {flags}".split())[0]


def test_the_first_the_last_and_a_random_rank_of_each_kind_are_run() -> None:
    plan = resolve(
        "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --num-layers 8", 32
    )
    chosen = choose_ranks(plan)
    kinds = list(dict.fromkeys(kind for _, kind in chosen))
    assert kinds == ["stage 0", "2 stages from 1 to 2", "stage 3"]
    ranks = {kind: [rank for rank, each in chosen if each == kind] for kind in kinds}
    assert (ranks[kinds[0]][0], ranks[kinds[0]][-1]) == (0, 7)
    assert (ranks[kinds[1]][0], ranks[kinds[1]][-1]) == (8, 23)
    assert (ranks[kinds[2]][0], ranks[kinds[2]][-1]) == (24, 31)
    # Stages of other sizes are of another kind.
    uneven = resolve("--pipeline-model-parallel-size 4 --num-layers 10", 4)
    assert len({kind for _, kind in choose_ranks(uneven)}) > 2


def test_only_many_equal_layers_are_left_out() -> None:
    deep = resolve("--num-layers 64", 8)
    assert reduce_depth(deep).config.model.num_layers == 32
    assert reduce_depth(deep).stages[0].layers == range(32)
    for flags in ("--num-layers 64 --sliding-window 16 --full-attention-layers 1::2", ""):
        assert reduce_depth(resolve(flags, 8)).shape.config.num_layers in (64, 4)


def test_the_report_names_types_what_was_checked_and_what_was_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "types.json"
    words = f"--types --world-size 2 --report {file} -- {MODEL} --num-layers 1 {ITERATIONS}"
    assert verify.main([*words.split(), "--tensor-model-parallel-size", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("type-checked: pipeline 1 x data 1 x tensor 2")
    report = json.loads(file.read_text())
    assert report["type_checked"]
    assert report["gradients"]["blocks.0.attention.qkv.weight"]["tensor"].endswith("(V)")
    assert report["gradients"]["blocks.0.input_norm.weight"]["tensor"].endswith("(I)")
    assert report["checked"]["gradients"] > 0
    assert report["trusted"]


def test_a_missing_package_names_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.dict("sys.modules", {"spmd_types": None}):
        assert verify.main(["--types", "--world-size", "2", "--", *MODEL.split()]) == 2
    assert "[verify]" in capsys.readouterr().err
