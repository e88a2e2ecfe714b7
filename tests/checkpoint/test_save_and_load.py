"""Test that any sharding loads into any other, pointers move last, and damage is named."""

import dataclasses
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from saved_checkpoint import save_checkpoint

from megatron.base.errors import CheckpointError
from megatron.checkpoint.digest import digest_of_file, digest_of_text
from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.load import compare_models, open_checkpoint
from megatron.checkpoint.save import CheckpointContents
from megatron.checkpoint.start import find_start
from megatron.checkpoint.tensor_file import intersect, write_tensors
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import ModelConfig
from megatron.parallel.shard import TensorShard

TENSORS = {"a.weight": torch.arange(35.0).reshape(7, 5), "b": torch.arange(4.0) + 100}
CONFIG = (
    "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, seq_length: 4}\n"
    "batch: {micro_batch_size: 1}\n"
)
Sharding = list[tuple[str, tuple[int, ...], tuple[int, ...]]]
"""(Name, offset, shape) of each shard."""


def make_shards(sharding: Sharding, *, empty: bool = False) -> list[TensorShard]:
    """Return shards of TENSORS. With `empty`, they are filled with NaN."""
    shards = []
    for name, offset, shape in sharding:
        part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        tensor = TENSORS[name][part].clone()
        if empty:
            tensor.fill_(float("nan"))
        shards.append(
            TensorShard("weight", name, tuple(TENSORS[name].shape), offset, tensor, owner=True)
        )
    return shards


ONE: Sharding = [("a.weight", (0, 0), (7, 5)), ("b", (0,), (4,))]
ROWS: Sharding = [
    ("a.weight", (0, 0), (3, 5)),
    ("a.weight", (3, 0), (4, 5)),
    ("b", (0,), (1,)),
    ("b", (1,), (3,)),
]
COLUMNS: Sharding = [("a.weight", (0, 0), (7, 2)), ("a.weight", (0, 2), (7, 3)), ("b", (0,), (4,))]
TILES: Sharding = [
    ("a.weight", (0, 0), (4, 3)),
    ("a.weight", (4, 0), (3, 3)),
    ("a.weight", (0, 3), (4, 2)),
    ("a.weight", (4, 3), (3, 2)),
    ("b", (0,), (4,)),
]


def save(root: Path, iteration: int = 3, sharding: Sharding = ONE) -> Path:
    """Save TENSORS in the given sharding, and return the folder."""
    contents = CheckpointContents(
        iteration, {"optimizer_step": 3}, {"iteration": iteration}, CONFIG
    )
    return save_checkpoint(root, contents, make_shards(sharding))


@pytest.mark.parametrize("saved", [ONE, ROWS, COLUMNS, TILES])
@pytest.mark.parametrize("loaded", [ONE, ROWS, COLUMNS, TILES])
def test_any_sharding_loads_into_any_other(
    saved: Sharding, loaded: Sharding, tmp_path: Path
) -> None:
    save(tmp_path, sharding=saved)
    targets = make_shards(loaded, empty=True)
    open_checkpoint(tmp_path, 3).load_into(targets)
    for target, expected in zip(targets, make_shards(loaded), strict=True):
        assert torch.equal(target.tensor, expected.tensor)


def test_only_owned_shards_are_written(tmp_path: Path) -> None:
    shards = make_shards(ONE)
    other = TensorShard("weight", "a.weight", (7, 5), (0, 0), torch.zeros(7, 5), owner=False)
    save_checkpoint(tmp_path, CheckpointContents(1, None, {}, CONFIG), [other, *shards])
    targets = make_shards(ONE, empty=True)
    open_checkpoint(tmp_path, 1).load_into(targets)
    assert torch.equal(targets[0].tensor, TENSORS["a.weight"])


def test_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {
        "x": torch.randn(3, 5),
        "none": torch.zeros(0, 4),
        "strided": torch.randn(4, 6).t(),
    }
    written = write_tensors(tmp_path / "t.safetensors", tensors)
    assert written.digest == digest_of_file(tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_intersection_of_slices() -> None:
    assert intersect(((0, 0), (4, 4)), ((2, 3), (5, 5))) == ((2, 3), (2, 1))
    assert intersect(((0,), (4,)), ((4,), (2,))) is None


def test_pointers_move_last_and_old_checkpoints_stay(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 6)
    assert list_saved_iterations(tmp_path) == [3, 6]
    assert read_pointed_iteration(tmp_path) == 6
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    # An editor adds a newline.
    (tmp_path / "latest").write_text("global_step3\n")
    assert read_pointed_iteration(tmp_path) == 3
    (tmp_path / "latest").unlink()
    assert read_pointed_iteration(tmp_path) == 6
    assert not [
        path for path in tmp_path.iterdir() if "unfinished" in path.name or "replaced" in path.name
    ]


def test_unfinished_save_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "global_step9.unfinished").mkdir()
    (tmp_path / "global_step9.unfinished" / "rank_00000.safetensors").write_bytes(b"torn")
    assert list_saved_iterations(tmp_path) == [3]
    save(tmp_path, 9)
    assert read_pointed_iteration(tmp_path) == 9


def test_saving_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3)
    TENSORS["b"] += 1
    try:
        save(tmp_path, 3)
        targets = make_shards(ONE, empty=True)
        open_checkpoint(tmp_path, 3).load_into(targets)
        assert torch.equal(targets[1].tensor, TENSORS["b"])
    finally:
        TENSORS["b"] -= 1


def test_failed_write_names_the_rank_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with file_size_limit(200), pytest.raises(CheckpointError) as failed:
        save(tmp_path, 4)
    assert "saving iteration 4" in str(failed.value)
    assert "rank 0 on " in str(failed.value)
    assert "File too large" in str(failed.value)
    assert read_pointed_iteration(tmp_path) == 3
    # The unfinished folder would use space that the next attempt needs.
    assert not (tmp_path / "global_step4.unfinished").exists()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Return a context in which no file may exceed `size` bytes, as with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_differences_are_listed_together_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path)
    targets = [
        TensorShard("weight", "a.weight", (8, 5), (0, 0), torch.full((8, 5), 7.0), owner=True),
        TensorShard("weight", "c", (2,), (0,), torch.full((2,), 7.0), owner=True),
        TensorShard("exp_avg", "b", (4,), (0,), torch.full((4,), 7.0), owner=True),
    ]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path, 3).load_into(targets)
    message = str(caught.value)
    assert "a.weight is (7, 5) in the checkpoint, and (8, 5) in this run" in message
    assert "weight of c is not in the checkpoint" in message
    assert "exp_avg of b is not in the checkpoint" in message
    assert all((target.tensor == 7.0).all() for target in targets)


def test_architecture_differences_name_their_flags(tmp_path: Path) -> None:
    save(tmp_path)
    requested = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        seq_length=4,
        normalization="RMSNorm",
        embed_layernorm=True,
        hidden_dropout=0.3,
        softmax_type="off-by-one",
    )
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path, 3).load_into(make_shards(ONE), requested)
    message = str(caught.value)
    # The tensors of both have the same shapes.
    assert "--softmax-type is vanilla in the checkpoint, and off-by-one in this run" in message
    assert "--num-attention-heads is 2 in the checkpoint, and 4 in this run" in message
    assert "--normalization is LayerNorm in the checkpoint, and RMSNorm in this run" in message
    assert "a norm that is added later is untrained" in message
    assert "dropout" not in message


@pytest.mark.parametrize("damage", ["missing", "shorter", "header"])
def test_damaged_tensor_files_are_named(damage: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    victim = folder / "rank_00000.safetensors"
    intact = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "shorter":
        victim.write_bytes(intact[:-8])
    else:
        victim.write_bytes(b"\xff" * len(intact))
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        open_checkpoint(tmp_path, 3).load_into(make_shards(ONE, empty=True))


def test_slices_that_do_not_cover_a_tensor_are_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, sharding=ROWS)
    opened = open_checkpoint(tmp_path, 3)
    index = opened.read_index()
    index.tensors["weight/a.weight"]["boxes"].pop()
    (folder / "index.json").write_text(index.dump_json())
    opened.manifest.files["index.json"]["xxh128"] = digest_of_text(index.dump_json())
    with pytest.raises(CheckpointError, match=r"35 elements of .* are needed and 15 are stored"):
        opened.load_into(make_shards(ONE, empty=True))


def test_start_is_found_or_refused(tmp_path: Path) -> None:
    assert find_start(CheckpointConfig()).checkpoint is None
    assert find_start(CheckpointConfig(load=str(tmp_path / "nowhere"))).checkpoint is None
    with pytest.raises(CheckpointError, match="--require-load needs --load"):
        find_start(CheckpointConfig(require_load=True))
    with pytest.raises(CheckpointError, match="nothing to load"):
        find_start(CheckpointConfig(load=str(tmp_path), require_load=True))
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(CheckpointError, match="traces of a run"):
        find_start(CheckpointConfig(load=str(tmp_path)))
    assert (
        find_start(CheckpointConfig(load=str(tmp_path), allow_fresh_start=True)).checkpoint is None
    )
    save(tmp_path)
    start = find_start(CheckpointConfig(load=str(tmp_path)))
    assert start.iteration == 3
    # An attempt to load a checkpoint has shown damage, although its files have their sizes.
    start = find_start(CheckpointConfig(load=str(tmp_path)), {5: "not finite"})
    assert (start.iteration, start.damaged) == (3, ((5, "not finite"),))
    with pytest.raises(CheckpointError, match="no checkpoint to resume from:\n  not finite\n"):
        find_start(CheckpointConfig(load=str(tmp_path)), {3: "not finite"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"glu_activation": "swiglu", "normalization": "RMSNorm"}, []),
        ({"activation": "squared_relu"}, ["--norm-bias"]),
        ({}, ["--norm-bias", "--bias-gelu-fusion"]),
    ],
)
def test_settings_without_effect_are_not_compared(
    changes: dict[str, Any], expected: list[str]
) -> None:
    saved = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4, **changes)
    asked = dataclasses.replace(saved, bias_gelu_fusion=False, norm_bias=False)
    assert [line.split()[0] for line in compare_models(saved, asked)] == expected


def test_defaults_of_other_attention_may_be_written_out() -> None:
    saved = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4)
    asked = dataclasses.replace(
        saved,
        latent_norm_epsilon=saved.layernorm_epsilon,
        linear_norm_epsilon=saved.layernorm_epsilon,
        linear_norm_placement=saved.norm_placement,
        # It has no effect on weights that are loaded.
        linear_time_step="log-uniform",
    )
    assert compare_models(saved, asked) == []
    other = dataclasses.replace(asked, linear_norm_epsilon=1e-2, linear_allow_neg_eigval=True)
    refused = [line.split()[0] for line in compare_models(saved, other)]
    assert refused == ["--linear-allow-neg-eigval", "--linear-norm-epsilon"]


def test_a_new_run_may_scale_the_rotary_frequencies_of_its_weights() -> None:
    saved = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4)
    saved = dataclasses.replace(saved, position_embedding_type="rotary")
    longer = dataclasses.replace(saved, rope_scaling="llama3", rotary_base=5e5, seq_length=16)
    longer = dataclasses.replace(longer, mscale=0.7, mscale_all_dim=1.0)
    refused = [line.split()[0] for line in compare_models(saved, longer)]
    assert {"--rope-scaling", "--rotary-base"} <= set(refused)
    assert not compare_models(saved, longer, finetune=True)
    deeper = dataclasses.replace(longer, num_layers=2)
    (line,) = compare_models(saved, deeper, finetune=True)
    assert line.startswith("--num-layers")
