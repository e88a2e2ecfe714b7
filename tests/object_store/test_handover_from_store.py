"""Recorded steps of a run on a store are trained again, by a real process."""

import json
from pathlib import Path

import pytest
from object_store.jobs import NewStoreJob, Stored

from megatron.commands import handover

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_a_rehearsal_from_a_store(
    new_store_job: NewStoreJob,
    address: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = new_store_job("--train-iters 8 --save-interval 2")
    job.succeed("--exit-interval 6")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored = Stored(address).objects.list("")
    command = [str(ROOT / "pretrain_gpt.py"), *job.argv, "--micro-batch-size", "4"]
    assert handover.main([address, "--from", "2", "--steps", "4", "--json", "--", *command]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["verdict"], answer["changes"]["--micro-batch-size"]) == ("go", ["2", "4"])
    assert {each["iteration"] for each in answer["quantities"]} == {3, 4, 5, 6}
    assert Stored(address).objects.list("") == stored
    assert handover.main([f"{address}-none", "--", *command]) == 3
    assert "not rehearsed: there is no checkpoint; give" in capfd.readouterr().err
