"""Check a machine with GPUs, and measure the trainer on it: see `first_hour.sh`.

Each part is a list of steps in the order of their value. The limits of a part's steps add up to
at most its budget. Parts 1 and 2 take at most 750 s together, so a quarter of an hour also has the
start of the machine, the copies and an idle wait. The limits are the times of an H200 in November
2026, with some room: see `tests/fixtures/gpu`.
"""

import argparse
import contextlib
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from step_runner import ROOT, Report, Step, run_steps

BUDGETS = {1: 490.0, 2: 260.0, 3: 555.0, 4: 555.0}
"""Part -> seconds of all its steps."""
TINY_SECONDS = 900.0
PEER_SCRIPT = ROOT / ".peers/train_gpt_simple.py"
"""A copy of modded-nanogpt's program. Git ignores the folder."""
PEER_STAND_IN = ROOT / "tests/gpu/peer_stand_in.py"
WHEELS = ROOT / ".wheels"
"""Packages that the machine may lack. Git ignores the folder. `docs/gpus.md` says how to
make it."""
PYTHON = sys.executable
SINGLE_RUNS = "runs_out or generated or trace or snapshot or continues_on"
"""The tests of one GPU that do not share their runs with others."""


def build_part(number: int, folder: Path, base: str | None) -> list[Step]:
    """Return the steps of a part for a machine with GPUs.

    Args:
        number: 1 to 4.
        folder: Folder of the report.
        base: Name of the hardware file that describes the device, if there is one.
    """
    hardware = str(folder / f"part{number}.hardware.yaml")
    on_base = ["--base", base] if base else []
    steps = [Step("machine", 20, (PYTHON, "tests/gpu/machine.py"), "versions, driver, memory")]
    if number == 1:
        steps += [
            build_large_model(
                "7B",
                225,
                "--seconds 185 --steps 6 --microbatches 8 --watch --cube --hardware "
                f"{base or ''} --variant defaults captured tensorwise tensorwise-captured",
                "7B, or 3B with less than 100 GiB: time of each step, clocks, a sustained product, "
                "kernels and gaps, in bf16 and float8, each also with a CUDA graph",
            ),
            build_step_time(
                "step time, 125M",
                70,
                "--size 125m --shape gpt2 --rounds 3 --compile-seconds 45 --contestants trainer "
                "trainer-captured trainer-compiled trainer-captured-compiled plain-compiled",
                "eager, compiled, each captured, beside a compiled loop of a plain GPT-2",
            ),
            build_step_time(
                "step time, 125M like nanochat",
                70,
                "--size 125m --shape nanochat --rounds 3 --compile-seconds 45 --contestants "
                "trainer trainer-captured trainer-compiled trainer-captured-compiled "
                "nanochat-compiled",
                "the same beside a compiled loop like nanochat's",
            ),
            build_step_time(
                "step time, 177M",
                55,
                "--size 177m --shape llama --rounds 3 --compile-seconds 40 --contestants trainer "
                "trainer-captured hf-compiled",
                "a Llama whose MLP has 2,730 channels beside Hugging Face's, compiled",
            ),
            build_shares(
                "gaps in float8, 1.3B",
                40,
                "--size 1.3b --shape llama -- --use-torch-compile --fp8-format hybrid "
                "--fp8-recipe tensorwise",
            ),
        ]
    elif number == 2:
        steps += [
            build_tests(
                "graphs",
                45,
                "gpu_core",
                "microbatches as CUDA graphs against eager passes, bit for bit",
                path="tests/gpu/test_graphs_on_gpu.py",
            ),
            build_tests(
                "correctness", 105, "gpu_core", "kernels against PyTorch; losses against the CPU"
            ),
            build_step_time(
                "step time of experts, 350M",
                55,
                "--size 350m --shape olmoe llama --rounds 3 --contestants trainer",
                "4 of 16 experts beside a dense model with the same FLOPs for a token",
            ),
            build_kernels(
                30,
                f"copy products --hardware {hardware} {' '.join(on_base)}",
                "copies and products at real shapes; a hardware file",
            ),
        ]
    elif number == 3:
        steps += [
            build_peer(100, 80),
            Step(
                "calibration",
                45,
                (PYTHON, "tools/calibrate.py", hardware, *on_base),
                "the speeds that the planner's predictions need",
                table="calibration",
            ),
            build_shares("kernels of a step, 1.3B", 45, "--size 1.3b --shape llama"),
            # A process of its own: a run without memory would end the other runs of the GPU.
            build_tests(
                "single runs",
                60,
                "not gpu_core",
                "out of memory, traces, snapshots, generated text, from the CPU to the GPU",
                *("-k", SINGLE_RUNS),
            ),
            build_tests(
                "other tests",
                90,
                "not gpu_core",
                "further model parts, optimizers, dropout, resumes",
                *("-k", f"not ({SINGLE_RUNS})"),
            ),
            Step(
                "ranks on one GPU",
                85,
                (PYTHON, "benchmarks/layouts.py", "--losses"),
                "losses of TP, PP, ZeRO and HSDP over gloo against one process",
                build_answer_timeout(40),
            ),
            Step(
                "checkpoint of 1B",
                80,
                (
                    *(PYTHON, "benchmarks/checkpoint.py", "--parameters", "1e9"),
                    *("--contestants", "ours", "--rounds", "1", "--warm-up", "0"),
                    *("--part", "pin", "stall", "load"),
                ),
                "save, load, time of pinning, stall of an asynchronous save",
                build_answer_timeout(80),
            ),
        ]
    elif number == 4:
        gpus = str(count_gpus())
        launch = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", gpus)
        steps += [
            Step(
                "node check",
                50,
                (*launch, "tools/node_check.py"),
                "product, memory, all-reduce",
                table="node check",
            ),
            Step(
                "layouts over NCCL",
                200,
                (PYTHON, "benchmarks/layouts.py", "--losses"),
                "losses against one process; a failure names its group",
                build_answer_timeout(60),
            ),
            Step(
                "collectives",
                60,
                (*launch, "benchmarks/collectives.py"),
                "seconds and GB/s of each collective",
            ),
            Step(
                "step time by layout",
                190,
                (PYTHON, "benchmarks/layouts.py", "--part", "steps", "bubble"),
                "the speed of layouts, and the idle time of pipelines",
            ),
        ]
    return steps


def build_tiny_part(number: int, folder: Path) -> list[Step]:
    """Return the steps of a part at sizes that a CPU computes in seconds."""
    hardware = str(folder / f"part{number}.hardware.yaml")
    launch = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    steps = [Step("machine", 60, (PYTHON, "tests/gpu/machine.py"))]
    if number == 1:
        steps += [
            # A CPU's compiler takes a minute, and is not what a GPU runs.
            build_large_model(
                "7B",
                420,
                "--quick --steps 1 --microbatches 2 --hardware h200 --variant defaults "
                "tensorwise rowwise deterministic plain --watch --cube",
                "",
            ),
            build_step_time(
                "step time, 125M",
                200,
                "--size smallest --shape gpt2 --rounds 1 --steps 1 --contestants trainer "
                "trainer-plain plain hf",
                "",
            ),
            build_step_time(
                "step time, 177M",
                200,
                "--size smallest --shape llama --rounds 1 --steps 1 --contestants trainer hf",
                "",
            ),
            build_peer(60, 40, PEER_STAND_IN, "--tokens 64 --enough 5"),
            build_kernels(60, "copy model --quick", ""),
        ]
    elif number == 2:
        steps += [
            build_tests("correctness", 300, "gpu_core", "", "-k", "equals_the_cpu and gpt2"),
            build_step_time(
                "step time like nanochat",
                200,
                "--size smallest --shape nanochat --rounds 1 --steps 1 --contestants trainer "
                "nanochat",
                "",
            ),
            build_kernels(100, f"copy products attention float8 --quick --hardware {hardware}", ""),
        ]
    elif number == 3:
        steps += [
            build_shares("kernels of a step", 100, "--size smallest --shape gpt2"),
            Step(
                "checkpoint", 100, (PYTHON, "benchmarks/checkpoint.py", "--quick", "--rounds", "1")
            ),
            Step("ranks", 200, (PYTHON, "benchmarks/layouts.py", "--losses", "--quick")),
            build_tests("other tests", 200, "not gpu_core", "", "-k", "generated"),
        ]
    elif number == 4:
        steps += [Step("collectives", 60, (*launch, "benchmarks/collectives.py", "--quick"))]
    return steps


def build_large_model(title: str, seconds: float, arguments: str, answers: str) -> Step:
    """Return a step that measures a model that fills the GPU."""
    command = (PYTHON, "benchmarks/large_model.py", *arguments.split())
    return Step(title, seconds, command, answers, build_answer_timeout(int(seconds / 2)))


def build_kernels(seconds: float, arguments: str, answers: str) -> Step:
    """Return a step that measures kernels. The arguments begin with the parts."""
    command = (PYTHON, "benchmarks/kernels.py", "--part", *arguments.split())
    return Step("kernels", seconds, command, answers)


def build_peer(
    seconds: float, limit: float, script: Path = PEER_SCRIPT, arguments: str = ""
) -> Step:
    """Return a step that runs another trainer's program for `limit` seconds."""
    command = (PYTHON, "benchmarks/peer_script.py", "--script", str(script))
    return Step(
        "modded-nanogpt, 124M",
        seconds,
        (*command, "--seconds", str(limit), *arguments.split()),
        "the steps of modded-nanogpt's program, unchanged",
    )


def build_tests(
    title: str,
    seconds: float,
    mark: str,
    answers: str,
    *more: str,
    path: str = "tests/gpu/test_one_gpu.py",
) -> Step:
    """Return a step that runs the tests of one GPU with a mark."""
    command = (PYTHON, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=short")
    return Step(title, seconds, (*command, "--no-header", "-m", mark, path, *more), answers)


def build_step_time(title: str, seconds: float, arguments: str, answers: str) -> Step:
    """Return a step that compares training steps in bf16, with several microbatches."""
    command = f"benchmarks/step_time.py --precision bf16 --microbatches 4 {arguments}"
    return Step(title, seconds, (PYTHON, *command.split()), answers, build_answer_timeout(90))


def build_answer_timeout(seconds: int) -> tuple[tuple[str, str], ...]:
    """Return the variable that limits how long a benchmark waits for a process.

    If one hangs, the other measurements of the step still have some time.
    """
    return (("WORLD_SECONDS", str(seconds)),)


def build_shares(title: str, seconds: float, arguments: str) -> Step:
    """Return a step that traces two training steps."""
    command = (PYTHON, "benchmarks/kernel_shares.py", *arguments.split())
    return Step(title, seconds, command, "which kernels take the time; the idle share of the GPU")


def query_gpus() -> list[str]:
    """Return the names of the GPUs. torch is not imported, because that may hang."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


def count_gpus() -> int:
    """Return the number of GPUs."""
    return len(query_gpus())


def find_base() -> str | None:
    """Return the name of the hardware file that describes the first GPU."""
    names = query_gpus()
    try:
        from megatron.extras.planner.cost.hardware import find_hardware
    except ImportError:
        # The report shows which package is missing, because its steps fail.
        return None
    hardware = find_hardware(names[0]) if names else None
    return hardware.name if hardware else None


def unpack_wheels(folder: Path) -> str | None:
    """Unpack the carried packages, and return their folder, or None if there are none.

    A wheel with compiled code must be for this platform, and for all versions of Python from some
    version on (abi3), as torchao's is.
    """
    wheels = sorted([*WHEELS.glob("*-none-any.whl"), *WHEELS.glob("*-abi3-*.whl")])
    if not wheels:
        return None
    site = folder / "site"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return str(site)


def set_environment(temporary: Path, *, tiny: bool) -> None:
    """Set what all steps need: paths, temporary files, threads."""
    paths = [str(ROOT), unpack_wheels(temporary), os.environ.get("PYTHONPATH")]
    os.environ.update(
        {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1" if tiny else "2",
            # Everything that a step writes outside of the report is removed at the end.
            "TMPDIR": str(temporary),
            # Steps of a part use kernels again that were compiled before.
            "TORCHINDUCTOR_CACHE_DIR": str(temporary / "inductor"),
            # torch finds a GPU without making a CUDA context, so that processes can be forked.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
    )
    # This process reads hardware files, which needs the carried packages too.
    sys.path[:0] = [path for path in paths if path]


def build_index_helpers() -> None:
    """Compile the C++ index helpers, if they are missing. Without them, NumPy does the same."""
    if not list((ROOT / "megatron/data").glob("_index_helpers*.so")):
        command = [PYTHON, "setup.py", "--quiet", "build_ext", "--inplace"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=ROOT, timeout=60, check=False, stdout=subprocess.DEVNULL)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4), required=True)
    parser.add_argument("--report", type=Path, default=Path("gpu-report"))
    parser.add_argument("--budget", type=float, help="seconds of all steps, by default by part")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run a part, and return the exit code: 0 if all steps passed, 1 if not, 2 without a GPU."""
    arguments = parse_arguments(argv)
    budget = arguments.budget or (TINY_SECONDS if arguments.tiny else BUDGETS[arguments.part])
    end = time.monotonic() + budget
    gpus = query_gpus()
    if not gpus and not arguments.tiny:
        print("error: nvidia-smi lists no GPU; --tiny checks this script on a CPU", file=sys.stderr)
        return 2
    if arguments.part == 4 and len(gpus) < 2 and not arguments.tiny:
        # NCCL refuses two ranks on one GPU.
        print(f"part 4 needs at least two GPUs, and there are {len(gpus)}")
        return 0
    folder = arguments.report.resolve()
    # The files of an earlier run of this part.
    for path in folder.glob(f"part{arguments.part}.*"):
        path.unlink()
    temporary = Path(tempfile.mkdtemp(prefix="first-hour-"))
    try:
        set_environment(temporary, tiny=arguments.tiny)
        build_index_helpers()
        if arguments.tiny:
            os.environ["GPU_TESTS_ON_CPU"] = "1"
            steps = build_tiny_part(arguments.part, folder)
        else:
            steps = build_part(arguments.part, folder, find_base())
        note = {
            "part": arguments.part,
            "tiny": arguments.tiny,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        report = Report(folder, f"part{arguments.part}", steps, note)
        left = end - time.monotonic()
        passed = run_steps(steps, report, left, lambda line: print(line, flush=True))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"the report is in {folder}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
