"""A process that reaches the port of the rendezvous store writes the keys of the roll call."""

import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from faults.launches import NewJob
from process_pool import find_free_port

LOST = 1


@pytest.mark.parametrize("forged", [False, pytest.param(True, marks=pytest.mark.full)])
def test_only_keys_with_the_prefix_of_the_job_count(
    forged: bool, new_job: NewJob, tmp_path: Path
) -> None:
    """A process that reads the prefix ends the run. Nothing is written outside of its folder."""
    job = new_job("job", "--hang-timeout 100 --train-iters 1000000", 2)
    port = find_free_port()
    launch = job.launch(environment={"MASTER_PORT": str(port)})
    launch.wait_for_line("iteration        3/")
    server = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    # torch gives the keys of the default process group this prefix.
    dist.PrefixStore("0/", server).set("roll_call/called", "1")
    # Each rank looks at its keys once a second. If a roll is called, it writes its state at once.
    time.sleep(2.5)
    assert launch.running() == [0, 1]
    assert not (job.folder / "hangs").exists()
    store = dist.PrefixStore("0/", dist.PrefixStore(server.get("arrived/0").decode(), server))
    outside = tmp_path / "outside"
    store.set("roll_call/answer/1", '{"left": 1}')
    if forged:
        store.set("roll_call/finished", "forged\rline\x1b[2J")
    store.set("roll_call/called", str(outside))
    launch.wait_for(lambda: not launch.running(), "the end")
    assert launch.codes() == [LOST, LOST]
    assert not outside.exists()
    folders = list((job.folder / "hangs").iterdir())
    assert all(re.fullmatch(r"\d{7}-\d{8}T\d{6}", folder.name) for folder in folders)
    files = {path.name for folder in folders for path in folder.iterdir()}
    assert {"rank_000000_stacks.txt", "rank_000001_stacks.txt"} <= files
    assert not re.search(r"[\x1b\r]", launch.all_output())
    # No rank has called the roll, so none claims that another one knows the reason.
    text = f"other jobs and users can reach port {port} of 127.0.0.1"
    assert (text in launch.output()) == (not forged)
