"""The shard seam: any boxes in, any other boxes out; pointers last; damage is named."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron.checkpoint.digest import digest_of_file, digest_of_text
from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, save_checkpoint
from megatron.checkpoint.start import find_start
from megatron.checkpoint.tensor_file import intersect, write_tensors
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError
from megatron.parallel.shard import TensorShard

WHOLE = {"a.weight": torch.arange(35.0).reshape(7, 5), "b": torch.arange(4.0) + 100}
CONFIG = "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, seq_length: 4}\nbatch: {micro_batch_size: 1}\n"


def boxes(
    cuts: list[tuple[str, tuple[int, ...], tuple[int, ...]]], *, empty: bool = False
) -> list[TensorShard]:
    """Chunks of WHOLE at (name, offset, shape); filled with its values, or with nan."""
    shards = []
    for name, offset, shape in cuts:
        part = WHOLE[name][
            tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        ].clone()
        tensor = torch.full_like(part, float("nan")) if empty else part
        shards.append(
            TensorShard("weight", name, tuple(WHOLE[name].shape), offset, tensor, owner=True)
        )
    return shards


ONE = [("a.weight", (0, 0), (7, 5)), ("b", (0,), (4,))]
ROWS = [
    ("a.weight", (0, 0), (3, 5)),
    ("a.weight", (3, 0), (4, 5)),
    ("b", (0,), (1,)),
    ("b", (1,), (3,)),
]
COLUMNS = [("a.weight", (0, 0), (7, 2)), ("a.weight", (0, 2), (7, 3)), ("b", (0,), (4,))]
TILES = [
    ("a.weight", (0, 0), (4, 3)),
    ("a.weight", (4, 0), (3, 3)),
    ("a.weight", (0, 3), (4, 2)),
    ("a.weight", (4, 3), (3, 2)),
    ("b", (0,), (4,)),
]


def save(root: Path, iteration: int = 3, cuts: list = ONE) -> Path:
    return save_checkpoint(
        root,
        CheckpointContents(iteration, {"optimizer_step": 3}, {"iteration": iteration}, CONFIG),
        boxes(cuts),
    )


@pytest.mark.parametrize("cut", [ONE, ROWS, COLUMNS, TILES])
@pytest.mark.parametrize("load", [ONE, ROWS, COLUMNS, TILES])
def test_any_cut_loads_into_any_other(cut: list, load: list, tmp_path: Path) -> None:
    save(tmp_path, cuts=cut)
    targets = boxes(load, empty=True)
    open_checkpoint(tmp_path, 3).load_into(targets)
    for target, expected in zip(targets, boxes(load), strict=True):
        assert torch.equal(target.tensor, expected.tensor)


def test_only_owned_chunks_are_written(tmp_path: Path) -> None:
    shards = boxes(ONE)
    other = TensorShard("weight", "a.weight", (7, 5), (0, 0), torch.zeros(7, 5), owner=False)
    save_checkpoint(tmp_path, CheckpointContents(1, None, {}, CONFIG), [other, *shards])
    targets = boxes(ONE, empty=True)
    open_checkpoint(tmp_path, 1).load_into(targets)
    assert torch.equal(targets[0].tensor, WHOLE["a.weight"])


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


def test_intersect() -> None:
    assert intersect(((0, 0), (4, 4)), ((2, 3), (5, 5))) == ((2, 3), (2, 1))
    assert intersect(((0,), (4,)), ((4,), (2,))) is None


def test_pointers_move_last_and_old_checkpoints_stay(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 6)
    assert list_saved_iterations(tmp_path) == [3, 6]
    assert read_pointed_iteration(tmp_path) == 6
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    (tmp_path / "latest").write_text("global_step3\n")  # by hand, with an editor's newline
    assert read_pointed_iteration(tmp_path) == 3
    (tmp_path / "latest").unlink()
    assert read_pointed_iteration(tmp_path) == 6
    assert not [
        path for path in tmp_path.iterdir() if "unfinished" in path.name or "replaced" in path.name
    ]


def test_an_unfinished_save_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "global_step9.unfinished").mkdir()
    (tmp_path / "global_step9.unfinished" / "rank_00000.safetensors").write_bytes(b"torn")
    assert list_saved_iterations(tmp_path) == [3]
    save(tmp_path, 9)
    assert read_pointed_iteration(tmp_path) == 9


def test_saving_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3)
    WHOLE["b"] += 1
    try:
        save(tmp_path, 3)
        targets = boxes(ONE, empty=True)
        open_checkpoint(tmp_path, 3).load_into(targets)
        assert torch.equal(targets[1].tensor, WHOLE["b"])
    finally:
        WHOLE["b"] -= 1


def test_a_failed_write_names_the_rank_and_keeps_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with (
        file_size_limit(200),
        pytest.raises(
            CheckpointError, match=r"(?s)iteration 4 .*failed.*rank 0 on .*File too large"
        ),
    ):
        save(tmp_path, 4)
    assert read_pointed_iteration(tmp_path) == 3
    assert not (
        tmp_path / "global_step4.unfinished"
    ).exists()  # it would take the room that is missing


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes, as on a file system with a quota."""
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
    for part in (
        "a.weight is (7, 5) in it, and (8, 5) here",
        "weight of c is not in it",
        "exp_avg of b is not in it",
    ):
        assert part in str(caught.value)
    assert all((target.tensor == 7.0).all() for target in targets)


def test_architecture_differences_name_their_flags(tmp_path: Path) -> None:
    from megatron.config.model import ModelConfig

    save(tmp_path)
    asked = ModelConfig(
        1, 8, 4, 4, normalization="RMSNorm", embed_layernorm=True, hidden_dropout=0.3
    )
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path, 3).load_into(boxes(ONE), asked)
    message = str(caught.value)
    assert "--num-attention-heads is 2 in it, and 4 here" in message
    assert "--normalization is LayerNorm in it, and RMSNorm here" in message
    assert "a norm added in mid-run begins untrained" in message
    assert "dropout" not in message


@pytest.mark.parametrize("damage", ["missing", "shorter", "header"])
def test_damaged_tensor_files_are_named(damage: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    victim = folder / "rank_00000.safetensors"
    whole = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "shorter":
        victim.write_bytes(whole[:-8])
    else:
        victim.write_bytes(b"\xff" * len(whole))
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        open_checkpoint(tmp_path, 3).load_into(boxes(ONE, empty=True))


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"format": 99}'])
def test_damaged_manifests_are_named(text: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="global_step3"):
        open_checkpoint(tmp_path, 3)


def test_boxes_that_do_not_cover_are_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, cuts=ROWS)
    opened = open_checkpoint(tmp_path, 3)
    index = opened.read_index()
    index.tensors["weight/a.weight"]["boxes"].pop()
    (folder / "index.json").write_text(index.dump_json())
    opened.manifest.files["index.json"]["xxh128"] = digest_of_text(index.dump_json())
    with pytest.raises(CheckpointError, match="35 elements are needed and 15 are stored"):
        opened.load_into(boxes(ONE, empty=True))


def test_find_start(tmp_path: Path) -> None:
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
