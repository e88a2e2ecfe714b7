"""What checkpoints cost: save and load beside raw files and torch.distributed.checkpoint, and how long training stands still.

    python benchmarks/checkpoint.py                      300 million parameters, 3.6 GB: takes 9 GB of memory, 11 GB of disk
    python benchmarks/checkpoint.py --processes 1 2      by one process, then by two (data parallel, ZeRO 1), each its part
    python benchmarks/checkpoint.py --folder /scratch    on another file system
    python benchmarks/checkpoint.py --quick              does it run? below a minute, numbers of no worth

Real ranks train a GPT on real text; what is stored is what their engine gives: fp32 masters and Adam's moments. Contestants take
turns in each round, the first of which warms up, and all bring what they write to the disk (fsync):
    raw               each rank's bytes, by write() into one file
    ours              with digests of everything, index, manifest, pointers
    ours, read back   as with --keep-latest-checkpoints: the disk is asked for all of it before anything older may go
    torch             torch.distributed.checkpoint with FileSystemWriter(sync_files=True); it has no digests
Loading fills live tensors in place; ours checks the digests of all that it reads. Cold: this machine's page cache has forgotten the
files (the disk, or the host behind it, may remember them). Prints a block for docs/benchmarks.md.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from layouts import describe_machine, table
from torch import Tensor
from worlds import CORES, Case, LaunchedWorld, WorldFailedError, one_iteration

from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.cli import load_config
from megatron.parallel.launcher import read_launcher_world
from megatron.training.loop import begin_save
from megatron.training.resume import resolve_job
from megatron.training.setup import build_ranks, join_ranks, start_run

BLOCK = 4 << 20
SAVERS = ("raw", "ours", "ours, read back", "torch")
LOADERS = ("raw", "ours", "torch")
Part = Literal["save", "load", "stall"]


@dataclass(frozen=True)
class Arguments:
    part: tuple[Part, ...] = ("save", "load", "stall")
    """What to measure."""
    parameters: float = 300e6
    """About so many; each costs 12 bytes in a checkpoint."""
    processes: tuple[int, ...] = (1,)
    """Ranks that save and load together; several numbers are measured one after the other."""
    rounds: int = 5
    """Interleaved rounds, after one that warms up."""
    steps: int = 4
    """Training steps without a save in each round, which those during a save are compared with."""
    folder: str | None = None
    """Where to write. Default: the system's folder for temporary files."""
    quick: bool = False
    """One million parameters and a single round."""


@dataclass(frozen=True)
class Stall:
    """What an asynchronous save costs one rank; seconds."""

    plain: float
    """A step without a save; median."""
    sync: float
    """A save that training waits for."""
    begin: float
    """In `Saver.begin`."""
    copy: float
    """In `Saver.wait_for_copy`, before the optimizer's step."""
    poll: float
    """In all `Saver.poll`."""
    during: tuple[float, ...]
    """Steps while it was written, without `copy`."""

    @property
    def blocked(self) -> float:
        return self.begin + self.copy + self.poll

    @property
    def cost(self) -> float:
        """All that the training is later, for slower steps too."""
        return self.blocked + sum(self.during) - len(self.during) * self.plain


# In the ranks


class StoringRank:
    """A real run, silent, whose state is stored and loaded; all ranks get each command together.

    Not a `worlds.Rank`: that one has glibc give back all memory at once, which costs who allocates buffers while loading.
    """

    def __init__(self, root: Path, argv: list[str]) -> None:
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # that a single process saves is meant
        loaded, world = load_config(argv), read_launcher_world()
        mesh = join_ranks(resolve_job(loaded, world.size, None).plan, world)
        self._run = start_run(loaded, mesh, None)
        self._run.reporter.say = lambda line: None  # type: ignore[method-assign]
        self._root, self._ranks = root, build_ranks(mesh)
        one_iteration(self._run)  # moments that are not zero
        self._shards = [shard for shard in self._run.engine.shards(optimizer=True) if shard.owner]
        self._tensors = {
            f"{shard.kind}/{shard.name}@{shard.offset}": shard.tensor for shard in self._shards
        }
        asynchronous = CheckpointConfig(async_save=True, max_save_failures=1)
        self._async_saver = Saver(self._folder("async"), asynchronous, self._ranks)

    def size(self) -> tuple[int, int]:
        """(bytes, tensors) that this rank stores."""
        return sum(4 * tensor.numel() for tensor in self._tensors.values()), len(self._tensors)

    def save(self, how: str) -> float:
        """Seconds, until all ranks are through."""
        self.drop(how)
        if self._ranks.rank == 0:
            self._folder(how).mkdir()
            os.sync()  # nobody pays for what another one wrote
        savers = {
            "raw": self._save_raw,
            "ours": self._save_ours,
            "ours, read back": self._save_ours,
            "torch": self._save_torch,
        }
        return self._timed(lambda: savers[how](how))

    def drop(self, how: str) -> None:
        self._barrier()
        if self._ranks.rank == 0:
            shutil.rmtree(self._folder(how), ignore_errors=True)

    def load(self, how: str, cold: bool) -> float:
        """Seconds, until all ranks are through; what was loaded is what the last save stored."""
        expected = self._fingerprints()
        for tensor in self._tensors.values():
            tensor.zero_()
        if cold and self._ranks.rank == 0:
            os.sync()
            for path in self._folder(how).rglob("*"):
                forget(path)
        loaders = {"raw": self._load_raw, "ours": self._load_ours, "torch": self._load_torch}
        seconds = self._timed(loaders[how])
        assert self._fingerprints() == expected, f"{how} loads something else than it saved"
        return seconds

    def stall(self, steps: int) -> Stall:
        """Plain steps, a save that training waits for, and one that it does not wait for."""
        run, saver = self._run, self._async_saver
        plain = [seconds_of(lambda: one_iteration(run)) for _ in range(steps)]
        sync = self.save("ours")
        self.drop("ours")
        if self._ranks.rank == 0:
            self._folder("async").mkdir()
            os.sync()
        self._barrier()
        copies: list[float] = []
        run.engine.pre_update_hook = lambda: copies.append(seconds_of(saver.wait_for_copy))
        begin, polls, during = seconds_of(lambda: begin_save(run, saver)), [], []
        while saver.in_flight:  # as the loop does
            during.append(seconds_of(lambda: one_iteration(run)))
            polls.append(seconds_of(saver.poll))
        run.engine.pre_update_hook = lambda: None
        self.drop("async")
        copy = sum(copies)
        during[0] -= copies[0]
        return Stall(statistics.median(plain), sync, begin, copy, sum(polls), tuple(during))

    def _folder(self, how: str) -> Path:
        return self._root / how.replace(", ", "-").replace(" ", "-")

    def _barrier(self) -> None:
        if self._ranks.size > 1:
            dist.barrier()

    def _timed(self, act: Callable[[], None]) -> float:
        self._barrier()
        start = time.perf_counter()
        act()
        self._barrier()
        return time.perf_counter() - start

    def _fingerprints(self) -> list[int]:
        return [
            int(tensor.view(torch.int32).sum(dtype=torch.int64))
            for tensor in self._tensors.values()
        ]

    def _raw_file(self) -> Path:
        return self._folder("raw") / f"rank_{self._ranks.rank:05d}"

    def _save_raw(self, how: str) -> None:
        with open(self._raw_file(), "xb", buffering=0) as file:
            for tensor in self._tensors.values():
                for part in blocks(tensor.cpu()):
                    while part:
                        part = part[file.write(part) :]
            os.fsync(file.fileno())

    def _load_raw(self) -> None:
        with open(self._raw_file(), "rb", buffering=0) as file:
            for tensor in self._tensors.values():
                target = tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape)
                for part in blocks(target):
                    while part:
                        part = part[file.readinto(part) :]  # type: ignore[arg-type]
                if target is not tensor:
                    tensor.copy_(target)

    def _save_ours(self, how: str) -> None:
        keep = 1 if how == "ours, read back" else None
        saver = Saver(
            self._folder(how),
            CheckpointConfig(max_save_failures=1, keep_latest_checkpoints=keep),
            self._ranks,
        )
        begin_save(self._run, saver)
        saver.complete()

    def _load_ours(self) -> None:
        open_checkpoint(self._folder("ours"), self._run.state.iteration).load_into(self._shards)

    def _save_torch(self, how: str) -> None:
        writer = dcp.FileSystemWriter(self._folder(how), sync_files=True)
        dcp.save(self._tensors, storage_writer=writer, no_dist=self._ranks.size == 1)

    def _load_torch(self) -> None:
        dcp.load(
            self._tensors,
            storage_reader=dcp.FileSystemReader(self._folder("torch")),
            no_dist=self._ranks.size == 1,
        )


def seconds_of(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a tensor on the CPU."""
    assert tensor.is_contiguous()
    for part in tensor.detach().reshape(-1).split(BLOCK // 4):
        yield memoryview(part.view(torch.uint8).numpy())


def forget(path: Path) -> None:
    """Have the next read come from the disk."""
    if path.is_file():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# In the process that asks


def case_of(parameters: float, processes: int) -> Case:
    """A GPT of about so many parameters: few large tensors and many small ones."""
    hidden = 64 * max(1, round(1.5 * parameters ** (1 / 3) / 64))
    vocab = 128 * round(
        min(50304, max(5120, parameters / (4 * hidden))) / 128
    )  # the corpus has ids below 5000
    layers = max(1, round((parameters - vocab * hidden) / (12 * hidden**2)))
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 64} --seq-length 256 --micro-batch-size 1 "
        f"--global-batch-size {processes} --train-iters 100000 --lr 3e-4 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 "
        f"--vocab-size {vocab} --log-interval 1000000 --zero-stage {int(processes > 1)}"
    )
    return Case(
        f"{processes} process{'es' if processes > 1 else ''}",
        flags,
        processes,
        max(1, CORES // processes),
    )


def save_rows(world: LaunchedWorld, gigabytes: float, arguments: Arguments) -> list[str]:
    seconds: dict[str, list[float]] = {how: [] for how in SAVERS}
    for number in range(arguments.rounds + 1):
        for how in SAVERS:
            took = max(world.ask("save", how))
            world.ask("drop", how)
            if number:
                seconds[how].append(took)
    return [
        row_of(f"{world.case.name}, {how}", seconds[how], seconds["raw"], gigabytes)
        for how in SAVERS
    ]


def load_rows(world: LaunchedWorld, gigabytes: float, arguments: Arguments) -> list[str]:
    seconds: dict[tuple[str, bool], list[float]] = {
        (how, cold): [] for cold in (True, False) for how in LOADERS
    }
    for how in LOADERS:
        world.ask("save", how)
    for number in range(arguments.rounds + 1):
        for how in LOADERS:
            for cold in (True, False):  # the cold one warms the files up
                took = max(world.ask("load", how, cold))
                if number:
                    seconds[how, cold].append(took)
    for how in LOADERS:
        world.ask("drop", how)
    return [
        row_of(
            f"{world.case.name}, {'cold' if cold else 'warm'}, {how}",
            times,
            seconds["raw", cold],
            gigabytes,
        )
        for (how, cold), times in seconds.items()
    ]


def row_of(name: str, seconds: Sequence[float], raw: Sequence[float], gigabytes: float) -> str:
    """Rates, and the median over the rounds of the rate in units of raw's."""
    rates = triple([gigabytes / s for s in seconds])
    ratio = statistics.median(r / s for r, s in zip(raw, seconds, strict=True))
    return f"| {name} | {rates} | {statistics.median(seconds):.2f} | {ratio:.2f} |"


def stall_rows(world: LaunchedWorld, arguments: Arguments) -> list[str]:
    """The worst rank of each round."""
    stalls: list[Stall] = []
    for number in range(arguments.rounds + 1):
        ranks = world.ask("stall", arguments.steps)
        if number:
            stalls.append(max(ranks, key=lambda stall: stall.blocked))
    rows = {
        "save that training waits for, s": [stall.sync for stall in stalls],
        "step without a save, s": [stall.plain for stall in stalls],
        "blocked by an async save, s": [stall.blocked for stall in stalls],
        "... in begin": [stall.begin for stall in stalls],
        "... waiting for the copy before the update": [stall.copy for stall in stalls],
        "... in poll": [stall.poll for stall in stalls],
        "blocked / sync save": [stall.blocked / stall.sync for stall in stalls],
        "steps while it is written": [float(len(stall.during)) for stall in stalls],
        "a step then / without": [statistics.mean(stall.during) / stall.plain for stall in stalls],
        "all that training loses / sync save": [stall.cost / stall.sync for stall in stalls],
    }
    return [f"| {world.case.name}, {name} | {triple(values)} |" for name, values in rows.items()]


def triple(values: Sequence[float]) -> str:
    """Min / median / max."""
    return " / ".join(f"{of(values):.3f}" for of in (min, statistics.median, max))


def file_system(folder: str) -> str:
    """Type of the one that a folder is on."""
    place, found = Path(folder).resolve(), ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        if place.is_relative_to(mount) and len(mount) >= len(found[0]):
            found = mount, kind
    return found[1]


def measure(arguments: Arguments, processes: int, folder: str) -> None:
    """All parts, by so many processes."""
    case = case_of(arguments.parameters, processes)
    with ExitStack() as stack:
        world = LaunchedWorld(
            case, folder, partial(StoringRank, Path(tempfile.mkdtemp(dir=folder)))
        )
        stack.callback(world.close)
        sizes = world.ask("size")
        gigabytes = sum(size for size, _ in sizes) / 1e9
        print(
            f"\n{case.name} x {case.threads} threads: `{case.flags}`; {gigabytes:.3f} GB", end=" "
        )
        print(f"in {sum(count for _, count in sizes)} tensors", flush=True)
        if "save" in arguments.part:
            table("| save | GB/s | median s | x raw |", save_rows(world, gigabytes, arguments))
        if "load" in arguments.part:
            table("| load | GB/s | median s | x raw |", load_rows(world, gigabytes, arguments))
        if "stall" in arguments.part:
            table("| async save | min / median / max |", stall_rows(world, arguments))


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.quick:
        arguments = replace(arguments, parameters=1e6, rounds=1, steps=2)
    command = " ".join(["python benchmarks/checkpoint.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(
        prefix="checkpoint-benchmark-", dir=arguments.folder
    ) as folder:
        print(
            f"## Checkpoints\n\n`{command}`\n\n{describe_machine(arguments)} {file_system(folder)}.",
            flush=True,
        )
        free, needed = shutil.disk_usage(folder).free, 3 * 12 * arguments.parameters
        if free < 1.2 * needed:
            print(
                f"{needed / 1e9:.1f} GB are needed, and {folder} has {free / 1e9:.1f} GB; give another --folder",
                file=sys.stderr,
            )
            return 2
        try:
            for processes in arguments.processes:
                measure(arguments, processes, folder)
        except WorldFailedError as failure:
            print(f"\nFAILED: {failure}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
