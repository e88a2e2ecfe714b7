"""Tests of tools/inspect_checkpoint.py on checkpoints of runs and of savers.

The checkpoints are valid, damaged, or replaced while the tool reads them.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_damage import flip, resign, save_unchecked
from process_pool import ProcessPool
from saved_checkpoint import save_checkpoint
from torch import Tensor
from training.runs import Runner

from megatron.checkpoint.digest import BLOCK
from megatron.checkpoint.folder import set_aside
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.extras.inference.commands import generate
from megatron.extras.interop.commands import inspect_checkpoint
from megatron.parallel.shard import Kind, TensorShard

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (
    "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, seq_length: 4}\n"
    "batch: {micro_batch_size: 1}\n"
)
KINDS: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq")
SHAPES = {
    "embedding.word.weight": (700, 640),
    "blocks.0.qkv": (640, 640),
    "blocks.10.norm": (640,),
    "blocks.2.norm": (640,),
}


def make_state(seed: int = 0) -> dict[tuple[Kind, str], Tensor]:
    """Return tensors of about 10 MB, which fill a few blocks of a file."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (kind, name): torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
        for kind in KINDS
    }


def make_full_shards(state: dict[tuple[Kind, str], Tensor]) -> list[TensorShard]:
    """Return each tensor as one shard."""
    return [make_shard(kind, name, tensor) for (kind, name), tensor in state.items()]


def make_shard(kind: Kind, name: str, tensor: Tensor) -> TensorShard:
    """Return a complete tensor as one shard."""
    shape = tuple(tensor.shape)
    offset = (0,) * tensor.dim()
    return TensorShard(kind, name, shape, offset, tensor, owner=True)


def make_split_shards(state: dict[tuple[Kind, str], Tensor]) -> list[TensorShard]:
    """Return each tensor as two shards."""
    shards = []
    for (kind, name), tensor in state.items():
        middle = tensor.shape[0] // 3
        for low, part in ((0, tensor[:middle]), (middle, tensor[middle:])):
            offset = (low, *(0 for _ in tensor.shape[1:]))
            shards.append(
                TensorShard(kind, name, tuple(tensor.shape), offset, part.clone(), owner=True)
            )
    return shards


def make_contents(
    iteration: int, *, optimizer: bool = True, config: str = CONFIG
) -> CheckpointContents:
    scalars = {"optimizer_step": iteration} if optimizer else None
    return CheckpointContents(iteration, scalars, {"iteration": iteration}, config)


def save(
    root: Path,
    shards: list[TensorShard],
    iteration: int = 3,
    *,
    optimizer: bool = True,
    config: str = CONFIG,
) -> Path:
    return save_checkpoint(
        root, make_contents(iteration, optimizer=optimizer, config=config), shards
    )


def inspect(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    """Return what is printed to stdout, or to stderr on an error."""
    assert inspect_checkpoint.main([str(word) for word in argv]) == code
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out


def inspect_json(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> dict:
    return json.loads(inspect(capsys, *argv, "--json", code=code))


def read_times_and_sizes(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in [root, *root.rglob("*")]
    }


# Checkpoints of a run


@pytest.fixture(scope="module")
def trained(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two checkpoints of a run on two tensor-parallel ranks, in fp16."""
    run = Runner(pool, corpus, tmp_path_factory.mktemp("trained") / "run")
    run(
        "--train-iters 4 --save-interval 2 --tensor-model-parallel-size 2 "
        "--fp16 --initial-loss-scale 1024",
        ranks=2,
    )
    return run.folder


def test_overview_of_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_times_and_sizes(trained)
    found = inspect_json(capsys, trained)
    assert found["iteration"] == 4
    assert found["state"]["consumed_samples"] == 16
    assert found["state"]["lr_samples"] == 16
    assert found["layout"] == "pipeline 1 x data 1 x tensor 2"
    assert found["learning_rate"] == pytest.approx(2e-3)
    assert found["optimizer"]["loss_scale"]["scale"] == 1024
    h = 32
    vocab = 5000
    seq = 32
    assert found["model"]["hidden_size"] == h
    assert found["model"]["ffn_hidden_size"] == 4 * h
    assert found["model"]["vocab_size"] == vocab
    assert found["parameters"] == (vocab + seq) * h + 12 * h * h + 13 * h + 2 * h
    assert found["bytes_by_kind"] == dict.fromkeys(KINDS, 4 * found["parameters"])
    on_disk = {path.name: path.stat().st_size for path in (trained / "global_step4").iterdir()}
    assert found["files"] == {
        name: size for name, size in on_disk.items() if name != "manifest.json"
    }
    assert found["bytes"] == sum(on_disk.values())
    folder = found["folder"]
    assert [(c["iteration"], c["pointed_to"], c["shown"]) for c in folder["checkpoints"]] == [
        (2, False, False),
        (4, True, True),
    ]
    assert folder["lease"] is None
    text = inspect(capsys, trained)
    for part in (
        "16 samples, 512 tokens",
        "0.002 at the next step",
        "scale 1024.0",
        f"{found['parameters']:,}",
        "not held",
    ):
        assert part in text
    assert "folder" not in inspect_json(capsys, trained / "global_step2")
    assert inspect_json(capsys, trained, "--iteration", 2)["state"]["consumed_samples"] == 8
    assert read_times_and_sizes(trained) == before


def test_text_leaves_out_the_scaling_of_positions_that_a_run_does_not_have(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_checkpoint.main([str(trained)]) == 0
    printed = capsys.readouterr().out
    assert "rotary_base" in printed
    assert "rope_" not in printed


def test_configuration_of_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        inspect(capsys, trained, "--config") == (trained / "global_step4/config.yaml").read_text()
    )


def test_a_checkpoint_of_a_run_is_undamaged_and_its_tensors_can_be_read(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect_json(capsys, trained, "--verify")
    assert found["damage"] == []
    assert found["notes"] == []
    assert found["files"] == 5
    assert found["tensors"] == 48
    assert "is undamaged" in inspect(capsys, trained, "--verify")
    rows = {
        (row["kind"], row["name"]): row
        for row in inspect_json(capsys, trained, "--parameters")["tensors"]
    }
    assert len(rows) == 48
    checkpoint = open_checkpoint(trained, 4)
    for (kind, name), row in rows.items():
        tensor = torch.empty(row["shape"])
        checkpoint.load_into([make_shard(kind, name, tensor)])
        norm = float(np.linalg.norm(tensor.numpy().astype(float)))
        assert row["norm"] == pytest.approx(norm, rel=1e-9)
        assert row["min"] == float(tensor.min())
        assert row["max"] == float(tensor.max())


def test_two_checkpoints_of_a_run_differ(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_json(capsys, trained, "--compare", trained / "global_step2", code=1)
    assert found["config"] == []
    assert "state.consumed_samples: 16 and 8" in found["state"]
    assert "optimizer.optimizer_step: 4 and 2" in found["state"]
    assert not any(
        row["bit_equal"] for row in found["tensors"] if row["tensor"].endswith("qkv.weight")
    )
    assert inspect_json(capsys, trained, "--compare", trained)["equal"]


# The folder


def test_overview_lists_damaged_and_unfinished_folders_and_pointers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_state()
    for iteration in (1, 2, 3):
        save(tmp_path, make_full_shards(state), iteration)
    set_aside(tmp_path, 1)
    (tmp_path / "global_step9.unfinished").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "global_step2/manifest.json").write_text("{}")
    folder = inspect_json(capsys, tmp_path)["folder"]
    assert [entry["name"] for entry in folder["checkpoints"]] == ["global_step2", "global_step3"]
    assert "manifest.json is not what was written" in folder["checkpoints"][0]["problem"]
    assert folder["damaged"] == ["global_step1.damaged"]
    assert folder["unfinished"] == ["global_step9.unfinished"]
    assert "latest_checkpointed_iteration.txt holds '2'" in folder["remark"]
    assert "latest is used" in folder["remark"]
    assert folder["pointers"] == {
        "latest": "global_step3",
        "latest_checkpointed_iteration.txt": "2",
    }
    text = inspect(capsys, tmp_path)
    assert "damaged, renamed" in text
    assert "latest is used" in text
    # The folder that is named damaged is intact here, and it can be inspected by its path.
    assert "is undamaged" in inspect(capsys, tmp_path / "global_step1.damaged", "--verify")


HOLD = """
import sys, time
from pathlib import Path
from megatron.checkpoint.lease import Lease
lease = Lease.acquire(Path(sys.argv[1]), print)
print('held', flush=True)
time.sleep(600)
"""


def test_overview_shows_the_holder_of_the_lease(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, make_full_shards(make_state()))
    lease = Lease.acquire(tmp_path, print)
    held = inspect_json(capsys, tmp_path)["folder"]["lease"]
    assert held["pid"] == os.getpid()
    assert held["alive"] is True
    assert "is undamaged" in inspect(capsys, tmp_path, "--verify")
    lease.release()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    lease_file = (tmp_path / "lease.json").read_bytes()
    left = inspect_json(capsys, tmp_path)["folder"]["lease"]
    assert left["pid"] == process.pid
    assert left["alive"] is False
    text = inspect(capsys, tmp_path)
    assert f"process {process.pid} on {os.uname().nodename}, no longer running" in text
    assert (tmp_path / "lease.json").read_bytes() == lease_file


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_reported_as_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = Saver(tmp_path, CheckpointConfig(keep_latest_checkpoints=1))
    shards = make_full_shards(make_state())
    finished = threading.Event()

    def save_repeatedly() -> None:
        iteration = 0
        while not finished.is_set():
            iteration += 1
            saver.begin(CheckpointContents(iteration, {"optimizer_step": 1}, {}, CONFIG), shards)
            saver.complete()

    save(tmp_path, shards, 0)
    thread = threading.Thread(target=save_repeatedly)
    thread.start()
    try:
        outcomes: list[int] = []
        while len(outcomes) < 40 or (2 not in outcomes and len(outcomes) < 2000):
            flag = ("--verify", "--parameters")[len(outcomes) % 2]
            outcomes.append(inspect_checkpoint.main([str(tmp_path), flag]))
            printed = capsys.readouterr()
            assert outcomes[-1] in (0, 2), printed.out
            if outcomes[-1] == 2:
                assert (
                    "Try again" in printed.err or "is not a finished checkpoint" in printed.err
                ), printed.err
    finally:
        finished.set()
        thread.join()
    assert 2 in outcomes, "no checkpoint was replaced while it was read"


# Numbers that are not finite


def test_verify_counts_numbers_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every shard of a tensor is counted, also one that spans several blocks of the file."""
    state = make_state()
    state["weight", "blocks.0.qkv"][3, 5:8] = math.nan
    state["weight", "blocks.0.qkv"][639, 639] = -math.inf
    state["exp_avg", "embedding.word.weight"].fill_(math.inf)
    assert state["exp_avg", "embedding.word.weight"].numel() * 4 > BLOCK // 4
    contents = make_contents(3)
    assert contents.scalars is not None
    contents.scalars["loss_scale"] = {"scale": math.inf}
    folder = save_unchecked(tmp_path, contents, make_split_shards(state))
    found = inspect_json(capsys, folder, "--verify", code=1)
    assert found["damage"] == []
    counts = {
        entry["tensor"]: (entry["nan"], entry["inf"], entry["numbers"])
        for entry in found["not_finite"]
    }
    assert counts == {
        "weight/blocks.0.qkv": (3, 1, 640 * 640),
        "exp_avg/embedding.word.weight": (0, 700 * 640, 700 * 640),
        "optimizer.loss_scale.scale": (0, 1, 1),
    }
    text = inspect(capsys, folder, "--verify", code=1)
    assert "is undamaged" in text
    assert "weight/blocks.0.qkv: 3 NaN and 1 infinite of 409,600" in text


def test_numbers_of_a_damaged_file_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_state()
    state["weight", "blocks.0.qkv"][0, 0] = math.nan
    folder = save_unchecked(tmp_path, make_contents(3), make_full_shards(state))
    flip(folder / "rank_00000.safetensors")
    found = inspect_json(capsys, folder, "--verify", code=1)
    assert len(found["damage"]) == 1
    assert found["not_finite"] == []


# Statistics and differences


def test_statistics_leave_out_numbers_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_state()
    bad = state["weight", "blocks.0.qkv"]
    bad[3, 5] = math.nan
    bad[3, 6] = math.inf
    bad[100, 0] = -math.inf
    state["exp_avg", "blocks.2.norm"].fill_(math.nan)
    save_unchecked(tmp_path, make_contents(3), make_split_shards(state))
    rows = inspect_json(capsys, tmp_path, "--parameters")["tensors"]
    assert list(dict.fromkeys(row["name"] for row in rows)) == [
        "blocks.0.qkv",
        "blocks.2.norm",
        "blocks.10.norm",
        "embedding.word.weight",
    ]
    for row in rows:
        values = state[row["kind"], row["name"]].numpy().astype(float)
        finite = values[np.isfinite(values)]
        assert row["shape"] == list(values.shape)
        assert row["nan"] == np.isnan(values).sum()
        assert row["inf"] == np.isinf(values).sum()
        assert row["norm"] == pytest.approx(np.linalg.norm(finite), rel=1e-9)
        if finite.size:
            assert row["min"] == finite.min()
            assert row["max"] == finite.max()
            assert row["mean"] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12)
        else:
            assert row["min"] is row["max"] is row["mean"] is None
    assert "2 of 12 tensors hold" in inspect(capsys, tmp_path, "--parameters")


def test_tensors_are_equal_however_they_are_sharded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_state()
    state["weight", "blocks.2.norm"][0] = math.nan  # the same NaN in both is not a difference
    save_unchecked(tmp_path / "a", make_contents(3), make_full_shards(state))
    config = CONFIG.replace("micro_batch_size: 1", "micro_batch_size: 2")
    save_unchecked(tmp_path / "b", make_contents(3, config=config), make_split_shards(state))
    found = inspect_json(capsys, tmp_path / "a", "--compare", tmp_path / "b")
    assert found["equal"]
    assert found["config"] == ["batch.micro_batch_size: 1 and 2"]
    assert found["state"] == []
    text = inspect(capsys, tmp_path / "a", "--compare", tmp_path / "b")
    assert "12 of 12 common tensors are bit-equal" in text


def test_compare_lists_differences_of_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_state()
    other = make_state()
    other["weight", "blocks.0.qkv"][1, 2] += 0.5
    state["exp_avg", "blocks.2.norm"][7] = 0.0
    other["exp_avg", "blocks.2.norm"][7] = -0.0
    other["exp_avg_sq", "blocks.2.norm"][0] = math.nan
    other["weight", "blocks.10.norm"] = torch.zeros(641)
    del other["exp_avg", "blocks.10.norm"]
    other["exp_avg", "new"] = torch.zeros(2)
    save(tmp_path / "a", make_full_shards(state))
    save_unchecked(tmp_path / "b", make_contents(4), make_full_shards(other))
    found = inspect_json(capsys, tmp_path / "a", "--compare", tmp_path / "b", code=1)
    assert found["only_in_first"] == ["exp_avg/blocks.10.norm"]
    assert found["only_in_second"] == ["exp_avg/new"]
    assert found["shapes"] == [{"tensor": "weight/blocks.10.norm", "first": [640], "second": [641]}]
    assert found["state"] == ["state.iteration: 3 and 4", "optimizer.optimizer_step: 3 and 4"]
    unequal = {row["tensor"]: row for row in found["tensors"] if not row["bit_equal"]}
    assert unequal.keys() == {
        "weight/blocks.0.qkv",
        "exp_avg/blocks.2.norm",
        "exp_avg_sq/blocks.2.norm",
    }
    moved = unequal["weight/blocks.0.qkv"]
    assert moved["different"] == 1
    assert moved["max_absolute"] == pytest.approx(0.5, abs=1e-6)
    norm = max(float(s["weight", "blocks.0.qkv"].double().norm()) for s in (state, other))
    assert moved["relative"] == pytest.approx(0.5 / norm, rel=1e-5)
    sign = unequal["exp_avg/blocks.2.norm"]
    assert sign["different"] == 1
    assert sign["max_absolute"] == 0
    assert unequal["exp_avg_sq/blocks.2.norm"]["max_absolute"] is None
    text = inspect(capsys, tmp_path / "a", "--compare", tmp_path / "b", code=1)
    assert "weight/blocks.10.norm is 640 and 641" in text
    assert "7 of 10 common tensors are bit-equal" in text


PEAK = """
import resource, sys
from megatron.extras.interop.commands.inspect_checkpoint import main
folder = sys.argv[1]
peaks = []
for flags in [], ["--parameters"], ["--compare", folder], ["--verify"]:
    assert main([folder, *flags]) == 0
    peaks.append(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks, file=sys.stderr)
"""


def test_memory_does_not_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    one = torch.randn(1024, 4096)  # 16 MiB, stored 24 times
    shards = [
        TensorShard("weight", f"blocks.{n}", (1024, 4096), (0, 0), one, owner=True)
        for n in range(24)
    ]
    save(tmp_path, shards, optimizer=False)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    overview, *others = map(int, done.stderr.split())
    # The checkpoint has 384 MiB. The tool needs two tensors, the readers' blocks, and parts of a
    # tensor in float64.
    bound = 160 << 20
    assert max(others) - overview < bound, (overview, others)


# Damage


def list_damage(capsys: pytest.CaptureFixture[str], folder: Path) -> list[tuple[str, str]]:
    return [
        (entry["file"], entry["what"])
        for entry in inspect_json(capsys, folder, "--verify", code=1)["damage"]
    ]


TENSORS = "rank_00000.safetensors"


def test_verify_names_the_bytes_and_the_tensor_of_a_flipped_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, make_full_shards(make_state()))
    begins = {
        key: t["boxes"][0]["begin"]
        for key, t in open_checkpoint(tmp_path, 3).read_index().tensors.items()
    }
    flip(folder / TENSORS, begins["exp_avg_sq/blocks.0.qkv"] + 1000)
    [(file, what)] = list_damage(capsys, folder)
    block = (begins["exp_avg_sq/blocks.0.qkv"] + 1000) // BLOCK
    end = min((folder / TENSORS).stat().st_size, (block + 1) * BLOCK) - 1
    assert file == TENSORS
    assert f"bytes {block * BLOCK}-{end}" in what
    assert "exp_avg_sq/blocks.0.qkv" in what
    assert "weight/embedding.word.weight" not in what
    assert "is damaged" in inspect(capsys, folder, "--verify", code=1)
    assert "--verify lists all damage" in inspect(capsys, folder, "--parameters", code=2)


def test_verify_lists_all_damage(
    pool: ProcessPool, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Runner(pool, corpus, tmp_path / "run")
    run(
        "--train-iters 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-layers 2",
        ranks=4,
    )
    folder = run.folder / "global_step2"
    assert "is undamaged" in inspect(capsys, run.folder, "--verify")
    (folder / "rank_00000.safetensors").unlink()
    os.truncate(folder / "rank_00001.safetensors", 5000)
    flip(folder / "rank_00002.safetensors", (folder / "rank_00002.safetensors").stat().st_size - 2)
    flip(folder / "rank_00003.safetensors", 0)
    with open(folder / "config.yaml", "a") as file:
        file.write("# a remark\n")
    (folder / "notes.txt").write_text("by hand")
    found = inspect_json(capsys, folder, "--verify", code=1)
    what: dict[str, str] = {}
    for entry in found["damage"]:
        what[entry["file"]] = what.get(entry["file"], "") + entry["what"]
    assert what.keys() == {*(f"rank_0000{rank}.safetensors" for rank in range(4)), "config.yaml"}
    assert "is missing" in what["rank_00000.safetensors"]
    assert "has 5000 bytes instead of" in what["rank_00001.safetensors"]
    assert "safetensors cannot open" in what["rank_00001.safetensors"]
    assert "is not what was written" in what["rank_00002.safetensors"]
    assert "affects" in what["rank_00002.safetensors"]
    assert "safetensors cannot open" in what["rank_00003.safetensors"]
    assert "instead of" in what["config.yaml"]
    unknown, other = found["notes"]
    assert "which states must exist" in unknown
    assert other == "not part of it: notes.txt"


@pytest.mark.parametrize("victim", ["manifest.json", "index.json"])
def test_damage_of_the_manifest_or_the_index_is_reported(
    victim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, make_full_shards(make_state()))
    flip(folder / victim, 40)
    flip(folder / TENSORS, 2 * BLOCK)
    damage = list_damage(capsys, folder)
    # Without its manifest, the digests of the other files are not known.
    expected = {
        "manifest.json": {"manifest.json"},
        "index.json": {"index.json", TENSORS},
    }
    assert {file for file, _ in damage} == expected[victim]
    error = inspect(capsys, folder, code=2)
    assert f"{folder} is damaged: {victim}" in error
    assert json.loads(inspect_failure_as_json(capsys, folder))["error"]


def inspect_failure_as_json(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert inspect_checkpoint.main([str(folder), "--json"]) == 2
    return capsys.readouterr().out


def test_a_renamed_checkpoint_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, make_full_shards(make_state()))
    folder.rename(tmp_path / "global_step5")
    assert list_damage(capsys, tmp_path / "global_step5") == [
        ("manifest.json", "it is the checkpoint of iteration 3, renamed")
    ]


def test_slices_that_do_not_tile_a_tensor_are_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, make_split_shards(make_state()))
    index = json.loads((folder / "index.json").read_text())
    tensors = index["tensors"]
    # The first slice of each tensor ends at 213. Removing the second one leaves a gap. Moving it to
    # 200 makes an overlap, and a gap of the same size at the end. At 214 it leaves the tensor.
    tensors["weight/blocks.0.qkv"]["boxes"].pop()
    tensors["exp_avg/blocks.0.qkv"]["boxes"][1]["offset"] = [200, 0]
    tensors["weight/blocks.2.norm"]["boxes"][1]["offset"] = [214]
    resign(folder, index)
    damage = [what for file, what in list_damage(capsys, folder) if file == "index.json"]
    gap, overlap, outside, uncovered = damage
    assert f"{427 * 640} of the {640 * 640} elements of weight/blocks.0.qkv" in gap
    assert "and 0 are in more than one" in gap
    assert f"{13 * 640} of the {640 * 640} elements of exp_avg/blocks.0.qkv" in overlap
    assert f"and {13 * 640} are in more than one" in overlap
    assert "weight/blocks.2.norm is 640" in outside
    assert "427 at [214]" in outside
    assert "427 of the 640 elements of weight/blocks.2.norm" in uncovered


def test_an_index_that_contradicts_the_files_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, make_full_shards(make_state()))
    index = json.loads((folder / "index.json").read_text())
    tensors = index["tensors"]
    x, y = (tensors[f"weight/blocks.{n}.norm"]["boxes"][0] for n in (2, 10))
    # Every digest is right, but each parameter gets the values of the other one.
    x["begin"], y["begin"] = y["begin"], x["begin"]
    resign(folder, index)
    damage = list_damage(capsys, folder)
    assert len(damage) == 4
    assert all(file == TENSORS and "blocks." in what for file, what in damage)
    found = f"weight/blocks.2.norm@0, F32 640, at byte {x['begin']}"
    assert any(found in what for _, what in damage)


def test_missing_moments_are_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = make_state()
    del state["exp_avg_sq", "blocks.2.norm"]
    state["exp_avg", "blocks.0.qkv"] = torch.zeros(640, 639)
    damage = list_damage(capsys, save(tmp_path, make_full_shards(state)))
    assert ("index.json", "exp_avg_sq/blocks.2.norm is not in the checkpoint") in damage
    assert any("weight and moments of blocks.0.qkv differ in shape" in what for _, what in damage)
    assert len(damage) == 2


def test_a_checkpoint_without_moments_is_undamaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {key: tensor for key, tensor in make_state().items() if key[0] == "weight"}
    save(tmp_path, make_full_shards(weights), optimizer=False)
    assert "is undamaged" in inspect(capsys, tmp_path, "--verify")
    assert "not stored" in inspect(capsys, tmp_path)
    assert inspect_json(capsys, tmp_path)["optimizer"] is None


# Errors


def test_errors_name_the_value_and_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    folder = save(root, make_full_shards(make_state()))
    nowhere = tmp_path / "nowhere"
    assert f"{nowhere} does not exist" in inspect(capsys, nowhere, code=2)
    absent = inspect(capsys, root, "--iteration", 4, code=2)
    assert "has no such checkpoint" in absent
    assert "global_step3" in absent
    assert "is a checkpoint itself" in inspect(capsys, folder, "--iteration", 3, code=2)
    assert "give one of them" in inspect(capsys, root, "--verify", "--config", code=2)
    assert f"{nowhere} does not exist" in inspect(capsys, root, "--compare", nowhere, code=2)
    (root / "latest").write_text("nonsense")
    assert "holds 'nonsense'" in inspect(capsys, root, code=2)
    assert inspect_json(capsys, root, "--iteration", 3)["folder"]["remark"] is not None


def test_generate_lists_the_checkpoints_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    save(root, make_full_shards(make_state()))
    assert generate.main(["--load", str(root), "--prompt", "a", "--iteration", "33"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "global_step33; there are: global_step3\n" in error


def test_a_configuration_of_another_version_does_not_hide_the_rest_of_the_overview(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, make_full_shards(make_state()), config=CONFIG + "wormholes: {number: 3}\n")
    found = inspect_json(capsys, tmp_path)
    assert found["model"] is None
    assert "wormholes" in found["problem"]
    assert "wormholes" in inspect(capsys, tmp_path)
    assert "wormholes" in inspect(capsys, tmp_path, "--config")


def test_the_script_verifies_a_run(tmp_path: Path) -> None:
    folder = save(tmp_path, make_full_shards(make_state()))
    flip(folder / TENSORS, BLOCK)
    command = [sys.executable, str(ROOT / "tools/inspect_checkpoint.py"), str(tmp_path), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ""
    assert f"bytes {BLOCK}-{2 * BLOCK - 1}" in done.stdout
