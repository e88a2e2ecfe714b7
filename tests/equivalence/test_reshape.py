"""Tests that a checkpoint of any layout loads under any other.

Masters and moments are equal bit for bit, and the next losses equal those of one process. The tests
read a checkpoint with the safetensors library and its index, and not with the code under test.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.corpus import (
    NO_DROPOUT,
    command,
    count_iterations,
    curve,
    load_from,
    of_suite,
    worst,
)
from equivalence.layouts import STRATEGIES, Layout
from process_pool import ProcessPool, pretrain, succeed
from safetensors import safe_open

from megatron.run.start.launch import read_launch

BOUND = 1e-5
LAYOUTS = [
    Layout(micro_batch_size=2),
    Layout(2, 2, 2, 1, sequence=True, schedule="1F1B"),
    Layout(1, 1, 4, 3),
    Layout(4, 2, 1, 1, schedule="interleaved 1F1B", micro_batch_size=2),
    Layout(2, 1, 2, 2, sequence=True),
    Layout(1, 4, 2, 1, schedule="GPipe", partition="parameters"),
    Layout(1, 2, 1, 1, schedule="1F1B", partition="ends", micro_batch_size=2),
]
SHORT = 3
"""Number of layouts that the short suite combines."""
ASYNCHRONOUS = (LAYOUTS[1], STRATEGIES[0])

Saved = Callable[[Layout], Path]


@pytest.fixture(scope="module")
def saved(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that runs a layout and returns the folder.

    It has checkpoints after half of its iterations and at its end.
    """
    folders: dict[Layout, Path] = {}

    def run(layout: Layout) -> Path:
        if layout not in folders:
            folder = tmp_path_factory.mktemp("saved")
            kind = "--async-save" if layout in ASYNCHRONOUS else ""
            flags = f"--save-interval {find_half(layout)} {kind}"
            succeed(pool.run(layout.ranks, pretrain, arguments(folder, corpus, layout, flags)))
            folders[layout] = folder
        return folders[layout]

    return run


def arguments(folder: Path, corpus: str, layout: Layout, flags: str = "") -> list[str]:
    variation = of_suite(layout.variation)
    return command(folder, corpus, layout.shape, variation, NO_DROPOUT, layout.flags, flags)


def find_half(layout: Layout) -> int:
    """Return the iteration after which the runs continue."""
    return count_iterations(of_suite(layout.variation)) // 2


def select(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a slice of a tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def read_global_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the global tensors of a checkpoint, with the keys kind/name."""
    tensors = {}
    for tensor, entry in json.loads((checkpoint / "index.json").read_text())["tensors"].items():
        complete = torch.full(entry["shape"], float("nan"))
        for shard in entry["boxes"]:
            with safe_open(checkpoint / shard["file"], framework="pt") as file:
                values = file.get_tensor(f"{tensor}@{','.join(map(str, shard['offset']))}")
            complete[select(shard["offset"], shard["shape"])] = values
        assert not complete.isnan().any(), f"{tensor} has a gap"
        tensors[tensor] = complete
    return tensors


def compare_after_load(argv: list[str], checkpoint: str) -> tuple[int, list[str]]:
    """Train from a checkpoint, and compare the shards of this rank with it after the load.

    Returns:
        The number of shards, and the names of those that differ in any bit.
    """
    import megatron.run.pretrain as pretrain_module
    from megatron.commands.parts import choose_parts
    from megatron.extras.interop.translators.translator import load_config
    from megatron.run.start import build

    expected = read_global_tensors(Path(checkpoint))
    counts: list[int] = []
    different: list[str] = []

    def look(run: Any) -> None:
        for shard in run.engine.shards(optimizer=True):
            stored = expected[f"{shard.kind}/{shard.name}"]
            stored = stored[select(shard.offset, shard.tensor.shape)]
            loaded = shard.tensor.cpu().contiguous()
            if not torch.equal(stored.view(torch.int32), loaded.view(torch.int32)):
                different.append(f"{shard.kind}/{shard.name}")
        counts.append(len(run.engine.shards(optimizer=True)))

    def start_and_look(*arguments: Any) -> Any:
        run = build.start_run(*arguments)
        look(run)
        return run

    original = pretrain_module.start_run
    pretrain_module.start_run = start_and_look  # type: ignore[assignment]
    try:
        loaded = load_config(argv)
        pretrain_module.pretrain(read_launch(loaded, choose_parts(loaded.config)))
    finally:
        pretrain_module.start_run = original
    return counts[0], different


PAIRS = [
    # In the short suite each of the first layouts saves once and loads once.
    pytest.param(
        before,
        after,
        id=f"{before}--{after}",
        marks=() if i < SHORT and j == (i + 1) % SHORT else pytest.mark.full,
    )
    for i, before in enumerate(LAYOUTS)
    for j, after in enumerate(LAYOUTS)
    if i != j
]
STRATEGY_PAIRS = [
    # The short suite loads HSDP's checkpoint without shards.
    pytest.param(
        before,
        after,
        id=f"{before}--{after}",
        marks=() if (i, j) == (0, 1) else pytest.mark.full,
    )
    for i, before in enumerate(STRATEGIES)
    for j, after in enumerate([*STRATEGIES, LAYOUTS[0]])
    if i != j
]


@pytest.mark.parametrize(("before", "after"), [*PAIRS, *STRATEGY_PAIRS])
def test_any_layout_loads_what_any_other_saved(
    before: Layout, after: Layout, pool: ProcessPool, corpus: str, saved: Saved, tmp_path: Path
) -> None:
    source = saved(before)
    half = find_half(after)
    argv = load_from(arguments(tmp_path, corpus, after), source, half)
    outcomes = pool.run(after.ranks, compare_after_load, argv, str(source / f"global_step{half}"))
    succeed(outcomes)
    for outcome in outcomes:
        compared, different = outcome.value
        assert compared > 0
        assert not different
    alone = saved(LAYOUTS[0])
    assert len(curve(tmp_path)) == half
    assert worst(curve(tmp_path), curve(alone)[half:]) < BOUND


def test_without_the_optimizer_moments_and_step_are_zero(
    pool: ProcessPool, corpus: str, saved: Saved, tmp_path: Path
) -> None:
    """The moments after one step are those of Adam's first step."""
    layout = LAYOUTS[4]
    half = find_half(layout)
    flags = f"--no-load-optim --weight-decay 0 --exit-interval {half + 1}"
    argv = load_from(arguments(tmp_path, corpus, layout, flags), saved(LAYOUTS[0]), half)
    succeed(pool.run(layout.ranks, pretrain, argv))
    before = read_global_tensors(saved(LAYOUTS[0]) / f"global_step{half}")
    after = read_global_tensors(tmp_path / f"global_step{half + 1}")
    manifest = json.loads((tmp_path / f"global_step{half + 1}" / "manifest.json").read_text())
    assert manifest["optimizer"]["optimizer_step"] == 1
    name = "blocks.0.mlp.up.weight"
    gradient = after[f"exp_avg/{name}"] / (1 - 0.9)
    torch.testing.assert_close(after[f"exp_avg_sq/{name}"], (1 - 0.999) * gradient**2)
    assert not torch.equal(after[f"weight/{name}"], before[f"weight/{name}"])
