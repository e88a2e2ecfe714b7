"""Test that numbers that are not finite are neither stored nor loaded."""

import math
from pathlib import Path

import pytest
import torch
from checkpoint_damage import poison

from megatron.base.errors import CheckpointError, TrainingError
from megatron.checkpoint.finite import describe_not_finite, refuse_not_finite
from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.ranks import Ranks
from megatron.parallel.shard import Kind, TensorShard


def make_shard(
    kind: Kind, tensor: torch.Tensor, name: str = "w", *, owner: bool = True
) -> TensorShard:
    """Return a shard that is a complete tensor."""
    return TensorShard(kind, name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, owner)


def test_each_tensor_is_named_with_its_counts() -> None:
    bad = torch.ones(5, 7)
    bad[2, 3] = math.inf
    bad[4, 6] = -math.inf
    bad[0, 0] = math.nan
    shards = [
        make_shard("weight", torch.ones(3)),
        make_shard("exp_avg", bad, "blocks.0.qkv"),
        make_shard("weight", torch.empty(0)),
    ]
    assert describe_not_finite(shards) == [
        "blocks.0.qkv (exp_avg): 1 NaN and 2 infinite of 35 numbers"
    ]


def test_overflow_of_a_sum_is_not_reported() -> None:
    assert describe_not_finite([make_shard("weight", torch.full((64,), 3e38))]) == []


def test_long_tensor_is_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.checkpoint.finite._PIECE", 7)
    tensor = torch.ones(10, 10)
    tensor[::3] = math.nan
    lines = describe_not_finite([make_shard("weight", tensor)])
    assert lines == ["w (weight): 40 NaN of 100 numbers"]


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
def test_save_is_refused_before_anything_is_written(
    what: str, asynchronous: bool, tmp_path: Path
) -> None:
    scalars, state, phrase = BAD[what]
    config = CheckpointConfig(async_save=asynchronous, keep_latest_checkpoints=1)
    saver = Saver(tmp_path, config)
    tensors: dict[Kind, torch.Tensor] = {
        kind: torch.ones(2, 3) for kind in ("weight", "exp_avg", "exp_avg_sq")
    }
    shards = [make_shard(kind, tensor) for kind, tensor in tensors.items()]
    saver.begin(CheckpointContents(1, {"optimizer_step": 1}, {}, ""), shards)
    saver.wait_for_copy()
    if what in tensors:
        tensors[what][1, 2] = math.nan
    with pytest.raises(TrainingError) as refused:
        saver.begin(CheckpointContents(2, scalars, state, ""), shards)
    message = str(refused.value)
    assert "after iteration 2" in message
    assert "rank 0 on " in message
    assert phrase in message
    assert "the newest: global_step1" in message
    # The save of iteration 1 was in progress and has succeeded.
    assert saver.saved_iteration == 1
    assert read_pointed_iteration(tmp_path) == 1
    assert list_saved_iterations(tmp_path) == [1]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("global_step2")]


def test_shards_that_are_not_stored_are_checked(tmp_path: Path) -> None:
    """A replica that this rank does not own is checked too, because the rank computes with it."""
    with pytest.raises(TrainingError, match="NaN"):
        Saver(tmp_path).begin(
            CheckpointContents(1, None, {}, ""),
            [make_shard("weight", torch.full((2,), math.nan), owner=False)],
        )


def test_checkpoint_that_is_not_finite_is_refused_at_load(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    saver.begin(
        CheckpointContents(1, {"optimizer_step": 1}, {}, ""), [make_shard("weight", torch.ones(9))]
    )
    saver.complete()
    poison(tmp_path / "global_step1", "weight/w", math.nan, 4)
    opened = open_checkpoint(tmp_path, 1)
    target = make_shard("weight", torch.zeros(9))
    opened.load_into([target])
    with pytest.raises(CheckpointError) as refused:
        refuse_not_finite(opened, describe_not_finite([target]), Ranks())
    message = str(refused.value)
    assert "w (weight): 4 NaN of 9 numbers" in message
    assert "tools/rollback.py" in message
    refuse_not_finite(opened, [], Ranks())
