"""Measure checkpoints on an object store beside a disk: stall of a save, its end, and a load.

    python benchmarks/checkpoint_store.py                   240 MB through 100 MB/s
    python benchmarks/checkpoint_store.py --parameters 1e6  check that it runs

The store is moto's server in a process of its own, behind a proxy that passes a number of bytes a
second in both directions together. One process saves fp32 weights and Adam's moments. Training
waits for an asynchronous save in `begin` and in `wait_for_copy`, which are the stall here. The
checkpoint is safe at the end of `complete`. The output is a table for docs/benchmarks.md.
"""

import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tyro

from megatron.checkpoint.contents import CheckpointContents
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import Saver
from megatron.checkpoint.store import Store
from megatron.config.checkpoint import CheckpointConfig
from megatron.extras.object_store.store import ObjectStore
from megatron.parallel.ranks import Ranks
from megatron.parallel.shard import TensorShard

TESTS = Path(__file__).resolve().parents[1] / "tests"
BUCKET = "benchmark"


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    parameters: float = 20e6
    """Number of parameters. Each takes 12 bytes in a checkpoint."""
    mb_per_second: float = 100.0
    """MB per second that the proxy passes."""
    rounds: int = 3
    """Saves and loads of each kind, after one that warms up. The table has the medians."""
    folder: str | None = None
    """Folder of the disk and of --local-dir. Default: the system's folder for temporary files."""


def serve_proxy(port: int, bytes_per_second: float, answer: Connection) -> None:
    """Run the proxy until the process is ended."""
    sys.path.insert(0, str(TESTS))
    from object_store.faulty_proxy import FaultyProxy

    proxy = FaultyProxy(port)
    proxy.bytes_per_second = bytes_per_second
    answer.send(proxy.url)
    time.sleep(1e6)


def seconds_of(act: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def make_shards(parameters: int) -> list[TensorShard]:
    """Return weights and moments of 10 matrices."""
    rows = max(1, parameters // 10 // 1024)
    return [
        TensorShard(kind, f"layer.{n}", (rows, 1024), (0, 0), torch.randn(rows, 1024), owner=True)
        for n in range(10)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    ]


def measure(
    root: Path, store: Store, config: CheckpointConfig, arguments: Arguments
) -> list[float]:
    """Return the median seconds of the stall, of a whole save, and of a load."""
    shards = make_shards(int(arguments.parameters))
    root.mkdir(parents=True, exist_ok=True)
    store.open()
    lease = store.acquire(root, print)
    store.meet()
    saver = Saver(root, config, lease=lease, store=store)
    found: list[list[float]] = []
    for number in range(1, arguments.rounds + 2):
        os.sync()
        contents = CheckpointContents(number, {}, {}, "{}\n")
        start = time.perf_counter()
        saver.begin(contents, shards)
        saver.wait_for_copy()
        stall = time.perf_counter() - start
        saver.complete()
        assert saver.saved_iteration == number
        whole = time.perf_counter() - start
        expected = [shard.tensor.double().sum().item() for shard in shards]
        for shard in shards:
            shard.tensor.zero_()

        def load(number: int = number) -> None:
            with store.fetch(open_checkpoint(root, number), shards) as fetched:
                fetched.load_into(shards)

        seconds = seconds_of(load)
        assert [shard.tensor.double().sum().item() for shard in shards] == expected
        found.append([stall, whole, seconds])
    lease.release()
    return [statistics.median(column) for column in zip(*found[1:], strict=True)]


def main() -> None:
    """Measure, and print the table."""
    arguments = tyro.cli(Arguments, description=__doc__)
    os.environ.update(
        AWS_ACCESS_KEY_ID="benchmark", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1"
    )
    server = subprocess.Popen(
        [sys.executable, str(TESTS / "object_store/moto_server.py")], stdout=subprocess.PIPE
    )
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    proxy = None
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe()
        proxy = context.Process(
            target=serve_proxy, args=(port, 1e6 * arguments.mb_per_second, sender), daemon=True
        )
        proxy.start()
        os.environ["AWS_ENDPOINT_URL"] = receiver.recv()
        import urllib.request

        bucket = f"http://127.0.0.1:{port}/{BUCKET}"
        urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"))
        flags: dict[str, Any] = {
            "async_save": True,
            "max_save_failures": 1,
            "keep_latest_checkpoints": 1,
        }
        address = f"s3://{BUCKET}/run"
        stored = CheckpointConfig(save=address, local_dir=str(folder / "local"), **flags)
        on_disk = CheckpointConfig(save=str(folder / "disk"), **flags)
        rows = {
            "disk": measure(folder / "disk", Store(), on_disk, arguments),
            "object store": measure(
                folder / "local", ObjectStore(stored, Ranks()), stored, arguments
            ),
        }
        print(
            f"{date.today()}, {platform.machine()}, {os.cpu_count()} CPUs, load average "
            f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}, s3fs {version('s3fs')}, moto "
            f"{version('moto')}"
        )
        print("| | stall of an asynchronous save | until it is safe | load |\n|---|--:|--:|--:|")
        for name, (stall, whole, load) in rows.items():
            print(f"| {name} | {stall:.3f} s | {whole:.2f} s | {load:.2f} s |")
    finally:
        if proxy is not None:
            proxy.kill()
        server.kill()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
