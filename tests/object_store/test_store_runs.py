"""Runs on a store: other layouts, hosts that share nothing, and the same bytes as on a disk."""

import json
from pathlib import Path

import pytest
from object_store.jobs import NewStoreJob, Stored, saved_lines

from megatron.observe.metrics import read_metrics

LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4"


def test_other_layouts_and_hosts_resume_and_bytes_equal_those_of_a_disk(
    new_store_job: NewStoreJob, address: str, tmp_path: Path
) -> None:
    flags = f"{LAYOUT} --save-interval 2 --async-save --keep-latest-checkpoints 2"
    on_disk = new_store_job(flags, 4, str(tmp_path / "disk"))
    on_disk.succeed("--exit-interval 4")
    stored = Stored(address)

    job = new_store_job(flags, 4)
    job.succeed("--exit-interval 2")
    stored.check(2)
    files = stored.files(2)
    disk = tmp_path / "disk" / "global_step2"
    assert sorted(files) == sorted(path.name for path in disk.iterdir())
    for name, content in files.items():
        # The configuration names where the checkpoint is, and the manifest has its digest.
        if name not in ("config.yaml", "manifest.json"):
            assert content == (disk / name).read_bytes(), name
    on_store, of_disk = (
        json.loads(text) for text in (files["manifest.json"], (disk / "manifest.json").read_bytes())
    )
    for manifest in (on_store, of_disk):
        # The state has times.
        del manifest["files"]["config.yaml"], manifest["digest"], manifest["state"]
    assert on_store == of_disk
    # No tensor is left on a host.
    for host in range(4):
        local = tmp_path / "job_1" / "hosts" / f"host_{host}" / "local"
        assert sum(file.stat().st_blocks for file in local.rglob("*.safetensors")) == 0

    # The job goes on with other hosts.
    job.hosts = "others"
    output = job.succeed(
        "--exit-interval 4 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4"
    )
    assert f"successfully loaded checkpoint from {address} at iteration 2" in output
    assert saved_lines(output) == [4]
    curve = {
        entry["iteration"]: entry
        for entry in map(json.loads, (tmp_path / "disk/metrics.jsonl").read_text().splitlines())
        if "lm_loss" in entry
    }
    # The first two iterations come from the store.
    assert sorted(job.curve()) == [1, 2, 3, 4]
    for iteration, (loss, norm) in job.curve().items():
        assert loss == pytest.approx(curve[iteration]["lm_loss"], rel=1e-5)
        assert norm == pytest.approx(curve[iteration]["grad_norm"], rel=1e-5)

    output = job.succeed(
        "--exit-interval 6 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--micro-batch-size 1"
    )
    assert f"successfully loaded checkpoint from {address} at iteration 4" in output
    stored.check(4, 6)
    assert "removed by --keep-latest-checkpoints: global_step2" in output


EXPERTS = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
HSDP = "--sharding-strategy hsdp --hsdp-shard-size 2"
ONE = "--micro-batch-size 1"


@pytest.mark.full
@pytest.mark.parametrize(
    ("shared", "first", "second"),
    [
        # (flags of both, flags and ranks of the first launch, and of the second one)
        (EXPERTS, (ONE, 4), (ONE, 2)),
        ("", (f"{HSDP} {ONE}", 4), ("--zero-stage 1", 2)),
        ("--deepspeed", (f"--zero-stage 2 {ONE}", 2), (ONE, 1)),
        ("", (f"--deepspeed --zero-stage 3 {ONE}", 2), ("", 1)),
    ],
    ids=["experts", "hsdp", "deepspeed", "from deepspeed"],
)
def test_other_engines_and_numbers_of_hosts_have_the_curve_of_a_disk(
    shared: str,
    first: tuple[str, int],
    second: tuple[str, int],
    new_store_job: NewStoreJob,
    address: str,
    tmp_path: Path,
) -> None:
    flags = f"--save-interval 2 --keep-latest-checkpoints 2 {shared}"
    curves = []
    for place in (address, str(tmp_path / "disk")):
        job = new_store_job(flags, place=place)
        job.succeed(f"--exit-interval 4 {first[0]}", ranks=first[1])
        job.hosts = "others"
        job.succeed(f"--exit-interval 6 {second[0]}", ranks=second[1])
        metrics = job.local if place == address else tmp_path / "disk"
        curves.append(
            {
                entry["iteration"]: (entry["lm_loss"], entry["grad_norm"])
                for entry in read_metrics(metrics / "metrics.jsonl")
            }
        )
    assert sorted(curves[0]) == [1, 2, 3, 4, 5, 6]
    assert curves[0] == curves[1]
    Stored(address).check(4, 6)
