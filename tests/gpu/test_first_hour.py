"""Tests of the scripts for a machine with GPUs. They need no GPU."""

import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import tyro
from process_states import has_ended

from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/gpu"
SECONDS_OF_A_COMMAND = 600


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    """Yield the modules by name, as the scripts import them."""
    names = ("first_hour", "step_runner", "tables", "results")
    benchmarks = (
        *("kernels", "step_time", "kernel_shares", "large_model", "checkpoint", "layouts"),
        "peer_script",
    )
    before = [*sys.path]
    sys.path[:0] = [str(FOLDER), str(ROOT / "benchmarks")]
    found = {name: importlib.import_module(name) for name in names}
    for name in benchmarks:
        # Another name, because some folders of tests have the names of benchmarks.
        path = ROOT / f"benchmarks/{name}.py"
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        found[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found[name]
        spec.loader.exec_module(found[name])
    yield found
    sys.path[:] = before
    for name in (*names, *(f"benchmark_{name}" for name in benchmarks)):
        sys.modules.pop(name, None)


def make_step(modules: dict[str, Any], title: str, code: str, seconds: float = 30) -> Any:
    """Return a step that runs Python code. `add_row` is defined in it."""
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
    command = (sys.executable, "-S", "-c", f"{start}from results import add_row\n{code}")
    return modules["step_runner"].Step(title, seconds, command)


def run(
    modules: dict[str, Any], folder: Path, steps: list[Any], budget: float = 60
) -> tuple[bool, dict[str, Any]]:
    """Run steps, and return whether they passed, and the report."""
    runner = modules["step_runner"]
    report = runner.Report(folder, "part1", steps, {"date": "now", "tiny": True})
    passed = runner.run_steps(steps, report, budget, lambda line: None)
    return passed, json.loads((folder / "part1.json").read_text())


def test_steps_that_fail_or_hang_do_not_stop_the_next(
    modules: dict[str, Any], tmp_path: Path
) -> None:
    hang = "import subprocess, time; add_row('copy', mib=2)\n"
    # The child must end too. It ignores SIGTERM, as a process that hangs in a driver does.
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    hang += f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
    steps = [
        make_step(modules, "fails", "add_row('copy', mib=1); print('the reason'); sys.exit(3)"),
        make_step(modules, "hangs", hang + "time.sleep(100)", 1.5),
        make_step(modules, "prints", "while True: print('x' * 10000)"),
        make_step(modules, "passes", "add_row('copy', mib=3)"),
    ]
    runner = modules["step_runner"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_END_SECONDS", 1.0)
        passed, report = run(modules, tmp_path, steps)
    assert not passed
    outcomes = report["steps"]
    assert [each["status"] for each in outcomes] == [
        *("failed", "timed out", "too much output", "passed"),
    ]
    assert [[row["mib"] for row in each["rows"]] for each in outcomes] == [[1], [2], [], [3]]
    assert outcomes[0]["exit_code"] == 3
    assert "the reason" in outcomes[0]["tail"]
    assert outcomes[1]["seconds"] < 6
    child_pid = int(outcomes[1]["tail"].split()[-1])
    assert has_ended(child_pid)
    assert (tmp_path / "part1.log").stat().st_size < 8 << 20
    assert not (tmp_path / "part1.rows.jsonl").exists()


def test_printed_lines_become_rows(modules: dict[str, Any], tmp_path: Path) -> None:
    step = make_step(modules, "check", "print('TFLOPs 700'); print('GB/s 400'); sys.exit(1)")
    steps = [dataclasses.replace(step, table="node check")]
    _, report = run(modules, tmp_path, [*steps, make_step(modules, "next", "add_row('copy')")])
    lines = [row["line"] for row in report["steps"][0]["rows"]]
    assert lines == ["TFLOPs 700", "GB/s 400"]
    assert report["steps"][1]["rows"] == [{"table": "copy"}]
    part = modules["tables"].read_part(tmp_path / "part1.json")
    assert "| TFLOPs 700 |" in modules["tables"].make_page([part], ["node check"])


def test_speed_above_the_nominal_one_keeps_the_rows(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = modules["kernels"]
    base = dataclasses.replace(kernels.load_hardware("cpu"), peak_tflops=1e-9)
    (tmp_path / "base.yaml").write_text(kernels.format_hardware(base))
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setenv("BENCHMARK_RESULTS", str(rows))
    words = "kernels.py --quick --part copy products --hardware"
    monkeypatch.setattr(
        sys, "argv",
        [*words.split(), str(tmp_path / "new.yaml"), "--base", str(tmp_path / "base.yaml")],
    )  # fmt: skip
    assert kernels.main() == 1
    found = modules["tables"].read_rows(rows.read_text())
    assert [row["table"] for row in found[:2]] == ["copy", "products"]
    assert found[-1]["table"] == "hardware"
    assert "nominal" in found[-1]["error"]
    assert not (tmp_path / "new.yaml").exists()


def test_rows_of_float8_have_the_cells_of_the_table(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setenv("BENCHMARK_RESULTS", str(rows))
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--quick", "--part", "float8"])
    assert modules["kernels"].main() == 0
    tables = modules["tables"]
    found = tables.read_rows(rows.read_text())
    block = modules["kernels"].TINY
    products, layers = (
        [row for row in found if row["table"] == name] for name in ("float8 products", "float8")
    )
    assert [row["name"] for row in products] == [each.name for each in block]
    # The last row is the sum of the others.
    assert layers[-1]["bf16_ms"] == pytest.approx(sum(row["bf16_ms"] for row in layers[:-1]))
    assert layers[-1]["rowwise_speed"] > 0
    step = {"title": "kernels", "status": "passed", "seconds": 1, "rows": found}
    part = tables.Part("part1", "2026-11-24", True, [step])
    page = tables.make_page([part], ["float8 products", "float8"])
    assert "| - |" not in page
    assert block[0].name in page


def test_the_verdict_about_cudnn_needs_speed_at_all_shapes(modules: dict[str, Any]) -> None:
    kernels = modules["kernels"]
    flash = [(300.0, 5), (310.0, 5)]
    verdicts = [
        kernels.compare_kernels({"flash": flash, "cudnn": cudnn})
        for cudnn in (
            [(600.0, 0), (610.0, 1)],
            # Neither kernel repeats with the same bits on an H200.
            [(600.0, 5), (610.0, 5)],
            [(600.0, 0), (309.0, 0)],
            [(600.0, 0), (0.0, 0)],
        )
    ]
    assert [verdict.partition(".")[0] for verdict in verdicts] == [
        *["cuDNN first: yes"] * 2,
        *["cuDNN first: no"] * 2,
    ]
    assert "0 (flash) and 1 (cudnn)" in verdicts[0]
    assert "faster than flash at 1 of 2 shapes" in verdicts[2]
    numbers = iter(range(100))

    def compute() -> list[torch.Tensor]:
        return [torch.zeros(2), torch.full((2,), float(next(numbers) // 4))]

    assert kernels.count_differing(compute) == 2


def test_rows_of_layouts_have_the_cells_of_the_table(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / "rows.jsonl"))
    head = "| schedule | m | ms | ms / m | idle by the fit | idle by the clock | idle in theory |"
    modules["layouts"].table(head, ["| 1F1B | 2 | 1 / 2 / 3 | 1.0 | 0.3 | - | 0.333 |"], "bubble")
    (row,) = modules["tables"].read_rows((tmp_path / "rows.jsonl").read_text())
    part = modules["tables"].Part("part4", "now", False, [{"rows": [row]}])
    page = modules["tables"].make_page([part], ["bubble"])
    assert "| 1F1B | 2 | 1 / 2 / 3 | 1.0 | 0.3 | - | 0.333 |" in page


def test_a_part_ends_within_its_budget(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules["step_runner"], "_SHORTEST_SECONDS", 0.5)
    steps = [make_step(modules, name, "import time; time.sleep(100)") for name in "ab"]
    start = time.monotonic()
    passed, report = run(modules, tmp_path, steps, budget=1)
    assert not passed
    assert time.monotonic() - start < 8
    assert [each["status"] for each in report["steps"]] == ["timed out", "not started"]


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from step_runner import Report, Step, run_steps
code = "from results import add_row; add_row('copy', mib=1); add_row('copy', mib=2); "
code += "import time; time.sleep(100)"
code = "import sys; sys.path.insert(0, {benchmarks!r}); " + code
quick = "import sys; sys.path.insert(0, {benchmarks!r}); "
quick += "from results import add_row; add_row('copy', mib=0)"
steps = [Step("first", 50, (sys.executable, "-S", "-c", quick))]
steps += [Step("second", 50, (sys.executable, "-S", "-c", code)), Step("third", 50, ("true",))]
note = {{"date": "now", "tiny": False}}
report = Report(Path({report!r}), "part1", steps, note)
run_steps(steps, report, 100, print)
"""


@pytest.mark.parametrize(
    ("number", "statuses"),
    [
        (signal.SIGTERM, ["passed", "interrupted", "not started"]),
        (signal.SIGKILL, ["passed", "killed", "not started"]),
    ],
)
def test_a_part_that_is_killed_leaves_its_rows(
    number: signal.Signals, statuses: list[str], modules: dict[str, Any], tmp_path: Path
) -> None:
    script = SCRIPT.format(
        folder=str(FOLDER), benchmarks=str(ROOT / "benchmarks"), report=str(tmp_path)
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, start_new_session=True
    )
    rows = tmp_path / "part1.rows.jsonl"
    end = time.monotonic() + 60
    while not (rows.exists() and rows.read_text().count("\n") == 3):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(30)
    if number == signal.SIGKILL:
        # A step has a session of its own, so it is still there.
        report = json.loads((tmp_path / "part1.json").read_text())
        assert [step["status"] for step in report["steps"]][1] == "running"
        for pid in _find_sleepers(str(ROOT / "benchmarks")):
            os.kill(pid, signal.SIGKILL)
    part = modules["tables"].read_part(tmp_path / "part1.json")
    assert [step["status"] for step in part.steps] == statuses
    assert [row["mib"] for row in part.get_rows("copy")] == [0, 1, 2]


def _find_sleepers(text: str) -> list[int]:
    """Return the processes without a parent whose command has the text and sleeps."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        # A process that has ended has no command.
        command = " ".join(process.info["cmdline"] or [])
        if "-S" in command and text in command and "time.sleep(100)" in command:
            found.append(process.pid)
    return found


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_limits_are_within_the_time_of_a_command(
    part: int, modules: dict[str, Any], tmp_path: Path
) -> None:
    first_hour = modules["first_hour"]
    steps = first_hour.build_part(part, tmp_path, "h200")
    budget = first_hour.BUDGETS[part]
    assert sum(step.seconds for step in steps) <= budget
    # A step needs some time to end, and the report is copied.
    assert budget <= SECONDS_OF_A_COMMAND - 25
    # 900 s must also suffice for the start of the machine, the copies, and an idle wait.
    assert first_hour.BUDGETS[1] + first_hour.BUDGETS[2] <= 750
    titles = [step.title for step in steps]
    assert len({*titles}) == len(titles)


# A GPU that no hardware file describes has no base.
@pytest.mark.parametrize(("tiny", "base"), [(False, "h200"), (False, None), (True, None)])
def test_programs_take_the_arguments_of_their_steps(
    tiny: bool, base: str | None, modules: dict[str, Any], tmp_path: Path
) -> None:
    first_hour = modules["first_hour"]
    checked = 0
    for part in (1, 2, 3, 4):
        if tiny:
            steps = first_hour.build_tiny_part(part, tmp_path)
        else:
            steps = first_hour.build_part(part, tmp_path, base)
        for step in steps:
            # The peer's script is an argument.
            script = next(each for each in step.command if each.endswith(".py"))
            assert (ROOT / script).is_file()
            name = Path(script).stem
            if script.startswith("benchmarks/") and name in modules:
                own = step.command[step.command.index(script) + 1 :]
                if "--" in own:
                    # What follows are flags of the run.
                    own = own[: own.index("--")]
                tyro.cli(modules[name].Arguments, args=own)
                checked += 1
    assert checked >= 10


@pytest.mark.parametrize("preset", ["llama2-7b", "llama3-3.2b", "llama3-8b"])
def test_variants_of_a_large_model_have_plans(preset: str, modules: dict[str, Any]) -> None:
    large_model = modules["large_model"]
    arguments = dataclasses.replace(large_model.Arguments(), preset=preset)
    for variant in large_model.FLAGS:
        flags = large_model.build_flags(arguments, variant, 8)
        plan = resolve(load_config([*flags.split(), "--data-path", "/tmp/none"]).config, 1)
        plan.raise_on_errors()
        assert plan.config.model.seq_length == 4096


def test_the_model_depends_on_the_memory(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = tmp_path / "nvidia-smi"
    query.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for mib, preset in ((143771, "llama2-7b"), (81559, "llama3-3.2b"), ("none", "llama2-7b")):
        query.write_text(f"#!/bin/sh\necho {mib}\n")
        assert modules["large_model"].choose_preset() == preset


def test_flags_of_a_traced_run_follow_two_dashes(modules: dict[str, Any]) -> None:
    kernel_shares = modules["kernel_shares"]
    words = "--size 1.3b -- --use-torch-compile --attention-backend auto"
    arguments, further = kernel_shares.parse(words.split())
    assert arguments.size == "1.3b"
    assert further == ["--use-torch-compile", "--attention-backend", "auto"]
    # The commands of the page.
    shown = re.findall(
        r"^    python benchmarks/kernel_shares.py (.*?)(?:  .*)?$",
        kernel_shares.__doc__,
        re.MULTILINE,
    )
    assert len(shown) == 3
    for words in shown:
        kernel_shares.parse(words.split())


def run_peer(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, words: str, rows: Path
) -> tuple[int, list[dict[str, Any]]]:
    """Run a peer's script, and return the exit code and the rows."""
    monkeypatch.setenv("BENCHMARK_RESULTS", str(rows))
    monkeypatch.setattr(sys, "argv", ["peer_script.py", *words.split()])
    code = modules["peer_script"].main()
    return code, modules["tables"].read_rows(rows.read_text())


def test_a_peers_script_is_timed_and_ended(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--script {FOLDER}/peer_stand_in.py --seconds 60 --enough 5 --tokens 64"
    code, (row,) = run_peer(modules, monkeypatch, words, tmp_path / "rows.jsonl")
    assert code == 0
    # The first steps are left out. With them, the median would be the same, and the maximum not.
    assert row["ms"] == pytest.approx(50)
    assert row["high_ms"] < 60
    assert 5 <= row["steps"] < 100
    assert row["tokens_per_second"] == pytest.approx(64 / 0.05)
    assert not [p for p in psutil.Process().children() if "peer_stand_in" in " ".join(p.cmdline())]
    page = modules["tables"].make_page(
        [modules["tables"].Part("part1", "now", False, [{"rows": [row]}])], ["peer"]
    )
    assert "| peer_stand_in.py | 1280 | 50 |" in page


def test_a_peers_script_that_fails_or_is_missing_is_reported(
    modules: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "script.py"
    words = f"--script {script} --tokens 64"
    code, (row,) = run_peer(modules, monkeypatch, words, tmp_path / "rows.jsonl")
    assert code == 0
    assert "LEFT OUT" in capsys.readouterr().out
    assert "no copy" in row["error"]
    script.write_text("import sys; sys.exit('no such device')")
    code, rows = run_peer(modules, monkeypatch, words, tmp_path / "rows.jsonl")
    assert code == 1
    assert "no such device" in capsys.readouterr().out
    assert "exit code 1" in rows[-1]["error"]


def test_tables_have_the_medians_and_errors(
    modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"size": "125m", "shape": "gpt2", "precision": "bf16", "microbatches": 4}
    step |= {"tokens": 1000, "tflop": 0.5, "table": "steps", "gib": 1.5}
    step |= {"enqueue_seconds": 0.06}
    rows = [{**step, "contestant": "trainer", "seconds": each} for each in (0.1, 0.5, 0.2)]
    rows += [{**step, "contestant": "hf", "error": "out of memory"}]
    large = {"table": "large model", "microbatches": 8, "tokens_per_second": 11000.0}
    large |= {"seconds": 2.0, "predicted_seconds": {"h200": 2.1}, "mfu": 0.5, "start_seconds": 9.0}
    large |= {
        "model": "llama2-7b",
        "allocated_gib": 130.0,
        "reserved_gib": 135.5,
        "predicted_gib": 131.0,
    }
    rows += [{**large, "variant": "eager"}]
    rows += [{"table": "large model", "variant": "cudnn", "error": "CUDA out of memory | x"}]
    rows += [{"table": "cube", "variant": "defaults", "size": 8192, "tflops": 690.0, "each": []}]
    clocks = {"clocks.sm": ("1980", "1200", "1500"), "power.draw": ("350.00", "699.50", "600.00")}
    clocks |= {"clocks_event_reasons.active": ("0x0", "0x4", "0x4")}
    rows += [{"table": "clocks", "variant": "defaults", "samples": 3, **clocks}]
    rows += [{"table": "one gpu", "name": "gpt2", "losses": 1.5e-6, "norms": 2e-5, "note": ""}]
    outcome = {"title": "all", "status": "passed", "seconds": 3.0, "rows": rows}
    report = {"date": "2026-11-23", "tiny": False, "steps": [outcome]}
    (tmp_path / "part2.json").write_text(json.dumps(report))
    assert modules["tables"].main([str(tmp_path), "--page"]) == 0
    page = capsys.readouterr().out
    row = "| part2 | 125m | gpt2 | bf16 | 4 | trainer | 5000 | 100.0 / 200.0 / 500.0 | 60 | 2500 |"
    assert f"{row} 1.5 | 3 |" in page
    assert "| part2 | 125m | gpt2 | bf16 | 4 | hf | - | - | - | - | out of memory | - |" in page
    assert "| llama2-7b | eager | 8 | 11000 | 0.5 | 9 | 130 | 136 | 131 | h200 +5.0 % |" in page
    assert "| defaults | 8192 | 690 |" in page
    assert "| defaults | 3 | 1200 to 1980 | 350 to 699.5 | 0x0, 0x4 |" in page
    assert "CUDA out of memory / x" in page
    assert "| gpt2 | 1.50e-06 | 2.00e-05 |" in page


RECORDED = ROOT / "tests/fixtures/gpu/2026-11-28-h200"


def test_the_pages_show_the_recorded_run(modules: dict[str, Any]) -> None:
    tables = modules["tables"]
    parts = [tables.read_part(path) for path in sorted(RECORDED.glob("*.json"))]
    assert [part.name for part in parts] == ["part1", "part2"]
    folder = RECORDED.relative_to(ROOT)
    command = f"<!-- output of: python tests/gpu/tables.py {folder} --page -->"
    assert command in (ROOT / "docs/gpu_results.md").read_text()
    assert "### Large models on one GPU" in tables.make_page(parts, tables.PAGE_TABLES)
    # A few numbers of the programs' own output.
    text = tables.make_page(parts, [*tables.MAKERS])
    for cells in (
        "| llama2-7b | defaults | 8 | 12468 | 0.581 |",
        "| part1 | 125m | gpt2 | bf16 | 4 | plain-compiled | 490671 | 133.3 / 133.6 / 134.3 |",
        "| experts | 1.14e-07 | 9.22e-07 |",
        "| 32 | 32 | 128 | 4096 | 1 | cudnn | 533 | 455 | 1 |",
        "| float8 e4m3 rowwise False | 8.70e-04 |",
        "cuDNN first: yes. It is faster than flash at 7 of 7 shapes",
    ):
        assert cells in text


def test_tables_refuse_what_is_no_measurement(
    modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = modules["tables"]
    assert tables.main([str(tmp_path)]) == 1
    assert "part1.json" in capsys.readouterr().err
    report = tmp_path / "part1.json"
    report.write_text('{"date": "now", "tiny": true, "steps": []}')
    assert tables.main([str(tmp_path), "--page"]) == 1
    assert "--tiny" in capsys.readouterr().err
    report.write_text("{")
    assert tables.main([str(tmp_path)]) == 1
    assert "no report" in capsys.readouterr().err


def test_carried_packages_and_the_hardware_are_found(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_hour = modules["first_hour"]
    for name, module in (
        ("carried-1-py3-none-any.whl", "carried_package"),
        # As torchao's wheel: compiled for a platform, and for all versions of Python.
        ("compiled-1-cp310-abi3-manylinux_2_24_x86_64.whl", "compiled_package"),
        ("other-1-cp310-cp310-manylinux_2_24_x86_64.whl", "other_package"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(f"{module}.py", "VALUE = 7\n")
    monkeypatch.setattr(first_hour, "WHEELS", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ})
    first_hour.set_environment(tmp_path / "temporary", tiny=False)
    # The process itself reads hardware files, and its steps have the same packages.
    assert importlib.import_module("carried_package").VALUE == 7
    assert str(tmp_path / "temporary/site") in os.environ["PYTHONPATH"].split(os.pathsep)
    assert importlib.import_module("compiled_package").VALUE == 7
    assert importlib.util.find_spec("other_package") is None
    for name in ("carried_package", "compiled_package"):
        sys.modules.pop(name)
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\necho NVIDIA H200\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert first_hour.find_base() == "h200"


def test_without_a_gpu_the_script_says_so(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine may have a GPU")
    command = ["bash", "tests/gpu/first_hour.sh", "--part", "1", "--report", str(tmp_path / "r")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.full
@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_a_part_runs_at_tiny_sizes(part: int, tmp_path: Path) -> None:
    command = f"bash tests/gpu/first_hour.sh --part {part} --tiny --report {tmp_path}"
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=900)
    report = json.loads((tmp_path / f"part{part}.json").read_text())
    statuses = {step["title"]: step["status"] for step in report["steps"]}
    assert {*statuses.values()} == {"passed"}, f"{statuses}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0
    assert all(step["rows"] for step in report["steps"])
    printed = subprocess.run(
        [sys.executable, "tests/gpu/tables.py", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "### Steps" in printed.stdout
