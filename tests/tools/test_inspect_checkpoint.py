"""tools/inspect_checkpoint.py on real checkpoints: those of runs and of savers, whole, damaged, and replaced under its eyes."""

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
from torch import Tensor
from training.runs import Runner

from megatron.checkpoint.digest import BLOCK
from megatron.checkpoint.folder import set_aside
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, Saver, save_checkpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.shard import TensorShard
from tools import inspect_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, seq_length: 4}\nbatch: {micro_batch_size: 1}\n"
KINDS = ("weight", "exp_avg", "exp_avg_sq")
SHAPES = {
    "embedding.word.weight": (700, 640),
    "blocks.0.qkv": (640, 640),
    "blocks.10.norm": (640,),
    "blocks.2.norm": (640,),
}


def state_of(seed: int = 0) -> dict[tuple[str, str], Tensor]:
    """Some 10 MB: a few blocks of a file."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (kind, name): torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
        for kind in KINDS
    }


def whole(state: dict[tuple[str, str], Tensor]) -> list[TensorShard]:
    return [
        TensorShard(k, n, tuple(t.shape), (0,) * t.dim(), t, owner=True)
        for (k, n), t in state.items()
    ]  # type: ignore[arg-type]


def cut(state: dict[tuple[str, str], Tensor]) -> list[TensorShard]:
    """Other boxes of the same tensors."""
    shards = []
    for (kind, name), tensor in state.items():
        middle = tensor.shape[0] // 3
        for low, part in ((0, tensor[:middle]), (middle, tensor[middle:])):
            offset = (low, *(0 for _ in tensor.shape[1:]))
            shards.append(
                TensorShard(kind, name, tuple(tensor.shape), offset, part.clone(), owner=True)
            )  # type: ignore[arg-type]
    return shards


def described(
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
    return save_checkpoint(root, described(iteration, optimizer=optimizer, config=config), shards)


def inspect(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    """What is printed: to stdout, or to stderr on an error."""
    assert inspect_checkpoint.main([str(word) for word in argv]) == code
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out


def inspect_json(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> dict:
    return json.loads(inspect(capsys, *argv, "--json", code=code))


def contents_of(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in [root, *root.rglob("*")]
    }


# A run's


@pytest.fixture(scope="module")
def trained(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints of a run on two tensor-parallel ranks, in fp16."""
    run = Runner(pool, corpus, tmp_path_factory.mktemp("trained") / "run")
    run(
        "--train-iters 4 --save-interval 2 --tensor-model-parallel-size 2 --fp16 --initial-loss-scale 1024",
        ranks=2,
    )
    return run.folder


def test_overview_of_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents_of(trained)
    found = inspect_json(capsys, trained)
    assert (
        found["iteration"],
        found["state"]["consumed_samples"],
        found["state"]["lr_samples"],
    ) == (4, 16, 16)
    assert found["layout"] == "pipeline 1 x data 1 x tensor 2"
    assert found["learning_rate"] == pytest.approx(2e-3)
    assert found["optimizer"]["loss_scale"]["scale"] == 1024
    assert (
        found["model"]["hidden_size"],
        found["model"]["ffn_hidden_size"],
        found["model"]["vocab_size"],
    ) == (32, 128, 5000)
    h, vocab, seq = 32, 5000, 32
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
        "held by nobody",
    ):
        assert part in text
    assert "folder" not in inspect_json(capsys, trained / "global_step2")
    assert inspect_json(capsys, trained, "--iteration", 2)["state"]["consumed_samples"] == 8
    assert contents_of(trained) == before


def test_configuration_of_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        inspect(capsys, trained, "--config") == (trained / "global_step4/config.yaml").read_text()
    )


def test_a_run_s_checkpoint_is_whole_and_its_tensors_can_be_read(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect_json(capsys, trained, "--verify")
    assert (found["damage"], found["notes"], found["files"], found["tensors"]) == ([], [], 5, 48)
    assert "is whole" in inspect(capsys, trained, "--verify")
    rows = {
        (row["kind"], row["name"]): row
        for row in inspect_json(capsys, trained, "--parameters")["tensors"]
    }
    assert len(rows) == 48
    checkpoint = open_checkpoint(trained, 4)
    for (kind, name), row in rows.items():
        tensor = torch.empty(row["shape"])
        checkpoint.load_into(
            [TensorShard(kind, name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, owner=True)]
        )  # type: ignore[arg-type]
        assert row["norm"] == pytest.approx(
            float(np.linalg.norm(tensor.numpy().astype(float))), rel=1e-9
        )
        assert (row["min"], row["max"]) == (float(tensor.min()), float(tensor.max()))


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


def test_what_else_the_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = state_of()
    for iteration in (1, 2, 3):
        save(tmp_path, whole(state), iteration)
    set_aside(tmp_path, 1)
    (tmp_path / "global_step9.unfinished").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "global_step2/manifest.json").write_text("{}")
    folder = inspect_json(capsys, tmp_path)["folder"]
    assert [entry["name"] for entry in folder["checkpoints"]] == ["global_step2", "global_step3"]
    assert "manifest.json is not what was written" in folder["checkpoints"][0]["problem"]
    assert (folder["damaged"], folder["unfinished"]) == (
        ["global_step1.damaged"],
        ["global_step9.unfinished"],
    )
    assert "latest_checkpointed_iteration.txt '2'; latest decides" in folder["remark"]
    assert folder["pointers"] == {
        "latest": "global_step3",
        "latest_checkpointed_iteration.txt": "2",
    }
    text = inspect(capsys, tmp_path)
    assert "damaged, set aside" in text
    assert "latest decides" in text
    assert "is whole" in inspect(
        capsys, tmp_path / "global_step1.damaged", "--verify"
    )  # by its path


HOLD = "import sys, time; from pathlib import Path; from megatron.checkpoint.lease import Lease\n"
HOLD += (
    "lease = Lease.acquire(Path(sys.argv[1]), print); print('held', flush=True); time.sleep(600)"
)


def test_who_holds_the_lease(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, whole(state_of()))
    lease = Lease.acquire(tmp_path, print)
    held = inspect_json(capsys, tmp_path)["folder"]["lease"]
    assert (held["pid"], held["alive"]) == (os.getpid(), True)
    assert "is whole" in inspect(capsys, tmp_path, "--verify")
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
    assert (left["pid"], left["alive"]) == (process.pid, False)
    assert f"process {process.pid} on {os.uname().nodename}, gone" in inspect(capsys, tmp_path)
    assert (tmp_path / "lease.json").read_bytes() == lease_file


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = Saver(tmp_path, CheckpointConfig(keep_latest_checkpoints=1))
    state, over = state_of(), threading.Event()

    def go_on() -> None:
        iteration = 0
        while not over.is_set():
            iteration += 1
            saver.begin(
                CheckpointContents(iteration, {"optimizer_step": 1}, {}, CONFIG), whole(state)
            )
            saver.complete()

    save(tmp_path, whole(state), 0)
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        outcomes: list[int] = []
        while len(outcomes) < 40 or (2 not in outcomes and len(outcomes) < 2000):
            outcomes.append(
                inspect_checkpoint.main(
                    [str(tmp_path), ("--verify", "--parameters")[len(outcomes) % 2]]
                )
            )
            printed = capsys.readouterr()
            assert outcomes[-1] in (0, 2), printed.out
            if outcomes[-1] == 2:
                assert (
                    "Ask again" in printed.err or "is not a finished checkpoint" in printed.err
                ), printed.err
    finally:
        over.set()
        thread.join()
    assert 2 in outcomes, "nothing was replaced under its eyes"


# Numbers that are not finite


def test_verify_counts_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In boxes of every cut, and in those that lie in several blocks of the file."""
    state = state_of()
    state["weight", "blocks.0.qkv"][3, 5:8] = math.nan
    state["weight", "blocks.0.qkv"][639, 639] = -math.inf
    state["exp_avg", "embedding.word.weight"].fill_(math.inf)
    assert state["exp_avg", "embedding.word.weight"].numel() * 4 > BLOCK // 4
    contents = described(3)
    contents.scalars["loss_scale"] = {"scale": math.inf}
    folder = save_unchecked(tmp_path, contents, cut(state))
    found = inspect_json(capsys, folder, "--verify", code=1)
    assert found["damage"] == []
    assert {
        entry["tensor"]: (entry["nan"], entry["inf"], entry["numbers"])
        for entry in found["not_finite"]
    } == {
        "weight/blocks.0.qkv": (3, 1, 640 * 640),
        "exp_avg/embedding.word.weight": (0, 700 * 640, 700 * 640),
        "optimizer.loss_scale.scale": (0, 1, 1),
    }
    text = inspect(capsys, folder, "--verify", code=1)
    assert "is whole" in text
    assert "weight/blocks.0.qkv: 3 NaN and 1 infinite of 409,600 numbers" in text


def test_numbers_of_a_damaged_file_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_of()
    state["weight", "blocks.0.qkv"][0, 0] = math.nan
    folder = save_unchecked(tmp_path, described(3), whole(state))
    flip(folder / "rank_00000.safetensors")
    found = inspect_json(capsys, folder, "--verify", code=1)
    assert len(found["damage"]) == 1
    assert found["not_finite"] == []


# Statistics and differences


def test_statistics_leave_out_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_of()
    bad = state["weight", "blocks.0.qkv"]
    bad[3, 5], bad[3, 6], bad[100, 0] = math.nan, math.inf, -math.inf
    state["exp_avg", "blocks.2.norm"].fill_(math.nan)
    save_unchecked(tmp_path, described(3), cut(state))
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
        assert (row["shape"], row["nan"], row["inf"]) == (
            list(values.shape),
            np.isnan(values).sum(),
            np.isinf(values).sum(),
        )
        assert row["norm"] == pytest.approx(np.linalg.norm(finite), rel=1e-9)
        if finite.size:
            assert (row["min"], row["max"]) == (finite.min(), finite.max())
            assert row["mean"] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12)
        else:
            assert row["min"] is row["max"] is row["mean"] is None
    assert "2 of 12 tensors hold numbers that are not finite" in inspect(
        capsys, tmp_path, "--parameters"
    )


def test_equal_however_it_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = state_of()
    state["weight", "blocks.2.norm"][0] = math.nan  # the same NaN is no difference
    save_unchecked(tmp_path / "a", described(3), whole(state))
    config = CONFIG.replace("micro_batch_size: 1", "micro_batch_size: 2")
    save_unchecked(tmp_path / "b", described(3, config=config), cut(state))
    found = inspect_json(capsys, tmp_path / "a", "--compare", tmp_path / "b")
    assert (found["equal"], found["config"], found["state"]) == (
        True,
        ["batch.micro_batch_size: 1 and 2"],
        [],
    )
    text = inspect(capsys, tmp_path / "a", "--compare", tmp_path / "b")
    assert "12 of 12 tensors of both are equal bit by bit" in text


def test_differences_of_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, other = state_of(), state_of()
    other["weight", "blocks.0.qkv"][1, 2] += 0.5
    state["exp_avg", "blocks.2.norm"][7], other["exp_avg", "blocks.2.norm"][7] = 0.0, -0.0
    other["exp_avg_sq", "blocks.2.norm"][0] = math.nan
    other["weight", "blocks.10.norm"] = torch.zeros(641)
    del other["exp_avg", "blocks.10.norm"]
    other["exp_avg", "new"] = torch.zeros(2)
    save(tmp_path / "a", whole(state))
    save_unchecked(tmp_path / "b", described(4), whole(other))
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
    assert (moved["different"], moved["max_absolute"]) == (1, pytest.approx(0.5, abs=1e-6))
    norm = max(float(s["weight", "blocks.0.qkv"].double().norm()) for s in (state, other))
    assert moved["relative"] == pytest.approx(0.5 / norm, rel=1e-5)
    assert (
        unequal["exp_avg/blocks.2.norm"]["different"],
        unequal["exp_avg/blocks.2.norm"]["max_absolute"],
    ) == (1, 0)
    assert unequal["exp_avg_sq/blocks.2.norm"]["max_absolute"] is None
    text = inspect(capsys, tmp_path / "a", "--compare", tmp_path / "b", code=1)
    assert "weight/blocks.10.norm is 640 and 641" in text
    assert "7 of 10 tensors of both are equal bit by bit" in text


PEAK = """
import resource, sys
from tools.inspect_checkpoint import main
folder, peaks = sys.argv[1], []
for flags in [], ["--parameters"], ["--compare", folder], ["--verify"]:
    assert main([folder, *flags]) == 0
    peaks.append(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks, file=sys.stderr)
"""


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    one = torch.randn(1024, 4096)  # 16 MiB; 24 of them
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
    room = 160 << 20  # of 384: two tensors, the readers' blocks, pieces in float64
    assert max(others) - overview < room, (overview, others)


# Damage


def damage_of(capsys: pytest.CaptureFixture[str], folder: Path) -> list[tuple[str, str]]:
    return [
        (entry["file"], entry["what"])
        for entry in inspect_json(capsys, folder, "--verify", code=1)["damage"]
    ]


TENSORS = "rank_00000.safetensors"


def test_a_flipped_bit_is_found_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, whole(state_of()))
    begins = {
        key: t["boxes"][0]["begin"]
        for key, t in open_checkpoint(tmp_path, 3).read_index().tensors.items()
    }
    flip(folder / TENSORS, begins["exp_avg_sq/blocks.0.qkv"] + 1000)
    [(file, what)] = damage_of(capsys, folder)
    block = (begins["exp_avg_sq/blocks.0.qkv"] + 1000) // BLOCK
    end = min((folder / TENSORS).stat().st_size, (block + 1) * BLOCK) - 1
    assert file == TENSORS
    assert f"bytes {block * BLOCK}-{end} differ" in what
    assert "exp_avg_sq/blocks.0.qkv" in what
    assert "weight/embedding.word.weight" not in what
    assert "is damaged" in inspect(capsys, folder, "--verify", code=1)
    assert "--verify lists all damage" in inspect(capsys, folder, "--parameters", code=2)


def test_all_damage_is_listed(
    pool: ProcessPool, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Runner(pool, corpus, tmp_path / "run")
    run(
        "--train-iters 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2",
        ranks=4,
    )
    folder = run.folder / "global_step2"
    assert "is whole" in inspect(capsys, run.folder, "--verify")
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
    assert "concerns" in what["rank_00002.safetensors"]
    assert "safetensors cannot open" in what["rank_00003.safetensors"]
    assert "instead of" in what["config.yaml"]
    assert found["notes"] == ["not part of it: notes.txt"]


@pytest.mark.parametrize("victim", ["manifest.json", "index.json"])
def test_a_damaged_small_file(
    victim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, whole(state_of()))
    flip(folder / victim, 40)
    flip(folder / TENSORS, 2 * BLOCK)
    damage = damage_of(capsys, folder)
    assert {file for file, _ in damage} == (
        {"manifest.json"} if victim == "manifest.json" else {"index.json", TENSORS}
    )
    assert f"{folder} is damaged: {victim} is not what was written" in inspect(
        capsys, folder, code=2
    )
    assert json.loads(inspect_out_of_error(capsys, folder))["error"]


def inspect_out_of_error(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert inspect_checkpoint.main([str(folder), "--json"]) == 2
    return capsys.readouterr().out


def test_a_renamed_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path, whole(state_of()))
    folder.rename(tmp_path / "global_step5")
    assert damage_of(capsys, tmp_path / "global_step5") == [
        ("manifest.json", "it is the checkpoint of iteration 3, renamed")
    ]


def test_boxes_that_do_not_tile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path, cut(state_of()))
    index = json.loads((folder / "index.json").read_text())
    tensors = index["tensors"]
    tensors["weight/blocks.0.qkv"]["boxes"].pop()  # a gap
    tensors["exp_avg/blocks.0.qkv"]["boxes"][1]["offset"] = [
        200,
        0,
    ]  # 213: an overlap, and a gap as large, behind it
    tensors["weight/blocks.2.norm"]["boxes"][1]["offset"] = [214]  # 213: one too far
    resign(folder, index)
    damage = [what for file, what in damage_of(capsys, folder) if file == "index.json"]
    assert damage == [
        f"of weight/blocks.0.qkv's {640 * 640} elements {427 * 640} are in no box, 0 in more than one",
        f"of exp_avg/blocks.0.qkv's {640 * 640} elements {13 * 640} are in no box, {13 * 640} in more than one",
        "weight/blocks.2.norm is 640, and a box of 427 at [214] is not within it",
        "of weight/blocks.2.norm's 640 elements 427 are in no box, 0 in more than one",
    ]


def test_an_index_that_does_not_fit_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, whole(state_of()))
    index = json.loads((folder / "index.json").read_text())
    tensors = index["tensors"]
    x, y = (tensors[f"weight/blocks.{n}.norm"]["boxes"][0] for n in (2, 10))
    x["begin"], y["begin"] = (
        y["begin"],
        x["begin"],
    )  # exchanged: every digest is right, and the values are another parameter's
    resign(folder, index)
    damage = damage_of(capsys, folder)
    assert len(damage) == 4
    assert all(file == TENSORS and "blocks." in what for file, what in damage)
    assert any(f"weight/blocks.2.norm@0, 640, at byte {x['begin']}" in what for _, what in damage)


def test_moments_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = state_of()
    del state["exp_avg_sq", "blocks.2.norm"]
    state["exp_avg", "blocks.0.qkv"] = torch.zeros(640, 639)
    damage = damage_of(capsys, save(tmp_path, whole(state)))
    assert ("index.json", "exp_avg_sq/blocks.2.norm is not in it") in damage
    assert any("the kinds of blocks.0.qkv have different shapes" in what for _, what in damage)
    assert len(damage) == 2


def test_weights_alone_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {key: tensor for key, tensor in state_of().items() if key[0] == "weight"}
    save(tmp_path, whole(weights), optimizer=False)
    assert "is whole" in inspect(capsys, tmp_path, "--verify")
    assert "not in it" in inspect(capsys, tmp_path)
    assert inspect_json(capsys, tmp_path)["optimizer"] is None


# Errors


def test_errors_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    folder = save(root, whole(state_of()))
    assert "is not there; give a run's folder" in inspect(capsys, tmp_path / "nowhere", code=2)
    assert "has no such checkpoint; there are: global_step3" in inspect(
        capsys, root, "--iteration", 4, code=2
    )
    assert "leave one of them out" in inspect(capsys, folder, "--iteration", 3, code=2)
    assert "ask for one at a time" in inspect(capsys, root, "--verify", "--config", code=2)
    assert "is not there" in inspect(capsys, root, "--compare", tmp_path / "nowhere", code=2)
    (root / "latest").write_text("nonsense")
    assert "holds 'nonsense', which names no checkpoint" in inspect(capsys, root, code=2)
    assert inspect_json(capsys, root, "--iteration", 3)["folder"]["remark"] is not None


def test_a_configuration_of_another_version_is_no_obstacle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, whole(state_of()), config=CONFIG + "wormholes: {number: 3}\n")
    found = inspect_json(capsys, tmp_path)
    assert found["model"] is None
    assert "wormholes" in found["problem"]
    assert "wormholes" in inspect(capsys, tmp_path)
    assert "wormholes" in inspect(capsys, tmp_path, "--config")


def test_from_the_command_line(tmp_path: Path) -> None:
    folder = save(tmp_path, whole(state_of()))
    flip(folder / TENSORS, BLOCK)
    command = [sys.executable, str(ROOT / "tools/inspect_checkpoint.py"), str(tmp_path), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"bytes {BLOCK}-{2 * BLOCK - 1} differ" in done.stdout
