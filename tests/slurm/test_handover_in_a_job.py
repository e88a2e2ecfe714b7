"""An array task rehearses recorded steps after a change of the code, on stand-ins for Slurm."""

import json
import re
from pathlib import Path

import pytest
from slurm.stand_in import StandIn
from slurm.test_array_task import TWO_RANKS, TinyRun


@pytest.mark.full
def test_the_training_goes_on_only_with_go(tmp_path: Path) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    run = TinyRun(StandIn(folder), tmp_path)
    chronicle = run.checkpoints / "chronicle.jsonl"

    def submit(last: str) -> str:
        """Run one array task up to an iteration, and return what it added to the log."""
        before = len(run.main_log())
        run.submit("--array=1-1%1", TWO_RANKS, EXIT_INTERVAL=last)
        return run.main_log()[before:]

    def pretend_other_code() -> None:
        text = re.sub(r'"version": "[^"]*"', '"version": "0.0.1"', chronicle.read_text())
        chronicle.write_text(text)

    assert "a rehearsal begins" not in submit("10")
    pretend_other_code()
    log = submit("20")
    assert "the code was 0.0.1 and is" in log
    assert "\nchanged: version 0.0.1 -> " in log
    assert "\ngo\n" in log
    assert max(run.curve()) == 20
    assert not list((tmp_path / "tiny-logs" / "logs").glob("handover-*"))
    pretend_other_code()
    # The newest checkpoint with three later steps is that of iteration 15.
    metrics = tmp_path / "tiny-logs" / "logs" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    changed = [
        {**line, "lm_loss": line["lm_loss"] + 0.01}
        if (line["kind"], line["iteration"]) == ("train", 17)
        else line
        for line in lines
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in changed))
    log = submit("30")
    assert "no go: iteration 17, loss" in log
    assert "ALERT" in log
    assert max(run.curve()) == 20
