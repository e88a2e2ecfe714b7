"""Every layout trains the same model: loss and gradient norm equal one process's over 10 steps on real text, to 1e-5 in fp32.

Parameters are not compared: the gradient of the key's bias is zero in exact arithmetic, so Adam turns its rounding into steps.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from corpus import NO_DROPOUT, command, curve, worst
from process_pool import ProcessPool, pretrain, succeed

BOUND = 1e-5
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "loss_curves.json"

# (tensor, data, ZeRO stage, sequence parallel): a set that covers every pair of values which fits 8 processes.
LAYOUTS = [
    (1, 2, 1, False),
    (1, 4, 2, False),
    (1, 2, 3, False),
    (1, 4, 3, False),
    (2, 1, 1, False),
    (2, 1, 1, True),
    (2, 2, 1, True),
    (2, 2, 2, False),
    (2, 4, 3, True),
    (2, 4, 1, False),
    (4, 1, 1, False),
    (4, 1, 1, True),
    (4, 2, 1, True),
    (4, 2, 2, True),
    (4, 2, 3, False),
]
CASES = [("gpt2", layout) for layout in LAYOUTS]
CASES += [("llama", layout) for layout in ((1, 4, 1, False), (2, 2, 3, True), (4, 1, 1, True), (4, 2, 2, False))]
CASES += [("bloom", layout) for layout in ((1, 2, 2, False), (2, 2, 1, True), (4, 1, 1, False))]


def flags(layout: tuple[int, int, int, bool]) -> str:
    tensor, _, zero, sequence = layout
    return f"--tensor-model-parallel-size {tensor} --zero-stage {zero}" + (" --sequence-parallel" if sequence else "")


def name(case: object) -> str:
    if isinstance(case, tuple):
        tensor, data, zero, sequence = case
        return f"tp{tensor}-dp{data}-zero{zero}" + ("-sp" if sequence else "")
    return str(case)


@pytest.fixture(scope="module")
def single(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of one process's runs, one for each shape, with checkpoints after 5 and 10 steps."""
    folders = {}
    for shape in ("gpt2", "llama", "bloom"):
        folders[shape] = tmp_path_factory.mktemp(f"single-{shape}")
        succeed(pool.run(1, pretrain, command(folders[shape], corpus, shape, NO_DROPOUT, "--save-interval 5")))
    return folders


@pytest.mark.parametrize(("shape", "layout"), CASES, ids=name)
def test_layout_trains_as_one_process(
    shape: str, layout: tuple[int, int, int, bool], pool: ProcessPool, corpus: str, single: dict[str, Path], tmp_path: Path
) -> None:
    outcomes = pool.run(layout[0] * layout[1], pretrain, command(tmp_path, corpus, shape, NO_DROPOUT, flags(layout)))
    succeed(outcomes)
    assert worst(curve(tmp_path), curve(single[shape])) < BOUND


def test_the_curve_is_the_golden_one(single: dict[str, Path]) -> None:
    """All layouts could change together, so one process's numbers are kept. UPDATE_GOLDEN=1 writes them anew."""
    curves = {shape: curve(folder) for shape, folder in single.items()}
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    for shape, values in curves.items():
        # Another processor adds up in another order; what changes the mathematics is larger than this.
        assert worst(values, [tuple(pair) for pair in golden[shape]]) < 1e-4, shape


def test_the_model_learns(single: dict[str, Path]) -> None:
    for folder in single.values():
        losses = [loss for loss, _ in curve(folder)]
        assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ("gpt2", (4, 2, 1, True), (1, 2, 3, False)),
        ("gpt2", (1, 4, 3, False), (2, 2, 1, True)),
        ("gpt2", (2, 2, 2, False), (1, 1, 1, False)),
        ("llama", (2, 2, 1, True), (4, 2, 3, False)),
        ("bloom", (1, 2, 3, False), (4, 1, 1, True)),
    ],
    ids=name,
)
def test_resume_under_another_layout(
    shape: str,
    before: tuple[int, int, int, bool],
    after: tuple[int, int, int, bool],
    pool: ProcessPool,
    corpus: str,
    single: dict[str, Path],
    tmp_path: Path,
) -> None:
    first = command(tmp_path, corpus, shape, NO_DROPOUT, flags(before), "--exit-interval 5")
    succeed(pool.run(before[0] * before[1], pretrain, first))
    second = command(tmp_path, corpus, shape, NO_DROPOUT, flags(after), "--require-load")
    output = succeed(pool.run(after[0] * after[1], pretrain, second))
    assert f"successfully loaded checkpoint from {tmp_path} at iteration 5" in output
    assert worst(curve(tmp_path), curve(single[shape])) < BOUND


def test_resume_of_one_process_is_bit_identical(pool: ProcessPool, corpus: str, single: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(single["gpt2"], tmp_path / "run")
    (tmp_path / "run" / "latest").write_text("global_step5")  # an operator rolls back by hand
    succeed(pool.run(1, pretrain, command(tmp_path / "run", corpus, "gpt2", NO_DROPOUT)))
    assert curve(tmp_path / "run") == curve(single["gpt2"])


@pytest.mark.parametrize("layout", [(1, 1, 1, False), (2, 2, 1, True), (2, 1, 1, False), (1, 4, 3, False)], ids=name)
def test_dropout_is_derived(layout: tuple[int, int, int, bool], pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    """The same layout twice is bit-identical, and a resumed run equals the uninterrupted one bit for bit."""
    ranks = layout[0] * layout[1]
    once, again, halves = (tmp_path / part for part in ("once", "again", "halves"))
    for folder, extra in ((once, ""), (again, ""), (halves, "--exit-interval 4"), (halves, "--require-load")):
        succeed(pool.run(ranks, pretrain, command(folder, corpus, "gpt2", flags(layout), extra, iterations=7)))
    assert curve(once) == curve(again)
    assert curve(once) == curve(halves)


def test_dropout_changes_the_curve(pool: ProcessPool, corpus: str, single: dict[str, Path], tmp_path: Path) -> None:
    succeed(pool.run(1, pretrain, command(tmp_path, corpus, "gpt2")))
    assert worst(curve(tmp_path), curve(single["gpt2"])) > 1e-3


@pytest.mark.parametrize("layout", [(1, 1, 1, False), (1, 2, 1, False), (2, 2, 3, True), (4, 1, 1, False)], ids=name)
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_bf16_is_within_a_percent(
    shape: str, layout: tuple[int, int, int, bool], pool: ProcessPool, corpus: str, single: dict[str, Path], tmp_path: Path
) -> None:
    argv = command(tmp_path, corpus, shape, NO_DROPOUT, flags(layout), "--bf16")
    succeed(pool.run(layout[0] * layout[1], pretrain, argv))
    assert 0 < worst(curve(tmp_path), curve(single[shape])) < 0.01
