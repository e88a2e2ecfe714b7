"""Compare the native engine, DeepSpeed and a bare loop by the time of a step and of a start.

    python benchmarks/engines.py                 about 8 minutes on 2 cores without other load
    python benchmarks/engines.py --part steps    one of the two comparisons
    python benchmarks/engines.py --part steps --engine native "bare loop"
                                                 without DeepSpeed
    python benchmarks/engines.py --quick         check that it runs; the numbers mean nothing

The bare loop has the fewest lines that train our own model in the same arithmetic. It has AdamW
(fused), clipping, and reads the loss every step. For step times on two processes, it uses
PyTorch's DistributedDataParallel. For a start, it is `bare_start.py`. Contestants take turns, and
the first round warms up. Medians are quoted.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from layouts import describe_machine, shape_flags, spread, table
from torch.nn.parallel import DistributedDataParallel
from worlds import CORPUS, Case, LaunchedWorld, Measured

from megatron.commands.parts import choose_parts
from megatron.data.batches import Microbatch
from megatron.extras.interop.translators.translator import load_config
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.launcher import read_launcher_world
from megatron.parallel.mesh import TensorParallel
from megatron.run.start.build import build_timers, divide_ranks
from megatron.run.start.job import agree_on_job
from megatron.run.start.launch import read_launch
from megatron.run.start.meet import join_ranks
from megatron.run.start.open_data import open_data
from megatron.run.state import TrainState

ROOT = Path(__file__).resolve().parents[1]
DEEPSPEED = "--deepspeed"
LAYOUTS = {
    "one process": ("", 1),
    "DP 2, ZeRO 1": ("--zero-stage 1", 2),
    "TP 2 x PP 2": ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
}
EngineName = Literal["native", "DeepSpeed", "bare loop"]


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    part: tuple[Literal["steps", "start"], ...] = ("steps", "start")
    """Comparisons to run."""
    engine: tuple[EngineName, ...] = ("native", "DeepSpeed", "bare loop")
    """Engines to compare. The first one gives the ratios."""
    rounds: int = 5
    """Interleaved rounds, after one that warms up."""
    quick: bool = False
    """Small shapes and a single round."""


class BareRank:
    """A rank like `worlds.Rank`, with a loop of a few lines instead of the trainer's."""

    def __init__(self, argv: list[str]) -> None:
        """Build the model and open the data of the run that `argv` describes."""
        world = read_launcher_world()
        loaded = load_config(argv)
        launch = read_launch(loaded, choose_parts(loaded.config))
        ranks = join_ranks(launch)
        plan = agree_on_job(launch, ranks).plan
        mesh = divide_ranks(plan, ranks, world, build_timers(world))
        self._device = mesh.device
        self._size = plan.batch_size.final
        self._data = open_data(plan, mesh, TrainState()).train
        model = GPT(plan.shape, TensorParallel()).to(mesh.device)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.ones_(parameter)
            else:
                torch.nn.init.normal_(parameter, std=0.02)
        self._model = DistributedDataParallel(model) if world.size > 1 else model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def steps(self, count: int) -> Measured:
        """Train `count` steps and return what was measured."""
        losses = []
        start = time.perf_counter()
        cpu = time.process_time()
        for _ in range(count):
            assert self._data is not None
            losses.append(self._step(self._data.read_batch(self._size)))
        seconds = time.perf_counter() - start
        return Measured(seconds / count, (time.process_time() - cpu) / count, 0.0, tuple(losses))

    def _step(self, microbatches: list[Microbatch]) -> float:
        total = torch.zeros((), device=self._device)
        ddp = self._model if isinstance(self._model, DistributedDataParallel) else None
        for number, m in enumerate(microbatches):
            last = number == len(microbatches) - 1
            # Gradients are sent once per step, with the last microbatch. Without no_sync() DDP
            # would send them for every microbatch.
            with nullcontext() if last or ddp is None else ddp.no_sync():
                loss = self._model(None, Inputs(m.tokens, m.labels).to(self._device)) / len(
                    microbatches
                )
                loss.backward()
            total += loss.detach()
        if dist.is_initialized():
            # The mean over the ranks. gloo has no average, so the sum is divided.
            dist.all_reduce(total)
            total /= dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total.item()


def measure_steps(arguments: Arguments, folder: str) -> None:
    """Measure the step time of each engine in each layout."""
    shape = shape_flags(4, 128, 64, 1, 4) if arguments.quick else shape_flags(6, 384, 256, 1, 8)
    print(f"\n### Step time by engine\n\n`{shape}`, one thread a process, fp32.")
    rows = []
    for layout, (flags, processes) in LAYOUTS.items():
        # NCCL refuses two ranks on one GPU.
        if 0 < torch.cuda.device_count() < processes:
            print(f"\nSKIPPED: {layout}: {processes} ranks need as many GPUs for NCCL", flush=True)
            continue
        case = Case(layout, f"{shape} {flags}", processes)
        # The bare loop has data parallelism only.
        names: list[EngineName] = [
            name for name in arguments.engine if name != "bare loop" or processes <= 2
        ]
        worlds = {name: launch_engine(name, case, folder) for name in names}
        # All worlds stay active and take turns. A drift of the machine's speed then affects all of
        # them.
        seconds: dict[EngineName, list[float]] = {name: [] for name in worlds}
        for number in range(arguments.rounds + 1):
            for name, world in worlds.items():
                took = max(measured.seconds for measured in world.ask("steps", 2))
                if number:
                    seconds[name].append(took)
        for world in worlds.values():
            world.close()
        for name, times in seconds.items():
            ratios = sorted(t / n for t, n in zip(times, seconds[names[0]], strict=True))
            rows.append(
                f"| {layout} | {name} | {spread(times)} | "
                f"{ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f} |"
            )
    table(f"| layout | engine | ms | time relative to {arguments.engine[0]} |", rows)


def launch_engine(name: EngineName, case: Case, folder: str) -> LaunchedWorld:
    """Start the processes of an engine."""
    if name == "bare loop":
        return LaunchedWorld(case, folder, BareRank)
    if name == "DeepSpeed":
        case = replace(case, flags=f"{case.flags} {DEEPSPEED}")
    return LaunchedWorld(case, folder)


def measure_start(arguments: Arguments, folder: str) -> None:
    """Measure the time from the command to the log line of the first iteration."""
    print(
        "\n### Start\n\nSeconds from `torchrun` to the first iteration of a tiny model. "
        "The bare loop imports torch, joins the process group, and trains one matrix, with FSDP2 "
        "on several ranks (`benchmarks/bare_start.py`)."
    )
    shape = shape_flags(2, 128, 64, 1, 8).split()
    rows = []
    for processes in (1, 2) if arguments.quick else (1, 2, 8):
        pipeline = (
            ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"]
            if processes == 8
            else []
        )
        training = [
            "pretrain_gpt.py",
            *shape,
            *pipeline,
            "--data-path",
            str(CORPUS),
            "--data-cache-path",
            f"{folder}/cache",
        ]
        # The run ends after one iteration, and the process may then be waited for.
        training += ["--exit-interval", "1", "--log-interval", "1"]
        all_commands = {
            "native": training,
            "DeepSpeed": [*training, DEEPSPEED],
            "bare loop": ["benchmarks/bare_start.py", *pipeline[:1]],
        }
        commands = {name: all_commands[name] for name in arguments.engine}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(arguments.rounds + 1):
            for name, command in commands.items():
                took = _seconds_to_first_iteration(
                    ["torchrun", "--standalone", "--nproc-per-node", str(processes), *command]
                )
                if number:
                    seconds[name].append(took)
        rows += [
            f"| {processes} | {name} | {min(t):.1f} / {statistics.median(t):.1f} / {max(t):.1f} |"
            for name, t in seconds.items()
        ]
    table("| processes | engine | s |", rows)


def _seconds_to_first_iteration(command: list[str]) -> float:
    start = time.perf_counter()
    found = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if " iteration " in line and found is None:
                found = time.perf_counter() - start
    assert process.returncode == 0, "".join(printed)
    assert found is not None, "".join(printed)
    return found


def main() -> None:
    """Run the benchmark."""
    arguments = tyro.cli(Arguments, description=__doc__)
    # The worlds set their own number of threads. More threads in each process would compete for
    # cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.quick:
        arguments = replace(arguments, rounds=1)
    command = " ".join(["python benchmarks/engines.py", *sys.argv[1:]])
    print(f"## Engines\n\n`{command}`\n\n{describe_machine(arguments)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # An installed package has compiled modules. The first round compiles them, even where the
        # environment keeps Python from it.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"
        for part in arguments.part:
            {"steps": measure_steps, "start": measure_start}[part](arguments, folder)


if __name__ == "__main__":
    main()
