"""Measure the save and load rates of checkpoints, and how long training waits for them.

    python benchmarks/checkpoint.py                     300 million parameters, 3.6 GB;
                                                        takes 9 GB of memory and 11 GB of disk
    python benchmarks/checkpoint.py --processes 1 2     one process, then two (DP, ZeRO 1)
    python benchmarks/checkpoint.py --folder /scratch   on another file system
    python benchmarks/checkpoint.py --parameters 2e9 --contestants ours --rounds 1
                                                        a large model on a GPU
    python benchmarks/checkpoint.py --quick             check that it runs, in less than a minute

Numbers of --quick mean nothing. Real ranks train a GPT on real text. They store what their engine
gives, which is fp32 masters and Adam's moments. Contestants take turns in each round, and the first
round warms up. All of them bring what they write to the disk (fsync).

    raw               each rank's bytes, by write() into one file
    ours              with digests of everything, index, manifest, pointers
    ours, read back   as with --keep-latest-checkpoints: everything is read back from the
                      disk before an older checkpoint may be removed
    torch             torch.distributed.checkpoint with FileSystemWriter(sync_files=True),
                      which has no digests

With a GPU, the first asynchronous save also pins the memory for the copies. The part "pin" measures
how long that takes.

Loading fills live tensors in place, and ours checks the digests of all that it reads. Cold means
that this machine's page cache was emptied of the files. The disk, or the host behind a virtual
machine, may still hold them. The output is a block for docs/benchmarks.md.
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
from results import add_row
from torch import Tensor
from worlds import CORES, Case, LaunchedWorld, WorldFailedError, one_iteration

from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import Saver
from megatron.checkpoint.shard_file import HostBuffer
from megatron.commands.parts import choose_parts
from megatron.config.checkpoint import CheckpointConfig
from megatron.extras.interop.translators.translator import load_config
from megatron.parallel.launcher import read_launcher_world
from megatron.run import loop
from megatron.run.start.build import build_timers, divide_ranks, start_run
from megatron.run.start.job import agree_on_job
from megatron.run.start.launch import read_launch
from megatron.run.start.meet import join_ranks

BLOCK = 4 << 20
"""Bytes of one write or read of the raw contestant."""
LOADERS = ("raw", "ours", "torch")
Part = Literal["save", "load", "pin", "stall"]
Contestant = Literal["raw", "ours", "ours, read back", "torch"]


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    part: tuple[Part, ...] = ("save", "load", "pin", "stall")
    """What to measure, in this order. A save that training waits for is part of "stall" too."""
    contestants: tuple[Contestant, ...] = ("raw", "ours", "ours, read back", "torch")
    """Who saves and loads."""
    parameters: float = 300e6
    """Approximate number of parameters. Each takes 12 bytes in a checkpoint."""
    processes: tuple[int, ...] = (1,)
    """Ranks that save and load together. Several numbers are measured one after the other."""
    rounds: int = 5
    """Interleaved rounds, after those that warm up."""
    warm_up: int = 1
    """Rounds that are not counted."""
    steps: int = 4
    """Training steps without a save in each round, to compare with the steps during a save."""
    folder: str | None = None
    """Folder to write to. Default: the system's folder for temporary files."""
    quick: bool = False
    """One million parameters and a single round."""


@dataclass(frozen=True)
class Stall:
    """The cost of an asynchronous save for one rank, in seconds."""

    plain: float
    """Median of a step without a save."""
    sync: float
    """A save that training waits for."""
    begin: float
    """Time in `Saver.begin`."""
    copy: float
    """Time in `Saver.wait_for_copy`, before the optimizer's step."""
    poll: float
    """Time in all calls of `Saver.poll`."""
    during: tuple[float, ...]
    """Steps while the checkpoint was written, without `copy`."""

    @property
    def blocked(self) -> float:
        """Seconds in which training waits for the save."""
        return self.begin + self.copy + self.poll

    @property
    def cost(self) -> float:
        """Total delay of the training, with the slower steps during the save included."""
        return self.blocked + sum(self.during) - len(self.during) * self.plain


# In the ranks


class StoringRank:
    """A real run without output, whose state is stored and loaded.

    All ranks get each command together.
    """

    def __init__(self, root: Path, argv: list[str]) -> None:
        """Start the run of `argv` in this rank, with checkpoints below `root`."""
        warnings.filterwarnings(
            # torch warns when a single process saves, and here that is intended.
            "ignore",
            message="torch.distributed is disabled",
        )
        loaded = load_config(argv)
        launch = read_launch(loaded, choose_parts(loaded.config))
        world = read_launcher_world()
        ranks = join_ranks(launch)
        job = agree_on_job(launch, ranks)
        timers = build_timers(world)
        mesh = divide_ranks(job.plan, ranks, world, timers)
        self._run = start_run(launch, job, mesh, timers, None)
        self._run.reporter.log = lambda line: None  # type: ignore[method-assign]
        self._root = root
        self._ranks = mesh.ranks
        # One step gives Adam's moments values other than zero.
        one_iteration(self._run)
        self._shards = [shard for shard in self._run.engine.shards(optimizer=True) if shard.owner]
        self._tensors = {
            f"{shard.kind}/{shard.name}@{shard.offset}": shard.tensor for shard in self._shards
        }
        asynchronous = CheckpointConfig(async_save=True, max_save_failures=1)
        self._async_saver = Saver(self._folder("async"), asynchronous, self._ranks)

    def size(self) -> tuple[int, int]:
        """Return the (bytes, tensors) that this rank stores."""
        return sum(4 * tensor.numel() for tensor in self._tensors.values()), len(self._tensors)

    def save(self, how: str) -> float:
        """Return the seconds until all ranks have saved."""
        self.drop(how)
        if self._ranks.rank == 0:
            self._folder(how).mkdir()
            # Dirty pages of the previous contestant would otherwise be written during this one's
            # time.
            os.sync()
        savers = {
            "raw": self._save_raw,
            "ours": self._save_ours,
            "ours, read back": self._save_ours,
            "torch": self._save_torch,
        }
        return self._timed(lambda: savers[how](how))

    def pin(self) -> tuple[float, str]:
        """Return the seconds in which memory for the copies is allocated and pinned.

        It is that of the saver, which keeps it. So a later stall does not contain the pinning. The
        second value is why it could not be allocated or pinned, or an empty text.
        """
        buffer: HostBuffer = self._async_saver._stages._buffer
        start = time.perf_counter()
        try:
            buffer.divide(self._tensors)
        except MemoryError as error:
            return time.perf_counter() - start, str(error)
        return time.perf_counter() - start, buffer.refusal or ""

    def drop(self, how: str) -> None:
        """Remove the files of one contestant."""
        self._barrier()
        if self._ranks.rank == 0:
            shutil.rmtree(self._folder(how), ignore_errors=True)

    def load(self, how: str, cold: bool) -> float:
        """Return the seconds until all ranks have loaded.

        The loaded state must equal the one that was saved last.
        """
        expected = self._fingerprints()
        for tensor in self._tensors.values():
            # A loader that did nothing would otherwise pass the check.
            tensor.zero_()
        if cold and self._ranks.rank == 0:
            os.sync()
            for path in self._folder(how).rglob("*"):
                forget(path)
        loaders = {"raw": self._load_raw, "ours": self._load_ours, "torch": self._load_torch}
        seconds = self._timed(loaders[how])
        assert self._fingerprints() == expected, f"{how} loads other values than it saved"
        return seconds

    def stall(self, steps: int) -> Stall:
        """Measure plain steps, a save that training waits for, and an asynchronous save."""
        run = self._run
        saver = self._async_saver
        plain = [seconds_of(lambda: one_iteration(run)) for _ in range(steps)]
        sync = self.save("ours")
        self.drop("ours")
        if self._ranks.rank == 0:
            self._folder("async").mkdir()
            os.sync()
        self._barrier()
        copies: list[float] = []
        # The run has no saver of its own, so the engine waits for nothing otherwise.
        engine: Any = run.engine
        skip_waiting = engine._before_update
        engine._before_update = lambda: copies.append(seconds_of(saver.wait_for_copy))
        begin = seconds_of(lambda: loop.save(run, saver))
        # The ranks vote about the saver of the run.
        run.saver = saver
        polls = []
        during = []
        # The training loop polls the saver once in each iteration.
        while saver.in_flight:
            during.append(seconds_of(lambda: one_iteration(run)))
            done = run.exits.take_stage_is_done()
            polls.append(seconds_of(partial(saver.poll, 0, 0, stage_is_done=done)))
        run.saver = None
        engine._before_update = skip_waiting
        self.drop("async")
        copy = sum(copies)
        # The first step contains the wait for the copy, which is counted on its own.
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
            # A sum over the bits finds almost any difference, also one between NaNs.
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
                        # A raw file may write fewer bytes than it was given.
                        part = part[file.write(part) :]
            os.fsync(file.fileno())

    def _load_raw(self) -> None:
        with open(self._raw_file(), "rb", buffering=0) as file:
            for tensor in self._tensors.values():
                target = tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape)
                for part in blocks(target):
                    while part:
                        part = part[file.readinto(part) :]
                if target is not tensor:
                    tensor.copy_(target)

    def _save_ours(self, how: str) -> None:
        keep = 1 if how == "ours, read back" else None
        saver = Saver(
            self._folder(how),
            CheckpointConfig(max_save_failures=1, keep_latest_checkpoints=keep),
            self._ranks,
        )
        loop.save(self._run, saver)

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
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def blocks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the memory of a tensor on the CPU, in blocks."""
    assert tensor.is_contiguous()
    for part in tensor.detach().reshape(-1).split(BLOCK // 4):
        yield memoryview(part.view(torch.uint8).numpy())


def forget(path: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    if path.is_file():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# In the process that asks


def case_of(parameters: float, processes: int) -> Case:
    """Return a GPT of about this many parameters, with few large tensors and many small ones."""
    hidden = 64 * max(1, round(1.5 * parameters ** (1 / 3) / 64))
    # The corpus has ids below 5000, so the vocabulary must not be smaller.
    vocab = 128 * round(min(50304, max(5120, parameters / (4 * hidden))) / 128)
    layers = max(1, round((parameters - vocab * hidden) / (12 * hidden**2)))
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 64} "
        "--seq-length 256 --micro-batch-size 1 "
        f"--global-batch-size {processes} --train-iters 100000 --lr 3e-4 --hidden-dropout 0 "
        "--attention-dropout 0 --eval-iters 0 "
        f"--vocab-size {vocab} --log-interval 1000000 --zero-stage {int(processes > 1)}"
    )
    return Case(
        f"{processes} process{'es' if processes > 1 else ''}",
        flags,
        processes,
        max(1, CORES // processes),
    )


def save_rows(world: LaunchedWorld, gigabytes: float, arguments: Arguments) -> list[str]:
    """Measure the saves of all contestants and return one table row for each."""
    seconds: dict[str, list[float]] = {how: [] for how in arguments.contestants}
    for number in range(arguments.rounds + arguments.warm_up):
        for how in arguments.contestants:
            took = max(world.ask("save", how))
            world.ask("drop", how)
            if number >= arguments.warm_up:
                seconds[how].append(took)
                add_row("save", who=how, ranks=world.case.processes, gb=gigabytes, seconds=took)
    return [
        row_of(f"{world.case.name}, {how}", seconds[how], seconds.get("raw"), gigabytes)
        for how in arguments.contestants
    ]


def load_rows(world: LaunchedWorld, gigabytes: float, arguments: Arguments) -> list[str]:
    """Measure the loads of all contestants, cold and warm, and return the table rows."""
    loaders = [how for how in arguments.contestants if how in LOADERS]
    seconds: dict[tuple[str, bool], list[float]] = {
        (how, cold): [] for cold in (True, False) for how in loaders
    }
    for how in loaders:
        world.ask("save", how)
    for number in range(arguments.rounds + arguments.warm_up):
        for how in loaders:
            # The cold load fills the page cache for the warm one that follows.
            for cold in (True, False):
                took = max(world.ask("load", how, cold))
                if number >= arguments.warm_up:
                    seconds[how, cold].append(took)
                    add_row("load", who=how, cold=cold, gb=gigabytes, seconds=took)
    for how in loaders:
        world.ask("drop", how)
    return [
        row_of(
            f"{world.case.name}, {'cold' if cold else 'warm'}, {how}",
            times,
            seconds.get(("raw", cold)),
            gigabytes,
        )
        for (how, cold), times in seconds.items()
    ]


def row_of(
    name: str, seconds: Sequence[float], raw: Sequence[float] | None, gigabytes: float
) -> str:
    """Format the rates of a contestant, and the median of their ratios to raw's rates."""
    rates = triple([gigabytes / s for s in seconds])
    ratio = "-"
    if raw is not None:
        # Ratios within a round cancel a drift of the machine's speed.
        ratio = f"{statistics.median(r / s for r, s in zip(raw, seconds, strict=True)):.2f}"
    return f"| {name} | {rates} | {statistics.median(seconds):.2f} | {ratio} |"


def measure_pinning(world: LaunchedWorld, gigabytes: float) -> None:
    """Measure the allocation of the host memory for asynchronous saves, and print it."""
    pins = world.ask("pin")
    seconds = max(took for took, _ in pins)
    refusals = sorted({refusal for _, refusal in pins if refusal})
    print(f"\nhost memory for the copies: {gigabytes:.3f} GB in {seconds:.2f} s", *refusals)
    add_row("pin", gb=gigabytes, seconds=seconds, refusals=", ".join(refusals))


def stall_rows(world: LaunchedWorld, arguments: Arguments) -> list[str]:
    """Return the table rows of the asynchronous save, from the slowest rank of each round."""
    stalls: list[Stall] = []
    for number in range(arguments.rounds + arguments.warm_up):
        ranks = world.ask("stall", arguments.steps)
        if number >= arguments.warm_up:
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
    for name, values in rows.items():
        add_row("stall", what=name, median=statistics.median(values))
    return [f"| {world.case.name}, {name} | {triple(values)} |" for name, values in rows.items()]


def triple(values: Sequence[float]) -> str:
    """Format minimum, median and maximum."""
    return " / ".join(f"{of(values):.3f}" for of in (min, statistics.median, max))


def file_system(folder: str) -> str:
    """Return the type of the file system that holds a folder."""
    place = Path(folder).resolve()
    found = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        # The longest mount point that contains the folder is the one that holds it.
        if place.is_relative_to(mount) and len(mount) >= len(found[0]):
            found = mount, kind
    return found[1]


def measure(arguments: Arguments, processes: int, folder: str) -> None:
    """Measure all parts with this number of processes."""
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
        for part in arguments.part:
            if part == "save":
                table("| save | GB/s | median s | x raw |", save_rows(world, gigabytes, arguments))
            elif part == "load":
                table("| load | GB/s | median s | x raw |", load_rows(world, gigabytes, arguments))
            elif part == "pin":
                measure_pinning(world, gigabytes)
            else:
                table("| async save | min / median / max |", stall_rows(world, arguments))


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.quick:
        arguments = replace(arguments, parameters=1e6, rounds=1, steps=2)
    command = " ".join(["python benchmarks/checkpoint.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(
        prefix="checkpoint-benchmark-", dir=arguments.folder
    ) as folder:
        print(
            f"## Checkpoints\n\n`{command}`\n\n{describe_machine(arguments)} "
            f"{file_system(folder)}.",
            flush=True,
        )
        # Each loader has a checkpoint at the same time, with 12 bytes for each parameter.
        free = shutil.disk_usage(folder).free
        needed = min(3, len(arguments.contestants)) * 12 * arguments.parameters
        if free < 1.2 * needed:
            print(
                f"{needed / 1e9:.1f} GB are needed, but {folder} has {free / 1e9:.1f} GB; "
                "give another --folder",
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
