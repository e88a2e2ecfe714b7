"""Stand-in for another trainer's program, which `benchmarks/peer_script.py` runs.

It reads the files of ids where that program does, prints lines in its format, and never ends. It
refuses files that are damaged or too short.
"""

import itertools
import os
import time
from pathlib import Path

import numpy as np

SECONDS = 0.05


def read_ids(kind: str) -> np.ndarray:
    """Return the ids of the only file of a kind."""
    (path,) = Path.cwd().glob(f"data/fineweb10B/fineweb_{kind}_*.bin")
    header = np.fromfile(path, np.int32, 256)
    ids = np.fromfile(path, np.uint16, offset=header.nbytes)
    assert [*header[:2]] == [20240520, 1]
    assert header[2] == len(ids)
    assert ids.max() < 50304
    return ids


def main() -> None:
    """Print the steps of a training."""
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    tokens = (len(read_ids("val")) - 1) // 20
    assert len(read_ids("train")) > 100 * tokens
    # The first step waits for the compiler.
    elapsed = 1.0
    print("step:0/3250 val_loss:10.82580 train_time:0.000s step_avg:nanms", flush=True)
    for step in itertools.count(1):
        time.sleep(SECONDS)
        elapsed += SECONDS
        average = 1000 * elapsed / step
        print(f"step:{step}/3250 train_time:{elapsed:.3f}s step_avg:{average:.2f}ms", flush=True)
        if step % 125 == 0:
            print(f"step:{step}/3250 val_loss:9.1 train_time:{elapsed:.3f}s step_avg:1.0ms")


if __name__ == "__main__":
    main()
