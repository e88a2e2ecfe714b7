"""The commands that take the address of a run."""

import json
import os
from pathlib import Path

import pytest
from object_store.jobs import NewStoreJob, Stored, StoreJob

from megatron.extras.inference.commands import generate
from megatron.extras.interop.commands import inspect_checkpoint
from megatron.extras.operations.commands import rollback

FIXTURES = Path(__file__).parents[1] / "fixtures" / "openwebtext-100"
TOKENIZER = (
    f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt"
)


@pytest.fixture
def job(new_store_job: NewStoreJob) -> StoreJob:
    job = new_store_job(f"--train-iters 6 --save-interval 2 {TOKENIZER}")
    job.succeed("--exit-interval 6")
    return job


def test_inspection_and_rollback(
    job: StoreJob, address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stored = Stored(address)
    assert inspect_checkpoint.main([address, "--json"]) == 0
    overview = json.loads(capsys.readouterr().out)
    assert overview["path"] == f"{address}/global_step6"
    assert overview["iteration"] == 6
    assert inspect_checkpoint.main([f"{address}/global_step4", "--verify"]) == 0
    report = capsys.readouterr().out
    assert "megatron-mirror" not in report
    assert "stored_as" not in report
    for wrong in ([address, "--iteration", "5"], [f"{address}/global_step5"]):
        assert inspect_checkpoint.main(wrong) == 2
        message = capsys.readouterr().err
        assert "megatron-mirror" not in message
        assert address in message
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, content in stored.files(6).items():
        (folder / name).write_bytes(content)
    assert inspect_checkpoint.main([address, "--compare", str(folder)]) == 0

    check_generation(address, folder, capsys)

    key = stored.key(4, "rank_00000.safetensors")
    damaged = bytearray(stored.objects.read(key))
    damaged[-1] ^= 1
    stored.objects.write(key, bytes(damaged))
    assert inspect_checkpoint.main([address, "--iteration", "4", "--verify"]) == 1
    assert inspect_checkpoint.main([address + "-wrong"]) == 2
    assert "has no checkpoint; give the --save address" in capsys.readouterr().err
    damaged[-1] ^= 1
    stored.objects.write(key, bytes(damaged))

    before = stored.root
    command = [address, "--to", "2", "--reason", "a test"]
    assert rollback.main([*command, "--dry-run"]) == 0
    assert stored.root == before
    assert rollback.main(command) == 0, capsys.readouterr()
    root = stored.root
    assert root["latest"] == "global_step2"
    assert set(root["folders"].values()) == set(before["folders"].values())
    moved = sorted(name for name in root["folders"] if name.startswith("rolled-back/"))
    assert [os.path.basename(name) for name in moved] == ["global_step4", "global_step6"]
    records = stored.objects.list("local/")
    assert "local/interventions.jsonl" in records
    lines = stored.objects.read("local/metrics.jsonl").decode().splitlines()
    assert max(json.loads(line).get("iteration", 0) for line in lines) == 2
    # The run goes on from there, on its host, whose records still have the later iterations.
    job.succeed("--exit-interval 4")
    assert sorted(job.curve()) == [1, 2, 3, 4]
    assert stored.root["latest"] == "global_step4"
    assert set(moved) < set(stored.root["folders"])


def check_generation(address: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the model on the store writes the same text as a copy on a disk."""
    flags = ["--prompt", "The", "--max-new-tokens", "8", "--temperature", "0", "--device", "cpu"]
    run = folder.parent / "run"
    run.mkdir()
    (run / "global_step6").symlink_to(folder)
    (run / "latest").write_text("global_step6")
    capsys.readouterr()
    texts = []
    for load in (address, str(run)):
        assert generate.main(["--load", load, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10


@pytest.mark.full
def test_conversion_and_evaluation(
    job: StoreJob, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.extras.inference.commands import evaluate
    from megatron.extras.interop.commands import convert_checkpoint

    out = tmp_path / "hf"
    assert convert_checkpoint.main(["to-hf", "--load", address, "--out", str(out)]) == 0
    assert f"iteration 6 of {address} is exported to {out}" in capsys.readouterr().out
    assert (out / "model.safetensors").is_file()
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    assert evaluate.main(["--load", address, "--text-files", str(text), "--device", "cpu"]) == 0
