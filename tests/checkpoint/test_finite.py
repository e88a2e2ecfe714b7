"""What is not finite is neither stored nor taken: refused before a file is written, named, and
agreed on."""

import math
from pathlib import Path

import pytest
import torch
from checkpoint_damage import poison

from megatron.checkpoint.finite import describe_not_finite, refuse_not_finite
from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError, TrainingError
from megatron.parallel.shard import Kind, TensorShard


def chunk(kind: Kind, tensor: torch.Tensor, name: str = "w", *, owner: bool = True) -> TensorShard:
    return TensorShard(kind, name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, owner)


def test_each_tensor_is_named_with_its_counts() -> None:
    bad = torch.ones(5, 7)
    bad[2, 3], bad[4, 6], bad[0, 0] = math.inf, -math.inf, math.nan  # their sum is NaN
    chunks = [
        chunk("weight", torch.ones(3)),
        chunk("exp_avg", bad, "blocks.0.qkv"),
        chunk("weight", torch.empty(0)),
    ]
    assert describe_not_finite(chunks) == [
        "blocks.0.qkv (exp_avg): 1 NaN and 2 infinite of 35 numbers"
    ]


def test_a_sum_that_overflows_is_no_infinity() -> None:
    assert describe_not_finite([chunk("weight", torch.full((64,), 3e38))]) == []


def test_a_long_tensor_is_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.checkpoint.finite._PIECE", 7)
    tensor = torch.ones(10, 10)
    tensor[::3] = math.nan
    assert describe_not_finite([chunk("weight", tensor)]) == ["w (weight): 40 NaN of 100 numbers"]


BAD = {
    "weight": ({}, {}, "w (weight): 1 NaN of 6 numbers"),
    "exp_avg": ({}, {}, "w (exp_avg): 1 NaN of 6 numbers"),
    "exp_avg_sq": ({}, {}, "w (exp_avg_sq): 1 NaN of 6 numbers"),
    "scalars": ({"loss_scale": {"scale": math.inf}}, {}, "optimizer.loss_scale.scale is inf"),
    "state": (
        {},
        {"elapsed_seconds": 1.0, "data": [{"weight": math.nan}]},
        "state.data[0].weight is nan",
    ),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_a_save_is_refused_before_anything_is_written(
    what: str, asynchronous: bool, tmp_path: Path
) -> None:
    scalars, state, said = BAD[what]
    config = CheckpointConfig(async_save=asynchronous, keep_latest_checkpoints=1)
    saver = Saver(tmp_path, config)
    tensors: dict[Kind, torch.Tensor] = {
        kind: torch.ones(2, 3) for kind in ("weight", "exp_avg", "exp_avg_sq")
    }
    chunks = [chunk(kind, tensor) for kind, tensor in tensors.items()]
    saver.begin(CheckpointContents(1, {"optimizer_step": 1}, {}, ""), chunks)
    saver.wait_for_copy()
    if what in tensors:
        tensors[what][1, 2] = math.nan  # type: ignore[index]
    with pytest.raises(TrainingError) as refused:
        saver.begin(CheckpointContents(2, scalars, state, ""), chunks)
    message = str(refused.value)
    assert "after iteration 2" in message
    assert "rank 0 on " in message
    assert said in message
    assert "the last: global_step1" in message
    assert (
        saver.saved_iteration == read_pointed_iteration(tmp_path) == 1
    )  # the one that was being written is safe
    assert list_saved_iterations(tmp_path) == [1]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("global_step2")]


def test_a_copy_that_is_not_stored_counts_too(tmp_path: Path) -> None:
    """Whoever holds it computes with it."""
    with pytest.raises(TrainingError, match="NaN"):
        Saver(tmp_path).begin(
            CheckpointContents(1, None, {}, ""),
            [chunk("weight", torch.full((2,), math.nan), owner=False)],
        )


def test_a_checkpoint_that_is_not_finite_is_refused_at_load(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    saver.begin(
        CheckpointContents(1, {"optimizer_step": 1}, {}, ""), [chunk("weight", torch.ones(9))]
    )
    saver.complete()
    poison(tmp_path / "global_step1", "weight/w", math.nan, 4)
    opened, target = open_checkpoint(tmp_path, 1), chunk("weight", torch.zeros(9))
    opened.load_into([target])
    with pytest.raises(
        CheckpointError, match=r"(?s)w \(weight\): 4 NaN of 9 numbers.*rollback\.py.*--to"
    ):
        refuse_not_finite(opened, describe_not_finite([target]), Ranks())
    refuse_not_finite(opened, [], Ranks())
