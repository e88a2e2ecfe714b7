"""A process that reaches the port of the rendezvous store writes the keys of the roll call."""

import re
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from faults.launches import NewJob
from process_pool import find_free_port

LOST = 1


def test_no_file_is_written_outside_of_the_run(new_job: NewJob, tmp_path: Path) -> None:
    """The ranks end, because a roll was called, and write their states into the run's folder."""
    job = new_job("job", "--hang-timeout 100 --train-iters 1000000", 2)
    port = find_free_port()
    launch = job.launch(environment={"MASTER_PORT": str(port)})
    launch.wait_for_line("iteration        3/")
    # torch gives the keys of the default process group this prefix.
    store = dist.PrefixStore("0/", dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30)))
    outside = tmp_path / "outside"
    store.set("roll_call/answer/1", '{"left": 1}')
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
