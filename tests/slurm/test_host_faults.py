"""An I/O error of one node on a real Slurm: the array continues without that node."""

# ruff: noqa: F811 (fixtures are imported by their names)

import re
import subprocess
from pathlib import Path

import pytest
from slurm.test_array_task import TinyRun, tiny  # noqa: F401


@pytest.mark.full
def test_full_disk_of_one_node_excludes_that_node(tiny: TinyRun) -> None:
    """Node n1 has a full disk at the folder of the index cache, mounted for its daemon only."""
    cache = tiny.folder / "data-cache"
    cache.mkdir()
    daemon = (tiny.cluster.folder / "run" / "slurmd.n1.pid").read_text().strip()
    inside = ["nsenter", "--mount", "--target", daemon]
    mount = [*inside, "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(cache)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("NOT TESTED: a full disk of one node needs a tmpfs, and mounting one failed")
    try:
        subprocess.run(
            [*inside, "dd", "if=/dev/zero", f"of={cache}/filler", "bs=4096", "count=1"],
            check=True,
            capture_output=True,
        )
        job = tiny.submit("--array=1-2%1", TRAIN_SAMPLES="224")
        tiny.wait_for_end(job)
    finally:
        subprocess.run([*inside, "umount", "-l", str(cache)], check=True)
    log = tiny.main_log()
    assert re.search(
        r"ALERT.* node n1 is not used any more: rank [01]: DataError: .*No space left on device",
        log,
    )
    assert f"job {job}_1 is requeued: bad nodes" in log
    assert "a person must fix" not in log
    first, *later = tiny.attempts()
    assert first["nodes"] == "n[1-2]"
    assert all("1" not in attempt["nodes"] for attempt in later)
    assert "training is complete at iteration 18" in log
    assert len(tiny.curve()) == 18
    assert not [
        path for path in Path(tiny.checkpoints).iterdir() if path.name.startswith(".errors")
    ]
