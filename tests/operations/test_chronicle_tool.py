"""Tests of tools/chronicle.py on tiny runs that were killed, resumed and rolled back."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from tiny_corpus import ROOT, command
from training.runs import SIZES

from megatron.extras.operations.chronicle.charts import POINTS, compute_running_mean, select_points
from megatron.extras.operations.chronicle.goodput import (
    KEPT,
    SAVES,
    STARTS,
    UNDONE,
    WAITING,
    compute_goodput,
)
from megatron.extras.operations.chronicle.history import read_history
from megatron.extras.operations.chronicle.records import (
    PredictedLoss,
    read_energy,
    read_events,
    write_predicted_loss,
)
from megatron.extras.operations.commands import chronicle, rollback
from megatron.extras.operations.monitor.alerts import Alert, Outlets, deliver
from megatron.observe.chronicle import CHRONICLE, append_event

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NOTE = '<script>document.title="owned"</script><img src="http://example.com/x.png">'


def wait_for_iteration(metrics: Path, iteration: int) -> None:
    """Wait until a launch has trained an iteration."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if metrics.is_file() and f'"iteration": {iteration},' in metrics.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"iteration {iteration} was not trained")


@pytest.fixture(scope="module")
def run_folder(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed, resumed, rolled back to 4 and continued."""
    folder = tmp_path_factory.mktemp("chronicle") / "run"
    flags = [
        *SIZES.replace("--eval-interval 1000 --eval-iters 0", "").split(),
        *("--data-path", corpus, "--data-cache-path", str(folder / "cache")),
        *("--save", str(folder), "--load", str(folder), "--split", "9,1,0"),
        *("--eval-interval", "5", "--eval-iters", "1", "--save-interval", "4"),
    ]
    killed = command("pretrain_gpt.py", *flags, "--train-iters", "100000")
    try:
        wait_for_iteration(folder / "metrics.jsonl", 6)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
    newest = int((folder / "latest_checkpointed_iteration.txt").read_text())
    end = str(newest + 8)
    launch(*flags, "--train-iters", end)
    assert rollback.main([str(folder), "--to", str(newest), "--reason", "a spike"]) == 0
    launch(*flags, "--train-iters", end, "--lr", "1e-3", "--override-lr-scheduler")
    assert chronicle.main(["note", str(folder), NOTE]) == 0
    return folder


def launch(*flags: str) -> None:
    """Train in a process of its own."""
    process = command("pretrain_gpt.py", *flags)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def test_abandoned_lineages_are_not_kept(run_folder: Path) -> None:
    history = read_history(run_folder)
    iterations = history.columns["iteration"]
    kept = iterations[history.kept].astype(int).tolist()
    assert kept == list(range(1, len(kept) + 1))
    # The rollback removed eight iterations, and the kill lost at least one.
    assert (~history.kept).sum() >= 8
    assert sorted(set(iterations[~history.kept][-8:])) == kept[-8:]
    assert {found.kept for found in history.evaluations} == {True, False}
    kinds = [event.kind for event in history.events]
    assert kinds.count("start") == 3
    # The killed launch has no stop.
    assert kinds.count("stop") == 2
    assert kinds.index("rollback") < len(kinds) - 1
    assert kinds[-1] == "note"


def test_goodput_divides_the_wall_time(run_folder: Path) -> None:
    history = read_history(run_folder)
    goodput = compute_goodput(history)
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall_seconds)
    steps = history.columns["seconds"]
    assert goodput.seconds[KEPT] == pytest.approx(steps[history.kept].sum())
    assert goodput.seconds[UNDONE] == pytest.approx(steps[~history.kept].sum())
    assert goodput.seconds[SAVES] > 0
    assert goodput.seconds[STARTS] > 0
    # Imports take seconds, and they come before the start of a launch.
    assert goodput.seconds[WAITING] > 1
    assert 0 < goodput.share < 1


def test_text_names_changes_and_interventions(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chronicle.main([str(run_folder)]) == 0
    printed = capsys.readouterr().out
    assert "launches: 3, 1 of them killed or lost" in printed
    assert "goodput:" in printed
    assert "--lr 0.002 -> 0.001" in printed
    assert "reason: a spike" in printed
    assert NOTE in printed


def test_page_is_safe_and_complete_without_a_browser(run_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert chronicle.main([str(run_folder), str(run_folder), "--html", str(page)]) == 0
    text = page.read_text()
    assert "<script>document.title" not in text
    assert "&lt;script&gt;document.title" in text
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", text)


def test_name_of_a_run_becomes_no_html(run_folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(run_folder, named, ignore=shutil.ignore_patterns("global_step*", "cache"))
    page = tmp_path / "report.html"
    assert chronicle.main([str(named), "--html", str(page)]) == 0
    text = page.read_text()
    assert "<img src=x" not in text
    assert "<h1>Report of &lt;img src=x onerror=alert(1)&gt;</h1>" in text


def test_the_title_names_the_run_and_not_its_folder_of_checkpoints(
    run_folder: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    without = shutil.ignore_patterns("global_step*", "cache")
    runs = [tmp_path / "my-run" / "checkpoints", tmp_path / "other" / "ckpt"]
    for run in runs:
        shutil.copytree(run_folder, run, ignore=without)
    assert chronicle.main([str(runs[0]), "--html", str(page)]) == 0
    assert "<title>Report of my-run</title>" in page.read_text()
    assert chronicle.main([*map(str, runs), "--html", str(page)]) == 0
    assert "<title>Report of my-run, other</title>" in page.read_text()
    # Two folders of one run keep their names.
    runs[1] = runs[1].rename(tmp_path / "my-run" / "save")
    assert chronicle.main([*map(str, runs), "--html", str(page)]) == 0
    assert "<title>Report of checkpoints, save</title>" in page.read_text()


def test_runs_of_different_lengths_and_batch_sizes_are_compared(
    run_folder: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.mkdir()
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    first = [record for record in records if record["kind"] == "train"][:3]
    for number, record in enumerate(first):
        record["global_batch_size"] = 2**number
        record["lm_loss"] = float("nan") if number == 1 else record["lm_loss"]
    (short / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in first))
    page = tmp_path / "report.html"
    assert chronicle.main([str(run_folder), str(short), "--html", str(page)]) == 0
    text = page.read_text()
    assert '"name":"short: loss"' in text
    assert f'"name":"{run_folder.name}: loss"' in text


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_browser_draws_the_traces_without_a_request(run_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert chronicle.main([str(run_folder), "--html", str(page)]) == 0
    dom, requests = open_page(page, tmp_path)
    history = read_history(run_folder)
    # Curves in the DOM: six panels with two lineages, and the evaluations.
    assert len(re.findall(r'<path class="(?:kept|abandoned)[^>]* d="M', dom)) >= 12
    # The launch that was killed has recorded no end, so the report adds one event.
    assert len(re.findall(r'<circle class="event', dom)) == len(history.events) + 1
    assert "gradient norm" in dom
    assert "<title>Report of" in dom
    assert requests == []


def open_page(page: Path, folder: Path) -> tuple[str, list[str]]:
    """Return the DOM of a page in headless Chromium, and the URLs that it requested."""
    log = folder / "net.json"
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--disable-component-update", "--no-first-run", f"--user-data-dir={folder}/profile"),
            *("--virtual-time-budget=5000", f"--log-net-log={log}", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    urls = re.findall(r'"url":"((?:https?|wss?)://[^"]*)', log.read_text())
    # Chromium itself looks for updates and dictionaries.
    own = re.compile(r"https?://([a-z0-9-]+\.)*(google\.com|googleapis\.com|gvt1\.com)/")
    return done.stdout, [url for url in urls if own.match(url) is None]


def test_alert_of_a_cron_tool_is_no_sign_of_a_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run was killed after 10 s, started again after two hours, and was killed again."""
    began = datetime(2026, 1, 1, tzinfo=UTC)

    def write(kind: str, second: float, details: dict[str, object]) -> None:
        record = {
            "time": (began + timedelta(seconds=second)).isoformat(),
            "kind": kind,
            "iteration": None,
            "details": details,
        }
        with open(tmp_path / CHRONICLE, "a") as file:
            file.write(json.dumps(record) + "\n")

    with open(tmp_path / "metrics.jsonl", "w") as file:
        for iteration, second in ((1, 5), (2, 10), (3, 7230), (4, 7265)):
            moment = (began + timedelta(seconds=second)).isoformat()
            record = {"kind": "train", "iteration": iteration, "seconds": 5.0, "time": moment}
            file.write(json.dumps(record) + "\n")
    write("start", 0, {})
    write("start", 7200, {})
    before = compute_goodput(read_history(tmp_path)).seconds[WAITING]
    assert before == pytest.approx(7190)
    write("alert", 3600, {"text": "no line for 30 minutes", "source": "monitor"})
    assert compute_goodput(read_history(tmp_path)).seconds[WAITING] == before
    # The last step ended 65 s after the last event of the run. A note comes a day later.
    write("note", 86400, {"text": "node 7 was replaced"})
    assert chronicle.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "It ran from 2026-01-01 00:00 to 2026-01-01 02:01 (UTC)" in printed
    assert "Launches: 2, 1 of them killed or lost, the last one active or killed." in printed
    assert "The end of the last launch" not in printed
    write("stop", 7300, {"reason": "complete"})
    assert chronicle.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "to 2026-01-01 02:01 (UTC)" in printed
    assert "The end of the last launch: " in printed
    assert "active or" not in printed


def test_many_alerts_hide_no_rollback(run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("global_step*", "cache"))
    for number in range(2000):
        append_event(folder / CHRONICLE, "alert", 5, {"text": f"warning {number}."})
    page = tmp_path / "report.html"
    assert chronicle.main([str(folder), "--html", str(page)]) == 0
    text = page.read_text()
    assert '<td class="label">rollback</td>' in text
    # The run had some alerts of its own.
    assert re.search(r"<p>1,7\d\d earlier events of the kind warning are left out", text)
    assert "warning 1699." not in text
    assert "warning 1700." in text


def test_abandoned_evaluation_is_at_its_own_time(run_folder: Path) -> None:
    history = read_history(run_folder)
    abandoned = [each for each in history.evaluations if not each.kept]
    again = {each.iteration: each for each in history.evaluations if each.kept}
    assert abandoned
    for each in abandoned:
        assert each.time < again[each.iteration].time


def test_spike_stays_after_downsampling() -> None:
    values = np.ones(100_000)
    values[54_321] = 9.0
    values[70_000] = np.nan
    chosen = select_points(values)
    assert 54_321 in chosen
    assert 70_000 not in chosen
    assert len(chosen) <= POINTS


def test_running_mean_leaves_out_nan() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert compute_running_mean(values, 2).tolist() == [1.0, 1.0, 3.0, 4.0]
    assert compute_running_mean(values, 100).tolist() == [1.0, 1.0, 2.0, 3.0]


def test_energy_of_launches_is_added(tmp_path: Path) -> None:
    table = tmp_path / "emissions.csv"
    table.write_text(
        "timestamp,run_id,emissions,energy_consumed\n"
        "2026-01-01T10:00:00,a,0.1,1.0\n"
        "2026-01-01T11:00:00,a,0.3,2.0\n"
        "2026-01-01T12:00:00,b,0.2,1.5\n"
        "2026-01-01T13:00"
    )
    use = read_energy([table, tmp_path / "none.csv"])
    assert use is not None
    assert use.kilowatt_hours.tolist() == [1.0, 2.0, 3.5]
    assert use.kilograms[-1] == pytest.approx(0.5)
    assert read_energy([tmp_path / "none.csv"]) is None


@pytest.mark.parametrize("line", ["", '{"kind": "train", "iteration": 1', "not JSON"])
def test_page_of_a_run_without_a_complete_record(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line)
    page = tmp_path / "empty.html"
    assert chronicle.main([str(tmp_path), "--html", str(page)]) == 0
    assert "No iteration was recorded." in page.read_text()


def test_alert_of_a_cron_tool_is_in_the_chronicle_once(tmp_path: Path) -> None:
    outlets = Outlets(main_log=tmp_path / "main_log.txt")
    for _ in range(2):
        deliver([Alert("disk", "the disk is full")], outlets, watched=["disk"], runs=[tmp_path])
    deliver([], outlets, watched=["disk"], runs=[tmp_path, tmp_path / "none"])
    events = read_events(tmp_path / CHRONICLE)
    assert [event.kind for event in events] == ["alert", "recovered"]
    assert events[0].details == {"text": "the disk is full", "source": "monitor"}
    assert not (tmp_path / "none").exists()


def test_event_of_an_unknown_form_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"time": "2026-01-01T00:00:00+00:00", "kind": "node-exclusion", "host": "node7"}'
    (tmp_path / CHRONICLE).write_text(line + "\n")
    assert chronicle.main([str(tmp_path)]) == 0
    assert "host node7" in capsys.readouterr().out


def test_number_that_is_no_time_counts_nothing(tmp_path: Path) -> None:
    """A damaged value must not hide the report of a run, or end its meter of the goodput."""
    start = {"seconds": 10**400, "job_started": math.nan}
    append_event(tmp_path / CHRONICLE, "start", 0, start)
    append_event(tmp_path / CHRONICLE, "stop", 0, {"save_seconds": math.inf})
    goodput = compute_goodput(read_history(tmp_path))
    assert goodput.seconds[SAVES] == 0
    assert 0 <= goodput.seconds[STARTS] < 60
    assert 0 <= goodput.wall_seconds < 60


@pytest.mark.parametrize(
    ("name", "number", "line"),
    [
        (
            CHRONICLE,
            2,
            '{"kind": "start", "time": "2026-01-01T00:00:00+00:00", "details": '
            '{"predicted": {"seconds": BIG, "hardware": "h100", "batch_size": 16}}}',
        ),
        (
            CHRONICLE,
            2,
            '{"kind": "start", "time": "2026-01-01T00:00:00+00:00", "details": '
            '{"data": [{"share": 1.0, "tokens": BIG}]}}',
        ),
        (
            "metrics.jsonl",
            3,
            '{"kind": "train", "iteration": BIG, "time": "2026-01-01T00:00:00+00:00"}',
        ),
    ],
)
def test_line_with_a_number_that_is_too_large_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, number: int, line: str
) -> None:
    time = "2026-01-01T00:00:00+00:00"
    good = {"kind": "train", "iteration": 1, "time": time, "consumed_tokens": 128, "lm_loss": 2.0}
    append_event(tmp_path / CHRONICLE, "start", 0, {"data": [{"share": 1.0, "tokens": 128}]})
    (tmp_path / "metrics.jsonl").write_text(2 * (json.dumps(good) + "\n"))
    with open(tmp_path / name, "a") as file:
        file.write(line.replace("BIG", "1" + 400 * "0") + "\n")
    assert chronicle.main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert f"{tmp_path / name}:{number} is left out" in printed.err
    # The other lines are there.
    assert "training loss: 2.0000" in printed.out
    assert "epochs: 1" in printed.out


@pytest.mark.parametrize(
    "predicted",
    [
        {"seconds": 1.0, "batch_size": []},
        {"seconds": math.inf, "batch_size": 16},
        {"seconds": True, "batch_size": None},
        {"seconds": "1", "batch_size": 16},
    ],
)
def test_prediction_of_another_form_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], predicted: dict
) -> None:
    append_event(tmp_path / CHRONICLE, "start", 0, {"predicted": predicted})
    assert chronicle.main([str(tmp_path)]) == 0
    assert "predicted" not in capsys.readouterr().out


def test_steps_without_a_time_are_not_compared_with_the_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = {"seconds": 2.0, "hardware": "h100", "batch_size": 16}
    append_event(tmp_path / CHRONICLE, "start", 0, {"predicted": predicted})
    rows = [
        {"kind": "train", "time": "2100-01-01T00:00:00+00:00", "global_batch_size": 16, **row}
        for row in ({"iteration": 1, "seconds": 0.0}, {"iteration": 2, "lm_loss": 1.0})
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert chronicle.main([str(tmp_path)]) == 0
    assert "step: 2 s on h100 predicted, not measured yet" in capsys.readouterr().out


@pytest.mark.full
def test_page_of_a_million_iterations_is_below_10_mb(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    began = datetime(2026, 1, 1, tzinfo=UTC)
    with open(folder / "metrics.jsonl", "w") as file:
        for iteration in range(1, 1_000_001):
            record = {
                "kind": "train",
                "iteration": iteration,
                "consumed_samples": 512 * iteration,
                "consumed_tokens": 512 * 2048 * iteration,
                "global_batch_size": 512,
                "learning_rate": 1e-4 * (1 - iteration / 1e6),
                "lm_loss": 2 + 9 / iteration + 0.01 * (iteration % 97),
                "grad_norm": 0.3 + 0.001 * (iteration % 89),
                "seconds": 2.0,
                "tokens_per_second": 5e5 + iteration % 83,
                "tflops": 150.0,
                "mfu": 0.4 + 0.0001 * (iteration % 79),
                "time": (began + timedelta(seconds=2 * iteration)).isoformat(),
            }
            file.write(json.dumps(record) + "\n")
    for number in range(2000):
        append_event(folder / CHRONICLE, "alert", number, {"text": f"warning {number} " * 5})
    page = tmp_path / "long.html"
    assert chronicle.main([str(folder), "--html", str(page)]) == 0
    assert page.stat().st_size < 10_000_000


def test_tool_refuses_a_folder_that_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chronicle.main([str(tmp_path)]) == 2
    assert "--save folder" in capsys.readouterr().err
    assert chronicle.main(["note", str(tmp_path / "none"), "text"]) == 2


def test_script_prints_its_help() -> None:
    process = command(ROOT / "tools" / "chronicle.py", "--help")
    printed, _ = process.communicate()
    assert process.returncode == 0
    assert "--html" in printed


def test_page_of_numbers_that_are_too_large(tmp_path: Path) -> None:
    """Somebody has edited the file, or a run has diverged. JSON has no such integers."""
    rows = [
        {"kind": "train", "iteration": number, "lm_loss": loss, "seconds": 1e308, "mfu": -1e308}
        for number, loss in enumerate((2.0, 1e308, 1e308, -1e308), 1)
    ]
    rows.append({"kind": "validation", "iteration": 4, "lm_loss": 1e308, "name": "validation"})
    lines = [json.dumps({"time": "2026-01-01T00:00:00+00:00", **row}) + "\n" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert chronicle.main([str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "1e+308" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", CHRONICLE, "interventions.jsonl"])
def test_a_record_that_is_no_file_is_named(
    run_folder: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FIFO would be waited for, and a report without it would look complete."""
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert chronicle.main([str(folder)]) != 0
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([4.0, 3.5, 3.05], None),
        # Only the end counts above the range.
        ([4.0, 3.5, 3.2], "iteration 3"),
        ([4.0, 2.8, 2.7], "2.8000, below"),
        ([4.0, 3.5], None),
    ],
)
def test_a_loss_that_leaves_the_predicted_range_is_an_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: list[float], text: str | None
) -> None:
    write_predicted_loss(tmp_path, PredictedLoss(3, 3.0, 2.9, 3.1))
    rows = [
        {"kind": kind, "time": f"2026-01-01T00:00:0{n}+00:00", "iteration": n, **more}
        for n, loss in enumerate(losses, 1)
        for kind, more in (
            ("train", {"lm_loss": 3.0, "seconds": 1.0}),
            ("validation", {"name": "valid", "lm_loss": loss}),
        )
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.html"
    assert chronicle.main([str(tmp_path), "--html", str(page)]) == 0
    assert chronicle.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert ("the predicted range of 2.9000 to 3.1000" in printed) == (text is not None)
    assert text is None or text in printed
    assert "predicted" in page.read_text()
    (tmp_path / "predicted_loss.json").write_text("{}")
    assert chronicle.main([str(tmp_path)]) == 2
    assert "predicted_loss.json is damaged" in capsys.readouterr().err
